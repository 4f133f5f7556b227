"""Of the kernels in Gluon what is arithmetic only, run as plain Python; and what one token's launch is handed."""

from __future__ import annotations

import importlib.util
import itertools
from itertools import pairwise
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowgmm.gpu import H200
from lowgmm.layer import LayerSpec, Weights
from lowgmm.plan import LayerConfig, LayerProblem, supports

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lowgmm.kernels import combine, hopper, hopper_direct, hopper_read, run_hopper
from lowgmm.kernels.tiles import BAND


class Lanes(torch.Tensor):
    """What a warp holds."""

    type = SimpleNamespace(layout=None)


class Pointer:
    """An address in a tensor, or one for each lane."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at, self.dtype = memory, at, SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.memory, self.at + by)


def load(pointer: Pointer, mask: Any = True, other: float = 0) -> Tensor:
    at, mask = torch.as_tensor(pointer.at), torch.as_tensor(mask)
    assert bool((~mask | (at < len(pointer.memory))).all()), "outside"
    return torch.where(mask, pointer.memory[at.clamp(max=len(pointer.memory) - 1)], other)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, value, mask = torch.broadcast_tensors(*(torch.as_tensor(v) for v in (pointer.at, value, mask)))
    pointer.memory[at[mask]] = value[mask].to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, by: int, sem: str) -> Tensor:
    before = pointer.memory[pointer.at].clone()
    pointer.memory[pointer.at] += by
    return before


GL = SimpleNamespace(
    static_range=range,
    minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    cdiv=lambda a, b: -(-a // b),
    arange=lambda start, end, layout: torch.arange(start, end).as_subclass(Lanes),
    full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    BlockedLayout=lambda *args: None,
    num_warps=lambda: 1,
    where=torch.where,
    sum=lambda values, axis: values.sum(axis),
    max=lambda values, axis: values.amax(axis),
    associative_scan=lambda values, axis, combine: values.cumsum(axis),
    load=load,
    store=store,
    atomic_add=atomic_add,
    int32=torch.int32,
    float32=torch.float32,
)


def plain(function: Any, **names: Any) -> Any:
    """The function as Python runs it, with stand-ins for what it uses."""
    return FunctionType(function.fn.__code__, {"gl": GL, "tl": GL, "range": range, "LANES": 32, "add": None, **names})


class Part:
    """Some rows and columns of a slot of the ring."""

    def __init__(self, rows: range, columns: range) -> None:
        self.at = (rows, columns)

    def slice(self, start: int, length: int, dim: int) -> Part:
        parts = list(self.at)
        assert start + length <= len(parts[dim])
        parts[dim] = parts[dim][start : start + length]
        return Part(*parts)


def tiles() -> list[tuple[int, int, int, int]]:
    """Every tile that some configuration may have: rows, channels, columns, bytes of an element."""
    found = []
    for dtype in (torch.int8, torch.bfloat16):
        size = dtype.itemsize
        for bm in (16, 32, 64, 128):
            for bn in (64, 128, 256):
                for bk in (128 // size, 256 // size):
                    config = LayerConfig(
                        "queue", bm, bn // 2, bk, bn, bk, warp_specialize=True, num_stages=2, programs_per_sm=1
                    )
                    if supports(LayerProblem(9, 2, 4, 512, 512, dtype), config, H200) is None:
                        found.append((bm, bn, bk, size))
    return found


def test_every_slot_waits_for_what_is_loaded_into_it() -> None:
    """With any number of rows. A byte more would be waited for for ever, a byte less be read before it is there."""
    found = tiles()
    assert {bn for _, bn, _, _ in found} == {64, 128, 256}
    assert {bm for bm, _, _, _ in found} == {16, 32, 64, 128}
    for (bm, bn, bk, size), per_byte in itertools.product(found, (1, 2)):  # 2: of 4-bit weights
        high, wide = hopper_read.box_of(bm, bn, size)
        assert wide * size == 128, "a row of a box is one line of the swizzle"
        x = SimpleNamespace(
            block_type=SimpleNamespace(shape=[high, wide]), dtype=SimpleNamespace(primitive_bitwidth=8 * size)
        )
        xs = SimpleNamespace(shape=[3, bm, bk], index=lambda slot, bm=bm, bk=bk: Part(range(bm), range(bk)))
        for rows in range(1, bm + 1):
            row, k, weights = 1000, 4 * bk, bn * bk * size // per_byte
            end = row + rows + (77 if rows == bm else 0)  # the expert may have more tiles behind this one
            boxes = plain(hopper_read.boxes_of)(x, row, end, bm)
            expected: list[int] = []
            loaded: list[tuple[Part, list[int]]] = []
            slot = SimpleNamespace(index=lambda slot: slot)
            barrier = SimpleNamespace(expect=lambda slot, n, pred, to=expected: to.append(n) if pred else None)
            load = SimpleNamespace(
                async_copy_global_to_shared=lambda x, at, full, part, pred, to=loaded: (
                    to.append((part, at)) if pred else None
                )
            )
            plain(hopper_read.expect, mbarrier=barrier)(x, xs, slot, 1, boxes, bn, per_byte)
            plain(hopper_read.load_rows, tma=load)(x, xs, slot, 1, row, k, boxes)
            assert expected == [weights + len(loaded) * high * wide * size]
            cells = set()
            for part, (from_row, from_column) in loaded:
                (part_rows, part_columns) = part.at
                assert (len(part_rows), len(part_columns)) == (high, wide)
                assert (from_row, from_column) == (row + part_rows[0], k + part_columns[0])
                assert part_rows[0] < rows, "none of its rows exists"
                cells |= {(r, c) for r in part_rows for c in part_columns[:: wide - 1]}
            assert {(r, c) for r in range(rows) for c in (0, bk - 1)} <= cells
            assert len(loaded) == boxes * bk // wide


@pytest.mark.parametrize("tiles_n", [1, 3])
def test_both_kernels_number_tiles_alike(tiles_n: int, device: torch.device) -> None:
    """Across more experts than a warp looks at together, none of them with rows, and bands."""
    from schedule_kernel import list_tiles

    band, bm = BAND.value, 16
    sizes = [5, band * bm, 0, (2 * band + 3) * bm + 1, *[0] * 40, 1, *[0, 17] * 20]
    starts = torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)
    E, M = len(sizes), int(starts[-1])
    count, listed = list_tiles(starts.to(device), M, bm, 10_000, tiles_n)
    bounds, among = plain(hopper.bounds), plain(hopper.among)
    counted = plain(hopper.count, bounds=bounds)
    seek, place = plain(hopper.seek, count=counted, among=among), plain(hopper.place, bounds=bounds, BAND=band)
    offsets, found = Pointer(starts), []
    base, first, sums = 0, 0, counted(Pointer(starts), 0, M, E, tiles_n, bm)
    for tile in range(count + 1):
        base, first, sums, total, expert, local = seek(offsets, tile, base, first, sums, M, E, tiles_n, bm)
        if expert >= E:
            assert tile == total == count
            break
        _, row, end, column = place(offsets, expert, local, M, E, tiles_n, bm)
        found.append([int(v) for v in (expert, row, end, column)])
    assert found == listed[:count].tolist()


IDS = ([3], [-1], [2, 2, 2], [-1, 4, 9, 0, -7], [2**32 + 1, 1, 2**31], list(range(-16, 16)), [4] * 32)


@pytest.mark.parametrize("ids", IDS, ids=str)
def test_tiles_of_one_token(ids: list[int]) -> None:
    E, tiles_n, R = 5, 3, len(ids)
    expert_of, sums = plain(hopper_direct.tiles_of)(Pointer(torch.tensor(ids)), R, E, tiles_n)
    among, found, tile = plain(hopper.among), [], 0
    while int((group_local := among(sums, tile))[0]) < R:
        found.append((int(group_local[0]), int(expert_of[group_local[0]]), int(group_local[1])))
        tile += 1
    assert found == [(i, e, n) for i, e in enumerate(ids) if 0 <= e < E for n in range(tiles_n)]
    assert tile == int(sums.max())


@pytest.mark.parametrize("ids", [ids for ids in IDS if any(0 <= e < 5 for e in ids)], ids=str)
def test_the_last_slot_of_some_columns_sums_them(ids: list[int]) -> None:
    """Whatever the order in which they end; twice, as counters were left."""
    E, H, I, A = 5, 100, 16, len(ids)
    y, share = torch.randn(A, H + I), torch.rand(A)
    inside = [0 <= e < E for e in ids]
    y[~torch.tensor(inside)], share[~torch.tensor(inside)] = float("nan"), float("nan")
    want = torch.zeros(H)
    for a in range(A):
        want += y[a, :H] * share[a] if inside[a] else 0
    slots = plain(combine.slots_of)(None, Pointer(torch.tensor(ids)), Pointer(share), 0, E, A, False, False)
    arrived = torch.zeros(2, dtype=torch.int32)
    finish = plain(hopper_direct.finish, barrier=lambda: None, sum_slots=plain(combine.sum_slots))
    for _ in range(2):
        result, written = torch.full((H,), 7.0), torch.full_like(y, float("nan"))
        parts = [(a, column) for a in range(A) if inside[a] for column in (0, 64)]
        for i in torch.randperm(len(parts)).tolist():
            a, column = parts[i]
            written[a, column : min(column + 64, H)] = y[a, column : min(column + 64, H)]
            finish(Pointer(written.flatten()), Pointer(result), Pointer(arrived), slots, column, H, H + I, A)
        assert torch.equal(result, want)
        assert not arrived.any()


@pytest.mark.parametrize("programs", [1, 3, 132])
def test_without_an_expert_all_is_zero(programs: int) -> None:
    result = torch.full((1040,), float("nan"))
    for program in range(programs):
        GL.program_id, GL.num_programs = lambda axis, program=program: program, lambda axis: programs
        plain(hopper_direct.write_zeros)(Pointer(result), 1000)
    assert not result[:1000].any()
    assert result[1000:].isnan().all()


@pytest.mark.parametrize("down_n", [64, 128])
@pytest.mark.parametrize(("A", "H", "I"), [(1, 208, 400), (6, 400, 208), (32, 1024, 64)])
def test_one_token_is_one_launch(A: int, H: int, I: int, down_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter for every 64 columns that a warpgroup may write, all zero; outputs and h beside each other."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(run_hopper, "launch", lambda *arguments, **options: seen.append((arguments, options)))
    text = f"direct-16-{down_n // 2}x128-{down_n}x128-swap-tma-ws-4w4s1p"
    E, config = 40, LayerConfig.parse(text)
    w13, w2 = torch.zeros(E, 2 * I, H, dtype=torch.int8), torch.zeros(E, H, I, dtype=torch.int8)
    hidden, ids = torch.zeros(1, H, dtype=torch.bfloat16), torch.arange(A).unsqueeze(0)
    scaled = [Weights([w], torch.ones(w.shape[:2]), None) for w in (w13, w2)]
    out = run_hopper.moe_ffn(hidden, *scaled, ids, torch.ones(1, A), LayerSpec(), config)
    ((kernel, _, *arguments), options) = seen.pop()
    assert not seen
    assert not options["launch_pdl"], "it reads what the launch before may still write"
    given = dict(zip(kernel.arg_names, arguments, strict=True))
    assert given["result"].data_ptr() == out.data_ptr()
    assert (given["DIRECT"], given["A"], given["R"]) == (True, A, A)
    columns = {column * down_n // 64 + half for column in range(-(-H // down_n)) for half in range(down_n // 64)}
    assert given["arrived"].numel() == max(columns) + 1 == len(columns)
    counters = [given[name] for name in ("ticket", "absmax", "ready", "arrived")]
    assert not any(bool(c.any()) for c in counters)
    assert given["absmax"].numel() == given["S"] == A
    assert given["ready"].numel() == 2 * A
    spans = sorted((c.data_ptr(), c.data_ptr() + c.nbytes) for c in counters)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    y, h = given["y"], given["h"]
    assert (y.shape, h.shape) == ((A, H), (A, I))
    assert y.stride(0) == h.stride(0) == given["stride"] == H + I
    assert h.data_ptr() == y.data_ptr() + H * y.element_size()
    assert h.data_ptr() % 16 == 0
