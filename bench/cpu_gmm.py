"""INT8 grouped matmul on a CPU against loops of torch's bf16 and fp32 matmuls, expert by expert.

    python bench/cpu_gmm.py --output bench/results/cpu_gmm.jsonl
    python bench/cpu_gmm.py --render bench/results/cpu_gmm_epyc_2cores.jsonl     # write the README's table

Weights come from memory (several times the last cache), and every output is checked before it is timed. A round times
each rival once, in random order, and one of them is a plain read of as many bytes as the INT8 weights have. Memory may
be twice as fast in one minute as in the next, for all rivals alike: so ratios, the share of the read among them, are
taken within each round, and what is reported is the median of the rounds' ratios with their 20th and 80th percentile.
A ratio of two medians may compare different minutes, and differs from the ratios in the last columns.

INT8 is timed twice: on quantised input, as an expert layer calls it that quantises each token once for all its experts,
and on bf16 input, quantising included. Run it on a quiet machine: a loop of many small parallel products waits for any
other process in each, so the cores that others had are recorded.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import provenance, read_lines, read_rival, rendered, write_lines
from torch import Tensor

import lowgmm
from lowgmm import cpu, environment, timing
from lowgmm.testing import judge

README = Path(__file__).resolve().parents[1] / "README.md"
SHAPES = ((2048, 64), (4096, 24))
"""N = K, and experts: 256 and 384 MiB of INT8 weights."""
TOKENS = (1, 4, 16, 64)
READ, INT8 = "read", ("int8 gmm", "int8 gmm of bf16")
OVER = {"x_bf16_loop": "bf16 loop", "x_fp32_loop": "fp32 loop", "share_of_read": READ}
"""Figure -> the rival whose time is divided by INT8's."""
CPU = torch.device("cpu")


