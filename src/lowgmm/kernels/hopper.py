"""The grouped matmul for Hopper, warp-specialised: one warp loads, two warpgroups multiply. Written in Gluon.

Why it exists beside the portable kernel, with the measurements: docs/decisions/0007-gluon-on-hopper.md.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowgmm.kernels.hopper_nibbles import multiply_nibbles
from lowgmm.kernels.hopper_read import box_of, boxes_of, expect, load_block, load_rows
from lowgmm.kernels.hopper_write import channel_values, scaled, turn, write
from lowgmm.kernels.tiles import BAND
from lowgmm.relaunch import descriptor
from lowgmm.replay import launch
from lowgmm.routing import max_row_tiles
from lowgmm.tile_config import TileConfig

LANES = gl.constexpr(32)  # groups that a warp looks at together


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def bounds(offsets, group, M, E):
    """First row of a group and one past its last, clamped to [0, M]; group E is the rows behind the last expert."""
    start = gl.minimum(gl.maximum(gl.load(offsets + group, mask=group <= E, other=0), 0), M)
    end = gl.minimum(gl.maximum(gl.load(offsets + group + 1, mask=group < E, other=M), 0), M)
    return start, end


@gluon.jit
def count(offsets, first, M, E, tiles_n, BM: gl.constexpr):
    """Tiles of the 32 experts from ``first`` on, summed up to and including each."""
    expert = first + gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    start, end = bounds(offsets, expert, M, E)
    tiles = gl.where(expert < E, gl.cdiv(gl.maximum(end - start, 0), BM) * tiles_n, 0)
    return gl.associative_scan(tiles, 0, add)


@gluon.jit
def seek(offsets, tile, base, first, sums, M, E, tiles_n, BM: gl.constexpr):
    """Walk forward to the 32 experts that hold tile number ``tile``; returns them, how many tiles end with them, the
    tile's expert (>= E: no such tile) and its number within that expert.

    A program's tile numbers only grow, so no expert is counted twice, and none is counted before it is needed.
    """
    end = base + gl.max(sums, 0)
    while (tile >= end) & (first + LANES < E):
        base = end
        first += LANES
        sums = count(offsets, first, M, E, tiles_n, BM)
        end = base + gl.max(sums, 0)
    expert, local = among(sums, tile - base)
    return base, first, sums, end, first + expert, local


@gluon.jit
def among(sums, tile):
    """Which of 32 groups holds tile number ``tile`` (32: none), and its number within that group."""
    before = sums <= tile
    return gl.sum(before.to(gl.int32), 0), tile - gl.max(gl.where(before, sums, 0), 0)


@gluon.jit
def number(cells, index):
    """The integer in one cell of shared memory."""
    return gl.max(cells.index(index).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def post(box, at, numbers):
    """Integers into the first cells of box ``at``."""
    one = gl.full([1], 1, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for i in gl.static_range(len(numbers)):
        box[i].index(at).store(one * numbers[i])


@gluon.jit
def place(offsets, expert, local, M, E, tiles_n, BM: gl.constexpr):
    """First row, end of rows and column number of an expert's tile ``local``; bands as in ``tiles.find_tile``."""
    start, end = bounds(offsets, expert, M, E)
    band = local // (BAND * tiles_n)
    height = gl.minimum(gl.cdiv(end - start, BM) - band * BAND, BAND)
    local -= band * BAND * tiles_n
    return start, start + (band * BAND + local % height) * BM, end, local // height


