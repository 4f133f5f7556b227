"""The definition of each format, and the kernel that must reproduce it to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import cpu
from lowgmm.formats import FORMATS, FP8, INT8, QuantFormat, QuantTensor, format_of, get_format
from lowgmm.quant import SMALLEST_ABSMAX, quantize_rows
from lowgmm.shapes import DtypeError, ShapeError, UnsupportedError
from test_cases_support import BACKENDS, KERNELS, Backend, kernels_only

NAN, INF = float("nan"), float("inf")
formats = pytest.mark.parametrize("fmt", [INT8, FP8], ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def bits(t: Tensor) -> Tensor:
    """The stored bits: NaN equals itself, -0 differs from 0."""
    return t.cpu().contiguous().view(torch.uint8)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_even_and_127_is_the_end(backend: Backend) -> None:
    row = [127.0, 0.5, 1.5, 2.5, 3.5, 126.5, 125.5, 0.49999997, 126.9]
    want = [127, 0, 2, 2, 4, 126, 126, 0, 127]
    x = torch.tensor([row, [-v for v in row]], device=backend.device)
    q, scales = lowgmm.quantize_tokens(x, "int8", impl=backend.impl)
    assert scales.tolist() == [1.0, 1.0]
    assert q.tolist() == [want, [-v for v in want]]


@formats
def test_the_largest_magnitude_takes_the_largest_code(fmt: QuantFormat, generator: torch.Generator) -> None:
    x = torch.randn(50, 40, generator=generator) * torch.logspace(-20, 20, 50).unsqueeze(1)
    q, scales = quantize_rows(x, fmt)
    assert torch.equal(q.float().abs().amax(1), torch.full((50,), fmt.qmax))
    assert torch.equal(scales, x.abs().amax(1) / fmt.qmax)


def test_int8_error_is_at_most_half_a_step(generator: torch.Generator) -> None:
    """Half a scale, plus the rounding of the FP32 quotient, which moves a tie by 127·2⁻²⁴ steps or so."""
    w = torch.randn(3, 20, 50, generator=generator)
    q = lowgmm.quantize(w, "int8")
    steps = (lowgmm.dequantize(q, torch.float64) - w.double()).abs() / q.scales.unsqueeze(-1)
    assert 0.45 < steps.max() <= 0.5 + 128 * torch.finfo(torch.float32).eps


def test_fp8_error_is_at_most_half_a_unit_of_three_mantissa_bits(generator: torch.Generator) -> None:
    w = torch.randn(3, 20, 50, generator=generator)
    q = lowgmm.quantize(w, "fp8")
    scaled = w.double() / q.scales.double().unsqueeze(-1)
    error = (q.plain().double() - scaled).abs()
    unit = torch.exp2(scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)  # below 2⁻⁶ codes are 2⁻⁹ apart
    assert 0.45 < (error / unit).max() <= 0.5 + 512 * torch.finfo(torch.float32).eps


@formats
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_rows_have_scale_zero(fmt: QuantFormat, backend: Backend) -> None:
    x = torch.ones(3, 9, device=backend.device)
    x[1] = 0
    q, scales = lowgmm.quantize_tokens(x, fmt.name, impl=backend.impl)
    assert (scales == 0).tolist() == [False, True, False]
    assert not q[1].float().any()
    assert torch.equal(q[0].float().cpu(), torch.full((9,), fmt.qmax))


@formats
def test_zero_channels_dequantise_to_zero(fmt: QuantFormat) -> None:
    w = torch.ones(2, 3, 8)
    w[1, 2] = 0
    q = lowgmm.quantize(w, fmt.name)
    assert q.scales[1, 2] == 0
    dense = lowgmm.dequantize(q)
    assert torch.equal(dense[1, 2], torch.zeros(8))
    assert (dense[:, :2] == 1).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@formats
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_rows_say_so_in_their_scale(fmt: QuantFormat, backend: Backend, bad: float) -> None:
    """The scale carries NaN or Inf into the product; the codes stay finite, and other rows keep their bits."""
    x = torch.linspace(-3, 3, 24, device=backend.device).view(3, 8)
    clean, clean_scales = lowgmm.quantize_tokens(x, fmt.name, impl=backend.impl)
    x[1, 4] = bad
    q, scales = lowgmm.quantize_tokens(x, fmt.name, impl=backend.impl)
    assert scales.isfinite().tolist() == [True, False, True]
    assert scales[1].isnan() if bad != bad else scales[1] == INF
    assert q.float().isfinite().all()
    assert torch.equal(bits(q[::2]), bits(clean[::2]))
    assert torch.equal(scales[::2], clean_scales[::2])


@formats
def test_tiny_rows(fmt: QuantFormat) -> None:
    """Down to SMALLEST_ABSMAX rows keep their full resolution; below they fade to zero, without NaN or Inf."""
    tiny = SMALLEST_ABSMAX * torch.tensor([[4.0, -2.0], [1.0, -0.5], [2.0**-10, 0.0], [2.0**-40, 0.0]])
    q, scales = quantize_rows(tiny, fmt)
    assert scales.isfinite().all()
    assert (q.float()[:2].abs().amax(1) == fmt.qmax).all()
    assert (q.float() * scales.unsqueeze(1) - tiny).abs().max() <= SMALLEST_ABSMAX
    assert (q.float()[2:].abs() < fmt.qmax).all()


@formats
@pytest.mark.parametrize("backend", BACKENDS)
def test_clip(fmt: QuantFormat, backend: Backend) -> None:
    """A threshold bounds the scale, saturates what is beyond, and leaves rows below it as they were."""
    x = torch.tensor([[1.0, -2.0, 100.0], [0.5, -0.25, 0.125], [2.0, -100.0, 1.0]], device=backend.device)
    plain, plain_scales = lowgmm.quantize_tokens(x, fmt.name, impl=backend.impl)
    q, scales = lowgmm.quantize_tokens(x, fmt.name, 2.0, impl=backend.impl)
    assert torch.equal(scales[[0, 2]].cpu(), torch.full((2,), 2.0) / fmt.qmax)
    assert q.float().sign().mul(fmt.qmax)[[0, 0, 2, 2], [1, 2, 0, 1]].tolist() == [
        -fmt.qmax,
        fmt.qmax,
        fmt.qmax,
        -fmt.qmax,
    ]
    assert q.float()[[0, 0, 2, 2], [1, 2, 0, 1]].abs().tolist() == [fmt.qmax] * 4
    assert torch.equal(bits(q[1]), bits(plain[1]))
    assert scales[1] == plain_scales[1]
    with pytest.raises(ShapeError, match=r"'clip' is 0\.0, expected a positive threshold"):
        lowgmm.quantize_tokens(x, fmt.name, 0.0, impl=backend.impl)


# ---- the kernel equals the definition --------------------------------------------------------------------------------


def hard_rows(dtype: torch.dtype, width: int) -> Iterator[tuple[str, Tensor]]:
    """Rows on which two quantisers are most likely to differ."""
    g = torch.Generator().manual_seed(7)
    yield "normal", torch.randn(3, width, generator=g)
    # Scale 1 exactly, with every tie of INT8 and of FP8 in reach.
    ties = torch.arange(width) / 2 - width / 4
    yield "int8 ties", torch.cat([ties.clamp(-127, 127), torch.tensor([127.0])]).unsqueeze(0)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    yield "fp8 ties", torch.cat([(codes[:-1] + codes[1:]) / 2, torch.tensor([448.0])]).unsqueeze(0)
    yield "fp8 subnormals", torch.cat([torch.arange(33) * 2.0**-10, torch.tensor([448.0])]).unsqueeze(0)
    yield "wide range", torch.randn(2, width, generator=g) * torch.logspace(-6, 4, width)
    yield "tiny", torch.randn(2, width, generator=g) * torch.finfo(dtype).tiny
    yield "subnormal inputs", torch.randint(-9, 9, (1, width), generator=g) * torch.finfo(dtype).smallest_normal / 16
    yield "huge", torch.randn(2, width, generator=g).clamp(-1, 1) * torch.finfo(dtype).max
    yield "zero", torch.zeros(1, width)
    yield "negative zero", torch.tensor([[-0.0, 1.0]])
    yield "inf", torch.tensor([[INF, 1.0], [-INF, 2.0]])


# NumPy, which the interpreter computes with, warns where IEEE arithmetic is quiet.
ieee = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@ieee
@kernels_only
@dtypes
@pytest.mark.parametrize(
    ("fmt", "clip"),
    [
        pytest.param(INT8, None, id="int8"),
        pytest.param(INT8, 1.5, id="int8 clipped"),
        pytest.param(FP8, None, id="fp8"),
        pytest.param(FP8, 1.5, id="fp8 clipped"),
    ],
)
def test_kernel_equals_the_definition(fmt: QuantFormat, dtype: torch.dtype, clip: float | None) -> None:
    for name, rows in hard_rows(dtype, 70):
        x = rows.to(dtype)
        values, scales = quantize_rows(x, fmt, clip)
        q, s = lowgmm.quantize_tokens(x.to(KERNELS.device), fmt.name, clip, impl="triton")
        assert torch.equal(bits(s), bits(scales)), name
        assert torch.equal(bits(q), bits(values)), name


@ieee
@kernels_only
@formats
def test_kernel_equals_the_definition_on_nan_rows(fmt: QuantFormat) -> None:
    x = torch.tensor([[1.0, NAN, -2.0], [NAN, INF, 0.0], [1.0, 2.0, 3.0]])
    values, scales = quantize_rows(x, fmt)
    q, s = lowgmm.quantize_tokens(x.to(KERNELS.device), fmt.name, impl="triton")
    assert torch.equal(s.isnan().cpu(), scales.isnan())
    assert torch.equal(q.float().cpu(), values.float())  # zeros of either sign


@kernels_only
@formats
def test_kernel_divides_as_the_definition_does(fmt: QuantFormat, generator: torch.Generator) -> None:
    """Values on a tie if the quotient qmax / absmax is rounded once; one more rounding sends some to the other side."""
    absmax = torch.rand(60, 1, generator=generator) + 1
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:-1] + codes[1:]) / 2 if fmt is FP8 else torch.arange(126) + 0.5
    x = torch.cat([absmax, ties / (fmt.qmax / absmax.double()).float()], 1)
    values, scales = quantize_rows(x, fmt)
    q, s = lowgmm.quantize_tokens(x.to(KERNELS.device), fmt.name, impl="triton")
    assert torch.equal(bits(s), bits(scales))
    assert torch.equal(bits(q), bits(values))


@pytest.mark.gpu
@formats
@dtypes
def test_kernel_equals_the_definition_on_a_million_values(fmt: QuantFormat, dtype: torch.dtype) -> None:
    """Enough values to meet a quotient that a division by approximation would round otherwise."""
    g = torch.Generator("cuda").manual_seed(0)
    x = (torch.randn(512, 6000, generator=g, device="cuda") * torch.rand(512, 1, generator=g, device="cuda")).to(dtype)
    q, s = lowgmm.quantize_tokens(x, fmt.name)
    values, scales = quantize_rows(x.cpu(), fmt)
    assert torch.equal(bits(s), bits(scales))
    assert torch.equal(bits(q), bits(values))


@formats
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (1, 1)], ids=str)
def test_sizes_without_elements(fmt: QuantFormat, backend: Backend, shape: tuple[int, int]) -> None:
    q, scales = lowgmm.quantize_tokens(torch.ones(shape, device=backend.device), fmt.name, impl=backend.impl)
    assert (q.shape, q.dtype, scales.shape, scales.dtype) == (shape, fmt.dtype, shape[:1], torch.float32)
    assert (scales == (1 / fmt.qmax if shape[1] else 0)).all()


# ---- weights and QuantTensor -----------------------------------------------------------------------------------------


@formats
@dtypes
def test_weights_are_quantised_per_output_channel(fmt: QuantFormat, dtype: torch.dtype) -> None:
    w = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = lowgmm.quantize(w, fmt.name)
    assert (q.shape, q.scales.shape, q.format) == (w.shape, (3, 5), fmt)
    assert q.plain().is_contiguous()
    for e in range(3):
        for n in range(5):
            values, scale = quantize_rows(w[e, n : n + 1], fmt)
            assert torch.equal(bits(q.plain()[e, n]), bits(values[0]))
            assert q.scales[e, n] == scale[0]
    from_view = lowgmm.quantize(w.transpose(1, 2).contiguous().transpose(1, 2), fmt.name)
    assert torch.equal(bits(from_view.plain()), bits(q.plain()))


@formats
def test_one_matrix_is_one_expert(fmt: QuantFormat) -> None:
    assert lowgmm.quantize(torch.ones(4, 6), fmt.name).shape == (1, 4, 6)


def test_packing_keeps_the_weights_and_releases_the_plain_form(generator: torch.Generator) -> None:
    q = lowgmm.quantize(torch.randn(2, 24, 40, generator=generator), "int8")
    packed = cpu.pack(q)
    assert packed.values is None
    assert (packed.shape, packed.device) == (q.shape, q.device)
    assert torch.equal(packed.plain(), q.plain())
    assert torch.equal(lowgmm.dequantize(packed), lowgmm.dequantize(q))
    assert cpu.pack(packed) is packed
    moved = packed.to("cpu")
    assert moved.values is not None
    assert torch.equal(moved.values, q.plain())


def test_formats_are_found_by_name_and_dtype() -> None:
    assert [get_format(n) for n in ("int8", "fp8")] == [INT8, FP8] == [format_of(f.dtype) for f in (INT8, FP8)]
    assert format_of(torch.bfloat16) is None
    assert all(f.bytes == f.dtype.itemsize * (0.5 if f.bits == 4 else 1) for f in FORMATS.values())


W = torch.ones(2, 4, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: lowgmm.quantize(W, "int3"),
            UnsupportedError,
            "unknown quantisation format 'int3'; known formats: int8, fp8",
        ),
        (lambda: lowgmm.quantize_tokens(W[0], "int3"), UnsupportedError, "unknown quantisation format 'int3'"),
        (lambda: lowgmm.quantize(W.int(), "int8"), DtypeError, "argument 'w' is int32, expected bfloat16"),
        (lambda: lowgmm.quantize(W.double(), "int8"), DtypeError, "argument 'w' is float64"),
        (lambda: lowgmm.quantize(W[0, 0], "int8"), ShapeError, r"'w' has shape \[8\], expected \[E, N, K\]"),
        (lambda: lowgmm.quantize(W.unsqueeze(0), "int8"), ShapeError, r"'w' has shape \[1, 2, 4, 8\]"),
        (lambda: lowgmm.quantize_tokens(W, "int8"), ShapeError, r"'x' has 3 dimensions, expected 2"),
        (lambda: lowgmm.quantize_tokens(W[0].to(torch.int8), "int8"), DtypeError, "argument 'x' is int8"),
        (lambda: lowgmm.quantize_tokens(W[0], "fp8", -1.0), ShapeError, "'clip' is -1.0"),
        (lambda: lowgmm.quantize_tokens(W[0], "fp8", NAN), ShapeError, "'clip' is nan"),
        (lambda: QuantTensor(None, W[..., 0], INT8), ShapeError, "exactly one of 'values' and 'packed'"),
        (lambda: QuantTensor(W, W[..., 0], INT8, (W[0],)), ShapeError, "exactly one of 'values' and 'packed'"),
        (
            lambda: cpu.pack(lowgmm.quantize(W, "fp8")),
            UnsupportedError,
            "packs int8 and int4 weights on the CPU, got fp8",
        ),
    ],
)
def test_misuse(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
