"""The stopwatch: nothing wrong is timed, the order of turns is fair, and what is written down is complete."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lowgmm import environment, roofline, speed, timing
from lowgmm.shapes import ShapeError, UnsupportedError

CPU = torch.device("cpu")
SMALL = speed.Shape(E=4, N=64, K=96, rows=4)
MACHINE = roofline.Machine("fake", 1e9, {"bf16": 1e10, "int8": 1e10, "fp8": 1e10})


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch):
    """One weight set is enough: these tests do not care whether it is cached."""
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 0)


def accept(index: int, output: torch.Tensor) -> None:
    pass


def test_a_wrong_rival_is_not_timed():
    calls = []

    def wrong(index: int, output: torch.Tensor) -> None:
        calls.append(index)
        assert index == 0, "off by one"

    rival = timing.Rival("bad", [lambda: torch.ones(1)] * 2, wrong)
    with pytest.raises(timing.CheckError, match=r"bad: output of weight set 1 is wrong.*off by one"):
        timing.interleave([rival], CPU)
    assert calls == [0, 1]


def turns(names: str, rounds: int, sets: int = 1) -> list[list[str]]:
    """What was called in each round."""
    log = []

    def call(name: str, index: int):
        return lambda: log.append(f"{name}{index}") or torch.ones(1)

    rivals = [timing.Rival(n, [call(n, i) for i in range(sets)], accept) for n in names]
    timing.interleave(rivals, CPU, rounds=rounds)
    timed = log[len(names) * (sets + 1) :]  # behind the checks, and a call of each to settle
    return [timed[i : i + len(names)] for i in range(0, len(timed), len(names))]


def test_rivals_take_turns_and_sets_rotate():
    rounds = turns("ab", rounds=6, sets=2)
    assert [sorted(r) for r in rounds] == [["a1", "b1"], ["a0", "b0"]] * 3


def test_every_rival_is_first_and_last_and_behind_every_other():
    rounds = turns("abcd", rounds=60)
    assert {len(set(r)) for r in rounds} == {4}
    for at in range(4):
        assert {r[at][0] for r in rounds} == set("abcd")
    pairs = {(x[0], y[0]) for r in rounds for x, y in itertools.pairwise(r)}
    assert len(pairs) == 12
    assert rounds == turns("abcd", rounds=60)  # the same in every run


def test_a_ratio_is_taken_within_rounds():
    """A machine that becomes half as fast in the middle of the third of five rounds, between the one's turn and the
    other's: their medians are of different halves."""
    one, other = [1.0, 1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 6.0, 6.0, 6.0]
    ratio = timing.paired(other, one)
    assert ratio.median == 3
    assert timing.spread(other).median / timing.spread(one).median == 6
    assert (ratio.p20, ratio.p80) == (3, pytest.approx(3.6))  # that something changed shows
    with pytest.raises(ValueError, match="zip"):
        timing.paired(other[1:], one)


def test_median_and_percentiles_order_a_slow_and_a_fast_rival():
    def slow() -> torch.Tensor:
        time.sleep(0.003)
        return torch.ones(1)

    rivals = [timing.Rival("slow", [slow], accept), timing.Rival("fast", [lambda: torch.ones(1)], accept)]
    first, second = timing.interleave(rivals, CPU, rounds=7)
    assert first.p20_s <= first.median_s <= first.p80_s
    assert first.median_s >= 0.003 > second.median_s
    assert (first.rounds, first.method) == (7, "cpu clock")


def test_time_limit_leaves_at_least_five_rounds():
    rival = timing.Rival("slow", [lambda: time.sleep(0.002) or torch.ones(1)], accept)
    assert timing.interleave([rival], CPU, rounds=100, seconds=0.0)[0].rounds == 5


@pytest.mark.parametrize("rivals", [[], [timing.Rival("a", [], accept)], [timing.Rival("a", [torch.ones], accept)] * 2])
def test_unusable_rivals(rivals: list[timing.Rival]):
    with pytest.raises(ShapeError, match="distinct names and at least one call"):
        timing.interleave(rivals, CPU)


