"""Every check of the public operations' arguments."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lowgmm.formats import FLOATS, FORMATS, QuantFormat, format_of, get_format, group_size
from lowgmm.layer import ACTIVATIONS, LAYOUTS, REQUANTIZE, LayerSpec, Weights
from lowgmm.shapes import (
    DtypeError,
    Shaped,
    ShapeError,
    UnsupportedError,
    bind,
    check_device,
    check_dtype,
    is_abstract,
)

IMPLS = ("auto", "reference", "triton")
"""auto: the device's backend. reference: the fp64 oracle. triton: the GPU kernels, on a CPU only under
TRITON_INTERPRET=1."""


MAX_EXACT_K = (2**31 - 1) // 128**2
"""131 071: the largest sum, K · (-128)², must fit INT32."""


def check_impl(op: str, impl: str) -> None:
    if impl not in IMPLS:
        raise UnsupportedError(f"{op}: impl {impl!r} is not one of {', '.join(IMPLS)}.")


def check_gmm(
    x: Tensor,
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
    """Check everything about a gmm call that does not need the tensors' contents; return (M, N)."""
    check_impl("gmm", impl)
    fmt = _check_operands("gmm", "weights", weights, impl)
    grouped = _grouped(fmt, scales_w)
    sizes = bind(
        "gmm",
        input=(x, "M K"),
        weights=(weights[0], "E N K"),
        expert_offsets=(offsets, "E+1"),
        scales_x=(scales_x, "M 1?"),
        scales_w=(scales_w, "E N k" if grouped else "E N 1?"),
        bias=(bias, "E N"),
        output=(output, "M N"),
    )
    if grouped:
        group_size(sizes["K"], sizes["k"])
    if sizes["K"] == 0 or sizes["E"] == 0:
        raise ShapeError(f"gmm: K and E must be at least 1, got K={sizes['K']}, E={sizes['E']}.")
    if fmt is not None and fmt.exact and sizes["K"] > MAX_EXACT_K:
        raise ShapeError(
            f"gmm: K={sizes['K']} is more than {MAX_EXACT_K}, up to which an INT8 sum is sure to fit INT32."
        )
    check_device(
        "gmm",
        input=x,
        weights=weights[0],
        packed_weights=weights[-1],
        scales_x=scales_x,
        scales_w=scales_w,
        expert_offsets=offsets,
        bias=bias,
        output=output,
    )
    _check_gmm_dtypes(x, weights[0], scales_x, scales_w, offsets, bias, clip, out_dtype)
    if output is not None:
        rows, columns = output.stride()
        if output.numel() and (columns != 1 or (output.shape[0] > 1 and rows < output.shape[1])):
            raise ShapeError(
                f"gmm: argument 'output' has strides {output.stride()}, expected rows that do not overlap and "
                f"unit stride along N."
            )
    return sizes["M"], sizes["N"]


