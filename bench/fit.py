"""Fit the cost model to sweeps, choose the candidates, and write the table that the package ships for that GPU.

    python bench/fit.py bench/results/sweep_h200.jsonl            # fits, reports, writes src/lowgmm/measured/
    python bench/fit.py bench/results/sweep_h200.jsonl --dry-run  # only reports

Several files are one sweep taken in parts (cases or formats); they must come from one GPU and one commit.

Needs no GPU. The report is the ratio of what ``pick`` would choose without any measurement to the best of the sweep.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from lowgmm import environment, tune_cache
from lowgmm.gpu import H200, Gpu
from lowgmm.tile_config import Problem, TileConfig
from lowgmm.tune import MAX_CANDIDATES, bucket, model, predicted
from lowgmm.tune_cache import Rates
from lowgmm.workloads import GMM_CASES

START = Rates(4e-6, 4.6e12, 8e10, 1e-6, 1.5e15 / 132, 32.0, 1e-7, 2e-9, 1e-6, 4e10, 0.5, 4.0)
PINNED = ("mma",)
"""Not fitted, because a sweep of large tiles cannot tell it from the L2 rate: the best dense 8-bit product measured."""
FACTORS = tuple(0.7 * 1.02**i for i in range(36))
"""0.7 to 1.4: a factor corrects the model, it does not replace it."""
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
Factors = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Group:
    """One case in one format: every configuration that was timed, in seconds."""

    case: str
    problem: Problem
    sizes: tuple[int, ...]
    times: dict[TileConfig, float]

    def regret(self, config: TileConfig) -> float:
        """log(time / best time); infinite for what was not timed."""
        return math.log(self.times.get(config, math.inf) / min(self.times.values()))


def read(*paths: Path) -> tuple[dict[str, Any], list[Group]]:
    """The environment of a sweep (in one file or in parts), and its groups."""
    groups: dict[tuple[str, str], Group] = {}
    heads = []
    for path in paths:
        head, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        heads.append(head["environment"])
        for line in lines:
            case = GMM_CASES[line["case"]]
            problem = Problem(case.E, case.M, case.N, case.K, DTYPES[line["format"]])
            group = groups.setdefault((case.name, line["format"]), Group(case.name, problem, case.sizes, {}))
            group.times[TileConfig.parse(line["config"])] = line["us"] * 1e-6
    if len({(head["device_name"], head.get("commit")) for head in heads}) != 1:
        raise SystemExit(f"parts of a sweep come from one GPU and one commit: {', '.join(map(str, paths))}")
    return heads[0], list(groups.values())


def fit(groups: Sequence[Group], gpu: Gpu) -> tuple[Rates, Factors]:
    """The rates by simplex descent on the squared log errors, then each configuration's factor, twice over."""
    names = [f.name for f in fields(Rates) if f.name not in PINNED]
    factors: Factors = {}

    def error(rates: Rates, of: Sequence[Group] = groups) -> float:
        total, count = 0.0, 0
        for g in of:
            for config, seconds in g.times.items():
                total += math.log(model(g.problem, config, gpu, rates, factors, g.sizes) / seconds) ** 2
                count += 1
        return total / count

    def at(x: Sequence[float]) -> Rates:
        return replace(START, **{n: math.exp(v) for n, v in zip(names, x, strict=True)})

    x = [math.log(getattr(START, n)) for n in names]
    for _ in range(2):
        for step in (0.25, -0.15, 0.1):
            x = descend(lambda v: error(at(v)), x, step)
        rates = at(x)
        for format in {g.problem.format for g in groups}:
            of = [g for g in groups if g.problem.format == format]
            for config in {c for g in of for c in g.times}:
                mine = [Group(g.case, g.problem, g.sizes, {config: g.times[config]}) for g in of if config in g.times]
                if len(mine) < MIN_CASES:
                    continue
                by = factors.setdefault(format, {})

                def off(
                    factor: float,
                    by: dict[str, float] = by,
                    name: str = str(config),
                    mine: Sequence[Group] = mine,
                    rates: Rates = rates,
                ) -> float:
                    by[name] = factor
                    return error(rates, mine)

                by[str(config)] = min(FACTORS, key=off)
    return rates, factors


UNCOVERED = math.log(4)
"""The regret of a case that no candidate was timed on: large, so that all cases get covered first."""
WORTH = 0.0005
"""What another candidate must save, as a mean over the cases: every one is a compilation more."""
MIN_CASES = 3
"""A configuration gets a factor of its own only if at least that many cases show it."""


def descend(f: Callable[[list[float]], float], x: list[float], step: float, rounds: int = 400) -> list[float]:
    """Nelder and Mead's simplex."""
    n = len(x)
    simplex = [(f(x), x)]
    for i in range(n):
        y = [v + step * (i == j) for j, v in enumerate(x)]
        simplex.append((f(y), y))
    for _ in range(rounds):
        simplex.sort(key=lambda s: s[0])
        (best, low), (worst, high) = simplex[0], simplex[-1]
        centre = [sum(s[1][i] for s in simplex[:-1]) / n for i in range(n)]

        def along(t: float, centre: list[float] = centre, high: list[float] = high) -> tuple[float, list[float]]:
            y = [c + t * (c - h) for c, h in zip(centre, high, strict=True)]
            return f(y), y

        tried = along(1.0)
        if tried[0] < best:
            simplex[-1] = min(tried, along(2.0), key=lambda s: s[0])
        elif tried[0] < simplex[-2][0]:
            simplex[-1] = tried
        elif (inner := along(-0.5))[0] < worst:
            simplex[-1] = inner
        else:
            moved = ([(a + b) / 2 for a, b in zip(low, s[1], strict=True)] for s in simplex[1:])
            simplex = [simplex[0], *((f(y), y) for y in moved)]
    return min(simplex, key=lambda s: s[0])[1]


