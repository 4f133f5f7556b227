"""The registered operators: schemas, fakes, and which backend runs.

Device dispatch is PyTorch's: a CPU key, a CUDA key and a fake. ``impl`` is the one explicit override. Backends are
imported when an operator first runs, so importing lowgmm imports neither triton nor a compiler.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from lowgmm.formats import FLOATS, format_of, get_format, unpack_nibbles
from lowgmm.layer import LayerSpec, Weights
from lowgmm.shapes import UnsupportedError
from lowgmm.validate import check_gmm, check_moe, check_tokens, checked_bounds

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
library.define("quantize_tokens(Tensor x, str format, float? clip, str impl) -> (Tensor, Tensor)", tags=TAGS)


def check_offsets_now(offsets: Tensor, num_rows: int) -> None:
    """With LOWGMM_DEBUG=1, read device offsets back and check their contents. Costs a synchronisation, so it is off
    otherwise."""
    if os.environ.get("LOWGMM_DEBUG", "0") not in ("", "0"):
        checked_bounds(offsets, num_rows)


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
    # Kernels see one layout of scales: [M] and [E, N], float32, contiguous. No-ops in the usual case.
    scales_x = None if scales_x is None else scales_x.reshape(x.shape[0]).float().contiguous()
    scales_w = _flat(scales_w)
    bias = None if bias is None else bias.contiguous()
    if config is not None and impl != "triton":
        raise UnsupportedError(f"gmm: config chooses a GPU tile, but the {impl} backend runs here; leave it out.")
    if impl == "triton" and not on_gpu and os.environ.get("TRITON_INTERPRET", "0") != "1":
        raise UnsupportedError(
            "gmm: impl='triton' on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1 before import."
        )
    if impl == "cpu":
        from lowgmm import cpu

        cpu.gmm(out, x, weights, scales_x, scales_w, offsets, bias, clip)
        return
    fmt = format_of(weights[0].dtype)
    if fmt is not None and x.dtype in FLOATS:
        x, scales_x = _quantize_tokens(x, fmt.activations.name, clip, impl)
    if impl == "reference":
        from lowgmm import reference

        w = unpack_nibbles(weights[1]) if len(weights) > 1 else weights[0]
        out.copy_(reference.gmm(x, w, scales_x, scales_w, offsets, bias=bias))
        return
    from lowgmm.kernels.grouped_mm import grouped_mm
    from lowgmm.tune import TileConfig

    if on_gpu:
        check_offsets_now(offsets, x.shape[0])
    with torch.cuda.device(out.device) if on_gpu else nullcontext():
        tile = None if config is None else TileConfig.parse(config)
        grouped_mm(out, x, weights[0], scales_x, scales_w, offsets.int(), bias, tile)


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
    shape = check_gmm(input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, out_dtype)
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
    check_gmm(input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, output.dtype, output)
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
    up, down = (Weights(w.operands, _flat(w.scales), w.bias) for w in (up, down))
    arguments = (hidden, up, down, topk_ids, topk_weights, spec, scales_h)
    if impl == "auto":
        impl = "triton" if hidden.device.type != "cpu" else "cpu"
    if config is not None and impl != "triton":
        raise UnsupportedError(f"moe_ffn: config chooses GPU kernels, but the {impl} backend runs here; leave it out.")
    if impl == "cpu":
        from lowgmm import cpu

        return cpu.moe_ffn(*arguments)
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


def _flat(scales: Tensor | None) -> Tensor | None:
    """float32 [E, N], contiguous, whether or not scales were kept with a last axis of 1; [E, N, k] of groups as they
    are."""
    if scales is None or (scales.dim() == 3 and scales.shape[2] > 1):
        return None if scales is None else scales.float()
    return scales.reshape(scales.shape[:2]).float().contiguous()


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
    with torch.cuda.device(x.device) if x.device.type != "cpu" else nullcontext():
        return quantize_tokens(x, fmt, clip)


def _quantize_tokens_fake(x: Tensor, format: str, clip: float | None, impl: str) -> tuple[Tensor, Tensor]:
    check_tokens(x, format, clip, impl)
    return x.new_empty(x.shape, dtype=get_format(format).dtype), x.new_empty(x.shape[:1], dtype=torch.float32)


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


_register("gmm", _gmm, _gmm)
_register("gmm_out", _gmm_out, _gmm_out)
_register("moe_ffn", _moe_ffn, _moe_ffn)
_register("quantize_tokens", _quantize_tokens, _quantize_tokens_fake)
