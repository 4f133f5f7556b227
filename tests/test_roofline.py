"""Bytes, operations, bounds and advice: numbers worked out by hand, not by the code under test."""

from __future__ import annotations

import pytest
import torch

from lowgmm import gpu, roofline, tile_config, tune
from lowgmm.roofline import Load, Machine
from lowgmm.shapes import ShapeError, UnsupportedError

TOY = Machine("toy", bandwidth=1e12, peaks={"bf16": 100e12, "int8": 200e12, "fp8": 200e12})
CPU = Machine(
    "a cpu", 20e9, {"fp32": 200e9, "bf16": 200e9, "int8": 800e9, "fp8": 200e9}, is_gpu=False, native_fp8=False
)


@pytest.mark.parametrize(
    ("M", "elements", "fp16_bytes"),
    [
        pytest.param(64, 2 * 64 * 4096 / (64 + 4096 + 64), 62.06, id="about 60 FLOP/byte in 16 bits"),
        pytest.param(8, 2 * 8 * 4096 / (8 + 4096 + 8), 7.97, id="about 8 FLOP/byte in 16 bits"),
    ],
)
def test_intensity_of_a_square_expert(M: int, elements: float, fp16_bytes: float):
    assert roofline.element_intensity(M, 4096, 4096) == pytest.approx(elements, rel=1e-12)
    load = Load(4096, 4096, (M,), "fp16", "fp16")
    assert roofline.intensity(load) == pytest.approx(elements / 2, rel=1e-12)
    assert roofline.intensity(load) == pytest.approx(fp16_bytes, abs=0.005)


def test_int8_almost_doubles_the_intensity():
    """Almost: the output stays 16 bits wide and the scales come on top."""
    wide, narrow = (roofline.intensity(Load(4096, 4096, (8,), f, "bf16")) for f in ("bf16", "int8"))
    assert 1.98 < narrow / wide < 2


def test_traffic_counts_real_bytes():
    load = Load(N=10, K=100, sizes=(3, 0, 5), format="int8", out_format="bf16")
    moved = roofline.traffic(load)
    assert (moved.x, moved.weights, moved.scales, moved.output) == (800, 2 * 1000, 4 * (8 + 2 * 10), 8 * 10 * 2)
    assert roofline.flops(load) == 2 * 8 * 10 * 100


def test_experts_without_rows_move_nothing():
    dense, sparse = Load(64, 64, (4,), "bf16"), Load(64, 64, (0, 4, 0, 0), "bf16")
    assert roofline.traffic(dense) == roofline.traffic(sparse)


def test_float_formats_have_no_scales():
    assert roofline.traffic(Load(8, 8, (2,), "fp32", "fp32")).scales == 0


def test_a_load_without_rows_is_not_a_division_by_zero():
    empty = Load(8, 8, (0, 0), "int8")
    assert roofline.intensity(empty) == 0
    assert roofline.element_intensity(0, 8, 8) == 0
    assert roofline.advice(empty, TOY)


def test_bound_changes_at_the_machine_balance():
    assert TOY.balance("bf16") == 100
    few, many = Load(4096, 4096, (64,), "bf16"), Load(4096, 4096, (128,), "bf16")
    assert roofline.intensity(few) < 100 < roofline.intensity(many)
    assert (roofline.bound(few, TOY), roofline.bound(many, TOY)) == ("memory", "compute")
    assert roofline.roof_time(few, TOY) == roofline.memory_time(few, TOY)
    assert roofline.roof_time(many, TOY) == pytest.approx(2 * 128 * 4096 * 4096 / 100e12)


def test_share_of_roof():
    load = Load(1000, 1000, (1,), "bf16", "bf16")  # 2,004,000 bytes: 2.004 us at 1 TB/s
    assert roofline.share_of_roof(load, TOY, 4.008e-6) == pytest.approx(0.5)
    with pytest.raises(ShapeError, match="measured time is 0"):
        roofline.share_of_roof(load, TOY, 0)


