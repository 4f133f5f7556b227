"""The tile schedule on the device, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowgmm.routing import TileSchedule, max_row_tiles


@triton.jit(do_not_specialize=["M", "max_tiles"])  # a token count must never compile anything
def tile_schedule_kernel(
    offsets,  # (E+1,) int32: start row of each expert, and the end of the last
    tile_expert,  # (max_tiles,) int32
    tile_row,  # (max_tiles,) int32
    tile_end,  # (max_tiles,) int32
    state,  # (2,) int32: tiles in use; the queue's next ticket
    M,
    E,
    max_tiles,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two > E
    CHUNK: tl.constexpr,
):
    """Grid (E+1,): program g writes the tiles of group g; group E is the rows behind the last expert, and writes the
    padding."""
    g = tl.program_id(0)
    i = tl.arange(0, GROUPS)
    start = tl.minimum(tl.maximum(tl.load(offsets + i, mask=i <= E, other=0), 0), M)
    end = tl.minimum(tl.maximum(tl.load(offsets + i + 1, mask=i < E, other=M), 0), M)
    tiles = tl.where(i <= E, tl.cdiv(tl.maximum(end - start, 0), BM), 0)
    first = tl.sum(tl.where(i < g, tiles, 0))
    count = tl.sum(tl.where(i == g, tiles, 0))
    row = tl.sum(tl.where(i == g, start, 0))
    last_row = tl.sum(tl.where(i == g, end, 0))
    for j in tl.range(0, count, CHUNK):
        t = j + tl.arange(0, CHUNK)
        live = (t < count) & (first + t < max_tiles)
        tl.store(tile_expert + first + t, g + tl.zeros_like(t), mask=live)
        tl.store(tile_row + first + t, row + t * BM, mask=live)
        tl.store(tile_end + first + t, last_row + tl.zeros_like(t), mask=live)
    if g == E:
        total = tl.minimum(first + count, max_tiles)
        tl.store(state, total)
        tl.store(state + 1, 0)
        for j in tl.range(total, max_tiles, CHUNK):
            t = j + tl.arange(0, CHUNK)
            padding = tl.zeros_like(t) - 1
            tl.store(tile_expert + t, padding, mask=t < max_tiles)
            tl.store(tile_row + t, padding, mask=t < max_tiles)
            tl.store(tile_end + t, padding, mask=t < max_tiles)


def tile_schedule(offsets: Tensor, num_rows: int, block_m: int) -> tuple[TileSchedule, Tensor]:
    """The schedule of :func:`lowgmm.routing.tile_schedule`, and the launch state it shares with the queue: (count,
    ticket)."""
    num_experts = offsets.numel() - 1
    bound = max_row_tiles(num_rows, num_experts, block_m)
    table = torch.empty((3, bound), dtype=torch.int32, device=offsets.device)
    state = torch.empty(2, dtype=torch.int32, device=offsets.device)
    expert, row, end = table.unbind(0)
    groups = triton.next_power_of_2(num_experts + 1)
    tile_schedule_kernel[(num_experts + 1,)](
        offsets, expert, row, end, state, num_rows, num_experts, bound, BM=block_m, GROUPS=groups, CHUNK=128
    )
    return TileSchedule(expert, row, end, state[:1], block_m), state
