"""The pieces every grouped-matmul kernel is built from: finding a tile, its mainloop, its epilogue."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_bounds(offsets, group, M, E):
    """First row of a group and one past its last, clamped to [0, M]; group E is the rows behind the last expert."""
    start = tl.minimum(tl.maximum(tl.load(offsets + group, mask=group <= E, other=0), 0), M)
    end = tl.minimum(tl.maximum(tl.load(offsets + group + 1, mask=group < E, other=M), 0), M)
    return start, end


@triton.jit
def count_tiles(
    offsets,  # (E+1,) int32
    table,  # (GROUPS,) int32, written: row tiles up to and including each group
    M,
    E,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two > E
):
    """Number the row tiles, expert by expert, and return how many there are (``routing.tile_schedule`` is the
    definition).

    Every program of a launch does this for itself, which saves a launch of its own (decision 6). They all write the
    same numbers to the same table, and each reads only after its own write.
    """
    group = tl.arange(0, GROUPS)
    start, end = group_bounds(offsets, group, M, E)
    tiles = tl.where(group <= E, tl.cdiv(tl.maximum(end - start, 0), BM), 0)
    tl.store(table + group, tl.cumsum(tiles, 0))
    tl.debug_barrier()
    return tl.sum(tiles, 0)


BAND = tl.constexpr(16)
"""Row tiles of one expert that run side by side on each column tile: weights larger than L2 are read once per band."""


@triton.jit
def find_tile(offsets, table, tile, tiles_n, M, E, BM: tl.constexpr, GROUPS: tl.constexpr):
    """Group, first row, end of the group's rows, and column tile of tile number ``tile``: a scalar binary search.

    A group's tiles follow each other in bands of BAND row tiles; in a band, row tiles change fastest.
    """
    group = tile * 0
    for step in tl.static_range(1, 32):
        if (GROUPS >> step) > 0:
            before = tl.load(table + group + (GROUPS >> step) - 1)
            group = tl.where(before * tiles_n <= tile, group + (GROUPS >> step), group)
    first = tl.load(table + group - 1, mask=group > 0, other=0)
    row_tiles = tl.load(table + group) - first
    start, end = group_bounds(offsets, group, M, E)
    local = tile - first * tiles_n
    band = local // (BAND * tiles_n)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    local -= band * BAND * tiles_n
    return group, start + (band * BAND + local % height) * BM, end, local // height


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
            a, b = b, a
        # A sum of its own, added in FP32 registers: with `acc`, tl.dot would wait after every instruction. Larger tiles
        # have no registers for a second sum.
        if PROMOTE == BK and BM * BN <= 64 * 128:
            acc += tl.dot(a, b.T)
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
