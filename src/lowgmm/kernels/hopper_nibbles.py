"""The products of ``hopper.py`` with 4-bit weights, which a warpgroup unpacks in its registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from lowgmm.kernels.nibbles import as_float, halves, in_order


@gluon.jit
def unpacked(packed, PIECES: gl.constexpr, ACC: gl.constexpr):
    """Bytes [64, K/2] -> PIECES int8 operands [64, K/PIECES] in K order, 16 times too large. Nothing leaves its
    thread."""
    K: gl.constexpr = 2 * packed.shape[1]
    low, high = halves(packed, True)
    found = (in_order(low, high),)
    for level in gl.static_range(5):
        if (1 << level) < PIECES:  # halve each
            finer = ()
            for i in gl.static_range(1 << level):
                first, second = gl.split(found[i].reshape([64, 2, K >> (level + 1)]).permute((0, 2, 1)))
                finer = finer + (first, second)  # noqa: RUF005
            found = finer
    operands = ()
    for i in gl.static_range(PIECES):
        operands = operands + (gl.convert_layout(found[i], gl.DotOperandLayout(0, ACC, 4), assert_trivial=True),)  # noqa: RUF005
    return operands


@gluon.jit
def group_scales(scales, k, K, N, rn, GROUP: gl.constexpr, COUNT: gl.constexpr):
    """Those of COUNT groups from ``k`` on, for the channels ``rn``; zeros behind the last group."""
    found = ()
    for i in gl.static_range(COUNT):
        at = k + i * GROUP
        found = found + (gl.load(scales + at // GROUP * N + rn, mask=(rn < N) & (at < K), other=0.0),)  # noqa: RUF005
    return found


@gluon.jit
def multiply_nibbles(
    xs, ws, full, empty, scales_w, expert, column, step, N, K,
    BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, ACC: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 channels times the tile's rows, over all of K: [64, BM] exact INT32 sums; with GROUP float32,
    groups' sums times their scales (E, k, N) added in K order."""
    PIECES: gl.constexpr = BK // GROUP if GROUP else 1
    # As many groups' sums at a time as there are registers for.
    ASKED: gl.constexpr = min(PIECES, max(1, 128 // BM))
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    none = gl.full([64, BM], 0, gl.int32, ACC)
    acc = gl.full([64, BM], 0, gl.float32 if GROUP else gl.int32, ACC)
    if GROUP:
        rn = column + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
        of_expert = scales_w + expert.to(gl.int64) * gl.cdiv(K, GROUP) * N
        ahead = group_scales(of_expert, 0, K, N, rn, GROUP, PIECES)
    for k in range(0, K, BK):
        slot = step % STAGES
        if GROUP:
            scales = ahead
            ahead = group_scales(of_expert, k + BK, K, N, rn, GROUP, PIECES)
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        operands = unpacked(ws.index(slot).load(A), PIECES, ACC)
        if GROUP:
            for i in gl.static_range(PIECES // ASKED):
                asked = ()
                for j in gl.static_range(ASKED):
                    b = xs.index(slot).slice((i * ASKED + j) * GROUP, GROUP, dim=1).permute((1, 0))
                    sums = warpgroup_mma(operands[i * ASKED + j], b, none, use_acc=False, is_async=True)
                    asked = asked + (sums,)  # noqa: RUF005
                asked = warpgroup_mma_wait(0, deps=asked)
                for j in gl.static_range(ASKED):
                    sums = asked[j] if ASKED > 1 else asked
                    acc += as_float(sums) * gl.expand_dims(scales[i * ASKED + j], 1)
        else:
            acc = warpgroup_mma(operands[0], xs.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot))
        step += 1
    if not GROUP:
        acc = acc >> 4
    return acc, step
