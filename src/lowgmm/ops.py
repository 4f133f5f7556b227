"""The registered operators: schemas, fakes, and which backend runs.

Device dispatch is PyTorch's: a CPU key, a CUDA key and a fake. ``impl`` is the one explicit override. Backends are
imported when an operator first runs, so importing lowgmm imports neither triton nor a compiler.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from lowgmm.formats import FLOATS, format_of, get_format, unpack_nibbles
from lowgmm.layer import LayerSpec, Weights
from lowgmm.plan import MAX_BINS, LayerConfig, LayerProblem
from lowgmm.plan import pick as pick_layer
from lowgmm.plan import supports as supports_layer
from lowgmm.routing import Router, check_router, check_routing, route, select_experts
from lowgmm.shapes import UnsupportedError, check_no_overlap
from lowgmm.tune import TileConfig
from lowgmm.validate import check_gmm, check_impl, check_moe, check_tokens, checked_bounds

OPERANDS = (
    "Tensor input, Tensor[] weights, Tensor? scales_x, Tensor? scales_w, Tensor expert_offsets, Tensor? bias, "
    "float? clip, str impl, str? config"
)

library = torch.library.Library("lowgmm", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
library.define(f"gmm({OPERANDS}, ScalarType out_dtype) -> Tensor", tags=TAGS)
library.define(f"gmm_out({OPERANDS}, Tensor(a!) output) -> ()", tags=TAGS)
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
library.define("quantize_tokens(Tensor x, str format, float? clip, str impl) -> (Tensor, Tensor)", tags=TAGS)


def check_offsets_now(offsets: Tensor, num_rows: int) -> None:
    """With LOWGMM_DEBUG=1, read device offsets back and check their contents. Costs a synchronisation, so it is off
    otherwise."""
    if os.environ.get("LOWGMM_DEBUG", "0") not in ("", "0"):
        checked_bounds(offsets, num_rows)


# What a call costs on the host: a grouped matmul in decode takes 30 to 200 µs, and nothing may keep a GPU waiting that
# long. Three things were the bulk of it, and each has a short way round here: the dispatcher (12 µs), checks of
# shapes that were checked before (10 µs), and conversions that convert nothing (3 µs).

Signature = tuple[object, ...]
_accepted: dict[Signature, tuple[int, int]] = {}
"""Signatures of calls that passed every check, and their (M, N)."""
MAX_ACCEPTED = 4096


def plain(*tensors: Tensor | None) -> bool:
    """Would the dispatcher do nothing but call us? True for ordinary tensors that nobody traces, compiles, transforms,
    or takes gradients of."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
        or torch._C._autograd._profiler_enabled()
    ):
        return False
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and (type(t) not in ORDINARY or not (t.is_cuda or t.is_cpu) or (grad and t.requires_grad)):
            return False
    return True


ORDINARY = (Tensor, torch.nn.Parameter)


def _check_once(
    input: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
    impl: str,
    out_dtype: torch.dtype,
    output: Tensor | None = None,
) -> tuple[int, int]:
    """``check_gmm``, but of what depends only on shapes, dtypes and devices once: a signature that passed passes."""
    if type(input) is not Tensor:  # a fake tensor: its sizes may be symbols
        return check_gmm(input, weights, scales_x, scales_w, offsets, bias, clip, impl, out_dtype, output)
    tensors = (input, *weights[:2], weights[-1], scales_x, scales_w, offsets, bias, output)
    seen = [None if t is None else (t.shape, t.dtype, t.device) for t in tensors]
    key = (*seen, len(weights), clip, impl, out_dtype, None if output is None else output.stride())
    shape = _accepted.get(key)
    if shape is None:
        shape = check_gmm(input, weights, scales_x, scales_w, offsets, bias, clip, impl, out_dtype, output)
        if len(_accepted) >= MAX_ACCEPTED:
            _accepted.clear()
        _accepted[key] = shape
    elif output is not None:
        check_no_overlap(
            "gmm", output, input=input, weights=weights[0], scales_x=scales_x, scales_w=scales_w, bias=bias
        )
    return shape


@functools.cache
def _triton_backend() -> ModuleType:
    """The kernels, imported when an operator first needs them."""
    from lowgmm.kernels import grouped_mm

    return grouped_mm


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one, where it is not already (setting it costs microseconds)."""
    if device.type == "cpu" or torch._C._cuda_getDevice() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def _row(scales: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Scales as kernels see them: float32, contiguous, without a last axis of 1. The usual case is that they are.

    An axis of groups stays, in whatever layout.
    """
    if scales is not None and scales.dim() > len(shape) and scales.shape[-1] > 1:
        return scales.float()
    if scales is None or (scales.dtype == torch.float32 and scales.dim() == len(shape) and scales.is_contiguous()):
        return scales
    return scales.reshape(shape).float().contiguous()


