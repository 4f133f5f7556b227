"""Hold one result file against an earlier one of the same GPU; exit 1 if a case became slower.

    python bench/compare.py before.jsonl after.jsonl                 # more than 5 % slower in any case: exit 1
    python bench/compare.py before.jsonl after.jsonl --tolerance 2

Works on any result file whose lines have a time `us`: of bench/gmm.py, layer.py, launch_modes.py, overhead.py and
sweep.py. Lines are matched by everything that names what was run (case, format, launch …). Refused with exit 2: files
of different GPUs, or of different cases (--common compares what both have).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from common import read_lines

NAMES = ("case", "model", "routing", "T", "format", "rival", "launch", "measure", "fast_accum", "config")
"""What names a line. `config` only where one case was timed in several: what is picked may change between versions."""


def names_of(lines: list[dict[str, Any]]) -> tuple[str, ...]:
    """The fewest of NAMES that tell the lines apart."""
    for count in range(1, len(NAMES) + 1):
        found = {tuple(str(ln.get(n)) for n in NAMES[:count]) for ln in lines}
        if len(found) == len(lines):
            return NAMES[:count]
    raise SystemExit("error: two lines of one file describe the same run")


def keyed(lines: list[dict[str, Any]], names: tuple[str, ...]) -> dict[tuple[str, ...], float]:
    return {tuple(str(ln[n]) for n in names if n in ln): float(ln["us"]) for ln in lines}


def compare(
    before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float], tolerance: float
) -> tuple[str, list[str]]:
    """A table, and the names of what became slower by more than ``tolerance``."""
    width = max(len(" ".join(k)) for k in before)
    rows, slower, logs = [f"{'':{width}} {'before':>10} {'after':>10}  after/before"], [], []
    for key in before:
        ratio = after[key] / before[key]
        logs.append(math.log(ratio))
        mark = ""
        if not ratio <= 1 + tolerance:  # written so that a NaN fails
            mark = "  slower"
            slower.append(" ".join(key))
        elif ratio < 1 - tolerance:
            mark = "  faster"
        rows.append(f"{' '.join(key):{width}} {before[key]:>10.1f} {after[key]:>10.1f}  {ratio:6.3f}{mark}")
    rows.append(f"{'geometric mean':{width}} {'':>10} {'':>10}  {math.exp(sum(logs) / len(logs)):6.3f}")
    return "\n".join(rows), slower


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=5.0, metavar="PERCENT", help="slower than this fails (5)")
    parser.add_argument("--common", action="store_true", help="compare the cases that both files have")
    args = parser.parse_args(argv)
    heads, files = zip(*(read_lines(path) for path in (args.before, args.after)), strict=True)
    gpus = [head["environment"].get("device_name") for head in heads]
    if gpus[0] is None or gpus[0] != gpus[1]:
        print(f"error: times of different GPUs say nothing about the code: {gpus[0]} and {gpus[1]}", file=sys.stderr)
        return 2
    files = [[ln for ln in lines if "us" in ln] for lines in files]
    names = max((names_of(lines) for lines in files), key=len)
    before, after = (keyed(lines, names) for lines in files)
    both = [k for k in before if k in after]
    if (len(both), len(both)) != (len(before), len(after)) and not args.common:
        only = [[" ".join(k) for k in a if k not in b] for a, b in ((before, after), (after, before))]
        print(
            f"error: the files do not hold the same cases; only in the first: {', '.join(only[0]) or 'none'}; "
            f"only in the second: {', '.join(only[1]) or 'none'}. --common compares the rest.",
            file=sys.stderr,
        )
        return 2
    if not both:
        print("error: the files have no case in common", file=sys.stderr)
        return 2
    table, slower = compare({k: before[k] for k in both}, after, args.tolerance / 100)
    print(f"{gpus[0]}, µs: {args.before} -> {args.after}\n{table}")
    if slower:
        print(f"{len(slower)} slower by more than {args.tolerance:g} %: {', '.join(slower)}", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
