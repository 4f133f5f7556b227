"""The layer in one warp-specialised launch on a Hopper GPU, at every edge; Triton's interpreter cannot run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowgmm
from lowgmm.formats import QuantTensor
from lowgmm.gpu import describe
from lowgmm.plan import LayerConfig, LayerProblem, supports
from lowgmm.testing import assert_within_budget

pytestmark = pytest.mark.gpu

TILES = ("16x64x128", "16x128x256", "32x256x128", "64x128x256", "64x256x128", "128x128x128", "128x256x128")
SHAPES = {  # T, A, E, H, I
    "one token": (1, 2, 8, 256, 128),
    "few": (5, 3, 8, 512, 192),
    "narrow edges": (33, 2, 5, 144, 80),
    "intermediate wider than hidden": (70, 2, 4, 256, 1168),
    "bands of row tiles": (1500, 1, 3, 256, 256),
    "hundreds of experts": (200, 4, 300, 128, 128),
    "many": (3000, 4, 16, 1024, 512),
}
OWN = "split-64-64x128-64x128-swap-4w3s2p"
"""The layer's portable kernels, which the interpreter has checked; FP8 sums are promoted as often."""


def weights(e: int, n: int, k: int, format: str | None) -> Any:
    w = torch.randn(e, n, k, device="cuda").mul_(k**-0.5).bfloat16()
    return w if format is None else lowgmm.quantize(w, format)


def config_of(tile: str, problem: LayerProblem) -> str:
    """The tile with as many stages as fit."""
    bm, n, k = (int(v) for v in tile.split("x"))
    k //= problem.dtype.itemsize
    up_n = n if problem.gate_up == "none" else n // 2
    why = None
    for stages in (4, 3, 2):
        config = LayerConfig("queue", bm, up_n, k, n, k, warp_specialize=True, num_stages=stages, programs_per_sm=1)
        why = supports(problem, config, describe(torch.device("cuda")))
        if why is None:
            return str(config)
    return pytest.skip(why or "")


def check(tile: str, shape: str, format: str | None, **options: Any) -> None:
    torch.manual_seed(0)
    T, A, E, H, I = SHAPES[shape]
    layout = options.get("gate_up", "concatenated")
    width = I if layout == "none" else 2 * I
    w13, w2 = weights(E, width, H, format), weights(E, H, I, format)
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    share, ids = torch.rand(T, E, device="cuda").topk(A)
    ids = torch.where(torch.rand(T, A, device="cuda") < 0.1, -1, ids)
    if options.pop("biased", False):
        options |= {"bias_w13": torch.randn(E, width, device="cuda"), "bias_w2": torch.randn(E, H, device="cuda")}
    dtype = w2.values.dtype if isinstance(w2, QuantTensor) else w2.dtype
    config = config_of(tile, LayerProblem(T, A, E, H, I, dtype, "token", layout))
    y = lowgmm.moe_ffn(hidden, w13, w2, ids, share, config=config, **options)
    again = lowgmm.moe_ffn(hidden, w13, w2, ids, share, config=config, **options)
    own = lowgmm.moe_ffn(hidden, w13, w2, ids, share, config=OWN, **options)
    exact = lowgmm.moe_ffn(hidden, w13, w2, ids, share, impl="reference", **options)
    assert torch.equal(y, again)
    assert_within_budget(y, exact.double(), own, config)
    if format == "int8":
        assert torch.equal(y, own)


@pytest.mark.parametrize("format", ["int8", "fp8", None])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_reference(shape: str, tile: str, format: str | None) -> None:
    check(tile, shape, format)


OPTIONS: dict[str, dict[str, Any]] = {
    "interleaved": {"gate_up": "interleaved"},
    "gpt-oss": {"gate_up": "interleaved", "activation": "swiglu_oai", "biased": True},
    "no gate": {"gate_up": "none", "activation": "relu2"},
    "gelu, weight on input, biased": {"activation": "gelu", "weight_on_input": True, "biased": True},
    "limit and clip": {"limit": 0.5, "clip": 2.0},
}


@pytest.mark.parametrize("format", ["int8", None])
@pytest.mark.parametrize("tile", ["16x64x128", "16x128x256", "64x256x128"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, tile: str, format: str | None) -> None:
    options = OPTIONS[name]
    if format is None and "clip" in options:
        options = {"limit": 0.5}
    for shape in ("few", "narrow edges", "bands of row tiles"):
        check(tile, shape, format, **options)


@pytest.mark.parametrize(
    ("T", "A", "E"),
    [(1, 8, 128), (16, 8, 128), (128, 8, 128), (129, 8, 128), (2048, 8, 64), (8192, 8, 128), (40_000, 4, 1000)],
)
@pytest.mark.parametrize("format", ["int8", None])
def test_arranging(format: str | None, T: int, A: int, E: int) -> None:
    """Slots sorted and tokens gathered while programs that sort wait for each other: the same every time."""
    from lowgmm import routing
    from lowgmm.formats import FORMATS
    from lowgmm.kernels.arrange import arrange
    from lowgmm.quant import quantize_rows

    H, fmt = 256, None if format is None else FORMATS[format]
    x = torch.randn(T, H, device="cuda").bfloat16()
    for _ in range(20):
        ids = torch.randint(-1, E + 1, (T, A), device="cuda", dtype=torch.int32)
        rows, scales = torch.zeros(T * A, 288, device="cuda"), torch.zeros(T * A, device="cuda")
        rows = rows.to(torch.bfloat16 if fmt is None else fmt.dtype)
        order, inverse, offsets, zeros = arrange(ids, x, rows, scales, E, fmt, None, T + 5)
        made = routing.route(ids, E)
        used = int(made.offsets[-1])
        tokens = (made.order // A)[:used]
        assert torch.equal(order.long(), made.order)
        assert torch.equal(inverse.long(), made.inverse)
        assert torch.equal(offsets, made.offsets.int())
        assert not zeros.any()
        want = x if fmt is None else quantize_rows(x, fmt)[0]
        assert torch.equal(rows[:used, :H], want[tokens])
        if fmt is not None:
            assert torch.equal(scales[:used], quantize_rows(x, fmt)[1].flatten()[tokens])
