"""The short way past the dispatcher and past repeated checks: taken only where it changes nothing but the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import lowgmm
from lowgmm import module, native, ops, shapes
from lowgmm.layer import LayerSpec
from lowgmm.shapes import DtypeError, ShapeError
from lowgmm.testing import check_gmm, make_operands


class Dispatched(TorchDispatchMode):
    """Sees every operator that goes through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def vmapped() -> Iterator[None]:
    level = torch._C._functorch._vmap_increment_nesting(2, "error")
    assert level
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


def operands(device: torch.device):
    return make_operands([5, 0, 7], 48, 64, "int8", device=device.type)


def call(o: Any, **more: Any) -> torch.Tensor:
    return lowgmm.gmm(o.x, o.w, o.scales_x, o.scales_w, o.offsets, **more)


def test_ordinary_calls_take_it(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    o, y = operands(device), torch.empty(12, 48, device=device, dtype=torch.bfloat16)
    reached = []
    monkeypatch.setattr(torch.ops.lowgmm, "gmm", lambda *a: reached.append("gmm"))
    monkeypatch.setattr(torch.ops.lowgmm, "gmm_out", lambda *a: reached.append("gmm_out"))
    check_gmm(call(o), o)
    check_gmm(call(o, output=y), o)
    assert reached == []


@pytest.mark.parametrize(
    "state",
    [
        Dispatched,
        Functions,
        FakeTensorMode,
        vmapped,
        lambda: torch.autocast("cpu"),
        profile,
    ],
    ids=["dispatch mode", "function mode", "fake mode", "vmap", "autocast", "profiler"],
)
def test_anything_that_the_dispatcher_serves_goes_through_it(state: Any, device: torch.device):
    o = operands(device)
    assert ops.plain(o.x, o.w, None)
    manager: AbstractContextManager[Any] = state()
    with manager:
        assert not ops.plain(o.x, o.w, None)
    assert ops.plain(o.x, o.w, None)


class Sub(torch.Tensor):
    pass


def test_tensors_that_the_dispatcher_serves_go_through_it(device: torch.device):
    o = operands(device)
    needs_grad = torch.ones(2, device=device, requires_grad=True)
    for other in (Sub(), torch.ones(2, device="meta"), FakeTensorMode().from_tensor(torch.ones(2)), needs_grad, [1]):
        assert not ops.plain(o.x, other)
    with torch.no_grad():
        assert ops.plain(o.x, needs_grad)
    assert ops.plain(o.x, torch.nn.Parameter(o.w, requires_grad=False))


def test_modes_and_the_profiler_see_the_operator(device: torch.device):
    o = operands(device)
    with Dispatched() as seen:
        check_gmm(call(o), o)
    assert "lowgmm.gmm.default" in seen.names
    with profile() as p:
        call(o)
    assert "lowgmm::gmm" in {e.key for e in p.key_averages()}


def test_autocast_changes_nothing(device: torch.device):
    o = operands(device)
    expected = call(o)
    with torch.autocast(device.type):
        assert torch.equal(call(o), expected)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    fresh: dict[Any, Any] = {}
    monkeypatch.setattr(ops, "_accepted", fresh)
    return fresh


def test_a_signature_is_checked_once(accepted: dict[Any, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch):
    o, checked = operands(device), []
    monkeypatch.setattr(ops, "check_gmm", lambda *a, f=ops.check_gmm: checked.append(1) or f(*a))
    for _ in range(3):
        check_gmm(call(o), o)
    assert len(checked) == len(accepted) == 1
    call(o, out_dtype=torch.float32)
    assert len(checked) == 2


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"x": lambda t: t[:, :-1]}, ShapeError),
        ({"w": lambda t: t[:, :-1]}, ShapeError),
        ({"offsets": lambda t: t[:-1]}, ShapeError),
        ({"offsets": lambda t: t.float()}, DtypeError),
        ({"scales_x": lambda t: t[1:]}, ShapeError),
        ({"scales_w": lambda t: t.int()}, DtypeError),
        ({"x": lambda t: t.to(torch.uint8)}, DtypeError),
    ],
)
def test_a_bad_call_after_a_good_one_is_still_refused(change: Any, error: type[Exception], device: torch.device):
    o = operands(device)
    good = {"x": o.x, "w": o.w, "scales_x": o.scales_x, "scales_w": o.scales_w, "offsets": o.offsets}
    order = ("x", "w", "scales_x", "scales_w", "offsets")
    lowgmm.gmm(*(good[n] for n in order))
    bad = good | {name: f(good[name]) for name, f in change.items()}
    for _ in range(2):
        with pytest.raises(error, match="gmm"):
            lowgmm.gmm(*(bad[n] for n in order))


