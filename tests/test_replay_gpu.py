"""Replayed calls on a GPU: the bits of calls in full, on any stream, in graphs, seen by hooks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import relaunch, replay
from lowgmm.testing import make_operands
from overlap import hold

pytestmark = pytest.mark.gpu
Call = Callable[[], Tensor]


def gmm(dtype: str, dynamic: bool = False, **more: Any) -> Call:
    """A call with operands of its own."""
    o = make_operands([5, 0, 130], 128, 256, dtype, device="cuda")
    x, scales_x = (torch.randn(135, 256, device="cuda").bfloat16(), None) if dynamic else (o.x, o.scales_x)
    bias = torch.randn(3, 128, device="cuda") if more.pop("bias", False) else None
    offsets = o.offsets.to(more.pop("offsets", torch.int32))
    weights = o.weights  # with their scales
    return lambda: lowgmm.gmm(x, weights, scales_x, None, offsets, bias=bias, **more)


def layer(tokens: int, format: str | None) -> Call:
    dense = (torch.randn(8, 256, 256, device="cuda").bfloat16(), torch.randn(8, 256, 128, device="cuda").bfloat16())
    w13, w2 = (w if format is None else lowgmm.quantize(w, format) for w in dense)
    x, weights = torch.randn(tokens, 256, device="cuda").bfloat16(), torch.rand(tokens, 2, device="cuda")
    ids = torch.randint(-1, 8, (tokens, 2), device="cuda")
    return lambda: lowgmm.moe_ffn(x, w13, w2, ids, weights)


CALLS: dict[str, Callable[[], Call]] = {
    "int8": lambda: gmm("int8", bias=True),
    "fp8": lambda: gmm("fp8"),
    "bfloat16": lambda: gmm("bfloat16"),
    "int8, quantised here": lambda: gmm("int8", dynamic=True),
    "int8, int64 offsets": lambda: gmm("int8", offsets=torch.int64),
    "int4": lambda: gmm("int4", bias=True),
    "int4_g64": lambda: gmm("int4_g64"),
    "int4_g32, quantised here": lambda: gmm("int4_g32", dynamic=True),
    "portable": lambda: gmm("int8", config="16x64x128-swap-queue2-4w3s"),
    "layer, one token": lambda: layer(1, "int8"),
    "layer, few tokens": lambda: layer(8, "fp8"),
    "layer, many tokens": lambda: layer(3000, "int8"),
    "layer, bfloat16": lambda: layer(8, None),
}


@pytest.fixture(params=CALLS)
def make(request: pytest.FixtureRequest) -> Callable[[], Call]:
    replay.forget()
    return CALLS[request.param]


def in_full(call: Call) -> Tensor:
    replay.forget()
    return call()


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every launch of a plan."""
    made: list[int] = []
    launch = relaunch.Launch.__call__
    monkeypatch.setattr(relaunch.Launch, "__call__", lambda *args: made.append(1) or launch(*args))
    return made


def test_replays_give_the_same_bits(make: Callable[[], Call], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, made = [make() for _ in range(4)], count(monkeypatch)
    calls[0]()
    assert made == []
    replays = [call() for call in calls * 2]
    assert len(made) >= len(replays)
    for call, found in zip(calls * 2, replays, strict=True):
        assert torch.equal(found, in_full(call))


def test_replays_on_two_streams_at_once(make: Callable[[], Call]) -> None:
    calls = [make() for _ in range(2)]
    expected = [in_full(call) for call in calls]
    streams, found = [torch.cuda.Stream() for _ in calls], []
    hold(streams, products=4)
    for _ in range(100):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[i % 2]) for i, y in enumerate(found))


def test_replays_in_a_captured_graph(make: Callable[[], Call]) -> None:
    call = make()
    expected = in_full(call)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call() for _ in range(3)]
    for _ in range(3):
        for y in found:
            y.fill_(7)
        graph.replay()
        assert all(torch.equal(y, expected) for y in found)


def test_hooks_see_every_launch(make: Callable[[], Call]) -> None:
    from triton import knobs

    call, seen = make(), []
    call()
    call()
    hook = knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        call()
    finally:
        hook.remove(seen.append)
    assert len(seen) >= 1


def test_plans_keep_no_memory(make: Callable[[], Call]) -> None:
    make()()  # the queue's counters stay
    replay.forget()
    gc.collect()
    before = torch.cuda.memory_allocated()
    call = make()
    call()
    call()
    del call
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_gradients_are_left_to_the_dispatcher() -> None:
    replay.forget()
    o = make_operands([5, 0, 130], 128, 256, "bfloat16", device="cuda")
    w, offsets = o.w.requires_grad_(), o.offsets
    with torch.no_grad():
        assert not any(lowgmm.gmm(o.x, w, expert_offsets=offsets).requires_grad for _ in range(3))
    assert all(lowgmm.gmm(o.x, w, expert_offsets=offsets).requires_grad for _ in range(3))
