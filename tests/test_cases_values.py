"""Reported faults of numbers: zeros, tiny scales, NaN and Inf, rounding, overflow, outliers, accumulation."""

from __future__ import annotations

import pytest
import torch

import lowgmm
from lowgmm import cpu
from lowgmm.formats import INT8, QuantTensor, get_format
from lowgmm.testing import Operands, check_gmm, make_operands
from test_cases_support import (
    BACKENDS,
    CPU,
    GMM_RUNS,
    KERNELS,
    LAYERS,
    SMALL,
    Backend,
    check_layer,
    kernels_only,
)

NAN, INF = float("nan"), float("inf")
# The CPU backend, and both operand orders of the mainloop: the launch modes share it.
RUNS = GMM_RUNS[:3]
# NumPy, which the interpreter computes with, warns where IEEE arithmetic is quiet.
ieee = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def tile(backend: Backend) -> str | None:
    return SMALL if backend.impl == "triton" else None


# ---- A12: zeros and tiny scales --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a12_zero_rows_and_dead_channels(backend: Backend, format: str, generator: torch.Generator) -> None:
    """No 0/0: a zero token, a token zero in one K block, a channel with scale 0, an expert with scales near 1e-23."""
    x = torch.randn(12, 96, generator=generator)
    w = torch.randn(3, 32, 96, generator=generator)
    sizes = torch.tensor([4, 4, 4])

    def run(x: torch.Tensor, weights: QuantTensor) -> torch.Tensor:
        args = (x.to(backend.device), weights.to(backend.device), None, None, None, sizes.to(backend.device))
        return lowgmm.gmm(*args, impl=backend.impl, config=tile(backend)).cpu()

    clean = run(x, lowgmm.quantize(w, format))
    x[0], x[1, 32:64], w[0, 5], w[2] = 0, 0, 0, w[2] * 1e-21
    weights = lowgmm.quantize(w, format)
    assert weights.scales[0, 5] == 0
    assert 0 < weights.scales[2].max() < 1e-21
    y = run(x, weights)
    assert y.isfinite().all()
    assert not y[0].any()
    assert not y[:4, 5].any()
    assert 0 < y[8:].abs().max() < 1e-17
    others = torch.arange(32) != 5
    assert torch.equal(y[2:4, others], clean[2:4, others])
    assert torch.equal(y[4:8], clean[4:8])
    xq, scales_x = lowgmm.quantize_tokens(x, format)
    check_gmm(y, Operands(xq, weights.operands[0], scales_x, weights.scales, sizes))


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a12_zero_tokens_in_packed_weights(format: str, generator: torch.Generator) -> None:
    """A zero token, and an expert whose first weights are all zero: finite, and exactly zero where it must be."""
    hidden = torch.randn(4, 32, generator=generator)
    hidden[2] = 0
    w13, w2 = torch.randn(2, 64, 32, generator=generator), torch.randn(2, 32, 32, generator=generator)
    w13[1] = 0
    module = lowgmm.MoEExperts.from_dense(w13, w2, format)
    y = module(hidden, torch.tensor([[0], [1], [0], [0]]), torch.ones(4, 1))
    assert y.isfinite().all()
    assert [bool(row.any()) for row in y] == [True, False, False, True]


# ---- A13: NaN and Inf stay where they are ----------------------------------------------------------------------------


def dirty(t: torch.Tensor) -> torch.Tensor:
    """The same values as a view of a larger buffer that is NaN around them."""
    buffer = t.new_full((*(n + 40 for n in t.shape),), NAN)
    view = buffer[tuple(slice(4, 4 + n) for n in t.shape)]
    return view.copy_(t)


