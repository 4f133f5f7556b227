"""Reported faults of index arithmetic: index times stride past 2^31, and launches past the hardware's limits."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import lowgmm
from lowgmm import replay
from lowgmm.quant import quantize_rows
from test_cases_support import CPU, KERNELS, Backend, check_layer, kernels_only

EXPERT_STRIDE = 4096 * 4096
EXPERTS = 160  # expert 128 starts at element 2^31
BUSY = (0, 127, 128, 159)
KERNEL_SOURCES = sorted((Path(lowgmm.__file__).parent / "kernels").glob("*.py"))


def far_experts(n_size: int, k_size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[E, N, K] with experts EXPERT_STRIDE apart, all weights of a busy expert e being ``e % 5 + 1``.

    The memory is not touched where no expert is busy, so that on a CPU most of its 2.7 GB are never backed by pages.
    """
    buffer = torch.empty(EXPERTS * EXPERT_STRIDE, dtype=dtype, device=device)
    w = buffer.as_strided((EXPERTS, n_size, k_size), (EXPERT_STRIDE, k_size, 1))
    for e in BUSY:
        w[e] = torch.full((n_size, k_size), e % 5 + 1, device=device).to(dtype)
    return w


def check_far_experts(w: torch.Tensor, backend: Backend, config: str | None) -> None:
    x = torch.ones(16 * len(BUSY), w.shape[2], device=backend.device).to(w.dtype)
    sizes = torch.zeros(EXPERTS, dtype=torch.int32)
    sizes[list(BUSY)] = 16
    y = lowgmm.gmm(
        x, w, expert_sizes=sizes.to(backend.device), out_dtype=torch.float32, impl=backend.impl, config=config
    )
    values = torch.tensor([e % 5 + 1 for e in BUSY]).repeat_interleave(16)
    # Sums of equal small integers are exact in every format.
    assert torch.equal(y.cpu(), (w.shape[2] * values).float().unsqueeze(1).expand(y.shape))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize(
    ("backend", "config"),
    [
        pytest.param(CPU, None, id="cpu"),
        pytest.param(KERNELS, "16x32x64-swap-persistent1-4w2s", id="schedule", marks=kernels_only),
        pytest.param(KERNELS, "16x32x64-expert-4w2s", id="expert", marks=kernels_only),
    ],
)
def test_a01_expert_offset_beyond_int32(backend: Backend, config: str | None, dtype: torch.dtype) -> None:
    """Weights past 2^31 elements, where expert times stride in 32 bits wraps to another expert or outside."""
    check_far_experts(far_experts(32, 64, dtype, backend.device), backend, config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("config", [None, "16x128x128-swap-persistent2-4w3s", "64x128x128-grid-4w3s"])
def test_a01_full_size(config: str | None, dtype: torch.dtype) -> None:
    """The same with all 160 experts of 4096 x 4096 in use, through descriptors and through pointers."""
    check_far_experts(far_experts(4096, 4096, dtype, "cuda"), KERNELS, config)


R, ROW_STRIDE, LAST = 300_032, 7168, 64  # the last rows start past element 2^31 of both operands


@kernels_only
@pytest.mark.parametrize("config", ["64x32x64-expert-4w2s", "64x32x64-swap-persistent1-4w2s"])
def test_a02_row_offset_beyond_int32(config: str, generator: torch.Generator) -> None:
    """Rows of input and output past 2^31 elements; only the last rows have an expert, for speed."""
    x = torch.empty(R * ROW_STRIDE, dtype=torch.int8, device=KERNELS.device).as_strided((R, 64), (ROW_STRIDE, 1))
    y = torch.empty(R * ROW_STRIDE, dtype=torch.bfloat16, device=KERNELS.device).as_strided((R, 32), (ROW_STRIDE, 1))
    assert (R - LAST) * ROW_STRIDE > 2**31
    rows = torch.randint(-1, 2, (LAST, 64), generator=generator, dtype=torch.int8)
    w = torch.randint(-3, 4, (1, 32, 64), generator=generator, dtype=torch.int8)
    x[-LAST:], y[-LAST:] = rows.to(x.device), float("nan")
    offsets = torch.tensor([R - LAST, R], device=x.device)
    lowgmm.gmm(x, w.to(x.device), expert_offsets=offsets, output=y, impl="triton", config=config)
    # |sum| <= 192: integers that bfloat16 holds exactly.
    assert torch.equal(y[-LAST:].cpu().double(), rows.double() @ w[0].double().T)


@kernels_only
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a02_quantise_rows_beyond_int32(format: str, generator: torch.Generator) -> None:
    """Token times row stride past 2^31 in the quantiser."""
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=KERNELS.device).as_strided((3, 32), (2**30 + 16, 1))
    x.copy_(torch.randn(3, 32, generator=generator))
    xq, scales = lowgmm.quantize_tokens(x, format, impl="triton")
    values, expected = quantize_rows(x.contiguous().cpu(), lowgmm.formats.get_format(format))
    assert torch.equal(xq.cpu().view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scales.cpu(), expected)