def _check_operands(op: str, name: str, operands: list[Tensor], impl: str) -> QuantFormat | None:
    """A QuantTensor's operands (or one tensor) against each other, ``impl`` and the device; returns their format."""
    fmt = format_of(operands[0].dtype)
    four_bits = fmt is not None and fmt.bits == 4
    if four_bits and len(operands) < 2:
        raise DtypeError(
            f"{op}: argument {name!r} is {operands[0].dtype}: 4-bit weights, two to a byte, come as a QuantTensor "
            f"(lowgmm.quantize)."
        )
    packed = len(operands) > 1 and not (four_bits and operands[1].dim() == 3)
    if four_bits and not packed:
        check_dtype(op, name, operands[1], (operands[0].dtype,))
        (E, N, K), found = operands[0].shape, list(operands[1].shape)
        if found != [E, N, K // 2] or K % 2:
            raise ShapeError(f"{op}: {name} of shape [{E}, {N}, {K}] in 4 bits are [E, N, K/2] bytes, got {found}.")
    if packed and impl != "auto":
        raise UnsupportedError(f"{op}: impl={impl!r} needs plain {name}; these were packed for the CPU.")
    return fmt


def _grouped(fmt: QuantFormat | None, scales: Tensor | None) -> bool:
    """Do ``scales`` have an axis of groups?"""
    return fmt is not None and fmt.bits == 4 and scales is not None and scales.dim() == 3


def _check_gmm_dtypes(
    x: Tensor,
    w: Tensor,
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
    out_dtype: torch.dtype,
) -> None:
    quantised = tuple(f.dtype for f in FORMATS.values())
    check_dtype("gmm", "weights", w, (*quantised, *FLOATS))
    check_dtype("gmm", "expert_offsets", offsets, (torch.int32, torch.int64))
    for name, tensor in (("scales_x", scales_x), ("scales_w", scales_w), ("bias", bias)):
        check_dtype("gmm", name, tensor, FLOATS)
    fmt = format_of(w.dtype)
    if fmt is None:
        check_dtype("gmm", "input", x, (w.dtype,), "Unquantised weights need an input of their own dtype.")
        if scales_x is not None or scales_w is not None:
            raise DtypeError(
                f"gmm: scales_x and scales_w belong to quantised operands, but weights are {w.dtype}: pass None."
            )
    else:
        hint = f"With {fmt.name} weights the input is {fmt.activations.name}, or floating point to be quantised here."
        check_dtype("gmm", "input", x, (fmt.activations.dtype, *FLOATS), hint)
        if x.dtype in FLOATS and scales_x is not None:
            raise DtypeError(
                f"gmm: argument 'scales_x' was given for an input of {x.dtype}, quantised per token by this call: pass "
                f"scales_x=None, or quantise first with lowgmm.quantize_tokens."
            )
    dynamic = fmt is not None and x.dtype in FLOATS
    if clip is not None and (not dynamic or not clip > 0):
        raise ShapeError(f"gmm: clip={clip} applies to a float input with quantised weights and must be positive.")
    raw = fmt is not None and fmt.exact and not dynamic and scales_x is scales_w is bias is None
    accepted = (*FLOATS, torch.int32) if raw else FLOATS
    if out_dtype not in accepted:
        raise DtypeError(
            f"gmm: out_dtype is {out_dtype}, expected bfloat16, float16 or float32 (int32, the raw sums, only for int8 "
            f"operands without scales and bias)."
        )


def check_tokens(x: Tensor, format: str, clip: float | None, impl: str) -> None:
    """Everything about a quantize_tokens call."""
    check_impl("quantize_tokens", impl)
    fmt = get_format(format)
    if fmt.activations is not fmt:
        raise UnsupportedError(
            f"quantize_tokens: {format} is a format of weights; the tokens they are multiplied by are "
            f"{fmt.activations.name}."
        )
    check_dtype("quantize_tokens", "x", x, FLOATS)
    bind("quantize_tokens", x=(x, "T K"))
    if clip is not None and not clip > 0:
        raise ShapeError(f"quantize_tokens: argument 'clip' is {clip}, expected a positive threshold or None.")


def check_sizes(sizes: Tensor, offsets: Tensor | None, weights: Tensor) -> None:
    """expert_sizes, against the weights and expert_offsets; contents are compared where that costs no
    synchronisation."""
    bind("gmm", weights=(weights, "E N K"), expert_sizes=(sizes, "E"), expert_offsets=(offsets, "E+1"))
    check_dtype("gmm", "expert_sizes", sizes, (torch.int32, torch.int64))
    if offsets is None:
        return
    device = check_device("gmm", expert_sizes=sizes, expert_offsets=offsets)
    if device.type != "cpu" or torch.compiler.is_compiling() or is_abstract(sizes) or is_abstract(offsets):
        return
    if not bool((offsets.diff() == sizes).all()):
        raise ShapeError(
            f"gmm: expert_sizes {sizes.tolist()} disagree with expert_offsets {offsets.tolist()}, whose steps are "
            f"{offsets.diff().tolist()}: pass only one of them."
        )


def check_moe(
    hidden: Tensor,
    w13: Weights,
    w2: Weights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    spec: LayerSpec,
    scales_h: Tensor | None,
    impl: str,
) -> dict[str, int]:
    """Everything about a moe_ffn call that does not need the tensors' contents; returns the sizes T, H, A, E, I."""
    op = "moe_ffn"
    check_impl(op, impl)
    check_spec(spec)
    rows = "E 2I" if spec.gated else "E I"
    up, down = (_check_operands(op, name, w.operands, impl) for name, w in (("w13", w13), ("w2", w2)))
    sizes = bind(
        op,
        hidden=(hidden, "T H"),
        w13=(w13.operands[0], f"{rows} H"),
        w2=(w2.operands[0], "E H I"),
        topk_ids=(topk_ids, "T A"),
        topk_weights=(topk_weights, "T A"),
        scales_w13=(w13.scales, f"{rows} {'h' if _grouped(up, w13.scales) else '1?'}"),
        scales_w2=(w2.scales, f"E H {'i' if _grouped(down, w2.scales) else '1?'}"),
        bias_w13=(w13.bias, rows),
        bias_w2=(w2.bias, "E H"),
        scales_h=(scales_h, "E"),
    )
    for inner, blocks in (("H", "h"), ("I", "i")):
        if blocks in sizes:
            group_size(sizes[inner], sizes[blocks])
    if 0 in (sizes["H"], sizes["I"], sizes["E"]):
        raise ShapeError(f"{op}: H, I and E must be at least 1, got {sizes}.")
    check_dtype(op, "hidden", hidden, FLOATS)
    check_dtype(op, "topk_ids", topk_ids, (torch.int32, torch.int64))
    check_dtype(op, "topk_weights", topk_weights, FLOATS)
    check_dtype(op, "scales_h", scales_h, FLOATS)
    on: dict[str, Tensor | None] = {"hidden": hidden, "topk_ids": topk_ids, "topk_weights": topk_weights}
    for name, w, inner in (("w13", w13, "H"), ("w2", w2, "I")):
        _check_layer_weights(name, w, hidden.dtype, sizes[inner])
        on |= {name: w.operands[-1], f"scales_{name}": w.scales, f"bias_{name}": w.bias}
    check_device(op, scales_h=scales_h, **on)
    if spec.clip is not None and (w13.scales is None or not spec.clip > 0):
        raise ShapeError(
            f"{op}: clip={spec.clip} applies where hidden is quantised (w13 a QuantTensor) and must be positive."
        )
    if spec.requantize != "token" and w2.scales is None:
        raise ShapeError(f"{op}: requantize={spec.requantize!r} applies to a quantised w2, but w2 is not.")
    if (scales_h is not None) != (spec.requantize == "static"):
        raise ShapeError(f"{op}: scales_h [E] and requantize='static' belong together, got {spec.requantize!r}.")
    return sizes


def check_experts(
    w13: Shaped, w2: Shaped, bias_w13: Tensor | None, bias_w2: Tensor | None, scales_h: Tensor | None, spec: LayerSpec
) -> None:
    """The shapes of a layer's weights against each other, before a token is there."""
    check_spec(spec)
    rows = "E 2I" if spec.gated else "E I"
    bind(
        "MoEExperts",
        w13=(w13, f"{rows} H"),
        w2=(w2, "E H I"),
        bias_w13=(bias_w13, rows),
        bias_w2=(bias_w2, "E H"),
        scales_h=(scales_h, "E"),
    )


def check_spec(spec: LayerSpec) -> None:
    """A layer's options, by themselves."""
    choices = {
        "activation": (spec.activation, (*ACTIVATIONS, "swiglu_oai")),
        "gate_up": (spec.gate_up, LAYOUTS),
        "requantize": (spec.requantize, REQUANTIZE),
    }
    for name, (got, known) in choices.items():
        if got not in known:
            raise UnsupportedError(f"moe_ffn: {name} {got!r} is not one of {', '.join(known)}.")
    if not spec.gated and (spec.activation == "swiglu_oai" or spec.limit is not None):
        raise UnsupportedError("moe_ffn: swiglu_oai and limit need gate and up, but gate_up is 'none'.")
    if spec.alpha is not None and spec.activation != "swiglu_oai":
        raise UnsupportedError(f"moe_ffn: alpha belongs to swiglu_oai, but activation is {spec.activation!r}.")
    if spec.limit is not None and not spec.limit > 0:
        raise ShapeError(f"moe_ffn: limit is {spec.limit}, expected a positive bound or None.")


def _check_layer_weights(name: str, w: Weights, hidden: torch.dtype, inner: int) -> None:
    values, fmt = w.operands[0], format_of(w.operands[0].dtype)
    if fmt is None and w.scales is not None:
        raise DtypeError(
            f"moe_ffn: scales_{name} belong to quantised weights, but {name} is {values.dtype}: pass None."
        )
    if fmt is None or w.scales is None:
        hint = "Quantised weights come as a QuantTensor, which brings their scales (lowgmm.quantize)."
        check_dtype("moe_ffn", name, values, (hidden,), hint)
    elif fmt.exact and inner > MAX_EXACT_K:
        raise ShapeError(f"moe_ffn: {name} sums over {inner}, more than {MAX_EXACT_K}: INT32 could overflow.")
    check_dtype("moe_ffn", f"scales_{name}", w.scales, FLOATS)
    check_dtype("moe_ffn", f"bias_{name}", w.bias, FLOATS)


def checked_bounds(offsets: Tensor, num_rows: int) -> list[int]:
    """The offsets as a list, or a :class:`ShapeError` if they do not cut [0, num_rows] into groups."""
    bounds: list[int] = offsets.tolist()
    if bounds[0] == 0 and bounds[-1] <= num_rows and bounds == sorted(bounds):
        return bounds
    problem = None
    if bounds[0] != 0:
        problem = f"start at {bounds[0]}, expected 0"
    elif bounds[-1] > num_rows:
        problem = f"end at {bounds[-1]}, but input has only {num_rows} rows"
    else:
        falls = next(e for e, (a, b) in enumerate(pairwise(bounds)) if b < a)
        problem = f"fall from {bounds[falls]} to {bounds[falls + 1]} at expert {falls}; they must not decrease"
    raise ShapeError(
        f"gmm: expert_offsets {problem}. Expected the running sum of the expert sizes, [0, s0, s0+s1, …]; "
        f"if these are sizes, pass them as expert_sizes."
    )
