"""The pieces every grouped-matmul kernel is built from: one tile's mainloop and its epilogue."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accumulate(
    x,  # TMA: descriptor [BM, BK] over (M, K); else pointer (M, K), row stride stride_xm
    w,  # TMA: descriptor [BN, BK] over (E·N, K); else pointer (E, N, K), strides stride_we, stride_wn
    expert,
    row,
    end,
    n_tile,
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
    PROMOTE: tl.constexpr,
):
    """Σ_k X[rows, k]·W[expert, columns, k]: [BM, BN], or with SWAP its transpose [BN, BM]. Rows and columns outside
    hold rubbish.

    SWAP puts the weights on the matrix instruction's M side. PROMOTE > 0 moves a float accumulator to full FP32
    registers every
    PROMOTE of K: Hopper's FP8 tensor cores keep about 14 bits in theirs.
    """
    if SWAP:
        acc = tl.zeros((BN, BM), dtype=ACC)
    else:
        acc = tl.zeros((BM, BN), dtype=ACC)
    rk = tl.arange(0, BK)
    rm = row + tl.arange(0, BM)
    rn = n_tile * BN + tl.arange(0, BN)
    # Rows and columns past the edge re-read the tile's first one: no mask in the loop, and no access outside the
    # tensors.
    rm = tl.where(rm < end, rm, row).to(tl.int64)
    rn = tl.where(rn < N, rn, 0).to(tl.int64)
    w_row = expert * N + n_tile * BN
    if not TMA:
        x_ptrs = x + rm[:, None] * stride_xm + rk[None, :]
        w_ptrs = w + expert.to(tl.int64) * stride_we + rn[:, None] * stride_wn + rk[None, :]
    for k in tl.range(0, K, BK, num_stages=STAGES):
        if TMA:
            a = x.load([row, k])
            b = w.load([w_row, k])
        elif EVEN_K:
            a = tl.load(x_ptrs + k)
            b = tl.load(w_ptrs + k)
        else:
            inside = (k + rk < K)[None, :]
            a = tl.load(x_ptrs + k, mask=inside, other=0.0)
            b = tl.load(w_ptrs + k, mask=inside, other=0.0)
        if SWAP:
            acc = tl.dot(b, a.T, acc, input_precision="ieee", max_num_imprecise_acc=PROMOTE, out_dtype=ACC)
        else:
            acc = tl.dot(a, b.T, acc, input_precision="ieee", max_num_imprecise_acc=PROMOTE, out_dtype=ACC)
    return acc


@triton.jit
def store(
    acc,
    y,  # (M, N), row stride stride_ym
    scales_x,  # (M,) float32
    scales_w,  # (E, N) float32
    bias,  # (E, N)
    expert,
    live,
    row,
    end,
    n_tile,
    N,
    stride_ym,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SWAP: tl.constexpr,
    SCALED_X: tl.constexpr,
    SCALED_W: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Y = acc · scales_w · scales_x + bias, in this order in every backend; rows that belong to no expert (not live)
    are zero."""
    rm = row + tl.arange(0, BM)
    rn = n_tile * BN + tl.arange(0, BN)
    m_axis: tl.constexpr = 0 if SWAP else 1
    n_axis: tl.constexpr = 1 if SWAP else 0
    in_m, in_n = tl.expand_dims(rm < end, m_axis), tl.expand_dims(rn < N, n_axis)
    value = acc
    if SCALED_W or SCALED_X or BIAS:
        value = value.to(tl.float32)
    channel = expert.to(tl.int64) * N + rn
    if SCALED_W:
        value = value * tl.expand_dims(tl.load(scales_w + channel, mask=rn < N, other=0.0), n_axis)
    if SCALED_X:
        value = value * tl.expand_dims(tl.load(scales_x + rm, mask=rm < end, other=0.0), m_axis)
    if BIAS:
        value = value + tl.expand_dims(tl.load(bias + channel, mask=rn < N, other=0.0).to(tl.float32), n_axis)
    value = tl.where(live, value, tl.zeros_like(value)).to(y.dtype.element_ty)
    at = tl.expand_dims(rm.to(tl.int64) * stride_ym, m_axis) + tl.expand_dims(rn, n_axis)
    tl.store(y + at, value, mask=in_m & in_n)
