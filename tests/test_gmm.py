"""gmm on every backend against the fp64 oracle, within the measured budget; INT8 sums to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import lowgmm
from cases import CASES, Case
from lowgmm import cpu, native
from lowgmm.formats import INT4, INT4_GROUPED, INT8, pack_nibbles
from lowgmm.gpu import H200, describe
from lowgmm.quant import quantize_rows
from lowgmm.shapes import ShapeError, UnsupportedError
from lowgmm.testing import check_gmm, make_operands
from lowgmm.tile_config import Problem, TileConfig, supports
from lowgmm.tune import pick
from lowgmm.validate import MAX_EXACT_K

DTYPES = ("int8", "fp8", "bfloat16", "float16", "float32")
INT4_FORMATS = {fmt.name: fmt for fmt in (INT4, *INT4_GROUPED)}
# Small tiles that reach every branch of the mainloop: both operand orders, both kinds of load, every launch.
CONFIGS = (
    "16x32x64-grid-4w2s",
    "32x16x32-persistent1-4w2s",
    "16x32x64-swap-persistent2-4w2s",
    "32x32x64-queue1-4w2s",
    "16x64x32-swap-queue2-4w2s",
    "16x32x64-expert-4w2s",
    "16x64x64-swap-expert-4w2s",
    "16x32x64-tma-grid-4w2s",
    "16x32x64-swap-tma-queue1-4w2s",
    "32x32x32-swap-tma-persistent1-4w2s",
    "16x32x128-swap-tma-persistent2-4w2s",
    "32x32x256-swap-queue1-4w2s",
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu(case: Case, dtype: str) -> None:
    o = case.operands(dtype)
    for out_dtype in (torch.bfloat16, torch.float32):
        y = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=out_dtype)
        check_gmm(y, o)
        assert not y[int(o.sizes.sum()) :].any()


@pytest.mark.parametrize("dtype", [*DTYPES, *INT4_FORMATS])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: str, device: torch.device) -> None:
    """Each case runs a different configuration of CONFIGS; together they run all of them on every dtype."""
    if dtype in INT4_FORMATS and case.K % 2:
        pytest.skip("two int4 values share a byte")
    o = case.operands(dtype, device.type)
    n_size, k_size = o.w.shape[1:]
    fmt = INT4_FORMATS.get(dtype)
    of_weights, group = (o.x.dtype, 0) if fmt is None else (fmt.dtype, fmt.group or 0)
    problem = Problem(len(o.sizes), len(o.x), n_size, k_size, of_weights, group=group)
    start = CASES.index(case)
    config = next(c for c in CONFIGS[start:] + CONFIGS if supports(problem, TileConfig.parse(c), H200) is None)
    y = lowgmm.gmm(
        o.x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=torch.float32, impl="triton", config=config
    )
    check_gmm(y, o, config)
    assert not y[int(o.sizes.sum()) :].any()
    if dtype.startswith("int"):
        host = case.operands(dtype)
        on_cpu = lowgmm.gmm(host.x, host.weights, host.scales_x, expert_sizes=host.sizes, out_dtype=torch.float32)
        assert torch.equal(y.cpu(), on_cpu), "exact sums, scaled in one order: backends agree to the bit"


@pytest.mark.parametrize("config", CONFIGS)
def test_every_launch_gives_the_same_bits(config: str, device: torch.device) -> None:
    o = make_operands([5, 0, 33, 2], 96, 128, "int8", extra_rows=3, device=device.type)
    y = lowgmm.gmm(o.x, o.w, expert_sizes=o.sizes, out_dtype=torch.int32, impl="triton", config=config)
    assert torch.equal(y.double(), replace(o, scales_x=None, scales_w=None).exact())


@pytest.mark.parametrize("launch", ["persistent1", "queue1", "swap-queue2"])
@pytest.mark.parametrize("sms", [1, 3])
def test_a_program_takes_tile_after_tile(
    sms: int, launch: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer programs than tiles, and launch after launch on one counter, which the last ticket must set back."""
    few = replace(describe(device), sms=sms)
    monkeypatch.setattr("lowgmm.kernels.grouped_mm.describe", lambda _: few)
    o = make_operands([5, 0, 33, 2], 96, 64, "int8", extra_rows=3, device=device.type)
    exact = replace(o, scales_x=None, scales_w=None).exact()
    for _ in range(3):
        y = torch.full((43, 96), 7, dtype=torch.int32, device=device)
        lowgmm.gmm(o.x, o.w, None, None, o.offsets, None, y, impl="triton", config=f"16x32x64-{launch}-4w2s")
        assert torch.equal(y.double(), exact)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_weights_equal_plain_ones(case: Case, packing: str) -> None:
    o = case.operands("int8")
    packed = cpu.pack(o.weights)
    assert packed.values is None
    assert torch.equal(packed.plain(), o.w)
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        plain = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=out_dtype)
        y = lowgmm.gmm(o.x, packed, o.scales_x, expert_sizes=o.sizes, out_dtype=out_dtype)
        assert torch.equal(y, plain)
        check_gmm(y, o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_weights_quantise_as_the_definition_does(dtype: torch.dtype, packing: str) -> None:
    """Also a zero row, NaN and Inf, a K that is no multiple of anything, strided rows, and more rows than one chunk."""
    w, rows = lowgmm.quantize(torch.randn(2, 70, 101), "int8"), 800
    x = torch.randn(rows, 128).to(dtype)[:, :101]
    x[3], x[5, 2], x[7, 1] = 0, float("nan"), float("inf")
    sizes = torch.tensor([790, 10])
    for clip in (None, 1.0):
        xq, scales = quantize_rows(x, INT8, clip)
        expected = lowgmm.gmm(xq, w, scales, expert_sizes=sizes, out_dtype=torch.float32)
        y = lowgmm.gmm(x, cpu.pack(w), expert_sizes=sizes, out_dtype=torch.float32, clip=clip)
        assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7))
        assert y[5].isnan().all()
        values, found = lowgmm.quantize_tokens(x, "int8", clip)
        assert torch.equal(values, xq)
        assert torch.equal(found.nan_to_num(7), scales.nan_to_num(7))


