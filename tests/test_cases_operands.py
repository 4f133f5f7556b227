"""Reported faults of operands: layouts of scales and matrices, aliasing, devices, formats that a GPU lacks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import cpu
from lowgmm.gpu import Gpu
from lowgmm.quant import quantize_rows, to_fnuz
from lowgmm.shapes import DeviceError, DtypeError, ShapeError, UnsupportedError
from lowgmm.testing import Operands, check_gmm, make_operands
from lowgmm.tile_config import Problem
from test_cases_support import BACKENDS, CPU, GMM_RUNS, HAS_CUDA, KERNELS, LAYERS, SMALL, Backend, kernels_only


def tile(backend: Backend) -> str | None:
    return SMALL if backend.impl == "triton" else None


# ---- A22: FP8 where the GPU has none ---------------------------------------------------------------------------------

OLD_GPUS = [Gpu("Turing", (7, 5), 40, 65_536), Gpu("A100", (8, 0), 108, 166_912), Gpu("A10", (8, 6), 72, 101_376)]


@kernels_only
@pytest.mark.parametrize("gpu", OLD_GPUS, ids=lambda gpu: gpu.name)
def test_a22_fp8_on_an_older_gpu_names_an_alternative(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear error before anything is compiled; INT8 and 16 bits still run on the same GPU."""
    # The kernels first: were they imported after lowgmm.gpu is patched, they would keep the fake as their original.
    monkeypatch.setattr("lowgmm.kernels.grouped_mm.describe", lambda _: gpu)
    monkeypatch.setattr("lowgmm.gpu.describe", lambda _: gpu)
    major, minor = gpu.capability
    message = rf"{gpu.name} \(sm_{major}{minor}\).*'int8'.*dequantize"
    o = make_operands([3, 5], 32, 64, "fp8", device=KERNELS.device)
    for config in (None, SMALL):
        with pytest.raises(UnsupportedError, match=message):
            lowgmm.gmm(o.x, o.weights, o.scales_x, None, o.offsets, impl="triton", config=config)
    with pytest.raises(UnsupportedError, match=message):
        lowgmm.quantize_tokens(torch.ones(2, 8, device=KERNELS.device), "fp8", impl="triton")
    with pytest.raises(UnsupportedError, match=message):
        lowgmm.gmm(torch.ones(8, 64, device=KERNELS.device), o.weights, None, None, o.offsets, impl="triton")
    for dtype in ("int8", "float16"):
        o = make_operands([3, 5], 32, 64, dtype, device=KERNELS.device)
        check_gmm(lowgmm.gmm(o.x, o.weights, o.scales_x, None, o.offsets, impl="triton", config=SMALL), o)
    # The other way that the message names: FP8 weights as 16-bit ones.
    fp8 = make_operands([3, 5], 32, 64, "fp8", device=KERNELS.device).weights
    o = replace(o, w=lowgmm.dequantize(fp8).to(o.x.dtype))
    check_gmm(lowgmm.gmm(o.x, o.w, None, None, o.offsets, impl="triton", config=SMALL), o)


def test_a22_capability_that_has_fp8_is_not_refused() -> None:
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        assert Gpu("new", capability, 100, 101_376).lacks(lowgmm.formats.FP8) is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("x", "w"), [("fp8", "bfloat16"), ("fp8", "int8"), ("int8", "fp8"), ("int8", "float16"), ("float16", "bfloat16")]
)
def test_a22_mixed_formats_are_refused(backend: Backend, x: str, w: str) -> None:
    left, right = (make_operands([3, 5], 32, 64, d, device=backend.device) for d in (x, w))
    with pytest.raises(DtypeError, match="argument 'input' is"):
        lowgmm.gmm(left.x, right.w, None, None, left.offsets, impl=backend.impl)


# ---- A24: devices and streams ----------------------------------------------------------------------------------------