def choose(groups: Sequence[Group]) -> list[str]:
    """At most MAX_CANDIDATES configurations that together leave the least regret: greedily, the best addition first."""
    found: list[TileConfig] = []
    left = [UNCOVERED] * len(groups)
    pool = sorted({c for g in groups for c in g.times}, key=str)

    def after(config: TileConfig) -> list[float]:
        return [min(a, g.regret(config)) for a, g in zip(left, groups, strict=True)]

    while len(found) < MAX_CANDIDATES:
        best = min(pool, key=lambda c: sum(after(c)))
        if sum(left) - sum(after(best)) < WORTH * len(groups):
            break
        found.append(best)
        left = after(best)
    return [str(c) for c in found]


def picks(groups: Sequence[Group], gpu: Gpu, table: tune_cache.Shipped) -> list[tuple[Group, TileConfig]]:
    """What pick would choose from ``table`` by prediction alone."""
    return [(g, predicted(bucket(g.problem), gpu, table)) for g in groups]


def distrust(groups: Sequence[Group], gpu: Gpu, table: tune_cache.Shipped) -> None:
    """Raise, step by step, the factor of what would be picked where the sweep has not timed it."""
    for _ in range(20):
        untimed = [(g, c) for g, c in picks(groups, gpu, table) if c not in g.times]
        if not untimed:
            return
        for format, name in {(g.problem.format, str(c)) for g, c in untimed}:
            by = table.factors[format]
            by[name] = by.get(name, 1.0) * 1.02  # type: ignore[index]


def report(chosen: Sequence[tuple[Group, TileConfig]]) -> tuple[float, float, int]:
    """Geometric mean and worst ratio to the best of the sweep, and how many choices the sweep did not time."""
    regrets = [g.regret(c) for g, c in chosen]
    timed = [r for r in regrets if math.isfinite(r)]
    return math.exp(sum(timed) / len(timed)), math.exp(max(timed)), len(regrets) - len(timed)


def halved(text: str) -> str:
    config = TileConfig.parse(text)
    return str(replace(config, block_k=max(32, config.block_k // 2)))


def measured(groups: Sequence[Group], candidates: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Each bucket's best candidate; cases of one bucket (even and skewed experts) are weighed alike."""
    by_key: dict[str, list[Group]] = {}
    for g in groups:
        by_key.setdefault(bucket(g.problem).key, []).append(g)
    best = {}
    for key, of in by_key.items():
        texts = [t for t in candidates[of[0].problem.format] if all(TileConfig.parse(t) in g.times for g in of)]
        if texts:
            best[key] = min(texts, key=lambda t: sum(g.regret(TileConfig.parse(t)) for g in of))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, nargs="+", help="JSONL of bench/sweep.py, or its parts")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    args = parser.parse_args()
    env, groups = read(*args.sweep)
    gpu = H200
    assert env["device_name"] == gpu.name, f"the sweep is of {env['device_name']}; add its facts to lowgmm.gpu first"
    rates, factors = fit(groups, gpu)
    formats = sorted({g.problem.format for g in groups})
    candidates = {f: tuple(choose([g for g in groups if g.problem.format == f])) for f in formats}
    if "bf16" not in candidates:
        candidates["bf16"] = tuple(dict.fromkeys(halved(t) for t in candidates["int8"]))
    source = {"sweep": " ".join(path.name for path in args.sweep)} | {
        k: str(env[k]) for k in ("commit", "torch", "triton") if k in env
    }
    table = tune_cache.Shipped(gpu.name, source, rates, factors, candidates, measured(groups, candidates))
    distrust(groups, gpu, table)
    for format in formats:
        chosen = picks([g for g in groups if g.problem.format == format], gpu, table)
        mean, worst, missing = report(chosen)
        print(f"{format}: candidates {' '.join(candidates[format])}")
        for g, c in sorted(chosen, key=lambda gc: -gc[0].regret(gc[1])):
            if g.regret(c) > 0.02:
                ratio = f"{math.exp(g.regret(c)):.3f}" if c in g.times else "not timed"
                print(f"  {g.case:24} {c!s:40} {ratio}, best {min(g.times, key=lambda t: g.times[t])}")
        print(f"{format}: geometric mean {mean:.4f}, worst {worst:.3f}; {missing} choices were not timed")
    errors = [
        math.log(model(g.problem, c, gpu, rates, factors, g.sizes) / s) for g in groups for c, s in g.times.items()
    ]
    print(f"model: rms log error {math.sqrt(sum(e * e for e in errors) / len(errors)):.3f} over {len(errors)} times")
    if not args.dry_run:
        path = Path(tune_cache.__file__).parent / "measured" / f"{tune_cache.slug(gpu.name)}.json"
        data = asdict(table)
        data["rates"] = {k: float(f"{v:.4g}") for k, v in data["rates"].items()}
        data["factors"] = {f: {t: round(v, 3) for t, v in sorted(by.items())} for f, by in sorted(factors.items())}
        environment.write_json(path, {"version": tune_cache.VERSION, **data})
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
