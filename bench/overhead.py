"""What a call costs on the host, what gets compiled, and how long a cold process takes. Needs a GPU.

    python bench/overhead.py --output bench/results/overhead_h200.jsonl

- `eager`: CPU time until a call returns (the GPU is never waited for; it has less to do than the host), and its parts:
  the public function, whether the dispatcher is needed, finding the plan and the plan make up the whole; allocations,
  counters and launches make up the plan.
- `graph`: CPU time per call of a replayed CUDA graph.
- `compilations`: what Triton compiled while the number of tokens went through every value from 1 to 8192.
- `cold`: seconds from the first call of a new process to its result, per bucket, with Triton's cache warm.

A line has `us` where it is a time. bench/compare.py compares two files.
"""

from __future__ import annotations

import argparse
import functools
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
from common import CUDA, DTYPES, OUT, Lines, operands_of, require_gpu

import lowgmm
from lowgmm import ops, ops_layer, replay
from lowgmm.gpu import describe
from lowgmm.tile_config import Problem
from lowgmm.tune import bucket, pick
from lowgmm.workloads import MOE_SHAPES, GmmCase

TINY = GmmCase("tiny", 128, 128, (2,) * 8)
"""Less work than a launch takes, so that the host is what is measured."""
IMPL = "auto"
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
    """A grouped matmul, one that quantises its input, and an expert layer; each call's time and where it goes."""
    o = operands_of(TINY, format)
    y = torch.empty(TINY.M, TINY.N, dtype=OUT, device=CUDA)
    offsets = o.offsets  # made when asked for
    given = (o.x, [o.w], o.scales_x, o.scales_w, offsets, None, None, IMPL, None)

    def gmm(**more: Any) -> object:
        return lowgmm.gmm(o.x, o.w, o.scales_x, o.scales_w, offsets, **more)

    parts = parts_of(gmm, ops.gmm, (*given, OUT, False))
    parts["whole call, output given"] = host_us(lambda: gmm(output=y))
    parts["through the dispatcher"] = host_us(lambda: torch.ops.lowgmm.gmm(*given, OUT))
    yield from ({"measure": f"eager: {n}", "case": TINY.name, "format": format, "us": us} for n, us in parts.items())
    if o.scales_w is not None:
        x = torch.randn(TINY.M, TINY.K, dtype=OUT, device=CUDA)
        us = host_us(lambda: lowgmm.gmm(x, o.w, None, o.scales_w, offsets))
        yield {"measure": "eager: whole call, input quantised", "case": TINY.name, "format": format, "us": us}
    experts, inner, hidden = len(TINY.sizes), TINY.N, TINY.K
    dense = (torch.randn(experts, *shape, dtype=OUT, device=CUDA) for shape in ((2 * inner, hidden), (hidden, inner)))
    w13, w2 = (lowgmm.quantize(w, format) if format in lowgmm.formats.FORMATS else w.to(DTYPES[format]) for w in dense)
    x = torch.randn(TINY.M, hidden, dtype=OUT if isinstance(w13, lowgmm.QuantTensor) else w13.dtype, device=CUDA)
    ids = torch.randint(0, experts, (TINY.M, 2), dtype=torch.int32, device=CUDA)
    weights = torch.rand(TINY.M, 2, device=CUDA)
    (up, scales13), (down, scales2) = (
        (w.operands, w.scales) if isinstance(w, lowgmm.QuantTensor) else ([w], None) for w in (w13, w2)
    )
    arguments = (
        *(x, up, scales13, None, down, scales2, None, ids, weights, None),
        *("silu", "concatenated", None, None, False, "token", None, IMPL, None),
    )
    layer = parts_of(lambda: lowgmm.moe_ffn(x, w13, w2, ids, weights), ops_layer.moe_ffn, arguments)
    module = lowgmm.MoEExperts(w13, w2)
    layer["whole call, as a module"] = host_us(lambda: module(x, ids, weights))
    yield from ({"measure": f"layer: {n}", "case": TINY.name, "format": format, "us": us} for n, us in layer.items())


def parts_of(call: Callable[[], object], operator: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, float]:
    """CPU µs of a call and of its parts. ``operator`` is what the public function calls."""
    replay.forget()
    operator(*arguments)
    plan = next((plan for known in replay._plans.values() for _, plan in known), None)
    parts = {"whole call": host_us(call), "in full, and noted": host_us(lambda: (replay.forget(), call()))}
    if plan is None:
        return parts
    seen: list[tuple[Any, Any]] = []
    with patched(type(plan), "__call__", lambda plan, *given: seen.append(given) or given[0][0]):
        operator(*arguments)
        found = host_us(lambda: operator(*arguments)) - host_us(ops.quiet)
    tensors, addresses = seen[0]
    count, stream = len(addresses), plan.stream(plan.index)
    plan(tensors, addresses)  # adds the result's, the scratch memory's and so on
    start = [host_us(prepared(one, stream, addresses)) for one in plan.launches]
    launch = [host_us(functools.partial(one, stream, addresses)) for one in plan.launches]
    parts |= {
        "the public function": parts["whole call"] - host_us(lambda: operator(*arguments)),
        "is the dispatcher needed": host_us(ops.quiet),
        "finding the plan": found,
        "allocations": host_us(lambda: plan.empty(*plan.result))
        + (host_us(lambda: plan.empty(*plan.scratch)) if plan.scratch else 0.0),
        "arguments of the launches": sum(launch) - sum(start),
        f"launches ({len(launch)}), Triton's and the driver's": sum(start),
        "the plan in all": host_us(lambda: plan(tensors, addresses[:count])),
    }
    if plan.taken:
        parts["the queue's counters"] = sum(host_us(lambda take=take: take(stream)) for take in plan.taken)
    known = ("the public function", "is the dispatcher needed", "finding the plan", "the plan in all")
    parts["the rest"] = parts["whole call"] - sum(parts[name] for name in known)
    return parts


def prepared(launch: Any, stream: int, addresses: list[int]) -> Callable[[], object]:
    """A launch whose arguments are ready."""
    seen: list[tuple[Any, ...]] = []
    with patched(launch, "function", lambda *arguments: seen.append(arguments)):
        launch(stream, addresses)
    return functools.partial(launch.function, *seen[0])


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


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