@gluon.jit
def schedule(
    scales_x, offsets, ticket, box, posted, read, M, E, N,
    BM: gl.constexpr, BN: gl.constexpr, BOXES: gl.constexpr, SCALED_X: gl.constexpr,
):  # fmt: skip
    """One warp: draw tiles from the queue, find out where they are, and post it, up to BOXES tiles ahead.

    A warp of its own, because all this is a chain of memory latencies that no load of operands should wait for.
    """
    sx = box[4]
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tiles_n = gl.cdiv(N, BN)
    tile, base, first = gl.program_id(0), 0, 0
    sums = count(offsets, first, M, E, tiles_n, BM)
    base, first, sums, total, expert, local = seek(offsets, tile, base, first, sums, M, E, tiles_n, BM)
    done = 0
    while expert < E:
        _start, row, end, column = place(offsets, expert, local, M, E, tiles_n, BM)
        if SCALED_X:
            rm = row + gl.arange(0, BM, layout=LINE)
            scale_x = gl.load(scales_x + rm, mask=rm < end, other=0.0)
        at = done % BOXES
        mbarrier.wait(read.index(at), ((done // BOXES) & 1) ^ 1)
        post(box, at, (row, end, column, expert))
        if SCALED_X:
            sx.index(at).store(scale_x)
        mbarrier.arrive(posted.index(at))
        done += 1
        tile = gl.num_programs(0) + gl.atomic_add(ticket, 1, sem="relaxed")
        base, first, sums, total, expert, local = seek(offsets, tile, base, first, sums, M, E, tiles_n, BM)
    mbarrier.wait(read.index(done % BOXES), ((done // BOXES) & 1) ^ 1)
    post(box, done % BOXES, (-1,))
    mbarrier.arrive(posted.index(done % BOXES))
    # One ticket is drawn per tile; who draws the last leaves the counter as it was found.
    gl.store(ticket, 0, mask=tile == gl.num_programs(0) + total - 1)


@gluon.jit
def produce(
    x, w, xs, ws0, ws1, box, full, empty, posted, read, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr,
    PER_BYTE: gl.constexpr,
):  # fmt: skip
    """One warp: keep the ring of operands full, across tiles."""
    rows, ends, columns, experts, _sx = box
    step, done = 0, 0
    mbarrier.wait(posted.index(0), 0)
    row = number(rows, 0)
    while row >= 0:
        channel = number(experts, done % BOXES) * N + number(columns, done % BOXES) * BN
        boxes = boxes_of(x, row, number(ends, done % BOXES), BM)
        mbarrier.arrive(read.index(done % BOXES))
        for k in range(0, K, BK):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            expect(x, xs, full, slot, boxes, BN, PER_BYTE)
            for i in gl.static_range(BN // 64):
                load_block(w, channel + 64 * i, k // PER_BYTE, ws0, ws1, full, slot, i, BN)
            load_rows(x, xs, full, slot, row, k, boxes)
            step += 1
        done += 1
        mbarrier.wait(posted.index(done % BOXES), (done // BOXES) & 1)
        row = number(rows, done % BOXES)


@gluon.jit
def products(xs, ws, slot, acc0, acc1, BN: gl.constexpr, FIRST: gl.constexpr):
    """Ask for a slot's products, and wait for those asked for before. FIRST: they are not added to anything."""
    b = xs.index(slot).permute((1, 0))
    acc0 = warpgroup_mma(ws.index(slot * (BN // 128)), b, acc0, use_acc=not FIRST, is_async=True)
    if BN == 256:
        acc1 = warpgroup_mma(ws.index(slot * 2 + 1), b, acc1, use_acc=not FIRST, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
    else:
        acc0 = warpgroup_mma_wait(1, deps=[acc0])
    return acc0, acc1


@gluon.jit
def begin(
    xs, ws, full, step,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, ACC: gl.constexpr,
    INT: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    """Wait for a tile's first operands and ask for their products, which only ``multiply`` may look at.

    What is done between the two the tensor cores do not wait for. (Sums that are promoted begin in ``multiply``.)
    """
    DTYPE: gl.constexpr = gl.int32 if INT else gl.float32
    acc0 = gl.full([64, BM], 0, DTYPE, ACC)
    acc1 = acc0
    slot = step % STAGES
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    if not PROMOTE:
        acc0, acc1 = products(xs, ws, slot, acc0, acc1, BN, True)
    return acc0, acc1


@gluon.jit
def following(slot, phase, STAGES: gl.constexpr):
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def multiply(
    xs, ws, full, empty, acc0, acc1, step, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, ACC: gl.constexpr,
    PROMOTE: gl.constexpr,
):  # fmt: skip
    """A warpgroup's one or two blocks of 64 channels times the tile's rows, over all of K: accumulators [64, BM].

    ``acc0`` and ``acc1`` come from ``begin``; ``step`` counts the slots of the ring used before this tile. No slot is
    waited for that is not this tile's.
    """
    MINE: gl.constexpr = BN // 128
    PARTS: gl.constexpr = BK // 128 * MINE
    slot, phase = step % STAGES, (step // STAGES) & 1
    before = slot
    if PROMOTE:
        for k in range(0, K, BK):
            next_slot, next_phase = following(slot, phase, STAGES)
            # Hopper's FP8 accumulators keep 14 bits: fresh ones every 128 of K, added in FP32 registers. Asking
            # warpgroup_mma to promote would make it wait after every instruction instead of every fourth.
            zero = gl.full([64, BM], 0, gl.float32, ACC)
            for i in gl.static_range(PARTS):
                a = ws.index(slot * MINE + i % MINE).slice(i // MINE * 128, 128, dim=1)
                b = xs.index(slot).slice(i // MINE * 128, 128, dim=1).permute((1, 0))
                part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
                if i == PARTS - 1:  # so that only these sums are added between this step's products and the next's
                    mbarrier.wait(full.index(next_slot), next_phase, pred=k + BK < K)
                part = warpgroup_mma_wait(0, deps=[part])
                if i == PARTS - 1:
                    mbarrier.arrive(empty.index(slot))
                if i % MINE == 0:
                    acc0 += part
                else:
                    acc1 += part
            slot, phase = next_slot, next_phase
    else:
        for _ in range(BK, K, BK):
            slot, phase = following(slot, phase, STAGES)
            mbarrier.wait(full.index(slot), phase)
            acc0, acc1 = products(xs, ws, slot, acc0, acc1, BN, False)
            # The products of the step before are done: its operands may be overwritten.
            mbarrier.arrive(empty.index(before))
            before = slot
        if MINE == 2:
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        else:
            acc0 = warpgroup_mma_wait(0, deps=[acc0])
        mbarrier.arrive(empty.index(before))
    return acc0, acc1, step + gl.cdiv(K, BK)


@gluon.jit
def consume(
    y, scales_w, bias, offsets, xs, ws, box, out, full, empty, posted, read, M, E, N, K, stride_ym,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr,
    GROUP: gl.constexpr, INT: gl.constexpr, PROMOTE: gl.constexpr, SCALED_X: gl.constexpr, SCALED_W: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of every tile's channels, in one or two blocks of 64, times all of the tile's rows."""
    rows, ends, columns, experts, sx = box
    TWO: gl.constexpr = BN == 256
    LATE: gl.constexpr = PROMOTE and TWO and BM > 32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 256 // xs.dtype.primitive_bitwidth])
    step, done = 0, 0
    mbarrier.wait(posted.index(0), 0)
    while number(rows, done % BOXES) >= 0:
        at = done % BOXES
        expert, column = number(experts, at), number(columns, at) * BN + HALF * (BN // 2)
        # Scales come early, to hide their latency, but behind the first products where the tensor cores would wait for
        # them. Where promotion leaves no register for them they come last.
        if BM <= 32:
            scale0 = channel_values(scales_w, expert, column, N, ACC, SCALED_W)
            scale1 = channel_values(scales_w, expert, column + 64, N, ACC, SCALED_W and TWO)
        if GROUP is None:
            acc0, acc1 = begin(xs, ws, full, step, BM, BN, STAGES, ACC, INT, PROMOTE)
        if BM > 32 and not LATE:
            scale0 = channel_values(scales_w, expert, column, N, ACC, SCALED_W)
            scale1 = channel_values(scales_w, expert, column + 64, N, ACC, SCALED_W and TWO)
        if GROUP is None:
            acc0, acc1, step = multiply(xs, ws, full, empty, acc0, acc1, step, K, BM, BN, BK, STAGES, ACC, PROMOTE)
        else:
            acc0, step = multiply_nibbles(
                xs, ws, full, empty, scales_w, expert, column, step, N, K, BM, BK, STAGES, ACC, GROUP
            )
        # Read again rather than kept: the loop above needs every register.
        row, end, expert = number(rows, at), number(ends, at), number(experts, at)
        column = number(columns, at) * BN + HALF * (BN // 2)  # a multiple of 64, so its channels are stored 8 at a time
        if LATE:
            scale0 = channel_values(scales_w, expert, column, N, ACC, SCALED_W)
            scale1 = channel_values(scales_w, expert, column + 64, N, ACC, SCALED_W and TWO)
        shift, of_x = channel_values(bias, expert, column, N, ACC, BIAS), sx.index(at)
        value = turn(scaled(acc0, scale0, shift, of_x, of_x, ACC, SCALED_W, SCALED_X, False, BIAS), out)
        write(value, y, row, end, column, N, stride_ym, BM)
        if TWO:
            shift = channel_values(bias, expert, column + 64, N, ACC, BIAS)
            value = turn(scaled(acc1, scale1, shift, of_x, of_x, ACC, SCALED_W, SCALED_X, False, BIAS), out)
            write(value, y, row, end, column + 64, N, stride_ym, BM)
        mbarrier.arrive(read.index(at))
        done += 1
        mbarrier.wait(posted.index(done % BOXES), (done // BOXES) & 1)
    # Rows behind the last expert are zero. No tile of the queue covers them.
    row, end = bounds(offsets, E, M, E)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    zero = gl.full([BM, 64], 0, y.dtype.element_ty, WIDE)
    for block in range(gl.program_id(0) * 2 + HALF, gl.cdiv(end - row, BM) * gl.cdiv(N, 64), gl.num_programs(0) * 2):
        write(zero, y, row + block // gl.cdiv(N, 64) * BM, end, block % gl.cdiv(N, 64) * 64, N, stride_ym, BM)


@gluon.jit(do_not_specialize=["M", "E"])
def hopper_kernel(
    x,  # descriptor ``box_of`` over (M, K)
    w,  # descriptor [64, BK] over (E·N, K); of 4-bit weights [64, BK/2] over (E·N, K/2) bytes
    y,  # (M, N), row stride stride_ym
    scales_x,  # (M,) float32
    scales_w,  # (E, N) float32; with GROUP > 0 (E, k, N)
    bias,  # (E, N)
    offsets,  # (E+1,) int32
    ticket,  # (1,) int32, zero before and after: the queue's counter
    M,
    E,
    N,
    K,
    stride_ym,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
    OUT: gl.constexpr,  # layout of a block of results in shared memory
    GROUP: gl.constexpr,  # of 4-bit weights: elements along K that share a scale, 0: all; None: no 4-bit weights
    INT: gl.constexpr,
    PROMOTE: gl.constexpr,
    SCALED_X: gl.constexpr,
    SCALED_W: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Grid (programs,). In each, a warp finds tiles, a warp loads operands, and two warpgroups multiply and store.

    A tile's place waits in one of BOXES boxes, ``posted`` by the first warp and ``read`` by the others; its operands
    pass through a ring of STAGES slots, ``full`` when loaded and ``empty`` when both warpgroups have used them. So the
    loads run ahead across tiles, and while one warpgroup stores the other multiplies.
    """
    FLAT: gl.constexpr = mbarrier.MBarrierLayout()
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    PER_BYTE: gl.constexpr = 1 if GROUP is None else 2
    ws0 = gl.allocate_shared_memory(w.dtype, [STAGES * (BN // 128), 64, BK // PER_BYTE], w.layout)
    ws1 = gl.allocate_shared_memory(w.dtype, [STAGES * (BN // 128), 64, BK // PER_BYTE], w.layout)
    out0 = gl.allocate_shared_memory(y.dtype.element_ty, [BM, 64], OUT)
    out1 = gl.allocate_shared_memory(y.dtype.element_ty, [BM, 64], OUT)
    box = (
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.float32, [BOXES, BM], FLAT),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], FLAT)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], FLAT)
    posted = gl.allocate_shared_memory(gl.int64, [BOXES, 1], FLAT)
    read = gl.allocate_shared_memory(gl.int64, [BOXES, 1], FLAT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(BOXES):
        mbarrier.init(posted.index(i), count=1)
        mbarrier.init(read.index(i), count=3)
    fence_async_shared()
    # Up to here nothing was read that the launch before may still be writing, so this much of two launches overlaps.
    gdc_wait()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (consume, (y, scales_w, bias, offsets, xs, ws0, box, out0, full, empty, posted, read, M, E, N, K,
                       stride_ym, 0, BM, BN, BK, STAGES, BOXES, GROUP, INT, PROMOTE, SCALED_X, SCALED_W, BIAS)),
            (consume, (y, scales_w, bias, offsets, xs, ws1, box, out1, full, empty, posted, read, M, E, N, K,
                       stride_ym, 1, BM, BN, BK, STAGES, BOXES, GROUP, INT, PROMOTE, SCALED_X, SCALED_W, BIAS)),
            (produce, (x, w, xs, ws0, ws1, box, full, empty, posted, read, N, K, BM, BN, BK, STAGES, BOXES, PER_BYTE)),
            (schedule, (scales_x, offsets, ticket, box, posted, read, M, E, N, BM, BN, BOXES, SCALED_X)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip


BOXES = 4  # tiles found ahead: more than the ring of operands can hold where tiles are short


def hopper_mm(
    out: Tensor,
    x: Tensor,
    w: Tensor,
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    ticket: Tensor,
    config: TileConfig,
    sms: int,
    promote: int,
    group: int | None,
) -> None:
    """Launch for operands that ``grouped_mm`` has prepared and a configuration that ``tile_config.supports``."""
    (M, K), (E, N, width) = x.shape, w.shape
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    flags = promote > 0, scales_x is not None, scales_w is not None and not group, bias is not None
    layout, constants = _constants(config, x.dtype, out.dtype, group, *flags)
    launch(
        hopper_kernel,
        min(sms, max_row_tiles(M, E, bm) * -(-N // bn)),
        descriptor(TensorDescriptor, x, (M, K), (x.stride(0), 1), box_of(bm, bn, x.element_size()), layout=layout),
        descriptor(
            TensorDescriptor, w, (E * N, width), (width, 1), [64, bk if group is None else bk // 2], layout=layout
        ),
        *(out, scales_x, scales_w, bias, offsets, ticket),
        *(M, E, N, K, out.stride(0)),
        *constants,
        num_warps=4,
        launch_pdl=True,
        enable_fp_fusion=False,  # the roundings are the contract's
    )


@functools.lru_cache(maxsize=1024)
def _constants(
    config: TileConfig, dtype: torch.dtype, out_dtype: torch.dtype, group: int | None, *flags: bool
) -> tuple[gl.NVMMASharedLayout, tuple[Any, ...]]:
    """The operands' layout in shared memory, and the kernel's compile-time arguments, of which ``flags`` are those from
    PROMOTE on. Kept: they take 8 µs to make."""
    layout, out = (gl.NVMMASharedLayout(128, d.itemsize * 8, rank=2) for d in (dtype, out_dtype))
    tile = (config.block_m, config.block_n, config.block_k, config.num_stages, BOXES, out)
    return layout, (*tile, group, dtype == torch.int8, *flags)
