"""The whole expert layer: one persistent kernel whose programs draw gate/up tiles, then down tiles, from one queue.

Why it cannot hang. Tickets are drawn in ascending order, and all gate/up tiles come before all down tiles. Only a down
tile waits, and only for gate/up tiles. Each of those was drawn by a program that is running, before the ticket of the
tile that waits; that program either works on it, or drew it ahead while it works on a ticket that is lower still,
another gate/up tile. Those never wait, so they end. It holds for any number of programs, resident at once or not:
a program that has not started has drawn nothing, so nobody waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowgmm.kernels.combine import slots_of, sum_slots
from lowgmm.kernels.moe_tiles import down_tile, gate_up_tile
from lowgmm.kernels.quantize import round_to, row_absmax, scales_of
from lowgmm.kernels.route import TILE_FIELDS
from lowgmm.kernels.tiles import BAND

BOTH, UP, DOWN = (tl.constexpr(i) for i in range(3))
"""What one launch does. UP and DOWN, one after the other, are the layer in two launches."""


@triton.jit
def expert_of(ids, slot, E):
    """The slot's expert, or -1 if it has none; compared before it is narrowed to 32 bits."""
    e = tl.load(ids + slot)
    return tl.where((e >= 0) & (e < E), e, -1).to(tl.int32)


