"""What a call costs on the host, what gets compiled, and how long a cold process takes. Needs a GPU.

    python bench/overhead.py --output bench/results/overhead_h200.jsonl

- `eager`: CPU time until a call returns (the GPU is never waited for; it has less to do than the host), and its parts.
- `graph`: CPU time per call of a replayed CUDA graph.
- `compilations`: what Triton compiled while the number of tokens went through every value from 1 to 8192.
- `cold`: seconds from the first call of a new process to its result, per bucket, with Triton's cache warm.

A line has `us` where it is a time. bench/compare.py compares two files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import CUDA, DTYPES, OUT, Lines, operands_of, problem_of, require_gpu

import lowgmm
from lowgmm import ops
from lowgmm.gpu import describe
from lowgmm.tune import Problem, bucket, pick
from lowgmm.workloads import MOE_SHAPES, GmmCase

TINY = GmmCase("tiny", 128, 128, (2,) * 8)
"""Less work than a launch takes, so that the host is what is measured."""
CALLS, BATCH = 1000, 50
MOST = 8192
COLD_TOKENS = (1, 64, 1024, 8192)


def host_us(call: Callable[[], object]) -> float:
    """Median CPU µs of a call, over CALLS calls; the GPU catches up between batches, so no queue fills up."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(CALLS // BATCH):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        taken.append((time.perf_counter() - start) / BATCH)
    torch.cuda.synchronize()
    return statistics.median(taken) * 1e6


@contextmanager
def no_launch() -> Iterator[None]:
    """Everything but the launch."""
    found = [(module, module._launch) for module, _ in kernels()]
    for module, _ in found:
        module._launch = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for module, launch in found:
            module._launch = launch


def kernels() -> list[tuple[Any, str]]:
    """Modules and names of the kernels that a grouped matmul may launch."""
    from lowgmm.kernels import grouped_mm, hopper

    return [(grouped_mm, "grouped_mm_kernel"), (hopper, "hopper_kernel")]


def compiled() -> int:
    """Kernels that this process has compiled or taken from Triton's cache."""
    total = 0
    for module, name in kernels():
        caches = getattr(module, name).device_caches
        total += sum(len(cache[0]) for cache in caches.values())
    return total


def eager(format: str) -> Iterator[dict[str, Any]]:
    o, problem = operands_of(TINY, format), problem_of(TINY, format)
    gpu, y = describe(CUDA), torch.empty(TINY.M, TINY.N, dtype=OUT, device=CUDA)
    offsets, args = o.offsets, (o.x, [o.w], o.scales_x, o.scales_w, o.offsets, None, None, "auto", None)

    def call() -> object:
        return lowgmm.gmm(o.x, o.w, o.scales_x, o.scales_w, offsets)

    from lowgmm.kernels.grouped_mm import grouped_mm

    def launcher() -> None:
        grouped_mm(y, o.x, o.w, o.scales_x, o.scales_w, offsets, None)

    whole, launched = host_us(call), host_us(launcher)
    with no_launch():
        prepared = host_us(launcher)
    parts = {
        "whole call": whole,
        "whole call, output given": host_us(lambda: lowgmm.gmm(o.x, o.w, o.scales_x, o.scales_w, offsets, output=y)),
        "through the dispatcher": host_us(lambda: torch.ops.lowgmm.gmm(*args, OUT)),
        "is the dispatcher needed": host_us(lambda: ops.plain(o.x, o.w, o.scales_x, o.scales_w, offsets)),
        "validation": host_us(lambda: ops._check_once(*args[:8], OUT)),
        "allocating the output": host_us(lambda: o.x.new_empty((TINY.M, TINY.N), dtype=OUT)),
        "pick": host_us(lambda: pick(Problem(problem.E, problem.M, problem.N, problem.K, problem.dtype, OUT), gpu)),
        "launcher before the launch": prepared,
        "Triton's launch": launched - prepared,
        "the rest": whole - launched,
    }
    for name, us in parts.items():
        yield {"measure": f"eager: {name}", "case": TINY.name, "format": format, "us": us}


def graph(format: str) -> Iterator[dict[str, Any]]:
    o = operands_of(TINY, format)
    y, offsets = torch.empty(TINY.M, TINY.N, dtype=OUT, device=CUDA), o.offsets

    def call() -> object:
        return lowgmm.gmm(o.x, o.w, o.scales_x, o.scales_w, offsets, output=y)

    call()
    torch.cuda.synchronize()
    captured, calls = torch.cuda.CUDAGraph(), 0
    with torch.cuda.graph(captured):
        for _ in range(BATCH):
            call()
    original = ops._gmm_into

    def counted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        original(*args)

    ops._gmm_into = counted
    try:
        us = host_us(captured.replay) / BATCH
    finally:
        ops._gmm_into = original
    yield {"measure": "graph: replay per call", "case": TINY.name, "format": format, "us": us, "python_calls": calls}


