"""MoEExperts as a module: state, devices, dtypes, memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import lowgmm
from lowgmm.formats import QuantTensor

E, H, I = 4, 32, 24


def layer(format: str | None, seed: int = 0) -> lowgmm.MoEExperts:
    g = torch.Generator().manual_seed(seed)
    w13, w2 = torch.randn(E, 2 * I, H, generator=g), torch.randn(E, H, I, generator=g)
    return lowgmm.MoEExperts.from_dense(w13, w2, format)


def run(module: lowgmm.MoEExperts) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    hidden, ids = torch.randn(6, H, generator=g), torch.randint(0, E, (6, 2), generator=g)
    return module(hidden, ids, torch.rand(6, 2, generator=g))


@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_state_dict_round_trip(format: str | None) -> None:
    a, b = layer(format, 0), layer(format, 1)
    assert not torch.equal(run(a), run(b))
    state = a.state_dict()
    assert b.load_state_dict(state).missing_keys == []
    assert torch.equal(run(a), run(b))
    state.pop("w2.scales" if format else "w2")
    with pytest.raises(RuntimeError, match="Missing key"):
        b.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        b.load_state_dict({**a.state_dict(), "w4": torch.ones(1)})
    wrong = layer(format).state_dict()
    key = next(iter(wrong))
    wrong[key] = wrong[key][:1]
    with pytest.raises(RuntimeError, match=r"expected \[4, 48, 32\]"):
        b.load_state_dict(wrong)
    assert torch.equal(run(a), run(b)), "a refused state changes nothing"


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_dtype_conversions_leave_quantised_weights_alone(format: str) -> None:
    a = layer(format)
    before = run(a)
    a.half()
    assert a.w13.scales.dtype == torch.float32
    assert torch.equal(run(a), before)
    assert layer(None).half().w13.dtype == torch.float16


def test_int8_on_a_cpu_keeps_one_copy() -> None:
    """Packing releases the plain values: nothing else may hold them."""
    q = lowgmm.quantize(torch.randn(E, 2 * I, H), "int8")
    alive = weakref.ref(q.values)
    module = lowgmm.MoEExperts(q, lowgmm.quantize(torch.randn(E, H, I), "int8"))
    del q
    gc.collect()
    assert alive() is None
    assert isinstance(module.w13, QuantTensor)
    assert module.w13.values is None
    assert "format=int8" in repr(module)


def test_packing_loses_nothing() -> None:
    q = lowgmm.quantize(torch.randn(E, 2 * I, H), "int8")
    module = lowgmm.MoEExperts(q, lowgmm.quantize(torch.randn(E, H, I), "int8"))
    assert torch.equal(module.w13.plain(), q.values)
    assert torch.equal(lowgmm.dequantize(module.w13), lowgmm.dequantize(q))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_moves_between_devices(format: str | None) -> None:
    a = layer(format)
    before = run(a)
    state = {name: t.clone() for name, t in a.state_dict().items()}
    a.cuda()
    assert {t.device.type for t in a.state_dict().values()} == {"cuda"}
    a.cpu()
    assert all(torch.equal(t.view(torch.uint8), state[name].view(torch.uint8)) for name, t in a.state_dict().items())
    assert torch.equal(run(a), before)
