"""Reported faults of groups and tiles: empty and tiny experts, awkward widths, odd expert ids, tile configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import cpu
from lowgmm.gpu import H200, Gpu, describe
from lowgmm.shapes import ShapeError, UnsupportedError
from lowgmm.testing import check_gmm, make_operands
from lowgmm.tile_config import Problem, TileConfig, supports
from lowgmm.tune import pick
from test_cases_support import (
    BACKENDS,
    CPU,
    GMM_RUNS,
    KERNELS,
    LAUNCHES,
    LAYERS,
    PACKED,
    SMALL,
    Backend,
    check_layer,
    kernels_only,
)

NAN = float("nan")


# ---- A04: experts and rows that nobody computes ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bfloat16"])
@pytest.mark.parametrize(("backend", "config"), GMM_RUNS)
def test_a04_uncovered_rows_are_zero(backend: Backend, config: str | None, dtype: str) -> None:
    """Rows behind the last expert and empty experts' neighbours, in memory full of NaN; three runs."""
    o = make_operands([8, 0, 16, 0], 32, 64, dtype, extra_rows=16, device=backend.device)
    forms = [o.weights, cpu.pack(o.weights)] if backend == CPU and dtype == "int8" else [o.weights]
    for weights in forms * 3:
        y = torch.full((40, 32), NAN, device=backend.device)
        args = (o.x, weights, o.scales_x, None, o.offsets, None, y)
        lowgmm.gmm(*args, impl=backend.impl, config=config)
        check_gmm(y, o)
        assert not y[24:].any()


@pytest.mark.parametrize(("backend", "config"), GMM_RUNS)
def test_a04_no_expert_has_rows(backend: Backend, config: str | None) -> None:
    o = make_operands([0, 0, 0], 32, 64, "int8", extra_rows=20, device=backend.device)
    y = torch.full((20, 32), NAN, device=backend.device)
    lowgmm.gmm(o.x, o.weights, o.scales_x, None, o.offsets, None, y, impl=backend.impl, config=config)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a04_no_rows_no_launch(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: object, **__: object) -> None:
        raise AssertionError("a backend ran for a result without elements")

    monkeypatch.setattr("lowgmm.cpu.gmm", launched)
    if backend.impl == "triton":
        monkeypatch.setattr("lowgmm.kernels.grouped_mm.grouped_mm", launched)
    for sizes, rows in (([0, 0], 0), ([1, 0], 1)):
        o = make_operands(sizes, 32, 64, "int8", device=backend.device)
        args = (o.x, o.weights, o.scales_x, None, o.offsets)
        if rows:  # the trap is set: with a row it snaps
            with pytest.raises(AssertionError, match="a backend ran"):
                lowgmm.gmm(*args, impl=backend.impl)
        else:
            assert lowgmm.gmm(*args, impl=backend.impl).shape == (0, 32)


BAD_OFFSETS = [
    pytest.param([8, 0, 16, 0, 0], "start at 8, expected 0", id="sizes"),
    pytest.param([0, 16, 8, 20, 24], "fall from 16 to 8 at expert 1", id="falling"),
    pytest.param([0, 8, 16, 20, 25], "end at 25, but input has only 24 rows", id="past the input"),
    pytest.param([-1, 8, 16, 20, 24], "start at -1", id="negative"),
]


@pytest.mark.parametrize(("offsets", "message"), BAD_OFFSETS)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a04_bad_offsets_are_refused(packed: bool, offsets: list[int], message: str) -> None:
    """Sizes passed for offsets, and offsets that do not cut the rows."""
    o = make_operands([8, 8, 4, 4], 32, 64, "int8")
    w = cpu.pack(o.weights) if packed else o.weights
    with pytest.raises(ShapeError, match=message):
        lowgmm.gmm(o.x, w, o.scales_x, expert_offsets=torch.tensor(offsets))
    check_gmm(lowgmm.gmm(o.x, w, o.scales_x, expert_offsets=o.offsets), o)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [2, 4, 6])
def test_a04_offsets_of_the_wrong_length_are_refused(length: int, backend: Backend) -> None:
    """The length shows without reading the device, so this holds everywhere, for sizes in place of offsets too."""
    o = make_operands([8, 8, 4, 4], 32, 64, "int8", device=backend.device)
    offsets = torch.zeros(length, dtype=torch.int32, device=backend.device)
    with pytest.raises(ShapeError, match=rf"'expert_offsets' has {length} where E\+1=5 is expected"):
        lowgmm.gmm(o.x, o.weights, o.scales_x, expert_offsets=offsets, impl=backend.impl)


