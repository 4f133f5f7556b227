"""The kernels' tile numbering, written out, so that tests can compare it with its definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowgmm.kernels.tiles import count_tiles, find_tile


@triton.jit
def list_tiles_kernel(
    offsets,  # (E+1,) int32
    table,  # (GROUPS,) int32
    tiles,  # (bound, 4) int32: expert, row, end, column tile
    count,  # (1,) int32
    M,
    E,
    bound,
    tiles_n,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
):
    total = count_tiles(offsets, table, M, E, BM, GROUPS) * tiles_n
    tl.store(count, total)
    for tile in tl.range(tl.program_id(0), tl.minimum(total, bound), tl.num_programs(0)):
        expert, row, end, n_tile = find_tile(offsets, table, tile, tiles_n, M, E, BM, GROUPS)
        tl.store(tiles + tile * 4, expert)
        tl.store(tiles + tile * 4 + 1, row)
        tl.store(tiles + tile * 4 + 2, end)
        tl.store(tiles + tile * 4 + 3, n_tile)


def list_tiles(offsets: Tensor, num_rows: int, block_m: int, bound: int, tiles_n: int = 1) -> tuple[int, Tensor]:
    """How many tiles the kernels find, and the first ``bound`` of them as [bound, 4] (-1 where there is none)."""
    experts = offsets.numel() - 1
    groups = triton.next_power_of_2(experts + 1)
    table = torch.full((groups,), -7, dtype=torch.int32, device=offsets.device)
    tiles = torch.full((bound, 4), -1, dtype=torch.int32, device=offsets.device)
    count = torch.zeros(1, dtype=torch.int32, device=offsets.device)
    list_tiles_kernel[(3,)](offsets, table, tiles, count, num_rows, experts, bound, tiles_n, BM=block_m, GROUPS=groups)
    return int(count), tiles.cpu()
