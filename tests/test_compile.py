"""Whatever the launcher may pick compiles without a GPU: it fits, does not spill, and uses the matrix instruction it
should.

All of it: every candidate of the shipped tables and every measured entry on Hopper, and what the same functions choose
from on the facts of other targets, with operands that TMA can address and with operands that it cannot.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lowgmm import tune_cache
from lowgmm.formats import GROUPS, format_of
from lowgmm.gpu import H200, Gpu
from lowgmm.tile_config import Problem, TileConfig
from lowgmm.tune import candidates, pick

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

GPUS = {
    "sm90": H200,
    "sm80": Gpu("NVIDIA A100", (8, 0), sms=108, shared_memory=166_912),
    "sm100": Gpu("NVIDIA B200", (10, 0), sms=148, shared_memory=232_448),
    "gfx942": Gpu("AMD MI300X", (9, 4), sms=304, shared_memory=65_536, backend="hip"),
}
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "int4": torch.uint8}
ALIGNED, UNALIGNED = 4096, 4096 + 8
"""K with which every operand is fit for TMA, and K with which rows of 8-bit operands are not 16-byte multiples."""


def choices(gpu: Gpu, dtype: torch.dtype, k_size: int, group: int = 0) -> set[TileConfig]:
    """Every configuration that a problem of any number of rows can get."""
    found = set()
    for rows in (1, 8, 16, 24, 32, 48, 64, 96, 128, 256, 1024):
        problem = Problem(64, 64 * rows, 2048, k_size, dtype, group=group)
        found |= {*candidates(problem, gpu), pick(problem, gpu)}
    return found


def requests() -> list[dict[str, Any]]:
    made = []
    for target, gpu in GPUS.items():
        for format, dtype in DTYPES.items():
            if gpu.lacks(format_of(dtype)) is not None:
                continue  # refused before it is compiled: tests/test_tune.py
            groups = (0, *GROUPS) if format == "int4" else (0,)
            found = {(config, ALIGNED, group) for group in groups for config in choices(gpu, dtype, ALIGNED, group)}
            if target == "sm90":
                table = tune_cache.nearest(gpu.name)
                texts = [*table.candidates.get(format, ())]
                texts += [text for key, text in table.measured.items() if key.startswith(format)]
                found |= {(TileConfig.parse(text), ALIGNED, 0) for text in texts}
                for group in groups[:2]:
                    found |= {(config, UNALIGNED, group) for config in choices(gpu, dtype, UNALIGNED, group)}
            for config, k_size, group in sorted(found, key=str):
                name = str(dtype).removeprefix("torch.")
                sizes = {"E": 64, "M": 4096, "N": 2048, "K": k_size}
                made.append({**sizes, "group": group, "dtype": name, "config": str(config), "target": target})
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
    assert report["idle_barriers"] == 0
    config = TileConfig.parse(request["config"])
    if target == "sm90":
        # 64 rows or more on the M side: the warpgroup's instruction must be used.
        if (config.block_n if config.swap_ab else config.block_m) >= 64 and config.tma:
            assert report["wgmma"] > 0
        assert report["wgmma"] + report["mma"] > 0
        assert (report["tma"] > 0) == config.tma
        if config.warp_specialize:
            assert report["wide_stores"] > 0, "results must leave 16 bytes at a time: alignment is lost somewhere"
    elif target == "gfx942":
        assert report["mfma"] > 0
    else:
        assert report["mma"] + report["tcgen05"] > 0


def test_everything_that_is_shipped_is_compiled():
    table = tune_cache.nearest(H200.name)
    asked = {(r["dtype"], r["config"]) for r in REQUESTS if r["target"] == "sm90"}
    for format, texts in table.candidates.items():
        assert {(str(DTYPES[format]).removeprefix("torch."), t) for t in texts} <= asked
    assert {r["target"] for r in REQUESTS} == set(GPUS)
    assert not any(r["target"] == "sm80" and r["dtype"].startswith("float8") for r in REQUESTS)


def test_a_barrier_that_is_only_initialised_is_found():
    from gpuless import idle_barriers

    used = """
    %full = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64>
    %given = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64>
    %0 = ttg.memdesc_index %full[%c0] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64> loc(#loc1)
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64>
    %1 = ttg.memdesc_index %given[%c0] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %1, 2 : !ttg.memdesc<1xi64>
    ttg.warp_specialize(%x, %full, %given)
    """
    assert idle_barriers(used) == 0
    assert idle_barriers(used.replace(", %given)", ")")) == 1
    assert idle_barriers(used.replace(", %full, %given)", ")")) == 2