@pytest.mark.gpu
@pytest.mark.parametrize(("offsets", "message"), BAD_OFFSETS)
def test_a04_debug_mode_reads_device_offsets(offsets: list[int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    o = make_operands([8, 8, 4, 4], 32, 64, "int8", device="cuda")
    monkeypatch.setenv("LOWGMM_DEBUG", "1")
    with pytest.raises(ShapeError, match=message):
        lowgmm.gmm(o.x, o.weights, o.scales_x, expert_offsets=torch.tensor(offsets, device="cuda"))
    check_gmm(lowgmm.gmm(o.x, o.weights, o.scales_x, expert_offsets=o.offsets), o)


@kernels_only
@pytest.mark.parametrize("config", LAUNCHES)
@pytest.mark.parametrize("offsets", [[8, 0, 16, 0, 0], [0, 90, 3, -7, 2**31 - 1], [24, 24, 0, 24, 0]], ids=str)
def test_a04_bad_device_offsets_stay_inside_the_output(offsets: list[int], config: str) -> None:
    """Without debug mode bad offsets may give wrong rows, but nothing outside the output is written."""
    o = make_operands([8, 8, 4, 4], 32, 64, "int8", device=KERNELS.device)
    guarded = torch.full((24 + 128, 32 + 32), 7.0, device=KERNELS.device)
    y = guarded[64:88, 16:48]
    bad = torch.tensor(offsets, dtype=torch.int32, device=KERNELS.device)
    lowgmm.gmm(o.x, o.weights, o.scales_x, None, bad, None, y, impl="triton", config=config)
    y.fill_(7.0)
    assert torch.equal(guarded, torch.full_like(guarded, 7.0))


# ---- A05, A06: tiny groups, boundaries inside a tile -----------------------------------------------------------------


@kernels_only
@pytest.mark.parametrize("config", LAUNCHES)
def test_a05_one_row_on_one_of_many_experts(config: str, watchdog: None) -> None:
    """A single row moved through the experts, with nothing to do for all others: every launch mode ends."""
    for position in (0, 17, 31):
        sizes = [0] * 32
        sizes[position] = 1
        o = make_operands(sizes, 32, 64, "int8", device=KERNELS.device)
        check_gmm(lowgmm.gmm(o.x, o.weights, o.scales_x, None, o.offsets, impl="triton", config=config), o)


def test_a05_many_calls_on_the_cpu(packing: str, watchdog: None, generator: torch.Generator) -> None:
    """One row moved through the experts; the threads that find nothing to do, or wait for another's work, end too."""
    moved = [make_operands([0] * e + [1] + [0] * (63 - e), 64, 96, "int8", seed=e) for e in range(64)]
    calls = [(o.x, cpu.pack(o.weights), o.scales_x, None, o.offsets) for o in moved]
    hidden, w13, w2, ids, weights = layer(1, 1, 64, 64, 32, "int8", PACKED, generator)
    for turn in range(256):
        y = lowgmm.gmm(*calls[turn % 64])
        z = lowgmm.moe_ffn(hidden, w13, w2, ids.fill_(turn % 64), weights)
        if turn < 64:
            check_gmm(y, moved[turn])
            check_layer(z, hidden, w13, w2, ids, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize(
    "config", [None, "16x128x128-swap-persistent2-4w3s", "16x128x128-queue2-4w3s", "16x128x128-expert-4w3s"]
)
def test_a05_thousand_launches(config: str | None, dtype: str, watchdog: None) -> None:
    o = make_operands([1], 24_576, 1536, dtype, device="cuda")
    y = [lowgmm.gmm(o.x, o.weights, o.scales_x, None, o.offsets, impl="triton", config=config) for _ in range(1000)]
    torch.cuda.synchronize()
    check_gmm(y[0], o)
    assert all(torch.equal(y[0], other) for other in y)
    for position in range(64):
        sizes = [0] * 64
        sizes[position] = 1
        o = make_operands(sizes, 64, 128, dtype, device="cuda")
        check_gmm(lowgmm.gmm(o.x, o.weights, o.scales_x, None, o.offsets, impl="triton", config=config), o)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(128, 130, 65), (1, 127, 1, 0, 255, 3)], ids=str)
@pytest.mark.parametrize(("backend", "config"), GMM_RUNS)
def test_a06_boundary_inside_a_tile(
    backend: Backend, config: str | None, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Each row takes its own expert's weights however tiles fall; groups need no alignment."""
    scale = 1 if backend.device != "cpu" or backend.impl == "auto" else 8  # fewer rows for the interpreter, tiles of 16
    sizes = tuple(-(-s // scale) for s in sizes)
    n_size, k_size = (256, 512) if scale == 1 else (32, 64)
    counts = torch.tensor(sizes)
    experts = torch.arange(1, len(sizes) + 1)
    w = experts.view(-1, 1, 1).expand(-1, n_size, k_size).to(dtype).to(backend.device)
    x = torch.ones(sum(sizes), k_size, device=backend.device).to(dtype)
    if config is not None and backend.device != "cpu":
        config = config.replace("16x32x64", "128x64x64").replace("-swap", "")
    y = lowgmm.gmm(
        x, w, expert_sizes=counts.to(backend.device), out_dtype=torch.float32, impl=backend.impl, config=config
    )
    expected = k_size * experts.repeat_interleave(counts).float()
    assert torch.equal(y.cpu(), expected.unsqueeze(1).expand(y.shape))


# ---- A07: widths that no block divides -------------------------------------------------------------------------------

WIDTHS = (8, 100, 255, 257, 300)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["int8", "fp8", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a07_gmm_of_any_width(backend: Backend, dtype: str, width: int) -> None:
    """The last columns and the last of K, in memory full of NaN."""
    o = make_operands([3, 0, 6], width, width, dtype, device=backend.device)
    y = torch.full((9, width), NAN, device=backend.device)
    config = "16x128x128-swap-persistent1-4w2s" if backend.impl == "triton" else None
    lowgmm.gmm(o.x, o.weights, o.scales_x, None, o.offsets, None, y, impl=backend.impl, config=config)
    check_gmm(y, o)
    if dtype == "int8":
        packed = lowgmm.gmm(o.x.cpu(), cpu.pack(o.weights.to("cpu")), o.scales_x.cpu(), None, o.offsets.cpu())
        check_gmm(packed.to(backend.device), o, "packed")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a07_quantise_any_width(backend: Backend, format: str, width: int, generator: torch.Generator) -> None:
    """The last element is the largest: a quantiser that stops early takes the wrong scale."""
    x = torch.randn(3, width, generator=generator)
    x[:, -1] = 50.0
    q, scales = lowgmm.quantize_tokens(x.to(backend.device), format, impl=backend.impl)
    qmax = lowgmm.formats.get_format(format).qmax
    assert torch.equal(q[:, -1].float().cpu(), torch.full((3,), qmax))
    assert torch.equal(scales.cpu(), torch.full((3,), 50.0) / qmax)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("backend", LAYERS)
def test_a07_layer_of_any_width(backend: Backend, format: str, width: int, generator: torch.Generator) -> None:
    args = layer(T=3, A=2, E=2, H=width, I=width, format=format, backend=backend, generator=generator)
    check_layer(lowgmm.moe_ffn(*args, impl=backend.impl), *args)


# ---- A10, A11: expert ids as routers really send them ----------------------------------------------------------------


def layer(
    T: int, A: int, E: int, H: int, I: int, format: str, backend: Backend, generator: torch.Generator
) -> tuple[Tensor, lowgmm.QuantTensor, lowgmm.QuantTensor, Tensor, Tensor]:
    """hidden, w13, w2, ids, weights of a quantised layer."""
    hidden = torch.randn(T, H, generator=generator)
    w13 = lowgmm.quantize(torch.randn(E, 2 * I, H, generator=generator) / H**0.5, format)
    w2 = lowgmm.quantize(torch.randn(E, H, I, generator=generator) / I**0.5, format)
    ids = torch.randint(0, E, (T, A), generator=generator)
    weights = torch.rand(T, A, generator=generator)
    device = backend.device
    return hidden.to(device), backend.place(w13), backend.place(w2), ids.to(device), weights.to(device)


@pytest.mark.parametrize("T", [1, 8, 9, 32])
@pytest.mark.parametrize("backend", [CPU, PACKED], ids=["cpu", "packed"])
def test_a10_duplicate_experts(backend: Backend, T: int, generator: torch.Generator) -> None:
    """One token may name an expert several times: each slot counts with its own weight."""
    hidden, w13, w2, ids, weights = layer(T, 6, 144, 64, 32, "int8", backend, generator)
    ids[:] = torch.tensor([3, 3, 7, 7, 7, 1])
    ids[1::2] = 5
    y = lowgmm.moe_ffn(hidden, w13, w2, ids, weights)
    check_layer(y, hidden, w13, w2, ids, weights)
    once = weights * torch.tensor([1, 0, 1, 0, 0, 1])
    assert not torch.allclose(y, lowgmm.moe_ffn(hidden, w13, w2, ids, once))


@kernels_only
def test_a10_duplicate_experts_in_kernels(generator: torch.Generator) -> None:
    hidden, w13, w2, ids, weights = layer(2, 6, 9, 64, 32, "int8", KERNELS, generator)
    ids[:] = torch.tensor([[3, 3, 7, 7, 7, 1], [5] * 6])
    check_layer(lowgmm.moe_ffn(hidden, w13, w2, ids, weights, impl="triton"), hidden, w13, w2, ids, weights)


@pytest.mark.parametrize("format", ["int8", "fp8", None])
@pytest.mark.parametrize("backend", LAYERS)
def test_a11_ids_without_a_local_expert(backend: Backend, format: str | None, generator: torch.Generator) -> None:
    """-1 and other ranks' ids give nothing; a token with no local expert is exactly zero."""
    hidden, w13, w2, ids, weights = layer(6, 4, 8, 32, 32, format or "int8", backend, generator)
    if format is None:
        w13, w2 = lowgmm.dequantize(w13), lowgmm.dequantize(w2)
    ids[0] = torch.tensor([-1, 3, 8, 0])
    ids[2] = torch.tensor([-1, -1, 8, 255])
    ids[5] = torch.tensor([2**31 - 1, -(2**31), 7, -1])
    y = lowgmm.moe_ffn(hidden, w13, w2, ids, weights, impl=backend.impl)
    check_layer(y, hidden, w13, w2, ids, weights)
    assert torch.equal(y[2], torch.zeros_like(y[2]))
    assert y[[0, 1, 3, 4, 5]].any(1).all()


@pytest.mark.parametrize("backend", LAYERS)
def test_a11_no_local_expert_at_all(backend: Backend, generator: torch.Generator) -> None:
    hidden, w13, w2, ids, weights = layer(3, 2, 4, 32, 32, "int8", backend, generator)
    y = lowgmm.moe_ffn(hidden, w13, w2, ids + 64, weights, impl=backend.impl)
    assert torch.equal(y, torch.zeros_like(y))


# ---- A15: every tile configuration, every group size around a tile ---------------------------------------------------

GROUPS = (1, 2, 15, 16, 17, 31, 33, 64, 129)
GPUS = (
    H200,
    Gpu("A100", (8, 0), 108, 166_912),
    Gpu("consumer Ada", (8, 9), 128, 101_376),
    Gpu("Turing", (7, 5), 40, 65_536),
    Gpu("Blackwell", (10, 0), 148, 232_448),
)


def requests(dtype: torch.dtype) -> Iterator[tuple[Problem, Gpu]]:
    """1 to 4096 rows per expert, aligned and odd K, narrow and wide results, on every GPU that has the format."""
    for gpu in GPUS:
        if gpu.lacks(lowgmm.formats.format_of(dtype)) is None:
            for rows in (*range(1, 130), 4096):
                for k_size, out_dtype in ((4096, torch.bfloat16), (4095, torch.bfloat16), (4096, torch.float32)):
                    yield Problem(4, 4 * rows, 4096, k_size, dtype, out_dtype), gpu


def picked(problem: Problem, gpu: Gpu) -> TileConfig | str:
    """What ``pick`` returns, or why it returns nothing."""
    try:
        return pick(problem, gpu)
    except UnsupportedError as error:
        return str(error)


def shipped(dtype: torch.dtype) -> list[TileConfig]:
    """Every configuration that ``pick`` returns."""
    found = {picked(problem, gpu) for problem, gpu in requests(dtype)}
    return sorted((c for c in found if isinstance(c, TileConfig)), key=str)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
def test_a15_every_request_has_a_configuration(dtype: torch.dtype) -> None:
    """And one that fits the GPU's shared memory, down to 64 KiB."""
    for problem, gpu in requests(dtype):
        config = picked(problem, gpu)
        assert isinstance(config, TileConfig), config
        assert supports(problem, config, gpu) is None


def test_a15_the_list_of_configurations_is_not_trivial() -> None:
    configs = shipped(torch.int8)
    assert len({(c.block_m, c.block_n, c.swap_ab, c.tma) for c in configs}) >= 6
    assert {c.block_m for c in configs} >= {16, 64, 128}


@kernels_only
@pytest.mark.parametrize("config", shipped(torch.int8), ids=str)
def test_a15_exact_sums_in_every_configuration(config: TileConfig) -> None:
    """Fewer rows than a matrix instruction has, one more, one less: INT8 sums equal the oracle's.

    The largest tiles fit beside a 16-bit result only; sums of up to 256 are exact in those, too.
    """
    o = make_operands(GROUPS, 40, config.block_k + 16, "int8", device=KERNELS.device)
    x, w, gpu = o.x.sign(), o.w.sign(), describe(o.x.device)
    problem = Problem(len(GROUPS), len(x), 40, x.shape[1], torch.int8, torch.bfloat16)
    assert supports(problem, config, H200) is None
    if supports(problem, config, gpu) is not None:
        pytest.skip("tile made for another GPU")
    run = {"expert_offsets": o.offsets, "impl": "triton", "config": config}
    exact = lowgmm.reference.gmm(x, w, expert_sizes=o.sizes)
    assert 16 < exact.abs().max() <= 256
    assert torch.equal(lowgmm.gmm(x, w, out_dtype=torch.bfloat16, **run).double(), exact)
    if supports(replace(problem, out_dtype=torch.int32), config, gpu) is None:
        exact = lowgmm.reference.gmm(o.x, o.w, expert_sizes=o.sizes)
        assert torch.equal(lowgmm.gmm(o.x, o.w, out_dtype=torch.int32, **run).double(), exact)


@pytest.mark.parametrize(("n_size", "k_size"), [(1024, 1024), (1032, 1000)])
def test_a15_exact_sums_on_the_cpu(n_size: int, k_size: int) -> None:
    o = make_operands(GROUPS, n_size, k_size, "int8")
    exact = lowgmm.reference.gmm(o.x, o.w, expert_sizes=o.sizes)
    assert torch.equal(lowgmm.gmm(o.x, o.w, expert_sizes=o.sizes, out_dtype=torch.int32).double(), exact)
    assert exact.abs().max() < 2**24  # so that the packed path's FP32 result holds every sum exactly
    ones = torch.ones_like(o.scales_w)
    packed = cpu.pack(lowgmm.QuantTensor(o.w, ones, lowgmm.formats.INT8))
    y = lowgmm.gmm(o.x, packed, expert_sizes=o.sizes, out_dtype=torch.float32)
    assert torch.equal(y.double(), exact)


@pytest.mark.gpu
@pytest.mark.parametrize(("n_size", "k_size"), [(1024, 1024), (1032, 1000)])
def test_a15_full_size(n_size: int, k_size: int) -> None:
    o = make_operands(GROUPS, n_size, k_size, "int8", device="cuda")
    exact = lowgmm.reference.gmm(o.x, o.w, expert_sizes=o.sizes)
    problem = Problem(len(GROUPS), len(o.x), n_size, k_size, torch.int8, torch.int32)
    configs = [c for c in shipped(torch.int8) if supports(problem, c, describe(o.x.device)) is None]
    assert len(configs) >= 3
    for config in [None, *configs]:
        y = lowgmm.gmm(o.x, o.w, None, None, o.offsets, out_dtype=torch.int32, impl="triton", config=config)
        assert torch.equal(y.double(), exact), config


def test_small_tile_is_a_legal_configuration() -> None:
    """The tile that these tests force is one that the library accepts; what they show holds for its mainloop."""
    assert supports(Problem(1, 16, 32, 64, torch.int8), TileConfig.parse(SMALL), H200) is None
