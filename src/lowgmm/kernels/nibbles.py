"""4-bit weights in the portable grouped matmul: how they are unpacked, and its mainloop with them.

Half a byte is used where it stands, in the upper bits of a byte of its own, so its value is 16 times what it means;
sums are exact in INT32 all the same, and so is the division by 16.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    x,  # TMA: descriptor [BM, STEP] over (M, K); else pointer (M, K), row stride stride_xm
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
                packed = tl.load(w_ptrs + k // 2, mask=(k + 2 * byte < K)[None, :], other=0)
                a = tl.load(x_ptrs + k, mask=(k + rk < K)[None, :], other=0)
            low, high = halves(packed, WORDS)
            b = tl.join(low, high).reshape(BN, STEP)
            if GROUP:
                sums = tl.dot(b, a.T, out_dtype=tl.int32)
                scale = tl.load(s_ptrs + k // GROUP * N, mask=k < K, other=0.0)
                acc += as_float(sums) * scale[:, None]
            else:
                acc = tl.dot(b, a.T, acc, out_dtype=tl.int32)
    if GROUP == 0:
        acc = acc >> 4
    return acc
