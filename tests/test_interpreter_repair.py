"""The repaired interpreter against torch: conversions bit for bit, dots within fp32's rounding, integers exactly."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.interpreter
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

NAN, INF = float("nan"), float("inf")


@triton.jit
def cast_kernel(
    source_ptr,  # [n] any dtype
    target_ptr,  # [n] any dtype
    n: tl.constexpr,
):
    at = tl.arange(0, n)
    tl.store(target_ptr + at, tl.load(source_ptr + at).to(target_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(
    a_ptr,  # [m, k]
    b_ptr,  # [k, n], same dtype as a
    out_ptr,  # [m, n] fp32 for floats, int32 for integers
    m: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
):
    rows, columns, inner = tl.arange(0, m), tl.arange(0, n), tl.arange(0, k)
    a = tl.load(a_ptr + rows[:, None] * k + inner[None, :])
    b = tl.load(b_ptr + inner[:, None] * n + columns[None, :])
    acc = tl.dot(a, b, out_dtype=out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], acc)


@triton.jit
def add_kernel(a_ptr, b_ptr, out_ptr, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out_ptr + at, tl.load(a_ptr + at) + tl.load(b_ptr + at))


def cast(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.zeros(source.shape, dtype=dtype)
    cast_kernel[(1,)](source, target, source.numel())
    return target


def dot(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    dot_kernel[(1,)](a, b, out, a.shape[0], b.shape[1], a.shape[1])
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def spread(generator: torch.Generator, n: int) -> torch.Tensor:
    """fp32 numbers of both signs over FP8's whole range and beyond, subnormals and overflows included."""
    return torch.randn(n, generator=generator) * 2.0 ** torch.randint(-12, 12, (n,), generator=generator)


def test_fp32_to_bf16_rounds_to_nearest_even(generator: torch.Generator):
    x = spread(generator, 4096)
    x[:4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 2 - 2.0**-9])  # ties, and a carry to 2
    y = cast(x, torch.bfloat16)
    assert y[:4].tolist() == [1.0, 1 + 2.0**-6, -1.0, 2.0]
    assert same_bits(y, x.to(torch.bfloat16))


def test_integers_to_bf16():
    x = torch.tensor([0, 1, -3, 127, -128, 257, 1 << 20, 3], dtype=torch.int32)
    assert same_bits(cast(x, torch.bfloat16), x.to(torch.bfloat16))


def test_fp32_to_fp8_rounds_to_nearest_even(generator: torch.Generator):
    x = spread(generator, 4096).clamp(-448, 448)
    assert same_bits(cast(x, torch.float8_e4m3fn), x.to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(31.35, 32.0, id="the carry reaches the exponent"),
        pytest.param(17.0, 16.0, id="a tie goes down to even"),
        pytest.param(19.0, 20.0, id="a tie goes up to even"),
        pytest.param(464.0, 448.0, id="half a step above the largest"),
        pytest.param(1e6, 448.0, id="far above the largest"),
        pytest.param(-1e6, -448.0, id="far below the smallest"),
        pytest.param(INF, 448.0, id="infinity saturates"),
        pytest.param(2.0**-9, 2.0**-9, id="the smallest subnormal"),
        pytest.param(2.0**-10, 0.0, id="half of it is a tie, and goes to zero"),
        pytest.param(7.5 * 2.0**-9, 2.0**-6, id="a subnormal's carry gives the smallest normal"),
        pytest.param(0.0, 0.0, id="zero"),
    ],
)
def test_fp32_to_fp8_special_values(value: float, expected: float):
    assert cast(torch.tensor([value]), torch.float8_e4m3fn).float().item() == expected


def test_fp8_keeps_nan():
    assert cast(torch.tensor([NAN]), torch.float8_e4m3fn).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_fp8_code_to_fp32(dtype: torch.dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.testing.assert_close(cast(codes, torch.float32), codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_float_dot(dtype: torch.dtype, generator: torch.Generator):
    a = torch.randn(16, 64, generator=generator).to(dtype)
    b = torch.randn(64, 32, generator=generator).to(dtype)
    out = dot(a, b, torch.float32).double()
    bound = 64 * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs())  # fp32 summation, any order
    assert ((out - a.double() @ b.double()).abs() <= bound).all()


def test_int8_dot_is_exact(generator: torch.Generator):
    a = torch.randint(-128, 128, (16, 2048), generator=generator, dtype=torch.int8)
    b = torch.randint(-128, 128, (2048, 16), generator=generator, dtype=torch.int8)
    a[0], b[:, 0] = 127, 127
    b[0, 0] = 126  # makes the sum odd, and above 2²⁴ fp32 has no odd numbers
    out = dot(a, b, torch.int32)
    assert out[0, 0].item() == 2048 * 127 * 127 - 127
    assert torch.equal(out.long(), a.long() @ b.long())


def test_bf16_arithmetic_is_refused():
    x = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="cast to fp32 first"):
        add_kernel[(1,)](x, x, torch.zeros_like(x), 4)


def test_repair_is_still_needed():
    """Fails with the first Triton release whose own conversion is right: then this repair can shrink."""
    import interpreter_repair

    x = torch.tensor([31.35]).numpy()
    bits = interpreter_repair.original_convert_float(x, tl.float32, tl.float8e4nv, None)
    assert interpreter_repair.decode(bits, tl.float8e4nv).float().item() != 32.0
