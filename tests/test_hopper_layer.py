"""The layer in one warp-specialised launch on a Hopper GPU, at every edge; Triton's interpreter cannot run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import lowgmm
from lowgmm.formats import QuantTensor
from lowgmm.gpu import describe
from lowgmm.kernels.queue import counters
from lowgmm.plan import LayerConfig, LayerProblem, pick, supports
from lowgmm.shapes import UnsupportedError
from lowgmm.testing import assert_within_budget
from overlap import hold

pytestmark = pytest.mark.gpu

TILES = ("16x64x128", "16x128x256", "32x256x128", "64x128x256", "64x256x128", "128x128x128", "128x256x128")
SHAPES = {  # T, A, E, H, I
    "one token": (1, 2, 8, 256, 128),
    "few": (5, 3, 8, 512, 192),
    "narrow edges": (33, 2, 5, 144, 80),
    "intermediate wider than hidden": (70, 2, 4, 256, 1168),
    "odd numbers of steps": (2, 2, 6, 1088, 576),
    "bands of row tiles": (3900, 1, 3, 256, 256),
    "hundreds of experts": (200, 4, 300, 128, 128),
    "many": (3000, 4, 16, 1024, 512),
}
OWN = "split-64-64x128-64x128-swap-4w3s2p"
"""The layer's portable kernels, which the interpreter has checked; FP8 sums are promoted as often."""


def weights(e: int, n: int, k: int, format: str | None) -> Any:
    w = torch.randn(e, n, k, device="cuda").mul_(k**-0.5).bfloat16()
    return w if format is None else lowgmm.quantize(w, format)


def config_of(tile: str, problem: LayerProblem, launch: str = "queue") -> str:
    """The tile with as many stages as fit."""
    bm, n, k = (int(v) for v in tile.split("x"))
    k //= problem.dtype.itemsize
    up_n = n if problem.gate_up == "none" else n // 2
    why = None
    for stages in (4, 3, 2):
        config = LayerConfig(launch, bm, up_n, k, n, k, warp_specialize=True, num_stages=stages, programs_per_sm=1)
        why = supports(problem, config, describe(torch.device("cuda")))
        if why is None:
            return str(config)
    return pytest.skip(why or "")


def check(tile: str, shape: str, format: str | None, launch: str = "queue", **options: Any) -> None:
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
    config = config_of(tile, LayerProblem(T, A, E, H, I, dtype, "token", layout), launch)
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


