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
from lowgmm.replay import empty, launch

COLUMNS = tl.constexpr(8)
"""Experts that one program of the scan sums up."""

DRAWN, COUNTED, SCANNED, FINISHED = (tl.constexpr(i) for i in range(4))
"""Words of the gate."""


@triton.jit
def wait_for(counter, least):
    """Until as many have been counted; looking disturbs nobody who counts."""
    while tl.load(counter, volatile=True) < least:
        pass
    # Its value is used, or Triton would make it a reduction, which acquires nothing: stale lines would stay in L1.
    while tl.atomic_add(counter, 0, sem="acquire") < least:
        pass


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
    i, bins = tl.arange(0, 256), column + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in tl.range(0, chunks, 256):
        at = (start + i)[:, None] * BINS + bins[None, :]
        sizes = tl.load(counts + at, mask=(start + i < chunks)[:, None], other=0)
        tl.store(counts + at, total[None, :] + tl.cumsum(sizes, 0) - sizes, mask=(start + i < chunks)[:, None])
        total += tl.sum(sizes, 0)
    tl.store(totals + bins, total)


@triton.jit
def place_chunk(
    ids, counts, totals, order, inverse, offsets, chunk, first, end, E, BINS: tl.constexpr, SUB: tl.constexpr
):  # fmt: skip
    """Sorted positions of a chunk's slots, from how many slots of each expert there are in all, and before it."""
    bins, i, lane = tl.arange(0, BINS), tl.arange(0, SUB), tl.arange(0, 32)
    total = tl.load(totals + bins)
    following = tl.cumsum(total, 0) - total
    if chunk == 0:
        tl.store(offsets + bins, following, mask=bins <= E)
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


@triton.jit(do_not_specialize=["R", "E", "chunks", "size"], do_not_specialize_on_alignment=["inverse", "offsets"])
def sort_kernel(
    ids,  # (R,) int
    order,  # (R,) int32, written: as ``routing.route`` defines it
    inverse,  # (R,) int32, written likewise
    offsets,  # (E+1,) int32, written likewise
    counts,  # (chunks + 1, BINS) int32, written
    gate,  # (4,) int32, zero before and after: tickets drawn, chunks counted, columns scanned, chunks placed
    R,
    E,
    chunks,
    size,  # slots of a chunk, a multiple of SUB
    PDL: tl.constexpr,
    BINS: tl.constexpr,  # power of two > E + 1, at least COLUMNS
    SUB: tl.constexpr,
):
    """Grid (2 · chunks + BINS/COLUMNS,): programs that count a chunk's slots, that scan the counts, that place a
    chunk's slots. A program's number is a ticket: whoever is waited for has started before whoever waits, in whatever
    order the hardware starts them.
    """
    if PDL:
        gdc_launch_dependents()  # they wait for all of this kernel's writes before they read any
    totals = counts + chunks * BINS
    pid = tl.atomic_add(gate + DRAWN, 1, sem="relaxed")
    scanning = BINS // COLUMNS
    if pid < chunks:
        count_chunk(ids, counts + pid * BINS, pid * size, tl.minimum(pid * size + size, R), E, BINS, SUB)
        announce(gate + COUNTED)
    elif pid < chunks + scanning:
        wait_for(gate + COUNTED, chunks)
        scan_chunks(counts, totals, (pid - chunks) * COLUMNS, chunks, BINS)
        announce(gate + SCANNED)
    else:
        wait_for(gate + SCANNED, scanning)
        chunk = pid - chunks - scanning
        first = chunk * size
        place_chunk(
            ids, counts, totals, order, inverse, offsets, chunk, first, tl.minimum(first + size, R), E, BINS, SUB
        )  # fmt: skip
        if tl.atomic_add(gate + FINISHED, 1, sem="relaxed") == chunks - 1:  # nobody draws or waits any more
            for i in tl.static_range(FINISHED + 1):
                tl.store(gate + i, 0)


@triton.jit
def clear(words, number, mine, programs):
    """This program's share of so many zeros."""
    share, j = tl.cdiv(number, programs), tl.arange(0, 64)
    for start in tl.range(0, share, 64):
        at = mine * share + start + j
        tl.store(words + at, tl.zeros((64,), dtype=tl.int32), mask=(start + j < share) & (at < number))