@ieee
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("backend", "config"), RUNS)
def test_a13_bad_rows_stay_alone(backend: Backend, config: str | None, dtype: str) -> None:
    """A NaN token and an Inf token spoil their own rows only; all others keep their bits, whatever lies around."""
    o = make_operands([5, 33, 0, 31], 32, 64, "float32", seed=3, device=backend.device)
    x = o.x
    w: torch.Tensor | QuantTensor = o.w
    if dtype in ("int8", "fp8"):
        w = lowgmm.quantize(o.w, dtype)
    else:
        x, w = x.to(getattr(torch, dtype)), o.w.to(getattr(torch, dtype))

    def run(x: torch.Tensor) -> torch.Tensor:
        y = dirty(torch.empty(len(x), 32, device=backend.device))
        return lowgmm.gmm(dirty(x), w, None, None, o.offsets, None, y, impl=backend.impl, config=config)

    clean = run(x)
    assert clean.isfinite().all()
    x = x.clone()
    x[7, 11], x[20, 3] = NAN, INF
    y = run(x)
    good = torch.ones(len(x), dtype=torch.bool)
    good[[7, 20]] = False
    assert torch.equal(y.cpu()[good], clean.cpu()[good])
    assert y[7].isnan().all()
    assert not y[20].isfinite().any()


@ieee
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize(("backend", "config"), RUNS)
def test_a13_bad_scales_stay_alone(backend: Backend, config: str | None, format: str) -> None:
    """Scales of NaN belong to their own row and channel, and scales behind the last row to nobody."""
    o = make_operands([5, 20], 32, 64, format, device=backend.device)
    assert o.scales_x is not None
    assert o.scales_w is not None
    run = {"expert_offsets": o.offsets, "impl": backend.impl, "config": config}
    clean = lowgmm.gmm(o.x, o.w, dirty(o.scales_x), dirty(o.scales_w), **run)
    check_gmm(clean, o)
    sx, sw = o.scales_x.clone(), o.scales_w.clone()
    sx[7], sw[0, 3] = NAN, NAN
    y = lowgmm.gmm(o.x, o.w, dirty(sx), dirty(sw), **run)
    spoiled = torch.zeros(25, 32, dtype=torch.bool)
    spoiled[7] = spoiled[:5, 3] = True
    assert torch.equal(y.isnan().cpu(), spoiled)
    assert torch.equal(y.cpu()[~spoiled], clean.cpu()[~spoiled])


@ieee
@pytest.mark.parametrize("format", ["int8", "fp8", None])
@pytest.mark.parametrize("backend", LAYERS)
def test_a13_bad_tokens_of_a_layer_stay_alone(backend: Backend, format: str | None, generator: torch.Generator) -> None:
    hidden = torch.randn(9, 32, generator=generator)
    w13, w2 = torch.randn(2, 64, 32, generator=generator), torch.randn(2, 32, 32, generator=generator)
    ids, weights = torch.tensor([[0, 1]] * 9), torch.rand(9, 2, generator=generator)
    if format is None:
        layer = (w13.to(backend.device), w2.to(backend.device))
    else:
        layer = tuple(backend.place(lowgmm.quantize(w, format)) for w in (w13, w2))

    def run(hidden: torch.Tensor) -> torch.Tensor:
        args = (hidden.to(backend.device), *layer, ids.to(backend.device), weights.to(backend.device))
        return lowgmm.moe_ffn(*args, impl=backend.impl).cpu()

    clean = run(hidden)
    hidden[2, 7], hidden[5, 3] = NAN, INF
    y = run(hidden)
    good = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(y[good], clean[good])
    assert not y[[2, 5]].isfinite().any()


