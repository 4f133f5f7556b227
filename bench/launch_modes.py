"""What balancing is worth: one grouped matmul with its tiles handed out in four ways, on even and skewed experts.

    python bench/launch_modes.py --output bench/results/launch_modes.jsonl

`expert` is the article's first version (one program per expert), `queue` its dynamic task queue. Every output is
checked against the fp64 oracle before it is timed; the launches take turns. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import lowgmm
from lowgmm import environment, timing
from lowgmm.gpu import describe
from lowgmm.testing import Operands, judge, make_operands
from lowgmm.tune import LAUNCHES, Problem, TileConfig, pick
from lowgmm.workloads import GMM_CASES, GmmCase

FORMATS = ("int8", "fp8", "bfloat16")


def configs(problem: Problem) -> dict[str, TileConfig]:
    """The picked tile in each launch mode; for the queue also with the article's 32-row tile."""
    base = pick(problem, describe(torch.device("cuda")))
    found = {launch: replace(base, launch=launch) for launch in LAUNCHES}
    article = replace(base, block_m=32, block_n=64, swap_ab=True, launch="queue", programs_per_sm=4, num_warps=4)
    return {**found, "queue, 32x64 tiles": article}


def rivals(case: GmmCase, format: str) -> list[timing.Rival]:
    o = make_operands(case.sizes, case.N, case.K, format, device="cuda")
    offsets, out_dtype = o.offsets, torch.bfloat16
    exact, baseline = o.exact(), o.baseline(out_dtype)
    device = torch.device("cuda")
    copies = timing.weight_sets(o.w.numel() * o.w.element_size(), device)
    weights = [o.weights] + [Operands(**{**o.__dict__, "w": o.w.clone()}).weights for _ in range(copies - 1)]

    def check(_: int, y: Tensor) -> None:
        verdict = judge(y, exact, baseline)
        assert verdict.ok, str(verdict)

    def call(w: object, config: TileConfig) -> Callable[[], Tensor]:
        return lambda: lowgmm.gmm(
            o.x,
            w,
            o.scales_x,
            expert_offsets=offsets,
            out_dtype=out_dtype,
            config=config,  # type: ignore[arg-type]
        )

    problem = Problem(case.E, case.M, case.N, case.K, o.x.dtype)
    return [
        timing.Rival(f"{name} | {config}", [call(w, config) for w in weights], check)
        for name, config in configs(problem).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument(
        "--cases", nargs="*", default=[c for c in GMM_CASES if c.startswith("article")], choices=list(GMM_CASES)
    )
    args = parser.parse_args()
    device = torch.device("cuda")
    lines = [json.dumps({"environment": environment.record(device), "read_bandwidth": timing.read_bandwidth(device)})]
    for case in (GMM_CASES[name] for name in args.cases):
        for format in FORMATS:
            size = case.E * case.N * case.K * (2 if format == "bfloat16" else 1)
            for t in timing.interleave(rivals(case, format), device, rounds=15, seconds=3):
                launch, config = t.name.split(" | ")
                line = {"case": case.name, "format": format, "launch": launch, "config": config}
                line |= {"us": t.median_s * 1e6, "p20": t.p20_s * 1e6, "p80": t.p80_s * 1e6, "method": t.method}
                line["weights_tb_per_s"] = size / t.median_s / 1e12
                lines.append(json.dumps(line))
                print(
                    f"{case.name:17} {format:9} {launch:20} {config:40} {line['us']:8.1f} µs "
                    f"{line['weights_tb_per_s']:5.2f} TB/s",
                    flush=True,
                )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
