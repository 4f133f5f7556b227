"""The registered operators of expert layers: the layer itself, and routing; in the library of ``ops.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowgmm import ops, replay
from lowgmm.layer import LayerSpec, Weights
from lowgmm.ops import MAX_ACCEPTED, TAGS, Signature, check_triton, library, on_device, register
from lowgmm.plan import MAX_BINS, LayerConfig, LayerProblem, pick, supports
from lowgmm.routing import Router, check_router, check_routing, route, select_experts
from lowgmm.shapes import UnsupportedError, is_abstract
from lowgmm.validate import check_impl, check_moe

library.define(
    "moe_ffn(Tensor hidden, Tensor[] w13, Tensor? scales_w13, Tensor? bias_w13, Tensor[] w2, Tensor? scales_w2, "
    "Tensor? bias_w2, Tensor topk_ids, Tensor topk_weights, Tensor? scales_h, str activation, str gate_up, "
    "float? alpha, float? limit, bool weight_on_input, str requantize, float? clip, str impl, str? config) -> Tensor",
    tags=TAGS,
)
library.define("route(Tensor topk_ids, int num_experts, str impl) -> (Tensor, Tensor, Tensor)", tags=TAGS)
library.define(
    "select_experts(Tensor logits, Tensor? bias, int top_k, str scoring, bool renormalize, int num_groups, "
    "int topk_groups, float scale, str impl) -> (Tensor, Tensor)",
    tags=TAGS,
)


# moe_ffn, its own fake too


def _moe_ffn(*arguments: Any) -> Tensor:
    hidden, w13, scales_w13, bias_w13, w2, *others = arguments
    tensors = (hidden, *w13, scales_w13, bias_w13, *w2, *others[:5])
    return replay.run(_moe_ffn_new, arguments, tensors, (len(w13), *others[5:]))


def _moe_ffn_new(
    hidden: Tensor,
    w13: list[Tensor],
    scales_w13: Tensor | None,
    bias_w13: Tensor | None,
    w2: list[Tensor],
    scales_w2: Tensor | None,
    bias_w2: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor,
    scales_h: Tensor | None,
    activation: str,
    gate_up: str,
    alpha: float | None,
    limit: float | None,
    weight_on_input: bool,
    requantize: str,
    clip: float | None,
    impl: str,
    config: str | None,
) -> Tensor:
    spec = LayerSpec(activation, gate_up, alpha, limit, weight_on_input, requantize, clip)
    up, down = Weights(w13, scales_w13, bias_w13), Weights(w2, scales_w2, bias_w2)
    sizes = _check_once(hidden, up, down, topk_ids, topk_weights, spec, scales_h, impl)
    if is_abstract(hidden) or hidden.numel() == 0 or sizes["A"] == 0:
        return hidden.new_zeros(hidden.shape)
    up, down = _flat(up), _flat(down)
    scales_h = None if scales_h is None else scales_h.float().contiguous()
    arguments = (hidden, up, down, topk_ids, topk_weights, spec, scales_h)
    if impl == "auto":
        impl = "triton" if hidden.device.type != "cpu" else "cpu"
    if config is not None and impl != "triton":
        raise UnsupportedError(f"moe_ffn: config chooses GPU kernels, but the {impl} backend runs here; leave it out.")
    if impl == "cpu":
        from lowgmm import cpu

        return cpu.moe_ffn(*arguments)
    if impl == "triton" and (plan := _layer_config(hidden, up, down, topk_ids, spec, config)) is not None:
        from lowgmm.kernels.run_layer import moe_ffn

        with on_device(hidden.device):
            return moe_ffn(*arguments, plan)
    from lowgmm import compose

    def gmm(
        x: Tensor,
        weights: list[Tensor],
        scales_x: Tensor | None,
        scales_w: Tensor | None,
        offsets: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        return ops.gmm(x, weights, scales_x, scales_w, offsets, bias, None, impl, None, dtype)

    return compose.moe_ffn(
        *arguments, gmm, lambda x, fmt, clip: torch.ops.lowgmm.quantize_tokens(x, fmt.name, clip, impl)
    )


def _flat(w: Weights) -> Weights:
    scales = ops.flat_scales(w.scales, w.operands[0].shape[:2])
    return Weights(w.operands, scales, None if w.bias is None else w.bias.contiguous())


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Shortcut:
    """``moe_ffn`` by a layer whose weights and options stay, for calls that it has :meth:`seen` pass every check.

    Of such a call only the tokens are new: on a CPU a decode step takes tens of µs, less than looking at everything
    again. None where the native code does not compute the layer, or the dispatcher has something to do.
    """

    def __init__(self, w13: Weights, w2: Weights, spec: LayerSpec) -> None:
        self._weights, self._spec = (w13, w2), spec
        self._tensors = (*w13.operands, w13.scales, w13.bias, *w2.operands, w2.scales, w2.bias)
        self._seen: set[Signature] = set()
        self._describe()

    def _describe(self) -> None:
        """For the C code, once."""
        from lowgmm import cpu, native

        self._call: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        up, down = self._weights
        if any(t is not None and t.requires_grad for t in self._tensors) or not cpu.runs_natively(up, down, self._spec):
            return
        layer = native.Layer(_flat(up), _flat(down), self._spec)
        # Whoever writes into the module's scales or biases must find it in the result: no copies of them.
        if [*map(_address, layer.kept)] == [*map(_address, (up.scales, up.bias, down.scales, down.bias))]:
            self._call, self._addresses = layer, [*map(_address, self._tensors)]

    def __call__(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor | None:
        if self._call is None or ops.signature(hidden, topk_ids, topk_weights) not in self._seen:
            return None
        if not ops.plain(hidden, topk_ids, topk_weights):
            return None
        if [*map(_address, self._tensors)] != self._addresses:  # moved in place: to shared memory, by ``.data``, …
            self._seen.clear()
            self._describe()
            return None
        return self._call(hidden, topk_ids, topk_weights)

    def seen(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        if self._call is not None and hidden.numel() and topk_ids.numel():
            if len(self._seen) >= MAX_ACCEPTED:
                self._seen.clear()
            self._seen.add(ops.signature(hidden, topk_ids, topk_weights))


_accepted: dict[Signature, dict[str, int]] = {}
"""Signatures of calls that passed every check, and their sizes."""


def _check_once(
    hidden: Tensor,
    w13: Weights,
    w2: Weights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    spec: LayerSpec,
    scales_h: Tensor | None,
    impl: str,
) -> dict[str, int]:
    """``check_moe``, once per signature: it takes tens of µs, and a decode step has a call for each of its layers."""
    arguments = (hidden, w13, w2, topk_ids, topk_weights, spec, scales_h, impl)
    if type(hidden) is not Tensor:  # a fake tensor: its sizes may be symbols
        return check_moe(*arguments)
    tensors = (hidden, *w13.operands, w13.scales, w13.bias, *w2.operands, w2.scales, w2.bias)
    key = (*ops.signature(*tensors, topk_ids, topk_weights, scales_h), len(w13.operands), spec, impl)
    sizes = _accepted.get(key)
    if sizes is None:
        sizes = check_moe(*arguments)
        if len(_accepted) >= MAX_ACCEPTED:
            _accepted.clear()
        _accepted[key] = sizes
    return sizes


def _layer_config(
    hidden: Tensor, w13: Weights, w2: Weights, topk_ids: Tensor, spec: LayerSpec, config: str | None
) -> LayerConfig | None:
    """How the layer's kernels run this call; None if it runs as a sequence of operations."""
    from lowgmm.gpu import describe

    check_triton("moe_ffn", hidden.device)
    (num_experts, width, inner), dtype = w2.operands[0].shape, w2.operands[0].dtype
    (num_tokens, top_k), gpu = topk_ids.shape, describe(hidden.device)
    values = (w13.operands[0], w2.operands[0])
    problem = LayerProblem(
        *(num_tokens, top_k, num_experts, width, inner, dtype, spec.requantize, spec.gate_up),
        h_size=2 if hidden.dtype == torch.bfloat16 else 4,
        aligned=all(v.data_ptr() % 16 == 0 or not v.is_contiguous() for v in values),
    )
    why = "w13 and w2 are of different dtypes." if w13.operands[0].dtype != dtype else None
    if config is None:
        return pick(problem, gpu) if why is None else None
    forced = LayerConfig.parse(config)
    why = why or supports(problem, forced, gpu)
    if why is not None:
        raise UnsupportedError(f"moe_ffn: config {config} cannot run here: {why}")
    return forced