def test_a24_mixed_devices_are_refused() -> None:
    """Each operand in turn on another device."""
    o = make_operands([3, 5], 32, 64, "int8")
    tensors = {"input": o.x, "weights": o.w, "scales_x": o.scales_x, "scales_w": o.scales_w}
    tensors |= {"expert_offsets": o.offsets, "bias": torch.zeros(2, 32), "output": torch.zeros(8, 32)}
    for moved in tensors:
        given = {n: t.to("meta") if n == moved else t for n, t in tensors.items() if t is not None}
        with pytest.raises(DeviceError, match=rf"{moved} on meta"):
            lowgmm.gmm(**given)
    check_gmm(lowgmm.gmm(o.x, o.w, o.scales_x, o.scales_w, o.offsets), o)


@pytest.mark.gpu
def test_a24_cpu_and_cuda_are_refused() -> None:
    o = make_operands([3, 5], 32, 64, "int8", device="cuda")
    assert o.scales_x is not None
    for bad in ({"scales_x": o.scales_x.cpu()}, {"expert_offsets": o.offsets.cpu()}):
        with pytest.raises(DeviceError, match="cpu"):
            lowgmm.gmm(
                **{"input": o.x, "weights": o.weights, "scales_x": o.scales_x, "expert_offsets": o.offsets} | bad
            )


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a24_tensors_on_another_than_the_current_device() -> None:
    """Both orders, so that what was cached for one device is asked for again on the other."""
    for current, device in ((0, "cuda:1"), (1, "cuda:0"), (0, "cuda:1")):
        torch.cuda.set_device(current)
        o = make_operands([3, 5], 96, 128, "int8", device=device)
        y = lowgmm.gmm(o.x, o.weights, o.scales_x, None, o.offsets)
        q, _ = lowgmm.quantize_tokens(torch.ones(3, 8, device=device), "int8")
        assert y.device == q.device == torch.device(device)
        assert torch.cuda.current_device() == current
        check_gmm(y, o)
        assert (q == 127).all()
    torch.cuda.set_device(0)


