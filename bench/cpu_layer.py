"""Expert layers on a CPU: lowgmm's INT8 and INT4 beside torch's bf16 grouped_mm, oneDNN's u8 and ggml.

    python bench/cpu_layer.py --output bench/results/cpu_layer.jsonl            or: make bench-cpu
    python bench/cpu_layer.py --shapes olmoe-1b-7b --tokens 1,4 --ggml ROOT BUILD ...

Every call has new expert ids, and the weights are several times the cache. Rivals take turns, and ratios are medians
over the turns; so are shares of the read loop, which takes its turn too. Each rival's first output is checked against
the fp64 oracle. ggml takes its turns in processes of its own (bench/ggml_experts.cpp, which checks itself). ROOT is its
source folder (with include/) and BUILD the folder with its static libraries, as the llama-cpp-python source package
holds and builds them. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import lowgmm
from lowgmm import cpu, environment, native, timing
from lowgmm.formats import get_format

HERE = Path(__file__).parent
SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "olmoe-1b-7b": (64, 8, 2048, 1024)}
"""E, A, H, I."""
FORMATS = ("int8", "int4", "int4_g32", "int4_g128")
BURST = 3
"""Calls of a rival in one turn, of which the last counts: as in a model, its code is warm and its weights are not."""
GGML = (("q8_0", "plain"), ("q4_K", "plain"), ("q4_K", "repack"), ("q4_0", "repack"))
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Limits:
    """What the machine can do: bench/cpu_limits.c on the library's threads."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / "limits.so"
        subprocess.run(["gcc", "-O3", "-shared", "-fPIC", str(HERE / "cpu_limits.c"), "-o", str(path)], check=True)
        self.library, self.pool = ctypes.CDLL(str(path)), ctypes.c_void_p(native._parallel())
        self.buffer = torch.empty(256 << 20, dtype=torch.int8)
        native.advise_huge_pages(self.buffer)  # as packed weights are, or the loop would wait for address translation
        self.buffer.fill_(1)

    def read(self) -> float:
        """Bytes per second."""
        start, size = time.perf_counter(), self.buffer.numel()
        self.library.read_once(
            ctypes.c_void_p(self.buffer.data_ptr()), ctypes.c_int64(size), self.pool, torch.get_num_threads()
        )
        return size / (time.perf_counter() - start)

    def peak(self, rounds: int = 2_000_000) -> float:
        """INT8 operations per second on registers alone."""
        start = time.perf_counter()
        self.library.peak_once(ctypes.c_int64(rounds), self.pool, torch.get_num_threads())
        return torch.get_num_threads() * rounds * 28 * 128 / (time.perf_counter() - start)


