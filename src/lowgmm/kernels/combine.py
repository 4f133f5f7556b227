"""The end of an expert layer: each token's result is the weighted sum of its slots."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from lowgmm.layer import LayerSpec
from lowgmm.replay import launch


@triton.jit
def slots_of(
    inverse, ids, topk_weights, t, E,
    A: tl.constexpr, SORTED: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
):  # fmt: skip
    """Of each of a token's slots: its row of y, what that is multiplied by, and whether the slot has an expert.

    The rows of y are slots; or SORTED, and ``inverse`` says where a slot's row is.
    """
    rows, shares, locals = (), (), ()
    for a in tl.static_range(A):
        e = tl.load(ids + t * A + a)
        local = (e >= 0) & (e < E)
        row = t * A + a
        if SORTED:
            row = tl.load(inverse + row, mask=local, other=0).to(tl.int64)
        share = 1.0
        if not WEIGHT_ON_INPUT:
            share = tl.where(local, tl.load(topk_weights + t * A + a).to(tl.float32), 0.0)
        rows, shares, locals = rows + (row,), shares + (share,), locals + (local,)  # type: ignore[assignment]  # noqa: RUF005
    return rows, shares, locals


@triton.jit
def sum_slots(y, slots, n, inside, stride, A: tl.constexpr):
    """Σ_a topk_weights[t, a] · y[t, a, n] in float32, in slot order, over the slots that have an expert."""
    rows, shares, locals = slots
    total = 0.0
    for a in tl.static_range(A):
        v = tl.load(y + rows[a] * stride + n, mask=inside & locals[a], other=0.0).to(tl.float32)
        total += v * shares[a]
    return total


@triton.jit(do_not_specialize_on_alignment=["inverse"])
def combine_kernel(
    y,  # (R, H) by slot, or SORTED; row stride stride_y
    inverse,  # (R,) int32: slot -> row of y
    ids,  # (T, A)
    topk_weights,  # (T, A)
    out,  # (T, H)
    E,
    H,
    stride_y,
    A: tl.constexpr,
    SORTED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T · cdiv(H, BLOCK),): the weighted sum of each token's slots."""
    blocks = tl.cdiv(H, BLOCK)
    t = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    slots = slots_of(inverse, ids, topk_weights, t, E, A, SORTED, WEIGHT_ON_INPUT)
    if PDL:
        gdc_wait()  # only y may still be in the making
    total = sum_slots(y, slots, n, n < H, stride_y, A)
    tl.store(out + t * H + n, total.to(out.dtype.element_ty), mask=n < H)


def combine(
    y: Tensor,
    inverse: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    num_experts: int,
    spec: LayerSpec,
    pdl: bool,
) -> None:
    """``out[t] = Σ_a weights[t, a] · y[slot t·A + a]``; with ``inverse`` the rows of ``y`` are sorted by expert."""
    num_tokens, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    after: dict[str, Any] = {"launch_pdl": True} if pdl else {}  # no other backend knows the option
    launch(
        combine_kernel,
        num_tokens * triton.cdiv(width, block),
        *(y, inverse, ids, weights, out, num_experts, width, y.stride(0)),
        *(ids.shape[1], inverse is not None, spec.weight_on_input, pdl, block),
        num_warps=4,
        enable_fp_fusion=False,
        **after,
    )
