"""Calls made again by their launches alone: the same as in full, told apart by everything that decides."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import ops, relaunch, replay, tune
from lowgmm.relaunch import Start
from lowgmm.testing import make_operands


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


def test_a_refused_call_is_not_remembered(kernel: Kernel):
    def call(x: Tensor) -> Tensor:
        raise lowgmm.shapes.ShapeError("no")

    x = torch.randn(4)
    for _ in range(2):
        with pytest.raises(lowgmm.shapes.ShapeError):
            replay.run(call, (x,), (x,), ())
    assert replay._thread.tape is None
    assert replay._plans == {}


# ---- what tells calls of the operators apart -------------------------------------------------------------------------


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What calls are told apart by, of every call."""
    found: list[Any] = []
    monkeypatch.setattr(replay, "serves", lambda t: True)
    monkeypatch.setattr(replay, "_plans", {})

    def noted(kind: Any, call: Callable[..., Tensor], arguments: Any, tensors: Any) -> Tensor:
        found.append(kind)
        return call(*arguments)

    monkeypatch.setattr(replay, "_noted", noted)
    return found


def gmm_arguments() -> dict[str, Any]:
    o = make_operands([5, 0, 7], 48, 64, "int8")
    return {"input": o.x, "weights": o.w, "scales_x": o.scales_x, "scales_w": o.scales_w, "expert_offsets": o.offsets}


