"""Ours beside other libraries', in one run: the harness's results as data, and tables of documents from them.

    python bench/rivals.py peers.json --environment sweep.jsonl --output bench/results/rivals_h200.jsonl
    python bench/rivals.py peers.json --kind layer --environment sweep.jsonl --output …/rivals_layer_h200.jsonl
    python bench/rivals.py --render bench/results

The harness itself is outside this repository (bench/peers_adapter.py tells it how to call us). It checks every output
before it times it: replays of a CUDA graph over rotating weight sets, `us` sustained (from 80 to 200 ms of work),
`us_burst` the first 15 ms after a pause, where the two differ because the GPU runs into its power limit.
`--environment` is any result file of the same machine and commit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rivals_layer
from common import geomean, provenance, read_lines, rendered, write_lines
from rivals_layer import OURS

from lowgmm.workloads import GMM_CASES

DOCUMENT = Path(__file__).parent.parent / "docs" / "rivals.md"
README = Path(__file__).parent.parent / "README.md"
PRODUCTS = "rivals_h200.jsonl"
"""Grouped matmuls in the document."""
LAYERS = ("rivals_layer_8bit_h200.jsonl", "rivals_layer_h200.jsonl")
"""Expert layers in the document (bench/rivals_layer.py); the README's are the first."""
EIGHT_BIT = ("int8", "fp8", "fp8blk", "dg")
"""What the harness calls operands of 8 bits: per channel, in blocks of 128, and DeepGEMM's."""
NAMES = dict(
    zip(
        (
            *("S1 seed dec", "S2 E32 64", "S3 skew", "S4 16", "S4 128", "S5 mixtral pre"),
            *(f"S6 qwen {part} {rows}" for part in ("up", "down") for rows in (4, 64, 512)),
            *(f"S7 dsv3 {part} {rows}" for part in ("up", "down") for rows in (4, 32, 256, 1024)),
            "S8 gptoss 16",
        ),
        GMM_CASES,
        strict=True,
    )
)
"""The harness's names of our cases."""
VERSIONS = ("torch", "triton", "cuda", "vllm", "deep_gemm", "date")


def convert(data: dict[str, Any], environment: dict[str, Any], kind: str = "gemm") -> list[dict[str, Any]]:
    """A result file of ours from the harness's: the head, and a line per case and rival."""
    found = [r for r in data["results"] if r["kind"] == kind]
    if not found:
        raise SystemExit(f"no results of kind {kind}")
    lines = {"gemm": convert_gmm, "layer": rivals_layer.convert}[kind](found)
    versions = {name: data["meta"][name] for name in VERSIONS if name in data["meta"]}
    return [{"environment": environment, "rivals": versions, "failures": data["errors"]}, *lines]


