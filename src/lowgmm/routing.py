"""From expert ids to sorted rows, and from sorted rows to tiles. Torch only, no host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowgmm.shapes import ShapeError, check_dtype


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

    @property
    def tokens(self) -> Tensor:
        """[R] int64: sorted position -> token."""
        return self.order // self.top_k


def route(topk_ids: Tensor, num_experts: int) -> Routing:
    """Sort (token, expert) pairs by expert.

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
    check_dtype("route", "topk_ids", topk_ids, (torch.int32, torch.int64))
    if topk_ids.dim() != 2:
        raise ShapeError(f"route: argument 'topk_ids' has shape {list(topk_ids.shape)}, expected [T, A].")
    if num_experts < 1:
        raise ShapeError(f"route: argument 'num_experts' is {num_experts}, expected at least 1.")
    flat = topk_ids.reshape(-1)
    expert = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    sorted_expert, order = torch.sort(expert, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    # The first sorted position that is not below e; searchsorted needs no histogram and no synchronisation.
    bounds = torch.arange(num_experts + 1, device=flat.device, dtype=sorted_expert.dtype)
    offsets = torch.searchsorted(sorted_expert, bounds, out_int32=True)
    return Routing(order, inverse, offsets.diff(), offsets, topk_ids.shape[1])


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