def test_native_sums_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest sums of either sign, where the unsigned weights' surplus alone would overflow INT32 several times."""
    if native.library() is None:
        pytest.skip("the native code was not built or cannot run here")
    K = 66_000
    w = torch.stack([torch.full((3, K), v, dtype=torch.int8) for v in (127, -128)])
    x = torch.full((2, K), 127, dtype=torch.int8)
    stand_in = w.new_empty(1).expand(w.shape)
    operands = [stand_in, native.pack(w, 8)]
    offsets = torch.tensor([0, 1, 2])
    y = torch.ops.lowgmm.gmm(x, operands, None, None, offsets, None, None, "auto", None, torch.int32)
    assert y.tolist() == [[127 * 127 * K] * 3, [-128 * 127 * K] * 3]


def test_native_int4_sums_are_exact() -> None:
    """At the largest K, where the loops' own sums (of w + 8, or of 16 times that) are largest."""
    if native.library() is None:
        pytest.skip("the native code was not built or cannot run here")
    K = MAX_EXACT_K - 1  # even
    w = pack_nibbles(torch.tensor([7, -7], dtype=torch.int8).view(2, 1, 1).repeat(1, 3, K))
    operands = [w.new_empty(1).expand(2, 3, K), native.pack(w, 4)]
    for code in (127, -128):
        x, offsets = torch.full((2, K), code, dtype=torch.int8), torch.tensor([0, 1, 2])
        y = torch.ops.lowgmm.gmm(x, operands, None, None, offsets, None, None, "auto", None, torch.int32)
        assert y.tolist() == [[7 * code * K] * 3, [-7 * code * K] * 3]


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_kernels_with_a_broadcast_row(dtype: str, device: torch.device) -> None:
    """A row stride of 0, which a TMA descriptor cannot hold; and a row stride beyond K, which it can."""
    o = make_operands([1, 5, 3], 48, 64, dtype, device=device.type)
    for x in (o.x[:1].expand_as(o.x), torch.cat([o.x, o.x], 1)[:, :64]):
        spread = replace(o, x=x)
        y = lowgmm.gmm(x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=torch.float32, impl="triton")
        check_gmm(y, spread)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("impl", ["auto", "triton", "reference"])
