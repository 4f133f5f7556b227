"""Calls made again by their launches alone: the same as in full."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import relaunch, replay, tune
from lowgmm.relaunch import Start


def floats_at(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


class Kernel:
    """Stands for a Triton kernel that computes ``out = x + factor * y``; what it compiles takes addresses."""

    arg_names = ("x", "y", "out", "count", "factor", "BLOCK")

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(x: Tensor, y: Tensor, out: Tensor, count: int, factor: float, **options: Any) -> Any:
            self.log.append("bound")
            self.add(x.data_ptr(), y.data_ptr(), out.data_ptr(), count, factor)
            return SimpleNamespace(function=self.again, metadata=SimpleNamespace(tensordesc_meta=None))

        return run

    def again(self, *arguments: Any) -> None:
        *grid, stream, option, x, y, out, count, factor, block = arguments
        assert (*grid, stream, option, block) == (3, 1, 1, 0, "option", 64)
        self.log.append("again")
        self.add(x, y, out, count, factor)

    @staticmethod
    def add(x: int, y: int, out: int, count: int, factor: float) -> None:
        floats_at(out, count).copy_(floats_at(x, count) + factor * floats_at(y, count))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Calls on CPU tensors are remembered, and its kernel's launcher is known."""
    monkeypatch.setattr(replay, "serves", lambda t: type(t) is Tensor)
    monkeypatch.setattr(replay, "start_of", lambda compiled: Start(compiled.function, ("option",), True))
    monkeypatch.setattr(replay, "hooked", lambda: False)
    monkeypatch.setattr(replay, "_plans", {})
    return Kernel()


