"""Sort the slots by expert, and write each one's quantised token in that order."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowgmm.formats import QuantFormat
from lowgmm.kernels.quantize import round_to, row_absmax, scales_of
from lowgmm.kernels.queue import counters
from lowgmm.kernels.route import load_ids

COLUMNS = tl.constexpr(32)
"""Experts that one program of the scan sums up."""

DRAWN, COUNTED, SCANNED, PLACED, FINISHED = (tl.constexpr(i) for i in range(5))
"""Words of the gate."""


@triton.jit
def wait_for(counter, least):
    """Until as many have been counted; looking disturbs nobody who counts."""
    while tl.load(counter, volatile=True) < least:
        pass
    tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def announce(counter):
    """Everything that this program has written comes before one more in ``counter``."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def count_chunk(ids, counts, first, end, E, BINS: tl.constexpr, SUB: tl.constexpr):
    """Slots of each expert in a chunk."""
    i = tl.arange(0, SUB)
    sizes = tl.zeros((BINS,), dtype=tl.int32)
    for start in tl.range(first, end, SUB):
        sizes += tl.histogram(load_ids(ids, start + i, end, E), BINS)
    tl.store(counts + tl.arange(0, BINS), sizes)


@triton.jit
def scan_chunks(counts, totals, column, chunks, BINS: tl.constexpr):
    """In place: how many slots of these experts all chunks before a chunk have; and how many all have."""
    i, bins = tl.arange(0, 64), column + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in tl.range(0, chunks, 64):
        at = (start + i)[:, None] * BINS + bins[None, :]
        sizes = tl.load(counts + at, mask=(start + i < chunks)[:, None], other=0)
        tl.store(counts + at, total[None, :] + tl.cumsum(sizes, 0) - sizes, mask=(start + i < chunks)[:, None])
        total += tl.sum(sizes, 0)
    tl.store(totals + bins, total)


