"""MoEExperts as a module: state, devices, dtypes, memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import lowgmm
from lowgmm.formats import QuantTensor
from lowgmm.shapes import ShapeError, UnsupportedError

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


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16])
def test_weights_changed_in_place_are_used(bias: torch.dtype) -> None:
    """As loaders do, which copy into the tensors of a module. A second call of a kind takes a shorter way."""
    biases = {"bias_w13": torch.randn(4, 32).to(bias), "bias_w2": torch.randn(4, 16)}
    layer = lowgmm.MoEExperts.from_dense(torch.randn(4, 32, 16), torch.randn(4, 16, 16), "int8", **biases)
    call = (torch.randn(3, 16), torch.tensor([[0, 1], [2, 3], [1, 1]]), torch.full((3, 2), 0.5))
    before = [layer(*call) for _ in range(2)]
    assert torch.equal(*before)
    layer.bias_w13.zero_()
    layer.w2.scales.mul_(2)
    fresh = lowgmm.MoEExperts(layer.w13, layer.w2, bias_w13=layer.bias_w13, bias_w2=layer.bias_w2)
    assert torch.equal(layer(*call), fresh(*call))
    assert not torch.equal(layer(*call), before[0])


@pytest.mark.parametrize("format", ["int8", None])
@pytest.mark.parametrize(
    ("w13", "w2", "message"),
    [
        ((E, 2 * I, H), (E, H, I + 1), rf"w2: expected \[E, H, I\], got \[{E}, {H}, {I + 1}\]"),
        ((E, 2 * I, H), (E + 1, H, I), f"'w2' has {E + 1} where E={E} is expected"),
        ((E, H, 2 * I), (E, H, I), f"'w2' has {H} where H={2 * I} is expected"),
        ((E, 2 * I - 1, H), (E, H, I), "where 2I is expected"),
    ],
)
def test_weights_that_do_not_belong_together_are_refused_when_the_layer_is_built(
    w13: tuple[int, ...], w2: tuple[int, ...], message: str, format: str | None
) -> None:
    with pytest.raises(ShapeError, match=message):
        lowgmm.MoEExperts.from_dense(torch.ones(w13), torch.ones(w2), format)
    assert run(layer(format)).isfinite().all()


def test_options_that_no_call_could_have_are_refused_when_the_layer_is_built() -> None:
    with pytest.raises(UnsupportedError, match="activation 'swiglu' is not one of silu"):
        lowgmm.MoEExperts.from_dense(torch.randn(2, 32, 16), torch.randn(2, 16, 16), "int8", "swiglu")


@pytest.mark.parametrize("quantised", [False, True])
def test_gradients_are_refused_and_not_lost(quantised: bool) -> None:
    w13, w2, x = torch.randn(2, 32, 16), torch.randn(2, 16, 16), torch.randn(3, 16, requires_grad=True)
    layer = lowgmm.MoEExperts.from_dense(w13, w2, "int8" if quantised else None)
    results = [layer(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)) for _ in range(3)]
    results.append(lowgmm.gmm(x, w2, expert_sizes=torch.tensor([1, 2])))
    results += [lowgmm.quantize_tokens(x, "int8")[1], lowgmm.route(logits=x, top_k=2).topk_weights]
    for y in results:
        with pytest.raises(UnsupportedError, match="lowgmm computes no gradients"):
            y.sum().backward()


def test_gradients_that_would_not_reach_a_given_output_are_refused() -> None:
    x, w, out, sizes = torch.randn(3, 16), torch.randn(2, 16, 16), torch.empty(3, 16), torch.tensor([1, 2])
    for change in ({"input": x.requires_grad_()}, {"output": out.clone().requires_grad_()}):
        call = {"input": x.detach(), "weights": w, "expert_sizes": sizes, "output": out} | change
        with pytest.raises(UnsupportedError, match="would not pass through 'output'"):
            lowgmm.gmm(**call)
        with torch.no_grad():
            lowgmm.gmm(**call)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "make_dual", "grad"])
def test_derivatives_are_refused_and_not_zero(transform: str) -> None:
    w13, w2, x, sizes = torch.randn(2, 32, 16), torch.randn(2, 16, 16), torch.randn(3, 16), torch.tensor([1, 2])
    layer = lowgmm.MoEExperts.from_dense(w13, w2, "int8")

    def differentiate(f: Callable[[torch.Tensor], torch.Tensor]) -> object:
        if transform == "make_dual":
            with forward_ad.dual_level():
                return f(forward_ad.make_dual(x, torch.ones_like(x)))
        if transform == "jvp":
            return torch.func.jvp(f, (x,), (torch.ones_like(x),))
        return torch.func.jacfwd(f)(x) if transform == "jacfwd" else torch.func.grad(lambda x: f(x).sum())(x)

    calls = (
        lambda x: lowgmm.gmm(x, w2, expert_sizes=sizes),
        lambda x: layer(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)),
        lambda x: lowgmm.quantize_tokens(x, "int8")[1],
        lambda x: lowgmm.route(logits=x, top_k=2).topk_weights,
    )
    for call in calls:
        expected = call(x), call(x)
        with pytest.raises(UnsupportedError, match=r"(gmm|moe_ffn|quantize_tokens|route): .* lowgmm computes n"):
            differentiate(call)
        with forward_ad.dual_level():
            assert torch.equal(call(x), expected[1])


def test_what_users_add_to_a_layer_is_saved_and_loaded() -> None:
    def make(value: float) -> lowgmm.MoEExperts:
        made = layer("int8")
        made.register_buffer("seen", torch.full((2,), value))
        made.gate = torch.nn.Linear(3, 3)
        return made

    one, other = make(1.0), make(2.0)
    other.load_state_dict(one.state_dict())
    assert other.seen.tolist() == [1.0, 1.0]
    assert torch.equal(other.gate.weight, one.gate.weight)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"w13\.zeros"'):
        other.load_state_dict(one.state_dict() | {"w13.zeros": torch.ones(1)})


def test_weights_moved_in_place_are_found() -> None:
    """As pickling for another process does: it moves tensors to shared memory and frees where they were."""
    layer = lowgmm.MoEExperts.from_dense(
        torch.randn(4, 64, 128), torch.randn(4, 128, 32), "int8", bias_w2=torch.randn(4, 128)
    )
    call = (torch.randn(3, 128), torch.tensor([[0, 1], [2, 3], [1, 1]]), torch.full((3, 2), 0.5))
    before = [layer(*call) for _ in range(3)][-1]
    layer.w13.scales.share_memory_()
    junk = [torch.full((4, 64), 1e9) for _ in range(8)]
    assert torch.equal(layer(*call), before)
    assert torch.equal(layer(*call), before)
    layer.bias_w2.data = torch.zeros(4, 128)
    fresh = lowgmm.MoEExperts(layer.w13, layer.w2, bias_w2=layer.bias_w2)
    for _ in range(2):
        assert torch.equal(layer(*call), fresh(*call))
    del junk


def test_state_dicts_of_every_cpu_format_are_ones_that_safetensors_takes(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for format in ("int8", "fp8", "int4", "int4_g32", None):
        made = lowgmm.MoEExperts.from_dense(torch.randn(2, 64, 64), torch.randn(2, 64, 32), format)
        save_file(made.state_dict(), tmp_path / "layer.safetensors")
        other = lowgmm.MoEExperts.from_dense(torch.randn(2, 64, 64), torch.randn(2, 64, 32), format)
        other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
        call = (torch.randn(3, 64), torch.tensor([[0], [1], [1]]), torch.ones(3, 1))
        assert torch.equal(made(*call), other(*call)), format


@pytest.mark.parametrize("format", ["int8", "fp8", "int4_g32", None])
def test_a_layer_made_without_memory_gets_its_weights_later(format: str | None) -> None:
    made = lowgmm.MoEExperts.from_dense(torch.randn(2, 64, 64), torch.randn(2, 64, 32), format)
    call = (torch.randn(3, 64), torch.tensor([[0], [1], [1]]), torch.ones(3, 1))
    with torch.device("meta"):
        w13, w2 = torch.empty(2, 64, 64), torch.empty(2, 64, 32)
    for assign in (False, True):
        layer = lowgmm.MoEExperts.from_dense(w13, w2, format)
        assert layer(*(t.to("meta") for t in call)).shape == (3, 64)
        if not assign:
            layer = layer.to_empty(device="cpu")
        layer.load_state_dict(made.state_dict(), assign=assign)
        assert torch.equal(layer(*call), made(*call))
