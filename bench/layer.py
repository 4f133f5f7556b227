"""Whole expert layers: the configuration that is picked, others beside it, and the sequence of operations. Needs a GPU.

    python bench/layer.py --output bench/results/layer_h200.jsonl                       # what is picked
    python bench/layer.py --sweep --models qwen3 olmoe --tokens 1 8 --formats int8      # and every candidate
    python bench/layer.py --sweep --compile-only 0/12     # fills Triton's cache; start 0/12 … 11/12 side by side first
    python bench/layer.py --configs queue-16-64x128-64x256-swap-tma-4w4s2p --models qwen3 --tokens 32

Every output is checked before it is timed: against the layer in float64 on the same quantised activations, with the
error of the sequence of operations as the budget; and INT8 outputs of all launches must be the same bits. Inputs
rotate, so that the experts they touch do not stay in L2. The floor is max(bytes / 4.6 TB/s, operations / 1.393 POP/s).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowgmm
from lowgmm import environment, timing
from lowgmm.formats import FORMATS, QuantTensor
from lowgmm.gpu import describe
from lowgmm.plan import LayerConfig, LayerProblem, pick, supports
from lowgmm.testing import judge

CUDA = torch.device("cuda")
READ, PEAK = 4.6e12, 1.393e15
MODELS = {  # E, A, H, I
    "mixtral": (8, 2, 4096, 14336),
    "qwen3": (128, 8, 2048, 768),
    "dsv3ep8": (32, 2, 7168, 2048),
    "olmoe": (64, 8, 2048, 1024),
    "seed": (64, 1, 4096, 2048),
}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
ONE = [
    f"direct-16-{up}-{down}-swap-tma{pre}-4w{stages}s{per_sm}p"
    for up, down in (("16x256", "32x256"), ("32x256", "32x256"), ("32x256", "64x256"), ("64x128", "64x256"))
    for stages, per_sm in ((4, 2), (3, 3))
    for pre in ("", "-pre")
] + [
    "direct-16-32x128-32x256-swap-tma-pre-4w6s2p",
    "direct-16-16x256-32x256-swap-tma-pre-4w4s4p",
    "direct-16-16x256-16x256-swap-tma-pre-4w6s3p",
    "direct-16-16x256-16x256-swap-tma-pre-2w4s4p",
]
FEW = [
    f"queue-16-{up}-{down}-swap{tma}{pre}-4w{stages}s{per_sm}p"
    for up, down in (("64x128", "64x256"), ("32x256", "64x256"), ("64x128", "128x128"))
    for stages, per_sm in ((4, 2), (3, 3))
    for tma, pre in (("-tma", "-pre"), ("-tma", ""), ("", ""))
] + [
    "queue-16-64x256-64x256-swap-tma-4w4s1p",
    "queue-16-64x256-128x256-swap-tma-8w4s1p",
    "queue-16-64x128-64x256-swap-tma-pre-pdl-4w4s2p",
    "queue-16-64x128-64x128-swap-tma-pdl-4w4s3p",
]
MID = [
    f"queue-{bm}-{up}-{down}-swap{tma}-4w{stages}s{per_sm}p"
    for bm in (32, 64)
    for up, down in (("64x128", "128x128"), ("64x128", "64x128"))
    for tma in ("-tma", "")
    for stages, per_sm in ((4, 2), (3, 2))
]
MANY = [
    "queue-64-64x128-128x128-swap-tma-4w3s2p",
    "queue-64-64x128-128x128-swap-tma-gather-4w3s2p",
    "queue-128-64x128-128x128-tma-gather-8w3s1p",
    "split-64-64x128-128x128-swap-tma-gather-4w4s2p",
    *(
        f"split-128-{up}x128-128x128-tma{gather}-{grid}"
        for gather in ("", "-gather")
        for up, grid in ((64, "8w3s1p"), (64, "8w3s2p"), (64, "4w3s2p"), (128, "8w3s1p"), (128, "8w4s1p"))
    ),
    "split-128-64x128-256x128-tma-gather-8w3s1p",
]
WARPS = [
    f"queue-{bm}-{down // 2}x{k}-{down}x{k}-swap-tma-ws-4w{stages}s1p"
    for bm, down, k, stages in (
        (16, 64, 128, 16),
        (16, 128, 256, 5),
        (16, 128, 256, 6),
        (16, 128, 512, 3),
        (16, 256, 256, 3),
        (32, 128, 256, 5),
        (32, 256, 128, 5),
        (64, 128, 256, 4),
        (64, 256, 128, 5),
        (128, 128, 128, 6),
        (128, 256, 128, 4),
    )
]


def candidates(problem: LayerProblem, sweep: bool, forced: list[str]) -> list[LayerConfig]:
    """The picked configuration first, then the others that can run."""
    rows, gpu = problem.rows_per_expert, describe(CUDA)
    picked = pick(problem, gpu)
    assert picked is not None
    texts = list(forced)
    if sweep:
        texts += ONE if problem.T == 1 else []
        texts += FEW if rows <= 24 else []
        texts += MID if 8 < rows <= 200 else []
        texts += MANY if rows > 48 else []
        texts += WARPS
    found = [LayerConfig.parse(text) for text in dict.fromkeys(texts)]
    return [picked] + [c for c in found if c != picked and supports(problem, c, gpu) is None]


@dataclass
class Layer:
    """One layer's weights in one format, and inputs for a token count."""

    name: str
    format: str

    def __post_init__(self) -> None:
        self.E, self.A, self.H, self.I = MODELS[self.name]
        self.dtype = FORMATS[self.format].dtype if self.format in FORMATS else torch.bfloat16
        self.g = torch.Generator(CUDA).manual_seed(0)
        self.w13, self.w2 = self._weights(2 * self.I, self.H), self._weights(self.H, self.I)

    def _weights(self, n: int, k: int) -> Tensor | QuantTensor:
        """Quantised directly: codes that fill the format, scales that keep the output's size near the input's."""
        shape, scale = (self.E, n, k), k**-0.5
        if self.format not in FORMATS:
            w = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
            return w.normal_(0, scale, generator=self.g)
        scales = (torch.rand(self.E, n, generator=self.g, device=CUDA) + 0.5) * scale
        if self.format == "int8":
            values = torch.randint(-127, 128, shape, generator=self.g, device=CUDA, dtype=torch.int8)
            return QuantTensor(values, scales / 73, FORMATS["int8"])
        values = torch.empty(shape, dtype=self.dtype, device=CUDA)
        for e in range(self.E):
            values[e] = torch.randn(n, k, generator=self.g, device=CUDA).mul_(64).clamp_(-448, 448).to(self.dtype)
        return QuantTensor(values, scales / 64, FORMATS["fp8"])

    def problem(self, T: int) -> LayerProblem:
        return LayerProblem(T, self.A, self.E, self.H, self.I, self.dtype)

    def inputs(self, T: int, routing: str) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Hidden, ids, weights; as many sets as it takes to walk through four times the L2."""
        per_call = min(self.E, T * self.A) * 3 * self.H * self.I * self.dtype.itemsize
        made = []
        for _ in range(min(16, timing.weight_sets(per_call, CUDA))):
            hidden = torch.randn(T, self.H, generator=self.g, device=CUDA).bfloat16()
            logits = torch.randn(T, self.E, generator=self.g, device=CUDA)
            if routing == "zipf":
                popularity = 1 / torch.arange(1, self.E + 1, device=CUDA)
                popularity = popularity[torch.randperm(self.E, generator=self.g, device=CUDA)]
                gumbel = -torch.log(-torch.log(torch.rand(T, self.E, generator=self.g, device=CUDA)))
                logits = popularity.log() + gumbel
            p, ids = logits.softmax(-1).topk(self.A)
            made.append((hidden, ids.int(), (p / p.sum(-1, keepdim=True)).float()))
        return made

    def call(self, given: tuple[Tensor, Tensor, Tensor], **how: Any) -> Tensor:
        hidden, ids, weights = given
        return lowgmm.moe_ffn(hidden, self.w13, self.w2, ids, weights, **how)

    def composed(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The layer as a sequence of lowgmm's operations."""
        from lowgmm import compose
        from lowgmm.layer import LayerSpec, Weights

        hidden, ids, weights = given
        w13, w2 = (
            Weights(w.operands, w.scales, None) if isinstance(w, QuantTensor) else Weights([w], None, None)
            for w in (self.w13, self.w2)
        )

        def gmm(x: Tensor, w: list[Tensor], sx: Any, sw: Any, offsets: Tensor, bias: Any, dtype: torch.dtype) -> Tensor:
            return torch.ops.lowgmm.gmm(x, w, sx, sw, offsets, bias, None, "triton", None, dtype)

        quantise = lambda x, fmt, clip: torch.ops.lowgmm.quantize_tokens(x, fmt.name, clip, "triton")  # noqa: E731
        return compose.moe_ffn(hidden, w13, w2, ids, weights, LayerSpec(), None, gmm, quantise)

    def floor(self, T: int, ids: Tensor) -> float:
        size = ids.unique().numel() * 3 * self.H * self.I * self.dtype.itemsize + T * self.H * 4
        return max(size / READ, 6.0 * T * self.A * self.H * self.I / (PEAK if self.dtype.itemsize == 1 else PEAK / 2))


