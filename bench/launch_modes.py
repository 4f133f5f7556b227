"""What balancing is worth: one grouped matmul with its tiles handed out in four ways, on even and skewed experts.

    python bench/launch_modes.py --output bench/results/launch_modes_h200.jsonl    # measure, plot; needs a GPU
    python bench/launch_modes.py --render bench/results/launch_modes_h200.jsonl    # write the table of docs/

`expert` is the article's first version (one program per expert), `queue` its dynamic task queue. Every output is
checked against the fp64 oracle before it is timed; the launches take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import (
    CUDA,
    DTYPES,
    Job,
    Lines,
    Loaded,
    arguments,
    compile_in_parallel,
    compile_share,
    distinct,
    median_us,
    problem_of,
    provenance,
    read_lines,
    require_gpu,
    write_part,
)
from plot import OTHERS, bars, document

from lowgmm import roofline, timing
from lowgmm.gpu import describe
from lowgmm.tile_config import LAUNCHES, Problem, TileConfig, supports
from lowgmm.tune import candidates, predict
from lowgmm.workloads import LAUNCH_CASES, GmmCase

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "launch_modes.md"
ARTICLE_QUEUE, WARPS = "queue, 32x64 tiles", "queue, warps specialised"
ORDER = (*("expert", "grid", "persistent", "queue"), ARTICLE_QUEUE, WARPS)


def configs(problem: Problem) -> dict[str, TileConfig]:
    """The best portable tile in each launch mode; for the queue also the article's 32x64 tile, and the best of the
    warp-specialised kernel, which always draws from a queue."""
    gpu = describe(CUDA)
    ranked = sorted(candidates(problem, gpu), key=lambda c: predict(problem, c, gpu))
    base = next((c for c in ranked if not c.warp_specialize), ranked[0].portable())
    per_sm = max(base.programs_per_sm, 2 if base.num_warps == 4 else 1)
    found = {launch: replace(base, launch=launch, programs_per_sm=per_sm) for launch in LAUNCHES}
    found[ARTICLE_QUEUE] = TileConfig(
        32, 64, 256 // problem.element_size, True, gpu.tma, launch="queue", programs_per_sm=4, num_stages=4
    )
    if special := [c for c in ranked if c.warp_specialize]:
        found[WARPS] = special[0]
    return {name: config for name, config in found.items() if supports(problem, config, gpu) is None}


def work(cases: Sequence[str], formats: Sequence[str]) -> list[tuple[GmmCase, str, dict[str, TileConfig]]]:
    return [(LAUNCH_CASES[c], f, configs(problem_of(LAUNCH_CASES[c], f))) for c in cases for f in formats]


def measure(args: argparse.Namespace) -> None:
    require_gpu()
    todo = work(args.cases, args.formats)
    jobs: list[Job] = [(format, config, case) for case, format, by in todo for config in by.values()]
    if args.compile_only:
        compile_share(jobs, args.compile_only)
        return
    compile_in_parallel(["--cases", *args.cases, "--formats", *args.formats], len(distinct(jobs)))
    machine = timing.measure_machine(CUDA, tuple(args.formats))
    out = Lines(args.output, read_bandwidth=machine.bandwidth, dense_rates=dict(machine.peaks))
    for case, format, by in todo:
        loaded = Loaded(case, format)
        rivals = [loaded.rival(name, config) for name, config in by.items()]
        for t in timing.interleave(rivals, CUDA, rounds=15, seconds=args.seconds):
            line = {"case": case.name, "format": format, "launch": t.name, "config": str(by[t.name]), **median_us(t)}
            out.add(**line)
            part = of_roof(out.lines[0], line)
            print(
                f"{case.name:17} {format:5} {t.name:20} {by[t.name]!s:42} {line['us']:8.1f} µs {part:4.0%}", flush=True
            )
        del loaded, rivals
        torch.cuda.empty_cache()
    if args.output:
        args.output.with_suffix(".svg").write_text(picture(out.lines[0], out.lines[1:]), encoding="utf-8")


def of_roof(head: dict[str, Any], line: dict[str, Any]) -> float:
    """Floor over time, by the rates that the file itself records."""
    rates = head.get("dense_rates", roofline.H200.peaks)
    machine = roofline.Machine(head["environment"]["device_name"], head["read_bandwidth"], rates)
    case = LAUNCH_CASES[line["case"]]
    load = roofline.Load(case.N, case.K, case.sizes, line["format"])
    return roofline.share_of_roof(load, machine, line["us"] * 1e-6)


def shown(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Lines by (case, format), then by launch, in the order of the cases."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for case in LAUNCH_CASES:
        for format in DTYPES:
            by = {ln["launch"]: ln for ln in lines if (ln["case"], ln["format"]) == (case, format)}
            if by:
                found[case, format] = by
    return found


def render(name: str, head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """The document's part that comes from a result file: a table, and what it says of the article's claim."""
    table = shown(lines)
    order = [launch for launch in ORDER if any(launch in by for by in table.values())]
    out = [
        f"{provenance(name, head['environment'])}. µs, and in brackets the share of the roof; the fastest is bold.",
        "",
        f"| sizes | format | {' | '.join(order)} |",
        f"|---|---|{'---|' * len(order)}",
    ]
    for (case, format), by in table.items():
        best, cells = min(ln["us"] for ln in by.values()), []
        for launch in order:
            if launch not in by:
                cells.append("–")
                continue
            ln = by[launch]
            cell = f"{ln['us']:.0f} ({of_roof(head, ln):.0%})"
            cells.append(f"**{cell}**" if ln["us"] == best else cell)
        out.append(f"| {case} | {format} | {' | '.join(cells)} |")
    claims = []
    for (case, format), by in table.items():
        if case == "article-skewed" and "expert" in by:
            launch, after = min(((n, ln) for n, ln in by.items() if n != "expert"), key=lambda item: item[1]["us"])
            parts = [f"{of_roof(head, ln):.0%}" for ln in (by["expert"], after)]
            claims.append(f"{format} from {parts[0]} (`expert`) to {parts[1]} (`{launch}`)")
    if claims:
        out += ["", f"On the article's skewed sizes, balancing takes us, in share of the roof: {'; '.join(claims)}."]
    return "\n".join(out)


def picture(head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """Share of the roof by launch, a panel per format."""
    panels, table = [], shown(lines)
    for format in DTYPES:
        groups = [case for case, f in table if f == format]
        if groups:
            series = {
                launch: [
                    100 * of_roof(head, table[c, format][launch]) if launch in table[c, format] else None
                    for c in groups
                ]
                for launch in ORDER
                if any(launch in table[c, format] for c in groups)
            }
            panels.append(
                bars(f"{format}: share of the roof by launch", groups, series, OTHERS[: len(series)], unit="%", top=100)
            )
    return document(1180, panels)


def main() -> None:
    parser = arguments(__doc__, DOCUMENT)
    parser.add_argument("--cases", nargs="*", default=list(LAUNCH_CASES), choices=list(LAUNCH_CASES), metavar="CASE")
    parser.add_argument("--formats", nargs="*", default=["int8", "fp8"], choices=list(DTYPES), metavar="FORMAT")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per case and format (2)")
    parser.add_argument("--compile-only", metavar="PART/OF", help="fill Triton's cache with this share, time nothing")
    args = parser.parse_args()
    if args.render is None:
        measure(args)
        return
    write_part(DOCUMENT, args.render, render)
    drawing = args.render.with_suffix(".svg")
    drawing.write_text(picture(*read_lines(args.render)), encoding="utf-8")
    print(f"wrote {drawing}")


if __name__ == "__main__":
    main()
