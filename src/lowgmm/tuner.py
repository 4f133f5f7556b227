"""Measure tile configurations on this machine's GPU and keep the winners where ``tune.pick`` finds them.

Nothing here runs unless it is asked for (``lowgmm tune``): a call of ``gmm`` never measures anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

import lowgmm
from lowgmm import timing, tune_cache
from lowgmm import tune as tuning
from lowgmm.formats import FLOATS, QuantTensor
from lowgmm.gpu import Gpu, describe
from lowgmm.shapes import DeviceError
from lowgmm.testing import draw_operands, judge
from lowgmm.tile_config import Problem, TileConfig
from lowgmm.tune import bucket, candidates, predict, predicted

WORTH = 0.01
"""What a configuration must gain over the predicted one to be stored in its place: less is noise."""


class Bench(Protocol):
    """One problem, ready to run."""

    def wrong(self, config: TileConfig) -> str | None:
        """Run once and compare with the oracle: None, or what is wrong."""

    def times(self, configs: Sequence[TileConfig]) -> list[float]:
        """Median seconds of each, taken in turns."""


@dataclass(frozen=True)
class Tuned:
    """What was found out about one bucket."""

    problem: Problem
    config: TileConfig
    """The winner, which was stored."""
    seconds: dict[TileConfig, float]
    rejected: dict[TileConfig, str]
    """Configurations whose output was wrong or that did not run, and why."""
    predicted: TileConfig

    @property
    def gain(self) -> float:
        """Time of the predicted configuration over the winner's; 1.0 if the prediction won or could not be timed."""
        return self.seconds.get(self.predicted, self.seconds[self.config]) / self.seconds[self.config]


def tune(
    problems: Iterable[Problem],
    *,
    device: torch.device | None = None,
    seconds: float = 1.0,
    limit: float = float("inf"),
    bench: Callable[[Problem], Bench] | None = None,
    progress: Callable[[Tuned], object] | None = None,
) -> list[Tuned]:
    """Measure every bucket of ``problems`` and store the winners in the user's cache, after each bucket.

    Args:
        problems: grouped matmuls; those of one bucket (:func:`lowgmm.tune.bucket`) are measured once.
        device: a CUDA device; default: the current one.
        seconds: of measuring per bucket, compiling not counted.
        limit: seconds after which no further bucket starts.
        bench: makes a problem ready to run; default: on ``device``, with random operands and even experts.
        progress: called with each result.

    Returns:
        A result per bucket that was measured.

    Raises:
        DeviceError: there is no GPU, or ``device`` is none.
        CheckError: no configuration gave a right result for some bucket; earlier buckets are stored.
    """
    if device is None:
        device = torch.device("cuda")
    if bench is None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise DeviceError(
                f"tune: argument 'device' is {device}, which torch cannot use as a GPU here; tuning measures GPU "
                f"kernels. Without tuning the cost model chooses (lowgmm tune --dry-run shows what)."
            )
        bench = lambda problem: GpuBench(problem, device, seconds)  # noqa: E731
    gpu, start, found = describe(device), time.perf_counter(), []
    for problem in dict.fromkeys(bucket(p) for p in problems):
        if time.perf_counter() - start > limit:
            break
        result = tune_one(problem, gpu, bench(problem))
        entry = {
            "config": str(result.config),
            "us": result.seconds[result.config] * 1e6,
            "gain": result.gain,
            "tried": {str(c): s * 1e6 for c, s in result.seconds.items()},
        }
        tune_cache.store(gpu.name, {problem.key: entry})
        tuning.forget()
        found.append(result)
        if progress is not None:
            progress(result)
    return found


def tune_one(problem: Problem, gpu: Gpu, bench: Bench) -> Tuned:
    """Try the candidates of one bucket, the most promising first; nothing is stored."""
    configs = sorted(candidates(problem, gpu), key=lambda c: predict(problem, c, gpu))
    if not configs:
        predicted(problem, gpu)  # raises, with the reason
    rejected = {c: why for c in configs if (why := bench.wrong(c)) is not None}
    right = [c for c in configs if c not in rejected]
    if not right:
        reasons = "; ".join(f"{c}: {why}" for c, why in rejected.items())
        raise timing.CheckError(f"tune: no configuration computes {problem.key} correctly: {reasons}")
    seconds = dict(zip(right, bench.times(right), strict=True))
    expected, best = configs[0], min(right, key=lambda c: seconds[c])
    if expected in seconds and seconds[expected] <= seconds[best] * (1 + WORTH):
        best = expected
    return Tuned(problem, best, seconds, rejected, expected)


class GpuBench:
    """A problem on a device, with random operands, even experts and cold weights."""

    def __init__(self, problem: Problem, device: torch.device, seconds: float) -> None:
        each, more = divmod(problem.M, problem.E)
        sizes = [each + (e < more) for e in range(problem.E)]
        name = str(problem.dtype).removeprefix("torch.") if problem.dtype in FLOATS else problem.format
        self.problem, self.device, self.seconds = problem, device, seconds
        self.operands = draw_operands(sizes, problem.N, problem.K, name, device=device)
        self.exact, self.baseline = self.operands.exact(), self.operands.baseline(problem.out_dtype)
        sets = timing.weight_sets(self.operands.w.numel() * problem.weight_size, device)
        copies = [self.operands, *(replace(self.operands, w=self.operands.w.clone()) for _ in range(sets - 1))]
        self.weights, self.offsets = [o.weights for o in copies], self.operands.offsets

    def _call(self, weights: Tensor | QuantTensor, config: TileConfig) -> Tensor:
        return lowgmm.gmm(
            self.operands.x,
            weights,
            self.operands.scales_x,
            expert_offsets=self.offsets,
            out_dtype=self.problem.out_dtype,
            config=config,
            impl="triton",
        )

    def _check(self, _: int, output: Tensor) -> None:
        verdict = judge(output, self.exact, self.baseline)
        if not verdict.ok:
            raise AssertionError(str(verdict))

    def wrong(self, config: TileConfig) -> str | None:
        """Run ``config`` once and compare with the oracle."""
        try:
            self._check(0, self._call(self.weights[0], config))
        except Exception as error:  # a compiler's, a launcher's, a wrong result's: it is this candidate's alone
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return None

    def times(self, configs: Sequence[TileConfig]) -> list[float]:
        """Median seconds of each configuration: graph replays on a GPU, in turns, checked once more."""
        rivals = [timing.Rival(str(c), [partial(self._call, w, c) for w in self.weights], self._check) for c in configs]
        return [t.median_s for t in timing.interleave(rivals, self.device, rounds=9, seconds=self.seconds)]


def stored_at(device: torch.device) -> Path:
    """The file that :func:`tune` writes for this device."""
    return tune_cache.path_for(describe(device).name)
