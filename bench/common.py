"""What the benchmarks share: operands, rivals, parallel compiling, and results as JSON lines."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowgmm
from lowgmm import environment, native, timing
from lowgmm.formats import FORMATS, QuantTensor
from lowgmm.gpu import describe
from lowgmm.testing import Operands, draw_operands, judge
from lowgmm.tile_config import Problem, TileConfig
from lowgmm.tune import pick
from lowgmm.workloads import GmmCase

CUDA = torch.device("cuda")
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
OUT = torch.bfloat16


def require_gpu() -> None:
    """Leave with a clear message where there is nothing to measure."""
    if not torch.cuda.is_available():
        print(
            f"{Path(sys.argv[0]).name}: torch sees no CUDA GPU on this machine, and this benchmark measures one. "
            f"On a CPU run: python bench/cpu_gmm.py --output FILE",
            file=sys.stderr,
        )
        raise SystemExit(2)


def problem_of(case: GmmCase, format: str) -> Problem:
    return Problem.of(case.E, case.M, case.N, case.K, format, OUT)


def operands_of(case: GmmCase, format: str) -> Operands:
    name = format if format in FORMATS else str(DTYPES[format]).removeprefix("torch.")
    return draw_operands(case.sizes, case.N, case.K, name, device=CUDA)


class Loaded:
    """A case on the GPU in one format: rotating copies of the weights, the oracle, and rivals made from them."""

    def __init__(self, case: GmmCase, format: str) -> None:
        first = operands_of(case, format)
        copies = timing.weight_sets(first.w.numel() * problem_of(case, format).weight_size, CUDA)
        self.weights = [first.weights, *(replace(first, w=first.w.clone()).weights for _ in range(copies - 1))]
        self.operands, self.offsets = first, first.offsets
        self.exact, self.baseline = first.exact(), first.baseline(OUT)

    def rival(self, name: str, config: TileConfig | None = None) -> timing.Rival:
        """``gmm`` with a configuration, or with what is picked; every output is checked against the fp64 oracle."""
        return timing.Rival(name, [partial(self._call, w, config) for w in self.weights], self._check)

    def _call(self, w: Tensor | QuantTensor, config: TileConfig | None) -> Tensor:
        x, scales = self.operands.x, self.operands.scales_x
        return lowgmm.gmm(x, w, scales, expert_offsets=self.offsets, out_dtype=OUT, config=config, impl="triton")

    def _check(self, _: int, y: Tensor) -> None:
        verdict = judge(y, self.exact, self.baseline)
        assert verdict.ok, str(verdict)


def read_rival(name: str, size: int, device: torch.device | None = None) -> timing.Rival:
    """Reading ``size`` bytes and nothing else: the ceiling of anything that has to. On the GPU by default."""
    device, words = device or CUDA, max(1, size // 8)
    buffers = [torch.empty(words, dtype=torch.int64, device=device) for _ in range(timing.weight_sets(size, device))]
    for i, buffer in enumerate(buffers):
        if device.type == "cpu":
            native.advise_huge_pages(buffer)  # as the library's own weights have them
        torch.arange(i, i + words, out=buffer)

    def check(index: int, total: Tensor) -> None:
        want = words * (words - 1) // 2 + index * words
        assert int(total) == want, f"sum is {int(total)}, expected {want}"

    return timing.Rival(name, [b.sum for b in buffers], check)


def compile_once(format: str, config: TileConfig, case: GmmCase) -> None:
    """Fill Triton's cache: run ``config`` on the case's N and K with a row for each of its experts."""
    o = operands_of(GmmCase(case.name, case.N, case.K, (1,) * case.E), format)
    lowgmm.gmm(o.x, o.weights, o.scales_x, expert_offsets=o.offsets, out_dtype=OUT, config=config, impl="triton")
    torch.cuda.synchronize()


Job = tuple[str, TileConfig, GmmCase]


def distinct(jobs: Sequence[Job]) -> list[Job]:
    """One job per thing to compile (the number of experts decides the width of the kernel's table of tiles)."""
    seen = {(f, c, case.K % c.block_k == 0, case.E.bit_length(), case.N % 16): (f, c, case) for f, c, case in jobs}
    return list(seen.values())


def compile_in_parallel(arguments: Sequence[str], jobs: int) -> None:
    """Run this script several times at once with ``--compile-only PART/OF``: Triton compiles on one core each."""
    parts = max(1, min(jobs, 8, (os.cpu_count() or 1) - 1))
    print(f"compiling up to {jobs} kernels in {parts} processes …", file=sys.stderr, flush=True)
    running = [
        subprocess.Popen([sys.executable, sys.argv[0], *arguments, "--compile-only", f"{part}/{parts}"])
        for part in range(parts)
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit("compiling failed; the messages are above")


def jobs_of(cases: Sequence[GmmCase], formats: Sequence[str]) -> list[Job]:
    """What is picked, for every case and format."""
    gpu = describe(CUDA)
    return [(f, pick(problem_of(case, f), gpu), case) for case in cases for f in formats]


def share(jobs: Sequence[Job], text: str) -> Iterator[Job]:
    """The jobs of PART/OF."""
    part, of = (int(v) for v in text.split("/"))
    yield from distinct(jobs)[part::of]


def compile_share(jobs: Sequence[Job], text: str) -> None:
    """What a script that :func:`compile_in_parallel` has started does."""
    for format, config, case in share(jobs, text):
        compile_once(format, config, case)


def _named(argument: str) -> str:
    """A file elsewhere by its name alone: results are published, the machine's folders are not."""
    return Path(argument).name if Path(argument).is_absolute() else argument


class Lines:
    """A JSONL file of an environment and results, complete after every line."""

    def __init__(self, path: Path | None, device: torch.device = CUDA, **facts: Any) -> None:
        self.path = path
        command = " ".join(["python", *map(_named, sys.argv)])
        self.lines = [{"environment": environment.record(device), "command": command, **facts}]
        self._write()

    def add(self, **line: Any) -> dict[str, Any]:
        self.lines.append(line)
        self._write()
        return line

    def _write(self) -> None:
        if self.path is not None:
            write_lines(self.path, self.lines)


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """All of a result file, or nothing of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_suffix(".partial")
    partial_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial_file.replace(path)


def read_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The head of a result file, and its results; a file that is none ends the program with the reason."""
    try:
        head, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        assert "environment" in head
    except (OSError, ValueError, AssertionError, TypeError) as error:
        raise SystemExit(f"{path}: not a result file of these benchmarks ({error or 'no environment'})") from error
    return head, lines


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def median_us(t: timing.Timing) -> dict[str, Any]:
    return {"us": t.median_s * 1e6, "p20": t.p20_s * 1e6, "p80": t.p80_s * 1e6, "rounds": t.rounds, "method": t.method}


def provenance(name: str, environment: dict[str, Any], *machine: str) -> str:
    """What a rendered table begins with: the machine, by default a GPU and its software; the commit, with the mark of a
    checkout that had changes; the file."""
    shown = machine or (
        environment["device_name"],
        f"torch {environment['torch']}",
        f"Triton {environment['triton']}",
    )
    commit = environment.get("commit", "unknown")
    return f"{', '.join(shown)}, commit {commit[:12]}{commit[40:]}, `bench/results/{name}`"


def rendered(text: str, part: str, script: str) -> str:
    """A document with ``part`` between the two marks of what ``script`` renders."""
    start, end = (f"<!-- rendered by bench/{script}: {word} -->" for word in ("start", "end"))
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"expected the marks {start} and {end} once")
    return pattern.sub(lambda _: f"{start}\n{part}\n{end}", text)


def arguments(description: str | None, document: Path) -> argparse.ArgumentParser:
    """The parser of a script that measures into a result file, or writes a document's part from one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--render", type=Path, metavar="FILE", help=f"write {document.name} from this result file")
    return parser


def write_part(document: Path, results: Path, render: Callable[..., str]) -> None:
    """Put ``render(name, head, lines)`` of a result file between the document's marks of ``render``'s script."""
    part, script = render(results.name, *read_lines(results)), Path(render.__code__.co_filename).name
    document.write_text(rendered(document.read_text(encoding="utf-8"), part, script), encoding="utf-8")
    print(f"wrote {document}")