# ---- A14: rounding and saturation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a14_round_half_even_then_saturate(backend: Backend, dtype: torch.dtype) -> None:
    """At scale 1: ties go to even, what is beyond 127 stays at 127, and never wraps to -128."""
    pairs = [(127.4, 127), (127.5, 127), (127.6, 127), (128.5, 127), (1e4, 127), (126.5, 126), (125.5, 126)]
    pairs += [(0.5, 0), (1.5, 2), (2.5, 2), (3.5, 4), (0.25, 0), (0.75, 1), (0.0, 0)]
    given = torch.tensor([v for v, _ in pairs], dtype=dtype)
    expected = torch.tensor([q for _, q in pairs], dtype=torch.int8)
    x = torch.stack([given, -given]).to(backend.device)
    q, scales = lowgmm.quantize_tokens(x, "int8", clip=127.0, impl=backend.impl)
    assert scales.tolist() == [1.0, 1.0]
    assert torch.equal(q.cpu(), torch.stack([expected, -expected]))
    # The same conversion inside a matmul: the identity reads the values back.
    identity = torch.eye(len(pairs), dtype=torch.int8, device=backend.device).unsqueeze(0)
    args = {"expert_offsets": torch.tensor([0, 2], device=backend.device), "out_dtype": torch.float32, "clip": 127.0}
    y = lowgmm.gmm(x, identity, impl=backend.impl, config=tile(backend), **args)
    assert torch.equal(y.cpu(), torch.stack([expected, -expected]).float())
    if backend == CPU:
        packed = cpu.pack(QuantTensor(identity, torch.ones(1, len(pairs)), INT8))
        assert torch.equal(lowgmm.gmm(x, packed, **args), y)


@pytest.mark.parametrize("value", [-128, 127])
@pytest.mark.parametrize(("backend", "config"), RUNS)
def test_a14_extreme_weights_are_exact(backend: Backend, config: str | None, value: int) -> None:
    """-128 occurs in other tools' checkpoints. Equal signs over all of K are the worst case for 16-bit partial sums."""
    k_size = 192
    x = torch.full((4, k_size), 127, dtype=torch.int8)
    x[1], x[2, ::2], x[3] = -128, 0, -127
    w = torch.full((2, 32, k_size), value, dtype=torch.int8)
    w[1, 3] = torch.arange(k_size) % 2 - 128
    offsets = torch.tensor([0, 1, 4])
    exact = lowgmm.reference.gmm(x, w, expert_offsets=offsets)
    args = (x.to(backend.device), w.to(backend.device), None, None, offsets.to(backend.device))
    y = lowgmm.gmm(*args, out_dtype=torch.int32, impl=backend.impl, config=config)
    assert torch.equal(y.double().cpu(), exact)
    if backend == CPU:
        packed = cpu.pack(QuantTensor(w, torch.ones(2, 32), INT8))
        y = lowgmm.gmm(x, packed, expert_offsets=offsets, out_dtype=torch.float32)
        assert torch.equal(y.double(), exact)


# ---- A16: accumulation of FP8 on Hopper ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, "64x128x128-grid-4w3s", "16x128x256-swap-tma-persistent2-4w3s"])
@pytest.mark.parametrize("spike", [0, 127, 128, 4095])
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_a16_small_products_survive_a_large_one(rows: int, spike: int, config: str | None) -> None:
    """One product of 448² and 4095 of 0.40625: 14 bits of accumulator lose most of the small ones."""
    x, w = torch.full((rows, 4096), 0.5, device="cuda"), torch.full((1, 256, 4096), 0.8125, device="cuda")
    x[:, spike] = w[..., spike] = 448.0
    true = 448.0**2 + 4095 * 0.5 * 0.8125
    fp8 = torch.float8_e4m3fn
    args = (x.to(fp8), w.to(fp8), None, None, torch.tensor([0, rows], device="cuda"))
    y = lowgmm.gmm(*args, out_dtype=torch.float32, impl="triton", config=config)
    assert ((y - true).abs() <= true / 1000).all(), f"{y.flatten()[0].item()}, expected {true}"


# ---- A17: overflow of fp16 -------------------------------------------------------------------------------------------


