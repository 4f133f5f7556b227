"""An expert layer's two products in one launch on Hopper: the tiles of ``hopper.py``, from one queue.

What is drawn, in this order, and why nobody waits for ever: docs/decisions/0013-a-layer-in-one-hopper-launch.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowgmm.kernels.hopper import (
    count,
    load_block,
    multiply,
    number,
    place,
    seek,
    turn,
    write,
)
from lowgmm.kernels.moe_tiles import activate
from lowgmm.kernels.quantize import round_to, scales_of

UP, REQUANTISE, DOWN = (gl.constexpr(i) for i in range(3))
"""A gate/up tile; the absmax of some rows of h is known, quantise them; a down tile."""

PASS = gl.constexpr(1024)
"""Columns of h in a task of REQUANTISE."""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def async_fence():
    """What ordinary stores have written, here or before a counter that was waited for, TMA loads see."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def announce(ready, block):
    """Everything that this warpgroup has written comes before one more in this block's counter. No block: -1, as is
    returned."""
    if block >= 0:
        barrier()
        gl.atomic_add(ready + block, 1, sem="release")
    return block * 0 - 1


@gluon.jit
def wait_for(counter, least):
    while gl.atomic_add(counter, 0, sem="acquire") < least:
        pass


@gluon.jit
def hand_out(
    offsets, ticket, box, posted, read, R, E, tiles_n, tile, done, passed,
    BM: gl.constexpr, ROWS: gl.constexpr, KIND: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Post this program's tasks of one kind, ROWS rows high, and the row block (of BM rows) that each belongs to.

    ``tile`` counts from the kind's first task; ``passed`` is how many all kinds before have.
    """
    rows, ends, columns, experts, kinds, blocks = box
    one = gl.full([1], 1, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    base, first = tile * 0, tile * 0
    sums = count(offsets, first, R, E, tiles_n, ROWS)
    base, first, sums, total, expert, local = seek(offsets, tile, base, first, sums, R, E, tiles_n, ROWS)
    while expert < E:
        start, row, end, column = place(offsets, expert, local, R, E, tiles_n, ROWS)
        # Blocks are numbered so that no two experts share a number, without counting those of the experts before.
        block = (row - (row - start) % BM) // BM + expert
        at = done % BOXES
        mbarrier.wait(read.index(at), ((done // BOXES) & 1) ^ 1)
        rows.index(at).store(one * row)
        ends.index(at).store(one * end)
        columns.index(at).store(one * column)
        experts.index(at).store(one * expert)
        kinds.index(at).store(one * KIND)
        blocks.index(at).store(one * block)
        mbarrier.arrive(posted.index(at))
        done += 1
        tile = gl.atomic_add(ticket, 1, sem="relaxed") - passed
        base, first, sums, total, expert, local = seek(offsets, tile, base, first, sums, R, E, tiles_n, ROWS)
    return tile - total, done, passed + total


@gluon.jit
def schedule(
    offsets, ticket, box, posted, read, R, E, tiles1, passes, tiles2,
    BM: gl.constexpr, ROWS: gl.constexpr, BOXES: gl.constexpr, QUANTISED: gl.constexpr,
):  # fmt: skip
    """One warp: draw tasks from the queue and post them, up to BOXES ahead."""
    # The first one too: a program that has not started must not own a task that others wait for.
    tile = gl.atomic_add(ticket, 1, sem="relaxed")
    done, passed = tile * 0, tile * 0
    tile, done, passed = hand_out(
        offsets, ticket, box, posted, read, R, E, tiles1, tile, done, passed, BM, BM, UP, BOXES
    )
    if QUANTISED:
        tile, done, passed = hand_out(
            offsets, ticket, box, posted, read, R, E, passes, tile, done, passed, BM, ROWS, REQUANTISE, BOXES
        )
    tile, done, passed = hand_out(
        offsets, ticket, box, posted, read, R, E, tiles2, tile, done, passed, BM, BM, DOWN, BOXES
    )
    one = gl.full([1], 1, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    mbarrier.wait(read.index(done % BOXES), ((done // BOXES) & 1) ^ 1)
    box[0].index(done % BOXES).store(one * -1)
    mbarrier.arrive(posted.index(done % BOXES))


@gluon.jit
def load_gate_up(
    w_gate, w_up, channel, k, ws0, ws1, full, slot, GATED: gl.constexpr, BN: gl.constexpr
):  # fmt: skip
    """With a gate, gate and up blocks in turns: both of 64 columns of h meet in one warpgroup (BN = 256) or in two."""
    for i in gl.static_range(BN // 64):
        if GATED and i % 2 == 1:
            load_block(w_up, channel + 64 * (i // 2), k, ws0, ws1, full, slot, i, BN)
        elif GATED:
            load_block(w_gate, channel + 64 * (i // 2), k, ws0, ws1, full, slot, i, BN)
        else:
            load_block(w_gate, channel + 64 * i, k, ws0, ws1, full, slot, i, BN)


@gluon.jit
def produce(
    x, w_gate, w_up, h, w2, ready, xs, ws0, ws1, box, full, empty, posted, read,
    H, I, S, expert_rows, tiles1, passes,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr,
    ROWS: gl.constexpr, UP_N: gl.constexpr, WRITERS: gl.constexpr, GATED: gl.constexpr, QUANTISED: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """One warp: keep the ring of operands full, across tasks."""
    rows, ends, columns, experts, kinds, blocks = box
    step, done = 0, 0
    mbarrier.wait(posted.index(0), 0)
    row = number(rows, 0)
    while row >= 0:
        at = done % BOXES
        kind, column, expert = number(kinds, at), number(columns, at), number(experts, at)
        end, block = number(ends, at), number(blocks, at)
        mbarrier.arrive(read.index(at))
        if kind == UP:
            channel = expert * expert_rows + column * UP_N
            for k in range(0, H, BK):
                slot = step % STAGES
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                load_gate_up(w_gate, w_up, channel, k, ws0, ws1, full, slot, GATED, BN)
                tma.async_copy_global_to_shared(x, [row, k], full.index(slot), xs.index(slot))
                step += 1
        elif kind == DOWN:
            channel = expert * H + column * BN
            steps = gl.cdiv(I, BK)
            ahead = gl.minimum(steps, STAGES)  # weights do not wait for h
            for i in range(0, ahead):
                slot = (step + i) % STAGES
                mbarrier.wait(empty.index(slot), (((step + i) // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                for j in gl.static_range(BN // 64):
                    load_block(w2, channel + 64 * j, i * BK, ws0, ws1, full, slot, j, BN)
            if QUANTISED:
                wait_for(ready + S + block, gl.cdiv(gl.minimum(end - row, BM), ROWS) * passes * 2)
            else:
                wait_for(ready + block, tiles1 * WRITERS)
            async_fence()
            for i in range(0, ahead):
                slot = (step + i) % STAGES
                tma.async_copy_global_to_shared(h, [row, i * BK], full.index(slot), xs.index(slot))
            for i in range(ahead, steps):
                slot = (step + i) % STAGES
                mbarrier.wait(empty.index(slot), (((step + i) // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                for j in gl.static_range(BN // 64):
                    load_block(w2, channel + 64 * j, i * BK, ws0, ws1, full, slot, j, BN)
                tma.async_copy_global_to_shared(h, [row, i * BK], full.index(slot), xs.index(slot))
            step += steps
        done += 1
        mbarrier.wait(posted.index(done % BOXES), (done // BOXES) & 1)
        row = number(rows, done % BOXES)


@gluon.jit
def requantise(
    h, hq, scales_h, absmax, row, stop, column, I, stride,
    HALF: gl.constexpr, ROWS: gl.constexpr, QMAX: gl.constexpr,
):  # fmt: skip
    """A warpgroup's half of a task: ROWS/2 rows, 64 elements a thread at a time."""
    HIGH: gl.constexpr = ROWS // 2
    WIDE: gl.constexpr = 8192 // HIGH
    ACROSS: gl.constexpr = min(32, WIDE // 16)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    rm = row + HALF * HIGH + gl.arange(0, HIGH, layout=gl.SliceLayout(1, LAYOUT))
    rn = gl.arange(0, WIDE, layout=gl.SliceLayout(0, LAYOUT))
    live = rm < stop
    at = gl.expand_dims(rm.to(gl.int64) * stride, 1) + gl.expand_dims(column * PASS + rn, 0)
    stop_column = gl.minimum(I, (column + 1) * PASS)
    following = gl.load(h + at, mask=gl.expand_dims(live, 1) & gl.expand_dims(column * PASS + rn < I, 0), other=0.0)
    bits = gl.load(absmax + rm, mask=live, other=0, volatile=True)
    inverse, scale = scales_of(bits.to(gl.float32, bitcast=True), QMAX)
    for c in range(column * PASS, stop_column, WIDE):
        v = following
        inside = gl.expand_dims(live, 1) & gl.expand_dims(c + WIDE + rn < stop_column, 0)
        following = gl.load(h + at + WIDE, mask=inside, other=0.0)  # while these are stored
        v = v.to(gl.float32) * gl.expand_dims(inverse, 1)
        inside = gl.expand_dims(live, 1) & gl.expand_dims(c + rn < I, 0)
        gl.store(hq + at, round_to(v, QMAX, hq.dtype.element_ty), mask=inside)
        at += WIDE
    gl.store(scales_h + rm, scale, mask=live)


@gluon.jit
def scaled(
    acc, scales_w, shift, sx, weight,
    ACC: gl.constexpr, QUANTISED: gl.constexpr, WEIGHTED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """acc · scales_w · scales_x · weight + bias in float32, in the order of ``moe_tiles.scaled``."""
    value = acc.to(gl.float32)
    if QUANTISED:
        value = value * gl.expand_dims(scales_w, 1) * gl.expand_dims(sx.load(gl.SliceLayout(0, ACC)), 0)
    if WEIGHTED:
        value = value * gl.expand_dims(weight.load(gl.SliceLayout(0, ACC)), 0)
    if BIAS:
        value = value + gl.expand_dims(shift, 1)
    return value


@gluon.jit
def row_values(
    scales_x, scales_h, order, topk_weights, kind, row, end,
    BM: gl.constexpr, QUANTISED: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """The scale of each of a tile's rows, and its router weight if that comes before the activation (else 1)."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rm = row + gl.arange(0, BM, layout=LINE)
    scale = gl.full([BM], 0, gl.float32, LINE)
    share = gl.full([BM], 1, gl.float32, LINE)
    if kind == UP:
        if QUANTISED:
            scale = gl.load(scales_x + rm, mask=rm < end, other=0.0)
        if WEIGHTED:
            slot = gl.load(order + rm, mask=rm < end, other=0)
            share = gl.load(topk_weights + slot, mask=rm < end, other=0.0).to(gl.float32)
    elif QUANTISED:
        scale = gl.load(scales_h + rm, mask=rm < end, other=0.0, volatile=True)  # other programs have just written it
    return scale, share


@gluon.jit
def channels(
    kind, expert, column, H, I,
    HALF: gl.constexpr, BLOCK: gl.constexpr, ACC: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where in [E, N] the 64 channels of a warpgroup's accumulator number BLOCK are, and which of them exist."""
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    rn = column * BN + (HALF * (BN // 2) + 64 * BLOCK) + lane
    wide = expert.to(gl.int64)
    if kind == DOWN:
        at, inside = wide * H + rn, rn < H
    elif LAYOUT == "none":
        at, inside = wide * I + rn, rn < I
    else:
        # Gate and up of the same 64 columns of h are neighbours in a tile: a warpgroup's two, or one of each.
        SECOND: gl.constexpr = BLOCK if BN == 256 else HALF
        of_h = column * (BN // 2) + (HALF * 64 if BN == 256 else 0) + lane
        inside = of_h < I
        if LAYOUT == "interleaved":
            at = wide * (2 * I) + (2 * of_h + SECOND)
        else:
            at = wide * (2 * I) + (of_h + SECOND * I)
    return at, inside


@gluon.jit
def channel_values(of_w13, of_w2, kind, at, inside, USED13: gl.constexpr, USED2: gl.constexpr):
    """Scales or biases of these channels; zeros where there is none."""
    value = gl.full([64], 0, gl.float32, at.type.layout)
    if kind == UP:
        if USED13:
            value = gl.load(of_w13 + at, mask=inside, other=0.0).to(gl.float32)
    elif USED2:
        value = gl.load(of_w2 + at, mask=inside, other=0.0).to(gl.float32)
    return value


@gluon.jit
def consume(
    y, h, hq, scales_x, scales_h, absmax, w13_scales, w2_scales, w13_bias, w2_bias, order, topk_weights, ready,
    xs, ws, box, out, vectors, other, full, empty, posted, read, passed, taken,
    H, I, S, tiles1, stride, slope, bound,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    BOXES: gl.constexpr, ROWS: gl.constexpr, UP_N: gl.constexpr, WRITERS: gl.constexpr,
    INT: gl.constexpr, PROMOTE: gl.constexpr, QMAX: gl.constexpr, ACTIVATION: gl.constexpr, LAYOUT: gl.constexpr,
    CLAMPED: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr, BIAS1: gl.constexpr, BIAS2: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of every tile's channels, in one or two blocks of 64, times all of the tile's rows."""
    rows, ends, columns, experts, kinds, blocks = box
    sx, weight = vectors.index(0), vectors.index(1)
    TWO: gl.constexpr = BN == 256
    GATED: gl.constexpr = LAYOUT != "none"
    QUANTISED: gl.constexpr = QMAX > 0
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 256 // xs.dtype.primitive_bitwidth])
    # A tile of h is announced when the next one is multiplied: by then its stores need not be waited for.
    step, done, met, pending = 0, 0, 0, -1
    mbarrier.wait(posted.index(0), 0)
    while number(rows, done % BOXES) >= 0:
        at = done % BOXES
        kind = number(kinds, at)
        if kind != UP:
            pending = announce(ready, pending)
        if kind == REQUANTISE:
            if QUANTISED:
                row, end, block = number(rows, at), number(ends, at), number(blocks, at)
                wait_for(ready + block, tiles1 * WRITERS)
                stop = gl.minimum(end, row + ROWS)
                requantise(h, hq, scales_h, absmax, row, stop, number(columns, at), I, stride, HALF, ROWS, QMAX)
                async_fence()
                announce(ready + S, block)
        else:
            # Once the tile's first operands are here, everything that their loads waited for can be read as well.
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            K = H
            if kind == DOWN:
                K = I
            if not (PROMOTE and TWO):  # early, to hide the latency; in that case no register is left for it
                row, end, expert, column = number(rows, at), number(ends, at), number(experts, at), number(columns, at)
                scale, share = row_values(
                    scales_x, scales_h, order, topk_weights, kind, row, end, BM, QUANTISED, WEIGHT_ON_INPUT
                )
                at0, in0 = channels(kind, expert, column, H, I, HALF, 0, ACC, BN, LAYOUT)
                scale0 = channel_values(w13_scales, w2_scales, kind, at0, in0, QUANTISED, QUANTISED)
                if TWO:
                    at1, in1 = channels(kind, expert, column, H, I, HALF, 1, ACC, BN, LAYOUT)
                    scale1 = channel_values(w13_scales, w2_scales, kind, at1, in1, QUANTISED, QUANTISED)
            acc0, acc1, step = multiply(xs, ws, full, empty, step, K, BM, BN, BK, STAGES, ACC, INT, PROMOTE)
            pending = announce(ready, pending)
            row, end, expert, column = number(rows, at), number(ends, at), number(experts, at), number(columns, at)
            if PROMOTE and TWO:
                scale, share = row_values(
                    scales_x, scales_h, order, topk_weights, kind, row, end, BM, QUANTISED, WEIGHT_ON_INPUT
                )
            if QUANTISED:
                sx.store(scale)
            if WEIGHT_ON_INPUT:
                weight.store(share)
            at0, in0 = channels(kind, expert, column, H, I, HALF, 0, ACC, BN, LAYOUT)
            if PROMOTE and TWO:
                scale0 = channel_values(w13_scales, w2_scales, kind, at0, in0, QUANTISED, QUANTISED)
            shift = channel_values(w13_bias, w2_bias, kind, at0, in0, BIAS1, BIAS2)
            value0 = scaled(acc0, scale0, shift, sx, weight, ACC, QUANTISED, WEIGHT_ON_INPUT, BIAS1 or BIAS2)
            value1 = value0
            if TWO:
                at1, in1 = channels(kind, expert, column, H, I, HALF, 1, ACC, BN, LAYOUT)
                if PROMOTE:
                    scale1 = channel_values(w13_scales, w2_scales, kind, at1, in1, QUANTISED, QUANTISED)
                shift = channel_values(w13_bias, w2_bias, kind, at1, in1, BIAS1, BIAS2)
                value1 = scaled(acc1, scale1, shift, sx, weight, ACC, QUANTISED, WEIGHT_ON_INPUT, BIAS1 or BIAS2)
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
                elif HALF == 1:
                    mbarrier.wait(taken.index(0), (met & 1) ^ 1)
                    other.store(value0)
                    barrier()
                    mbarrier.arrive(passed.index(0))
                    met += 1
                else:
                    mbarrier.wait(passed.index(0), met & 1)
                    value1 = other.load(ACC)
                    barrier()
                    mbarrier.arrive(taken.index(0))
                    met += 1
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
        mbarrier.arrive(read.index(at))
        done += 1
        mbarrier.wait(posted.index(done % BOXES), (done // BOXES) & 1)
    announce(ready, pending)


@gluon.jit
def keep(
    value, h, absmax, out, row, end, column, I, stride, BM: gl.constexpr, QUANTISED: gl.constexpr
):  # fmt: skip
    """Write 64 columns of h, rounded once, and raise the absmax of their rows."""
    v = turn(value, out)
    write(v, h, row, end, column, I, stride, BM)
    if QUANTISED:
        ROWS: gl.constexpr = gl.SliceLayout(1, v.type.layout)
        rm = row + gl.arange(0, BM, layout=ROWS)
        rn = column + gl.arange(0, 64, layout=gl.SliceLayout(0, v.type.layout))
        # Without their sign floats compare like their bits, and NaN is above all of them.
        bits = v.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF
        bits = gl.where(gl.expand_dims(rn < I, 0), bits, 0)
        gl.atomic_max(absmax + rm, gl.max(bits, 1), mask=rm < end, sem="relaxed")


@gluon.jit(
    do_not_specialize=["R", "E", "S"], do_not_specialize_on_alignment=["absmax", "order", "offsets", "ready", "ticket"]
)
def hopper_layer_kernel(
    x,  # descriptor [BM, BK] over (R, H): each slot's token, by expert
    w_gate,  # descriptor [64, BK]: the gate rows of all experts, expert_rows apart; without a gate all rows
    w_up,  # likewise
    hq_tiles,  # descriptor [BM, BK] over (R, I)
    w2,  # descriptor [64, BK] over (E·H, I)
    y,  # (R, H), row stride ``stride`` like all that are written
    h,  # (R, I), written
    hq,  # (R, I), written; h if it is not quantised
    scales_x,  # (R,) float32
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
    R,
    E,
    H,
    I,
    S,
    expert_rows,
    stride,
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
    ACTIVATION: gl.constexpr,
    LAYOUT: gl.constexpr,
    CLAMPED: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
    BIAS1: gl.constexpr,
    BIAS2: gl.constexpr,
):
    """Grid (programs,). The warps, boxes and ring of ``hopper_kernel``; a box says of which kind its task is.

    h and y may share memory, and so may x and hq: a row block's down tiles come when all of its h is quantised, and
    its h is quantised when all of its gate/up tiles are done.
    """
    FLAT: gl.constexpr = mbarrier.MBarrierLayout()
    GATED: gl.constexpr = LAYOUT != "none"
    UP_N: gl.constexpr = BN // 2 if GATED else BN
    WRITERS: gl.constexpr = 1 if GATED and BN == 128 else 2  # warpgroups that write a part of h of each gate/up tile
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ws0 = gl.allocate_shared_memory(w2.dtype, [STAGES * (BN // 128), 64, BK], w2.layout)
    ws1 = gl.allocate_shared_memory(w2.dtype, [STAGES * (BN // 128), 64, BK], w2.layout)
    out0 = gl.allocate_shared_memory(y.dtype.element_ty, [BM, 64], OUT)
    out1 = gl.allocate_shared_memory(y.dtype.element_ty, [BM, 64], OUT)
    vectors0 = gl.allocate_shared_memory(gl.float32, [2, BM], FLAT)
    vectors1 = gl.allocate_shared_memory(gl.float32, [2, BM], FLAT)
    PASSED: gl.constexpr = 64 if WRITERS == 1 else 1
    other = gl.allocate_shared_memory(gl.float32, [PASSED, BM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    box = (
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [BOXES, 1], FLAT),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], FLAT)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], FLAT)
    posted = gl.allocate_shared_memory(gl.int64, [BOXES, 1], FLAT)
    read = gl.allocate_shared_memory(gl.int64, [BOXES, 1], FLAT)
    passed = gl.allocate_shared_memory(gl.int64, [1, 1], FLAT)
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], FLAT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(BOXES):
        mbarrier.init(posted.index(i), count=1)
        mbarrier.init(read.index(i), count=3)
    mbarrier.init(passed.index(0), count=1)
    mbarrier.init(taken.index(0), count=1)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    BYTES: gl.constexpr = (BM + BN) * BK * (x.dtype.primitive_bitwidth // 8)
    tiles1, tiles2, passes = gl.cdiv(I, UP_N), gl.cdiv(H, BN), gl.cdiv(I, PASS)
    gl.warp_specialize(
        [
            (consume, (y, h, hq, scales_x, scales_h, absmax, w13_scales, w2_scales, w13_bias, w2_bias, order,
                       topk_weights, ready, xs, ws0, box, out0, vectors0, other, full, empty, posted, read, passed,
                       taken, H, I, S, tiles1, stride, slope, bound,
                       0, BM, BN, BK, STAGES, BOXES, ROWS, UP_N, WRITERS, INT, PROMOTE, QMAX, ACTIVATION, LAYOUT,
                       CLAMPED, WEIGHT_ON_INPUT, BIAS1, BIAS2)),
            (consume, (y, h, hq, scales_x, scales_h, absmax, w13_scales, w2_scales, w13_bias, w2_bias, order,
                       topk_weights, ready, xs, ws1, box, out1, vectors1, other, full, empty, posted, read, passed,
                       taken, H, I, S, tiles1, stride, slope, bound,
                       1, BM, BN, BK, STAGES, BOXES, ROWS, UP_N, WRITERS, INT, PROMOTE, QMAX, ACTIVATION, LAYOUT,
                       CLAMPED, WEIGHT_ON_INPUT, BIAS1, BIAS2)),
            (produce, (x, w_gate, w_up, hq_tiles, w2, ready, xs, ws0, ws1, box, full, empty, posted, read, H, I, S,
                       expert_rows, tiles1, passes, BM, BN, BK, STAGES, BOXES, ROWS, UP_N, WRITERS, GATED, QMAX > 0,
                       BYTES)),
            (schedule, (offsets, ticket, box, posted, read, R, E, tiles1, passes, tiles2, BM, ROWS, BOXES, QMAX > 0)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