def test_overlap_is_checked_at_every_call(device: torch.device):
    storage = torch.zeros(4 * 64 + 4 * 64 * 2, dtype=torch.uint8, device=device)
    x = storage[: 4 * 64].view(torch.int8).view(4, 64)
    apart, over = (storage[a : a + 4 * 64 * 2].view(torch.bfloat16).view(4, 64) for a in (4 * 64, 0))
    w, offsets = torch.ones(1, 64, 64, dtype=torch.int8, device=device), torch.tensor([0, 4], device=device)
    for _ in range(2):
        lowgmm.gmm(x, w, expert_offsets=offsets, output=apart)
        with pytest.raises(ShapeError, match="overlaps 'input'"):
            lowgmm.gmm(x, w, expert_offsets=offsets, output=over)


def test_spans_of_views_that_are_not_contiguous():
    t = torch.zeros(8, 8, dtype=torch.int16)
    assert shapes.byte_span(t[2:4, 1:3], False) == (t.data_ptr() + 34, t.data_ptr() + 34 + (8 + 1) * 2 + 2)
    assert shapes.byte_span(t[2:4], False) == (t.data_ptr() + 32, t.data_ptr() + 64)


def test_remembered_signatures_are_bounded(accepted: dict[Any, Any], device: torch.device, monkeypatch):
    monkeypatch.setattr(ops, "MAX_ACCEPTED", 4)
    o = operands(device)
    for rows in range(1, 12):
        ops._check_once(o.x[:rows], [o.w], None, o.scales_w, o.offsets, None, None, "auto", torch.bfloat16)
        assert len(accepted) <= 4


def test_scales_of_any_layout_reach_the_kernels_the_same(device: torch.device):
    o = operands(device)
    expected = call(o)
    assert o.scales_x is not None
    assert o.scales_w is not None
    assert ops.flat_scales(o.scales_x, (12,)) is o.scales_x
    for sx, sw in (
        (o.scales_x[:, None], o.scales_w[:, :, None]),
        (o.scales_x.double().float().repeat_interleave(2)[::2], o.scales_w.T.contiguous().T),
    ):
        assert torch.equal(lowgmm.gmm(o.x, o.w, sx, sw, o.offsets), expected)


def moe_layer() -> tuple[lowgmm.MoEExperts, tuple[torch.Tensor, ...]]:
    experts = lowgmm.MoEExperts.from_dense(torch.randn(4, 2 * 24, 32), torch.randn(4, 32, 24), "int8")
    return experts, (torch.randn(3, 32), torch.randint(0, 4, (3, 2)), torch.rand(3, 2))


needs_native = pytest.mark.skipif(native.library() is None, reason="the native code was not built or cannot run here")


@needs_native
def test_a_layers_second_call_is_short(monkeypatch: pytest.MonkeyPatch):
    experts, inputs = moe_layer()
    first, long = experts(*inputs), []
    monkeypatch.setattr(module, "moe_ffn", lambda *a, f=module.moe_ffn, **k: long.append(1) or f(*a, **k))
    assert torch.equal(experts(*inputs), first)
    assert torch.equal(experts(*(t.clone() for t in inputs)), first)
    assert long == []
    with Dispatched() as seen:
        assert torch.equal(experts(*inputs), first)
    assert "lowgmm.moe_ffn.default" in seen.names
    copy = deepcopy(experts)
    assert torch.equal(copy(*inputs), first)
    assert len(long) == 2, "modes see the operator, and a copy looks for a shortcut of its own"


@needs_native
def test_a_layers_shortcut_goes_with_its_weights():
    (experts, inputs), (other, _) = moe_layer(), moe_layer()
    first, second = experts(*inputs), other(*inputs)
    experts.w13, experts.w2 = other.w13, other.w2
    for _ in range(2):
        assert torch.equal(experts(*inputs), second)
    experts.spec = LayerSpec("gelu")
    for _ in range(2):
        assert not torch.equal(experts(*inputs), second)
    assert not torch.equal(first, second)


@needs_native
@pytest.mark.parametrize(
    "change", [lambda x, i, w: (x[:, 1:], i, w), lambda x, i, w: (x, i.float(), w), lambda x, i, w: (x, i, w[1:])]
)
def test_a_layers_bad_call_after_a_good_one_is_still_refused(change: Any):
    experts, inputs = moe_layer()
    experts(*inputs)
    for _ in range(2):
        with pytest.raises((ShapeError, DtypeError), match="moe_ffn"):
            experts(*change(*inputs))