def test_dynamic_quantisation_is_quantize_tokens(format: str, impl: str, device: torch.device) -> None:
    where = device if impl == "triton" else torch.device("cpu")
    x, sizes = torch.randn(9, 64, device=where), torch.tensor([4, 5], device=where)
    x[2, 7] = 50.0
    q = lowgmm.quantize(torch.randn(2, 32, 64, device=where), format)
    for clip in (None, 3.0):
        xq, scales = lowgmm.quantize_tokens(x, format, clip, impl=impl)
        apart = lowgmm.gmm(xq, q, scales, expert_sizes=sizes, out_dtype=torch.float32, impl=impl)
        inside = lowgmm.gmm(x, q, expert_sizes=sizes, clip=clip, impl=impl)
        assert torch.equal(apart, inside)


def test_int8_sums_do_not_overflow_or_round() -> None:
    """The largest sum of one sign at K=4096 needs 26 bits: FP32 accumulation would round it."""
    x = torch.full((2, 4096), 127, dtype=torch.int8)
    w = torch.full((1, 16, 4096), 127, dtype=torch.int8)
    x[1, 0] = 126
    y = lowgmm.gmm(x, w, expert_sizes=torch.tensor([2]), out_dtype=torch.int32)
    assert y[:, 0].tolist() == [127 * 127 * 4096, 127 * 127 * 4096 - 127]


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_bias(impl: str, format: str, device: torch.device) -> None:
    o = make_operands([3, 0, 6], 40, 64, format, extra_rows=2, device=device.type)
    bias = torch.randn(3, 40, device=device)
    y = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, bias=bias, out_dtype=torch.float32, impl=impl)
    plain = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=torch.float32, impl=impl)
    expected = plain.clone()
    expected[:3] += bias[0]
    expected[3:9] += bias[2]
    assert torch.equal(y, expected)
    if format == "int8":
        packed = cpu.pack(make_operands([3, 0, 6], 40, 64, format, extra_rows=2).weights)
        args = (o.x.cpu(), packed, None if o.scales_x is None else o.scales_x.cpu())
        z = lowgmm.gmm(*args, expert_sizes=o.sizes.cpu(), bias=bias.cpu(), out_dtype=torch.float32)
        assert torch.equal(z, expected.cpu())


def test_explicit_requests_do_not_fall_back(device: torch.device) -> None:
    def call(k_size: int = 64, where: str = device.type, **kwargs: str) -> torch.Tensor:
        o = make_operands([4], 32, k_size, "int8", device=where)
        return lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, **kwargs)

    for where, kwargs, reason in (
        ("cpu", {"config": "16x32x64-grid-4w2s"}, "config chooses a GPU tile"),
        ("cpu", {"impl": "cuda"}, "impl 'cuda' is not one of"),
        (device.type, {"impl": "triton", "config": "huge"}, "not a tile configuration"),
        (device.type, {"impl": "triton", "config": "16x32x64-persistent0-4w2s"}, "not a tile configuration"),
        (device.type, {"impl": "triton", "config": "24x32x64-grid-4w2s"}, "powers of two"),
        (device.type, {"impl": "triton", "config": "256x256x256-grid-8w4s"}, "bytes of shared memory"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            call(where=where, **kwargs)
    with pytest.raises(UnsupportedError, match="TMA needs rows that are a multiple of 16 bytes"):
        call(100, impl="triton", config="16x32x64-tma-grid-4w2s")


@pytest.mark.parametrize("rows", [1, 16, 24, 64, 100, 4096])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(33, 100), (2048, 4096), (5760, 2880)])
@pytest.mark.parametrize("shared_memory", [H200.shared_memory, 166_912, 101_376, 65_536])
def test_pick_always_fits(rows: int, dtype: torch.dtype, shape: tuple[int, int], shared_memory: int) -> None:
    """Whatever is picked runs: on Hopper, and on GPUs with the shared memory of an A100, a consumer card and an
    MI300."""
    gpu = replace(H200, shared_memory=shared_memory, capability=(9, 0) if shared_memory == 232_448 else (8, 9))
    for out_dtype in (torch.bfloat16, torch.float32):
        problem = Problem(8, 8 * rows, *shape, dtype, out_dtype)
        assert supports(problem, pick(problem, gpu), gpu) is None