@pytest.mark.parametrize(
    ("load", "machine", "measured", "config", "said"),
    [
        pytest.param(Load(512, 512, (4,) * 8, "bf16"), TOY, None, None, "cut these bytes by 2", id="16-bit decode"),
        pytest.param(Load(512, 512, (4,) * 8, "fp32"), CPU, None, None, "cut these bytes by 4", id="fp32 decode"),
        pytest.param(
            Load(512, 512, (4,) * 8), TOY, None, None, "larger batch", id="8-bit decode: nothing left but bits"
        ),
        pytest.param(
            Load(512, 512, (4,) * 8), TOY, 1e-3, None, "fix schedule and layout first", id="far from the roof"
        ),
        pytest.param(Load(4096, 4096, (2048,), "bf16"), TOY, None, None, "compute bound", id="prefill"),
        pytest.param(Load(4096, 4096, (2048,), "bf16"), TOY, 1.0, None, "larger block_k", id="slow prefill"),
        pytest.param(Load(512, 512, (4,), "fp8"), CPU, None, None, "FP8 is slow here", id="fp8 on a cpu"),
        pytest.param(Load(64, 64, (200, *[2] * 31)), TOY, None, None, "uneven experts", id="a hot expert"),
        pytest.param(
            Load(64, 64, (200, *[2] * 31)), TOY, None, "64x64x128-expert-4w3s", "use 'queue'", id="and one program each"
        ),
        pytest.param(
            Load(512, 512, (64,)), TOY, None, "64x64x32-grid-4w3s", "block_k=32 is too small", id="32 bytes of K"
        ),
        pytest.param(
            Load(512, 512, (4,)), TOY, None, "64x64x128-grid-4w3s", "mostly padding", id="tall tiles, few rows"
        ),
    ],
)
def test_advice(load: Load, machine: Machine, measured: float | None, config: str | None, said: str):
    tiles = None if config is None else tile_config.TileConfig.parse(config)
    assert said in " ".join(roofline.advice(load, machine, measured_s=measured, config=tiles))


@pytest.mark.parametrize(
    ("load", "config", "unsaid"),
    [
        pytest.param(Load(512, 512, (64,)), "64x64x128-grid-4w3s", "too small", id="128 bytes of K are enough"),
        pytest.param(Load(512, 512, (64,), "bf16"), "64x64x64-grid-4w3s", "too small", id="so are 64 16-bit elements"),
        pytest.param(Load(512, 512, (40, 30)), "64x64x128-grid-4w3s", "padding", id="tiles that are mostly full"),
        pytest.param(Load(512, 512, (40, 30)), "64x64x128-grid-4w3s", "uneven", id="nearly even experts"),
        pytest.param(Load(512, 512, (4,), "fp8"), "16x64x128-grid-4w3s", "FP8 is slow", id="fp8 where it is native"),
    ],
)
def test_advice_that_does_not_apply_is_not_given(load: Load, config: str, unsaid: str):
    assert unsaid not in " ".join(roofline.advice(load, TOY, config=tile_config.TileConfig.parse(config)))


def test_explain_names_the_configuration_that_would_run():
    text = roofline.explain(64, 2048, 4096, 16, "int8", gpu=gpu.H200)
    problem = tile_config.Problem(E=64, M=1024, N=2048, K=4096, dtype=torch.int8)
    assert str(tune.pick(problem, gpu.H200)) in text
    assert f"predicted {tune.predict(problem, tune.pick(problem, gpu.H200), gpu.H200) * 1e6:.1f} us; " in text
    assert "memory bound" in text


@pytest.mark.parametrize("facts", [gpu.H200, None])
def test_explain_takes_a_configuration_as_gmm_does(facts: gpu.Gpu | None):
    text = "64x64x128-grid-4w3s"
    config = tile_config.TileConfig.parse(text)
    found = roofline.explain(64, 2048, 4096, 16, gpu=facts, config=text)
    assert f"tiles     {text}" in found
    assert found == roofline.explain(64, 2048, 4096, 16, gpu=facts, config=config)


def test_explain_places_a_measured_time():
    floor = roofline.roof_time(Load(2048, 4096, (16,) * 64), roofline.H200)
    assert "80% of the floor's rate" in roofline.explain(64, 2048, 4096, 16, measured_s=floor / 0.8)


def test_errors_name_what_is_wrong():
    with pytest.raises(ShapeError, match="rows has 3 numbers, expected one number or E=2"):
        roofline.explain(2, 8, 8, [1, 2, 3])
    with pytest.raises(UnsupportedError, match="format is 'int3', expected one of fp32"):
        Load(8, 8, (1,), "int3")
    with pytest.raises(ShapeError, match="at least one expert"):
        Load(8, 8, ())
    with pytest.raises(UnsupportedError, match="no rate for 'fp32', only for: bf16"):
        roofline.bound(Load(8, 8, (1,), "fp32"), TOY)