Check = Callable[[int, Tensor], None]


def checker(layer: Layer, inputs: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Check, Check]:
    """For launches of the layer, and for the sequence of operations, whose sigmoid is another: the first input's output
    against float64; that of INT8 launches bit by bit against the first launch's."""
    exact = layer.call(inputs[0], impl="reference").double()
    baseline = layer.composed(inputs[0])
    first: dict[int, Tensor] = {}

    def near(index: int, y: Tensor) -> None:
        assert bool(y.isfinite().all())
        if index == 0:
            verdict = judge(y, exact, baseline)
            assert verdict.ok, str(verdict)

    def check(index: int, y: Tensor) -> None:
        near(index, y)
        if layer.format == "int8":
            assert torch.equal(first.setdefault(index, y.clone()), y), "other bits than another launch"

    return check, near


def cases(args: argparse.Namespace) -> Iterator[tuple[Layer, int, str]]:
    for name in args.models:
        for format in args.formats:
            layer = Layer(name, format)
            for routing in args.routings:
                for T in args.tokens:
                    yield layer, T, routing
            del layer
            torch.cuda.empty_cache()


def compile_share(args: argparse.Namespace, share: str) -> None:
    """Run this share of the configurations once, on a tiny layer with the same divisibilities."""
    part, of = (int(v) for v in share.split("/"))
    work: dict[tuple[Any, ...], tuple[str, LayerProblem, LayerConfig]] = {}
    for name in args.models:
        E, A, H, I = MODELS[name]
        for format in args.formats:
            dtype = FORMATS[format].dtype if format in FORMATS else torch.bfloat16
            for T in args.tokens:
                problem = LayerProblem(T, A, E, H, I, dtype)
                for config in candidates(problem, args.sweep, args.configs):
                    work[name, format, replace(config, programs=1)] = (format, problem, config)
    for format, problem, config in list(work.values())[part::of]:
        MODELS["tiny"] = (problem.E, problem.A, problem.H, problem.I)
        tiny = Layer.__new__(Layer)
        tiny.name, tiny.format, tiny.dtype = "tiny", format, problem.dtype
        tiny.E, tiny.A, tiny.H, tiny.I = problem.E, problem.A, problem.H, problem.I
        tiny.g = torch.Generator(CUDA).manual_seed(0)
        rows = 1 if problem.T == 1 else 2
        tiny.w13, tiny.w2 = (_expanded(tiny, n, k) for n, k in ((2 * tiny.I, tiny.H), (tiny.H, tiny.I)))
        hidden = torch.zeros(rows, tiny.H, device=CUDA, dtype=torch.bfloat16)
        ids = torch.full((rows, tiny.A), -1, device=CUDA, dtype=torch.int32)
        tiny.call((hidden, ids, torch.zeros(rows, tiny.A, device=CUDA)), config=str(config))
    torch.cuda.synchronize()