def test_sizes_that_would_wrap_in_32_bits_are_refused() -> None:
    q = lowgmm.quantize(torch.randn(3, 8, 16), "int8")
    for sizes in ([2**32, 0, 0], [1 + 2**32, 0, 5]):
        with pytest.raises(ShapeError, match="but input has only 6 rows"):
            lowgmm.gmm(torch.randn(6, 16), q, expert_sizes=torch.tensor(sizes))


def test_an_output_that_a_graph_saved_is_noticed() -> None:
    w, out = torch.randn(3, 8, 16), torch.ones(6, 8)
    a = torch.ones(6, 8, requires_grad=True)
    kept = a * out
    with torch.no_grad():
        lowgmm.gmm(torch.randn(6, 16), w, expert_sizes=torch.tensor([1, 0, 5]), output=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [torch.float32, None])
def test_dense_products_are_rounded_behind_the_bias(dtype: torch.dtype, bias: torch.dtype | None) -> None:
    x, w = torch.tensor([[2048.0, 1.0]], dtype=dtype), torch.ones(1, 1, 2, dtype=dtype)
    shift = torch.tensor([[-2048.0]], dtype=bias or dtype)
    assert lowgmm.gmm(x, w, expert_sizes=torch.tensor([1]), bias=shift).tolist() == [[1.0]]


def test_tensors_without_data_give_shapes() -> None:
    x, w = torch.empty(6, 16, device="meta"), torch.empty(3, 8, 16, device="meta")
    y = lowgmm.gmm(x, w, expert_offsets=torch.empty(4, dtype=torch.int32, device="meta"))
    assert (y.shape, y.device.type) == ((6, 8), "meta")
    r = lowgmm.route(logits=torch.empty(5, 8, device="meta"), top_k=2)
    assert (r.topk_ids.shape, r.topk_ids.device.type) == ((5, 2), "meta")


def test_fake_sizes_and_offsets_are_not_compared() -> None:
    with FakeTensorMode():
        x, w, offsets = torch.empty(6, 16), torch.empty(3, 8, 16), torch.empty(4, dtype=torch.int32)
        y = lowgmm.gmm(x, w, expert_offsets=offsets, expert_sizes=torch.empty(3, dtype=torch.int32))
        assert y.shape == (6, 8)
        with pytest.raises(ShapeError, match="'expert_sizes' has 4 where E=3"):
            lowgmm.gmm(x, w, expert_offsets=offsets, expert_sizes=torch.empty(4, dtype=torch.int32))


def test_rows_of_a_result_too_far_apart_for_32_bits_are_not_written_by_the_hopper_kernel() -> None:
    """It adds 32-bit offsets within a tile of up to 128 rows."""
    pytest.importorskip("triton")
    from lowgmm.kernels.grouped_mm import FAR, _tma_ready

    x, w = torch.zeros(128, 16, dtype=torch.int8), torch.zeros(1, 16, 16, dtype=torch.int8)
    for stride, ready in ((16, True), (FAR - 1, True), (FAR, False), (1 << 30, False)):
        out = torch.empty_strided((128, 16), (stride, 1), dtype=torch.bfloat16, device="meta")
        assert _tma_ready(x, w, out) is ready
        assert _tma_ready(x[:1], w, out[:1])
        assert (127 * stride + 63 < 1 << 31) or not ready
