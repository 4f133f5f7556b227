"""What the launcher picks compiles without a GPU: it fits, does not spill, and uses the matrix instruction it should.

``pick`` chooses on Hopper facts here; the older and other targets compile what it chooses for *their* facts.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lowgmm.gpu import H200, Gpu
from lowgmm.tune import Problem, pick

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

GPUS = {
    "sm90": H200,
    "sm80": Gpu("NVIDIA A100", (8, 0), sms=108, shared_memory=166_912),
    "sm100": Gpu("NVIDIA B200", (10, 0), sms=148, shared_memory=232_448),
    "gfx942": Gpu("AMD MI300X", (9, 4), sms=304, shared_memory=65_536, backend="hip"),
}
ROWS = {"sm90": (16, 32, 64, 512), "sm80": (16, 512), "sm100": (16, 512), "gfx942": (16, 512)}


def requests() -> list[dict[str, Any]]:
    made = []
    for target, gpu in GPUS.items():
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16):
            if target == "sm80" and dtype == torch.float8_e4m3fn:
                continue  # refused before it is compiled: tests/test_gmm.py
            for rows in ROWS[target]:
                sizes = {"E": 64, "M": 64 * rows, "N": 2048, "K": 4096}
                config = str(pick(Problem(*sizes.values(), dtype), gpu))
                name = str(dtype).removeprefix("torch.")
                made.append({**sizes, "dtype": name, "config": config, "target": target})
    return made


REQUESTS = requests()


@pytest.fixture(scope="module")
def reports() -> list[dict[str, int]]:
    from gpuless import compile_all

    return compile_all(REQUESTS)


@pytest.mark.parametrize("index", range(len(REQUESTS)), ids=lambda i: "-".join(str(v) for v in REQUESTS[i].values()))
def test_compiles(index: int, reports: list[dict[str, int]]) -> None:
    request, report = REQUESTS[index], reports[index]
    target = request["target"]
    assert report["shared"] <= GPUS[target].shared_memory
    assert report["spills"] == 0
    if target == "sm90":
        assert report["wgmma"] > 0, "64 rows or more stand on the M side, so the warp-group instruction must be used"
        assert report["tma"] > 0
    elif target == "gfx942":
        assert report["mfma"] > 0
    else:
        assert report["mma"] + report["tcgen05"] > 0
