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

DRAWN, COUNTED, FINISHED = (tl.constexpr(i) for i in range(3))
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
def count(ids, first, end, E, BINS: tl.constexpr, STEP: tl.constexpr):
    """Slots of each expert from ``first`` to ``end``."""
    i = tl.arange(0, STEP)
    sizes = tl.zeros((BINS,), dtype=tl.int32)
    for start in tl.range(first, end, STEP):
        e = load_ids(ids, start + i, end, E)
        sizes += tl.histogram(e, BINS, e < E)
    return sizes


@triton.jit
def add_up(counts, group, groups, E, BINS: tl.constexpr):
    """Slots of each expert in all groups, and in those before a group."""
    ROWS: tl.constexpr = max(1, min(32, 8192 // BINS))
    i, bins = tl.arange(0, ROWS), tl.arange(0, BINS)
    total, before = tl.zeros((BINS,), dtype=tl.int32), tl.zeros((BINS,), dtype=tl.int32)
    read = bins < tl.cdiv(E, 8) * 8  # a multiple of 8, so that loads stay wide
    for start in tl.range(0, groups, ROWS):
        at = (start + i)[:, None]
        sizes = tl.load(counts + at * BINS + bins[None, :], mask=(at < groups) & read[None, :], other=0)
        total += tl.sum(sizes, 0)
        before += tl.sum(tl.where(at < group, sizes, 0), 0)
    return total, before


@triton.jit
def rank_of(e, SUB: tl.constexpr):
    """How many of these slots come before each of them and have the same expert."""
    i, j = tl.arange(0, SUB), tl.arange(0, 64)
    key = e * SUB + i
    rank = tl.zeros((SUB,), dtype=tl.int32)
    for other in tl.range(0, SUB, 64):  # not all at once, for want of registers
        # Expert equal and slot lower in one comparison: 0 <= difference < i.
        difference = key[None, :] - 1 - tl.gather(key, other + j, 0)[:, None]
        rank += tl.sum((difference.to(tl.uint32, bitcast=True) < i[None, :].to(tl.uint32)).to(tl.int32), 0)
    return rank


@triton.jit
def place(
    ids, order, inverse, offsets, counts, gate, chunk, R, E, groups, size,
    BINS: tl.constexpr, STEP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Sorted positions of SUB slots. Whatever they can tell without the groups' counts comes before the wait."""
    i, first = tl.arange(0, SUB), chunk * SUB
    group = first // size
    e = load_ids(ids, first + i, R, E)
    rank = rank_of(e, SUB)
    near = count(ids, group * size, first, E, BINS, STEP)
    wait_for(gate + COUNTED, groups)
    total, before = add_up(counts, group, groups, E, BINS)
    start = tl.cumsum(total, 0) - total
    before += near
    # Slots without an expert come after all that have one: as many as are before this chunk and are not in ``before``.
    last = first + tl.sum(total - before, 0)
    if chunk == 0:
        bins = tl.arange(0, BINS)
        tl.store(offsets + bins, start, mask=bins < E)
        tl.store(offsets + E, last)
    position = rank + tl.where(e < E, tl.gather(start + before, tl.minimum(e, BINS - 1), 0), last)
    tl.store(order + position, first + i, mask=first + i < R)
    tl.store(inverse + first + i, position, mask=first + i < R)


@triton.jit(
    do_not_specialize=["R", "E", "groups", "chunks", "size"], do_not_specialize_on_alignment=["inverse", "offsets"]
)
def sort_kernel(
    ids,  # (R,) int
    order,  # (R,) int32, written: as ``routing.route`` defines it
    inverse,  # (R,) int32, written likewise
    offsets,  # (E+1,) int32, written likewise
    counts,  # (groups, BINS) int32, written
    gate,  # (3,) int32, zero before and after: tickets drawn, groups counted, chunks placed
    R,
    E,
    groups,
    chunks,  # of SUB slots
    size,  # slots of a group, a multiple of STEP
    PDL: tl.constexpr,
    BINS: tl.constexpr,  # power of two >= E
    STEP: tl.constexpr,  # slots that are counted at a time, a multiple of SUB
    SUB: tl.constexpr,
):
    """Grid (groups + chunks,): programs that count a group's slots, that place a chunk's slots. A program's number is a
    ticket: whoever is waited for has started before whoever waits, in whatever order the hardware starts them.
    """
    if PDL:
        gdc_launch_dependents()  # they wait for all of this kernel's writes before they read any
    pid = tl.atomic_add(gate + DRAWN, 1, sem="relaxed")
    if pid < groups:
        first = pid * size
        sizes = count(ids, first, tl.minimum(first + size, R), E, BINS, STEP)
        tl.store(counts + pid * BINS + tl.arange(0, BINS), sizes)
        announce(gate + COUNTED)
    else:
        place(ids, order, inverse, offsets, counts, gate, pid - groups, R, E, groups, size, BINS, STEP, SUB)
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


@triton.jit
def sorted_rows(ids, all_ids, inverse, offsets, t, R, E, A: tl.constexpr, SORT: tl.constexpr):
    """A token's slots: their sorted rows, found in all ids with SORT, and whether they have experts."""
    rows, local = (), ()
    if SORT:
        experts = ()
        for a in tl.static_range(A):
            e = load_ids(ids, t * A + a, R, E)
            experts = experts + (e,)  # type: ignore[assignment]  # noqa: RUF005
        i = tl.arange(0, all_ids.shape[0])
        for a in tl.static_range(A):
            mine = experts[a]  # type: ignore[var-annotated]
            row = tl.sum(((all_ids < mine) | ((all_ids == mine) & (i < t * A + a))).to(tl.int32), 0)
            rows, local = rows + (row,), local + (mine < E,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        end = tl.load(offsets + E)
        for a in tl.static_range(A):
            row = tl.load(inverse + t * A + a)
            rows, local = rows + (row,), local + (row < end,)  # type: ignore[assignment]  # noqa: RUF005
    return rows, local


@triton.jit
def spread(xq, rows, local, v, at, H, stride, row_inverse, A: tl.constexpr, QMAX: tl.constexpr):
    """Some columns of a token, quantised with QMAX, to each of its rows."""
    if QMAX > 0:
        v = round_to(v.to(tl.float32) * row_inverse, QMAX, xq.dtype.element_ty)
    for a in tl.static_range(A):
        tl.store(xq + rows[a].to(tl.int64) * stride + at, v, mask=(at < H) & local[a])


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
    WHOLE: tl.constexpr,  # BLOCK >= H
):
    """Grid (T,): a token is quantised once, and written to the sorted row of each of its slots.

    With SORT, for a few slots, each program finds out itself where its slots come, by looking at all; and a program
    more writes the offsets.
    """
    t = tl.program_id(0)
    if not SORT:
        clear(zeros, number, t, R // A)
    if PDL:
        if not SORT:
            gdc_wait()
        gdc_launch_dependents()  # they wait for all of this kernel's writes before they read any
    if SORT:
        i = tl.arange(0, SLOTS)
        all_ids = load_ids(ids, i, R, E)
    if t * A < R:
        k = tl.arange(0, BLOCK)
        token = x + t.to(tl.int64) * stride_x
        # All rows are known before any is written: a load stays behind a store, which might be of the same word.
        v = tl.load(token + k, mask=k < H, other=0.0)
        if SORT:
            clear(zeros, number, t, R // A)
        rows, local = sorted_rows(ids, all_ids if SORT else None, inverse, offsets, t, R, E, A, SORT)
        row_inverse = 1.0
        if QMAX > 0:
            row_inverse, scale = scales_of(row_absmax(token, H, clip, BLOCK), QMAX)
        spread(xq, rows, local, v, k, H, stride_xq, row_inverse, A, QMAX)
        if not WHOLE:
            for start in tl.range(BLOCK, H, BLOCK):
                v = tl.load(token + start + k, mask=start + k < H, other=0.0)
                spread(xq, rows, local, v, start + k, H, stride_xq, row_inverse, A, QMAX)
        for a in tl.static_range(A):
            if SORT:
                tl.store(inverse + t * A + a, rows[a])
                tl.store(order + rows[a], t * A + a)
            if QMAX > 0:
                tl.store(scales + rows[a], scale, mask=local[a])
    elif SORT:
        bins = tl.arange(0, BINS)
        sizes = tl.histogram(all_ids, BINS)
        tl.store(offsets + bins, tl.cumsum(sizes, 0) - sizes, mask=bins <= E)


FEW = (128, 1024, 4096)
"""Slots that a program looks at all of; more are sorted in a launch of their own."""

SUB, STEP, MAX_GROUPS = 128, 1024, 64
"""Slots that are placed at a time, each compared with each; that are counted at a time; groups of at least as many."""


def bins_of(values: int) -> int:
    return max(16, triton.next_power_of_2(values))


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
    few = next((n for n in FEW if rows <= n), 0)
    size = STEP * -(-rows // (STEP * MAX_GROUPS))
    groups, bins = 0 if few else -(-rows // size), bins_of(num_experts)
    parts = (groups * bins, rows, rows, num_experts + 1, number)
    counts, order, inverse, offsets, zeros = empty((sum(parts),), torch.int32, ids.device).split(parts)
    pdl = ids.device.type == "cuda"
    after: dict[str, Any] = {"launch_pdl": True} if pdl and not few else {}  # no other backend knows the option
    if not few:
        chunks = -(-rows // SUB)
        launch(
            sort_kernel,
            groups + chunks,
            *(ids, order, inverse, offsets, counts, counters(ids.device, 3), rows, num_experts, groups, chunks, size),
            *(pdl, bins, STEP, SUB),
            num_warps=4,
        )
    clip = math.inf if clip is None else clip
    block = min(max(128, triton.next_power_of_2(width)), 4096)
    launch(
        gather_kernel,
        num_tokens + (few > 0),
        *(ids, x, xq, scales, order, inverse, offsets, zeros, number, rows, num_experts),
        *(width, x.stride(0), xq.stride(0), clip, top_k, 0.0 if fmt is None else fmt.qmax, few > 0, pdl),
        *(bins_of(num_experts + 2), max(few, 1), block, block >= width),
        num_warps=4,
        enable_fp_fusion=False,
        **after,
    )
    return order, inverse, offsets, zeros