def strided(t: Tensor) -> Tensor:
    """The same values, further apart."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 64, dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


BIAS = torch.randn(3, 48)
GMM_CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "rows": lambda a: {
        "input": a["input"][:11], "scales_x": a["scales_x"][:11], "expert_offsets": a["expert_offsets"].clamp(max=11),
    },
    "channels": lambda a: {"weights": a["weights"][:, :32].clone(), "scales_w": a["scales_w"][:, :32].clone()},
    "reduction": lambda a: {"input": a["input"][:, :32].contiguous(), "weights": a["weights"][..., :32].contiguous()},
    "experts": lambda a: {
        "weights": a["weights"][:2], "scales_w": a["scales_w"][:2], "expert_offsets": a["expert_offsets"][:3],
    },
    "stride of the input": lambda a: {"input": strided(a["input"])},
    "stride of the weights": lambda a: {"weights": strided(a["weights"])},
    "stride of scales_w": lambda a: {"scales_w": strided(a["scales_w"])},
    "dtype of scales_x": lambda a: {"scales_x": a["scales_x"].bfloat16()},
    "dtype of scales_w": lambda a: {"scales_w": a["scales_w"].half()},
    "dtype of the offsets": lambda a: {"expert_offsets": a["expert_offsets"].long()},
    "dtype of the input": lambda a: {"input": a["input"].float(), "scales_x": None},
    "axis of scales_x": lambda a: {"scales_x": a["scales_x"][:, None]},
    "axis of scales_w": lambda a: {"scales_w": a["scales_w"][..., None]},
    "no scales_x": lambda a: {"scales_x": None},
    "no scales_w": lambda a: {"scales_w": None},
    "bias": lambda a: {"bias": BIAS},
    "dtype of the bias": lambda a: {"bias": BIAS.half()},
    "out_dtype": lambda a: {"out_dtype": torch.float32},
    "output": lambda a: {"output": torch.empty(12, 48, dtype=torch.bfloat16)},
    "dtype of the output": lambda a: {"output": torch.empty(12, 48)},
    "stride of the output": lambda a: {"output": torch.empty(12, 64, dtype=torch.bfloat16)[:, :48]},
    "clip": lambda a: {"input": a["input"].float(), "scales_x": None, "clip": 3.0},
    "another clip": lambda a: {"input": a["input"].float(), "scales_x": None, "clip": 4.0},
    "fast_accum": lambda a: {"fast_accum": True},
    "impl": lambda a: {"impl": "reference"},
}  # fmt: skip


def test_whatever_decides_tells_calls_of_gmm_apart(kinds: list[Any]):
    for change in (lambda a: {}, *GMM_CHANGES.values()):
        arguments = gmm_arguments()
        for _ in range(2):
            lowgmm.gmm(**arguments | change(arguments))
    assert kinds[::2] == kinds[1::2], "and nothing else does"
    assert len(set(kinds)) == 1 + len(GMM_CHANGES)


def test_a_configuration_tells_calls_of_gmm_apart(kinds: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "_gmm_into", lambda *a: None)
    a = gmm_arguments()
    for config in (None, "16x64x128-swap-queue2-4w3s", "16x64x128-swap-queue2-4w4s"):
        lowgmm.gmm(**a, config=config)
    assert len(set(kinds)) == 3


def layer_arguments() -> dict[str, Any]:
    w13, w2 = (lowgmm.quantize(torch.randn(4, *shape), "int8") for shape in ((48, 32), (32, 24)))
    ids, weights = torch.randint(0, 4, (3, 2)), torch.rand(3, 2)
    return {"hidden": torch.randn(3, 32), "w13": w13, "w2": w2, "topk_ids": ids, "topk_weights": weights}


LAYER_CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "tokens": lambda a: {name: a[name][:2] for name in ("hidden", "topk_ids", "topk_weights")},
    "experts per token": lambda a: {name: a[name][:, :1].contiguous() for name in ("topk_ids", "topk_weights")},
    "stride of hidden": lambda a: {"hidden": strided(a["hidden"])},
    "dtype of hidden": lambda a: {"hidden": a["hidden"].bfloat16()},
    "dtype of the ids": lambda a: {"topk_ids": a["topk_ids"].int()},
    "stride of the ids": lambda a: {"topk_ids": strided(a["topk_ids"])},
    "dtype of the weights": lambda a: {"topk_weights": a["topk_weights"].half()},
    "bias_w13": lambda a: {"bias_w13": torch.zeros(4, 48)},
    "bias_w2": lambda a: {"bias_w2": torch.zeros(4, 32)},
    "activation": lambda a: {"activation": "gelu"},
    "gate_up": lambda a: {"gate_up": "interleaved"},
    "alpha": lambda a: {"activation": "swiglu_oai", "alpha": 1.5},
    "another alpha": lambda a: {"activation": "swiglu_oai", "alpha": 1.6},
    "limit": lambda a: {"limit": 2.0},
    "weight_on_input": lambda a: {"weight_on_input": True},
    "requantize": lambda a: {"requantize": "group128"},
    "scales_h": lambda a: {"requantize": "static", "scales_h": torch.ones(4)},
    "clip": lambda a: {"clip": 2.0},
    "impl": lambda a: {"impl": "reference", "w13": plain(a["w13"]), "w2": plain(a["w2"])},
}


def plain(w: lowgmm.QuantTensor) -> lowgmm.QuantTensor:
    return lowgmm.QuantTensor(w.plain(), w.scales, w.format)


def test_whatever_decides_tells_calls_of_moe_ffn_apart(kinds: list[Any]):
    for change in (lambda a: {}, *LAYER_CHANGES.values()):
        arguments = layer_arguments()
        for _ in range(2):
            lowgmm.moe_ffn(**arguments | change(arguments))
    layers = [kind for kind in kinds if kind[0].__name__ == "_moe_ffn_new"]
    assert layers[::2] == layers[1::2]
    assert len(set(layers)) == 1 + len(LAYER_CHANGES)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def test_overlap_is_seen_before_a_replay(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    a = gmm_arguments()
    output = torch.empty(12, 48, dtype=torch.bfloat16)
    lowgmm.gmm(**a, output=output)
    monkeypatch.setattr(replay, "run", lambda *a: pytest.fail("was let through"))
    over = a["weights"].view(-1)[: 12 * 96].view(torch.bfloat16).view(12, 48)
    with pytest.raises(lowgmm.shapes.ShapeError, match="overlaps 'weights'"):
        lowgmm.gmm(**a, output=over)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_hooks_are_honoured():
    from triton import knobs

    assert not relaunch.hooked()
    seen: list[Any] = []
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(seen.append)
        try:
            assert relaunch.hooked()
        finally:
            hook.remove(seen.append)
    assert not relaunch.hooked()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0"])
def test_no_launcher_is_guessed(monkeypatch: pytest.MonkeyPatch, version: str):
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    run = object.__new__(CudaLauncher)
    run.__dict__.update(global_scratch_size=0, profile_scratch_size=0, launch=print, launch_cooperative_grid=False)
    run.__dict__.update(launch_pdl=True)
    compiled = SimpleNamespace(run=run, function=1, packed_metadata=(4, 1, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert relaunch.start_of(compiled) is not None
    monkeypatch.setattr(triton, "__version__", version)
    assert relaunch.start_of(compiled) is None
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    run.global_scratch_size = 128
    assert relaunch.start_of(compiled) is None, "Triton takes memory at every launch"
    assert relaunch.start_of(SimpleNamespace(run=print)) is None
    assert relaunch.start_of(None) is None
