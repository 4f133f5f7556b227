"""Of the kernels in Gluon what is arithmetic only, run as plain Python; and what one token's launch is handed."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from lowgmm.gpu import H200
from lowgmm.layer import LayerSpec, Weights
from lowgmm.plan import LayerConfig, LayerProblem, supports

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lowgmm.kernels import hopper, hopper_read, run_hopper
from lowgmm.kernels.tiles import BAND

GL = SimpleNamespace(static_range=range, minimum=min, cdiv=lambda a, b: -(-a // b))


def plain(function: Any, **names: Any) -> Any:
    """The function as Python runs it, with stand-ins for what it uses."""
    return FunctionType(function.fn.__code__, {"gl": GL, "range": range, **names})


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
                        "queue", bm, bn // 2, bk, bn, bk, warp_specialize=True, num_stages=3, programs_per_sm=1
                    )
                    if supports(LayerProblem(9, 2, 4, 512, 512, dtype), config, H200) is None:
                        found.append((bm, bn, bk, size))
    return found


def test_every_slot_waits_for_what_is_loaded_into_it() -> None:
    """With any number of rows. A byte more would be waited for for ever, a byte less be read before it is there."""
    found = tiles()
    assert {bn for _, bn, _, _ in found} == {64, 128, 256}
    assert {bm for bm, _, _, _ in found} == {16, 32, 64, 128}
    for bm, bn, bk, size in found:
        high, wide = hopper_read.box_of(bm, bn, size)
        assert wide * size == 128, "a row of a box is one line of the swizzle"
        x = SimpleNamespace(block_type=SimpleNamespace(shape=[high, wide]))
        xs = SimpleNamespace(shape=[3, bm, bk], index=lambda slot, bm=bm, bk=bk: Part(range(bm), range(bk)))
        for rows in range(1, bm + 1):
            row, k, weights = 1000, 4 * bk, bn * bk * size
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
            plain(hopper_read.expect, mbarrier=barrier)(slot, 1, boxes, high * bk * size, weights, bm // high)
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
    from schedule_kernel import list_tiles

    band = BAND.value
    sizes = [5, band * 16, 0, (2 * band + 3) * 16 + 1]
    starts = torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)
    count, listed = list_tiles(starts.to(device), int(starts[-1]), 16, 10_000, tiles_n)
    place = plain(hopper.place, BAND=band, bounds=lambda offsets, e, M, E: (int(offsets[e]), int(offsets[e + 1])))
    found = []
    for e, size in enumerate(sizes):
        for local in range(-(-size // 16) * tiles_n):
            _, row, end, column = place(starts, e, local, int(starts[-1]), len(sizes), tiles_n, 16)
            found.append([e, row, end, column])
    assert found == listed[:count].tolist()


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
