"""From logits to expert ids, from those to sorted rows, and from sorted rows to tiles: the definitions in torch.

Nothing is read back to the host. ``kernels/route.py`` computes the same on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowgmm.shapes import ShapeError, UnsupportedError, check_device, check_dtype

SCORINGS = ("softmax", "sigmoid")
LOWEST = -3.0e38
"""Stands for a choice that is NaN or excluded: above nothing but what is already taken."""


@dataclass(frozen=True)
class Router:
    """How experts are chosen from logits, and what weights they get."""

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0


def select_experts(logits: Tensor, router: Router, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition of the router: ids [T, A] int32 and weights [T, A] float32 of ``logits [T, E]``.

        score  = softmax(logits) or sigmoid(logits), in float32
        choice = score + bias; with groups, only in the topk_groups groups whose two best choices sum highest
        ids    = the A highest choices, in falling order; of equal ones the lower id first
        weight = score[ids], divided by their sum if renormalize, times scale

    >>> ids, weights = select_experts(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), Router(2))
    >>> ids.tolist(), weights.tolist()
    ([[1, 3]], [[0.5, 0.5]])
    """
    logits = logits.float()
    scores = logits.softmax(-1) if router.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias.float()
    choice = choice.nan_to_num(nan=LOWEST).clamp(min=LOWEST)
    if router.num_groups > 1:
        groups = choice.unflatten(-1, (router.num_groups, -1))
        best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
        kept = best.sort(stable=True, dim=-1, descending=True).indices[:, : router.topk_groups]
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        choice = groups.masked_fill(~allowed.unsqueeze(-1), LOWEST).flatten(1)
    ids = choice.sort(stable=True, dim=-1, descending=True).indices[:, : router.top_k]
    weights = scores.gather(1, ids)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * router.scale


@dataclass(frozen=True)
class Routing:
    """Where every (token, slot) pair went. Slot ``r = t·A + a`` is token ``t``'s ``a``-th expert.

    A slot whose id is outside ``[0, E)`` (−1, or another rank's expert) is sorted behind all experts: it belongs to no
    expert and contributes nothing. Several slots of one token may name the same expert; each counts.
    """

    order: Tensor
    """[R] int64: sorted position -> slot. Stable: within an expert, slots keep their order."""
    inverse: Tensor
    """[R] int64: slot -> sorted position; ``inverse[order] == arange(R)``."""
    sizes: Tensor
    """[E] int32: rows of each expert."""
    offsets: Tensor
    """[E+1] int32: expert e owns sorted rows ``[offsets[e], offsets[e+1])``; ``offsets[E]`` rows have an expert."""
    top_k: int
    """A, experts per token."""
    topk_ids: Tensor | None = None
    """[T, A] int32, if the experts were chosen from logits; what ``moe_ffn`` wants."""
    topk_weights: Tensor | None = None
    """[T, A] float32, likewise."""

    @property
    def tokens(self) -> Tensor:
        """[R] int64: sorted position -> token."""
        return self.order // self.top_k