# gmm and gmm_out serve as their own fakes: the same checks, and no work on tensors without data.


def _gmm_into(
    out: Tensor,
    x: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
    impl: str,
    config: str | None,
) -> None:
    on_gpu = out.device.type != "cpu"
    if impl == "auto":
        impl = "triton" if on_gpu else "cpu"
    if not on_gpu and impl != "triton":
        checked_bounds(offsets, x.shape[0])
    if out.numel() == 0:
        return
    scales_x, scales_w = _row(scales_x, (x.shape[0],)), _row(scales_w, (weights[0].shape[0], out.shape[1]))
    bias = None if bias is None else bias.contiguous()
    if config is not None and impl != "triton":
        raise UnsupportedError(f"gmm: config chooses a GPU tile, but the {impl} backend runs here; leave it out.")
    if impl == "triton":
        check_interpreter("gmm", out.device)
    if impl == "cpu":
        from lowgmm import cpu

        cpu.gmm(out, x, weights, scales_x, scales_w, offsets, bias, clip)
        return
    if x.dtype in FLOATS and (fmt := format_of(weights[0].dtype)) is not None:
        x, scales_x = _quantize_tokens(x, fmt.activations.name, clip, impl)
    if impl == "reference":
        from lowgmm import reference

        w = unpack_nibbles(weights[1]) if len(weights) > 1 else weights[0]
        out.copy_(reference.gmm(x, w, scales_x, scales_w, offsets, bias=bias))
        return
    if on_gpu:
        check_offsets_now(offsets, x.shape[0])
    tile = None if config is None else TileConfig.parse(config)
    with on_device(out.device):
        _triton_backend().grouped_mm(out, x, weights[0], scales_x, scales_w, offsets.int(), bias, tile)


def _gmm(
    input: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    expert_offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
    impl: str,
    config: str | None,
    out_dtype: torch.dtype,
) -> Tensor:
    shape = _check_once(input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, out_dtype)
    out = input.new_empty(shape, dtype=out_dtype)
    if not isinstance(out, FakeTensor):
        _gmm_into(out, input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, config)
    return out


def _gmm_out(
    input: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    expert_offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
    impl: str,
    config: str | None,
    output: Tensor,
) -> None:
    _check_once(input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, output.dtype, output)
    if not isinstance(output, FakeTensor):
        _gmm_into(output, input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, config)


# moe_ffn, its own fake too


