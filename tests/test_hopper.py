"""The warp-specialised kernel on a Hopper GPU, at every edge; nothing else can run it (Triton's interpreter cannot)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowgmm
from lowgmm.formats import FORMATS, QuantTensor
from lowgmm.gpu import describe
from lowgmm.testing import Operands, check_gmm, make_operands
from lowgmm.tile_config import Problem, TileConfig, supports
from lowgmm.tune import NIBBLES, candidates
from overlap import hold

pytestmark = pytest.mark.gpu

TILES = ("16x128x256", "32x256x128", "64x128x128", "64x256x128", "128x128x128", "128x256x128")
CASES = {
    "plain": ((40, 3, 128, 17), 256, 512, 0),
    "empty experts and rows behind the last": ((0, 130, 0, 1, 0), 128, 256, 77),
    "no expert has rows": ((0, 0, 0), 128, 128, 9),
    "narrow N and a K tail": ((9, 33), 72, 144, 3),
    "N that is no multiple of 16": ((70, 5), 100, 272, 0),
    "more experts than a warp counts at a time": ((1, 0, 5) * 15, 192, 128, 5),
    "hundreds of experts": ((2,) * 300, 64, 128, 0),
    "one row": ((1,), 64, 64, 0),
    "bands of row tiles": ((2100, 40), 512, 128, 0),
}
DTYPES = ("int8", "fp8", "bfloat16", "float16")


def config_of(tile: str, o: Operands, out_dtype: torch.dtype) -> str:
    """The tile with as many stages as fit."""
    bm, bn, bk = (int(v) for v in tile.split("x"))
    problem = Problem(len(o.sizes), len(o.x), o.w.shape[1], o.w.shape[2], o.x.dtype, out_dtype)
    reasons = []
    for stages in (4, 3, 2):
        config = TileConfig(bm, bn, bk // o.x.element_size(), True, True, True, "queue", 1, 4, stages)
        reasons.append(supports(problem, config, describe(o.x.device)))
        if reasons[-1] is None:
            return str(config)
    return pytest.skip(reasons[-1] or "")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str, tile: str, dtype: str) -> None:
    sizes, n_size, k_size, behind = CASES[name]
    o = make_operands(list(sizes), n_size, k_size, dtype, extra_rows=behind, device="cuda")
    bias = torch.randn(len(sizes), n_size, device="cuda")
    for out_dtype in (torch.bfloat16, torch.float32):
        config = config_of(tile, o, out_dtype)
        call = {"expert_sizes": o.sizes, "out_dtype": out_dtype, "config": config}
        y = lowgmm.gmm(o.x, o.weights, o.scales_x, **call)
        check_gmm(y, o, config)
        assert not y[int(o.sizes.sum()) :].any()
        assert torch.equal(y, lowgmm.gmm(o.x, o.weights, o.scales_x, **call)), "two calls differ"
        with_bias = lowgmm.gmm(o.x, o.weights, o.scales_x, bias=bias, **call)
        rows = torch.repeat_interleave(torch.arange(len(sizes), device="cuda"), o.sizes)
        used = len(rows)
        if not used:
            continue
        want = y[:used].float() + bias[rows]
        torch.testing.assert_close(with_bias[:used].float(), want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", CASES)
def test_int8_sums_are_exact(name: str, tile: str) -> None:
    sizes, n_size, k_size, behind = CASES[name]
    o = make_operands(list(sizes), n_size, k_size, "int8", extra_rows=behind, device="cuda")
    y = lowgmm.gmm(o.x, o.w, expert_sizes=o.sizes, out_dtype=torch.int32, config=config_of(tile, o, torch.int32))
    assert torch.equal(y.double(), replace(o, scales_x=None, scales_w=None).exact())


@pytest.mark.parametrize("format", ["int4", "int4_g128", "int4_g64", "int4_g32"])
@pytest.mark.parametrize("name", CASES)
def test_4_bit_weights_give_the_bits_of_the_cpu(name: str, format: str) -> None:
    """Whatever could be picked: sums are exact, and groups' sums are added in K order everywhere."""
    sizes, n_size, k_size, behind = CASES[name]
    host = make_operands(list(sizes), n_size, k_size, format, extra_rows=behind)
    bias = torch.randn(len(sizes), n_size)
    weights, (x, scales, groups, shift) = (
        host.weights.to("cuda"),
        (t.cuda() for t in (host.x, host.scales_x, host.sizes, bias)),
    )
    group = FORMATS[format].group or 0
    for out_dtype in (torch.bfloat16, torch.float32):
        want = lowgmm.gmm(host.x, host.weights, host.scales_x, expert_sizes=host.sizes, bias=bias, out_dtype=out_dtype)
        problem = Problem(len(sizes), len(x), n_size, k_size, torch.uint8, out_dtype, group)
        for config in (None, *map(str, candidates(problem, describe(x.device)))):
            call = {"expert_sizes": groups, "bias": shift, "out_dtype": out_dtype, "config": config}
            assert torch.equal(lowgmm.gmm(x, weights, scales, **call).cpu(), want), config


