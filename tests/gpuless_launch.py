"""Make calls as on an H200, with Triton whole, over a driver that only notes launches; in full and replayed.

Runs as a program of its own, because the tests' process has Triton in interpreter mode. Prints, for every case, what
the driver was handed for the same tensors both ways: JSON lines.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

import lowgmm
from lowgmm import gpu, ops, ops_layer, relaunch, replay
from lowgmm.testing import make_operands


def fake_driver() -> ctypes.CDLL:
    """``fake_cuda.c``, where Triton finds it."""
    folder = tempfile.mkdtemp()
    source, include = Path(__file__).with_name("fake_cuda.c"), Path(triton.__file__).parent / "backends/nvidia/include"
    library = f"{folder}/libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{include}", str(source), "-o", library]
    subprocess.run(command, check=True)
    os.symlink("libcuda.so.1", f"{folder}/libcuda.so")
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    return ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


class Driver:
    def __init__(self) -> None:
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_current_stream = lambda device: 7
        self.get_current_device = lambda: 0
        self.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        self.get_active_torch_device = lambda: torch.device("cpu")


def word(name: str) -> Any:
    return ctypes.c_ulonglong.in_dll(cuda, name)


def number(name: str) -> Any:
    return ctypes.c_int.in_dll(cuda, name)


def kinds_of(compiled: Any) -> list[str]:
    """Types of a kernel's parameters: descriptors are a map, sizes and strides; two kinds of scratch memory follow."""
    found: list[str] = []
    for kind in compiled.src.signature.values():
        if kind.startswith("tensordesc"):
            found += ["map", "i32", "i32", "i64", "i64"]
        elif kind != "constexpr":
            found.append(kind)
    return [*found, "*", "*"]


noted: list[dict[str, Any]] = []
replays = 0


def note(compiled: Any, launch: Callable[[], Any]) -> Any:
    """Launch, and note what the driver was handed."""
    kinds = kinds_of(compiled)
    number("params").value = len(kinds)
    word("maps").value = sum(1 << i for i, kind in enumerate(kinds) if kind == "map")
    before = number("launches").value
    result = launch()
    assert number("launches").value == before + 1
    number("params").value = 0
    seen = (ctypes.c_ulonglong * 256).in_dll(cuda, "seen")
    small = {"i32": 0xFFFFFFFF, "fp32": 0xFFFFFFFF}
    values = [[kind, seen[2 * i] & small.get(kind, 2**64 - 1), seen[2 * i + 1]] for i, kind in enumerate(kinds)]
    grid = list((ctypes.c_int * 3).in_dll(cuda, "grid"))
    launched = {"function": word("function").value, "grid": grid, "stream": word("stream").value}
    noted.append(launched | {"attributes": number("attributes").value, "values": values})
    return result


class Documented:
    """A kernel that is launched as Triton documents it, once it is compiled, and noted."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            compiled = self.kernel[grid](*arguments, **options)  # the binder's own launch
            rest = (options[name] for name in self.arg_names[len(arguments) :])
            note(compiled, lambda: compiled[(*grid, 1, 1)](*arguments, *rest))
            return compiled

        return run


again = relaunch.Launch.__call__


def launch_again(self: relaunch.Launch, stream: int, addresses: Any) -> None:
    global replays
    replays += 1
    note(self.compiled, lambda: again(self, stream, addresses))


def pretend() -> None:
    """CPU tensors are a GPU's, and every launch is noted."""
    from lowgmm.kernels import arrange, combine, grouped_mm, hopper, quantize, route, run_hopper, run_layer

    triton.runtime.driver.set_active(Driver())
    gpu.INTERPRETED = gpu.H200  # what a CPU tensor stands for
    ops.check_triton = ops_layer.check_triton = lambda *args: None
    replay.serves = lambda t: type(t) is Tensor
    replay._functions = lambda device: (lambda: None, lambda index: 7, torch._C._dynamo.guards._empty_strided_cpu)
    relaunch.Launch.__call__ = launch_again  # type: ignore[method-assign]
    for module in (arrange, combine, grouped_mm, hopper, quantize, route, run_hopper, run_layer):
        module.launch = lambda kernel, programs, *a, f=replay.launch, **o: f(Documented(kernel), programs, *a, **o)


