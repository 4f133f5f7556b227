"""The expert layer against the float64 layer: formats, dtypes, activations, and the routings that break layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import reference
from lowgmm.formats import QuantTensor
from test_cases_support import BACKENDS, CPU, KERNELS, Backend, check_layer, compose_layer, dense, kernels_only

T, H, I = 9, 48, 40
Weights = Tensor | QuantTensor
Arguments = tuple[Tensor, Weights, Weights, Tensor, Tensor]


def make(
    format: str | None,
    dtype: torch.dtype = torch.float32,
    ids: Tensor | None = None,
    E: int = 4,
    device: str = "cpu",
    shape: tuple[int, int, int] = (T, H, I),
) -> Arguments:
    """A layer's arguments; experts and tokens differ in size, so that a mix-up shows."""
    tokens, hidden_size, inner = shape
    g = torch.Generator().manual_seed(tokens + E)
    hidden = (torch.randn(tokens, hidden_size, generator=g) * (torch.rand(tokens, 1, generator=g) + 0.5)).to(dtype)
    size = torch.rand(E, 1, 1, generator=g) + 0.5
    w13 = (torch.randn(E, 2 * inner, hidden_size, generator=g) * size * hidden_size**-0.5).to(dtype)
    w2 = (torch.randn(E, hidden_size, inner, generator=g) * size * inner**-0.5).to(dtype)
    if ids is None:
        ids = (
            torch.stack([torch.randperm(E, generator=g)[:2] for _ in range(tokens)])
            if E > 1
            else torch.zeros(tokens, 2).long()
        )
    weights = torch.rand(ids.shape, generator=g)
    if format is None:
        return hidden.to(device), w13.to(device), w2.to(device), ids.to(device), weights.to(device)
    q13, q2 = (lowgmm.quantize(w, format).to(device) for w in (w13, w2))
    return hidden.to(device), q13, q2, ids.to(device), weights.to(device)


def run(backend: Backend, args: Arguments, activation: str = "silu") -> None:
    check_layer(lowgmm.moe_ffn(*args, activation=activation, impl=backend.impl), *args, activation)


# ---- formats, dtypes, activations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["int8", "fp8", None])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layer(backend: Backend, format: str | None, dtype: torch.dtype) -> None:
    run(backend, make(format, dtype, device=backend.device))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("format", ["int8", None])