def test_rows_of_a_wider_tensor_and_neighbours_are_respected() -> None:
    o = make_operands([40, 9], 128, 256, "int8", device="cuda")
    wide = torch.full((49, 160), 7.0, device="cuda", dtype=torch.bfloat16)
    lowgmm.gmm(
        o.x, o.weights, o.scales_x, expert_sizes=o.sizes, output=wide[:, 16:144],
        config=config_of("64x128x128", o, torch.bfloat16),
    )  # fmt: skip
    check_gmm(wide[:, 16:144].contiguous(), o)
    assert (wide[:, :16] == 7).all()
    assert (wide[:, 144:] == 7).all()


@pytest.mark.parametrize("dtype", ["int8", "int4_g128"])
def test_graphs_and_streams_side_by_side(dtype: str) -> None:
    """The queue's counter: left at zero by every launch, and never shared by launches that may overlap."""
    operands = [make_operands([300, 20, 7], 512, 1024, dtype, device="cuda", seed=seed) for seed in range(4)]
    config = config_of("64x128x128", operands[0], torch.bfloat16) if dtype == "int8" else NIBBLES[128][2]
    operands = [(o, o.weights) for o in operands]

    def call(operands: tuple[Operands, torch.Tensor | QuantTensor]) -> torch.Tensor:
        o, weights = operands
        return lowgmm.gmm(o.x, weights, o.scales_x, expert_sizes=o.sizes, config=config)

    want = [call(o) for o in operands]
    graphs, outputs = [], []
    for o in operands[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(call(o))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(50):
        hold(streams)
        for stream, graph in zip(streams[:2], graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream, o in zip(streams[2:], operands[2:], strict=True):
            with torch.cuda.stream(stream):
                outputs.append(call(o))
    torch.cuda.synchronize()
    for i, y in enumerate(outputs):
        assert torch.equal(y, want[i if i < 2 else 2 + i % 2])


def test_reduce_overhead_compiles_the_first_call_into_a_graph() -> None:
    o = make_operands([30, 20], 128, 256, "int8", device="cuda")
    config = config_of("64x128x128", o, torch.bfloat16)
    call = torch.compile(
        lambda x, s: lowgmm.gmm(x, o.weights, s, expert_offsets=o.offsets, config=config) + 1, mode="reduce-overhead"
    )
    want = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_offsets=o.offsets, config=config) + 1
    for _ in range(4):
        assert torch.equal(call(o.x, o.scales_x).clone(), want)


def test_fast_accumulation_is_a_choice_with_a_price() -> None:
    """FP8 without promotion: more error at a large K than with it, never silently; INT8 does not change by a bit."""
    errors = {}
    for dtype in ("fp8", "int8"):
        o = make_operands([128], 128, 16384, dtype, device="cuda")
        exact = o.exact()
        for fast in (False, True):
            y = lowgmm.gmm(
                o.x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=torch.float32, fast_accum=fast,
                config=config_of("128x128x128", o, torch.float32),
            )  # fmt: skip
            errors[dtype, fast] = float((y - exact).norm() / exact.norm())
    assert errors["int8", True] == errors["int8", False]
    assert errors["fp8", False] < errors["fp8", True] < 0.01
