"""From ids to sorted rows to tiles: what must hold for any routing, and that the kernel's schedule is torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from lowgmm.routing import TileSchedule, group_bounds, max_row_tiles, route, tile_schedule
from lowgmm.shapes import DtypeError, ShapeError
from test_cases_support import KERNELS, kernels_only

ROUTINGS = [
    pytest.param(7, 3, 5, id="some"),
    pytest.param(64, 4, 16, id="many tokens"),
    pytest.param(3, 2, 100, id="more experts than rows"),
    pytest.param(5, 6, 6, id="A=E"),
    pytest.param(9, 1, 4, id="top-1"),
    pytest.param(4, 3, 1, id="one expert"),
    pytest.param(1, 1, 1, id="one of everything"),
    pytest.param(0, 4, 8, id="no tokens"),
]


def random_ids(T: int, A: int, E: int, spread: int, dtype: torch.dtype) -> torch.Tensor:
    """Ids of [-spread, E + spread)."""
    g = torch.Generator().manual_seed(T * 1000 + A * 10 + spread)
    return torch.randint(-spread, E + spread, (T, A), generator=g, dtype=dtype)


@pytest.mark.parametrize(("T", "A", "E"), ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("spread", [0, 3])
def test_routing(T: int, A: int, E: int, dtype: torch.dtype, spread: int, device: torch.device) -> None:
    ids = random_ids(T, A, E, spread, dtype)
    r = route(ids.to(device), E)
    order, inverse, sizes, offsets = (t.cpu() for t in (r.order, r.inverse, r.sizes, r.offsets))
    flat = ids.flatten().long()
    local = (flat >= 0) & (flat < E)
    assert torch.equal(order.sort().values, torch.arange(T * A))
    assert torch.equal(inverse[order], torch.arange(T * A))
    assert torch.equal(sizes.long(), torch.bincount(flat[local], minlength=E))
    assert torch.equal(offsets.long(), torch.cat([torch.zeros(1, dtype=torch.long), sizes.long().cumsum(0)]))
    assert (sizes.dtype, offsets.dtype, r.top_k) == (torch.int32, torch.int32, A)
    # Sorted rows carry their expert's id, in the order of the slots; slots without an expert are at the end.
    for e in range(E):
        group = order[offsets[e] : offsets[e + 1]]
        assert (flat[group] == e).all()
        assert (group.diff() > 0).all()
    rest = order[offsets[E] :]
    assert not local[rest].any()
    assert (rest.diff() > 0).all()
    assert torch.equal(r.tokens.cpu(), order // A)


def test_every_id_outside() -> None:
    r = route(torch.tensor([[-1, 4], [2**31 - 1, -(2**31)]], dtype=torch.int32), 4)
    assert r.offsets.tolist() == [0] * 5
    assert r.order.tolist() == [0, 1, 2, 3]


def test_all_on_one_expert() -> None:
    r = route(torch.full((6, 2), 3), 5)
    assert r.sizes.tolist() == [0, 0, 0, 12, 0]
    assert r.order.tolist() == list(range(12))


def test_ids_of_any_layout() -> None:
    ids = random_ids(6, 4, 8, 0, torch.int64)
    assert torch.equal(route(ids.T.contiguous().T, 8).order, route(ids, 8).order)


@pytest.mark.parametrize(
    ("ids", "experts", "error", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), 3, ShapeError, r"'topk_ids' has shape \[4\], expected \[T, A\]"),
        (torch.zeros(4, 2, 1, dtype=torch.int64), 3, ShapeError, "expected"),
        (torch.zeros(4, 2), 3, DtypeError, "'topk_ids' is float32, expected int32, int64"),
        (torch.zeros(4, 2, dtype=torch.int16), 3, DtypeError, "'topk_ids' is int16"),
        (torch.zeros(4, 2, dtype=torch.int64), 0, ShapeError, "'num_experts' is 0, expected at least 1"),
    ],
)
def test_misuse(ids: torch.Tensor, experts: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        route(ids, experts)


# ---- the schedule ----------------------------------------------------------------------------------------------------


def as_rows(s: TileSchedule) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of every tile in use."""
    table = torch.stack([s.expert, s.row, s.end]).cpu()[:, : int(s.count)]
    return [(int(e), int(row), int(end)) for e, row, end in table.T]


