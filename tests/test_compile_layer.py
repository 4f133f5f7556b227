"""What ``plan.pick`` chooses for a layer compiles without a GPU: it fits, does not spill, and uses the right matrix
instruction."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lowgmm.gpu import Gpu
from lowgmm.plan import LayerProblem, own_kernels, pick
from test_compile import GPUS

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

LAYERS = {"qwen3": (128, 8, 2048, 768), "seed": (64, 1, 4096, 2048)}
TOKENS = {"sm90": (1, 8, 400, 1000, 8192), "sm80": (8, 8192), "sm100": (8, 8192), "gfx942": (8, 8192)}
GPT_OSS = {"activation": "swiglu_oai", "gate_up": "interleaved"}


def request(
    target: str, gpu: Gpu, name: str, dtype: torch.dtype, T: int, choose: Any = own_kernels, **more: Any
) -> dict[str, Any]:
    E, A, H, I = LAYERS[name]
    options = more.get("options", {})
    how = options.get("requantize", "token"), options.get("gate_up", "concatenated")
    config = choose(LayerProblem(T, A, E, H, I, dtype, *how, more.get("h_size", 2)), gpu)
    assert config is not None
    kind = str(dtype).removeprefix("torch.")
    return {"E": E, "A": A, "H": H, "I": I, "T": T, "dtype": kind, "config": str(config), "target": target, **more}


def requests() -> list[dict[str, Any]]:
    made = []
    for target, gpu in GPUS.items():
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16):
            if dtype == torch.float8_e4m3fn and target in ("sm80", "gfx942"):
                continue  # refused, or run as a sequence of operations
            made += [request(target, gpu, "qwen3", dtype, T, all=T == 8) for T in TOKENS[target]]
        made.append(request(target, gpu, "seed", torch.int8, 128))
    hopper = GPUS["sm90"]
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16):
        for T in (1, 512, 1000, 8192):
            made.append(request("sm90", hopper, "qwen3", dtype, T, pick, all=T in (1, 8192)))
        narrow = f"queue-16-32x{128 // dtype.itemsize}-64x{128 // dtype.itemsize}-swap-tma-ws-4w16s1p"
        made.append({**made[-1], "T": 1, "config": narrow, "all": False})
        if dtype.itemsize == 1:
            for tile in ("64x128-128x128-swap-tma-ws-4w8s1p", "32x128-64x128-swap-tma-ws-4w12s1p"):
                made.append({**made[-1], "config": f"direct-16-{tile}", "h_size": 4, "A": 32})
                made.append(made[-1] | {"h_size": 2, "biased": True, "options": {**GPT_OSS, "weight_on_input": True}})
    made.append(
        request("sm90", hopper, "seed", torch.int8, 64, pick, options={**GPT_OSS, "weight_on_input": True}, biased=True)
    )
    for T in (1, 512, 1000, 8192):
        made.append(request("sm90", hopper, "qwen3", torch.int8, T, pick, h_size=4))
    for T in (1, 8, 8192):
        made.append(request("sm90", hopper, "qwen3", torch.int8, T, options=GPT_OSS, biased=True))
        made.append(request("sm90", hopper, "qwen3", torch.int8, T, options={"requantize": "group128"}))
        made.append(request("sm90", hopper, "qwen3", torch.float8_e4m3fn, T, options={"requantize": "static"}))
    return made


REQUESTS = requests()


def name_of(index: int) -> str:
    r = REQUESTS[index]
    return "-".join(str(r.get(name, "")) for name in ("target", "dtype", "T", "config", "options", "h_size"))


@pytest.fixture(scope="module")
def reports() -> list[list[dict[str, int]]]:
    from gpuless_layer import compile_layers

    return compile_layers(REQUESTS)


@pytest.mark.parametrize("index", range(len(REQUESTS)), ids=name_of)
def test_compiles(index: int, reports: list[list[dict[str, int]]]) -> None:
    r = REQUESTS[index]
    launches = reports[index]
    for report in launches:
        assert report["spills"] == 0
        assert report["idle_barriers"] == 0
        assert report["shared"] <= GPUS[r["target"]].shared_memory
    products = launches[: 2 if r["config"].startswith("split") else 1]
    for report in products:
        if r["target"] == "sm90":
            assert report["tma"] > 0
            # A narrow tile of one token leaves fewer than the 64 rows that the warp-group instruction needs.
            assert report["wgmma"] > 0 or r["T"] == 1
        assert sum(report.get(kind, 0) for kind in ("wgmma", "mma", "tcgen05", "mfma")) > 0