def test_activations(format: str | None, activation: str) -> None:
    args = make(format)
    run(CPU, args, activation)
    # The check tells them apart.
    other = {"silu": "gelu", "gelu": "silu"}[activation]
    with pytest.raises(AssertionError, match="budget"):
        check_layer(lowgmm.moe_ffn(*args, activation=activation), *args, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_module(format: str | None, dtype: torch.dtype) -> None:
    """from_dense quantises what ``quantize`` does; on a CPU its INT8 weights are packed."""
    hidden, w13, w2, ids, weights = make(None, dtype)
    assert isinstance(w13, Tensor)
    assert isinstance(w2, Tensor)
    module = lowgmm.MoEExperts.from_dense(w13, w2, format)
    y = module(hidden, ids, weights)
    layer = (w13, w2) if format is None else (lowgmm.quantize(w13, format), lowgmm.quantize(w2, format))
    check_layer(y, hidden, *layer, ids, weights)


# ---- routings --------------------------------------------------------------------------------------------------------

ROUTINGS: dict[str, tuple[int, Callable[[], Tensor]]] = {
    "top-1": (4, lambda: torch.arange(T).remainder(4).view(T, 1)),
    "A=E": (3, lambda: torch.stack([torch.arange(3).roll(t) for t in range(T)])),
    "all tokens on one expert": (4, lambda: torch.full((T, 1), 2)),
    "all slots on one expert": (4, lambda: torch.full((T, 3), 3)),
    "one expert": (1, lambda: torch.zeros(T, 1).long()),
    "first and last expert": (8, lambda: torch.tensor([[0, 7]] * T)),
    "int32 ids": (4, lambda: torch.tensor([[3, 1]] * T, dtype=torch.int32)),
    "some ids elsewhere": (4, lambda: torch.tensor([[0, -1], [4, 2], [-1, 9]] * (T // 3))),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("format", ["int8", None])
def test_routings(format: str | None, name: str) -> None:
    experts, ids = ROUTINGS[name]
    args = make(format, ids=ids(), E=experts)
    run(CPU, args)
    hidden, w13, w2, _, weights = args
    if format == "int8":
        assert isinstance(w13, QuantTensor)
        assert isinstance(w2, QuantTensor)
        check_layer(lowgmm.MoEExperts(w13, w2)(hidden, ids(), weights), *args)


@kernels_only
@pytest.mark.parametrize("name", ["top-1", "A=E", "all slots on one expert", "one expert", "some ids elsewhere"])
def test_routings_in_kernels(name: str) -> None:
    experts, ids = ROUTINGS[name]
    run(KERNELS, make("int8", ids=ids(), E=experts, device=KERNELS.device))


@pytest.mark.parametrize("format", ["int8", "fp8", None])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: Backend, format: str | None) -> None:
    args = make(format, torch.bfloat16, torch.zeros(0, 2).long(), device=backend.device, shape=(0, H, I))
    y = lowgmm.moe_ffn(*args, impl=backend.impl)
    assert (y.shape, y.dtype, y.device.type) == ((0, H), torch.bfloat16, torch.device(backend.device).type)


def test_one_token_one_expert_one_of_everything() -> None:
    run(CPU, make("int8", ids=torch.tensor([[0]]), E=1, shape=(1, 8, 8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_routing_weights_of_any_dtype(dtype: torch.dtype) -> None:
    hidden, w13, w2, ids, weights = make("int8")
    run(CPU, (hidden, w13, w2, ids, weights.to(dtype)))


def test_a_token_does_not_depend_on_its_batch() -> None:
    """With per-token scales the result of a token is the same bits in any company."""
    hidden, w13, w2, ids, weights = make("int8")
    together = lowgmm.moe_ffn(hidden, w13, w2, ids, weights)
    for t in (0, 4, T - 1):
        one = slice(t, t + 1)
        assert torch.equal(lowgmm.moe_ffn(hidden[one], w13, w2, ids[one], weights[one]), together[one])


def test_clip_reaches_the_tokens() -> None:
    """An outlier element costs its token most of its accuracy; a clip threshold at its true size buys it back."""
    hidden, w13, w2, ids, weights = make("int8")
    blind = dense(w13)
    blind[:, :, 5] = 0  # nobody reads the outlier, so that it does harm through the scale only
    layer = (lowgmm.quantize(blind, "int8"), w2, ids, weights)
    exact = reference.moe_ffn(hidden, dense(layer[0]), dense(w2), ids, weights)[3]
    spoiled = hidden.clone()
    spoiled[3, 5] = 300.0
    plain, clipped = (lowgmm.moe_ffn(spoiled, *layer, clip=clip)[3].double() for clip in (None, 4.0))
    assert (clipped - exact).norm() < (plain - exact).norm() / 5


# ---- the check itself ------------------------------------------------------------------------------------------------


def swap_gate_and_up(w: Weights) -> Weights:
    order = torch.cat([torch.arange(I, 2 * I), torch.arange(I)])
    if isinstance(w, QuantTensor):
        return QuantTensor(w.plain().view(torch.uint8)[:, order].view(w.format.dtype), w.scales[:, order], w.format)
    return w[:, order]


MUTANTS: dict[str, Callable[[Arguments], Tensor]] = {
    "gate and up swapped": lambda a: lowgmm.moe_ffn(a[0], swap_gate_and_up(a[1]), *a[2:]),
    "routing weights swapped": lambda a: lowgmm.moe_ffn(*a[:4], a[4].flip(1)),
    "another expert": lambda a: lowgmm.moe_ffn(*a[:3], (a[3] + 1) % 4, a[4]),
    "a slot lost": lambda a: lowgmm.moe_ffn(*a[:4], a[4] * torch.tensor([1, 0])),
    "tokens in another order": lambda a: lowgmm.moe_ffn(*a).roll(1, 0),
    "2 % too large": lambda a: lowgmm.moe_ffn(*a) * 1.02,
    "one element": lambda a: lowgmm.moe_ffn(*a).index_fill(1, torch.tensor([7]), 0.0),
    "weights not scaled": lambda a: lowgmm.moe_ffn(a[0], a[1], dense(a[2]).to(a[0].dtype) * 1.01, *a[3:]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_the_check_rejects(format: str | None, mutant: str) -> None:
    args = make(format)
    check_layer(lowgmm.moe_ffn(*args), *args)
    with pytest.raises(AssertionError, match="budget"):
        check_layer(MUTANTS[mutant](args), *args)


def test_the_oracle_of_the_check_is_the_reference() -> None:
    """Without quantisation the composition in float64 is the float64 reference; they share no loop."""
    hidden, w13, w2, ids, weights = make(None)
    composed = compose_layer(hidden, w13, w2, ids, weights, "silu", torch.float64, torch.float64)
    exact = reference.moe_ffn(hidden, dense(w13), dense(w2), ids, weights)
    assert (composed - exact).abs().max() <= 64 * torch.finfo(torch.float64).eps * exact.abs().max()
