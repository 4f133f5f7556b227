"""How results leave the accumulators on Hopper: scaled, turned in shared memory, written 16 bytes at a time."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def channel_values(values, expert, column, N, ACC: gl.constexpr, USED: gl.constexpr):
    """Those of 64 channels of an [E, N] tensor of scales or biases; zeros where there is none."""
    rn = column + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    value = gl.full([64], 0, gl.float32, gl.SliceLayout(1, ACC))
    if USED:
        value = gl.load(values + (expert.to(gl.int64) * N + rn), mask=rn < N, other=0.0).to(gl.float32)
    return value


@gluon.jit
def scaled(
    acc, scale_w, shift, sx, weight,
    ACC: gl.constexpr, SCALED_W: gl.constexpr, SCALED_X: gl.constexpr, WEIGHTED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """acc · scale_w · sx · weight + shift in float32, in the order of ``tiles.store`` and ``moe_tiles.scaled``."""
    value = acc
    if SCALED_W or SCALED_X or WEIGHTED or BIAS:
        value = value.to(gl.float32)
    if SCALED_W:
        value = value * gl.expand_dims(scale_w, 1)
    if SCALED_X:
        value = value * gl.expand_dims(sx.load(gl.SliceLayout(0, ACC)), 0)
    if WEIGHTED:
        value = value * gl.expand_dims(weight.load(gl.SliceLayout(0, ACC)), 0)
    if BIAS:
        value = value + gl.expand_dims(shift, 1)
    return value


@gluon.jit
def turn(value, out):
    """[64, BM] -> [BM, 64] in ``out``'s dtype, through ``out`` in shared memory.

    Channels lie side by side in memory, rows side by side in the accumulator.
    """
    out.permute((1, 0)).store(value.to(out.dtype))
    return out.load(gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))


@gluon.jit
def fresh(x):
    """The same integers, but what depends on them is not computed ahead of the loop over tiles: its products need the
    registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def write(value, y, row, end, column, N, stride_ym, BM: gl.constexpr):
    WIDE: gl.constexpr = value.type.layout
    rm = fresh(gl.arange(0, BM, layout=gl.SliceLayout(1, WIDE)))
    rn = gl.arange(0, 64, layout=gl.SliceLayout(0, WIDE))
    # 64 bits once, for the tile; within it 32.
    first = y + (row.to(gl.int64) * stride_ym + column)
    at = gl.expand_dims(rm * stride_ym, 1) + gl.expand_dims(rn, 0)
    gl.store(first + at, value, mask=gl.expand_dims(rm < end - row, 1) & gl.expand_dims(rn < N - column, 0))