def compilations(format: str, model: str) -> Iterator[dict[str, Any]]:
    """Run one layer's matmuls at every number of tokens."""
    shape = MOE_SHAPES[model]
    for name, (n_size, k_size) in shape.gemms().items():
        o = operands_of(GmmCase(name, n_size, k_size, (1,) * shape.E), format)
        x = o.x.view(torch.uint8).repeat(-(-MOST * shape.A // len(o.x)), 1).view(o.x.dtype)
        scales = None if o.scales_x is None else o.scales_x.repeat(-(-MOST * shape.A // len(o.scales_x)))
        y = torch.empty(MOST * shape.A, n_size, dtype=OUT, device=CUDA)
        before, start = compiled(), time.perf_counter()
        for tokens in range(1, MOST + 1):
            rows = tokens * shape.A
            sizes = torch.full((shape.E,), rows // shape.E, dtype=torch.int32)
            sizes[: rows % shape.E] += 1
            offsets = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0)).to(CUDA)
            scales_x = None if scales is None else scales[:rows]
            lowgmm.gmm(x[:rows], o.w, scales_x, o.scales_w, offsets, output=y[:rows])
        torch.cuda.synchronize()
        yield {
            "measure": "compilations", "case": f"{model} {name}", "format": format, "tokens": [1, MOST],
            "count": compiled() - before, "seconds": time.perf_counter() - start,
        }  # fmt: skip


COLD = """
import sys, time
start = time.perf_counter()
import torch, lowgmm
from lowgmm.workloads import GmmCase
imported = time.perf_counter()
sys.path.insert(0, {bench!r})
from common import CUDA, operands_of
from lowgmm.tune import pick
o = operands_of(GmmCase("cold", {n}, {k}, {sizes}), {format!r})
torch.cuda.synchronize()
ready = time.perf_counter()
y = lowgmm.gmm(o.x, o.w, o.scales_x, o.scales_w, o.offsets)
torch.cuda.synchronize()
done = time.perf_counter()
import json
print(json.dumps({{"import_s": imported - start, "first_call_s": done - ready, "process_s": done - start}}))
"""


def cold(format: str, model: str) -> Iterator[dict[str, Any]]:
    """A new process per bucket; twice, because the first may compile."""
    shape = MOE_SHAPES[model]
    n_size, k_size = shape.gemms()["gate-up"]
    for tokens in COLD_TOKENS:
        rows = tokens * shape.A
        sizes = tuple(rows // shape.E + (e < rows % shape.E) for e in range(shape.E))
        code = COLD.format(n=n_size, k=k_size, sizes=sizes, format=format, bench=str(Path(__file__).parent))
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"the cold process failed:\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        problem = bucket(Problem(shape.E, rows, n_size, k_size, DTYPES[format]))
        yield {
            "measure": f"cold: {tokens} tokens", "case": model, "format": format, **found,
            "config": str(pick(problem, describe(CUDA))), "us": found["first_call_s"] * 1e6,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--formats", nargs="*", default=list(DTYPES), choices=list(DTYPES), metavar="FORMAT")
    parser.add_argument("--model", default="article", choices=list(MOE_SHAPES), metavar="NAME", help="of the last two")
    parser.add_argument("--skip", nargs="*", default=[], choices=["eager", "graph", "compilations", "cold"])
    args = parser.parse_args()
    require_gpu()
    measures: dict[str, Callable[[str], Iterator[dict[str, Any]]]] = {
        "eager": eager,
        "graph": graph,
        "compilations": lambda format: compilations(format, args.model),
        "cold": lambda format: cold(format, args.model),
    }
    out = Lines(args.output)
    formats = [f for f in args.formats if describe(CUDA).lacks(lowgmm.formats.FORMATS.get(f)) is None]
    for format in formats:
        for name, measure in measures.items():
            if name in args.skip:
                continue
            for line in measure(format):
                out.add(**line)
                value = f"{line['us']:10.1f} µs" if "us" in line else f"{line['count']:10} kernels"
                more = f", {line['process_s']:.2f} s in all" if "process_s" in line else ""
                print(f"{format:5} {line['measure']:40} {line['case']:22} {value}{more}", flush=True)


if __name__ == "__main__":
    main()
