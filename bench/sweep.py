"""Every plausible tile configuration on every case: the data that `tune.pick` is judged by. Needs a GPU.

    python bench/sweep.py --output bench/results/sweep_h200.jsonl
    python bench/sweep.py --compile-only 0/8     # fills Triton's cache; start 0/8 … 7/8 side by side first

Every output is checked against the fp64 oracle before it is timed. Times include building the tile schedule.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import lowgmm
from lowgmm import environment, timing
from lowgmm.formats import FORMATS, QuantTensor
from lowgmm.gpu import describe
from lowgmm.testing import Operands, judge
from lowgmm.tune import Problem, TileConfig, pick, supports
from lowgmm.workloads import GMM_CASES, GmmCase

CUDA = torch.device("cuda")
FEW = (
    "16x64x256-swap-tma-persistent2-4w4s",
    "16x64x256-swap-tma-persistent2-4w5s",
    "16x64x256-swap-tma-grid-4w4s",
    "16x64x128-swap-tma-persistent4-4w4s",
    "16x128x128-swap-tma-persistent2-4w4s",
    "16x128x256-swap-tma-persistent1-4w4s",
)
MID = (
    "32x128x128-swap-tma-persistent2-4w4s",
    "32x128x128-swap-tma-grid-4w4s",
    "64x128x128-swap-tma-persistent2-4w4s",
    "64x128x128-swap-tma-grid-4w4s",
    "64x128x128-tma-grid-4w4s",
    "64x128x128-tma-persistent2-4w4s",
)
MANY = (
    "128x128x128-tma-persistent2-4w3s",
    "128x128x128-tma-persistent2-8w3s",
    "128x128x128-tma-grid-4w3s",
    "128x256x128-tma-persistent1-8w3s",
    "256x128x128-tma-persistent1-8w3s",
)


def candidates(problem: Problem) -> list[TileConfig]:
    rows, gpu = problem.rows_per_expert, describe(CUDA)
    texts = FEW if rows <= 16 else MID if rows <= 96 else MANY
    found = [TileConfig.parse(text) for text in texts]
    picked = pick(problem, gpu)
    return [picked] + [c for c in found if c != picked and supports(problem, c, gpu) is None]


def operands(case: GmmCase, format: str, copies: int) -> tuple[Operands, list[QuantTensor]]:
    """Quantised directly: uniform codes and scales near 1, made on the GPU."""
    g, fmt = torch.Generator(CUDA).manual_seed(0), FORMATS[format]

    def codes(*shape: int) -> Tensor:
        if fmt.exact:
            return torch.randint(-127, 128, shape, generator=g, device=CUDA, dtype=torch.int8)
        return torch.randn(shape, generator=g, device=CUDA, dtype=torch.bfloat16).mul_(64).to(fmt.dtype)

    scales_x = torch.rand(case.M, generator=g, device=CUDA) + 0.5
    scales_w = torch.rand(case.E, case.N, generator=g, device=CUDA) + 0.5
    sizes = torch.tensor(case.sizes, dtype=torch.int32, device=CUDA)
    o = Operands(codes(case.M, case.K), codes(case.E, case.N, case.K), scales_x, scales_w, sizes)
    return o, [QuantTensor(o.w, scales_w, fmt)] + [QuantTensor(o.w.clone(), scales_w, fmt) for _ in range(copies - 1)]


def problems(names: list[str]) -> Iterator[tuple[GmmCase, str, Problem]]:
    for name in names:
        case = GMM_CASES[name]
        for format, fmt in FORMATS.items():
            yield case, format, Problem(case.E, case.M, case.N, case.K, fmt.dtype)


def compile_share(names: list[str], share: str) -> None:
    """Launch this share of the configurations once, on one row per expert."""
    part, of = (int(v) for v in share.split("/"))
    work = [(case, format, c) for case, format, problem in problems(names) for c in candidates(problem)]
    seen: dict[tuple[object, ...], tuple[GmmCase, str, TileConfig]] = {
        (format, c, case.K % c.block_k == 0): (case, format, c) for case, format, c in work
    }
    for case, format, config in list(seen.values())[part::of]:
        tiny = GmmCase(case.name, case.N, case.K, (1, 1))
        o, _ = operands(tiny, format, 1)
        lowgmm.gmm(o.x, o.weights, o.scales_x, expert_offsets=o.offsets, config=config)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--cases", nargs="*", default=list(GMM_CASES), choices=list(GMM_CASES))
    parser.add_argument("--compile-only", metavar="PART/OF")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case starts")
    args = parser.parse_args()
    if args.compile_only:
        compile_share(args.cases, args.compile_only)
        return
    start = time.perf_counter()
    lines = [json.dumps({"environment": environment.record(CUDA), "read_bandwidth": timing.read_bandwidth(CUDA)})]
    for case, format, problem in problems(args.cases):
        if time.perf_counter() - start > args.limit:
            print(f"time limit: {case.name} {format} not run")
            continue
        o, weights = operands(case, format, timing.weight_sets(case.E * case.N * case.K, CUDA))
        exact, baseline, offsets = o.exact(), o.baseline(torch.bfloat16), o.offsets

        def check(_: int, y: Tensor, exact: Tensor = exact, baseline: Tensor = baseline) -> None:
            verdict = judge(y, exact, baseline)
            assert verdict.ok, str(verdict)

        rivals = [
            timing.Rival(
                str(config),
                [
                    lambda w=w, c=config, o=o, f=offsets: lowgmm.gmm(o.x, w, o.scales_x, expert_offsets=f, config=c)
                    for w in weights
                ],
                check,
            )
            for config in candidates(problem)
        ]
        timings = timing.interleave(rivals, CUDA, rounds=9, seconds=1.5)
        best = min(t.median_s for t in timings)
        for i, t in enumerate(timings):
            line = {"case": case.name, "format": format, "config": t.name, "us": t.median_s * 1e6, "picked": i == 0}
            line |= {"p20": t.p20_s * 1e6, "p80": t.p80_s * 1e6, "method": t.method}
            lines.append(json.dumps(line))
        flops, size = 2 * case.M * case.N * case.K, case.E * case.N * case.K
        winner = min(timings, key=lambda t: t.median_s).name
        print(
            f"{case.name:24} {format:5} picked {timings[0].median_s * 1e6:8.1f} ({timings[0].median_s / best:4.2f}) "
            f"best {best * 1e6:8.1f} µs {flops / best / 1e12:6.0f} TFLOP/s {size / best / 1e12:5.2f} TB/s {winner}",
            flush=True,
        )
        del o, weights, exact, baseline, rivals
        torch.cuda.empty_cache()
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