def overflowing_layer(device: str) -> tuple[torch.Tensor, ...]:
    """gate = up = 300, whose product 90 000 is no fp16 number; the layer's result 2304 is one."""
    half = {"dtype": torch.float16, "device": device}
    hidden = torch.ones(3, 256, **half)
    w13 = torch.full((2, 512, 256), 300 / 256, **half)
    w2 = torch.full((2, 256, 256), 1e-4, **half)
    ids = torch.tensor([[0], [1], [0]], device=device)
    return hidden, w13, w2, ids, torch.ones(3, 1, device=device)


@pytest.mark.parametrize("backend", [*BACKENDS])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a17_fp16_layer_with_a_large_intermediate(backend: Backend, format: str) -> None:
    hidden, w13, w2, ids, weights = overflowing_layer(CPU.device)
    w13, w2 = (lowgmm.quantize(w, format).to(backend.device) for w in (w13, w2))
    args = (hidden.to(backend.device), w13, w2, ids.to(backend.device), weights.to(backend.device))
    y = lowgmm.moe_ffn(*args, impl=backend.impl)
    assert y.isfinite().all()
    check_layer(y, *args)


def test_a17_fp16_weights_with_a_large_intermediate() -> None:
    args = overflowing_layer(CPU.device)
    y = lowgmm.moe_ffn(*args)
    assert y.isfinite().all()
    check_layer(y, *args)


@pytest.mark.parametrize("format", ["int8", None])
def test_a17_large_expert_outputs_cancel(format: str | None) -> None:
    """Two experts' outputs, 100 000 and -20 000, exceed fp16; weighted by 0.1 and 0.9 they sum to -8 000."""
    half = torch.float16
    gate_up = torch.full((2, 32, 16), 1.0, dtype=half)  # gate = up = 16: intermediate 256
    down = torch.full((2, 16, 16), 100_000 / (256 * 16), dtype=half)
    down[1] *= -0.2
    w13, w2 = (gate_up, down) if format is None else (lowgmm.quantize(w, format) for w in (gate_up, down))
    args = (torch.ones(1, 16, dtype=half), w13, w2, torch.tensor([[0, 1]]), torch.tensor([[0.1, 0.9]]))
    y = lowgmm.moe_ffn(*args)
    assert y.isfinite().all()
    check_layer(y, *args)
    assert (y + 8000).abs().max() < 8000 * 0.02


# ---- A37: an outlier token leaves the others alone -------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a37_outlier_token(backend: Backend, format: str, generator: torch.Generator) -> None:
    """Scales are per token: multiplying token 3 by 1000 changes no bit of another."""
    x, w = torch.randn(12, 64, generator=generator), torch.randn(2, 32, 64, generator=generator)
    x[:, 9] *= 100
    weights = lowgmm.quantize(w, format).to(backend.device)
    sizes = torch.tensor([5, 7], device=backend.device)

    def run(x: torch.Tensor) -> torch.Tensor:
        args = (x.to(backend.device), weights, None, None, None, sizes)
        return lowgmm.gmm(*args, impl=backend.impl, config=tile(backend)).cpu()

    without = run(x)
    x[3] *= 1000
    y = run(x)
    others = torch.arange(12) != 3
    assert torch.equal(y[others], without[others])
    assert not torch.equal(y[3], without[3])


@kernels_only
def test_a37_outlier_elements_can_be_clipped(generator: torch.Generator) -> None:
    """With a clip threshold an outlier element takes no resolution from its own token, in every backend alike."""
    x = torch.randn(3, 64, generator=generator)
    x[1, 5] = 1000.0
    plain, clipped = (lowgmm.quantize_tokens(x, "int8", clip) for clip in (None, 4.0))
    assert (plain[0][1] != 0).sum() == 1
    assert (clipped[0][1] != 0).sum() > 50
    assert clipped[1][1] == torch.tensor(4.0) / get_format("int8").qmax
    on_kernels = lowgmm.quantize_tokens(x.to(KERNELS.device), "int8", 4.0, impl="triton")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_kernels, clipped, strict=True))
