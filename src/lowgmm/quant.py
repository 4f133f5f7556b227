"""Quantise and dequantise in torch: the definition of each format. Kernels must agree with this file bit for bit.

    scale = min(absmax, clip) / qmax                                      float32
    q     = clamp(round_half_even(x · (qmax / min(absmax, clip))), ±qmax)

One scale per token, per output channel, or (the grouped int4 formats) per channel and ``group`` elements along K, the
last group shorter where K is no multiple. The multiplication by one reciprocal per row (rather than a division per
element) is part of the definition, because a fused kernel affords nothing else. A zero row has scale 0 and exact zeros;
a row that holds a NaN gets scale NaN, so the output row is NaN too and no other row is touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowgmm.formats import (
    FLOATS,
    QuantFormat,
    QuantTensor,
    by_channels,
    get_format,
    pack_nibbles,
    scale_per_element,
)
from lowgmm.shapes import ShapeError, check_dtype

SMALLEST_ABSMAX = 2.0**-100
"""Below this a row's reciprocal would overflow float32; such a row quantises to zeros (its absolute error is below
1e-30)."""


def quantize_rows(x: Tensor, fmt: QuantFormat, clip: float | None = None) -> tuple[Tensor, Tensor]:
    """Quantise along the last axis: ``x [..., K]`` float -> values ``[..., K]``, scales ``[...]`` float32."""
    x = x.float()
    if x.shape[-1] == 0:
        return x.to(fmt.element), x.new_zeros(x.shape[:-1])
    absmax = x.abs().amax(-1)
    if clip is not None:
        absmax = absmax.clamp(max=clip)
    # Both divisions are tensor by tensor, because torch may turn one with a number into a product with a reciprocal.
    qmax = torch.full_like(absmax, fmt.qmax)
    inverse = qmax / absmax.clamp(min=SMALLEST_ABSMAX)
    return _round_to(x * inverse.unsqueeze(-1), fmt), absmax / qmax


def quantize_with_scales(x: Tensor, scales: Tensor, fmt: QuantFormat) -> Tensor:
    """``x [..., K]`` with the scales [...] float32 that are given: values ``clamp(round(x · (1 / scale)), ±qmax)``.

    A scale of 0 gives zeros.
    """
    inverse = torch.where(scales > 0, torch.ones_like(scales) / scales, 0.0)
    return _round_to(x.float() * inverse.unsqueeze(-1), fmt)


def _round_to(scaled: Tensor, fmt: QuantFormat) -> Tensor:
    q = scaled.nan_to_num_(nan=0.0, posinf=fmt.qmax, neginf=-fmt.qmax)
    if fmt.exact:
        q = q.round_()
    return q.clamp_(-fmt.qmax, fmt.qmax).to(fmt.element, memory_format=torch.contiguous_format)


def quantize(w: Tensor, format: str) -> QuantTensor:
    """Quantise expert weights, one scale per output channel, or per channel and group of K.

    ``values[e, n, :] = clamp(round(w[e, n, :] / scales[e, n]), ±qmax)`` with ``scales[e, n] = max|w[e, n, :]| / qmax``;
    in a grouped format likewise for each group of 32, 64 or 128 elements along K.

    Args:
        w: [E, N, K] bfloat16, float16 or float32; a single [N, K] matrix is taken as E = 1.
        format: ``"int8"``, ``"fp8"``, ``"int4"`` (qmax 7, to be multiplied by INT8 activations), or ``"int4_g32"``,
            ``"int4_g64"``, ``"int4_g128"`` with a scale per group.

    Returns:
        A :class:`QuantTensor` with values [E, N, K] (K contiguous; int4: [E, N, K/2] bytes) and scales [E, N] float32
        (grouped: [E, N, ceil(K/group)], N contiguous). Weights are converted one expert at a time, so the float32
        working copy is one expert's.

    Raises:
        UnsupportedError: unknown format. DtypeError: ``w`` is not floating point. ShapeError: ``w`` is not 2-D or 3-D,
        or K is odd for a 4-bit format.

    >>> import torch
    >>> q = quantize(torch.tensor([[[1.0, -2.0], [0.0, 0.0]]]), "int8")
    >>> q.values.tolist(), [round(s, 4) for s in q.scales[0].tolist()]
    ([[[64, -127], [0, 0]]], [0.0157, 0.0])
    """
    fmt = get_format(format)
    check_dtype("quantize", "w", w, FLOATS)
    w = w.detach()  # or the scales would keep the dense weights alive, as part of an autograd graph
    if w.dim() == 2:
        w = w.unsqueeze(0)
    if w.dim() != 3:
        raise ShapeError(f"quantize: argument 'w' has shape {list(w.shape)}, expected [E, N, K] (or [N, K]).")
    E, N, K = w.shape
    if fmt.bits == 4 and K % 2:
        raise ShapeError(f"quantize: K={K} is odd, but two {fmt.name} values share a byte: pad w with a zero column.")
    blocks = fmt.blocks(K)
    values = torch.empty((E, N, K * fmt.bits // 8), dtype=fmt.dtype, device=w.device)
    scales = torch.empty((E, N) if blocks == 1 else (E, N, blocks), dtype=torch.float32, device=w.device)
    for e in range(E):
        if blocks == 1:
            codes, scales[e] = quantize_rows(w[e], fmt)
        else:
            groups = torch.nn.functional.pad(w[e], (0, blocks * (fmt.group or K) - K)).unflatten(-1, (blocks, -1))
            codes, scales[e] = quantize_rows(groups, fmt)
            codes = codes.flatten(-2)[:, :K]
        values[e] = pack_nibbles(codes.contiguous()) if fmt.bits == 4 else codes
    return QuantTensor(values, scales if blocks == 1 else by_channels(scales), fmt)


def dequantize(q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``values · scales`` as a dense [E, N, K] tensor of ``dtype``.

    >>> import torch
    >>> w = torch.tensor([[[1.0, -2.0]]])
    >>> bool((dequantize(quantize(w, "int8")) - w).abs().max() <= 2.0 / 127 / 2)
    True
    """
    return (q.codes().float() * scale_per_element(q.scales, q.shape[-1])).to(dtype)


def to_fnuz(values: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """FP8 e4m3fn codes and their scales as e4m3fnuz, the FP8 of AMD's MI300; the numbers they stand for stay the same.

    The same bits mean half as much in e4m3fnuz, so the scales double (exactly). Two codes differ: 0x80 is -0 in e4m3fn
    but NaN in e4m3fnuz, and e4m3fn's NaNs 0x7F and 0xFF would be the numbers ±240.

    Args:
        values: float8_e4m3fn of any shape. scales: of any shape, or None for 1.

    >>> import torch
    >>> codes, scales = to_fnuz(torch.tensor([1.5, -0.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]))
    >>> (codes.float() * scales).tolist()
    [3.0, 0.0]
    """
    bits = values.view(torch.uint8)
    bits = torch.where(bits == 0x80, 0, torch.where(bits & 0x7F == 0x7F, 0x80, bits)).to(torch.uint8)
    doubled = values.new_full((1,), 2.0, dtype=torch.float32) if scales is None else scales * 2
    return bits.view(torch.float8_e4m3fnuz), doubled
