"""What each format of the experts costs the shipped model in accuracy: README's table.

    python bench/fidelity.py --output bench/results/fidelity_h200.jsonl
    python bench/fidelity.py --render bench/results/fidelity_h200.jsonl

The audit of ``lowgmm demo``, of every format that a model can ask for by name, on as many tokens; where there is a
GPU, there.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Lines, arguments, provenance, write_part

from lowgmm import demo, evaluate, timing

DOCUMENT = Path(__file__).resolve().parents[1] / "README.md"
NAMES = {
    **demo.IMPLEMENTATIONS,
    "INT4 in groups of 32 (`int4_g32`)": "lowgmm_int4_g32",
    "INT4, one scale per channel (`int4`)": "lowgmm_int4",
}


def measure(args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with demo.full_fp32():
        model, tokenizer, folder = demo.load(demo.Options(device=device))
        windows = demo.held_out(folder, tokenizer, demo.Options.tokens, device)
        with timing.progress_bar("audit", len(windows) * (1 + len(NAMES))) as step:
            found = evaluate.audit(model, windows, list(NAMES.values()), reference=demo.REFERENCE, progress=step)
    facts = {"tokens": found.tokens, "perplexity": found.perplexity, "near_tie": evaluate.NEAR_TIE}
    out = Lines(args.output, device, **facts)
    for r in found.results:
        print(out.add(**dataclasses.asdict(r)), flush=True)


def render(name: str, head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    out = [
        f"{provenance(name, head['environment'])}; {head['tokens']:,} held-out tokens.",
        "",
        "| experts | perplexity | routed experts equal | expert sets equal | logits cosine, mean (worst token) |",
        "|---|---|---|---|---|",
    ]
    for (shown, expected), r in zip(NAMES.items(), lines, strict=True):
        assert r["name"] == expected
        change, equal = f"{r['perplexity_change']:+.3%}", [f"{r[k]:.2%}" for k in ("experts_matched", "sets_matched")]
        cells = [c.replace("-", "−").replace("%", " %") for c in (change, *equal)]
        out.append(f"| {shown} | {' | '.join(cells)} | {r['cosine_mean']:.5f} ({r['cosine_worst']:.3f}) |")
    return "\n".join(out)


def main() -> None:
    parser = arguments(__doc__, DOCUMENT)
    args = parser.parse_args()
    if args.render is None:
        measure(args)
        return
    write_part(DOCUMENT, args.render, render)


if __name__ == "__main__":
    main()