def test_weight_sets_cover_four_caches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 100)
    assert [timing.weight_sets(b, CPU) for b in (1000, 400, 399, 100, 1)] == [1, 1, 2, 4, 400]


def test_measured_rates_are_plausible():
    assert 1e8 < timing.read_bandwidth(CPU, size=8 << 20) < 1e13
    for format in ("fp32", "bf16", "int8"):
        assert 1e8 < timing.dense_rate(format, CPU, size=128) < 1e15
    with pytest.raises(UnsupportedError, match="no 'fp8' matmul"):
        timing.dense_rate("fp8", CPU, size=128)


@pytest.mark.usefixtures("no_cache")
def test_table_has_the_three_rows_and_checks_them():
    rows = speed.compare(CPU, MACHINE, SMALL, rounds=5)
    assert [r.format for r in rows] == ["bf16", "fp32", "bf16", "int8"]
    assert rows[0].label == "loop of 4 matmuls, bf16"
    assert rows[0].speedup == 1
    assert all(r.timing.median_s > 0 and r.gb_per_s > 0 for r in rows)
    assert rows[1].share_of_roof is None  # the fake machine has no fp32 rate
    assert len(speed.table(rows).splitlines()) == 5


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("fault", ["zero tile", "scale", "swapped experts", "nan"])
def test_table_refuses_a_wrong_gmm(fault: str, monkeypatch: pytest.MonkeyPatch):
    right = speed.lowgmm.gmm

    def wrong(*args, **kwargs) -> torch.Tensor:
        y = right(*args, **kwargs)
        if fault == "zero tile":
            y[:4, :16] = 0
        elif fault == "scale":
            y = y * 1.01
        elif fault == "swapped experts":
            y = y.roll(4, 0)
        else:
            y[0, 0] = math.nan
        return y

    monkeypatch.setattr(speed.lowgmm, "gmm", wrong)
    with pytest.raises(timing.CheckError, match="GMM bf16"):
        speed.compare(CPU, MACHINE, SMALL, rounds=5)


@pytest.mark.parametrize("timed", [timing.interleave, lambda rivals, device: timing._best(rivals[0], device, 3)])
def test_what_is_timed_runs_on_its_device(timed: Callable[..., object], monkeypatch: pytest.MonkeyPatch):
    """Events and graphs of the current device, if that is another, would see nothing of the work."""
    current = [0]

    @contextmanager
    def make_current(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(timing, "_gpu_sampler", lambda rival, device: timing._cpu_sampler(rival))
    seen: list[int] = []
    timed([timing.Rival("a", [lambda: seen.append(current[0])], accept)], torch.device("cuda", 1))
    assert set(seen) == {1}
    assert current == [0]


def test_no_command_needs_a_progress_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with timing.progress_bar("tuning", 2) as advance:
        advance(1)


@pytest.mark.gpu
def test_graph_replay_and_the_fallback_are_named():
    device = torch.device("cuda")
    x = torch.ones(1 << 20, device=device)

    def twice(index: int, y: torch.Tensor) -> None:
        assert torch.equal(y, 2 * x)

    def synchronising() -> torch.Tensor:
        return x * (1 + x[0].item())

    rivals = [timing.Rival("graph", [lambda: x * 2] * 2, twice), timing.Rival("sync", [synchronising], twice)]
    rivals.append(timing.Rival("plain", [lambda: x * 2], twice, graph=False))
    methods = [t.method for t in timing.interleave(rivals, device, rounds=5)]
    assert methods[0] == "cuda graph replay"
    assert methods[1].startswith("cuda calls (no graph: ")
    assert methods[2] == "cuda calls"


def test_environment_is_json():
    found = environment.record(CPU)
    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()


def test_json_is_complete_or_absent(tmp_path: Path):
    file = tmp_path / "a.json"
    environment.write_json(file, {"x": [1.5, math.nan, math.inf], "y": (1, None)})
    assert json.loads(file.read_text()) == {"x": [1.5, None, None], "y": [1, None]}
    before = file.read_text()
    with pytest.raises(TypeError):
        environment.write_json(file, {"x": object()})
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_rename_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "a.json"
    file.write_text("old")

    def fail(*args) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(environment.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        environment.write_json(file, {"x": 1})
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