# routing


def _route(topk_ids: Tensor, num_experts: int, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    check_impl("route", impl)
    check_routing(topk_ids, num_experts)
    if num_experts > MAX_BINS and impl == "triton":
        raise UnsupportedError(
            f"route: num_experts={num_experts} is more than the {MAX_BINS} that impl='triton' sorts."
        )
    if impl == "reference" or (impl == "auto" and topk_ids.device.type == "cpu") or num_experts > MAX_BINS:
        r = route(topk_ids, num_experts)
        return r.order, r.inverse, r.offsets
    check_triton("route", topk_ids.device)
    from lowgmm.kernels.route import sort

    with on_device(topk_ids.device):
        return sort(topk_ids, num_experts)


def _route_fake(topk_ids: Tensor, num_experts: int, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    check_impl("route", impl)
    check_routing(topk_ids, num_experts)
    rows = topk_ids.shape[0] * topk_ids.shape[1]
    order, inverse = (topk_ids.new_empty(rows, dtype=torch.int64) for _ in range(2))
    return order, inverse, topk_ids.new_empty(num_experts + 1, dtype=torch.int32)


def _select_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    topk_groups: int,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    check_impl("route", impl)
    router = Router(top_k, scoring, renormalize, num_groups, topk_groups, scale)
    check_router(logits, router, bias)
    if is_abstract(logits):
        shape = (logits.shape[0], top_k)
        return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)
    if impl == "reference" or (impl == "auto" and logits.device.type == "cpu"):
        return select_experts(logits, router, bias)
    check_triton("route", logits.device)
    from lowgmm.kernels import route as kernels

    with on_device(logits.device):
        return kernels.select_experts(logits, router, bias)


def moe_ffn(*arguments: Any) -> Tensor:
    """``torch.ops.lowgmm.moe_ffn``; without the dispatcher where that would only call :func:`_moe_ffn`."""
    hidden, w13, scales_w13, bias_w13, w2, *others = arguments
    tensors = (hidden, *w13, scales_w13, bias_w13, *w2, *others[:5])
    if ops.quiet() and (known := replay.again(_moe_ffn_new, tensors, (len(w13), *others[5:]))) is not None:
        return known
    if ops.plain(*tensors):
        return _moe_ffn(*arguments)
    ops.refuse_tangents("moe_ffn", *tensors)
    result: Tensor = torch.ops.lowgmm.moe_ffn(*arguments)
    return result


register("moe_ffn", _moe_ffn, _moe_ffn)
register("route", _route, _route_fake)
register("select_experts", _select_experts, _select_experts)
