"""The tuner: what it tries, checks, stores and reports, with a measurement that is made up and with real kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowgmm import cli, timing, tune, tune_cache, tuner
from lowgmm.gpu import H200
from lowgmm.shapes import DeviceError
from lowgmm.tile_config import Problem, TileConfig
from lowgmm.tune import bucket, candidates, pick, predict

MANY = Problem(64, 64 * 128, 2048, 4096, torch.int8)
"""Rows enough for every candidate to be considered."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOWGMM_CACHE", str(tmp_path))
    monkeypatch.setattr(tuner, "describe", lambda device: H200)
    tune.forget()
    yield tmp_path
    monkeypatch.undo()
    tune.forget()


class Fake:
    """A machine on which the candidate `fast` is the fastest, and `broken` ones are wrong."""

    def __init__(self, fast: TileConfig, broken: Sequence[TileConfig] = (), gain: float = 2.0) -> None:
        self.fast, self.broken, self.gain, self.timed = fast, broken, gain, list[TileConfig]()

    def __call__(self, problem: Problem) -> Fake:
        return self

    def wrong(self, config: TileConfig) -> str | None:
        return "one zeroed tile" if config in self.broken else None

    def times(self, configs: Sequence[TileConfig]) -> list[float]:
        self.timed = list(configs)
        return [1e-4 / self.gain if c == self.fast else 1e-4 for c in configs]


def last(problem: Problem = MANY) -> TileConfig:
    """The candidate that the model likes least."""
    return max(candidates(problem, H200), key=lambda c: predict(problem, c, H200))


def test_the_winner_is_stored_and_picked_from_then_on(cache: Path):
    (result,) = tuner.tune([MANY], device=CPU, bench=Fake(last()))
    assert result.config == last()
    assert result.gain == 2.0
    assert pick(MANY, H200) == last()
    assert pick(replace(MANY, M=64 * 100), H200) == last()
    entry = json.loads((cache / "tune_nvidia_h200.json").read_text())["measured"][MANY.key]
    assert entry["config"] == str(last())
    assert entry["us"] == pytest.approx(50)
    assert len(entry["tried"]) == len(candidates(MANY, H200))


def test_a_wrong_configuration_is_neither_timed_nor_stored():
    fake = Fake(last(), broken=[last()])
    (result,) = tuner.tune([MANY], device=CPU, bench=fake)
    assert last() not in fake.timed
    assert result.rejected == {last(): "one zeroed tile"}
    assert pick(MANY, H200) != last()


def test_nothing_is_stored_if_everything_is_wrong(cache: Path):
    with pytest.raises(timing.CheckError, match="one zeroed tile"):
        tuner.tune([MANY], device=CPU, bench=Fake(last(), broken=candidates(MANY, H200)))
    assert list(cache.iterdir()) == []


def test_a_gain_within_the_noise_keeps_the_prediction():
    (result,) = tuner.tune([MANY], device=CPU, bench=Fake(last(), gain=1.005))
    assert result.config == tune.predicted(MANY, H200)


def test_buckets_are_tuned_once_and_kept_when_it_is_interrupted():
    problems = [replace(MANY, M=64 * rows) for rows in (16, 15, 1, 64)]
    assert pick(problems[0], H200) != last()
    seen = []

    def stop(result: tuner.Tuned) -> None:
        seen.append(result.problem.M)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuner.tune(problems, device=CPU, bench=Fake(last()), progress=stop)
    assert seen == [1024, 64]
    assert len(tune_cache.user(H200.name)) == 2
    assert pick(problems[0], H200) == last()


def test_no_bucket_starts_after_the_limit():
    assert tuner.tune([MANY], device=CPU, bench=Fake(last()), limit=-1) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(DeviceError, match="measures GPU kernels"):
        tuner.tune([MANY])


@pytest.mark.interpreter
@pytest.mark.parametrize("format", ["int8", "bf16", "int4", "int4_g32"])
def test_the_bench_runs_checks_and_times_real_kernels(format: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 0)
    bench = tuner.GpuBench(Problem.of(2, 3, 32, 64, format), CPU, seconds=0.01)
    config = TileConfig(16, 32, 64, swap_ab=True)
    assert bench.operands.sizes.tolist() == [2, 1]
    assert bench.wrong(config) is None
    assert len(bench.times([config])) == 1
    assert "powers of two" in str(bench.wrong(replace(config, block_m=8)))
    monkeypatch.setattr(tuner.lowgmm, "gmm", lambda x, w, *_, **__: torch.zeros(3, 32, dtype=torch.bfloat16))
    assert "budget" in str(bench.wrong(config))
    with pytest.raises(timing.CheckError):
        bench.times([config])


# the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-5"], "expected one of"),
        (["--model", "article", "--n", "4"], "leave --experts"),
        (["--experts", "4"], "expected --model"),
        ([], "expected --model"),
        (["--model", "article", "--format", "int8,int3"], "'int3' is not one of int8, fp8, int4, int4_g32"),
        (["--model", "article", "--tokens", "0"], "not a positive whole number"),
    ],
)
def test_usage_errors(arguments: list[str], message: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tune", *arguments, "--dry-run"])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_without_a_gpu(capsys):
    assert cli.main(["tune", "--model", "article"]) == cli.UNUSABLE
    assert "sees no GPU" in capsys.readouterr().err


def test_dry_run_lists_buckets_and_candidates(capsys, cache: Path):
    assert cli.main(["tune", "--model", "article", "--tokens", "1024,1000", "--format", "int8,fp8", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("is in use") == 4  # two formats, two matmuls, one bucket
    assert str(pick(bucket(Problem(64, 1000, 4096, 4096, torch.int8)), H200)) in out
    assert list(cache.iterdir()) == []


def test_the_command_stores_and_reports(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuner, "GpuBench", lambda problem, device, seconds: Fake(last(), [pick(MANY, H200)]))
    arguments = ["tune", "--experts", "64", "--n", "2048", "--k", "4096", "--rows", "128"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert f"{MANY.key}: {last()} 50.0 µs" in out
    assert "1 of 1 buckets stored" in out
    assert "is not used: one zeroed tile" in err
    monkeypatch.setattr(tuner, "GpuBench", lambda problem, *_: Fake(last(), candidates(problem, H200)))
    assert cli.main(arguments) == cli.FAILED
    assert "no configuration computes" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("out of resource: shared memory\nmore"), KeyError("x"), ValueError()])
def test_whatever_a_candidate_raises_is_its_own(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = object.__new__(tuner.GpuBench)
    bench.weights = [None]

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(bench, "_call", fail, raising=False)
    why = bench.wrong(TileConfig.parse("64x64x128-grid-4w3s"))
    assert why is not None
    assert why.startswith(type(error).__name__)
    assert "\n" not in why