@pytest.mark.gpu
def test_a24_kernels_run_on_the_current_stream() -> None:
    """The input appears late, on a side stream; a launch on any other stream would read it too early."""
    o = make_operands([30, 50], 96, 128, "int8", device="cuda")
    run = (o.weights, o.scales_x, None, o.offsets)
    expected = lowgmm.gmm(o.x, *run)
    late = torch.zeros_like(o.x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # about 50 ms
        late.copy_(o.x)
        y = lowgmm.gmm(late, *run)
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


# ---- A29: layouts of scales ------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "keepdim": lambda s: s.unsqueeze(-1),
    "strided": lambda s: s.new_zeros(*s.shape, 3)[..., 1].copy_(s),
    "column of a table": lambda s: s.new_zeros(*s.shape[:-1], s.shape[-1], 8)[..., 5:6].copy_(s.unsqueeze(-1)),
    "transposed": lambda s: (
        s.new_zeros(s.shape[::-1]).copy_(s.permute(*range(s.dim())[::-1])).permute(*range(s.dim())[::-1])
    ),
    "inside a larger buffer": lambda s: s.new_zeros(*(n + 5 for n in s.shape))[
        tuple(slice(2, 2 + n) for n in s.shape)
    ].copy_(s),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a29_scales_of_any_layout(backend: Backend, dtype: torch.dtype) -> None:
    """All scales differ, and every layout and dtype of the same scales gives the same bits."""
    o = make_operands([4, 0, 7], 32, 64, "int8", device=backend.device)
    assert o.scales_x is not None
    assert o.scales_w is not None
    sx, sw = o.scales_x.to(dtype), o.scales_w.to(dtype)
    run = {"expert_offsets": o.offsets, "impl": backend.impl, "config": tile(backend), "out_dtype": torch.float32}
    expected = lowgmm.gmm(o.x, o.w, sx, sw, **run)
    check_gmm(expected, Operands(o.x, o.w, sx.float(), sw.float(), o.sizes))
    for name, arrange in LAYOUTS.items():
        a, b = arrange(sx), arrange(sw)
        assert torch.equal(a.reshape(sx.shape), sx)
        assert torch.equal(b.reshape(sw.shape), sw)
        assert torch.equal(lowgmm.gmm(o.x, o.w, a, b, **run), expected), name
    if backend == CPU:
        packed = cpu.pack(o.weights)
        expected = lowgmm.gmm(o.x, packed, sx, **run)
        for name, arrange in LAYOUTS.items():
            assert torch.equal(lowgmm.gmm(o.x, packed, arrange(sx), **run), expected), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a29_bias_of_any_layout(backend: Backend, generator: torch.Generator) -> None:
    o = make_operands([4, 0, 7], 32, 64, "int8", device=backend.device)
    bias = torch.randn(3, 32, generator=generator).to(backend.device)
    run = {"impl": backend.impl, "config": tile(backend), "out_dtype": torch.float32}
    args = (o.x, o.weights, o.scales_x, None, o.offsets)
    expected = lowgmm.gmm(*args, bias=bias, **run)
    plain = lowgmm.gmm(*args, **run)
    experts = torch.repeat_interleave(torch.arange(3), o.sizes.cpu()).to(backend.device)
    assert torch.equal(expected, plain + bias[experts])
    for name in ("strided", "transposed", "inside a larger buffer"):
        assert torch.equal(lowgmm.gmm(*args, bias=LAYOUTS[name](bias), **run), expected), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a29_offsets_of_any_layout(backend: Backend, dtype: torch.dtype) -> None:
    """The kernels read offsets side by side: a column of a table of them gave other experts' rows."""
    o = make_operands([4, 0, 7], 32, 64, "int8", device=backend.device)
    run = {"impl": backend.impl, "config": tile(backend)}
    offsets = o.offsets.to(dtype)
    expected = lowgmm.gmm(o.x, o.weights, o.scales_x, None, offsets, **run)
    for name in ("strided", "inside a larger buffer"):
        assert torch.equal(lowgmm.gmm(o.x, o.weights, o.scales_x, None, LAYOUTS[name](offsets), **run), expected), name


# ---- A30: transposed, sliced and unaligned operands ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "fp8"])
@pytest.mark.parametrize(
    ("backend", "config"), [*GMM_RUNS[:3], pytest.param(KERNELS, None, id="picked", marks=kernels_only)]
)
def test_a30_operands_of_any_layout(backend: Backend, config: str | None, dtype: str) -> None:
    """Rows no multiple of 16 bytes apart, unaligned starts, K strided: right results, not garbage."""
    o = make_operands([2, 2, 2, 2], 48, 129, dtype, device=backend.device)
    run = {"expert_offsets": o.offsets, "impl": backend.impl, "config": config}
    x_views = {
        "padded rows": o.x.new_empty(8, 136)[:, :129],
        "unaligned start": o.x.new_empty(8, 136)[:, 3:132],
        "every other row": o.x.new_empty(16, 129)[::2],
        "transposed": o.x.new_empty(129, 8).T,
    }
    w_views = {
        "transposed": o.w.new_empty(4, 129, 48).transpose(1, 2),
        "padded": o.w.new_empty(5, 50, 136)[1:, 1:49, 5:134],
        "interleaved experts": o.w.new_empty(48, 4, 129).transpose(0, 1),
    }
    for view in x_views.values():
        view.copy_(o.x)
    for view in w_views.values():
        view.copy_(o.w)
    for name, x in x_views.items():
        check_gmm(lowgmm.gmm(x, o.w, o.scales_x, o.scales_w, **run), o, name)
    for name, w in w_views.items():
        check_gmm(lowgmm.gmm(o.x, w, o.scales_x, o.scales_w, **run), o, name)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a30_quantise_any_layout(backend: Backend, format: str, generator: torch.Generator) -> None:
    big = torch.randn(12, 64, generator=generator).to(backend.device)
    for x in (big[:, :57], big[:, 3:40], big[::3], big.T, big[:, ::2]):
        q, scales = lowgmm.quantize_tokens(x, format, impl=backend.impl)
        values, expected = quantize_rows(x.contiguous().cpu(), lowgmm.formats.get_format(format))
        assert torch.equal(q.cpu().contiguous().view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(scales.cpu(), expected)


@pytest.mark.parametrize(("backend", "config"), GMM_RUNS[:3])
def test_a30_output_of_any_row_stride(backend: Backend, config: str | None) -> None:
    """A slice of a larger tensor as output: written inside, untouched outside; unit stride along N is required."""
    o = make_operands([2, 5], 48, 64, "int8", device=backend.device)
    big = torch.full((9, 61), 7.0, device=backend.device)
    out = big[1:8, 5:53]
    args = (o.x, o.weights, o.scales_x, None, o.offsets, None)
    assert lowgmm.gmm(*args, out, impl=backend.impl, config=config) is out
    check_gmm(out, o)
    out.fill_(7.0)
    assert torch.equal(big, torch.full_like(big, 7.0))
    with pytest.raises(ShapeError, match="'output' has strides"):
        lowgmm.gmm(*args, torch.empty(48, 7, device=backend.device).T, impl=backend.impl, config=config)


# ---- A31: inputs are left alone --------------------------------------------------------------------------------------


def digest(t: Tensor | None) -> str:
    return (
        ""
        if t is None
        else hashlib.sha256(bytes(t.cpu().contiguous().view(torch.uint8).flatten().tolist())).hexdigest()
    )


@pytest.mark.parametrize("dtype", ["int8", "fp8", "float32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a31_gmm_leaves_its_inputs_alone(backend: Backend, dtype: str) -> None:
    o = make_operands([2, 0, 5], 32, 64, dtype, extra_rows=2, device=backend.device)
    bias = torch.ones(3, 32, device=backend.device)
    dense = make_operands([2, 0, 5], 32, 64, "float32", extra_rows=2, device=backend.device).x
    inputs = (o.x, o.w, o.scales_x, o.scales_w, o.offsets, o.sizes, bias, dense)
    before = [digest(t) for t in inputs]
    args = (o.w, o.scales_x, o.scales_w, o.offsets, o.sizes)
    lowgmm.gmm(o.x, *args, bias=bias, impl=backend.impl, config=tile(backend))
    if dtype != "float32":
        lowgmm.gmm(dense, o.weights, None, None, o.offsets, bias=bias, impl=backend.impl, config=tile(backend))
        lowgmm.quantize_tokens(dense, dtype, 1.0, impl=backend.impl)
    assert [digest(t) for t in inputs] == before
    o.x.view(torch.uint8)[0, 0] ^= 1
    assert digest(o.x) != before[0]  # the hash sees one bit


@pytest.mark.parametrize("format", ["int8", "fp8", None])
@pytest.mark.parametrize("backend", LAYERS)
def test_a31_layer_leaves_its_inputs_alone(backend: Backend, format: str | None, generator: torch.Generator) -> None:
    hidden = torch.randn(3, 32, generator=generator).to(backend.device)
    w13, w2 = (torch.randn(2, n, 32, generator=generator).to(backend.device) for n in (64, 32))
    ids = torch.tensor([[0, 1], [1, -1], [1, 1]], device=backend.device)
    weights = torch.rand(3, 2, generator=generator).to(backend.device)
    layer: tuple[Tensor | lowgmm.QuantTensor, ...] = (w13, w2)
    inputs = [hidden, w13, w2, ids, weights]
    if format is not None:
        layer = tuple(backend.place(lowgmm.quantize(w, format)) for w in (w13, w2))
        inputs += [t for q in layer for t in (*q.operands, q.scales)]
    before = [digest(t) for t in inputs]
    lowgmm.moe_ffn(hidden, *layer, ids, weights, clip=2.0 if format else None, impl=backend.impl)
    assert [digest(t) for t in inputs] == before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "victim", ["input", "weights", "scales_x", "scales_w", "bias", "expert_offsets", "expert_sizes"]
)
def test_a31_output_over_an_input_is_refused(backend: Backend, victim: str) -> None:
    """Any shared byte is an error that names the operand; a neighbour in the same allocation is not."""
    o = make_operands([2, 5], 32, 64, "float32", device=backend.device)
    q = make_operands([2, 5], 32, 64, "int8", device=backend.device)
    buffer = torch.zeros(2 * 32 * 64 + 7 * 32 + 64, device=backend.device)
    tensors = {"input": o.x, "weights": o.w, "bias": torch.ones(2, 32, device=backend.device)}
    if victim in ("scales_x", "scales_w"):
        tensors |= {"input": q.x, "weights": q.w, "scales_x": q.scales_x, "scales_w": q.scales_w}
    tensors |= {"expert_sizes": o.sizes} if victim == "expert_sizes" else {"expert_offsets": o.offsets}
    size = tensors[victim].numel()
    tensors[victim] = buffer[:size].view(tensors[victim].dtype).view(tensors[victim].shape).copy_(tensors[victim])
    run = {"impl": backend.impl, "config": tile(backend)}
    for start in (0, size - 1):
        output = buffer[start : start + 7 * 32].view(7, 32)
        with pytest.raises(ShapeError, match=f"'output' overlaps '{victim}'"):
            lowgmm.gmm(**tensors, output=output, **run)
    lowgmm.gmm(**tensors, output=buffer[size : size + 7 * 32].view(7, 32), **run)


def test_a23_every_code_survives_conversion_to_fnuz() -> None:
    """AMD's FP8 has other bits: -0 there is NaN, NaN here would be a number there, and all else means half as much."""
    codes = torch.arange(256, dtype=torch.uint8)
    values, scales = codes.view(torch.float8_e4m3fn), torch.tensor([0.37])
    converted, doubled = to_fnuz(values, scales)
    assert converted.dtype == torch.float8_e4m3fnuz
    before, after = values.float() * scales, converted.float() * doubled
    finite = before.isfinite()
    assert finite.sum() == 254
    assert torch.equal(after[finite], before[finite])
    assert after[~finite].isnan().all()
    assert converted.view(torch.uint8)[[0x80, 0x7F, 0xFF]].tolist() == [0x00, 0x80, 0x80]
    assert not torch.equal(codes.view(torch.float8_e4m3fnuz).float() * doubled, before), "the bits alone would not do"


@kernels_only
@pytest.mark.parametrize("scaled", [True, False])
def test_a23_operands_for_fnuz_hardware_mean_the_same(scaled: bool) -> None:
    """What the launcher hands to a GPU whose FP8 is e4m3fnuz (the interpreter has no such type: the oracle judges)."""
    from lowgmm.kernels.grouped_mm import as_fnuz

    assert Gpu("AMD MI300X", (9, 4), sms=304, shared_memory=65_536, backend="hip").fnuz
    assert not Gpu("NVIDIA H200", (9, 0), sms=132, shared_memory=232_448).fnuz
    o = make_operands([5, 0, 20], 40, 64, "fp8", extra_rows=2)
    if not scaled:
        o = replace(o, scales_x=None, scales_w=None)
    x, w, scales_x, scales_w = as_fnuz(o.x, o.w, o.scales_x, o.scales_w)
    assert x.dtype == w.dtype == torch.float8_e4m3fnuz
    assert (scales_x.shape, scales_w.shape) == ((27,), (3, 40))
    assert torch.equal(replace(o, x=x, w=w, scales_x=scales_x, scales_w=scales_w).exact(), o.exact())


@kernels_only
def test_a23_fnuz_hardware_looks_up_what_was_measured_for_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name that the tuner stores it by, not as another dtype of one byte."""
    from lowgmm.kernels import grouped_mm

    looked_up: list[str] = []

    def pick(problem: Problem, gpu: Gpu) -> None:
        looked_up.append(problem.format)
        raise UnsupportedError("no such GPU")

    monkeypatch.setattr(grouped_mm, "describe", lambda _: Gpu("AMD MI300X", (9, 4), 304, 65_536, "hip"))
    monkeypatch.setattr(grouped_mm, "pick", pick)
    o = make_operands([3, 5], 32, 64, "fp8", device=KERNELS.device)
    with pytest.raises(UnsupportedError):
        lowgmm.gmm(o.x, o.w, o.scales_x, o.scales_w, o.offsets, impl="triton")
    assert looked_up == ["fp8"]
