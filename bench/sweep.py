"""Every plausible tile configuration on every case: the data that `tune.pick` is judged by. Needs a GPU.

    python bench/sweep.py --output bench/results/sweep_h200.jsonl
    python bench/fit.py bench/results/sweep_h200.jsonl               # then: fit the model, write the package's table

Every output is checked against the fp64 oracle before it is timed. Times include building the tile schedule.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import (
    CUDA,
    DTYPES,
    Lines,
    Loaded,
    compile_in_parallel,
    compile_share,
    distinct,
    median_us,
    problem_of,
    require_gpu,
)

from lowgmm import timing
from lowgmm.gpu import describe
from lowgmm.tile_config import Problem, TileConfig, supports
from lowgmm.tune import candidates as tuned
from lowgmm.tune import pick, predict
from lowgmm.workloads import GMM_CASES, GmmCase

FEW = (
    "16x64x256-swap-tma-persistent2-4w4s",
    "16x64x256-swap-tma-persistent2-4w5s",
    "16x64x256-swap-tma-grid-4w4s",
    "16x64x128-swap-tma-persistent4-4w4s",
    "16x128x128-swap-tma-persistent2-4w4s",
    "16x128x256-swap-tma-persistent1-4w4s",
    "16x128x256-swap-tma-ws-queue1-4w5s",
    "16x128x512-swap-tma-ws-queue1-4w3s",
)
MID = (
    "32x128x128-swap-tma-persistent2-4w4s",
    "32x128x128-swap-tma-grid-4w4s",
    "64x128x128-swap-tma-persistent2-4w4s",
    "64x128x128-swap-tma-grid-4w4s",
    "64x128x128-tma-grid-4w4s",
    "64x128x128-tma-persistent2-4w4s",
    "32x128x256-swap-tma-ws-queue1-4w5s",
    "64x128x128-swap-tma-ws-queue1-4w8s",
    "64x128x256-swap-tma-ws-queue1-4w4s",
    "64x256x128-swap-tma-ws-queue1-4w4s",
)
MANY = (
    "128x128x128-tma-persistent2-4w3s",
    "128x128x128-tma-persistent2-8w3s",
    "128x128x128-tma-grid-4w3s",
    "128x256x128-tma-persistent1-8w3s",
    "256x128x128-tma-persistent1-8w3s",
    "128x128x128-swap-tma-ws-queue1-4w6s",
    "128x256x128-swap-tma-ws-queue1-4w4s",
)


POOL = (*FEW, *MID, *MANY)
NEAR = 1.3
"""Configurations are timed whose predicted time is within that factor of the best: what pick could choose is then
always among them."""


def candidates(problem: Problem) -> list[TileConfig]:
    """What is picked, first; then what the regime's list names or the model thinks near."""
    rows, gpu = problem.rows_per_expert, describe(CUDA)
    regime = FEW if rows <= 16 else MID if rows <= 96 else MANY
    picked, found = pick(problem, gpu), [TileConfig.parse(t) for t in POOL]
    if problem.element_size == 2:
        found = [replace(c, block_k=max(32, c.block_k // 2)) for c in found]
    wanted = [c for t, c in zip(POOL, found, strict=True) if t in regime]
    found = [c for c in dict.fromkeys([*tuned(problem, gpu), *found]) if supports(problem, c, gpu) is None]
    seconds = {c: predict(problem, c, gpu) for c in found}
    near = NEAR * min(seconds.values())
    return list(dict.fromkeys([picked, *(c for c in found if c in wanted or seconds[c] <= near)]))


def problems(names: list[str], formats: list[str]) -> list[tuple[GmmCase, str, Problem]]:
    return [(GMM_CASES[n], f, problem_of(GMM_CASES[n], f)) for n in names for f in formats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--cases", nargs="*", default=list(GMM_CASES), choices=list(GMM_CASES))
    parser.add_argument("--formats", nargs="*", default=["int8", "fp8"], choices=list(DTYPES))
    parser.add_argument("--compile-only", metavar="PART/OF")
    parser.add_argument("--no-precompile", action="store_true", help="compile as the cases come")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case starts")
    args = parser.parse_args()
    require_gpu()
    work = problems(args.cases, args.formats)
    jobs = [(format, c, case) for case, format, problem in work for c in candidates(problem)]
    if args.compile_only:
        compile_share(jobs, args.compile_only)
        return
    start = time.perf_counter()
    if not args.no_precompile:
        compile_in_parallel(["--cases", *args.cases, "--formats", *args.formats], len(distinct(jobs)))
    out = Lines(args.output, read_bandwidth=timing.read_bandwidth(CUDA))
    for case, format, problem in work:
        if time.perf_counter() - start > args.limit:
            print(f"time limit: {case.name} {format} not run")
            continue
        loaded = Loaded(case, format)
        rivals = [loaded.rival(str(config), config) for config in candidates(problem)]
        timings = timing.interleave(rivals, CUDA, rounds=9, seconds=1.5)
        best = min(t.median_s for t in timings)
        for i, t in enumerate(timings):
            out.add(case=case.name, format=format, config=t.name, picked=i == 0, **median_us(t))
        flops, size = 2 * case.M * case.N * case.K, case.E * case.N * case.K * problem.element_size
        winner = min(timings, key=lambda t: t.median_s).name
        print(
            f"{case.name:24} {format:5} picked {timings[0].median_s * 1e6:8.1f} ({timings[0].median_s / best:4.2f}) "
            f"best {best * 1e6:8.1f} µs {flops / best / 1e12:6.0f} TFLOP/s {size / best / 1e12:5.2f} TB/s {winner}",
            flush=True,
        )
        del loaded, rivals
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
