"""The products of ``hopper.py`` with 4-bit weights, which a warpgroup unpacks in its registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from lowgmm.kernels.nibbles import as_float, halves, in_order


@gluon.jit
def group_scales(scales, k, K, N, rn, GROUP: gl.constexpr, COUNT: gl.constexpr):
    """Those of COUNT groups from ``k`` on, for the channels ``rn``; zeros behind the last group."""
    found = ()
    for i in gl.static_range(COUNT):
        at = k + i * GROUP
        scale = gl.load(scales + at // GROUP * N + rn, mask=(rn < N) & (at < K), other=0.0)
        found = found + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def ask(x, w, acc, COLUMNS: gl.constexpr, FIRST: gl.constexpr, GROUP: gl.constexpr, ACC: gl.constexpr):
    """Ask for the products of a slot's columns FIRST … FIRST + COLUMNS: added to ``acc``, or with GROUP a sum for each
    group by itself. Returned as a tuple."""
    packed = w.slice(FIRST // 2, COLUMNS // 2, dim=1).load(gl.DotOperandLayout(0, ACC, 4))
    low, high = halves(packed, True)
    both = in_order(low, high)
    if GROUP == 32:
        # Two groups came in one load: 16 bytes are less than the matrix instruction's operand is made of.
        both = gl.split(both.reshape([64, 2, COLUMNS // 2]).permute((0, 2, 1)))
    else:
        both = (both,)
    asked = ()
    for i in gl.static_range(len(both)):
        a = gl.convert_layout(both[i], gl.DotOperandLayout(0, ACC, 4), assert_trivial=True)
        b = x.slice(FIRST + i * a.shape[1], a.shape[1], dim=1).permute((1, 0))
        sums = warpgroup_mma(a, b, acc, use_acc=not GROUP, is_async=True)
        asked = asked + (sums,)  # type: ignore[assignment]  # noqa: RUF005
    return asked


@gluon.jit
def multiply_nibbles(
    xs, ws, full, empty, scales_w, expert, column, step, N, K,
    BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, ACC: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 channels times the tile's rows, over all of K: [64, BM] exact INT32 sums; with GROUP float32,
    groups' sums times their scales (E, k, N) added in K order.

    While the tensor cores multiply some columns, the weights of the next ones are unpacked.
    """
    COLUMNS: gl.constexpr = max(GROUP, 64) if GROUP else 128
    EACH: gl.constexpr = COLUMNS // GROUP if GROUP else 1  # groups that are asked for at a time
    LOOK: gl.constexpr = BM <= 64  # there are registers for the next groups' sums beside these
    none = gl.full([64, BM], 0, gl.int32, ACC)
    acc = gl.full([64, BM], 0, gl.float32 if GROUP else gl.int32, ACC)
    if GROUP:
        rn = column + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
        of_expert = scales_w + expert.to(gl.int64) * gl.cdiv(K, GROUP) * N
        ahead = group_scales(of_expert, 0, K, N, rn, GROUP, BK // GROUP)
    for k in range(0, K, BK):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        x, w = xs.index(slot), ws.index(slot)
        if GROUP:
            scales = ahead
            ahead = group_scales(of_expert, k + BK, K, N, rn, GROUP, BK // GROUP)
            asked = ask(x, w, none, COLUMNS, 0, GROUP, ACC)
            for i in gl.static_range(BK // COLUMNS):
                if LOOK and (i + 1) * COLUMNS < BK:
                    after = ask(x, w, none, COLUMNS, (i + 1) * COLUMNS, GROUP, ACC)
                sums = warpgroup_mma_wait(EACH if LOOK and (i + 1) * COLUMNS < BK else 0, deps=asked)
                for j in gl.static_range(EACH):
                    of_group = sums[j] if EACH > 1 else sums
                    acc += as_float(of_group) * gl.expand_dims(scales[i * EACH + j], 1)
                if (i + 1) * COLUMNS < BK:
                    asked = after if LOOK else ask(x, w, none, COLUMNS, (i + 1) * COLUMNS, GROUP, ACC)
        else:
            for i in gl.static_range(BK // COLUMNS):
                (acc,) = ask(x, w, acc, COLUMNS, i * COLUMNS, GROUP, ACC)
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot))
        step += 1
    if not GROUP:
        acc = acc >> 4
    return acc, step
