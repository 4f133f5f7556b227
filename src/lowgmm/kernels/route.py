"""Routing on the device: a stable counting sort of the slots by expert, with whatever else the layer must prepare.

One program per expert and no communication between programs, so one launch sorts any number of slots, always into the
same order. Each program counts all ids (they are few, and in the cache), which tells it where its expert's rows start.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from lowgmm.formats import QuantFormat
from lowgmm.kernels.quantize import quantize_row, round_to, row_absmax, scales_of
from lowgmm.replay import launch
from lowgmm.routing import LOWEST, Router, max_row_tiles

TILE_FIELDS = tl.constexpr(4)
"""A row tile's record: its expert, the expert's first tile, first row, and end of rows."""


@triton.jit
def load_ids(ids, at, R, E):
    """Expert of each slot: E for an id outside [0, E), E + 1 past the last slot."""
    e = tl.load(ids + at, mask=at < R, other=-1)
    e = tl.where((e >= 0) & (e < E), e, E).to(tl.int32)
    return tl.where(at < R, e, E + 1)


@triton.jit
def place_expert(
    ids,  # (R,) int
    order,  # (R,) int32, written: sorted position -> slot
    inverse,  # (R,) int32, written: slot -> sorted position
    offsets,  # (E+1,) int32, written at e + 1
    tiles,  # (bound, TILE_FIELDS) int32, written: records of this expert's row tiles
    done,  # (bound,) int32, zeroed
    count,  # (1,) int32, written by program 0: row tiles of all experts
    e,  # 0 … E; E stands for the slots without an expert, which come last
    R,
    E,
    TILES: tl.constexpr,
    INVERSE: tl.constexpr,
    BM: tl.constexpr,
    BINS: tl.constexpr,  # power of two > E + 1
    BLOCK: tl.constexpr,
):
    bins, i = tl.arange(0, BINS), tl.arange(0, BLOCK)
    sizes = tl.zeros((BINS,), dtype=tl.int32)
    for start in tl.range(0, R, BLOCK):
        sizes += tl.histogram(load_ids(ids, start + i, R, E), BINS)
    first_row = tl.sum(tl.where(bins < e, sizes, 0), 0)
    size = tl.sum(tl.where(bins == e, sizes, 0), 0)

    placed, start = first_row * 0, first_row * 0
    while placed < size:
        mine = load_ids(ids, start + i, R, E) == e
        rank = placed + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + first_row + rank, start + i, mask=mine)
        if INVERSE:
            tl.store(inverse + start + i, first_row + rank, mask=mine)
        placed += tl.sum(mine.to(tl.int32), 0)
        start += BLOCK
    if INVERSE:
        if e == 0:
            tl.store(offsets, 0)
        if e < E:
            tl.store(offsets + e + 1, first_row + size)
    if TILES:
        row_tiles = tl.where(bins < E, tl.cdiv(sizes, BM), 0)
        first = tl.sum(tl.where(bins < e, row_tiles, 0), 0)
        if e == 0:
            tl.store(count, tl.sum(row_tiles, 0))
        if e < E:
            j = tl.arange(0, 64)
            for from_tile in tl.range(0, tl.cdiv(size, BM), 64):
                tile = first + from_tile + j
                own = from_tile + j < tl.cdiv(size, BM)
                record = tiles + tile * TILE_FIELDS
                tl.store(record, tl.zeros_like(tile) + e, mask=own)
                tl.store(record + 1, tl.zeros_like(tile) + first, mask=own)
                tl.store(record + 2, tl.zeros_like(tile) + first_row, mask=own)
                tl.store(record + 3, tl.zeros_like(tile) + first_row + size, mask=own)
                tl.store(done + tile, tl.zeros_like(tile), mask=own)


@triton.jit(do_not_specialize=["R"])
def sort_kernel(ids, order, inverse, offsets, R, E, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (E+1,)."""
    e = tl.program_id(0)
    place_expert(ids, order, inverse, offsets, order, order, order, e, R, E, False, True, 1, BINS, BLOCK)