def check_cover(s: TileSchedule, offsets: list[int], num_rows: int) -> None:
    """Each row is in exactly one tile, that of its expert, and no tile reaches past its group."""
    owner = [-1] * num_rows
    for expert, row, end in as_rows(s):
        assert 0 <= row < end <= num_rows
        for m in range(row, min(row + s.block_m, end)):
            assert owner[m] == -1, f"row {m} is in two tiles"
            owner[m] = expert
    groups = zip(offsets, [*offsets[1:], num_rows], strict=True)
    assert owner == [e for e, (a, b) in enumerate(groups) for _ in range(b - a)]


def group_sizes() -> Iterator[list[int]]:
    yield from ([0], [5], [0, 0, 0], [16, 32, 0, 1], [1] * 9, [0, 0, 40], [15, 17, 16, 31, 33])
    rng = random.Random(0)
    for _ in range(8):
        yield [rng.choice([0, 0, 1, 3, 16, 17, 40]) for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("behind", [0, 1, 20])
@pytest.mark.parametrize("block_m", [16, 64])
def test_tiles_cover_every_row_once(block_m: int, behind: int) -> None:
    for sizes in group_sizes():
        offsets = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        num_rows = offsets[-1] + behind
        s = tile_schedule(torch.tensor(offsets), num_rows, block_m)
        check_cover(s, offsets, num_rows)
        bound = max_row_tiles(num_rows, len(sizes), block_m)
        assert s.expert.numel() == s.row.numel() == s.end.numel() == bound
        tiles = sum(-(-size // block_m) for size in [*sizes, behind])
        assert int(s.count) == tiles <= bound
        assert (torch.stack([s.expert, s.row, s.end])[:, tiles:] == -1).all()


def test_the_cover_check_can_fail() -> None:
    s = tile_schedule(torch.tensor([0, 20, 30]), 30, 16)
    check_cover(s, [0, 20, 30], 30)
    for spoiled in (
        TileSchedule(s.expert, s.row, s.end, s.count - 1, 16),  # a tile lost
        TileSchedule(s.expert, s.row, s.end, s.count, 32),  # tiles that overlap
        TileSchedule(s.expert.flip(0), s.row, s.end, s.count, 16),  # the wrong expert
        TileSchedule(s.expert, s.row, torch.full_like(s.end, 30), s.count, 16),  # across a boundary
    ):
        with pytest.raises(AssertionError):
            check_cover(spoiled, [0, 20, 30], 30)


def test_the_bound_is_reached() -> None:
    """So it is not looser than it must be: every group, the rows behind them too, ends in a tile of one row."""
    s = tile_schedule(torch.tensor([0, 17, 34]), 51, 16)
    assert int(s.count) == s.expert.numel() == max_row_tiles(51, 2, 16) == 6


BAD = [
    [8, 0, 16, 0],  # sizes in place of offsets
    [0, 30, 10, 20],  # falling
    [0, 10, 500, 20],  # past the rows, and back
    [-5, 10, 2**31 - 1, -(2**31)],
    [40, 40, 40, 40],
    [3, 9, 9, 12],  # rows before the first expert
    [20, 15, 10, 0],
    [0, 40, 0, 40, 0, 40],  # more tiles than any true offsets of 40 rows need
]


@pytest.mark.parametrize("offsets", BAD, ids=str)
def test_bad_offsets_stay_inside_the_tensors(offsets: list[int]) -> None:
    experts = len(offsets) - 1
    for block_m in (16, 64):
        s = tile_schedule(torch.tensor(offsets), 40, block_m)
        assert int(s.count) <= s.expert.numel() == max_row_tiles(40, experts, block_m)
        for expert, row, end in as_rows(s):
            assert 0 <= expert <= experts
            assert 0 <= row < end <= 40
    starts, ends = group_bounds(torch.tensor(offsets), 40)
    assert starts.min() >= 0
    assert max(starts.max(), ends.max()) <= 40


@kernels_only
@pytest.mark.parametrize("block_m", [16, 128])
def test_kernels_number_tiles_alike(block_m: int) -> None:
    """Equal to the definition in every tile, for good offsets; for bad ones, every tile stays inside the tensors."""
    from schedule_kernel import list_tiles

    good = [([0, *torch.tensor(s).cumsum(0).tolist()], extra) for s in group_sizes() for extra in (0, 20)]
    cases = [(o, o[-1] + extra) for o, extra in good if o[-1] + extra > 0]
    cases = [*cases[:: 1 if KERNELS.device == "cuda" else 2], ([0, 0, 5000], 5000), ([0, 17, 17], 5000)]
    for offsets, num_rows in cases:
        given = torch.tensor(offsets, dtype=torch.int32)
        expected = tile_schedule(given, num_rows, block_m)
        count, tiles = list_tiles(given.to(KERNELS.device), num_rows, block_m, expected.expert.numel())
        assert count == int(expected.count), (offsets, num_rows)
        assert torch.equal(tiles[:, :3], torch.stack([expected.expert, expected.row, expected.end], 1)), (
            offsets,
            num_rows,
        )
    for offsets in BAD:
        given = torch.tensor(offsets, dtype=torch.int32).to(KERNELS.device)
        count, tiles = list_tiles(given, 40, block_m, 1000)
        assert count <= 1000
        for expert, row, end, _ in tiles[:count].tolist():
            assert 0 <= expert < len(offsets)
            assert 0 <= row < end <= 40


@kernels_only
def test_a_thousand_experts() -> None:
    """The largest table there is a model for, most of it empty."""
    from schedule_kernel import list_tiles

    sizes = torch.zeros(1024, dtype=torch.int32)
    sizes[[0, 511, 512, 1023]] = torch.tensor([1, 16, 17, 33], dtype=torch.int32)
    offsets = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
    expected = tile_schedule(offsets, 70, 16)
    count, tiles = list_tiles(offsets.to(KERNELS.device), 70, 16, expected.expert.numel())
    assert count == int(expected.count) == 1 + 1 + 2 + 3 + 1
    assert torch.equal(tiles[:, :3], torch.stack([expected.expert, expected.row, expected.end], 1))


@kernels_only
@pytest.mark.parametrize("tiles_n", [1, 3])
def test_bands_cover_every_tile_once(tiles_n: int) -> None:
    """Experts of fewer row tiles than a band, of one band exactly, and of more; in a band, row tiles change fastest."""
    from lowgmm.kernels.tiles import BAND
    from schedule_kernel import list_tiles

    band = BAND.value
    sizes = torch.tensor([17, band * 16, 0, (2 * band + 3) * 16 + 1], dtype=torch.int32)
    offsets = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
    rows = int(sizes.sum())
    expected = tile_schedule(offsets, rows, 16)
    bound = int(expected.count) * tiles_n
    count, tiles = list_tiles(offsets.to(KERNELS.device), rows, 16, bound, tiles_n)
    assert count == bound
    found = [tuple(t) for t in tiles.tolist()]
    assert len(set(found)) == bound
    assert {t[:3] for t in found} == set(as_rows(expected))
    assert {t[3] for t in found} == set(range(tiles_n))
    first_band = [t for t in found if t[0] == 3][: band * tiles_n]
    assert [t[3] for t in first_band] == [n for n in range(tiles_n) for _ in range(band)]
    assert len({t[1] for t in first_band}) == band
