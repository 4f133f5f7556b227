"""The grouped matmul for Hopper, warp-specialised: one warp loads, two warpgroups multiply. Written in Gluon.

Why it exists beside the portable kernel, with the measurements: docs/decisions/0007-gluon-on-hopper.md.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowgmm.routing import max_row_tiles
from lowgmm.tune import TileConfig

LANES = gl.constexpr(32)
"""Groups that a warp looks at together."""

BAND = gl.constexpr(8)
"""As in ``kernels/tiles.py``."""


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
    before = sums <= tile - base
    expert = first + gl.sum(before.to(gl.int32), 0)
    return base, first, sums, end, expert, tile - base - gl.max(gl.where(before, sums, 0), 0)


@gluon.jit
def place(offsets, expert, local, M, E, tiles_n, BM: gl.constexpr):
    """First row, end of the expert's rows and column tile of its tile number ``local``, as ``tiles.find_tile``."""
    start, end = bounds(offsets, expert, M, E)
    band = local // (BAND * tiles_n)
    height = gl.minimum(gl.cdiv(end - start, BM) - band * BAND, BAND)
    local -= band * BAND * tiles_n
    return start + (band * BAND + local % height) * BM, end, local // height


@gluon.jit
def produce(
    x, w, scales_x, scales_w, offsets, ticket, xs, ws0, ws1, box, full, empty, posted, read, M, E, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr,
    BYTES: gl.constexpr, SCALED_X: gl.constexpr, SCALED_W: gl.constexpr,
):  # fmt: skip
    """One warp: draw tiles from the queue and keep the ring of operands full, across tiles."""
    more, rows, ends, columns, experts, sx, sw = box
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    one = gl.full([1], 1, gl.int32, LINE)
    tiles_n = gl.cdiv(N, BN)
    tile, base, first = gl.atomic_add(ticket, 1, sem="relaxed"), 0, 0
    sums = count(offsets, first, M, E, tiles_n, BM)
    base, first, sums, total, expert, local = seek(offsets, tile, base, first, sums, M, E, tiles_n, BM)
    step, done = 0, 0
    while expert < E:
        next_tile = gl.atomic_add(ticket, 1, sem="relaxed")  # before the loads, which hide its latency
        row, end, n_tile = place(offsets, expert, local, M, E, tiles_n, BM)
        column = n_tile * BN
        if SCALED_X:
            rm = row + gl.arange(0, BM, layout=LINE)
            scale_x = gl.load(scales_x + rm, mask=rm < end, other=0.0)
        if SCALED_W:
            rn = column + gl.arange(0, BN, layout=LINE)
            scale_w = gl.load(scales_w + expert.to(gl.int64) * N + rn, mask=rn < N, other=0.0)
        mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
        more.index(step % STAGES).store(one)
        for k in range(0, K, BK):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            tma.async_copy_global_to_shared(w, [expert * N + column, k], full.index(slot), ws0.index(slot))
            tma.async_copy_global_to_shared(w, [expert * N + column + BN // 2, k], full.index(slot), ws1.index(slot))
            tma.async_copy_global_to_shared(x, [row, k], full.index(slot), xs.index(slot))
            step += 1
        # What the tile's epilogue needs, when its operands are on their way.
        at = done % BOXES
        mbarrier.wait(read.index(at), ((done // BOXES) & 1) ^ 1)
        rows.index(at).store(one * row)
        ends.index(at).store(one * end)
        columns.index(at).store(one * column)
        experts.index(at).store(one * expert)
        if SCALED_X:
            sx.index(at).store(scale_x)
        if SCALED_W:
            sw.index(at).store(scale_w)
        mbarrier.arrive(posted.index(at))
        done += 1
        tile = next_tile
        base, first, sums, total, expert, local = seek(offsets, tile, base, first, sums, M, E, tiles_n, BM)
    mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
    more.index(step % STAGES).store(one * 0)
    mbarrier.arrive(full.index(step % STAGES))
    # Every program draws one ticket too many; who draws the last of those leaves the counter as it was found.
    gl.store(ticket, 0, mask=tile == total + gl.num_programs(0) - 1)


@gluon.jit
def number(cells, index):
    """The integer in one cell of shared memory."""
    return gl.max(cells.index(index).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def store(
    acc, y, sx, sw, bias, out, expert, row, end, column, N, stride_ym,
    ACC: gl.constexpr, BM: gl.constexpr, SCALED_X: gl.constexpr, SCALED_W: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Store 64 channels × BM rows of Y from an accumulator [64, BM]; the arithmetic of ``tiles.store``."""
    value = acc
    if SCALED_W or SCALED_X or BIAS:
        value = value.to(gl.float32)
    if SCALED_W:
        value = value * gl.expand_dims(sw.load(gl.SliceLayout(1, ACC)), 1)
    if SCALED_X:
        value = value * gl.expand_dims(sx.load(gl.SliceLayout(0, ACC)), 0)
    if BIAS:
        rn = column + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
        channel = expert.to(gl.int64) * N + rn
        value = value + gl.expand_dims(gl.load(bias + channel, mask=rn < N, other=0.0).to(gl.float32), 1)
    # Channels lie side by side in memory, rows side by side in the accumulator: turned in shared memory.
    out.permute((1, 0)).store(value.to(y.dtype.element_ty))
    write(
        out.load(gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])), y, row, end, column, N, stride_ym, BM
    )


@gluon.jit
def write(value, y, row, end, column, N, stride_ym, BM: gl.constexpr):
    WIDE: gl.constexpr = value.type.layout
    rm = row + gl.arange(0, BM, layout=gl.SliceLayout(1, WIDE))
    rn = column + gl.arange(0, 64, layout=gl.SliceLayout(0, WIDE))
    at = gl.expand_dims(rm.to(gl.int64) * stride_ym, 1) + gl.expand_dims(rn, 0)
    gl.store(y + at, value, mask=gl.expand_dims(rm < end, 1) & gl.expand_dims(rn < N, 0))


@gluon.jit
def consume(
    y, bias, offsets, xs, ws, box, out, full, empty, posted, read, M, E, N, K, stride_ym,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr,
    INT: gl.constexpr, PROMOTE: gl.constexpr, SCALED_X: gl.constexpr, SCALED_W: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of every tile's channels, in one or two blocks of 64, times all of the tile's rows."""
    more, rows, ends, columns, experts, sx, sw = box
    TWO: gl.constexpr = BN == 256
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 256 // xs.dtype.primitive_bitwidth])
    DTYPE: gl.constexpr = gl.int32 if INT else gl.float32
    step, done = 0, 0
    mbarrier.wait(full.index(0), 0)
    while number(more, step % STAGES) > 0:
        acc0 = gl.full([64, BM], 0, DTYPE, ACC)
        acc1 = acc0
        for k in range(0, K, BK):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            if PROMOTE:
                # Hopper's FP8 accumulators keep 14 bits: fresh ones every 128 of K, added in FP32 registers. Asking
                # warpgroup_mma to promote would make it wait after every instruction instead of every fourth.
                zero = gl.full([64, BM], 0, DTYPE, ACC)
                for i in gl.static_range(BK // 128):
                    b = xs.index(slot).slice(i * 128, 128, dim=1).permute((1, 0))
                    a = ws.index(slot).slice(0, 64).slice(i * 128, 128, dim=1)
                    part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
                    acc0 += warpgroup_mma_wait(0, deps=[part])
                    if TWO:
                        a = ws.index(slot).slice(64, 64).slice(i * 128, 128, dim=1)
                        part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
                        acc1 += warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(slot))
            else:
                a, b = ws.index(slot), xs.index(slot).permute((1, 0))
                acc0 = warpgroup_mma(a.slice(0, 64), b, acc0, is_async=True)
                if TWO:
                    acc1 = warpgroup_mma(a.slice(64, 64), b, acc1, is_async=True)
                    acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
                else:
                    acc0 = warpgroup_mma_wait(1, deps=[acc0])
                # The products of the step before are done: its operands may be overwritten.
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        if not PROMOTE:
            if TWO:
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        at = done % BOXES
        mbarrier.wait(posted.index(at), (done // BOXES) & 1)
        row, end, expert = number(rows, at), number(ends, at), number(experts, at)
        column = number(columns, at) + HALF * (BN // 2)
        channels = sw.index(at).slice(HALF * (BN // 2), BN // 2)
        store(acc0, y, sx.index(at), channels.slice(0, 64), bias, out, expert, row, end, column, N, stride_ym,
              ACC, BM, SCALED_X, SCALED_W, BIAS)  # fmt: skip
        if TWO:
            store(acc1, y, sx.index(at), channels.slice(64, 64), bias, out, expert, row, end, column + 64, N, stride_ym,
                  ACC, BM, SCALED_X, SCALED_W, BIAS)  # fmt: skip
        mbarrier.arrive(read.index(at))
        done += 1
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    # Rows behind the last expert are zero. No tile of the queue covers them.
    row, end = bounds(offsets, E, M, E)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    zero = gl.full([BM, 64], 0, y.dtype.element_ty, WIDE)
    for block in range(gl.program_id(0) * 2 + HALF, gl.cdiv(end - row, BM) * gl.cdiv(N, 64), gl.num_programs(0) * 2):
        write(zero, y, row + block // gl.cdiv(N, 64) * BM, end, block % gl.cdiv(N, 64) * 64, N, stride_ym, BM)


@gluon.jit(do_not_specialize=["M"])
def hopper_kernel(
    x,  # descriptor [BM, BK] over (M, K)
    w,  # descriptor [BN/2, BK] over (E·N, K)
    y,  # (M, N), row stride stride_ym
    scales_x,  # (M,) float32
    scales_w,  # (E, N) float32
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
    INT: gl.constexpr,
    PROMOTE: gl.constexpr,
    SCALED_X: gl.constexpr,
    SCALED_W: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Grid (programs,). Per program one warp loads and two warpgroups multiply, joined by a ring of STAGES slots.

    ``full`` says that a slot is loaded and ``empty`` that both warpgroups have read it; ``more`` is 0 in the slot after
    the last tile. What an epilogue needs waits in one of BOXES boxes: ``posted`` by the loading warp, then ``read``.
    The loading warp runs ahead across tiles, and while one warpgroup stores the other multiplies.
    """
    FLAT: gl.constexpr = mbarrier.MBarrierLayout()
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ws0 = gl.allocate_shared_memory(w.dtype, [STAGES, BN // 2, BK], w.layout)
    ws1 = gl.allocate_shared_memory(w.dtype, [STAGES, BN // 2, BK], w.layout)
    out0 = gl.allocate_shared_memory(y.dtype.element_ty, [BM, 64], OUT)
    out1 = gl.allocate_shared_memory(y.dtype.element_ty, [BM, 64], OUT)
    box = (
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.float32, [BOXES, BM], FLAT),
        gl.allocate_shared_memory(gl.float32, [BOXES, BN], FLAT),
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
        mbarrier.init(read.index(i), count=2)
    fence_async_shared()
    BYTES: gl.constexpr = (BM + BN) * BK * (x.dtype.primitive_bitwidth // 8)
    gl.warp_specialize(
        [
            (consume, (y, bias, offsets, xs, ws0, box, out0, full, empty, posted, read, M, E, N, K, stride_ym,
                       0, BM, BN, BK, STAGES, BOXES, INT, PROMOTE, SCALED_X, SCALED_W, BIAS)),
            (consume, (y, bias, offsets, xs, ws1, box, out1, full, empty, posted, read, M, E, N, K, stride_ym,
                       1, BM, BN, BK, STAGES, BOXES, INT, PROMOTE, SCALED_X, SCALED_W, BIAS)),
            (produce, (x, w, scales_x, scales_w, offsets, ticket, xs, ws0, ws1, box, full, empty, posted, read,
                       M, E, N, K, BM, BN, BK, STAGES, BOXES, BYTES, SCALED_X, SCALED_W)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


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
) -> None:
    """Launch for operands that ``grouped_mm`` has prepared and a configuration that ``tune.supports``."""
    (M, K), (E, N) = x.shape, w.shape[:2]
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    layout = gl.NVMMASharedLayout(128, x.element_size() * 8, rank=2)
    hopper_kernel[(min(sms, max_row_tiles(M, E, bm) * triton.cdiv(N, bn)),)](
        TensorDescriptor(x, [M, K], [x.stride(0), 1], [bm, bk], layout),
        TensorDescriptor(w, [E * N, K], [K, 1], [bn // 2, bk], layout),
        out,
        scales_x,
        scales_w,
        bias,
        offsets,
        ticket,
        M,
        E,
        N,
        K,
        out.stride(0),
        BM=bm,
        BN=bn,
        BK=bk,
        STAGES=config.num_stages,
        BOXES=config.boxes,
        OUT=gl.NVMMASharedLayout(128, out.element_size() * 8, rank=2),
        INT=x.dtype == torch.int8,
        PROMOTE=promote > 0,
        SCALED_X=scales_x is not None,
        SCALED_W=scales_w is not None,
        BIAS=bias is not None,
        num_warps=4,
    )
