"""4-bit weights in the grouped matmul: how they are unpacked, activations in the order that this gives, and the
portable kernel's mainloop.

A byte holds two neighbours along K. Low halves of 16 bytes are 16 even columns, high halves the odd ones between them,
and so they are multiplied: activations come :func:`unzipped`, in each 32 columns first the even ones, then the odd
ones. Any order of K gives the same sum, and a group of 32 or more stays together.

Half a byte is used where it stands, in the upper bits of a byte of its own, so its value is 16 times what it means;
sums are exact in INT32 all the same, and so is the division by 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowgmm.replay import empty, launch

BLOCK = tl.constexpr(32)
"""Columns that are reordered among themselves: what the matrix instruction consumes at a time."""


@triton.jit
def halves(packed, WORDS: tl.constexpr):
    """The low and the high halves of bytes, as int8, times 16."""
    if WORDS:  # four bytes at a time
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0;",
            "=&r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return packed << 4, packed & -16


@triton.jit
def in_order(low, high):
    """[N, K/2] low and high halves -> [N, K], K in the order of :func:`unzipped`. Where bytes were loaded as the matrix
    instruction wants them, nothing leaves its thread."""
    N: tl.constexpr = low.shape[0]
    K: tl.constexpr = 2 * low.shape[1]
    pairs = tl.join(low, high).reshape(N, K // BLOCK, BLOCK // 2, 2)
    return pairs.permute(0, 1, 3, 2).reshape(N, K)


@triton.jit
def as_float(sums):
    """INT32 sums of a group, 16 times too large, as exact float32: below 2^22 they are added to the bits of a number
    whose last bit is worth 1/16. Conversion instructions would take four times as long."""
    return (sums + 0x49400000).to(tl.float32, bitcast=True) - 786432.0


@triton.jit
def accumulate_nibbles(
    x,  # unzipped; TMA: descriptor [BM, STEP] over (M, whole blocks); else pointer, row stride stride_xm
    w,  # TMA: descriptor [BN, STEP/2] over (E·N, K/2); else pointer (E, N, K/2), strides stride_we, stride_wn
    scales_w,  # with GROUP: (E, ceil(K/GROUP), N) float32
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
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,  # elements along K that share a scale; 0: all
    WORDS: tl.constexpr,
):
    """[BN, BM]: the exact INT32 sums of a tile's transpose; with GROUP float32, groups' sums times their scales added
    in K order. Rows and columns outside hold rubbish."""
    STEP: tl.constexpr = GROUP if GROUP else BK
    acc = tl.zeros((BN, BM), dtype=tl.float32 if GROUP else tl.int32)
    rk = tl.arange(0, STEP)
    byte = tl.arange(0, STEP // 2)
    rm = row + tl.arange(0, BM)
    rn = n_tile * BN + tl.arange(0, BN)
    # Rows and columns past the edge re-read the tile's first one, as in tiles.accumulate.
    rm = tl.where(rm < end, rm, row).to(tl.int64)
    rn = tl.where(rn < N, rn, 0).to(tl.int64)
    w_row = expert * N + n_tile * BN
    if not TMA:
        x_ptrs = x + rm[:, None] * stride_xm + rk[None, :]
        w_ptrs = w + expert.to(tl.int64) * stride_we + rn[:, None] * stride_wn + byte[None, :]
    if GROUP:
        s_ptrs = scales_w + expert.to(tl.int64) * tl.cdiv(K, GROUP) * N + rn
    for start in tl.range(0, K, BK, num_stages=STAGES):
        for part in tl.static_range(BK // STEP):
            k = start + part * STEP
            if TMA:
                packed = w.load([w_row, k // 2])
                a = x.load([row, k])
            elif EVEN_K:
                packed = tl.load(w_ptrs + k // 2)
                a = tl.load(x_ptrs + k)
            else:
                packed = tl.load(w_ptrs + k // 2, mask=(k // 2 + byte < K // 2)[None, :], other=0)
                a = tl.load(x_ptrs + k, mask=(k + rk < tl.cdiv(K, BLOCK) * BLOCK)[None, :], other=0)
            low, high = halves(packed, WORDS)
            b = in_order(low, high)
            if GROUP:
                sums = tl.dot(b, a.T, out_dtype=tl.int32)
                scale = tl.load(s_ptrs + k // GROUP * N, mask=k < K, other=0.0)
                acc += as_float(sums) * scale[:, None]
            else:
                acc = tl.dot(b, a.T, acc, out_dtype=tl.int32)
    if GROUP == 0:
        acc = acc >> 4
    return acc


@triton.jit
def unzip_kernel(
    x,  # (M, K) int8, row stride stride_xm
    y,  # (M, WIDTH) int8, contiguous
    K,
    stride_xm,
    WIDTH,
    COLUMNS: tl.constexpr,
):
    """Grid (M,)."""
    row = tl.program_id(0).to(tl.int64)
    for start in tl.range(0, WIDTH, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        v = tl.load(x + row * stride_xm + k, mask=k < K, other=0)
        v = v.reshape(COLUMNS // BLOCK, BLOCK // 2, 2).permute(0, 2, 1).reshape(COLUMNS)
        tl.store(y + row * WIDTH + k, v, mask=k < WIDTH)


def unzipped(x: Tensor) -> Tensor:
    """int8 ``x [M, K]`` -> [M, K, or the next multiple of 32]: in each 32 columns the even ones, then the odd ones,
    zeros for those that are missing."""
    num_rows, width = x.shape
    whole = -(-width // BLOCK.value) * BLOCK.value
    y = empty((num_rows, whole), torch.int8, x.device)
    columns = min(triton.next_power_of_2(whole), 4096)
    launch(unzip_kernel, num_rows, x, y, width, x.stride(0), whole, COLUMNS=columns, num_warps=4)
    return y