def _moe_ffn(
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
    sizes = check_moe(hidden, up, down, topk_ids, topk_weights, spec, scales_h, impl)
    if isinstance(hidden, FakeTensor) or hidden.numel() == 0 or sizes["A"] == 0:
        return hidden.new_zeros(hidden.shape)
    up, down = (
        Weights(w.operands, None if w.scales is None else _row(w.scales, tuple(w.scales.shape[:2])), w.bias)
        for w in (up, down)
    )
    arguments = (hidden, up, down, topk_ids, topk_weights, spec, scales_h)
    if impl == "auto":
        impl = "triton" if hidden.device.type != "cpu" else "cpu"
    if config is not None and impl != "triton":
        raise UnsupportedError(f"moe_ffn: config chooses GPU kernels, but the {impl} backend runs here; leave it out.")
    if impl == "cpu":
        from lowgmm import cpu

        return cpu.moe_ffn(*arguments)
    if impl == "triton" and (plan := _layer_config(*arguments, config)) is not None:
        from lowgmm.kernels.run_layer import moe_ffn

        with torch.cuda.device(hidden.device) if hidden.device.type != "cpu" else nullcontext():
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
        return _gmm(x, weights, scales_x, scales_w, offsets, bias, None, impl, None, dtype)

    return compose.moe_ffn(*arguments, gmm, lambda x, fmt, clip: _quantize_tokens(x, fmt.name, clip, impl))


def _layer_config(
    hidden: Tensor,
    w13: Weights,
    w2: Weights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    spec: LayerSpec,
    scales_h: Tensor | None,
    config: str | None,
) -> LayerConfig | None:
    """How the layer's kernels run this call; None if it runs as a sequence of operations."""
    from lowgmm.gpu import describe

    check_interpreter("moe_ffn", hidden.device)
    (num_experts, width, inner), dtype = w2.operands[0].shape, w2.operands[0].dtype
    (num_tokens, top_k), gpu = topk_ids.shape, describe(hidden.device)
    problem = LayerProblem(num_tokens, top_k, num_experts, width, inner, dtype, spec.requantize, spec.gate_up)
    why = "w13 and w2 are of different dtypes." if w13.operands[0].dtype != dtype else None
    if config is None:
        return pick_layer(problem, gpu) if why is None else None
    forced = LayerConfig.parse(config)
    why = why or supports_layer(problem, forced, gpu)
    if why is not None:
        raise UnsupportedError(f"moe_ffn: config {config} cannot run here: {why}")
    return forced


def check_interpreter(op: str, device: torch.device) -> None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        raise UnsupportedError(
            f"{op}: impl='triton' on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1 before import."
        )


# quantize_tokens


def _quantize_tokens(x: Tensor, format: str, clip: float | None, impl: str) -> tuple[Tensor, Tensor]:
    check_tokens(x, format, clip, impl)
    fmt = get_format(format)
    if impl == "reference":
        from lowgmm.quant import quantize_rows

        return quantize_rows(x, fmt, clip)
    if impl == "auto" and x.device.type == "cpu":
        from lowgmm import cpu

        return cpu.quantize_tokens(x, fmt, clip)
    from lowgmm.gpu import describe
    from lowgmm.kernels.quantize import quantize_tokens

    gpu = describe(x.device)
    if (why := gpu.lacks(fmt)) is not None:
        raise UnsupportedError(f"quantize_tokens: {why}")
    if gpu.fnuz and not fmt.exact:  # the kernel would need to store e4m3fn, which that hardware cannot make
        from lowgmm.quant import quantize_rows

        return quantize_rows(x, fmt, clip)
    with on_device(x.device):
        return quantize_tokens(x, fmt, clip)


def _quantize_tokens_fake(x: Tensor, format: str, clip: float | None, impl: str) -> tuple[Tensor, Tensor]:
    check_tokens(x, format, clip, impl)
    return x.new_empty(x.shape, dtype=get_format(format).dtype), x.new_empty(x.shape[:1], dtype=torch.float32)


# routing


def _route(topk_ids: Tensor, num_experts: int, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    check_impl("route", impl)
    check_routing(topk_ids, num_experts)
    if impl == "reference" or (impl == "auto" and topk_ids.device.type == "cpu") or num_experts > MAX_BINS:
        r = route(topk_ids, num_experts)
        return r.order, r.inverse, r.offsets
    check_interpreter("route", topk_ids.device)
    from lowgmm.kernels.route import sort

    with torch.cuda.device(topk_ids.device) if topk_ids.device.type != "cpu" else nullcontext():
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
    if isinstance(logits, FakeTensor):
        shape = (logits.shape[0], top_k)
        return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)
    if impl == "reference" or (impl == "auto" and logits.device.type == "cpu"):
        return select_experts(logits, router, bias)
    check_interpreter("route", logits.device)
    from lowgmm.kernels import route as kernels

    with torch.cuda.device(logits.device) if logits.device.type != "cpu" else nullcontext():
        return kernels.select_experts(logits, router, bias)


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients (out= variants refuse operands that need one) and autocast (it would lower the FP32 sums)."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        device = args[0].device.type
        with torch.no_grad():
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return function(*args)
            return function(*args)

    return run


def _register(name: str, function: Any, fake: Any) -> None:
    function = _plainly(function)
    for key in ("CPU", "MkldnnCPU", "CUDA"):  # a packed weight's key outranks CPU's
        library.impl(name, function, key)
    torch.library.register_fake(f"lowgmm::{name}", fake, lib=library)


def gmm(*arguments: Any) -> Tensor:
    """``torch.ops.lowgmm.gmm``; without the dispatcher where that would only call :func:`_gmm`."""
    x, weights, scales_x, scales_w, offsets, bias, *_ = arguments
    if plain(x, weights[0], scales_x, scales_w, offsets, bias):
        return _gmm(*arguments)
    result: Tensor = torch.ops.lowgmm.gmm(*arguments)
    return result


def gmm_out(*arguments: Any) -> None:
    """``torch.ops.lowgmm.gmm_out``, likewise."""
    x, weights, scales_x, scales_w, offsets, bias, *_, output = arguments
    if plain(x, weights[0], scales_x, scales_w, offsets, bias, output):
        _gmm_out(*arguments)
    else:
        torch.ops.lowgmm.gmm_out(*arguments)


_register("gmm", _gmm, _gmm)
_register("gmm_out", _gmm_out, _gmm_out)
_register("moe_ffn", _moe_ffn, _moe_ffn)
_register("route", _route, _route_fake)
_register("select_experts", _select_experts, _select_experts)
_register("quantize_tokens", _quantize_tokens, _quantize_tokens_fake)