def named(launches: list[dict[str, Any]], tensors: list[Tensor]) -> list[dict[str, Any]]:
    """Addresses as those of a tensor, or as the how-manieth of other memory."""
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
    others: dict[int, str] = {0: "none"}

    def name(address: int) -> str:
        inside = [f"tensor {i} + {address - a}" for i, (a, b) in enumerate(spans) if a <= address < b]
        return inside[0] if inside else others.setdefault(address, f"other {len(others)}")

    return [
        launch | {"values": [[k, name(v) if k == "map" or k[0] == "*" else v, m] for k, v, m in launch["values"]]}
        for launch in launches
    ]


def compare(case: str, make: Callable[[], tuple[list[Tensor], Callable[[], Any]]]) -> None:
    """Note a call, of which nothing may be kept; replay it with other tensors; and make that call in full."""
    replay.forget()
    tensors, call = make()
    call()
    first = [weakref.ref(t) for t in tensors]
    tensors, call = make()
    kept = sum(t() is not None for t in first)
    noted.clear()
    before = replays
    call()
    short, count = named(noted, tensors), replays - before
    replay.forget()
    noted.clear()
    call()
    line = {"case": case, "replays": count, "kept": kept, "replayed": short, "in full": named(noted, tensors)}
    print(json.dumps(line), flush=True)


def gmm(dtype: str, dynamic: bool = False, **more: Any) -> Callable[[], tuple[list[Tensor], Callable[[], Any]]]:
    def make() -> tuple[list[Tensor], Callable[[], Any]]:
        o = make_operands([5, 0, 200], 96, 128, dtype)
        x, scales_x = (torch.randn(205, 128).bfloat16(), None) if dynamic else (o.x, o.scales_x)
        offsets, bias = o.offsets, torch.randn(3, 96).bfloat16() if more.get("bias") else None
        tensors = [t for t in (x, o.w, scales_x, o.scales_w, offsets, bias) if t is not None]
        rest: dict[str, Any] = more | {"bias": bias, "impl": "triton"}
        return tensors, lambda: lowgmm.gmm(x, o.w, scales_x, o.scales_w, offsets, **rest)

    return make


def layer(tokens: int, config: str | None = None, quantised: bool = True, **more: Any) -> Callable[[], Any]:
    def make() -> tuple[list[Tensor], Callable[[], Any]]:
        dense = (torch.randn(8, 256, 128).bfloat16(), torch.randn(8, 128, 128).bfloat16())
        w13, w2 = (lowgmm.quantize(w, "int8") if quantised else w for w in dense)
        x, weights = torch.randn(tokens, 128).bfloat16(), torch.rand(tokens, 2)
        ids = torch.randint(0, 8, (tokens, 2), dtype=torch.int32)
        parts = [t for w in (w13, w2) for t in ((w.values, w.scales) if quantised else (w,))]
        rest: dict[str, Any] = more | {"impl": "triton", "config": config}
        return [x, *parts, ids, weights], lambda: lowgmm.moe_ffn(x, w13, w2, ids, weights, **rest)

    return make


if __name__ == "__main__":
    cuda = fake_driver()
    pretend()
    compare("gmm int8", gmm("int8"))
    compare("gmm fp8, bias", gmm("fp8", bias=True))
    compare("gmm int8, quantised here", gmm("int8", dynamic=True, clip=2.0))
    compare("gmm bfloat16, portable", gmm("bfloat16", config="16x64x64-swap-tma-queue2-4w3s"))
    compare("gmm int8, by pointers", gmm("int8", config="16x64x128-swap-grid-4w3s"))
    compare("layer, few tokens", layer(8))
    compare("layer, many tokens", layer(3000))
    compare("layer, bfloat16", layer(8, quantised=False))
    compare("layer, portable", layer(8, "queue-16-64x128-64x128-swap-tma-4w3s2p"))
    compare("layer, gathered", layer(300, "split-128-64x128-128x128-tma-gather-8w3s1p"))
    compare("layer, one token", layer(1))
    compare("layer, one token, portable", layer(1, "direct-16-16x128-32x128-swap-tma-4w3s2p"))
