"""Every case in every format, each output checked, against what this GPU can read and multiply in the same run.

    python bench/gmm.py --output bench/results/gmm_h200.jsonl     # make bench; plots beside the file
    python bench/gmm.py --cases article-decode gpt-oss-16 --formats int8 --limit 60
    python bench/gmm.py --render bench/results/gmm_h200.jsonl     # write the table of docs/

The formats of a case take turns with a plain read of as many bytes and, where arithmetic is the limit, with the best
dense matmul that torch has. Configurations are those that ``tune.pick`` chooses. Needs a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    CUDA,
    DTYPES,
    Lines,
    Loaded,
    arguments,
    compile_in_parallel,
    compile_share,
    distinct,
    jobs_of,
    median_us,
    problem_of,
    provenance,
    read_rival,
    require_gpu,
    write_part,
)
from plot import gmm_report

from lowgmm import roofline, timing
from lowgmm.formats import FORMATS
from lowgmm.gpu import describe
from lowgmm.tune import pick, predict
from lowgmm.workloads import GMM_CASES, GmmCase

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "limits.md"
DENSE = 8192
"""M, N and K of the dense product that compute-bound cases are held against."""


def run_case(case: GmmCase, formats: list[str], machine: roofline.Machine, seconds: float) -> list[dict[str, Any]]:
    """Time one case: a dictionary per format."""
    loads = {f: roofline.Load(case.N, case.K, case.sizes, f) for f in formats}
    loaded = {f: Loaded(case, f) for f in formats}
    rivals = [loaded[f].rival(f) for f in formats]
    rivals += [read_rival(f"read {f}", int(roofline.traffic(loads[f]).total)) for f in formats]
    compute = [f for f in formats if roofline.bound(loads[f], machine) == "compute"]
    rivals += [timing.dense_rival(f"dense {f}", f, DENSE, CUDA) for f in compute]
    taken = {t.name: t for t in timing.interleave(rivals, CUDA, rounds=15, seconds=seconds)}
    lines = []
    for f in formats:
        t, load, problem = taken[f], loads[f], problem_of(case, f)
        config = pick(problem, describe(CUDA))
        moved, read = roofline.traffic(load).total, taken[f"read {f}"]
        line = {"case": case.name, "format": f, "E": case.E, "M": case.M, "N": case.N, "K": case.K}
        line |= {"config": str(config), **median_us(t)}
        line |= {"tb_per_s": moved / t.median_s / 1e12, "tflops": roofline.flops(load) / t.median_s / 1e12}
        line |= {"intensity": roofline.intensity(load), "bound": roofline.bound(load, machine)}
        line |= {
            "floor_us": roofline.roof_time(load, machine) * 1e6,
            "of_floor": roofline.share_of_roof(load, machine, t.median_s),
        }
        line |= {"predicted_us": predict(problem, config, describe(CUDA), case.sizes) * 1e6}
        line |= {"read_us": read.median_s * 1e6, "of_read": timing.paired(read.samples, t.samples).median}
        if f in compute:
            rate = 2.0 * DENSE**3 / taken[f"dense {f}"].median_s
            line |= {"dense_tflops": rate / 1e12, "of_dense": line["tflops"] * 1e12 / rate}
        lines.append(line)
    return lines


def render(name: str, head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """The document's table: each case against what bounds it."""
    dense = ", ".join(f"{format} {rate / 1e15:.2f} PFLOP/s" for format, rate in head["dense_rates"].items())
    out = [
        f"{provenance(name, head['environment'])}; "
        f"read {head['read_bandwidth'] / 1e12:.2f} TB/s, torch's dense matmul {dense}.",
        "",
        "| case | format | µs | bound by | TB/s | TFLOP/s | of a plain read | of torch's dense matmul |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ln in lines:
        read = f"{ln['of_read']:.0%}" if ln["bound"] == "memory" else ""
        of_dense = f"{ln['of_dense']:.0%}" if "of_dense" in ln else ""
        cells = (
            ln["case"],
            ln["format"],
            f"{ln['us']:.1f}",
            ln["bound"],
            f"{ln['tb_per_s']:.2f}",
            f"{ln['tflops']:.0f}",
        )
        out.append(f"| {' | '.join(cells)} | {read} | {of_dense} |")
    return "\n".join(out)


def main() -> None:
    parser = arguments(__doc__, DOCUMENT)
    parser.add_argument("--cases", nargs="*", default=list(GMM_CASES), choices=list(GMM_CASES), metavar="CASE")
    parser.add_argument("--formats", nargs="*", default=list(DTYPES), choices=list(DTYPES), metavar="FORMAT")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per case (2)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no further case starts")
    parser.add_argument("--no-precompile", action="store_true", help="compile as the cases come, one after the other")
    parser.add_argument("--compile-only", metavar="PART/OF", help="fill Triton's cache with this share, time nothing")
    args = parser.parse_args()
    if args.render is not None:
        write_part(DOCUMENT, args.render, render)
        return
    require_gpu()
    cases, start = [GMM_CASES[name] for name in args.cases], time.perf_counter()
    formats = [f for f in args.formats if describe(CUDA).lacks(FORMATS.get(f)) is None]
    if args.compile_only:
        compile_share(jobs_of(cases, formats), args.compile_only)
        return
    if not args.no_precompile:
        selection = ["--cases", *args.cases, "--formats", *formats]
        compile_in_parallel(selection, len(distinct(jobs_of(cases, formats))))
    machine = timing.measure_machine(CUDA, tuple(formats))
    rates = {"read_bandwidth": machine.bandwidth, "dense_rates": dict(machine.peaks)}
    out = Lines(args.output, **rates)
    left_out = []
    with timing.progress_bar("bench", len(cases)) as advance:
        for case in cases:
            if time.perf_counter() - start > args.limit:
                left_out.append(case.name)
                continue
            for line in run_case(case, formats, machine, args.seconds):
                out.add(**line)
                print(
                    f"{line['case']:24} {line['format']:5} {line['us']:8.1f} µs {line['tb_per_s']:5.2f} TB/s "
                    f"{line['tflops']:6.0f} TFLOP/s {line['of_floor']:5.0%} of floor {line['of_read']:5.0%} of read "
                    + (f"{line['of_dense']:5.0%} of dense " if "of_dense" in line else " " * 15)
                    + line["config"],
                    flush=True,
                )
            torch.cuda.empty_cache()
            advance(1)
    if left_out:
        print(f"time limit: not run: {', '.join(left_out)}", file=sys.stderr)
    if args.output and len(out.lines) > 1:
        picture = args.output.with_suffix(".svg")
        picture.write_text(gmm_report(out.lines[0], out.lines[1:]), encoding="utf-8")
        print(f"wrote {args.output} and {picture}")


if __name__ == "__main__":
    main()