@triton.jit
def find_task(tiles, task, tiles_n, BM: tl.constexpr):
    """Row tile's number, expert, first row, end of its expert's rows, column tile: of task number ``task``.

    Row tiles of an expert come in bands, in which rows change fastest: weights larger than L2 are read once per band.
    """
    record = tiles + (task // tiles_n) * TILE_FIELDS
    expert, first = tl.load(record), tl.load(record + 1)
    begin, end = tl.load(record + 2), tl.load(record + 3)
    local = task - first * tiles_n
    band = local // (BAND * tiles_n)
    height = tl.minimum(tl.cdiv(end - begin, BM) - band * BAND, BAND)
    local -= band * BAND * tiles_n
    within = band * BAND + local % height
    return first + within, expert, begin + within * BM, end, local // height


@triton.jit
def prefetch(w, rows, width, BYTES: tl.constexpr):
    """Ask L2 for whole rows of a matrix of this width; nothing waits for them."""
    line = tl.arange(0, 16) * (128 // BYTES)
    for start in tl.range(0, width, 16 * 128 // BYTES):
        at = tl.where(start + line < width, start + line, 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [w + rows[:, None] * width + at[None, :]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_up(w13, expert, n_tile, H, I, BN: tl.constexpr, LAYOUT: tl.constexpr, BYTES: tl.constexpr):
    """Ask L2 for the weights of a gate/up tile."""
    rows = n_tile * BN + tl.arange(0, BN)
    rows = tl.where(rows < I, rows, 0)
    if LAYOUT == "concatenated":
        prefetch(w13, expert.to(tl.int64) * 2 * I + rows, H, BYTES)
        prefetch(w13, expert.to(tl.int64) * 2 * I + I + rows, H, BYTES)
    elif LAYOUT == "interleaved":
        prefetch(w13, expert.to(tl.int64) * I + rows, 2 * H, BYTES)
    else:
        prefetch(w13, expert.to(tl.int64) * I + rows, H, BYTES)


@triton.jit
def requantise_rows(
    h, hq, absmax, row, end, I, stride_hq, QMAX: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """hq = the rows of h in the weights' format, now that each row's absmax is known.

    In place: a row of hq starts where its row of h starts, and is at most half as long. So a block is written over
    values that earlier blocks have read, or, in the first block, this one.
    """
    rm = row + tl.arange(0, BM)
    safe = tl.where(rm < end, rm, row)
    inverse, _scale = scales_of(tl.load(absmax + safe, volatile=True).to(tl.float32, bitcast=True), QMAX)
    for start in tl.range(0, I, BLOCK):
        k = start + tl.arange(0, BLOCK)
        at = safe.to(tl.int64)[:, None] * I + k[None, :]
        live = (rm < end)[:, None] & (k < I)[None, :]
        v = tl.load(h + at, mask=live, other=0.0).to(tl.float32) * inverse[:, None]
        tl.debug_barrier()
        at = safe.to(tl.int64)[:, None] * stride_hq + k[None, :]
        tl.store(hq + at, round_to(v, QMAX, hq.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["R", "bound"])  # a token count must never compile anything
def moe_layer_kernel(
    x,  # (T, H) values, row stride stride_x; with DIRECT (1, H) floats
    scales_x,  # (T,) float32
    w13,  # (E, 2I, H): descriptor of [BN1, BK1] or pointer
    w13_pointer,  # w13 again, as a pointer, for prefetch
    scales_w13,  # (E, 2I) float32
    bias_w13,  # (E, 2I)
    w2,  # (E, H, I): descriptor of [BN2, BK2] or pointer
    w2_pointer,  # likewise
    scales_w2,  # (E, H) float32
    bias_w2,  # (E, H)
    scales_h,  # (E,) float32
    h,  # (R, I) scratch
    hq,  # (R, I), row stride stride_hq: h in the weights' format, in its memory; with TMA in DOWN a descriptor
    y,  # (R, H) scratch, by slot
    out,  # (T, H)
    ids,  # (T, A)
    topk_weights,  # (T, A)
    workspace,  # int32: ticket, number of tiles, -, -, tiles, done, order, absmax, columns_done
    R,
    bound,
    E,
    H,
    I,
    stride_x,
    stride_hq,
    clip,
    slope,
    limit,
    PHASE: tl.constexpr,
    GATHERED: tl.constexpr,  # x and scales_x have a row per slot, sorted; with TMA x is a descriptor of [BM, BK1]
    DIRECT: tl.constexpr,  # one token: its slots are the tiles, nothing was prepared, and the sum is done here
    REQUANTISE: tl.constexpr,  # UP: the last tile of a row block writes hq
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    A: tl.constexpr,
    BM: tl.constexpr, BN1: tl.constexpr, BK1: tl.constexpr, BN2: tl.constexpr, BK2: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_K1: tl.constexpr, EVEN_K2: tl.constexpr,
    TYPE: tl.constexpr, ACC: tl.constexpr, PROMOTE: tl.constexpr, QMAX: tl.constexpr, ACTIVATION: tl.constexpr,
    LAYOUT: tl.constexpr, CLAMPED: tl.constexpr, NVIDIA: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
    BIAS1: tl.constexpr,
    BIAS2: tl.constexpr, REQUANTIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): any number. See the module's docstring for the order of the queue."""
    tiles = workspace + 4
    done = tiles + bound * TILE_FIELDS
    order = done + bound
    absmax = order + R
    columns_done = absmax + R * GROUPS  # DIRECT: slots whose down tile is there, for each column tile
    FINAL: tl.constexpr = A == 1

    if PDL:
        gdc_wait()
    row_tiles = A
    if not DIRECT:
        row_tiles = tl.load(workspace + 1)
    tiles1, tiles2 = tl.cdiv(I, BN1), tl.cdiv(H, BN2)
    up_tasks = row_tiles * tiles1 if PHASE != DOWN else 0
    tasks = up_tasks + (row_tiles * tiles2 if PHASE != UP else 0)
    task = tl.atomic_add(workspace, 1, sem="relaxed")

    inverse = 0.0
    scale = 0.0
    if DIRECT:
        if PREFETCH:  # while the token's absmax is being found
            if task < up_tasks:
                expert = expert_of(ids, task // tiles1, E)
                if expert >= 0:
                    prefetch_up(w13_pointer, expert, task % tiles1, H, I, BN1, LAYOUT, TYPE.primitive_bitwidth // 8)
        if QMAX > 0:
            inverse, scale = scales_of(row_absmax(x, H, clip, BLOCK_H), QMAX)
    while task < tasks:
        next_task = tl.atomic_add(workspace, 1, sem="relaxed")  # ahead, so that its latency is hidden
        if PHASE == UP or (PHASE == BOTH and task < up_tasks):
            if DIRECT:
                tile1, row1, end1, n1 = task // tiles1, task // tiles1, task // tiles1 + 1, task % tiles1
                expert1 = expert_of(ids, tile1, E)
            else:
                tile1, expert1, row1, end1, n1 = find_task(tiles, task, tiles1, BM)
            if not DIRECT or expert1 >= 0:
                gate_up_tile(
                    x, scales_x, inverse, scale, w13, scales_w13, bias_w13, h, absmax, order, topk_weights,
                    expert1, row1, end1, n1, H, I, A, stride_x, slope, limit,
                    BM, BN1, BK1, STAGES, SWAP, TMA, EVEN_K1, TYPE, ACC, PROMOTE, QMAX, DIRECT, GATHERED, ACTIVATION,
                    LAYOUT, CLAMPED, NVIDIA, WEIGHT_ON_INPUT, BIAS1, GROUPS, GROUP,
                )  # fmt: skip
            if PHASE == BOTH:
                tl.debug_barrier()  # every thread's part of h is written before one thread says so
                tl.atomic_add(done + tile1, 1, sem="release")
            elif REQUANTISE:
                tl.debug_barrier()
                if tl.atomic_add(done + tile1, 1, sem="acq_rel") == tiles1 - 1:
                    requantise_rows(h, hq, absmax, row1, end1, I, stride_hq, QMAX, BM, 128)
        else:
            if DIRECT:
                down = task - up_tasks
                tile2, row2, end2, n2 = down // tiles2, down // tiles2, down // tiles2 + 1, down % tiles2
                expert2 = expert_of(ids, tile2, E)
            else:
                tile2, expert2, row2, end2, n2 = find_task(tiles, task - up_tasks, tiles2, BM)
            local = expert2 >= 0
            if PHASE == BOTH:
                if tl.atomic_add(done + tile2, 0, sem="acquire") < tiles1:
                    if PREFETCH and local:
                        rows = n2 * BN2 + tl.arange(0, BN2)
                        rows = expert2.to(tl.int64) * H + tl.where(rows < H, rows, 0)
                        prefetch(w2_pointer, rows, I, TYPE.primitive_bitwidth // 8)
                    while tl.atomic_add(done + tile2, 0, sem="acquire") < tiles1:
                        pass
            if not DIRECT or local:
                down_tile(
                    hq if REQUANTIZE == "done" else h, absmax, scales_h, w2, scales_w2, bias_w2,
                    out if FINAL else y, order, topk_weights, expert2, row2, end2, n2, H, I,
                    stride_hq if REQUANTIZE == "done" else I,
                    BM, BN2, BK2, STAGES, SWAP, TMA, EVEN_K2, TYPE, ACC, PROMOTE, QMAX, DIRECT, REQUANTIZE, GROUPS,
                    GROUP, FINAL, WEIGHT_ON_INPUT, BIAS2,
                )  # fmt: skip
            if DIRECT:
                finish_direct(
                    y, out, ids, topk_weights, absmax, done, columns_done, tile2, n2, tiles1, tiles2, local, E, H, A,
                    BN2, GROUPS, FINAL, WEIGHT_ON_INPUT,
                )  # fmt: skip
        task = next_task
    # Everyone draws one ticket past the last task. Whoever draws the highest knows that all others have drawn theirs.
    if task == tasks + tl.num_programs(0) - 1:
        tl.store(workspace, 0)
    if PDL:
        gdc_launch_dependents()


@triton.jit
def finish_direct(
    y, out, ids, topk_weights, absmax, done, columns_done, slot, n_tile, tiles1, tiles2, local, E, H,
    A: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, FINAL: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
):  # fmt: skip
    """Behind a down tile of the only token: the last one of its columns sums the slots; counters go back to zero.

    ``done`` counts a slot's gate/up tiles, then its down tiles: at the last one nobody reads the slot's absmax any
    more.
    """
    n = n_tile * BN + tl.arange(0, BN)
    tl.debug_barrier()  # every thread has written its part of y, and read absmax
    if tl.atomic_add(done + slot, 1, sem="acq_rel") == tiles1 + tiles2 - 1:
        tl.store(done + slot, 0)
        for g in tl.range(0, GROUPS):
            tl.store(absmax + slot * GROUPS + g, 0)
    if FINAL:
        if not local:
            tl.store(out + n, tl.zeros(n.shape, dtype=tl.float32).to(out.dtype.element_ty), mask=n < H)
    elif tl.atomic_add(columns_done + n_tile, 1, sem="acq_rel") == A - 1:
        slots = slots_of(done, ids, topk_weights, 0, E, A, False, WEIGHT_ON_INPUT)
        total = sum_slots(y, slots, n, n < H, H, A)
        tl.store(out + n, total.to(out.dtype.element_ty), mask=n < H)
        tl.store(columns_done + n_tile, 0)