@triton.jit
def scatter_row(
    x, xq, scales, ids, inverse, gate, E, H, clip, A: tl.constexpr, QMAX: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Quantise a token once, and write it to the sorted row of each of its slots, once the sort is done."""
    row_inverse, scale = scales_of(row_absmax(x, H, clip, BLOCK), QMAX)
    while tl.atomic_add(gate + 1, 0, sem="acquire") < E:
        pass
    k = tl.arange(0, BLOCK)
    for start in tl.range(0, H, BLOCK):
        v = tl.load(x + start + k, mask=start + k < H, other=0.0).to(tl.float32) * row_inverse
        q = round_to(v, QMAX, xq.dtype.element_ty)
        for a in tl.static_range(A):  # unrolled and without branches, so that the loads do not wait for each other
            e = tl.load(ids + a)
            local = (e >= 0) & (e < E)
            row = tl.load(inverse + a, mask=local, other=0).to(tl.int64)
            tl.store(xq + row * H + start + k, q, mask=(start + k < H) & local)
            tl.store(scales + row, scale, mask=local)
    tl.debug_barrier()
    if tl.atomic_add(gate + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(gate + 1, 0)  # all experts are sorted and all tokens placed


@triton.jit(do_not_specialize=["R", "bound"])
def prepare_kernel(
    ids,  # (T, A) int
    x,  # (T, H) float, row stride stride_x
    xq,  # (T, H) int8 or float8e4nv
    scales,  # (T,) float32
    out,  # (T, H)
    workspace,  # int32, see moe_layer
    gate,  # (2,) int32, zero before and after: with GATHER a ticket, and experts sorted plus tokens placed
    R,
    bound,
    E,
    H,
    stride_x,
    clip,
    A: tl.constexpr,
    QMAX: tl.constexpr,  # 0: hidden is not quantised
    GROUPS: tl.constexpr,  # scales of a row of h; 0: h is not quantised by its absmax
    PDL: tl.constexpr,
    GATHER: tl.constexpr,  # xq and scales have a row for each slot, sorted, instead of one for each token
    ZERO: tl.constexpr,  # tokens without an expert are zeroed here, because no combine follows
    BM: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid (E + T,): everything ahead of the layer's products. Programs 0 … E-1 sort, the others take a token each.

    With GATHER the tokens wait for the sort. Then a program's number is a ticket: those that sort have started before
    those that wait for them, in whatever order the hardware starts them.
    """
    if PDL:
        gdc_launch_dependents()  # they wait for all of this kernel's writes before they read any
    pid = tl.program_id(0)
    if GATHER:
        pid = tl.atomic_add(gate, 1, sem="relaxed")
        if pid == tl.num_programs(0) - 1:
            tl.store(gate, 0)  # everyone has drawn one
    tiles = workspace + 4
    done = tiles + bound * TILE_FIELDS
    order = done + bound
    absmax = order + R
    inverse = absmax + R * GROUPS
    if pid < E:
        if pid == 0:
            tl.store(workspace, 0)  # the queue's ticket
        place_expert(
            ids, order, inverse, inverse + R, tiles, done, workspace + 1, pid, R, E, True, GATHER, BM, BINS, BLOCK
        )  # fmt: skip
        if GATHER:
            tl.debug_barrier()
            tl.atomic_add(gate + 1, 1, sem="release")
    else:
        t = (pid - E).to(tl.int64)
        if GATHER:
            scatter_row(
                x + t * stride_x, xq, scales, ids + t * A, inverse + t * A, gate, E, H, clip, A, QMAX, BLOCK_H
            )  # fmt: skip
        elif QMAX > 0:
            quantize_row(x + t * stride_x, xq + t * H, scales + t, H, clip, QMAX, BLOCK_H)
        if GROUPS > 0:
            j = tl.arange(0, 64)
            for start in tl.range(0, A * GROUPS, 64):
                inside = start + j < A * GROUPS
                tl.store(absmax + t * A * GROUPS + start + j, tl.zeros((64,), dtype=tl.int32), mask=inside)
        if ZERO:
            e = tl.load(ids + t)
            if (e < 0) | (e >= E):
                k = tl.arange(0, BLOCK_H)
                for start in tl.range(0, H, BLOCK_H):
                    zeros = tl.zeros((BLOCK_H,), dtype=tl.float32).to(out.dtype.element_ty)
                    tl.store(out + t * H + start + k, zeros, mask=start + k < H)


@triton.jit
def best_of(values, at, EXPERTS: tl.constexpr):
    """The highest value and its index; of equal ones the lowest index."""
    highest = tl.max(values, 0)
    return highest, tl.min(tl.where(values == highest, at, EXPERTS), 0)


@triton.jit
def select_experts_kernel(
    logits,  # (T, E) float, row stride stride_l
    bias,  # (E,) float
    ids,  # (T, A) int32, written
    weights,  # (T, A) float32, written
    E,
    stride_l,
    scale,
    A: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    LOWEST: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two >= E
    SLOTS: tl.constexpr,  # power of two >= A
):
    """Grid (T,): ``routing.select_experts`` of one token."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    taken = float("-inf")
    x = tl.load(logits + t * stride_l + e, mask=e < E, other=taken).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(x)
    else:
        shifted = tl.exp(x - tl.max(x, 0))
        scores = tl.div_rn(shifted, tl.sum(shifted, 0))
    choice = scores
    if BIAS:
        choice += tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)
    choice = tl.where(choice >= LOWEST, choice, LOWEST)  # NaN too
    choice = tl.where(e < E, choice, taken)
    if NUM_GROUPS > 1:
        group = e // (E // NUM_GROUPS)
        best = tl.zeros((EXPERTS,), dtype=tl.float32) + taken  # of the group with this index
        for g in tl.static_range(NUM_GROUPS):
            own = tl.where(group == g, choice, taken)
            first, at = best_of(own, e, EXPERTS)
            second, _ = best_of(tl.where(e == at, taken, own), e, EXPERTS)
            best = tl.where(e == g, first + tl.where(second > taken, second, 0.0), best)
        allowed = tl.zeros((EXPERTS,), dtype=tl.int32)
        for _ in tl.static_range(TOPK_GROUPS):
            _, g = best_of(best, e, EXPERTS)
            best = tl.where(e == g, taken, best)
            allowed = tl.where(group == g, 1, allowed)
        choice = tl.where((allowed == 0) & (e < E), LOWEST, choice)
    chosen = tl.zeros((SLOTS,), dtype=tl.int32)
    w = tl.zeros((SLOTS,), dtype=tl.float32)
    for a in tl.static_range(A):
        _, at = best_of(choice, e, EXPERTS)
        choice = tl.where(e == at, taken, choice)
        chosen = tl.where(slot == a, at, chosen)
        w = tl.where(slot == a, tl.sum(tl.where(e == at, scores, 0.0), 0), w)
    if RENORMALIZE:
        w = tl.div_rn(w, tl.sum(w, 0) + 1e-20)
    tl.store(ids + t * A + slot, chosen, mask=slot < A)
    tl.store(weights + t * A + slot, w * scale, mask=slot < A)


def select_experts(logits: Tensor, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """ids [T, A] int32 and weights [T, A] float32: as ``routing.select_experts`` defines them."""
    num_tokens, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    bias = None if bias is None else bias.contiguous()
    ids = torch.empty((num_tokens, router.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, router.top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        experts = max(32, triton.next_power_of_2(num_experts))
        launch(
            select_experts_kernel,
            num_tokens,
            logits,
            bias,
            ids,
            weights,
            num_experts,
            logits.stride(0),
            router.scale,
            A=router.top_k,
            SIGMOID=router.scoring == "sigmoid",
            RENORMALIZE=router.renormalize,
            BIAS=bias is not None,
            NUM_GROUPS=router.num_groups,
            TOPK_GROUPS=router.topk_groups,
            LOWEST=LOWEST,
            EXPERTS=experts,
            SLOTS=triton.next_power_of_2(router.top_k),
            num_warps=1 if experts <= 256 else 4,
            enable_fp_fusion=False,
        )
    return ids, weights


def _blocks(num_rows: int, num_experts: int) -> dict[str, int]:
    """Few variants, so that no token count compiles a kernel of its own."""
    block = 128 if num_rows <= 128 else 1024 if num_rows <= 4096 else 4096
    return {"BINS": max(16, triton.next_power_of_2(num_experts + 2)), "BLOCK": block}


def sort(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """order [R] and inverse [R] (int64), offsets [E+1] (int32): as ``routing.route`` defines them."""
    order, inverse, offsets = sort_slots(topk_ids.contiguous(), num_experts)
    return order.long(), inverse.long(), offsets


def sort_slots(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`sort`, of contiguous ids and all in int32."""
    order, inverse = torch.empty((2, ids.numel()), dtype=torch.int32, device=ids.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    launch(
        *(sort_kernel, num_experts + 1, ids, order, inverse, offsets, ids.numel(), num_experts),
        **_blocks(ids.numel(), num_experts),
        num_warps=4,
    )
    return order, inverse, offsets


def prepare(
    ids: Tensor,
    x: Tensor,
    xq: Tensor,
    scales: Tensor,
    out: Tensor,
    workspace: Tensor,
    gate: Tensor | None,
    num_experts: int,
    block_m: int,
    fmt: QuantFormat | None,
    clip: float | None,
    groups: int,
    pdl: bool,
) -> None:
    """Launch :func:`prepare_kernel`: sort the slots, list the row tiles, quantise the tokens, reset the counters.

    With a ``gate``, xq and scales are filled by sorted row.
    """
    (num_tokens, top_k), width = ids.shape, x.shape[1]
    block_h = min(max(128, triton.next_power_of_2(width)), 4096)
    launch(
        prepare_kernel,
        num_experts + num_tokens,
        ids,
        x,
        xq,
        scales,
        out,
        workspace,
        workspace if gate is None else gate,
        ids.numel(),
        max_row_tiles(ids.numel(), num_experts, block_m),
        num_experts,
        width,
        x.stride(0),
        math.inf if clip is None else clip,
        A=top_k,
        QMAX=0.0 if fmt is None else fmt.qmax,
        GROUPS=groups,
        PDL=pdl,
        GATHER=gate is not None,
        ZERO=top_k == 1,
        BM=block_m,
        BLOCK_H=block_h,
        **_blocks(ids.numel(), num_experts),
        num_warps=4,
        enable_fp_fusion=False,
    )
