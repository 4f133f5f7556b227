"""Sort the slots by expert and write each one's quantised token in that order, in one launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from lowgmm.formats import QuantFormat
from lowgmm.kernels.quantize import round_to, row_absmax, scales_of
from lowgmm.kernels.queue import counters
from lowgmm.kernels.route import load_ids


@triton.jit
def wait_for(counter, least):
    """Until as many have been counted; looking disturbs nobody who counts."""
    while tl.load(counter, volatile=True) < least:
        pass
    tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def count_chunk(ids, counts, first, end, E, BINS: tl.constexpr, SUB: tl.constexpr):
    """Slots of each expert in a chunk."""
    i = tl.arange(0, SUB)
    sizes = tl.zeros((BINS,), dtype=tl.int32)
    for start in tl.range(first, end, SUB):
        sizes += tl.histogram(load_ids(ids, start + i, end, E), BINS)
    tl.store(counts + tl.arange(0, BINS), sizes)


@triton.jit
def place_chunk(
    ids, counts, order, inverse, offsets, chunk, chunks, first, end, E,
    BINS: tl.constexpr, SUB: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Sorted positions of a chunk's slots, from how many slots of each expert there are in it and before it."""
    bins, i, j, lane = tl.arange(0, BINS), tl.arange(0, SUB), tl.arange(0, MOST), tl.arange(0, 32)
    total = tl.zeros((BINS,), dtype=tl.int32)
    before = tl.zeros((BINS,), dtype=tl.int32)
    if chunks == 1:
        total += tl.histogram(load_ids(ids, i, end, E), BINS)  # of its own: nobody else counts
    for q in tl.range(0, tl.where(chunks == 1, 0, chunks), MOST):
        at = (q + j)[:, None] * BINS + bins[None, :]
        sizes = tl.load(counts + at, mask=(q + j < chunks)[:, None], other=0)
        total += tl.sum(sizes, 0)
        before += tl.sum(tl.where((q + j < chunk)[:, None], sizes, 0), 0)
    starts = tl.cumsum(total, 0) - total
    if chunk == 0:
        tl.store(offsets + bins, starts, mask=bins <= E)
    following = starts + before
    for start in tl.range(first, end, SUB):
        e = load_ids(ids, start + i, end, E)
        position = tl.gather(following, e, 0)
        for other in tl.range(0, SUB, 32):  # a few at a time, for want of registers
            f = load_ids(ids, start + other + lane, end, E)
            position += tl.sum(((e[:, None] == f[None, :]) & (other + lane[None, :] < i[:, None])).to(tl.int32), 1)
        tl.store(order + position, start + i, mask=start + i < end)
        tl.store(inverse + start + i, position, mask=start + i < end)
        if start + SUB < end:
            following += tl.histogram(e, BINS)


