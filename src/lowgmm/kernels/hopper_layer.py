"""An expert layer's two products in one launch on Hopper: the tiles of ``hopper.py``, from one queue.

What is drawn, in this order, and why nobody waits for ever: docs/decisions/0013-a-layer-in-one-hopper-launch.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowgmm.kernels.combine import slots_of
from lowgmm.kernels.hopper import begin, multiply, number
from lowgmm.kernels.hopper_direct import CHUNK, clear, finish, leave, multiply_row, quantise_token
from lowgmm.kernels.hopper_queue import schedule
from lowgmm.kernels.hopper_read import boxes_of, expect, load_block, load_rows
from lowgmm.kernels.hopper_tasks import (
    DOWN,
    PASS,
    REQUANTISE,
    UP,
    announce,
    async_fence,
    channel_values,
    channels,
    hand_over,
    keep,
    keep_halves,
    multiply_in_turns,
    requantise,
    row_values,
    wait_for,
)
from lowgmm.kernels.hopper_write import scaled, turn, write
from lowgmm.kernels.moe_tiles import activate


@gluon.jit
def load_gate_up(
    w_gate, w_up, channel, k, ws0, ws1, full, slot, GATED: gl.constexpr, BN: gl.constexpr
):  # fmt: skip
    """With a gate, gate and up blocks in turns: both of 64 columns of h meet in one warpgroup (BN = 256) or in two."""
    if BN == 64:  # half a block of each: what one warpgroup multiplies, in turns with the other
        halves = ws0._reinterpret(ws0.dtype, [2 * ws0.shape[0], 32, ws0.shape[2]], ws0.layout)
        tma.async_copy_global_to_shared(w_gate, [channel, k], full.index(slot), halves.index(2 * slot))
        tma.async_copy_global_to_shared(w_up, [channel, k], full.index(slot), halves.index(2 * slot + 1))
    for i in gl.static_range(BN // 64 if BN > 64 else 0):
        if GATED and i % 2 == 1:
            load_block(w_up, channel + 64 * (i // 2), k, ws0, ws1, full, slot, i, BN)
        elif GATED:
            load_block(w_gate, channel + 64 * (i // 2), k, ws0, ws1, full, slot, i, BN)
        else:
            load_block(w_gate, channel + 64 * i, k, ws0, ws1, full, slot, i, BN)


@gluon.jit
def produce(
    x, w_gate, w_up, h, w2, ready, xs, ws0, ws1, box, full, empty, posted, read, given,
    H, I, S, expert_rows, tiles1, passes,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr,
    ROWS: gl.constexpr, UP_N: gl.constexpr, WRITERS: gl.constexpr, GATED: gl.constexpr, QUANTISED: gl.constexpr,
    DIRECT: gl.constexpr,
):  # fmt: skip
    """One warp: keep the ring of operands full, across tasks."""
    rows, ends, columns, experts, kinds, blocks = box
    W_BYTES: gl.constexpr = BN * BK * (x.dtype.primitive_bitwidth // 8)
    step, done = 0, 0
    mbarrier.wait(posted.index(0), 0)
    row = number(rows, 0)
    while row >= 0:
        at = done % BOXES
        kind, column, expert = number(kinds, at), number(columns, at), number(experts, at)
        end, block = number(ends, at), number(blocks, at)
        mbarrier.arrive(read.index(at))
        boxes = boxes_of(x, row, end, BM)
        if kind == UP:
            channel = expert * expert_rows + column * UP_N
            for k in range(0, H, BK):
                slot = step % STAGES
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                expect(x, xs, full, slot, boxes, BN)
                load_gate_up(w_gate, w_up, channel, k, ws0, ws1, full, slot, GATED, BN)
                if DIRECT:
                    mbarrier.wait(given.index(2), 0)
                    load_rows(x, xs, full, slot, 0, k, 1)
                else:
                    load_rows(x, xs, full, slot, row, k, boxes)
                step += 1
        elif kind == DOWN and DIRECT:
            channel = expert * H + column * BN
            for k in range(0, I, BK):
                slot = step % STAGES
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), W_BYTES)
                for j in gl.static_range(BN // 64):
                    load_block(w2, channel + 64 * j, k, ws0, ws1, full, slot, j, BN)
                step += 1
        elif kind == DOWN:
            channel = expert * H + column * BN
            steps = gl.cdiv(I, BK)
            ahead = gl.minimum(steps, STAGES)  # weights do not wait for h
            for i in range(0, ahead):
                slot = (step + i) % STAGES
                mbarrier.wait(empty.index(slot), (((step + i) // STAGES) & 1) ^ 1)
                expect(x, xs, full, slot, boxes, BN)
                for j in gl.static_range(BN // 64):
                    load_block(w2, channel + 64 * j, i * BK, ws0, ws1, full, slot, j, BN)
            if QUANTISED:
                wait_for(ready + S + block, gl.cdiv(gl.minimum(end - row, BM), ROWS) * passes * 2)
            else:
                wait_for(ready + block, tiles1 * WRITERS)
            async_fence()
            for i in range(0, ahead):
                slot = (step + i) % STAGES
                load_rows(h, xs, full, slot, row, i * BK, boxes)
            for i in range(ahead, steps):
                slot = (step + i) % STAGES
                mbarrier.wait(empty.index(slot), (((step + i) // STAGES) & 1) ^ 1)
                expect(x, xs, full, slot, boxes, BN)
                for j in gl.static_range(BN // 64):
                    load_block(w2, channel + 64 * j, i * BK, ws0, ws1, full, slot, j, BN)
                load_rows(h, xs, full, slot, row, i * BK, boxes)
            step += steps
        done += 1
        mbarrier.wait(posted.index(done % BOXES), (done // BOXES) & 1)
        row = number(rows, done % BOXES)


@gluon.jit
def consume(
    hidden, xq, ids, result, y, h, hq, scales_x, scales_h, absmax, w13_scales, w2_scales, w13_bias, w2_bias, order,
    topk_weights, ready, arrived, xs, hs, ws, box, out, vectors, other, partial, full, empty, posted, read, passed,
    taken, given, R, E, H, I, S, tiles1, tiles2, stride, clip, slope, bound,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    BOXES: gl.constexpr, ROWS: gl.constexpr, UP_N: gl.constexpr, WRITERS: gl.constexpr,
    INT: gl.constexpr, PROMOTE: gl.constexpr, QMAX: gl.constexpr, DIRECT: gl.constexpr, A: gl.constexpr,
    WIDTH: gl.constexpr, ACTIVATION: gl.constexpr, LAYOUT: gl.constexpr, CLAMPED: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr, BIAS1: gl.constexpr, BIAS2: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of every tile's channels, in one or two blocks of 64, times all of the tile's rows; with
    tiles of 64 channels half of the steps over K."""
    rows, ends, columns, experts, kinds, blocks = box
    sx, weight = vectors.index(0), vectors.index(1)
    TWO: gl.constexpr = BN == 256
    SPLIT: gl.constexpr = BN == 64
    STORES: gl.constexpr = not SPLIT or HALF == 0
    LATE: gl.constexpr = PROMOTE and TWO  # no register is left to load scales ahead of the product
    GATED: gl.constexpr = LAYOUT != "none"
    QUANTISED: gl.constexpr = QMAX > 0
    BIASED: gl.constexpr = BIAS1 or BIAS2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 256 // xs.dtype.primitive_bitwidth])
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # A tile of h is announced when the next one is multiplied: by then its stores need not be waited for.
    step, done, met, chunks, pending = 0, 0, 0, 0, -1
    if DIRECT and HALF == 0:
        quantise_token(hidden, xq, scales_x, H, R, clip, WIDTH, QMAX)
        mbarrier.arrive(given.index(2))
    if DIRECT and STORES:
        slots = slots_of(order, ids, topk_weights, 0, E, A, False, WEIGHT_ON_INPUT)
    mbarrier.wait(posted.index(0), 0)
    while number(rows, done % BOXES) >= 0:
        at = done % BOXES
        kind = number(kinds, at)
        if kind != UP:
            pending = announce(ready, pending)
        if kind == REQUANTISE:
            if QUANTISED and not DIRECT:
                row, end, block = number(rows, at), number(ends, at), number(blocks, at)
                wait_for(ready + block, tiles1 * WRITERS)
                stop = gl.minimum(end, row + ROWS)
                requantise(h, hq, scales_h, absmax, row, stop, number(columns, at), I, stride, HALF, ROWS, QMAX)
                async_fence()
                announce(ready + S, block)
        else:
            K = H
            if kind == DOWN:
                K = I
            # Once the tile's first operands are here, everything that their loads waited for can be read as well.
            if DIRECT and kind == DOWN:
                wait_for(ready + number(blocks, at), tiles1 * WRITERS)
            elif not SPLIT and not DIRECT:
                acc0, acc1 = begin(xs, ws, full, step, BM, BN, STAGES, ACC, INT, PROMOTE)
                if not PROMOTE:
                    pending = announce(ready, pending)
            elif STORES:
                mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            if STORES and not LATE:
                row, end, expert, column = number(rows, at), number(ends, at), number(experts, at), number(columns, at)
                scale, share = row_values(
                    scales_x, scales_h, order, topk_weights, kind, row, end, BM, QMAX, DIRECT, WEIGHT_ON_INPUT
                )
                at0, in0 = channels(kind, expert, column, H, I, HALF, 0, ACC, BN, LAYOUT)
                scale0 = channel_values(w13_scales, w2_scales, kind, at0, in0, QUANTISED, QUANTISED)
                if TWO:
                    at1, in1 = channels(kind, expert, column, H, I, HALF, 1, ACC, BN, LAYOUT)
                    scale1 = channel_values(w13_scales, w2_scales, kind, at1, in1, QUANTISED, QUANTISED)
            if DIRECT and kind == DOWN:
                acc0, row_scale, step, chunks = multiply_row(
                    h, absmax, hs, ws, full, empty, given, number(rows, at), step, chunks, I, stride,
                    HALF, BM, BN, BK, STAGES, ACC, INT, PROMOTE, QMAX,
                )  # fmt: skip
                acc1 = acc0
                if STORES:
                    scale = scale + row_scale
            elif SPLIT:
                if HALF == 1:
                    # The first warpgroup has finished the tile before, so all of that tile's loads have arrived, in
                    # whatever order. Else a slot might be waited for whose load before is still under way: a phase
                    # ahead, which a parity does not tell from a phase that is over.
                    mbarrier.wait(taken.index(0), (met & 1) ^ 1)
                acc0, step = multiply_in_turns(xs, ws, full, empty, step, K, HALF, BM, BK, STAGES, ACC, INT, PROMOTE)
                acc1 = acc0
            else:
                if DIRECT:
                    acc0, acc1 = begin(xs, ws, full, step, BM, BN, STAGES, ACC, INT, PROMOTE)
                acc0, acc1, step = multiply(xs, ws, full, empty, acc0, acc1, step, K, BM, BN, BK, STAGES, ACC, PROMOTE)
            if SPLIT:
                acc1 = hand_over(acc0, partial, passed, taken, met, HALF, ACC)
                met += 1
                if HALF == 0:
                    acc0 += acc1
            if DIRECT:
                left = gl.full([128], 0, gl.int32, LANE)
                if kind == DOWN:
                    left = leave(ready + S, number(blocks, at), LANE)
            if STORES:
                pending = announce(ready, pending)
                # Read again rather than kept, and so are the channels: the products need every register.
                row, end, expert, column = number(rows, at), number(ends, at), number(experts, at), number(columns, at)
                if LATE:
                    scale, share = row_values(
                        scales_x, scales_h, order, topk_weights, kind, row, end, BM, QMAX, DIRECT, WEIGHT_ON_INPUT
                    )
                if QUANTISED:
                    sx.store(scale)
                if WEIGHT_ON_INPUT:
                    weight.store(share)
                at0, in0 = channels(kind, expert, column, H, I, HALF, 0, ACC, BN, LAYOUT)
                if LATE:
                    scale0 = channel_values(w13_scales, w2_scales, kind, at0, in0, QUANTISED, QUANTISED)
                shift0 = channel_values(w13_bias, w2_bias, kind, at0, in0, BIAS1, BIAS2)
                if TWO:
                    at1, in1 = channels(kind, expert, column, H, I, HALF, 1, ACC, BN, LAYOUT)
                    if LATE:
                        scale1 = channel_values(w13_scales, w2_scales, kind, at1, in1, QUANTISED, QUANTISED)
                    shift1 = channel_values(w13_bias, w2_bias, kind, at1, in1, BIAS1, BIAS2)
                # All loads come before what waits for the first.
                value0 = scaled(acc0, scale0, shift0, sx, weight, ACC, QUANTISED, QUANTISED, WEIGHT_ON_INPUT, BIASED)
                value1 = value0
                if TWO:
                    value1 = scaled(
                        acc1, scale1, shift1, sx, weight, ACC, QUANTISED, QUANTISED, WEIGHT_ON_INPUT, BIASED
                    )
                column = column * BN + HALF * (BN // 2)
                if kind == UP:
                    if not GATED:
                        value0 = activate(value0, value0, slope, bound, ACTIVATION, False, CLAMPED, True)
                        keep(value0, h, absmax, out, row, end, column, I, stride, BM, QUANTISED)
                        if TWO:
                            value1 = activate(value1, value1, slope, bound, ACTIVATION, False, CLAMPED, True)
                            keep(value1, h, absmax, out, row, end, column + 64, I, stride, BM, QUANTISED)
                    elif TWO:
                        value0 = activate(value0, value1, slope, bound, ACTIVATION, True, CLAMPED, True)
                        keep(value0, h, absmax, out, row, end, column // 2, I, stride, BM, QUANTISED)
                    elif SPLIT:
                        keep_halves(
                            value0, other, h, absmax, row, end, number(columns, at) * UP_N, I, stride, slope, bound,
                            BM, QUANTISED, ACTIVATION, CLAMPED,
                        )  # fmt: skip
                    else:
                        value1 = hand_over(value0, other, passed, taken, met, HALF, ACC)
                        met += 1
                        if HALF == 0:
                            value0 = activate(value0, value1, slope, bound, ACTIVATION, True, CLAMPED, True)
                            keep(value0, h, absmax, out, row, end, column // 2, I, stride, BM, QUANTISED)
                    if TWO or not GATED or HALF == 0:
                        if not QUANTISED:
                            async_fence()
                        pending = number(blocks, at)
                else:
                    write(turn(value0, out), y, row, end, column, H, stride, BM)
                    if TWO:
                        write(turn(value1, out), y, row, end, column + 64, H, stride, BM)
                    if DIRECT:
                        finish(y, result, arrived, slots, column, H, stride, A)
            if DIRECT:
                if kind == DOWN:
                    clear(ready, absmax, ready + S, number(blocks, at), left, 2 * tiles2 - 1, LANE)
        mbarrier.arrive(read.index(at))
        done += 1
        mbarrier.wait(posted.index(done % BOXES), (done // BOXES) & 1)
    announce(ready, pending)


@gluon.jit(
    do_not_specialize=["R", "E", "S"],
    do_not_specialize_on_alignment=["absmax", "order", "offsets", "ticket", "ready", "arrived"],
)
def hopper_layer_kernel(
    x,  # descriptor ``hopper_read.box_of`` over (R, H): each slot's token, by expert; with DIRECT over (1, H)
    w_gate,  # descriptor [64, BK], with BN = 64 [32, BK]: the gate rows of all experts, expert_rows apart; without a
    # gate all rows
    w_up,  # likewise
    hq_tiles,  # descriptor ``hopper_read.box_of`` over (R, I)
    w2,  # descriptor [64, BK] over (E·H, I)
    hidden,  # (H,), with DIRECT
    xq,  # (H,), with DIRECT: what ``x`` describes, written
    ids,  # (R,), with DIRECT
    result,  # (H,), with DIRECT written
    y,  # (R, H), row stride ``stride`` like all that are written
    h,  # (R, I), written
    hq,  # (R, I), written; h if it is not quantised; not used with DIRECT
    scales_x,  # (R,) float32, with DIRECT written
    scales_h,  # (R,) float32, written
    absmax,  # (R,) int32, zero: bits of the absmax of each row of h
    w13_scales,  # (E, 2I) float32
    w2_scales,  # (E, H) float32
    w13_bias,  # (E, 2I)
    w2_bias,  # (E, H)
    order,  # (R,) int32: row -> slot
    topk_weights,  # (R,)
    offsets,  # (E+1,) int32
    ticket,  # (1,) int32, zero: the queue's counter
    ready,  # (2, S) int32, zero: per row block, how many parts of h are written, and how many are quantised
    arrived,  # (cdiv(H, BN) · BN/64,) int32, zero, with DIRECT: of 64 columns of y, how many slots' are written
    R,
    E,
    H,
    I,
    S,
    expert_rows,
    stride,
    clip,
    slope,
    bound,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
    ROWS: gl.constexpr,
    OUT: gl.constexpr,  # layout of a block of results in shared memory
    INT: gl.constexpr,
    PROMOTE: gl.constexpr,
    QMAX: gl.constexpr,  # 0: not quantised
    DIRECT: gl.constexpr,  # one token: nothing was arranged, the down tiles quantise h and sum the slots
    A: gl.constexpr,  # R, with DIRECT
    WIDTH: gl.constexpr,  # power of two: columns of the token that are looked at together
    ACTIVATION: gl.constexpr,
    LAYOUT: gl.constexpr,
    CLAMPED: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
    BIAS1: gl.constexpr,
    BIAS2: gl.constexpr,
):
    """Grid (programs,). The warps, boxes and ring of ``hopper_kernel``; a box says of which kind its task is.

    Without DIRECT h and y may share memory, and so may x and hq: a row block's down tiles come when all of its h is
    quantised, and its h is quantised when all of its gate/up tiles are done.
    """
    FLAT: gl.constexpr = mbarrier.MBarrierLayout()
    GATED: gl.constexpr = LAYOUT != "none"
    UP_N: gl.constexpr = BN // 2 if GATED else BN
    WRITERS: gl.constexpr = 1 if GATED and BN <= 128 else 2  # warpgroups that write a part of h of each gate/up tile
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ws0 = gl.allocate_shared_memory(w2.dtype, [STAGES * ((BN + 64) // 128), 64, BK], w2.layout)
    if BN > 64:
        ws1 = gl.allocate_shared_memory(w2.dtype, [STAGES * (BN // 128), 64, BK], w2.layout)
    else:
        ws1 = ws0  # the warpgroups take turns
    out0 = gl.allocate_shared_memory(y.dtype.element_ty, [BM, 64], OUT)
    out1 = gl.allocate_shared_memory(y.dtype.element_ty, [BM, 64], OUT)
    vectors0 = gl.allocate_shared_memory(gl.float32, [2, BM], FLAT)
    vectors1 = gl.allocate_shared_memory(gl.float32, [2, BM], FLAT)
    PASSED: gl.constexpr = 64 if WRITERS == 1 else 1
    other = gl.allocate_shared_memory(gl.float32, [PASSED, BM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    SHARED: gl.constexpr = 64 if BN == 64 else 1
    SUM: gl.constexpr = gl.int32 if INT else gl.float32
    partial = gl.allocate_shared_memory(SUM, [SHARED, BM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    box = (
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
    )
    if DIRECT:
        hs = gl.allocate_shared_memory(x.dtype, [2 * CHUNK // BK, BM, BK], x.layout)
    else:
        hs = xs
    given = gl.allocate_shared_memory(gl.int64, [3, 1], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], FLAT)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], FLAT)
    posted = gl.allocate_shared_memory(gl.int64, [BOXES, 1], FLAT)
    read = gl.allocate_shared_memory(gl.int64, [BOXES, 1], FLAT)
    passed = gl.allocate_shared_memory(gl.int64, [1, 1], FLAT)
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], FLAT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 if BN > 64 else 1)
    for i in gl.static_range(BOXES):
        mbarrier.init(posted.index(i), count=1)
        mbarrier.init(read.index(i), count=3)
    # Only those that are waited for: the memory of one that nobody uses is given to somebody else, and a barrier may
    # still be written back to it (decision 13).
    if WRITERS == 1:
        mbarrier.init(passed.index(0), count=1)
        mbarrier.init(taken.index(0), count=1)
    if DIRECT:
        mbarrier.init(given.index(0), count=2)
        mbarrier.init(given.index(1), count=2)
        mbarrier.init(given.index(2), count=1)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    tiles1, tiles2, passes = gl.cdiv(I, UP_N), gl.cdiv(H, BN), gl.cdiv(I, PASS)
    gl.warp_specialize(
        [
            (consume, (hidden, xq, ids, result, y, h, hq, scales_x, scales_h, absmax, w13_scales, w2_scales, w13_bias,
                       w2_bias, order, topk_weights, ready, arrived, xs, hs, ws0, box, out0, vectors0, other, partial,
                       full, empty, posted, read, passed, taken, given, R, E, H, I, S, tiles1, tiles2, stride, clip,
                       slope, bound, 0, BM, BN, BK, STAGES, BOXES, ROWS, UP_N, WRITERS, INT, PROMOTE, QMAX, DIRECT, A,
                       WIDTH, ACTIVATION, LAYOUT, CLAMPED, WEIGHT_ON_INPUT, BIAS1, BIAS2)),
            (consume, (hidden, xq, ids, result, y, h, hq, scales_x, scales_h, absmax, w13_scales, w2_scales, w13_bias,
                       w2_bias, order, topk_weights, ready, arrived, xs, hs, ws1, box, out1, vectors1, other, partial,
                       full, empty, posted, read, passed, taken, given, R, E, H, I, S, tiles1, tiles2, stride, clip,
                       slope, bound, 1, BM, BN, BK, STAGES, BOXES, ROWS, UP_N, WRITERS, INT, PROMOTE, QMAX, DIRECT, A,
                       WIDTH, ACTIVATION, LAYOUT, CLAMPED, WEIGHT_ON_INPUT, BIAS1, BIAS2)),
            (produce, (x, w_gate, w_up, hq_tiles, w2, ready, xs, ws0, ws1, box, full, empty, posted, read, given, H, I,
                       S, expert_rows, tiles1, passes, BM, BN, BK, STAGES, BOXES, ROWS, UP_N, WRITERS, GATED, QMAX > 0,
                       DIRECT)),
            (schedule, (ids, result, offsets, ticket, box, posted, read, given, R, E, H, tiles1, passes, tiles2,
                        gl.cdiv(I, CHUNK), BM, ROWS, BOXES, QMAX > 0 and not DIRECT, DIRECT)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
