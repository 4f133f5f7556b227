"""4-bit weights in the grouped matmul: their mainloop, and activations in the order in which it takes them.

A byte holds two neighbours along K. Instead of bringing their columns together, the kernel multiplies low halves by the
activations of even K and high halves by those of odd K, which :func:`planes` has put apart: any order of K gives the
same sum. A half is used where it stands, in the upper bits of a byte, so its value is 16 times what it means; sums are
exact in INT32 all the same, and so is the division by 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowgmm.replay import empty, launch

SHORTEST = 32
"""Bytes of weights that the matrix instruction consumes at a time: 64 elements along K, two groups of 32."""


@triton.constexpr_function
def step_of(group: int, block_k: int) -> int:
    """Bytes of weights per row and load: those of one group, or of two where one is too short to be multiplied."""
    return block_k // 2 if group == 0 else max(group // 2, SHORTEST)


@triton.jit
def halves(packed, WORDS: tl.constexpr):
    """The low and the high halves of bytes, as int8, times 16."""
    if WORDS:  # four bytes at a time
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0;",
            "=r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return packed << 4, packed & -16


@triton.jit
def as_float(sums):
    """INT32 sums of a group, 16 times too large, as exact float32: below 2^22 they are added to the bits of a number
    whose last bit is worth 1/16. Conversion instructions would take four times as long."""
    return (sums + 0x49400000).to(tl.float32, bitcast=True) - 786432.0


@triton.jit
def accumulate_nibbles(
    x,  # TMA: descriptor [BM, STEP] over (M, K); else pointer; a row has even K first, then odd K
    w,  # TMA: descriptor [BN, STEP] over (E·N, K/2); else pointer (E, N, K/2), strides stride_we, stride_wn
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
    STEP: tl.constexpr = step_of(GROUP, BK)
    acc = tl.zeros((BN, BM), dtype=tl.float32 if GROUP else tl.int32)
    byte = tl.arange(0, STEP)
    rm = row + tl.arange(0, BM)
    rn = n_tile * BN + tl.arange(0, BN)
    # Rows and columns past the edge re-read the tile's first one, as in tiles.accumulate.
    rm = tl.where(rm < end, rm, row).to(tl.int64)
    rn = tl.where(rn < N, rn, 0).to(tl.int64)
    w_row = expert * N + n_tile * BN
    half = K // 2
    if not TMA:
        x_ptrs = x + rm[None, :] * stride_xm + byte[:, None]
        w_ptrs = w + expert.to(tl.int64) * stride_we + rn[:, None] * stride_wn + byte[None, :]
    if GROUP:
        s_ptrs = scales_w + expert.to(tl.int64) * tl.cdiv(K, GROUP) * N + rn
    for start in tl.range(0, half, BK // 2, num_stages=STAGES):
        for part in tl.static_range(BK // 2 // STEP):
            k = start + part * STEP
            # Behind a row's end weights read as zeros, whatever the activations are.
            if TMA:
                packed = w.load([w_row, k])
                even = x.load([row, k]).T
                odd = x.load([row, half + k]).T
            elif EVEN_K:
                packed = tl.load(w_ptrs + k)
                even = tl.load(x_ptrs + k)
                odd = tl.load(x_ptrs + half + k)
            else:
                packed = tl.load(w_ptrs + k, mask=(k + byte < half)[None, :], other=0)
                even = tl.load(x_ptrs + k, mask=(k + byte < half)[:, None], other=0)
                odd = tl.load(x_ptrs + half + k, mask=(k + byte < half)[:, None], other=0)
            low, high = halves(packed, WORDS)
            if GROUP == 0:
                acc = tl.dot(low, even, acc, out_dtype=tl.int32)
                acc = tl.dot(high, odd, acc, out_dtype=tl.int32)
            elif 2 * STEP == GROUP:
                sums = tl.dot(low, even, out_dtype=tl.int32)
                sums = tl.dot(high, odd, sums, out_dtype=tl.int32)
                scale = tl.load(s_ptrs + k // (GROUP // 2) * N, mask=k < half, other=0.0)
                acc += as_float(sums) * scale[:, None]
            else:
                for i in tl.static_range(2 * STEP // GROUP):
                    first = i * (GROUP // 2)
                    mine = ((byte >= first) & (byte < first + GROUP // 2))[None, :]
                    sums = tl.dot(tl.where(mine, low, 0), even, out_dtype=tl.int32)
                    sums = tl.dot(tl.where(mine, high, 0), odd, sums, out_dtype=tl.int32)
                    at = k + first
                    scale = tl.load(s_ptrs + at // (GROUP // 2) * N, mask=at < half, other=0.0)
                    acc += as_float(sums) * scale[:, None]
    if GROUP == 0:
        acc = acc >> 4
    return acc


@triton.jit
def planes_kernel(
    x,  # (M, K) int8, row stride stride_xm
    y,  # (M, K) int8, contiguous
    K,
    stride_xm,
    BLOCK: tl.constexpr,
):
    """Grid (M,): a row's even columns, then its odd ones."""
    row = tl.program_id(0).to(tl.int64)
    half = K // 2
    pair, both = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    for start in tl.range(0, half, BLOCK):
        v = tl.load(x + row * stride_xm + 2 * start + both, mask=2 * start + both < K, other=0)
        even, odd = tl.split(tl.reshape(v, (BLOCK, 2)))
        tl.store(y + row * K + start + pair, even, mask=start + pair < half)
        tl.store(y + row * K + half + start + pair, odd, mask=start + pair < half)


def planes(x: Tensor) -> Tensor:
    """int8 ``x [M, K]``, K even -> [M, K]: of each row columns 0, 2, 4, …, then 1, 3, 5, …."""
    num_rows, width = x.shape
    y = empty((num_rows, width), torch.int8, x.device)
    block = min(triton.next_power_of_2(width // 2), 2048)
    launch(planes_kernel, num_rows, x, y, width, x.stride(0), BLOCK=block, num_warps=4 if block >= 512 else 1)
    return y
