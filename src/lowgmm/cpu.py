"""The CPU backend: one native call for packed INT8 and INT4 weights, torch's matrix products by expert for the rest.

Packed weights run in ``native/`` where that was built for this CPU. Else INT8 runs in oneDNN with *unsigned*
activations: without AMX, signed ones take oneDNN's reference path (67 ms instead of 0.7 ms for a 4096²
product, torch 2.13). So activations are stored as x + 128 with zero point 128, which oneDNN corrects for exactly. FP8
has no CPU instruction to run on: its weights are widened to FP32 one expert at a time, which is slow.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lowgmm import compose, native
from lowgmm.formats import INT8, Packed, QuantFormat, QuantTensor, by_channels, format_of, group_size, unpack_nibbles
from lowgmm.layer import LayerSpec, Weights
from lowgmm.quant import quantize_rows
from lowgmm.shapes import ShapeError, UnsupportedError
from lowgmm.validate import checked_bounds

ZERO_POINT = 128

MIN_ROWS = 4
"""oneDNN reads weights faster with 4 rows than with 1 to 3 (574 against 659 µs, 4096², 2 cores of a Zen 4): small
groups are padded."""

QUANTIZE_ROWS = 64
"""Rows quantised at a time, so that the passes over them stay in the cache."""


def pack(q: QuantTensor) -> QuantTensor:
    """INT8 or INT4 weights in the form that this CPU multiplies fastest; the result does not keep ``q.values`` alive.

    Without the native code INT4 weights stay as they are, and INT8 ones on a CPU where oneDNN's sums are not exact.

    >>> import torch
    >>> from lowgmm import quantize
    >>> packed = pack(quantize(torch.randn(2, 16, 32), "int8"))
    >>> packed.values is None, packed.shape
    (True, torch.Size([2, 16, 32]))
    """
    if q.values is None:
        return q
    if q.format.activations is not INT8 or q.device.type != "cpu":
        raise UnsupportedError(
            f"pack: the CPU backend packs int8 and int4 weights on the CPU, got {q.format.name} on {q.device}."
        )
    stand_in, scales = q.values.new_empty(1).expand(q.shape), q.scales
    if native.library() is not None:
        packed = Packed(stand_in, (native.pack(q.values, q.format.bits),), _unpack_native, pack)
        scales = by_channels(scales) if scales.dim() == 3 else scales
    elif q.format is INT8 and onednn_is_exact():
        blocked = tuple(torch.ops.onednn.qlinear_prepack(_dense(w), None) for w in q.values)
        packed = Packed(stand_in, blocked, _unpack_onednn, pack)
    else:
        return q
    return QuantTensor(None, scales, q.format, packed)


def int8_backend() -> str:
    """What multiplies packed INT8 weights on this CPU, in words."""
    if native.library() is not None:
        return native.explain()
    how = "oneDNN, one call per expert" if onednn_is_exact() else "float32 products (oneDNN's INT8 sums saturate here)"
    return f"{how}: {native.explain()}"


def _unpack_native(p: Packed) -> Tensor:
    _, N, K = p.stand_in.shape
    return native.unpack(p.parts[0], N, K, 8 if p.stand_in.dtype == torch.int8 else 4)


def _unpack_onednn(p: Packed) -> Tensor:
    return torch.stack([w.to_dense().T for w in p.parts])


def quantize_tokens(x: Tensor, fmt: QuantFormat, clip: float | None) -> tuple[Tensor, Tensor]:
    """As ``quant.quantize_rows`` defines it."""
    if fmt is INT8 and x.numel() and native.library() is not None:
        return native.quantize_tokens(x, clip)
    return quantize_rows(x, fmt, clip)


def gmm(
    out: Tensor,
    x: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
) -> None:
    """Fill ``out [M, N]``. ``weights`` are a QuantTensor's operands, or [w [E, N, K]]; a float ``x`` is quantised if
    they are."""
    if _is_native(weights):
        if not native.gmm(out, x, weights, scales_x, scales_w, offsets, bias, clip):
            checked_bounds(offsets, x.shape[0])  # says why
            raise ShapeError("gmm: expert_offsets changed while they were read.")
        return
    bounds = checked_bounds(offsets, x.shape[0])
    if bounds[-1] < x.shape[0]:
        out[bounds[-1] :].zero_()
    groups = [(e, a, b) for e, (a, b) in enumerate(pairwise(bounds)) if b > a]
    if len(weights) > 1 and weights[1].is_mkldnn:
        _gmm_onednn(out, x, weights[1:], scales_x, scales_w, groups, bias, clip)
        return
    w = weights[-1]
    fmt = format_of(w.dtype)
    if fmt is not None and x.dtype.is_floating_point and x.dtype != w.dtype:
        x, scales_x = quantize_tokens(x, fmt.activations, clip)
    for e, a, b in groups:
        matrix = unpack_nibbles(w[e]) if fmt is not None and fmt.bits == 4 else w[e]
        plain = scales_x is None and scales_w is None
        if plain and bias is not None and x.dtype == w.dtype == out.dtype == bias.dtype:
            out[a:b] = torch.nn.functional.linear(x[a:b], matrix, bias[e])  # one rounding, behind the bias
            continue
        if scales_w is not None and scales_w.dim() == 3:
            y = _grouped_product(x[a:b], matrix, scales_w[e])
        else:
            y = _product(x[a:b], matrix, out.dtype if bias is None else torch.float32)
            y = y if scales_w is None else y.float().mul_(scales_w[e])
        if scales_x is not None:
            y = y.float().mul_(scales_x[a:b, None])
        if bias is not None:
            y = y + bias[e]
        out[a:b] = y


def moe_ffn(
    hidden: Tensor,
    w13: Weights,
    w2: Weights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    spec: LayerSpec,
    scales_h: Tensor | None,
) -> Tensor:
    """[T, H] in ``hidden``'s dtype: ``lowgmm.moe_ffn`` of checked arguments."""
    if runs_natively(w13, w2, spec):
        return native.Layer(w13, w2, spec)(hidden, topk_ids, topk_weights)

    def multiply(
        x: Tensor,
        weights: list[Tensor],
        scales_x: Tensor | None,
        scales_w: Tensor | None,
        offsets: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        out = torch.empty(x.shape[0], weights[0].shape[1], dtype=dtype, device="cpu")
        if out.numel():
            gmm(out, x, weights, scales_x, scales_w, offsets, bias, None)
        return out

    return compose.moe_ffn(hidden, w13, w2, topk_ids, topk_weights, spec, scales_h, multiply, quantize_tokens)


def runs_natively(w13: Weights, w2: Weights, spec: LayerSpec) -> bool:
    """Does one native call compute the layer?"""
    plain = spec.gate_up == "concatenated" and not spec.weight_on_input and spec.requantize == "token"
    return plain and _is_native(w13.operands) and _is_native(w2.operands)


def _product(x: Tensor, w: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``x [m, K] @ w [N, K].T`` in INT32 for INT8, else in FP32 unless operands and result share a dtype."""
    if x.dtype == torch.int8:
        return _int_mm(x, w)
    if x.dtype == w.dtype == out_dtype:
        return x @ w.T
    return x.float() @ w.float().T


def _is_native(operands: list[Tensor]) -> bool:
    """Packed by :func:`pack` for the native code."""
    return len(operands) == 2 and operands[1].dim() == 4 and not operands[1].is_mkldnn


def _grouped_product(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """``Σ_g (x[:, g] @ w[:, g].T) · scales[:, g]`` for int8 x [m, K], w [N, K]: INT32 in a group, FP32 across groups,
    in K order."""
    y, width = None, group_size(x.shape[1], scales.shape[1])
    for g in range(scales.shape[1]):
        columns = slice(g * width, (g + 1) * width)
        part = _int_mm(x[:, columns].contiguous(), w[:, columns].contiguous()).float().mul_(scales[:, g])
        y = part if y is None else y.add_(part)
    assert y is not None
    return y


@functools.cache
def onednn_is_exact() -> bool:
    """Does oneDNN sum INT8 products in INT32 here? Without VNNI it adds pairs of them in 16 bits, which saturate."""
    largest = torch.full((4, 64), 127, dtype=torch.int8, device="cpu")
    return bool((torch._int_mm(largest, largest.T) == 64 * 127 * 127).all())


EXACT_IN_FLOAT32 = 1 << 10
"""So many products of INT8 numbers have a sum that is exact in float32."""


def _int_mm(x: Tensor, w: Tensor) -> Tensor:
    """torch._int_mm of operands that it gets right: it takes a stride of 0 at its word, and is wrong at K = 1."""
    if not onednn_is_exact():
        y = torch.zeros(x.shape[0], w.shape[0], dtype=torch.int32, device="cpu")
        for k in range(0, x.shape[1], EXACT_IN_FLOAT32):
            part = slice(k, k + EXACT_IN_FLOAT32)
            y += (x[:, part].float() @ w[:, part].float().T).int()
        return y
    if x.shape[1] == 1:
        x, w = (torch.nn.functional.pad(t, (0, 1)) for t in (x, w))
    return torch._int_mm(_dense(x), _dense(w).T)


def _dense(t: Tensor) -> Tensor:
    """A matrix with strides [columns, 1]: asked, because a [1, K] slice of a broadcast counts as contiguous."""
    return t if t.stride() == (t.shape[1], 1) else t.clone(memory_format=torch.contiguous_format)


def _gmm_onednn(
    out: Tensor,
    x: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    groups: list[tuple[int, int, int]],
    bias: Tensor | None,
    clip: float | None,
) -> None:
    if not out.dtype.is_floating_point:
        raise UnsupportedError(
            "gmm: weights packed for oneDNN give scaled results only (it converts the INT32 sum to FP32 itself). "
            "Pass plain [E, N, K] weights for INT32 output."
        )
    n_size = out.shape[1]
    unsigned, scales = _to_unsigned(x, scales_x, clip)
    on_cpu: dict[str, Any] = {"device": "cpu"}  # whatever the caller's default device and dtype are
    ones = torch.ones(n_size, dtype=torch.float32, **on_cpu)
    zeros = torch.zeros(n_size, dtype=torch.int64, **on_cpu)
    linear = torch.ops.onednn.qlinear_pointwise.default
    channel = scales_w if scales_w is not None else ones.expand(len(weights), n_size)
    for e, a, b in groups:
        # A group of fewer than MIN_ROWS rows computes its neighbours' rows too and drops them: cheaper than a copy.
        rows = unsigned[a : max(b, a + MIN_ROWS)]
        y = linear(rows, 1.0, ZERO_POINT, weights[e], channel[e], zeros, None, 1.0, 0, torch.float32, "none", [], "")
        y = y[: b - a]
        if bias is None:
            torch.mul(y, scales[a:b], out=out[a:b])
        else:
            out[a:b] = y.mul_(scales[a:b]).add_(bias[e])


def _to_unsigned(x: Tensor, scales_x: Tensor | None, clip: float | None) -> tuple[Tensor, Tensor]:
    """``x`` as uint8 with zero point 128, with MIN_ROWS - 1 spare rows behind it, and its scales [M, 1]."""
    num_rows, k_size = x.shape
    unsigned = torch.empty((num_rows + MIN_ROWS - 1, k_size), dtype=torch.uint8, device="cpu")
    unsigned[num_rows:].zero_()
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device="cpu")
    if not x.dtype.is_floating_point:
        torch.bitwise_xor(x.view(torch.uint8), ZERO_POINT, out=unsigned[:num_rows])
        return unsigned, torch.ones_like(scales) if scales_x is None else scales_x.unsqueeze(1)
    for a in range(0, num_rows, QUANTIZE_ROWS):
        rows = slice(a, min(a + QUANTIZE_ROWS, num_rows))
        values, scales[rows, 0] = quantize_rows(x[rows], INT8, clip)
        torch.bitwise_xor(values.view(torch.uint8), ZERO_POINT, out=unsigned[rows])
    return unsigned, scales