ONE_TOKEN = {
    "more than one chunk": (1, 3, 6, 8704, 64),
    "odd": (1, 5, 7, 208, 400),
    "odd numbers of steps": (1, 3, 6, 1088, 576),
    "one slot": (1, 1, 3, 1024, 2048),
    "32 slots": (1, 32, 40, 256, 768),
}


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("tile", ["16x64x128", "16x128x128", "16x128x256"])
@pytest.mark.parametrize("shape", ONE_TOKEN)
def test_one_token(shape: str, tile: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched ahead of the layer; its counters are zero again when it ends."""
    monkeypatch.setitem(SHAPES, shape, ONE_TOKEN[shape])
    for options in ({}, *OPTIONS.values()) if shape == "odd" else ({},):  # each compiles kernels of its own
        if not (options.get("gate_up") == "none" and tile == "16x64x128"):
            check(tile, shape, format, "direct", **options)
    assert not counters(torch.device("cuda", torch.cuda.current_device())).any()


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("tile", ["16x64x128", "16x128x256"])
def test_one_token_after_the_other(tile: str, format: str) -> None:
    """From one to all slots have an expert, and none, in memory full of NaN: each call finds its counters at zero."""
    torch.manual_seed(0)
    A, E, H, I = 6, 9, 400, 208
    w13, w2 = weights(E, 2 * I, H, format), weights(E, H, I, format)
    hidden, share = torch.randn(1, H, device="cuda").bfloat16(), torch.rand(1, A, device="cuda")
    config = config_of(tile, LayerProblem(1, A, E, H, I, w2.values.dtype), "direct")
    for size in (1 << 12, 1 << 13, 1 << 16):
        torch.full((size,), float("nan"), device="cuda")
    for count in (1, 6, 0, 3, 2, 0, 5, 6, 4):
        ids = torch.randint(0, E, (1, A), device="cuda")
        ids[0, torch.randperm(A, device="cuda")[count:]] = -1
        y, own = (lowgmm.moe_ffn(hidden, w13, w2, ids, share, config=c) for c in (config, OWN))
        exact = lowgmm.moe_ffn(hidden, w13, w2, ids, share, impl="reference")
        assert_within_budget(y, exact.double(), own, f"{count} experts")
        assert count or not y.view(torch.int16).any()
        assert format == "fp8" or torch.equal(y, own)
        assert all(torch.equal(lowgmm.moe_ffn(hidden, w13, w2, ids, share, config=config), y) for _ in range(20))
        assert not counters(torch.device("cuda", torch.cuda.current_device())).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("T", [1, 40, 200, 1000])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_other_dtypes_of_hidden(format: str, T: int, dtype: torch.dtype) -> None:
    """h and the slots' outputs are float32 then, twice as large in shared memory; what is picked must still fit."""
    torch.manual_seed(0)
    w13, w2 = weights(8, 2 * 320, 512, format), weights(8, 512, 320, format)
    hidden = torch.randn(T, 512, device="cuda", dtype=dtype)
    share, ids = torch.rand(T, 8, device="cuda").topk(2)
    picked = pick(LayerProblem(T, 2, 8, 512, 320, w2.values.dtype, h_size=4), describe(torch.device("cuda")))
    assert picked is not None
    assert picked.warp_specialize
    y, own = (lowgmm.moe_ffn(hidden, w13, w2, ids, share, config=config) for config in (None, OWN))
    exact = lowgmm.moe_ffn(hidden, w13, w2, ids, share, impl="reference")
    assert y.dtype == dtype
    assert_within_budget(y, exact.double(), own, str(picked))
    if format == "int8":
        assert torch.equal(y, own)


def test_weights_that_tma_cannot_address() -> None:
    """8 bytes off: the portable kernels run instead, with the same bits; asking for the others is refused."""
    torch.manual_seed(0)
    w13, w2 = weights(4, 2 * 64, 128, "int8"), weights(4, 128, 64, "int8")
    hidden = torch.randn(9, 128, device="cuda").bfloat16()
    share, ids = torch.rand(9, 4, device="cuda").topk(2)
    want = lowgmm.moe_ffn(hidden, w13, w2, ids, share)
    config = config_of("16x128x256", LayerProblem(9, 2, 4, 128, 64, torch.int8))
    for moved13, moved2 in ((True, False), (False, True)):
        w = [elsewhere(q) if moved else q for q, moved in ((w13, moved13), (w2, moved2))]
        assert torch.equal(lowgmm.moe_ffn(hidden, *w, ids, share), want)
        with pytest.raises(UnsupportedError, match="multiple of 16 bytes"):
            lowgmm.moe_ffn(hidden, *w, ids, share, config=config)


def elsewhere(w: QuantTensor) -> QuantTensor:
    memory = torch.empty(w.values.numel() + 8, dtype=w.values.dtype, device="cuda")[8:].view(w.values.shape)
    assert memory.data_ptr() % 16 == 8
    return replace(w, values=memory.copy_(w.values))


EXTREME = {
    "nobody has an expert": lambda T, A: torch.full((T, A), -1),
    "one expert takes all": lambda T, A: torch.full((T, A), 3),
    "wider than 32 bits": lambda T, A: torch.arange(T * A).view(T, A) % 11 * 2**32 + torch.arange(T * A).view(T, A) % 7,
    "all of some tokens": lambda T, A: torch.where(torch.arange(T).view(T, 1) % 3 == 0, 99, torch.arange(A) % 5),
}


@pytest.mark.parametrize("format", ["int8", "fp8", None])
@pytest.mark.parametrize("tile", ["16x128x256", "128x256x128"])
@pytest.mark.parametrize("T", [1, 70, 1500])
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_ids(name: str, T: int, tile: str, format: str | None) -> None:
    """Memory that is reused is full of NaN before: whatever is read without having been written shows."""
    check_extreme(name, T, tile, format, "queue")


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("tile", ["16x64x128", "16x128x256"])
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_ids_of_one_token(name: str, tile: str, format: str) -> None:
    check_extreme(name, 1, tile, format, "direct")


def check_extreme(name: str, T: int, tile: str, format: str | None, launch: str) -> None:
    torch.manual_seed(0)
    E, A, H, I = 5, 4, 144, 80
    w13, w2 = weights(E, 2 * I, H, format), weights(E, H, I, format)
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    share, ids = torch.rand(T, A, device="cuda"), EXTREME[name](T, A).cuda()
    inside = (ids >= 0) & (ids < E)
    share = torch.where(inside, share, float("nan"))
    dtype = w2.values.dtype if isinstance(w2, QuantTensor) else w2.dtype
    config = config_of(tile, LayerProblem(T, A, E, H, I, dtype), launch)
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        torch.full((size,), float("nan"), device="cuda")
    y = lowgmm.moe_ffn(hidden, w13, w2, ids, share, config=config)
    assert not y[~inside.any(1)].any()
    used = torch.where(inside, share, 0)
    own = lowgmm.moe_ffn(hidden, w13, w2, torch.where(inside, ids, -1), used, config=OWN)
    exact = lowgmm.moe_ffn(hidden, w13, w2, torch.where(inside, ids, -1), used, impl="reference")
    assert_within_budget(y, exact.double(), own, name)


@pytest.mark.parametrize("format", ["int8", "fp8", None])
@pytest.mark.parametrize("tile", ["16x128x256", "64x256x128", "128x256x128"])
def test_nan_stays_in_its_token(tile: str, format: str | None) -> None:
    """Its rows lie between others', in tiles whose dead rows are read too."""
    torch.manual_seed(0)
    T, A, E, H, I = 90, 3, 4, 256, 128
    w13, w2 = weights(E, 2 * I, H, format), weights(E, H, I, format)
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    share, ids = torch.rand(T, E, device="cuda").topk(A)
    dtype = w2.values.dtype if isinstance(w2, QuantTensor) else w2.dtype
    config = config_of(tile, LayerProblem(T, A, E, H, I, dtype))
    clean = lowgmm.moe_ffn(hidden, w13, w2, ids, share, config=config)
    spoilt = hidden.clone()
    spoilt[::7, 5] = float("nan")
    y = lowgmm.moe_ffn(spoilt, w13, w2, ids, share, config=config)
    others = torch.arange(T, device="cuda") % 7 != 0
    assert y[~others].isnan().all()
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("T", [1, 2, 8, 300, 3000])
def test_layers_side_by_side(T: int, graphs: bool) -> None:
    """Three layers at once on streams of their own, each with as many programs as the chip has SMs, many times."""
    torch.manual_seed(0)
    E, A, H, I = 16, 4, 512, 256
    w13, w2 = weights(E, 2 * I, H, "int8"), weights(E, H, I, "int8")
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    routes = [torch.rand(T, E, device="cuda").topk(A) for _ in range(3)]
    calls = [lambda r=r: lowgmm.moe_ffn(hidden, w13, w2, r.indices, r.values) for r in routes]
    want = [call() for call in calls]
    streams, made = [torch.cuda.Stream() for _ in calls], []
    for call in calls if graphs else ():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
        made.append((graph, y))
    for _ in range(30):
        results = []
        hold(streams)
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if graphs:
                    made[i][0].replay()
                results.append([made[i][1].clone()] if graphs else [calls[i]() for _ in range(3)])
        torch.cuda.synchronize()
        for ys, w in zip(results, want, strict=True):
            assert all(torch.equal(y, w) for y in ys)


def test_no_token_count_compiles_its_own_kernels() -> None:
    """As many variants as there are tile heights and forms of the sort, and no more, of 40 token counts."""
    from lowgmm.kernels.arrange import gather_kernel, sort_kernel
    from lowgmm.kernels.combine import combine_kernel
    from lowgmm.kernels.hopper_layer import hopper_layer_kernel

    E, A, H, I = 13, 3, 272, 144
    w13, w2 = weights(E, 2 * I, H, "int8"), weights(E, H, I, "int8")
    kernels = (hopper_layer_kernel, gather_kernel, sort_kernel, combine_kernel)
    before = [variants(kernel) for kernel in kernels]
    for T in (*range(1, 34), 48, 129, 341, 342, 1000, 1365, 1366, 4000):
        hidden = torch.randn(T, H, device="cuda").bfloat16()
        share, ids = torch.rand(T, E, device="cuda").topk(A)
        lowgmm.moe_ffn(hidden, w13, w2, ids, share)
    made = [variants(kernel) - b for kernel, b in zip(kernels, before, strict=True)]
    assert all(n <= most for n, most in zip(made, (6, 4, 1, 2), strict=True)), made
    assert variants(hopper_layer_kernel) > 0  # those counted above may have been compiled for other tests


def variants(kernel: Any) -> int:
    return len(kernel.device_caches[torch.cuda.current_device()][0])


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