@triton.jit(do_not_specialize=["R", "T", "E", "chunks", "size", "zeros"])
def arrange_kernel(
    ids,  # (T, A) int
    x,  # (T, H) float, row stride stride_x
    xq,  # (R, H) int8, float8e4nv or bfloat16, row stride stride_xq, written by sorted row
    scales,  # (R,) float32, written likewise
    gate,  # (4,) int32, zero before and after: tickets drawn, chunks counted, chunks placed, programs that are done
    table,  # int32, written: order R, inverse R and offsets E + 1, as ``routing.route`` defines them; ``zeros`` zeros;
    # counts [chunks, BINS]
    R,
    T,
    E,
    chunks,
    size,  # slots of a chunk, a multiple of SUB
    zeros,
    H,
    stride_x,
    stride_xq,
    clip,
    A: tl.constexpr,
    QMAX: tl.constexpr,  # 0: tokens are copied
    PDL: tl.constexpr,
    BINS: tl.constexpr,  # power of two > E + 1
    SUB: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (2 · chunks + programs,): some count a chunk's slots, some place them, and the others take tokens in turns.
    The only chunk is counted by whoever places it.

    A program's number is a ticket, so whoever is waited for has started before whoever waits, in whatever order the
    hardware starts them.
    """
    if PDL:
        gdc_launch_dependents()  # they wait for all of this kernel's writes before they read any
    pid = tl.atomic_add(gate, 1, sem="relaxed")
    order, inverse, offsets = table, table + R, table + 2 * R
    zeroed = offsets + E + 1
    counts = zeroed + zeros
    first = pid % chunks * size
    end = tl.minimum(first + size, R)
    counting = tl.where(chunks == 1, 0, chunks)
    if pid < counting:
        count_chunk(ids, counts + pid * BINS, first, end, E, BINS, SUB)
        tl.debug_barrier()
        tl.atomic_add(gate + 1, 1, sem="release")
    elif pid < counting + chunks:
        wait_for(gate + 1, counting)
        place_chunk(ids, counts, order, inverse, offsets, pid - counting, chunks, first, end, E, BINS, SUB, MOST)
        tl.debug_barrier()
        tl.atomic_add(gate + 2, 1, sem="release")
    else:
        mine = pid - counting - chunks
        programs = tl.num_programs(0) - counting - chunks
        share, j = tl.cdiv(zeros, programs), tl.arange(0, 64)
        for start in tl.range(0, share, 64):
            at = mine * share + start + j
            tl.store(zeroed + at, tl.zeros((64,), dtype=tl.int32), mask=(start + j < share) & (at < zeros))
        k = tl.arange(0, BLOCK)
        for t in tl.range(mine, T, programs):
            token = x + (tl.zeros((), dtype=tl.int64) + t) * stride_x
            if QMAX > 0:
                row_inverse, scale = scales_of(row_absmax(token, H, clip, BLOCK), QMAX)
            if t == mine:
                wait_for(gate + 2, chunks)
            for start in tl.range(0, H, BLOCK):
                v = tl.load(token + start + k, mask=start + k < H, other=0.0)
                if QMAX > 0:
                    v = round_to(v.to(tl.float32) * row_inverse, QMAX, xq.dtype.element_ty)
                for a in tl.static_range(A):  # unrolled and without branches, so that no load waits for another
                    e = tl.load(ids + t * A + a)
                    local = (e >= 0) & (e < E)
                    row = tl.load(inverse + t * A + a, mask=local, other=0).to(tl.int64)
                    tl.store(xq + row * stride_xq + start + k, v, mask=(start + k < H) & local)
                    if QMAX > 0:
                        tl.store(scales + row, scale, mask=local)
        if tl.atomic_add(gate + 3, 1, sem="relaxed") == programs - 1:
            for i in tl.static_range(4):  # nobody draws or waits any more
                tl.store(gate + i, 0)


def variant(num_experts: int, width: int) -> dict[str, int]:
    """Compile-time arguments; few, so that no token count compiles a kernel of its own."""
    bins = max(16, triton.next_power_of_2(num_experts + 2))
    block = min(max(128, triton.next_power_of_2(width)), 4096)
    return {"BINS": bins, "SUB": SUB, "MOST": max(1, 4096 // bins), "BLOCK": block}


SUB, MAX_CHUNKS = 128, 128
"""Slots that are placed at a time, each compared with each; chunks of at least as many."""
PROGRAMS_PER_SM = 4


def arrange(
    ids: Tensor,
    x: Tensor,
    xq: Tensor,
    scales: Tensor,
    num_experts: int,
    fmt: QuantFormat | None,
    clip: float | None,
    zeros: int,
    sms: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fill ``xq`` and ``scales`` by sorted row; returns order [R], inverse [R], offsets [E+1] and so many zeros."""
    (num_tokens, top_k), width, rows = ids.shape, x.shape[1], ids.numel()
    constants = variant(num_experts, width)
    bins = constants["BINS"]
    size = SUB * -(-rows // (SUB * MAX_CHUNKS))
    chunks = -(-rows // size)
    table = torch.empty(2 * rows + num_experts + 1 + zeros + chunks * bins, dtype=torch.int32, device=ids.device)
    arrange_kernel[((2 * chunks if chunks > 1 else 1) + min(num_tokens, sms * PROGRAMS_PER_SM),)](
        ids,
        x,
        xq,
        scales,
        counters(ids.device, 4),
        table,
        rows,
        num_tokens,
        num_experts,
        chunks,
        size,
        zeros,
        width,
        x.stride(0),
        xq.stride(0),
        math.inf if clip is None else clip,
        A=top_k,
        QMAX=0.0 if fmt is None else fmt.qmax,
        PDL=ids.device.type == "cuda",
        **constants,
        num_warps=8,
        enable_fp_fusion=False,
    )
    order, inverse, offsets, zeroed, _ = table.split((rows, rows, num_experts + 1, zeros, chunks * bins))
    return order, inverse, offsets, zeroed
