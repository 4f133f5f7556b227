"""What ``hopper_layer.py`` does by itself where there is one token only: nothing is launched ahead of it or after it.

The slots are the rows, whether they have an expert or not; the token and h are quantised where they are multiplied;
whoever writes the last slot's part of some columns sums them over the slots.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lowgmm.kernels.combine import sum_slots
from lowgmm.kernels.hopper import LANES, add
from lowgmm.kernels.hopper_tasks import add_product, async_fence, barrier
from lowgmm.kernels.quantize import round_to, scales_of

CHUNK, HALF_PANELS = gl.constexpr(1024), gl.constexpr(4)
"""Columns of one row of h that two warpgroups quantise together, each so many times 128."""


@gluon.jit
def tiles_of(ids, R, E, tiles_n):
    """The experts of a token's slots, and how many tiles their slots have, summed up to and including each."""
    slot = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    expert = gl.load(ids + slot, mask=slot < R, other=-1)
    local = (expert >= 0) & (expert < E)
    return gl.where(local, expert, 0).to(gl.int32), gl.associative_scan(gl.where(local, tiles_n, 0), 0, add)


@gluon.jit
def quantise_token(token, xq, scales_x, H, R, clip, WIDTH: gl.constexpr, QMAX: gl.constexpr):
    """One warpgroup: the only token, for this program's own loads. Every program writes the same bytes."""
    LINE: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    n = gl.arange(0, WIDTH, layout=LINE)
    largest = gl.full([WIDTH], 0, gl.int32, LINE)
    for start in range(0, H, WIDTH):
        v = gl.load(token + start + n, mask=start + n < H, other=0.0).to(gl.float32)
        largest = gl.maximum(largest, v.to(gl.int32, bitcast=True) & 0x7FFFFFFF)  # as in ``raise_absmax``
    absmax = gl.max(largest, 0).to(gl.float32, bitcast=True)
    inverse, scale = scales_of(gl.where(absmax != absmax, absmax, gl.minimum(absmax, clip)), QMAX)
    for start in range(0, H, WIDTH):
        v = gl.load(token + start + n, mask=start + n < H, other=0.0).to(gl.float32) * inverse
        gl.store(xq + start + n, round_to(v, QMAX, xq.dtype.element_ty), mask=start + n < H)
    slot = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(scales_x + slot, scale + slot.to(gl.float32) * 0, mask=slot < R)
    async_fence()
    barrier()


@gluon.jit
def multiply_row(
    h, absmax, hs, ws, full, empty, given, row, step, chunks, I, stride,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, ACC: gl.constexpr,
    INT: gl.constexpr, PROMOTE: gl.constexpr, QMAX: gl.constexpr,
):  # fmt: skip
    """64 channels times the only row of a tile of h, which is quantised here; with tiles of 64 channels half of the
    steps. ``hs`` holds two chunks of CHUNK columns, of which each warpgroup writes a half; ``chunks`` counts them. The
    second result is the row's scale.
    """
    # Row 0 of a panel, which is BM rows of 128 bytes, is not swizzled. What the other rows hold does not matter.
    panels = hs._reinterpret(hs.dtype, [4, HALF_PANELS, BM * 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    panel = gl.arange(0, HALF_PANELS, layout=gl.SliceLayout(1, LINES)) + HALF * HALF_PANELS
    k = gl.expand_dims(panel * 128, 1) + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LINES)), 0)
    at = h + (row.to(gl.int64) * stride + k)
    v = gl.load(at, mask=k < I, other=0.0)
    following = gl.load(at + CHUNK, mask=CHUNK + k < I, other=0.0)
    bits = gl.load(absmax + row, volatile=True)
    inverse, scale = scales_of(bits.to(gl.float32, bitcast=True), QMAX)
    acc = gl.full([64, BM], 0, gl.int32 if INT else gl.float32, ACC)
    for start in range(0, I, CHUNK):
        half = chunks & 1
        q = round_to(v.to(gl.float32) * inverse, QMAX, hs.dtype)
        panels.index(2 * half + HALF).slice(0, 128, dim=1).store(q)
        v = following
        following = gl.load(at + (start + 2 * CHUNK), mask=start + 2 * CHUNK + k < I, other=0.0)
        fence_async_shared()
        barrier()
        mbarrier.arrive(given.index(half))
        mbarrier.wait(given.index(half), (chunks >> 1) & 1)
        steps = gl.cdiv(gl.minimum(I - start, CHUNK), BK)
        for i in range(HALF if BN == 64 else 0, steps, 2 if BN == 64 else 1):
            slot = (step + i) % STAGES
            mbarrier.wait(full.index(slot), ((step + i) // STAGES) & 1)
            x = hs.index(half * (CHUNK // BK) + i)
            acc = add_product(acc, ws.index(slot), x, BM, BK, ACC, PROMOTE)
            mbarrier.arrive(empty.index(slot))
        step += steps
        chunks += 1
    return acc, scale, step, chunks


@gluon.jit
def leave(done, block, LANE: gl.constexpr):
    """One more warpgroup that will look at this block's counters no more; how many have before, in one lane.

    No fence: what it has read it has used.
    """
    barrier()
    lane = gl.arange(0, 32 * gl.num_warps(), layout=LANE)
    return gl.atomic_add(done + block + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")


@gluon.jit
def clear(ready, absmax, done, block, before, last, LANE: gl.constexpr):
    """Who left last leaves the counters as they were found."""
    lane = gl.arange(0, 32 * gl.num_warps(), layout=LANE)
    mine, zero = (lane == 0) & (before == last), lane * 0
    gl.store(ready + block + zero, zero, mask=mine)
    gl.store(absmax + block + zero, zero, mask=mine)
    gl.store(done + block + zero, zero, mask=mine)


@gluon.jit
def finish(y, result, arrived, slots, column, H, stride, A: gl.constexpr):
    """This warpgroup has written 64 columns of a slot's row of y. Once all slots that have an expert have theirs, the
    last one writes the result, and leaves the counter as it was found."""
    _rows, _shares, locals = slots
    number = 0
    for a in gl.static_range(A):
        number += locals[a].to(gl.int32)
    counter = arrived + column // 64
    barrier()
    # What it returns is used, so it acquires: the others' rows are read as they were written.
    if gl.atomic_add(counter, 1, sem="acq_rel") == number - 1:
        n = column + gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
        total = sum_slots(y, slots, n, n < H, stride, A)
        gl.store(result + n, total.to(result.dtype.element_ty), mask=n < H)
        gl.store(counter, 0)


@gluon.jit
def write_zeros(result, H):
    """One warp: this program's share of a result to which no expert contributes."""
    n = gl.arange(0, 256, layout=gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    zeros = gl.full([256], 0, result.dtype.element_ty, n.type.layout)
    for start in range(gl.program_id(0) * 256, H, gl.num_programs(0) * 256):
        gl.store(result + start + n, zeros, mask=start + n < H)
