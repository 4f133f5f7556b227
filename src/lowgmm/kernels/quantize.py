"""Per-token quantisation: one program per token, bit-identical to ``quant.quantize_rows``."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowgmm.formats import QuantFormat
from lowgmm.quant import SMALLEST_ABSMAX
from lowgmm.replay import empty, launch

SMALLEST = tl.constexpr(SMALLEST_ABSMAX)


@triton.jit
def row_absmax(x, K, clip, BLOCK: tl.constexpr):
    """min(max|x[:K]|, clip), or NaN if the row holds a NaN."""
    k = tl.arange(0, BLOCK)
    # |v| as integers in the same order, with NaN above all: tl.max of floats drops NaN on the GPU.
    bits = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in tl.range(0, K, BLOCK):
        v = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    absmax = tl.max(bits, 0).to(tl.float32, bitcast=True)
    return tl.where(absmax != absmax, float("nan"), tl.minimum(absmax, clip))


@triton.jit
def scales_of(absmax, QMAX: tl.constexpr):
    """(1 / scale, scale) of rows with this absmax, a NaN among them."""
    inverse = tl.where(absmax != absmax, float("nan"), tl.div_rn(QMAX, tl.maximum(absmax, SMALLEST)))
    return inverse, tl.div_rn(absmax, QMAX)


@triton.jit
def round_to(v, QMAX: tl.constexpr, TYPE: tl.constexpr):
    """Scaled float32 values as int8 or float8e4nv: clamped, rounded half to even, NaN to 0."""
    v = tl.where(v != v, 0.0, v)
    v = tl.minimum(tl.maximum(v, -QMAX), QMAX)
    if TYPE.is_int():
        # Adding 1.5·2^23 rounds half to even, and leaves the integer in the low bits. Launched without fused
        # multiply-add, which would skip the product's own rounding and differ from torch on ties.
        v = (v + 12582912.0).to(tl.int32, bitcast=True)
    return v.to(TYPE)


@triton.jit
def quantize_row(x, q, scale, K, clip, QMAX: tl.constexpr, BLOCK: tl.constexpr):
    """Two passes over a row: its absmax, then its values (the second read hits the cache)."""
    k = tl.arange(0, BLOCK)
    inverse, row_scale = scales_of(row_absmax(x, K, clip, BLOCK), QMAX)
    tl.store(scale, row_scale)
    for start in tl.range(0, K, BLOCK):
        v = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32) * inverse
        tl.store(q + start + k, round_to(v, QMAX, q.dtype.element_ty), mask=start + k < K)


@triton.jit
def quantize_tokens_kernel(
    x,  # (T, K) float, row stride stride_x
    q,  # (T, K) int8 or float8e4nv, contiguous
    scales,  # (T,) float32
    K,
    stride_x,
    clip,
    QMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T,)."""
    t = tl.program_id(0).to(tl.int64)
    quantize_row(x + t * stride_x, q + t * K, scales + t, K, clip, QMAX, BLOCK)


def quantize_tokens(x: Tensor, fmt: QuantFormat, clip: float | None) -> tuple[Tensor, Tensor]:
    """``x [T, K]`` -> values [T, K] and scales [T] float32, as ``quant.quantize_rows`` defines them."""
    num_tokens, width = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    q = empty((num_tokens, width), fmt.dtype, x.device)
    scales = empty((num_tokens,), torch.float32, x.device)
    if num_tokens == 0 or width == 0:
        return q, torch.zeros_like(scales)
    block = min(triton.next_power_of_2(width), 4096)
    launch(
        quantize_tokens_kernel,
        num_tokens,
        x,
        q,
        scales,
        width,
        x.stride(0),
        math.inf if clip is None else clip,
        QMAX=fmt.qmax,
        BLOCK=block,
        num_warps=4 if block >= 1024 else 1,
        enable_fp_fusion=False,
    )
    return q, scales
