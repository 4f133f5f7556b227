"""INT8 grouped matmul on a CPU against loops of torch's bf16 and fp32 matmuls, expert by expert.

    python bench/cpu_gmm.py --output bench/results/cpu_gmm.jsonl

Weights come from memory (several times the last cache), every output is checked before it is timed, rivals take turns,
and the read bandwidth that the last column divides by is measured in the same run. INT8 is timed twice: on quantised
input, as an expert layer calls it that quantises each token once for all its experts, and on bf16 input, quantising
included. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import lowgmm
from lowgmm import cpu, environment, timing
from lowgmm.testing import judge

SHAPES = ((2048, 64), (4096, 24))
"""N = K, and experts: 256 and 384 MiB of INT8 weights."""
TOKENS = (1, 4, 16, 64)


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
        timing.Rival("fp32 loop", [loop(wide, w)], checker(exact["fp32"])),
        timing.Rival("bf16 loop", [loop(half, narrow)], checker(exact["bf16"])),
        timing.Rival(
            "int8 gmm",
            [lambda: lowgmm.gmm(xq, packed, scales, expert_offsets=offsets, output=out)],
            checker(exact_int8),
        ),
        timing.Rival(
            "int8 gmm of bf16",
            [lambda: lowgmm.gmm(half, packed, expert_offsets=offsets, output=out)],
            checker(exact_int8),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args()
    device = torch.device("cpu")
    lines = [json.dumps({"environment": environment.record(device), "int8": cpu.int8_backend()})]
    columns = f"{'N=K':>5} {'tokens':>6} {'fp32 µs':>9} {'bf16 µs':>9} {'int8 µs':>9} {'of bf16':>9}"
    columns += f" {'x fp32':>7} {'x bf16':>7}"
    print(f"{columns} {'GB/s':>6} of read")
    for size, experts in SHAPES:
        g = torch.Generator().manual_seed(0)
        w = torch.randn(experts, size, size, generator=g) * size**-0.5
        for rows in TOKENS:
            x = torch.randn(experts * rows, size, generator=g)
            before = timing.read_bandwidth(device)
            t = {r.name: r for r in timing.interleave(rivals(x, w, rows), device, rounds=15, seconds=10)}
            read = statistics.mean([before, timing.read_bandwidth(device)])
            each = {name: r.median_s / experts * 1e6 for name, r in t.items()}
            rate = size * size / each["int8 gmm"] * 1e6
            line = {"N": size, "K": size, "E": experts, "tokens_per_expert": rows, "read_gb_per_s": read / 1e9}
            line |= {"us_per_expert": each, "int8_gb_per_s": rate / 1e9, "int8_share_of_read": rate / read}
            line |= {f"x_{name[:4]}": each[name] / each["int8 gmm"] for name in ("fp32 loop", "bf16 loop")}
            line |= {"p20_p80_us": {n: [r.p20_s / experts * 1e6, r.p80_s / experts * 1e6] for n, r in t.items()}}
            lines.append(json.dumps(line))
            print(
                f"{size:>5} {rows:>6} {each['fp32 loop']:>9.0f} {each['bf16 loop']:>9.0f} {each['int8 gmm']:>9.0f} "
                f"{each['int8 gmm of bf16']:>9.0f} "
                f"{line['x_fp32']:>7.2f} {line['x_bf16']:>7.2f} {rate / 1e9:>6.1f} {rate / read:>6.0%}",
                flush=True,
            )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
