"""How operands get into shared memory on Hopper: what TMA loads at a time, and how many bytes a slot waits for."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


def box_of(block_m: int, block_n: int, element_size: int) -> list[int]:
    """Rows and columns that are loaded at a time. Where experts have few rows, weights and rows are what bounds: a tile
    higher than its expert has rows loads 32 at a time, so that it costs little."""
    return [min(block_m, 32) if block_n < 256 else block_m, 128 // element_size]


@gluon.jit
def load_block(w, channel, k, ws0, ws1, full, slot, i: gl.constexpr, BN: gl.constexpr):
    """Ask for 64 channels of weights: block ``i`` of a tile's, the first half of which is the first warpgroup's."""
    MINE: gl.constexpr = (BN + 64) // 128
    if i < MINE:
        tma.async_copy_global_to_shared(w, [channel, k], full.index(slot), ws0.index(slot * MINE + i))
    else:
        tma.async_copy_global_to_shared(w, [channel, k], full.index(slot), ws1.index(slot * MINE + i - MINE))


@gluon.jit
def boxes_of(x, row, end, BM: gl.constexpr):
    """How many boxes hold a tile's rows, of which there is at least one. What the others hold in shared memory, from
    tiles before or from nobody, reaches only rows that are not written."""
    return gl.cdiv(gl.minimum(end - row, BM), x.block_type.shape[0])


@gluon.jit
def expect(x, xs, full, slot, boxes, BN: gl.constexpr, PER_BYTE: gl.constexpr = 1):
    """Say how many bytes a slot waits for: those of BN channels of weights, PER_BYTE to a byte of the rows' type, and
    of so many boxes of rows."""
    ROWS: gl.constexpr = x.block_type.shape[0]
    LINE: gl.constexpr = xs.shape[2] * (x.dtype.primitive_bitwidth // 8)
    for i in gl.static_range(xs.shape[1] // ROWS):
        mbarrier.expect(full.index(slot), (BN // PER_BYTE + (i + 1) * ROWS) * LINE, pred=boxes == i + 1)


@gluon.jit
def load_rows(x, xs, full, slot, row, k, boxes):
    """Ask for a tile's rows by boxes, as many as there are: rows that do not exist take no bandwidth."""
    ROWS: gl.constexpr = x.block_type.shape[0]
    WIDTH: gl.constexpr = x.block_type.shape[1]
    for i in gl.static_range(xs.shape[1] // ROWS):
        for j in gl.static_range(xs.shape[2] // WIDTH):
            to = xs.index(slot).slice(i * ROWS, ROWS, dim=0).slice(j * WIDTH, WIDTH, dim=1)
            tma.async_copy_global_to_shared(x, [row + i * ROWS, k + j * WIDTH], full.index(slot), to, pred=boxes > i)