@pytest.mark.gpu
def test_a02_all_rows_on_the_last_expert() -> None:
    """Full size: 300 032 rows of one expert behind empty ones."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randint(-127, 128, (R, 7168), generator=g, dtype=torch.int8, device="cuda")
    w = torch.randint(-127, 128, (4, 128, 7168), generator=g, dtype=torch.int8, device="cuda")
    sizes = torch.tensor([0, 0, 0, R], device="cuda")
    y = lowgmm.gmm(x, w, expert_sizes=sizes, out_dtype=torch.int32)
    for rows in (slice(0, 64), slice(R // 2, R // 2 + 64), slice(R - 64, R)):
        assert torch.equal(y[rows].double(), x[rows].double() @ w[3].double().T)


@pytest.mark.gpu
def test_a02_layer_with_more_than_two_billion_routed_elements() -> None:
    """Quantise, permute, both GEMMs and combine at R = 524 296 rows of 4096."""
    g = torch.Generator("cuda").manual_seed(0)
    T, A, E, H, I = 65_537, 8, 16, 4096, 128
    hidden = torch.randn(T, H, generator=g, device="cuda", dtype=torch.bfloat16)
    w13 = lowgmm.quantize(torch.randn(E, 2 * I, H, generator=g, device="cuda") / 64, "int8")
    w2 = lowgmm.quantize(torch.randn(E, H, I, generator=g, device="cuda") / 64, "int8")
    ids = torch.randint(0, E, (T, A), generator=g, device="cuda")
    weights = torch.rand(T, A, generator=g, device="cuda")
    y = lowgmm.moe_ffn(hidden, w13, w2, ids, weights)
    for rows in (slice(0, 64), slice(T // 2, T // 2 + 64), slice(T - 64, T)):
        check_layer(y[rows], hidden[rows], w13, w2, ids[rows], weights[rows])


def launch_grids(source: str) -> list[ast.expr]:
    """The grid of every ``kernel[grid](...)`` in ``source``."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.func.slice for call in calls if isinstance(call.func, ast.Subscript)]


def one_axis(grid: ast.expr) -> bool:
    return isinstance(grid, ast.Tuple) and len(grid.elts) == 1


def test_a03_every_grid_has_one_axis() -> None:
    """Axes y and z end at 65 535 programs. All rows are on axis x, because no launch has another: one place launches
    (test_architecture.py), and what is launched again has the grid that it had there."""
    sources = (*KERNEL_SOURCES, Path(replay.__file__))
    grids = [grid for path in sources for grid in launch_grids(path.read_text())]
    assert len(grids) == 1
    assert all(map(one_axis, grids)), [ast.unparse(g) for g in grids if not one_axis(g)]


def test_a03_check_can_fail() -> None:
    """A second axis, or a grid whose length cannot be seen, is found."""
    assert [one_axis(g) for g in launch_grids("k[(1,)](x)\nk[(1, rows)](x)\nk[grid](x)")] == [True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [65_535, 65_536, 65_537])
@pytest.mark.parametrize("config", ["16x64x64-grid-4w2s", "16x64x64-queue2-4w2s", "16x64x64-expert-4w2s", None])
def test_a03_tokens_around_the_axis_limit(config: str | None, T: int) -> None:
    """Quantiser and every launch mode around 65 536 tokens."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(T, 256, generator=g, device="cuda")
    w = torch.randint(-127, 128, (2, 64, 256), generator=g, dtype=torch.int8, device="cuda")
    xq, scales = lowgmm.quantize_tokens(x, "int8")
    values, expected = quantize_rows(x.cpu(), lowgmm.formats.INT8)
    assert torch.equal(xq.cpu(), values)
    assert torch.equal(scales.cpu(), expected)
    sizes = torch.tensor([T // 2, T - T // 2], device="cuda")
    y = lowgmm.gmm(xq, w, expert_sizes=sizes, out_dtype=torch.int32, impl="triton", config=config)
    exact = torch.cat([part.double() @ w[e].double().T for e, part in enumerate(xq.split(sizes.tolist()))])
    assert torch.equal(y.double(), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8191, 8192, 8193])
def test_a03_ids_around_the_sorter_limit(T: int) -> None:
    """The router around 65 536 expert ids."""
    ids = torch.randint(0, 256, (T, 8), generator=torch.Generator().manual_seed(T))
    host, device = lowgmm.route(ids, 256), lowgmm.route(ids.cuda(), 256)
    assert torch.equal(device.order.cpu(), host.order)
    assert torch.equal(device.inverse.cpu(), host.inverse)
    assert torch.equal(device.offsets.cpu(), host.offsets)