@triton.jit
def place_chunk(
    ids, counts, totals, order, inverse, offsets, chunk, chunks, first, end, E, BINS: tl.constexpr, SUB: tl.constexpr
):  # fmt: skip
    """Sorted positions of a chunk's slots, from how many slots of each expert there are in all, and before it."""
    bins, i, lane = tl.arange(0, BINS), tl.arange(0, SUB), tl.arange(0, 32)
    if chunks == 1:
        total = tl.histogram(load_ids(ids, i, end, E), BINS)
        following = tl.cumsum(total, 0) - total
    else:
        total = tl.load(totals + bins)
        following = tl.cumsum(total, 0) - total
    if chunk == 0:
        tl.store(offsets + bins, following, mask=bins <= E)
    if chunks > 1:
        following += tl.load(counts + chunk * BINS + bins)
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
    gate,  # (5,) int32, zero before and after: tickets drawn, chunks counted, columns scanned, chunks placed, programs
    # that are done
    table,  # int32, written: order R, inverse R and offsets E + 1, as ``routing.route`` defines them; ``zeros`` zeros;
    # totals [BINS], counts [chunks, BINS]
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
    SORT: tl.constexpr,
    GATHER: tl.constexpr,
    PDL: tl.constexpr,
    BINS: tl.constexpr,  # power of two > E + 1, at least COLUMNS
    SUB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With SORT, programs that count a chunk's slots, that scan the counts, that place a chunk's slots; with GATHER,
    programs that take tokens in turns. The only chunk is counted by whoever places it.

    Where both are one launch, and within SORT, a program's number is a ticket: whoever is waited for has started before
    whoever waits, in whatever order the hardware starts them.
    """
    if PDL:
        if not SORT:
            gdc_wait()
        gdc_launch_dependents()  # they wait for all of this kernel's writes before they read any
    order, inverse, offsets = table, table + R, table + 2 * R
    zeroed = offsets + E + 1
    totals = zeroed + zeros
    counts = totals + BINS
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    ahead = 0
    if SORT:
        pid = tl.atomic_add(gate + DRAWN, 1, sem="relaxed")
        counting = tl.where(chunks == 1, 0, chunks)
        scanning = tl.where(chunks == 1, 0, BINS // COLUMNS)
        ahead = counting + scanning + chunks
        if pid < counting:
            count_chunk(ids, counts + pid * BINS, pid * size, tl.minimum(pid * size + size, R), E, BINS, SUB)
            announce(gate + COUNTED)
        elif pid < counting + scanning:
            wait_for(gate + COUNTED, counting)
            scan_chunks(counts, totals, (pid - counting) * COLUMNS, chunks, BINS)
            announce(gate + SCANNED)
        elif pid < ahead:
            wait_for(gate + SCANNED, scanning)
            chunk = pid - counting - scanning
            first = chunk * size
            end = tl.minimum(first + size, R)
            place_chunk(ids, counts, totals, order, inverse, offsets, chunk, chunks, first, end, E, BINS, SUB)
            announce(gate + PLACED)
        programs -= ahead
    if GATHER and pid >= ahead:
        mine = pid - ahead
        share, j = tl.cdiv(zeros, programs), tl.arange(0, 64)
        for start in tl.range(0, share, 64):
            at = mine * share + start + j
            tl.store(zeroed + at, tl.zeros((64,), dtype=tl.int32), mask=(start + j < share) & (at < zeros))
        k = tl.arange(0, BLOCK)
        for t in tl.range(mine, T, programs):
            token = x + (tl.zeros((), dtype=tl.int64) + t) * stride_x
            if QMAX > 0:
                row_inverse, scale = scales_of(row_absmax(token, H, clip, BLOCK), QMAX)
            if SORT:
                if t == mine:
                    wait_for(gate + PLACED, chunks)
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
    if SORT:
        if pid >= (ahead if GATHER else ahead - chunks):
            # Of the programs that come last the last one: nobody draws or waits any more.
            if tl.atomic_add(gate + FINISHED, 1, sem="relaxed") == (programs if GATHER else chunks) - 1:
                for i in tl.static_range(FINISHED + 1):
                    tl.store(gate + i, 0)


SUB, MAX_CHUNKS = 128, 512
"""Slots that are placed at a time, each compared with each; chunks of at least as many."""

ONE_LAUNCH = 1024
"""Slots up to which sorting and gathering are one launch."""


def variant(num_experts: int, width: int) -> dict[str, int]:
    """Compile-time arguments that depend on sizes; few, so that no token count compiles a kernel of its own."""
    bins = max(COLUMNS.value, triton.next_power_of_2(num_experts + 2))
    return {"BINS": bins, "SUB": SUB, "BLOCK": min(max(128, triton.next_power_of_2(width)), 4096)}


def arrange(
    ids: Tensor,
    x: Tensor,
    xq: Tensor,
    scales: Tensor,
    num_experts: int,
    fmt: QuantFormat | None,
    clip: float | None,
    zeros: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fill ``xq`` and ``scales`` by sorted row; returns order [R], inverse [R], offsets [E+1] and so many zeros."""
    (num_tokens, top_k), width, rows = ids.shape, x.shape[1], ids.numel()
    constants = variant(num_experts, width)
    bins = constants["BINS"]
    size = SUB * -(-rows // (SUB * MAX_CHUNKS))
    chunks = -(-rows // size)
    sorting = 1 if chunks == 1 else 2 * chunks + bins // COLUMNS.value
    parts = (rows, rows, num_experts + 1, zeros, bins * (chunks + 1))
    table = torch.empty(sum(parts), dtype=torch.int32, device=ids.device)
    pdl = ids.device.type == "cuda"

    def launch(programs: int, num_warps: int, sort: bool, gather: bool, **options: Any) -> None:
        arrange_kernel[(programs,)](
            ids, x, xq, scales, counters(ids.device, 8), table, rows, num_tokens, num_experts, chunks, size, zeros, width,
            x.stride(0), xq.stride(0), math.inf if clip is None else clip, A=top_k,
            QMAX=0.0 if fmt is None else fmt.qmax, SORT=sort, GATHER=gather, PDL=pdl, **constants,
            num_warps=num_warps, enable_fp_fusion=False, **options,
        )  # fmt: skip

    if rows <= ONE_LAUNCH:
        launch(sorting + num_tokens, 8, True, True)
    else:  # apart, because the sort's registers would leave room for few programs that gather
        launch(sorting, 8, True, False)
        launch(num_tokens, 4, False, True, **({"launch_pdl": True} if pdl else {}))
    order, inverse, offsets, zeroed, _ = table.split(parts)
    return order, inverse, offsets, zeroed