def route(topk_ids: Tensor, num_experts: int) -> Routing:
    """Sort (token, expert) pairs by expert; ``lowgmm.route`` of ids.

    Args:
        topk_ids: [T, A] int32 or int64 expert ids. Ids outside ``[0, num_experts)`` contribute nothing.
        num_experts: E.

    Returns:
        A :class:`Routing`. Nothing is read back to the host.

    Raises:
        ShapeError: ``topk_ids`` is not 2-D or ``num_experts`` < 1. DtypeError: ids are not integers.

    >>> import torch
    >>> r = route(torch.tensor([[2, 0], [0, 2], [2, -1]]), num_experts=3)
    >>> r.sizes.tolist(), r.offsets.tolist(), r.tokens.tolist()
    ([2, 0, 3], [0, 2, 2, 5], [0, 1, 0, 1, 2, 2])
    """
    check_routing(topk_ids, num_experts)
    flat = topk_ids.reshape(-1)
    expert = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    sorted_expert, order = torch.sort(expert, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    # The first sorted position that is not below e; searchsorted needs no histogram and no synchronisation.
    bounds = torch.arange(num_experts + 1, device=flat.device, dtype=sorted_expert.dtype)
    offsets = torch.searchsorted(sorted_expert, bounds, out_int32=True)
    return Routing(order, inverse, offsets.diff(), offsets, topk_ids.shape[1])


def check_routing(topk_ids: Tensor, num_experts: int) -> None:
    check_dtype("route", "topk_ids", topk_ids, (torch.int32, torch.int64))
    if topk_ids.dim() != 2:
        raise ShapeError(f"route: argument 'topk_ids' has shape {list(topk_ids.shape)}, expected [T, A].")
    if num_experts < 1:
        raise ShapeError(f"route: argument 'num_experts' is {num_experts}, expected at least 1.")


def check_router(logits: Tensor, router: Router, bias: Tensor | None) -> None:
    """Everything about a select_experts call."""
    floats = (torch.bfloat16, torch.float16, torch.float32)
    check_dtype("route", "logits", logits, floats)
    check_dtype("route", "bias", bias, floats)
    if logits.dim() != 2 or not logits.shape[1]:
        raise ShapeError(f"route: argument 'logits' has shape {list(logits.shape)}, expected [T, E].")
    num_experts = logits.shape[1]
    if bias is not None and tuple(bias.shape) != (num_experts,):
        raise ShapeError(f"route: argument 'bias' has shape {list(bias.shape)}, expected [E={num_experts}].")
    check_device("route", logits=logits, bias=bias)
    if router.scoring not in SCORINGS:
        raise UnsupportedError(f"route: scoring {router.scoring!r} is not one of {', '.join(SCORINGS)}.")
    if router.num_groups < 1 or num_experts % router.num_groups or not 0 < router.topk_groups <= router.num_groups:
        raise ShapeError(
            f"route: num_groups={router.num_groups} must divide E={num_experts}, and topk_groups={router.topk_groups} "
            f"must be from 1 to num_groups."
        )
    eligible = num_experts // router.num_groups * router.topk_groups
    if not 0 < router.top_k <= eligible:
        raise ShapeError(f"route: top_k is {router.top_k}, expected 1 to {eligible}, the experts that can be chosen.")


def max_row_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Host-known bound on the row tiles of any schedule: full tiles, plus one partial tile per non-empty group.

    The rows behind the last expert count as one more group (they are written as zeros).
    """
    return num_rows // block_m + min(num_experts + 1, num_rows)


@dataclass(frozen=True)
class TileSchedule:
    """Row tiles of at most ``block_m`` rows, none of which crosses an expert's boundary.

    Filled from the front and padded with -1 to :func:`max_row_tiles`, so launches need no host synchronisation.
    """

    expert: Tensor
    """[tiles] int32: the tile's expert; E marks rows behind the last expert (to be zeroed); -1 is padding."""
    row: Tensor
    """[tiles] int32: the tile's first row; -1 is padding."""
    end: Tensor
    """[tiles] int32: one past the last row of the tile's group; -1 is padding."""
    count: Tensor
    """[1] int32: tiles that are not padding."""
    block_m: int


def tile_schedule(offsets: Tensor, num_rows: int, block_m: int) -> TileSchedule:
    """Cut every expert's rows into tiles: ``ceil(size / block_m)`` each, in expert order.

    The definition of a schedule in torch; the kernels number their tiles alike (``kernels/tiles.py``), without a table
    in memory.
    Offsets are clamped to ``[0, num_rows]``, so that bad device-side offsets can give wrong rows but never an access
    outside the tensors.

    >>> import torch
    >>> s = tile_schedule(torch.tensor([0, 5, 5, 8]), num_rows=9, block_m=4)
    >>> s.expert.tolist(), s.row.tolist(), s.end.tolist(), s.count.tolist()
    ([0, 0, 2, 3, -1, -1], [0, 4, 5, 8, -1, -1], [5, 5, 8, 9, -1, -1], [4])
    """
    starts, ends = group_bounds(offsets, num_rows)
    tiles = ((ends - starts).clamp(min=0) + block_m - 1) // block_m
    last = tiles.cumsum(0)
    bound = max_row_tiles(num_rows, offsets.numel() - 1, block_m)
    index = torch.arange(bound, device=offsets.device)
    group = torch.searchsorted(last, index, right=True)
    valid = group < tiles.numel()
    safe = group.clamp(max=tiles.numel() - 1)
    row = starts[safe] + (index - (last - tiles)[safe]) * block_m
    expert, row, end = (torch.where(valid, v, -1).int() for v in (safe, row, ends[safe]))
    return TileSchedule(expert, row, end, last[-1:].clamp(max=bound).int(), block_m)


def group_bounds(offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Start and end row of the E experts and of the rows behind them, each [E+1] int64 and clamped to [0, num_rows]."""
    clamped = offsets.long().clamp(0, num_rows)
    return clamped, torch.cat([clamped[1:], clamped.new_full((1,), num_rows)])