def convert_gmm(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Grouped matmuls; raw accumulators without scales are no rival."""
    found = [r for r in results if "raw" not in r["peer"]]
    if unknown := {r["case"] for r in found} - set(NAMES):
        raise SystemExit(f"not one of our cases: {', '.join(sorted(unknown))}")
    lines = []
    for r in found:
        case = GMM_CASES[NAMES[r["case"]]]
        assert (r["E"], r["M"], r["N"], r["K"]) == (case.E, case.M, case.N, case.K), f"{r['case']} is not {case.name}"
        line = {"case": case.name, "rival": r["peer"].removeprefix("ours "), "format": r["dt"]}
        times = {"us": round(r["us"], 2), "us_burst": round(r.get("us_burst") or r["us"], 2)}
        lines.append({**line, **times, "tflops": round(r["tflops"], 1), "relative_error": r["err"]})
    return lines


def heading(name: str, head: dict[str, Any]) -> str:
    versions = head["rivals"]
    shown = {"torch": "torch", "Triton": "triton", "vLLM": "vllm", "DeepGEMM": "deep_gemm"}
    machine = (head["environment"]["device_name"], *(f"{word} {versions[key]}" for word, key in shown.items()))
    return f"{provenance(name, head['environment'], *machine)}. "


COLUMNS = ((("int8", "fp8"), EIGHT_BIT), (("bf16",), ("bf16",)))
"""Ours, and the rivals that they are held against."""


def render(name: str, head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """A run's table, and its means."""
    out = [
        f"{heading(name, head)}µs sustained; × is the rival's time by ours, sustained / burst.",
        "",
        "| case | fastest 8-bit rival | INT8 | FP8 | fastest bf16 rival | bf16 |",
        "|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {}
    for case in (c for c in GMM_CASES if any(ln["case"] == c for ln in lines)):
        of_case = [ln for ln in lines if ln["case"] == case]
        ours = {ln["format"]: ln for ln in of_case if ln["rival"].startswith(OURS)}
        rivals = [ln for ln in of_case if not ln["rival"].startswith(OURS)]
        cells = [case]
        for formats, theirs in COLUMNS:
            of_type = [ln for ln in rivals if ln["format"] in theirs]
            best = min(of_type, key=lambda ln: ln["us"])
            burst = min(ln["us_burst"] for ln in of_type)
            cells.append(f"{best['us']:.1f} {best['rival']}")
            for format in formats:
                mine = ours[format]
                pair = (best["us"] / mine["us"], burst / mine["us_burst"])
                cells.append(f"{mine['us']:.1f} ({pair[0]:.2f}× / {pair[1]:.2f}×)")
                for key, value in zip((format, f"{format}, burst"), pair, strict=True):
                    ratios.setdefault(key, []).append(value)
        own_type = min(ln["us"] for ln in rivals if ln["format"] == "int8")
        ratios.setdefault("int8 against INT8 rivals only", []).append(own_type / ours["int8"]["us"])
        out.append(f"| {' | '.join(cells)} |")
    out += ["", "| ours, against the fastest rival of each case | geometric mean | least |", "|---|---|---|"]
    out += [f"| {key} | {geomean(v):.3f}× | {min(v):.3f}× |" for key, v in ratios.items()]
    return "\n".join(out)


README_ROWS = {
    "DeepSeek-V3 gate/up, 32 experts, 4 tokens each": "deepseek-v3-gate-up-4",
    "… 32 tokens each": "deepseek-v3-gate-up-32",
    "… 256 tokens each": "deepseek-v3-gate-up-256",
    "… 1024 tokens each": "deepseek-v3-gate-up-1024",
    "Qwen3-30B down, 128 experts, 64 tokens each": "qwen3-down-64",
    "Qwen3-30B gate/up, 512 tokens each": "qwen3-gate-up-512",
    "Mixtral gate/up, 8 experts, 2048 tokens each": "mixtral-prefill",
    "GPT-OSS-120B gate/up (N=5760, K=2880), 16 tokens each": "gpt-oss-16",
}
"""Rows of the README's table."""
WORDS = {
    "vllm triton best6": "vLLM Triton, tuned",
    "vllm triton": "vLLM Triton",
    "vllm cutlass": "vLLM CUTLASS",
    "deepgemm": "DeepGEMM",
    "loop cutlass_scaled_mm int8": "loop of CUTLASS INT8",
    "loop mm": "loop of matmuls",
    "F.grouped_mm": "`grouped_mm`",
}
"""What the README calls a rival, by how its name begins; the first that fits."""


def headline(lines: Sequence[dict[str, Any]]) -> str:
    """The README's part: a sentence on each format, and a few cases."""
    ratios: dict[str, list[float]] = {"int8": [], "fp8": []}
    cells: dict[str, list[str]] = {}
    for case in dict.fromkeys(ln["case"] for ln in lines):
        of_case = [ln for ln in lines if ln["case"] == case]
        cells[case] = []
        for formats, theirs in COLUMNS:
            others = (ln for ln in of_case if ln["format"] in theirs and not ln["rival"].startswith(OURS))
            best = min(others, key=lambda ln: ln["us"])
            for format in formats:
                us = next(ln["us"] for ln in of_case if ln["rival"] == f"{OURS}_{format}")
                cells[case].append(f"{us:.0f}")
                if format in ratios:
                    ratios[format].append(best["us"] / us)
            name = next(word for start, word in WORDS.items() if best["rival"].startswith(start))
            cells[case].append(f"{best['us']:.0f} {name}")
    said = [rivals_layer.said_of(format, found, "cases") for format, found in ratios.items()]
    head = ["µs", "INT8", "FP8", "fastest 8-bit rival", "bf16", "fastest bf16 rival"]
    rows = [[label, *cells[case]] for label, case in README_ROWS.items()]
    return "\n\n".join(["\n".join(said), rivals_layer.table(head, *rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="JSON that the harness wrote")
    parser.add_argument("--environment", type=Path, metavar="FILE", help="a JSONL file of ours from the same machine")
    parser.add_argument("--kind", choices=("gemm", "layer"), default="gemm", help="which of its results")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSONL file to write")
    parser.add_argument(
        "--render", type=Path, metavar="FOLDER", help="write the documents' tables from the files there"
    )
    args = parser.parse_args()
    if args.render is None:
        if not (args.results and args.environment and args.output):
            parser.error("give RESULTS, --environment and --output, or --render")
        data = json.loads(args.results.read_text(encoding="utf-8"))
        write_lines(args.output, convert(data, read_lines(args.environment)[0]["environment"], args.kind))
        return
    for path, text in documents(args.render).items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


def documents(folder: Path) -> dict[Path, str]:
    """The texts of docs/rivals.md and the README, with their tables from the files in ``folder``."""
    text = DOCUMENT.read_text(encoding="utf-8")
    text = rendered(text, render(PRODUCTS, *read_lines(folder / PRODUCTS)), f"rivals.py from {PRODUCTS}")
    for name in LAYERS:
        head, lines = read_lines(folder / name)
        part = f"{heading(name, head)}µs; × is the rival's time by ours.\n\n{rivals_layer.render(lines)}"
        text = rendered(text, part, f"rivals.py from {name}")
    readme = README.read_text(encoding="utf-8")
    for name, part_of in ((PRODUCTS, headline), (LAYERS[0], rivals_layer.headline)):
        readme = rendered(readme, part_of(read_lines(folder / name)[1]), f"rivals.py from {name}")
    return {DOCUMENT: text, README: readme}


if __name__ == "__main__":
    main()
