"""What ``hopper_mm`` and ``grouped_mm`` hand to their kernels; the first needs a Hopper GPU (``test_hopper.py``)."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lowgmm.testing import make_operands
from lowgmm.tile_config import TileConfig

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


def test_the_launch_names_every_parameter_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowgmm.kernels import hopper

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper, "launch", lambda *arguments, **options: seen.append(arguments))
    config = TileConfig.parse("64x128x128-swap-tma-ws-queue1-4w4s")
    ticket = torch.zeros(1, dtype=torch.int32)
    for dtype in ("int8", "fp8", "bfloat16"):
        o = make_operands([5, 0, 200], 96, 128, dtype)
        y = torch.empty(205, 96, dtype=torch.bfloat16)
        for promote in (0, 128):
            hopper.hopper_mm(y, o.x, o.w, o.scales_x, o.scales_w, o.offsets, None, ticket, config, 132, promote, None)
            _, programs, *arguments = seen[-1]
            assert len(arguments) == len(hopper.hopper_kernel.arg_names)
            given = dict(zip(hopper.hopper_kernel.arg_names, arguments, strict=True))
            assert (given["M"], given["E"], given["N"], given["K"], given["stride_ym"]) == (205, 3, 96, 128, 96)
            assert (given["BM"], given["BN"], given["BK"], given["STAGES"]) == (64, 128, 128, 4)
            assert (given["GROUP"], given["INT"], given["PROMOTE"]) == (None, dtype == "int8", promote > 0)
            assert given["SCALED_X"] == given["SCALED_W"] == (o.scales_x is not None)
            assert given["x"].block_shape == [32, 128 // o.x.element_size()]  # only rows that exist are loaded
            assert given["w"].block_shape == [64, 128]
            assert (given["x"].shape, given["w"].shape) == ([205, 128], [288, 128])
            assert (
                programs == 3 + 4
            )  # ⌊205 / 64⌋ full row tiles, a partial one per group (rows behind the last too), one column
    assert len(seen) == 6


@pytest.mark.parametrize("format", ["int4", "int4_g32"])
def test_4_bit_weights_reach_the_kernel_as_bytes(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowgmm.kernels import grouped_mm, hopper

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper, "launch", lambda *arguments, **options: seen.append(arguments))
    monkeypatch.setattr(grouped_mm, "supports", lambda *_: None)
    config = TileConfig.parse("64x128x512-swap-tma-ws-queue1-4w2s")
    o = make_operands([5, 0, 200], 96, 320, format)
    y = torch.empty(205, 96, dtype=torch.bfloat16)
    grouped_mm.grouped_mm(y, o.x, o.weights.values, o.scales_x, o.scales_w, o.offsets, None, config)
    given = dict(zip(hopper.hopper_kernel.arg_names, seen[0][2:], strict=True))
    assert (given["M"], given["E"], given["N"], given["K"]) == (205, 3, 96, 320)
    assert (given["w"].block_shape, given["w"].shape) == ([64, 256], [288, 160])
    assert (given["x"].block_shape, given["x"].shape) == ([32, 128], [205, 320])
    assert (given["GROUP"], given["INT"], given["PROMOTE"]) == (32 if format == "int4_g32" else 0, True, False)
    assert (given["SCALED_X"], given["SCALED_W"]) == (True, format == "int4")
    scales = given["scales_w"]
    assert torch.equal(scales, o.scales_w if format == "int4" else o.scales_w.mT)
    assert scales.is_contiguous()


def test_the_portable_kernel_gets_the_promotion_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowgmm.kernels import grouped_mm

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(grouped_mm, "launch", lambda *arguments, **options: seen.append(arguments))
    config, o = TileConfig.parse("16x64x128-swap-queue2-4w3s"), make_operands([5, 0, 20], 96, 128, "fp8")
    y = torch.empty(25, 96, dtype=torch.bfloat16)
    for fast_accum in (False, True):
        grouped_mm.grouped_mm(y, o.x, o.w, o.scales_x, o.scales_w, o.offsets, None, config, fast_accum=fast_accum)
    names = grouped_mm.grouped_mm_kernel.arg_names
    given = [dict(zip(names, arguments, strict=True))["PROMOTE"] for _, _, *arguments in seen]
    assert given == [128, 0]