def weigh(kernel: Kernel, x: Tensor, y: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """x + y + factor · (x + y), by two launches and scratch memory; ``run`` decides how."""

    def call(kernel: Kernel, x: Tensor, y: Tensor, factor: float, out: Tensor | None) -> Tensor:
        first, second = (replay.empty((x.numel(),), torch.float32, x.device) for _ in range(2))
        if out is None:
            out = replay.empty(x.shape, torch.float32, x.device)
        replay.launch(kernel, 3, x, y, first, x.numel(), 1.0, BLOCK=64, num_warps=4)
        replay.launch(kernel, 3, x, y, second, x.numel(), 1.0, BLOCK=64, num_warps=4)
        replay.launch(kernel, 3, first, second, out, x.numel(), factor, BLOCK=64, num_warps=4)
        return out

    return replay.run(call_of(call), (kernel, x, y, factor, out), (x, y, out), (factor,))


_calls: list[Callable[..., Tensor]] = []


def call_of(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Always the first: a function is part of what tells calls apart, and one inside another is new at every call."""
    _calls[:] = _calls or [call]
    return _calls[0]


def expected(x: Tensor, y: Tensor, factor: float) -> Tensor:
    return x + y + factor * (x + y)


def test_a_call_is_bound_once_and_then_only_launched(kernel: Kernel):
    for n in range(3):
        x, y = torch.randn(5, 7), torch.randn(5, 7)
        assert torch.equal(weigh(kernel, x, y, 2.0), expected(x, y, 2.0))
        assert kernel.log == ["bound"] * 3 + ["again"] * 3 * n
    x = torch.randn(5, 8)
    assert torch.equal(weigh(kernel, x, x.clone(), 2.0), expected(x, x, 2.0))
    assert kernel.log.count("bound") == 6


def test_results_are_new_or_those_given(kernel: Kernel):
    x, out = torch.randn(4, 4), torch.empty(4, 4)
    for _ in range(3):
        assert weigh(kernel, x, x.clone(), 1.0, out) is out
    assert kernel.log == ["bound"] * 3 + ["again"] * 6
    fresh = [weigh(kernel, x, x.clone(), 1.0) for _ in range(3)]
    assert len({t.data_ptr() for t in fresh}) == 3
    assert all(torch.equal(t, out) and t.shape == x.shape for t in fresh)


def test_threads_do_not_disturb_each_other(kernel: Kernel):
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for n in range(200):
            x, y = (torch.randn(3 + n % 4, 5, generator=generator) for _ in range(2))
            if not torch.equal(weigh(kernel, x, y, 0.5), expected(x, y, 0.5)):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert kernel.log.count("again") > kernel.log.count("bound")


@pytest.mark.parametrize("unaligned", [0, 1, 2])
def test_a_pointer_that_is_not_aligned_is_left_to_triton(kernel: Kernel, unaligned: int):
    def at(offset: int) -> Tensor:
        return torch.randn(40)[offset : offset + 32].view(4, 8)

    for odd in (False, True, False, True):
        x, y, out = (at(odd and i == unaligned) for i in range(3))
        kernel.log.clear()
        assert torch.equal(weigh(kernel, x, y, 3.0, out), expected(x, y, 3.0))
        if odd:
            assert kernel.log == ["bound"] * 3
    assert len(replay._plans) == 1


def test_memory_of_unknown_origin_cannot_be_replayed(kernel: Kernel):
    def call(x: Tensor) -> Tensor:
        out = replay.empty(x.shape, torch.float32, x.device)
        replay.launch(kernel, 3, x.contiguous(), x.contiguous(), out, x.numel(), 1.0, BLOCK=64)
        return out

    x = torch.randn(4, 4)
    for n in range(1, 3):
        t = x.T.contiguous().T
        assert torch.equal(replay.run(call, (t,), (t,), ()), 2 * t)
        assert kernel.log == ["bound"] * n, "a copy was made, which no launch makes again"
    for t in (x, x.clone()):
        assert torch.equal(replay.run(call, (t,), (t,), ()), 2 * t)
    assert kernel.log == ["bound"] * 3 + ["again"]


def test_what_launches_did_not_compute_cannot_be_replayed(kernel: Kernel):
    def call(x: Tensor) -> Tensor:
        return replay.empty(x.shape, torch.float32, x.device).copy_(x)

    for _ in range(3):
        x = torch.randn(4)
        assert torch.equal(replay.run(call, (x,), (x,), ()), x)


def test_operands_that_overlap_are_not_taken_for_each_other(kernel: Kernel):
    for _ in range(2):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        assert torch.equal(weigh(kernel, x, x, 2.0), expected(x, x, 2.0))
        assert kernel.log == ["bound"] * 3
        kernel.log.clear()
    other = weigh(kernel, x, y, 2.0)
    assert torch.equal(other, expected(x, y, 2.0))


def test_a_call_around_another_is_not_replayed(kernel: Kernel):
    def outer(x: Tensor) -> Tensor:
        out = replay.empty(x.shape, torch.float32, x.device)
        inner = weigh(kernel, x, x.clone(), 1.0)
        replay.launch(kernel, 3, x, x, out, x.numel(), 0.0, BLOCK=64)
        return out.add_(inner)

    for _ in range(3):
        x = torch.randn(6)
        assert torch.equal(replay.run(outer, (x,), (x,), ()), x + expected(x, x, 1.0))


@pytest.mark.parametrize("reason", ["hook", "debug", "unknown launcher"])
def test_the_long_way_where_it_is_needed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, reason: str):
    x, y = torch.randn(3), torch.randn(3)
    if reason == "unknown launcher":
        monkeypatch.setattr(replay, "start_of", lambda compiled: None)
    weigh(kernel, x, y, 1.0)
    if reason == "hook":
        monkeypatch.setattr(replay, "hooked", lambda: True)
    elif reason == "debug":
        monkeypatch.setenv("LOWGMM_DEBUG", "1")
    kernel.log.clear()
    for _ in range(2):
        assert torch.equal(weigh(kernel, x, y, 1.0), expected(x, y, 1.0))
    assert kernel.log == ["bound"] * 6
    if reason == "debug":
        monkeypatch.setenv("LOWGMM_DEBUG", "0")
        weigh(kernel, x, y, 1.0)
        assert kernel.log[6:] == ["again"] * 3


def test_memory_is_bounded_and_can_be_cleared(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "MOST", 3)
    for n in range(1, 11):
        weigh(kernel, torch.randn(n), torch.randn(n), 1.0)
        assert len(replay._plans) <= 3
    tune.forget()
    assert replay._plans == {}


def test_a_call_that_was_decided_before_is_not_remembered_after(kernel: Kernel):
    def call(x: Tensor) -> Tensor:
        tune.forget()  # as another thread may
        return replay.empty(x.shape, torch.float32, x.device)

    replay.run(call, (x := torch.randn(4),), (x,), ())
    assert replay._plans == {}


def test_many_kinds_with_tokens_of_one_shape_are_remembered(kernel: Kernel):
    def call(x: Tensor, y: Tensor) -> Tensor:
        out = replay.empty(x.shape, torch.float32, x.device)
        replay.launch(kernel, 3, x, y, out, x.numel(), 1.0, BLOCK=64)
        return out

    x = torch.randn(4)
    for n in [*range(60)] * 3:  # as layers that differ in their experts, or GPUs
        y = torch.randn(4 + n)
        assert torch.equal(replay.run(call, (x, y), (x, y), ()), x + y[:4])
    assert kernel.log == ["bound"] * 60 + ["again"] * 120


def test_a_result_that_is_a_part_of_other_memory_cannot_be_replayed(kernel: Kernel):
    def call(x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        out = replay.empty((2 * x.numel(),), torch.float32, x.device)
        replay.launch(kernel, 3, x, x, out, x.numel(), 1.0, BLOCK=64)
        return part(out)

    for part in (lambda t: t[:8], lambda t: t.view(2, 8)[0]):
        for _ in range(2):
            x = torch.randn(8)
            assert torch.equal(replay.run(call, (x, part), (x,), (part,)), 2 * x)


def test_memory_that_is_taken_lives_until_it_is_launched_with(kernel: Kernel):
    alive: list[bool] = []
    taken: list[weakref.ref[Tensor]] = []

    def take(stream: int) -> Tensor:
        taken.append(weakref.ref(made := torch.zeros(8)))
        return made

    def call(x: Tensor) -> Tensor:
        out, zeros = replay.empty(x.shape, torch.float32, x.device), replay.counted(take, 0)
        replay.launch(kernel, 3, x, zeros, out, x.numel(), 1.0, BLOCK=64)
        return out

    add = kernel.add
    kernel.add = lambda *a: alive.append(taken[-1]() is not None) or add(*a)  # type: ignore[method-assign]
    for _ in range(3):
        x = torch.randn(8)
        assert torch.equal(replay.run(call, (x,), (x,), ()), x)
    assert kernel.log == ["bound", "again", "again"]
    assert alive == [True] * 3


class Descriptor:
    """Stands for Triton's or Gluon's."""


def test_plans_keep_no_memory(kernel: Kernel):
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    weigh(kernel, x, y, 1.0)
    assert len(replay._plans) == 1
    kept = [weakref.ref(x), weakref.ref(y)]
    del x, y
    base = torch.randn(4, 16)
    tiles = relaunch.Tiles(relaunch.descriptor(Descriptor, base, (4, 16), (16, 1), [2, 8]), None)
    assert "block_shape" in tiles.form
    kept.append(weakref.ref(base))
    del base
    assert [found() for found in kept] == [None] * 3


@pytest.mark.parametrize("interface", ["TensorGuards", "its signature", "triton"])
def test_another_pytorch_or_none_of_triton_runs_calls_in_full(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, interface: str
):
    guards = torch._C._dynamo.guards
    if interface == "TensorGuards":
        monkeypatch.delattr(guards, interface)
    elif interface == "its signature":
        monkeypatch.setattr(guards, "TensorGuards", lambda *tensors: None)
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.setattr(relaunch, "_runtime", relaunch._runtime.__wrapped__)
        monkeypatch.setattr(replay, "hooked", relaunch.hooked)
    for n in range(1, 4):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        assert torch.equal(weigh(kernel, x, y, 1.0), expected(x, y, 1.0))
        assert kernel.log == ["bound"] * 3 * n


def test_importing_under_somebodys_modes():
    program = (
        "import torch; from torch._subclasses import FakeTensorMode\n"
        "with FakeTensorMode(), torch.device('meta'): import lowgmm.replay\n"
        "assert {(type(t), t.device.type) for t in lowgmm.replay.ABSENT} == {(lowgmm.replay.Absent, 'cpu')}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_refused_call_is_not_remembered(kernel: Kernel):
    def call(x: Tensor) -> Tensor:
        raise lowgmm.shapes.ShapeError("no")

    x = torch.randn(4)
    for _ in range(2):
        with pytest.raises(lowgmm.shapes.ShapeError):
            replay.run(call, (x,), (x,), ())
    assert replay._thread.tape is None
    assert replay._plans == {}


class Sub(Tensor):
    pass


STATES: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Tensor]]] = {
    "gradients": (nullcontext, lambda t: t.requires_grad_()),
    "a negative view": (nullcontext, torch._neg_view),
    "a subclass": (nullcontext, lambda t: t.as_subclass(Sub)),
    "a parameter": (nullcontext, lambda t: torch.nn.Parameter(t, requires_grad=False)),
    "another device": (nullcontext, lambda t: torch.empty_like(t, device="meta")),
    "autocast": (lambda: torch.autocast("cpu"), lambda t: t),
    "inference": (torch.inference_mode, lambda t: t),
}


@pytest.mark.parametrize("state", STATES)
def test_a_plan_serves_only_what_the_dispatcher_would_do_the_same_with(kernel: Kernel, state: str):
    def call(x: Tensor, y: Tensor) -> Tensor:
        out = replay.empty(x.shape, torch.float32, x.device)
        replay.launch(kernel, 3, x, y, out, x.numel(), 2.0, BLOCK=64)
        return out

    def again(y: Tensor) -> Tensor | None:
        return replay.again(call, (x, None, y), ())

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    assert again(y) is None, "nothing is known yet"
    replay.run(call, (x, y), (x, None, y), ())
    known = again(y.clone())
    assert known is not None
    assert torch.equal(known, x + 2 * y)
    around, change = STATES[state]
    with around():
        assert again(change(y.clone())) is None
    assert again(y) is not None


def test_without_gradients_is_another_kind(kernel: Kernel):
    """With gradients on, the dispatcher gives the result of an operand that wants some a grad_fn, which warns."""

    def call(x: Tensor, y: Tensor) -> Tensor:
        out = replay.empty(x.shape, torch.float32, x.device)
        replay.launch(kernel, 3, x, y, out, x.numel(), 2.0, BLOCK=64)
        return out

    x, y = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with torch.no_grad():
        replay.run(call, (x, y), (x, y), ())
        assert replay.again(call, (x, y), ()) is not None
    assert replay.again(call, (x, y), ()) is None
