"""Surroundings that once led to a wrong answer or a crash: process-wide defaults, odd layouts, copies, huge sums."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import cpu, native
from lowgmm.formats import FP8, INT8, QuantTensor
from lowgmm.quant import quantize_rows
from lowgmm.shapes import DtypeError, ShapeError
from lowgmm.testing import check_gmm, make_operands

native_only = pytest.mark.skipif(native.library() is None, reason="the native loops were not built or cannot run here")


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("packing", "default_dtype")
def test_default_dtype_changes_nothing() -> None:
    """Buffers sized by the default dtype were written past their end."""
    x, w = torch.randn(40, 64, dtype=torch.float32), torch.randn(2, 32, 64, dtype=torch.float32)
    values, scales = lowgmm.quantize_tokens(x, "int8")
    assert scales.dtype == torch.float32
    assert all(map(torch.equal, (values, scales), quantize_rows(x, INT8)))
    q, sizes = lowgmm.quantize(w, "int8"), torch.tensor([15, 25])
    plain = lowgmm.gmm(values, q, scales, expert_sizes=sizes, out_dtype=torch.float32)
    assert torch.equal(lowgmm.gmm(x, cpu.pack(q), expert_sizes=sizes), plain)


@pytest.mark.usefixtures("packing")
def test_default_device_changes_nothing() -> None:
    q = lowgmm.quantize(torch.randn(2, 32, 64), "int8")
    x, sizes = torch.randn(5, 64), torch.tensor([2, 3])
    with torch.device("meta"):
        packed = cpu.pack(q)
    assert {t.device.type for t in packed.operands} == {"cpu"}
    expected = lowgmm.gmm(x, q, expert_sizes=sizes)
    with torch.device("meta"):
        y = lowgmm.gmm(x, packed, expert_sizes=sizes)
    assert torch.equal(y, expected)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("k_size", [1, 2, 3, 5])
def test_tiny_k(k_size: int) -> None:
    """torch's int8 product is wrong at K = 1."""
    o = make_operands([3, 0, 1, 6], 9, k_size, "int8")
    y = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=torch.float32)
    check_gmm(y, o)
    packed = lowgmm.gmm(o.x, cpu.pack(o.weights), o.scales_x, expert_sizes=o.sizes, out_dtype=torch.float32)
    assert torch.equal(packed, y)


LAYOUTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "rows broadcast": lambda x, w: (x[:1].expand_as(x), w),
    "rows strided": lambda x, w: (torch.cat([x, x], 1)[:, : x.shape[1]], w),
    "columns strided": lambda x, w: (x.repeat_interleave(2, 1)[:, ::2], w),
    "rows transposed": lambda x, w: (x.T.contiguous().T, w),
    "experts broadcast": lambda x, w: (x, w[:1].expand_as(w)),
    "channels broadcast": lambda x, w: (x, w[:, :1].expand_as(w)),
    "weights transposed": lambda x, w: (x, w.mT.contiguous().mT),
    "weights with an offset": lambda x, w: (x, torch.cat([w, w])[len(w) :]),
}


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_layouts_on_the_cpu(layout: str, dtype: str) -> None:
    """Groups of one row too: a [1, K] slice of a broadcast counts as contiguous."""
    o = make_operands([1, 5, 0, 1], 24, 36, dtype)
    x, w = LAYOUTS[layout](o.x, o.w)
    o = replace(o, x=x, w=w)
    out = torch.full((len(o.x), 50), float("nan"))
    lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, output=out[:, :24])
    check_gmm(out[:, :24], o)
    assert out[:, 24:].isnan().all(), "nothing is written between the rows of a strided output"
    if dtype == "int8":
        again = torch.full((len(o.x), 50), float("nan"))
        lowgmm.gmm(o.x, cpu.pack(o.weights), o.scales_x, expert_sizes=o.sizes, output=again[:, :24])
        assert torch.equal(again[:, :24], out[:, :24])
        assert again[:, 24:].isnan().all()


def test_int8_sums_that_could_overflow_are_refused() -> None:
    x, w = (torch.full((1,) * n + (131_072,), -128, dtype=torch.int8) for n in (1, 2))
    sizes = torch.tensor([1])
    with pytest.raises(ShapeError, match="K=131072 is more than 131071"):
        lowgmm.gmm(x, w, expert_sizes=sizes, out_dtype=torch.int32)
    y = lowgmm.gmm(x[:, 1:], w[:, :, 1:], expert_sizes=sizes, out_dtype=torch.int32)
    assert y.item() == 131_071 * 2**14


