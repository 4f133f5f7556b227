"""What the tasks of ``hopper_layer.py`` are made of: counters between them, scales, sums, and how h is written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowgmm.kernels.hopper_write import turn, write
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
def row_values(
    scales_x, scales_h, order, topk_weights, kind, row, end,
    BM: gl.constexpr, QMAX: gl.constexpr, DIRECT: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """The scale of each of a tile's rows, and its router weight if that comes before the activation (else 1)."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rm = row + gl.arange(0, BM, layout=LINE)
    scale = gl.full([BM], 0, gl.float32, LINE)
    share = gl.full([BM], 1, gl.float32, LINE)
    if kind == UP:
        if QMAX > 0:
            scale = gl.load(scales_x + rm, mask=rm < end, other=0.0)
        if WEIGHTED:
            slot = rm
            if not DIRECT:
                slot = gl.load(order + rm, mask=rm < end, other=0)
            share = gl.load(topk_weights + slot, mask=rm < end, other=0.0).to(gl.float32)
    elif QMAX > 0 and not DIRECT:  # there it comes from multiply_row
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
        # Gate and up of the same columns of h are neighbours in a tile: a warpgroup's two blocks, or one of each, or
        # halves of the only one.
        of_h = column * (BN // 2) + (HALF * 64 if BN == 256 else 0) + lane % min(64, BN // 2)
        second = lane * 0 + (BLOCK if BN == 256 else HALF)
        if BN == 64:
            second = lane // 32
        inside = of_h < I
        if LAYOUT == "interleaved":
            at = wide * (2 * I) + (2 * of_h + second)
        else:
            at = wide * (2 * I) + (of_h + second * I)
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
def multiply_in_turns(
    xs, ws, full, empty, step, K,
    HALF: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, ACC: gl.constexpr,
    INT: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    """64 channels times the tile's rows over every other step of K. Tiles this narrow give every SM one where few
    experts have tokens."""
    DTYPE: gl.constexpr = gl.int32 if INT else gl.float32
    acc = gl.full([64, BM], 0, DTYPE, ACC)
    steps = gl.cdiv(K, BK)
    for i in range(HALF, steps, 2):
        slot = (step + i) % STAGES
        mbarrier.wait(full.index(slot), ((step + i) // STAGES) & 1)
        acc = add_product(acc, ws.index(slot), xs.index(slot), BM, BK, ACC, PROMOTE)
        mbarrier.arrive(empty.index(slot))
    return acc, step + steps


@gluon.jit
def add_product(acc, w, x, BM: gl.constexpr, BK: gl.constexpr, ACC: gl.constexpr, PROMOTE: gl.constexpr):
    """acc [64, BM] + w [64, BK] · x [BM, BK]ᵀ, finished."""
    if PROMOTE:
        for i in gl.static_range(BK // 128):
            a, b = w.slice(i * 128, 128, dim=1), x.slice(i * 128, 128, dim=1).permute((1, 0))
            part = warpgroup_mma(a, b, gl.full([64, BM], 0, gl.float32, ACC), use_acc=False, is_async=True)
            acc += warpgroup_mma_wait(0, deps=[part])
    else:
        acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc


@gluon.jit
def hand_over(value, cell, passed, taken, met, HALF: gl.constexpr, ACC: gl.constexpr):
    """The second warpgroup's ``value``, in the first. ``met`` counts how often they have met before."""
    if HALF == 1:
        mbarrier.wait(taken.index(0), (met & 1) ^ 1)
        cell.store(value)
        barrier()
        mbarrier.arrive(passed.index(0))
    else:
        mbarrier.wait(passed.index(0), met & 1)
        value = cell.load(ACC)
        barrier()
        mbarrier.arrive(taken.index(0))
    return value


@gluon.jit
def larger(a, b):
    """max(|a|, |b|) of each half of a word, a bfloat16: their signs mean nothing, and NaN wins."""
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def raise_absmax(absmax, words, row, end, AXIS: gl.constexpr, PAIRS: gl.constexpr):
    """By words along AXIS that are a float32, or two bfloat16, of which the absmax has the bits as a float32."""
    if PAIRS:
        words = gl.reduce(words, AXIS, larger)
        words = gl.maximum((words << 16) & 0x7FFFFFFF, words & 0x7FFF0000)
    else:
        # Without their sign floats compare like their bits, and NaN is above all of them.
        words = gl.max(words & 0x7FFFFFFF, AXIS)
    rm = row + gl.arange(0, words.shape[0], layout=words.type.layout)
    gl.atomic_max(absmax + rm, words, mask=rm < end, sem="relaxed")


@gluon.jit
def keep_halves(
    value, other, h, absmax, row, end, column, I, stride, slope, bound,
    BM: gl.constexpr, QUANTISED: gl.constexpr, ACTIVATION: gl.constexpr, CLAMPED: gl.constexpr,
):  # fmt: skip
    """As ``keep``, of a block whose first 32 channels are the gate's and whose others are up's."""
    ACROSS: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    other.store(value)
    barrier()
    gate, up = other.slice(0, 32).load(ACROSS), other.slice(32, 32).load(ACROSS)
    barrier()
    v = activate(gate, up, slope, bound, ACTIVATION, True, CLAMPED, True).to(h.dtype.element_ty)
    rn = column + gl.arange(0, 32, layout=gl.SliceLayout(1, ACROSS))
    rm = row + gl.arange(0, BM, layout=gl.SliceLayout(0, ACROSS))
    inside = gl.expand_dims(rn < I, 1) & gl.expand_dims(rm < end, 0)
    gl.store(h + (gl.expand_dims(rm.to(gl.int64) * stride, 0) + gl.expand_dims(rn, 1)), v, mask=inside)
    if QUANTISED:
        bits = v.to(gl.float32).to(gl.int32, bitcast=True)
        raise_absmax(absmax, gl.where(gl.expand_dims(rn < I, 1), bits, 0), row, end, 0, False)


@gluon.jit
def keep(
    value, h, absmax, out, row, end, column, I, stride, BM: gl.constexpr, QUANTISED: gl.constexpr
):  # fmt: skip
    """Write 64 columns of h, rounded once, and raise the absmax of their rows."""
    v = turn(value, out)
    write(v, h, row, end, column, I, stride, BM)
    if QUANTISED:
        PAIRS: gl.constexpr = out.dtype.primitive_bitwidth == 16
        if PAIRS:
            # Read once more, with as few threads to a row as there are: no shuffles between them where BM = 128.
            ACROSS: gl.constexpr = 128 // BM
            LINES: gl.constexpr = gl.BlockedLayout([1, 32 // ACROSS], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
            words = out._reinterpret(gl.int32, [BM, 32], gl.NVMMASharedLayout(128, 32, rank=2)).load(LINES)
        else:
            words = v.to(gl.int32, bitcast=True)
        if column + 64 <= I:
            raise_absmax(absmax, words, row, end, 1, PAIRS)
        else:
            WORDS: gl.constexpr = words.shape[1]
            rn = column + 64 // WORDS * gl.arange(0, WORDS, layout=gl.SliceLayout(0, words.type.layout))
            raise_absmax(absmax, gl.where(gl.expand_dims(rn < I, 0), words, 0), row, end, 1, PAIRS)


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
