"""4-bit weights on a GPU beside INT8 and a plain read of as many bytes, each output checked.

    python bench/int4.py --output bench/results/int4_h200.jsonl
    python bench/int4.py --render bench/results/int4_h200.jsonl

A case's formats take turns. INT8 activations in all of them; their order in front of 4-bit weights is part of the time.
Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    CUDA,
    Lines,
    Loaded,
    arguments,
    compile_in_parallel,
    compile_share,
    distinct,
    jobs_of,
    median_us,
    provenance,
    read_rival,
    require_gpu,
    write_part,
)

from lowgmm import timing
from lowgmm.formats import INT4, INT4_GROUPED
from lowgmm.workloads import GMM_CASES, even

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "int4.md"
FORMATS = ("int8", *(f.name for f in (INT4, *reversed(INT4_GROUPED))))
CASES = [
    *(even(f"article shape, {rows}", 64, 2048, 4096, rows) for rows in (1, 4, 16, 32, 64, 128, 256)),
    *(GMM_CASES[n] for n in ("qwen3-gate-up-4", "qwen3-gate-up-64", "deepseek-v3-gate-up-4", "deepseek-v3-gate-up-32")),
]


def measure(args: argparse.Namespace) -> None:
    require_gpu()
    jobs = jobs_of(CASES, FORMATS)
    if args.compile_only:
        compile_share(jobs, args.compile_only)
        return
    compile_in_parallel([], len(distinct(jobs)))
    out = Lines(args.output)
    for case in CASES:
        loaded = {f: Loaded(case, f) for f in FORMATS}
        rivals = [loaded[f].rival(f) for f in FORMATS] + [read_rival("read", case.E * case.N * case.K // 2)]
        for t in timing.interleave(rivals, CUDA, rounds=15, seconds=args.seconds):
            line = out.add(case=case.name, E=case.E, M=case.M, N=case.N, K=case.K, format=t.name, **median_us(t))
            print(f"{case.name:24} {t.name:10} {line['us']:8.1f} µs", flush=True)
        del loaded, rivals
        torch.cuda.empty_cache()


def render(name: str, head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """A row per case: times, and in brackets how many times faster than INT8."""
    columns = [*FORMATS, "read"]
    titles = ["int8", *(f"`{f}`" for f in FORMATS[1:]), "reading 4 bits per weight"]
    out = [
        f"{provenance(name, head['environment'])}; µs, and how many times faster than INT8.",
        "",
        f"| case, tokens per expert | {' | '.join(titles)} |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for i in range(0, len(lines), len(columns)):
        row = lines[i : i + len(columns)]
        assert [ln["format"] for ln in row] == columns
        assert len({ln["case"] for ln in row}) == 1
        int8 = row[0]["us"]
        faster = ["", *(f" ({int8 / ln['us']:.2f}×)" for ln in row[1:-1]), ""]
        cells = [f"{ln['us']:.0f}{text}" for ln, text in zip(row, faster, strict=True)]
        out.append(f"| {row[0]['case']} | {' | '.join(cells)} |")
    return "\n".join(out)


def main() -> None:
    parser = arguments(__doc__, DOCUMENT)
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing per case (1)")
    parser.add_argument("--compile-only", metavar="PART/OF", help="fill Triton's cache with this share, time nothing")
    args = parser.parse_args()
    if args.render is None:
        measure(args)
        return
    write_part(DOCUMENT, args.render, render)


if __name__ == "__main__":
    main()