@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_autocast_changes_nothing(format: str | None) -> None:
    layer = lowgmm.MoEExperts.from_dense(torch.randn(4, 48, 32), torch.randn(4, 32, 24), format)
    hidden, ids, weights = torch.randn(9, 32), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    expected = layer(hidden, ids, weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(hidden, ids, weights), expected)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_copies_and_pickles(format: str | None) -> None:
    layer = lowgmm.MoEExperts.from_dense(torch.randn(4, 48, 32), torch.randn(4, 32, 24), format)
    call = (torch.randn(9, 32), torch.randint(0, 4, (9, 2)), torch.rand(9, 2))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(*call), layer(*call))
        if format == "int8":
            assert twin.w13.packed is not None, "a copy is as fast as the original"


def test_parameters_do_not_stay_alive() -> None:
    w13, w2 = (torch.nn.Parameter(torch.randn(*s)) for s in ((4, 48, 32), (4, 32, 24)))
    layer = lowgmm.MoEExperts.from_dense(w13, w2, "int8")
    assert not any(t.requires_grad for t in layer.state_dict().values())
    assert list(lowgmm.MoEExperts.from_dense(w13, w2, None).parameters()) == []
    alive = weakref.ref(w13)
    del w13
    gc.collect()
    assert alive() is None
    x = torch.randn(3, 32, requires_grad=True)
    assert layer(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)).shape == (3, 32)


def test_reference_checks_offsets_too() -> None:
    x, w = torch.randn(6, 8), torch.randn(2, 4, 8)
    for offsets in ([2, 3, 6], [0, -2, 6], [0, 3, 99]):
        for impl in ("auto", "reference"):
            with pytest.raises(ShapeError, match="expert_offsets"):
                lowgmm.gmm(x, w, expert_offsets=torch.tensor(offsets), impl=impl)
    with pytest.raises(ShapeError, match="expert_offsets"):
        lowgmm.gmm(x[:0], w, expert_offsets=torch.tensor([0, 1, 2]))


def test_quant_tensor_checks_itself() -> None:
    q = lowgmm.quantize(torch.randn(2, 8, 16), "int8")
    with pytest.raises(DtypeError, match="values"):
        QuantTensor(q.values, q.scales, FP8)
    with pytest.raises(ShapeError, match="scales"):
        QuantTensor(q.values, q.scales[:, :3], q.format)
    assert q != lowgmm.quantize(torch.randn(2, 8, 16), "int8")


def test_weights_of_dropped_slots_do_not_matter() -> None:
    w13, w2 = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    hidden, ids = torch.randn(1, 4), torch.tensor([[1, -1]])
    clean = lowgmm.moe_ffn(hidden, w13, w2, ids, torch.tensor([[0.5, 0.0]]))
    assert torch.equal(lowgmm.moe_ffn(hidden, w13, w2, ids, torch.tensor([[0.5, float("nan")]])), clean)


@native_only
def test_threads_do_not_share_scratch() -> None:
    """Each Python thread quantises into memory of its own."""
    w = cpu.pack(lowgmm.quantize(torch.randn(2, 64, 256), "int8"))
    inputs = [torch.randn(64, 256) for _ in range(6)]
    sizes = torch.tensor([30, 34])
    expected = [lowgmm.gmm(x, w, expert_sizes=sizes) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(60):
            if not torch.equal(lowgmm.gmm(inputs[index], w, expert_sizes=sizes), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@native_only
def test_scratch_beyond_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "KEEP_BYTES", 1000)
    o = make_operands([20, 21], 40, 100, "bfloat16")
    w = lowgmm.quantize(o.w, "int8")
    y = lowgmm.gmm(o.x, cpu.pack(w), expert_sizes=o.sizes)
    assert torch.equal(y, lowgmm.gmm(o.x, w, expert_sizes=o.sizes))


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bias_dtypes_with_packed_weights(dtype: torch.dtype) -> None:
    o = make_operands([3, 4], 40, 64, "int8")
    bias = torch.randn(2, 40).to(dtype)
    args = {"scales_x": o.scales_x, "expert_sizes": o.sizes, "bias": bias, "out_dtype": torch.float32}
    assert torch.equal(lowgmm.gmm(o.x, cpu.pack(o.weights), **args), lowgmm.gmm(o.x, o.weights, **args))


def test_compiled_fp8_layer_with_transposed_input() -> None:
    layer = lowgmm.MoEExperts.from_dense(torch.randn(4, 48, 32), torch.randn(4, 32, 24), "fp8")
    call = (torch.randn(32, 9).T, torch.randint(0, 4, (9, 2)), torch.rand(9, 2))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, backend="aot_eager")(*call), layer(*call))


def test_an_output_that_shares_memory_through_numpy_is_refused() -> None:
    """Two tensors made from one NumPy array have storages of their own."""
    memory = np.zeros((5, 64), dtype=np.float32)
    x, output = torch.from_numpy(memory[:4]), torch.from_numpy(memory[1:])
    with pytest.raises(ShapeError, match="'output' overlaps 'input'"):
        lowgmm.gmm(x, torch.randn(1, 64, 64), expert_sizes=torch.tensor([4]), output=output)