def _expanded(layer: Layer, n: int, k: int) -> Tensor | QuantTensor:
    """Zeros of the full size: nothing routes to them, so they are never read."""
    w = torch.zeros(layer.E, n, k, dtype=torch.uint8, device=CUDA)
    if layer.format not in FORMATS:
        return torch.zeros(layer.E, n, k, dtype=layer.dtype, device=CUDA)
    return QuantTensor(w.view(layer.dtype), torch.ones(layer.E, n, device=CUDA), FORMATS[layer.format])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--formats", nargs="*", default=["int8", "fp8"], choices=["int8", "fp8", "bfloat16"])
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--routings", nargs="*", default=["uniform"], choices=["uniform", "zipf"])
    parser.add_argument("--configs", nargs="*", default=[], help="configurations beside the picked one")
    parser.add_argument("--sweep", action="store_true", help="every candidate beside the picked one")
    parser.add_argument("--composed", action="store_true", help="also time the sequence of operations")
    parser.add_argument("--compile-only", metavar="PART/OF")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case starts")
    args = parser.parse_args()
    if args.compile_only:
        compile_share(args, args.compile_only)
        return
    start = time.perf_counter()
    lines = [json.dumps({"environment": environment.record(CUDA), "read": READ, "peak": PEAK})]
    for layer, T, routing in cases(args):
        if time.perf_counter() - start > args.limit:
            print(f"time limit: {layer.name} {layer.format} {routing} T={T} not run")
            continue
        inputs = layer.inputs(T, routing)
        check, near = checker(layer, inputs)
        rivals = []
        for config in candidates(layer.problem(T), args.sweep, args.configs):
            calls = [lambda g=g, c=str(config), at=layer: at.call(g, config=c) for g in inputs]
            try:
                for index, call in enumerate(calls):
                    check(index, call())
            except Exception as error:  # a failing candidate is reported and left out; the others are still timed
                print(f"FAILED {layer.name} {layer.format} T={T} {config}: {str(error)[:300]}", flush=True)
                continue
            rivals.append(timing.Rival(str(config), calls, check))
        if args.composed:
            rivals.append(timing.Rival("composed", [lambda g=g, at=layer: at.composed(g) for g in inputs], near))
        if not rivals:
            continue
        timings = timing.interleave(rivals, CUDA, rounds=args.rounds, seconds=1.0)
        floor = sum(layer.floor(T, ids) for _, ids, _ in inputs) / len(inputs)
        best = min(timings, key=lambda t: t.median_s)
        for i, t in enumerate(timings):
            line = {"model": layer.name, "T": T, "routing": routing, "format": layer.format, "config": t.name}
            line |= {"us": t.median_s * 1e6, "p20": t.p20_s * 1e6, "p80": t.p80_s * 1e6, "floor_us": floor * 1e6}
            lines.append(json.dumps(line | {"picked": i == 0, "method": t.method, "inputs": len(inputs)}))
        print(
            f"{layer.name:8} {routing:7} T={T:<5} {layer.format:5} picked {timings[0].median_s * 1e6:8.1f} "
            f"best {best.median_s * 1e6:8.1f} µs = floor x {best.median_s / floor:4.2f}  {best.name}",
            flush=True,
        )
        if args.sweep:
            for t in sorted(timings, key=lambda t: t.median_s)[1:6]:
                print(f"{'':36}{t.median_s * 1e6:8.1f} µs  {t.name}", flush=True)
        del inputs, check, near, rivals
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
