"""What FP8's two ways to add cost: error and time with sums promoted to FP32 every 128 of K, and with `fast_accum`.

    python bench/accumulation.py --output bench/results/accumulation_h200.jsonl
    python bench/accumulation.py --render bench/results/accumulation_h200.jsonl

The error is relative to the fp64 product of the same FP8 operands (Frobenius norm; and the worst element over the
largest value), so it is the kernel's alone. The two take turns. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import CUDA, Lines, Loaded, arguments, median_us, provenance, require_gpu, write_part
from torch import Tensor

import lowgmm
from lowgmm import timing
from lowgmm.workloads import GMM_CASES, even

DOCUMENT = Path(__file__).parent.parent / "docs" / "accumulation.md"
CASES = [
    *(even(f"K={k}", 4, 512, k, 256) for k in (256, 1024, 4096, 16384)),
    *(GMM_CASES[n] for n in ("qwen3-gate-up-512", "deepseek-v3-down-256", "deepseek-v3-gate-up-1024")),
]


def measure(args: argparse.Namespace) -> None:
    require_gpu()
    out = Lines(args.output)
    for case in CASES:
        loaded = Loaded(case, "fp8")

        def call(w: Any, fast: bool, loaded: Loaded = loaded) -> Tensor:
            o = loaded.operands
            return lowgmm.gmm(o.x, w, o.scales_x, expert_offsets=loaded.offsets, fast_accum=fast)

        def errors(fast: bool, loaded: Loaded = loaded) -> dict[str, float]:
            o, exact = loaded.operands, loaded.exact
            y = lowgmm.gmm(
                o.x, o.weights, o.scales_x, expert_offsets=loaded.offsets, fast_accum=fast, out_dtype=torch.float32
            )
            off = y.double() - exact
            return {"error": float(off.norm() / exact.norm()), "worst": float(off.abs().max() / exact.abs().max())}

        found = {fast: errors(fast) for fast in (False, True)}

        def check(_: int, y: Tensor, fast: bool, exact: Tensor = loaded.exact, found: dict[bool, Any] = found) -> None:
            error = float((y.double() - exact).norm() / exact.norm())
            assert error < 2 * found[fast]["error"] + 2.0**-8, f"error {error:.2e} with fast_accum={fast}"

        rivals = [
            timing.Rival(str(fast), [partial(call, w, fast) for w in loaded.weights], partial(check, fast=fast))
            for fast in (False, True)
        ]
        for fast, t in zip(
            (False, True), timing.interleave(rivals, CUDA, rounds=15, seconds=args.seconds), strict=True
        ):
            line = out.add(case=case.name, K=case.K, fast_accum=fast, **found[fast], **median_us(t))
            print(f"{case.name:26} fast_accum={fast!s:5} {line['us']:8.1f} µs, error {line['error']:.2e}", flush=True)
        torch.cuda.empty_cache()


def render(name: str, head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    out = [
        f"{provenance(name, head['environment'])}.",
        "",
        "| case | K | error promoted | error fast | worst element promoted | worst fast | µs promoted | µs fast |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for slow, fast in zip(lines[::2], lines[1::2], strict=True):
        assert slow["case"] == fast["case"]
        errors = [f"{ln[key]:.1e}" for key in ("error", "worst") for ln in (slow, fast)]
        out.append(f"| {slow['case']} | {slow['K']} | {' | '.join(errors)} | {slow['us']:.1f} | {fast['us']:.1f} |")
    return "\n".join(out)


def main() -> None:
    parser = arguments(__doc__, DOCUMENT)
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing per case (1)")
    args = parser.parse_args()
    if args.render is None:
        measure(args)
        return
    write_part(DOCUMENT, args.render, render)


if __name__ == "__main__":
    main()