def torch_layer(w13: Tensor, w2: Tensor) -> Call:
    """bf16 experts as transformers' grouped_mm implementation computes them."""
    w13_t, w2_t = w13.transpose(1, 2), w2.transpose(1, 2)

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.view(-1).argsort(stable=True)
        offsets = torch.bincount(ids.view(-1), minlength=len(w13)).cumsum(0).int()
        gate, up = torch.nn.functional.grouped_mm(x[order // ids.shape[1]], w13_t, offs=offsets).chunk(2, -1)
        y = torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, w2_t, offs=offsets)
        y = y * weights.view(-1)[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add_(0, order // ids.shape[1], y)

    return call


def rivals(shape: tuple[int, int, int, int]) -> tuple[dict[str, list[Call]], dict[str, list], dict[str, Tensor]]:
    """The layers; our packed weights; and expert 0's w13 of each format, dequantised."""
    E, _, H, I = shape
    g = torch.Generator().manual_seed(0)
    w13 = (torch.randn(E, 2 * I, H, generator=g) * H**-0.5).bfloat16()
    w2 = (torch.randn(E, H, I, generator=g) * I**-0.5).bfloat16()
    calls: dict[str, list[Call]] = {"torch bf16": [torch_layer(w13, w2)]}
    packed, dense = {}, {}
    for name in FORMATS:
        packed[name] = [cpu.pack(lowgmm.quantize(w, name)) for w in (w13, w2)]
        dense[name] = lowgmm.dequantize(lowgmm.quantize(w13[:1], name)).double()[0]
        calls[name] = [lowgmm.MoEExperts(*packed[name])]
    library, native.library = native.library, lambda: None
    one_dnn = [cpu.pack(lowgmm.quantize(w, "int8")) for w in (w13, w2)]
    native.library = library
    calls["oneDNN u8"] = [lowgmm.MoEExperts(*one_dnn)]
    return calls, packed, dense


def check(y: Tensor, exact: Tensor, most: float, what: str) -> float:
    error = float((y.double() - exact).norm() / exact.norm())
    assert error < most, f"{what}: error {error:.4f}, at most {most} allowed"
    return error


def measure(
    name: str,
    T: int,
    seconds: float,
    calls: dict[str, list[Call]],
    packed: dict,
    dense: dict,
    limits: Limits,
    ggml: Ggml | None,
) -> dict:
    E, A, H, I = SHAPES[name]
    g = torch.Generator().manual_seed(T)
    x, weights = torch.randn(T, H, generator=g).bfloat16(), torch.full((T, A), 1 / A)

    def draw() -> Tensor:
        return torch.stack([torch.randperm(E, generator=g)[:A] for _ in range(T)])

    line: dict = {"shape": name, "E": E, "A": A, "H": H, "I": I, "T": T, "error": {}, "gemm_error": {}}
    few = slice(0, min(T, 8))
    ids = draw()
    for f in FORMATS:  # one product of these tokens, unquantised, by expert 0's dequantised weights
        w, sizes = packed[f][0], torch.tensor([len(x[few])] + [0] * (E - 1))
        y = lowgmm.gmm(x[few], w, expert_sizes=sizes, out_dtype=torch.float32)
        line["gemm_error"][f] = check(y, x[few].double() @ dense[f].T, 0.01, f"gmm of {f}")
    for rival, (call,) in calls.items():
        q = packed.get(rival, packed["int8"])
        exact = lowgmm.reference.moe_ffn(x[few], *q, ids[few], weights[few])
        line["error"][rival] = check(call(x[few], ids[few], weights[few]), exact, 0.03, rival)
    expert_bytes = {f: 2 * I * (H * get_format(f).bits / 8 + 4 * get_format(f).blocks(H)) for f in FORMATS}
    times: dict[str, list[float]] = {rival: [] for rival in calls}
    gemm: dict[str, list[float]] = {f: [] for f in FORMATS}
    floor: dict[str, list[float]] = {f: [] for f in FORMATS}
    reads, hits, turns, stop = [], [], [], time.perf_counter() + seconds
    while len(reads) < 5 or time.perf_counter() < stop:
        draws = [draw() for _ in range(BURST)]
        reads.append(limits.read())
        hits.append(len(draws[-1].unique()))
        for rival, (call,) in calls.items():
            for ids in draws:
                start = time.perf_counter()
                call(x, ids, weights)
                last = time.perf_counter() - start
            times[rival].append(last)
        for f in FORMATS:  # the first product alone
            for ids in draws:
                offsets = torch.nn.functional.pad(torch.bincount(ids.view(-1), minlength=E).cumsum(0), (1, 0)).int()
                rows = x[ids.view(-1).argsort(stable=True) // A]
                start = time.perf_counter()
                lowgmm.gmm(rows, packed[f][0], expert_offsets=offsets)
                last = time.perf_counter() - start
            gemm[f].append(last)
            floor[f].append(hits[-1] * expert_bytes[f] / reads[-1])  # seconds to read these weights and no more
        if ggml:
            turns.append(ggml.turn(T))
    middle = statistics.median
    line["turns"], line["experts_hit"], line["read_gb_per_s"] = len(reads), middle(hits), middle(reads) / 1e9
    line["layer_us"] = {rival: middle(t) * 1e6 for rival, t in times.items()}
    line["gemm_us"] = {f: middle(t) * 1e6 for f, t in gemm.items()}
    line["gemm_share_of_read"] = {f: timing.paired(floor[f], t).median for f, t in gemm.items()}
    line["gemm_gop_per_s"] = {f: 4 * T * A * H * I / middle(t) / 1e9 for f, t in gemm.items()}
    line["x_torch_bf16"] = {r: timing.paired(times["torch bf16"], t).median for r, t in times.items()}
    return line | (against_ggml(line, turns, {"gemm": gemm, "layer": times}) if ggml else {})


class Ggml:
    """Its variants, each a process that holds one shape's weights and waits for its turns."""

    def __init__(self, program: Path, name: str) -> None:
        sizes = [str(v) for v in (torch.get_num_threads(), *SHAPES[name], 2)]
        pipes: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.processes = {f"{kind} {b}": subprocess.Popen([str(program), kind, b, *sizes], **pipes) for kind, b in GGML}
        self.turn(1)  # when they answer, they are ready

    def turn(self, T: int) -> dict[str, dict[str, float]]:
        """Variant -> seconds of ``layer``, and of ``gemm``: the gate weights alone, half of our first product."""
        found = {}
        for variant, process in self.processes.items():
            process.stdin.write(f"{T}\n")
            found[variant] = json.loads(process.stdout.readline())
            assert found[variant]["error"] < 0.05, f"ggml {variant}: {found[variant]}"
        time.sleep(0.02)  # until their threads no longer spin
        return found

    def close(self) -> None:
        for process in self.processes.values():
            process.communicate()


def against_ggml(line: dict, turns: list[dict], ours: dict[str, dict[str, list[float]]]) -> dict:
    """What ggml adds to a line. ``x_ggml``: format -> ggml's time over ours, Q8_0's over INT8's and its best 4 bits'
    over INT4's, medians over the turns; ``gemm_at_read``: had ours taken no longer than a plain loop takes to read the
    weights, which no decode can beat."""
    middle, found = statistics.median, {}
    us = {v: {k: middle([t[v][k] for t in turns]) * 1e6 for k in ("layer", "gemm")} for v in turns[0]}
    for f in FORMATS:
        best = {
            k: min((v for v in us if (f == "int8") == v.startswith("q8")), key=lambda v: us[v][k])
            for k in us["q8_0 plain"]
        }
        times = {k: [t[v][k] * (2 if k == "gemm" else 1) for t in turns] for k, v in best.items()}
        found[f] = {k: timing.paired(times[k], ours[k][f]).median for k in times}
        found[f]["gemm_at_read"] = found[f]["gemm"] / line["gemm_share_of_read"][f]
    return {"ggml_us": us, "x_ggml": found}


def build_ggml(root: Path, build: Path, to: Path) -> None:
    libraries = [str(next(build.rglob(f"lib{n}.a"))) for n in ("ggml", "ggml-cpu", "ggml-base")]
    source, flags = str(HERE / "ggml_experts.cpp"), ["-fopenmp", "-lpthread", "-ldl", "-o", str(to)]
    subprocess.run(["g++", "-std=c++17", "-O2", f"-I{root / 'include'}", source, *libraries, *flags], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file; lines of other shapes and T in it stay")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,4,16,64,256")
    parser.add_argument("--seconds", type=float, default=6.0, help="per shape and T (6)")
    parser.add_argument("--ggml", type=Path, nargs=2, metavar=("ROOT", "BUILD"))
    args = parser.parse_args()
    tokens = [int(v) for v in args.tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        limits, program = Limits(folder), Path(folder) / "ggml_experts"
        if args.ggml:
            build_ggml(*args.ggml, program)
        here = {**environment.record(torch.device("cpu")), "native": native.explain()}
        lines = []
        for name in args.shapes.split(","):
            calls, packed, dense = rivals(SHAPES[name])
            ggml = Ggml(program, name) if args.ggml else None
            measured = []
            for T in tokens:
                line = measure(name, T, args.seconds, calls, packed, dense, limits, ggml)
                line["peak_gop_per_s"] = limits.peak() / 1e9
                measured.append(line)
                speed = {k: round(v, 2) for k, v in line["x_torch_bf16"].items()}
                share = {k: round(v, 2) for k, v in line["gemm_share_of_read"].items()}
                print(name, T, {k: round(v) for k, v in line["layer_us"].items()}, speed, share, flush=True)
                if ggml:
                    print(" ggml", line["ggml_us"], line["x_ggml"], flush=True)
            del calls, packed, dense
            if ggml:
                ggml.close()
            lines += [{**line, "environment": here} for line in measured]
    old = args.output.read_text().splitlines() if args.output.exists() else []
    new = {(line["shape"], line["T"]) for line in lines}
    kept = [text for text in old if ((was := json.loads(text))["shape"], was["T"]) not in new]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join([*kept, *map(json.dumps, lines)]) + "\n")


if __name__ == "__main__":
    main()