def rivals(x: Tensor, w: Tensor, rows: int) -> list[timing.Rival]:
    experts, n_size = w.shape[:2]
    offsets = torch.arange(0, (experts + 1) * rows, rows)
    wide, narrow, packed = x.float(), w.to(torch.bfloat16), cpu.pack(lowgmm.quantize(w, "int8"))
    half, out = x.to(torch.bfloat16), torch.empty(len(x), n_size, dtype=torch.bfloat16)
    exact = {
        "fp32": lowgmm.reference.gmm(wide, w, expert_offsets=offsets),
        "bf16": lowgmm.reference.gmm(half, narrow, expert_offsets=offsets),
    }
    xq, scales = lowgmm.quantize_tokens(half, "int8")
    exact_int8 = lowgmm.reference.gmm(xq, packed, scales, expert_offsets=offsets)

    def loop(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
        y = torch.empty(len(a), n_size, dtype=a.dtype)
        parts = [(a[e * rows : (e + 1) * rows], b[e].T, y[e * rows : (e + 1) * rows]) for e in range(experts)]

        def call() -> Tensor:
            for left, right, result in parts:
                torch.mm(left, right, out=result)
            return y

        return call

    def checker(want: Tensor) -> Callable[[int, Tensor], None]:
        def check(_: int, y: Tensor) -> None:
            verdict = judge(y, want, want.to(y.dtype))
            assert verdict.ok, str(verdict)

        return check

    return [
        read_rival(READ, experts * n_size * w.shape[2], CPU),
        timing.Rival("fp32 loop", [loop(wide, w)], checker(exact["fp32"])),
        timing.Rival("bf16 loop", [loop(half, narrow)], checker(exact["bf16"])),
        timing.Rival(
            INT8[0],
            [lambda: lowgmm.gmm(xq, packed, scales, expert_offsets=offsets, output=out)],
            checker(exact_int8),
        ),
        timing.Rival(
            INT8[1],
            [lambda: lowgmm.gmm(half, packed, expert_offsets=offsets, output=out)],
            checker(exact_int8),
        ),
    ]


def summary(timings: Sequence[timing.Timing], experts: int) -> dict[str, Any]:
    """Figures of a case as data: µs an expert, and INT8's ratios, each the median of the rounds' own."""
    t = {one.name: one for one in timings}
    us = {name: asdict(timing.spread([s / experts * 1e6 for s in one.samples])) for name, one in t.items()}
    ratios = {
        figure: {name: asdict(timing.paired(t[rival].samples, t[name].samples)) for name in INT8}
        for figure, rival in OVER.items()
    }
    return {"rounds": timings[0].rounds, "us_per_expert": us, **ratios}


def render(name: str, head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """The README's table."""
    env = head["environment"]
    out = [
        provenance(name, env, env["cpu"], f"{env['threads']} threads", f"torch {env['torch']}") + ".",
        "",
        "| N = K | tokens per expert | µs per expert | × bf16 loop | × fp32 loop | of a plain read of the weights |",
        "|---|---|---|---|---|---|",
    ]
    for ln in lines:
        bf16, fp32, read = (ln[figure][INT8[0]] for figure in OVER)
        cells = [str(ln["N"]), str(ln["tokens_per_expert"]), f"{ln['us_per_expert'][INT8[0]]['median']:.0f}"]
        cells += [f"{r['median']:.2f} ({r['p20']:.2f} – {r['p80']:.2f})" for r in (bf16, fp32)]
        cells += [f"{read['median']:.0%} ({read['p20']:.0%} – {read['p80']:.0%})"]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


class Others:
    """How many cores other processes (and, on a virtual machine, other machines) have had since this object was made,
    on average: what a quiet machine is, measured beside the rivals. None where the system does not say."""

    def __init__(self) -> None:
        self.start = self._now()

    def cores(self) -> float | None:
        if self.start is None or (now := self._now()) is None:
            return None
        busy, own, clock = (b - a for a, b in zip(self.start, now, strict=True))
        return (busy - own) / clock

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds of all cores' work, of this process's, and of the clock."""
        try:
            ticks = [int(v) for v in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return None
        busy = sum(ticks) - ticks[3] - ticks[4]  # idle, and idle while a disk works
        return busy / os.sysconf("SC_CLK_TCK"), time.process_time(), time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="JSONL file to write")
    what.add_argument("--render", type=Path, metavar="FILE", help="write the README's table from this result file")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing per case (20)")
    args = parser.parse_args()
    if args.render is not None:
        part = render(args.render.name, *read_lines(args.render))
        README.write_text(rendered(README.read_text(encoding="utf-8"), part, Path(__file__).name), encoding="utf-8")
        return
    lines: list[dict[str, Any]] = [{"environment": environment.record(CPU), "int8": cpu.int8_backend()}]
    print("µs per expert, median; ratios: median of the rounds' own (20th – 80th percentile)")
    print(f"{'N=K':>5} {'tokens':>6} {'rounds':>6} {'read GB/s':>9} {'INT8 of':>9} {'µs':>6}", *OVER)
    for size, experts in SHAPES:
        g = torch.Generator().manual_seed(0)
        w = torch.randn(experts, size, size, generator=g) * size**-0.5
        for rows in TOKENS:
            x = torch.randn(experts * rows, size, generator=g)
            entrants, others = rivals(x, w, rows), Others()
            timings = timing.interleave(entrants, CPU, rounds=10**6, seconds=args.seconds)
            line = {"N": size, "K": size, "E": experts, "tokens_per_expert": rows, "cores_of_others": others.cores()}
            line |= summary(timings, experts)
            lines.append(line)
            rate = size * size / line["us_per_expert"][READ]["median"] / 1e3
            for name in INT8:
                figures = [line[figure][name] for figure in OVER]
                ratios = [f"{r['median']:.3f} ({r['p20']:.3f} – {r['p80']:.3f})" for r in figures]
                us = line["us_per_expert"][name]["median"]
                print(
                    f"{size:>5} {rows:>6} {line['rounds']:>6} {rate:>9.1f} {name[9:] or 'int8':>9} {us:>6.0f}", *ratios
                )
            print(f"{'':>12} cores that other processes had: {line['cores_of_others'] or 0:.2f}", flush=True)
    write_lines(args.output, lines)


if __name__ == "__main__":
    main()
