"""The warp of ``hopper_layer.py`` that draws its program's tasks from the queue, and posts them to the others."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lowgmm.kernels.hopper import LANES, among, count, place, post, seek
from lowgmm.kernels.hopper_direct import tiles_of, write_zeros
from lowgmm.kernels.hopper_tasks import DOWN, REQUANTISE, UP


@gluon.jit
def hand_out(
    ids, offsets, ticket, box, posted, read, given, R, E, tiles_n, chunks_of_h, tile, done, passed,
    BM: gl.constexpr, ROWS: gl.constexpr, KIND: gl.constexpr, BOXES: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Post this program's tasks of one kind, ROWS rows high, and the row block (of BM rows) that each belongs to.

    ``tile`` counts from the kind's first task; ``passed`` is how many all kinds before have. With DIRECT each slot is a
    row, and a row block.
    """
    base, first, chunks = tile * 0, tile * 0, tile * 0
    groups = E
    if DIRECT:
        groups = R
        expert_of, sums = tiles_of(ids, R, E, tiles_n)
        total = gl.max(sums, 0)
        group, local = among(sums, tile)
    else:
        sums = count(offsets, first, R, E, tiles_n, ROWS)
        base, first, sums, total, group, local = seek(offsets, tile, base, first, sums, R, E, tiles_n, ROWS)
    while group < groups:
        if DIRECT:
            row, end, column, block = group, group + 1, local, group
            lane = gl.arange(0, LANES, layout=expert_of.type.layout)
            expert = gl.sum(gl.where(lane == group, expert_of, 0), 0)
        else:
            start, row, end, column = place(offsets, group, local, R, E, tiles_n, ROWS)
            # Blocks are numbered so that no two experts share a number, without counting those of the experts before.
            block = (row - (row - start) % BM) // BM + group
            expert = group
        at = done % BOXES
        mbarrier.wait(read.index(at), ((done // BOXES) & 1) ^ 1)
        post(box, at, (row, end, column, expert, KIND, block))
        mbarrier.arrive(posted.index(at))
        if DIRECT and KIND == DOWN:  # whoever waits for h leaves the next tile to a program that has none
            chunks += chunks_of_h
            mbarrier.wait(given.index((chunks - 1) & 1), ((chunks - 1) >> 1) & 1)
        done += 1
        tile = gl.atomic_add(ticket, 1, sem="relaxed") - passed
        if DIRECT:
            group, local = among(sums, tile)
        else:
            base, first, sums, total, group, local = seek(offsets, tile, base, first, sums, R, E, tiles_n, ROWS)
    return tile - total, done, passed + total


@gluon.jit
def schedule(
    ids, result, offsets, ticket, box, posted, read, given, R, E, H, tiles1, passes, tiles2, chunks_of_h,
    BM: gl.constexpr, ROWS: gl.constexpr, BOXES: gl.constexpr, REQUANTISED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """One warp: draw tasks from the queue and post them, up to BOXES ahead."""
    # The first one too: a program that has not started must not own a task that others wait for.
    tile = gl.atomic_add(ticket, 1, sem="relaxed")
    done, passed = tile * 0, tile * 0
    tile, done, passed = hand_out(
        ids, offsets, ticket, box, posted, read, given, R, E, tiles1, chunks_of_h, tile, done, passed,
        BM, BM, UP, BOXES, DIRECT,
    )  # fmt: skip
    if REQUANTISED:
        tile, done, passed = hand_out(
            ids, offsets, ticket, box, posted, read, given, R, E, passes, chunks_of_h, tile, done, passed,
            BM, ROWS, REQUANTISE, BOXES, DIRECT,
        )  # fmt: skip
    tile, done, passed = hand_out(
        ids, offsets, ticket, box, posted, read, given, R, E, tiles2, chunks_of_h, tile, done, passed,
        BM, BM, DOWN, BOXES, DIRECT,
    )  # fmt: skip
    mbarrier.wait(read.index(done % BOXES), ((done // BOXES) & 1) ^ 1)
    post(box, done % BOXES, (-1,))
    mbarrier.arrive(posted.index(done % BOXES))
    if DIRECT:  # everyone draws one ticket too many; who draws the last leaves the counter as it was found
        gl.store(ticket, 0, mask=tile == gl.num_programs(0) - 1)
        if passed == 0:  # no slot has an expert, so no tile writes the result
            write_zeros(result, H)
