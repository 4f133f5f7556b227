"""Per-token quantisation: one program per token, bit-identical to ``quant.quantize_rows``."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowgmm.formats import QuantFormat
from lowgmm.quant import SMALLEST_ABSMAX


@triton.jit
def quantize_tokens_kernel(
    x,  # (T, K) float, row stride stride_x
    q,  # (T, K) int8 or float8e4nv, contiguous
    scales,  # (T,) float32
    K,
    stride_x,
    clip,
    QMAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T,). Two passes over the row: its absmax, then its values (the second read hits the cache)."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    nans = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in tl.range(0, K, BLOCK):
        v = tl.load(x + t * stride_x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        nan = v != v
        # tl.max drops NaN on the GPU, so NaNs are counted apart: such a row must not come out finite.
        nans += nan.to(tl.int32)
        largest = tl.maximum(largest, tl.where(nan, 0.0, tl.abs(v)))
    absmax = tl.minimum(tl.max(largest, 0), clip)
    has_nan = tl.sum(nans, 0) > 0
    inverse = tl.where(has_nan, float("nan"), tl.div_rn(QMAX, tl.maximum(absmax, SMALLEST)))
    tl.store(scales + t, tl.where(has_nan, float("nan"), tl.div_rn(absmax, QMAX)))
    for start in tl.range(0, K, BLOCK):
        v = tl.load(x + t * stride_x + start + k, mask=start + k < K, other=0.0).to(tl.float32) * inverse
        v = tl.where(v != v, 0.0, v)
        v = tl.minimum(tl.maximum(v, -QMAX), QMAX)
        if INTEGER:
            # Adding and taking away 1.5·2^23 rounds half to even. Launched without fused multiply-add, which would skip
            # the product's own rounding and differ from torch on ties.
            v = (v + 12582912.0) - 12582912.0
        tl.store(q + t * K + start + k, v.to(q.dtype.element_ty), mask=start + k < K)


def quantize_tokens(x: Tensor, fmt: QuantFormat, clip: float | None) -> tuple[Tensor, Tensor]:
    """``x [T, K]`` -> values [T, K] and scales [T] float32, as ``quant.quantize_rows`` defines them."""
    num_tokens, width = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    q = torch.empty((num_tokens, width), dtype=fmt.dtype, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens == 0 or width == 0:
        return q, scales.zero_()
    block = min(triton.next_power_of_2(width), 4096)
    quantize_tokens_kernel[(num_tokens,)](
        x,
        q,
        scales,
        width,
        x.stride(0),
        math.inf if clip is None else clip,
        QMAX=fmt.qmax,
        SMALLEST=SMALLEST_ABSMAX,
        INTEGER=not fmt.dtype.is_floating_point,
        BLOCK=block,
        num_warps=4 if block >= 1024 else 1,
        enable_fp_fusion=False,
    )
    return q, scales