@triton.jit(do_not_specialize=["R", "E", "number"], do_not_specialize_on_alignment=["inverse", "offsets", "zeros"])
def gather_kernel(
    ids,  # (T, A) int
    x,  # (T, H) float, row stride stride_x
    xq,  # (R, H) int8, float8e4nv or bfloat16, row stride stride_xq, written by sorted row
    scales,  # (R,) float32, written likewise
    order,  # (R,) int32, with SORT written
    inverse,  # (R,) int32, with SORT written
    offsets,  # (E+1,) int32, with SORT written
    zeros,  # (number,) int32, written
    number,
    R,
    E,
    H,
    stride_x,
    stride_xq,
    clip,
    A: tl.constexpr,
    QMAX: tl.constexpr,  # 0: tokens are copied
    SORT: tl.constexpr,
    PDL: tl.constexpr,
    BINS: tl.constexpr,  # power of two > E + 1
    SLOTS: tl.constexpr,  # power of two >= R, with SORT
    BLOCK: tl.constexpr,
):
    """Grid (T,): a token is quantised once, and written to the sorted row of each of its slots.

    With SORT, for a few slots, each program finds out itself where its slots come, by looking at all; and a program
    more writes the offsets.
    """
    if PDL:
        if not SORT:
            gdc_wait()
        gdc_launch_dependents()  # they wait for all of this kernel's writes before they read any
    t = tl.program_id(0)
    if SORT:
        i = tl.arange(0, SLOTS)
        all_ids = load_ids(ids, i, R, E)
    if t * A < R:
        clear(zeros, number, t, R // A)
        k = tl.arange(0, BLOCK)
        token = x + t.to(tl.int64) * stride_x
        if QMAX > 0:
            row_inverse, scale = scales_of(row_absmax(token, H, clip, BLOCK), QMAX)
        for start in tl.range(0, H, BLOCK):
            v = tl.load(token + start + k, mask=start + k < H, other=0.0)
            if QMAX > 0:
                v = round_to(v.to(tl.float32) * row_inverse, QMAX, xq.dtype.element_ty)
            for a in tl.static_range(A):  # unrolled and without branches, so that no load waits for another
                slot = t * A + a
                e = load_ids(ids, slot, R, E)
                if SORT:
                    row = tl.sum(((all_ids < e) | ((all_ids == e) & (i < slot))).to(tl.int32), 0)
                    if start == 0:
                        tl.store(inverse + slot, row)
                        tl.store(order + row, slot)
                else:
                    row = tl.load(inverse + slot)
                local = e < E
                tl.store(xq + row.to(tl.int64) * stride_xq + start + k, v, mask=(start + k < H) & local)
                if QMAX > 0:
                    tl.store(scales + row, scale, mask=local)
    elif SORT:
        bins = tl.arange(0, BINS)
        sizes = tl.histogram(all_ids, BINS)
        tl.store(offsets + bins, tl.cumsum(sizes, 0) - sizes, mask=bins <= E)


SUB, MAX_CHUNKS = 128, 512
"""Slots that are placed at a time, each compared with each; chunks of at least as many."""

FEW = (128, 1024, 4096)
"""Slots that a program looks at all of; more are sorted in a launch of their own."""


def bins_of(num_experts: int) -> int:
    return max(16, triton.next_power_of_2(num_experts + 2))


def arrange(
    ids: Tensor,
    x: Tensor,
    xq: Tensor,
    scales: Tensor,
    num_experts: int,
    fmt: QuantFormat | None,
    clip: float | None,
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fill ``xq`` and ``scales`` by sorted row; returns order [R], inverse [R], offsets [E+1] and so many zeros."""
    (num_tokens, top_k), width, rows = ids.shape, x.shape[1], ids.numel()
    bins, few = bins_of(num_experts), next((n for n in FEW if rows <= n), 0)
    size = SUB * -(-rows // (SUB * MAX_CHUNKS))
    chunks = 0 if few else -(-rows // size)
    parts = (bins * (chunks + 1), rows, rows, num_experts + 1, number)
    table = empty((sum(parts),), torch.int32, ids.device)
    counts, order, inverse, offsets, zeros = table.split(parts)
    pdl = ids.device.type == "cuda"
    after: dict[str, Any] = {"launch_pdl": True} if pdl and not few else {}  # no other backend knows the option
    if not few:
        launch(
            sort_kernel,
            2 * chunks + bins // COLUMNS.value,
            *(ids, order, inverse, offsets, counts, counters(ids.device, 4), rows, num_experts, chunks, size),
            *(pdl, bins, SUB),
            num_warps=8,
        )
    clip = math.inf if clip is None else clip
    block = min(max(128, triton.next_power_of_2(width)), 4096)
    launch(
        gather_kernel,
        num_tokens + (few > 0),
        *(ids, x, xq, scales, order, inverse, offsets, zeros, number, rows, num_experts),
        *(width, x.stride(0), xq.stride(0), clip),
        *(top_k, 0.0 if fmt is None else fmt.qmax, few > 0, pdl, bins, max(few, 1), block),
        num_warps=4,
        enable_fp_fusion=False,
        **after,
    )
    return order, inverse, offsets, zeros
