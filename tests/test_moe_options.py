"""What a layer can be told: activations, layouts of gate and up, biases, where the weights apply, requantisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm.formats import QuantTensor
from lowgmm.shapes import DtypeError, ShapeError, UnsupportedError
from test_cases_support import BACKENDS, CPU, Backend, check_layer
from test_moe import make

E, H, I = 4, 48, 136
OPTIONS: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu"},
    "relu2": {"activation": "relu2"},
    "bilinear": {"activation": "none"},
    "clamped silu": {"limit": 0.6},
    "interleaved": {"gate_up": "interleaved"},
    "interleaved with biases": {"gate_up": "interleaved", "bias": True},
    "gpt-oss": {"activation": "swiglu_oai", "gate_up": "interleaved", "bias": True, "limit": 0.7},
    "swiglu_oai, its own limit and alpha": {"activation": "swiglu_oai", "limit": 0.5, "alpha": 1.2},
    "biases": {"bias": True},
    "no gate, squared ReLU": {"activation": "relu2", "gate_up": "none", "bias": True},
    "no gate, GELU": {"activation": "gelu", "gate_up": "none"},
    "llama-4": {"weight_on_input": True},
    "weights on the input and biases": {"weight_on_input": True, "bias": True},
    "group128": {"requantize": "group128"},
    "group128 and biases": {"requantize": "group128", "bias": True},
    "static": {"requantize": "static"},
}


def arguments(format: str | None, name: str, device: str, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = dict(OPTIONS[name])
    ids = torch.tensor([[0, 3], [1, -1], [2, 2], [3, 0], [-1, 9], [3, 1]])
    args = make(None, dtype, ids, E, shape=(len(ids), H, I))
    hidden, w13, w2, _, weights = args
    assert isinstance(w13, Tensor)
    assert isinstance(w2, Tensor)
    if options.get("gate_up") == "none":
        w13 = w13[:, :I]
    g = torch.Generator().manual_seed(1)
    if options.pop("bias", False):
        options["bias_w13"] = torch.randn(w13.shape[:2], generator=g).to(dtype).to(device)
        options["bias_w2"] = torch.randn(w2.shape[:2], generator=g).to(dtype).to(device)
    if options.get("requantize") == "static":
        options["scales_h"] = ((torch.rand(E, generator=g) + 0.5) * (0.01 if format == "int8" else 0.003)).to(device)
    pair = (w13, w2) if format is None else (lowgmm.quantize(w13, format), lowgmm.quantize(w2, format))
    return (hidden.to(device), *(w.to(device) for w in pair), ids.to(device), weights.to(device)), options


CASES = [
    pytest.param(format, name, id=f"{format}-{name}")
    for name in OPTIONS
    for format in ("int8", "fp8", None)
    if format is not None or "requantize" not in OPTIONS[name]
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("format", "name"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_options(backend: Backend, format: str | None, name: str, dtype: torch.dtype) -> None:
    args, options = arguments(format, name, backend.device, dtype)
    check_layer(lowgmm.moe_ffn(*args, **options, impl=backend.impl), *args, **options)


@pytest.mark.parametrize("name", ["gpt-oss", "group128", "static", "no gate, squared ReLU"])
def test_module_carries_the_options(name: str, packing: str) -> None:
    (hidden, w13, w2, ids, weights), options = arguments("int8", name, "cpu", torch.float32)
    layer = lowgmm.MoEExperts(w13, w2, options.pop("activation", "silu"), **options)
    y = layer(hidden, ids, weights)
    check_layer(y, hidden, w13, w2, ids, weights, layer.spec.activation, **options)
    fresh = lowgmm.MoEExperts(w13, w2, layer.spec.activation, **options)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(hidden, ids, weights), y)


def test_biases_survive_a_state_dict() -> None:
    (hidden, w13, w2, ids, weights), options = arguments("int8", "biases", "cpu", torch.float32)
    layer, other = (
        lowgmm.MoEExperts(w13, w2, **{name: b * factor for name, b in options.items()}) for factor in (1, 2)
    )
    assert not torch.equal(other(hidden, ids, weights), layer(hidden, ids, weights))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(hidden, ids, weights), layer(hidden, ids, weights))
    with pytest.raises(RuntimeError, match="bias_w2"):
        other.load_state_dict({name: t for name, t in layer.state_dict().items() if name != "bias_w2"})


@pytest.mark.parametrize("name", ["int8", "fp8", "bfloat16", "float32"])
def test_opcheck(name: str, device: torch.device) -> None:
    format = name if name in ("int8", "fp8") else None
    args = make(format, torch.float32 if name == "float32" else torch.bfloat16, device=device.type)
    hidden, w13, w2, ids, weights = args
    operands = [(w.operands, w.scales) if isinstance(w, QuantTensor) else ([w], None) for w in (w13, w2)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    call = (hidden, *operands[0], None, *operands[1], None, ids, weights, None)
    call += ("silu", "concatenated", None, None, False, "token", None, "auto", None)
    # opcheck's schema test scales its inputs, which torch does not define for float8 on a CPU.
    torch.library.opcheck(torch.ops.lowgmm.moe_ffn.default, call, test_utils=tests[1:] if name == "fp8" else tests)


@pytest.mark.parametrize("format", ["int8", None])
def test_compile_fullgraph_dynamic(format: str | None) -> None:
    """The whole layer is one operator to a graph, for any number of tokens."""
    torch._dynamo.reset()
    hidden, w13, w2, ids, weights = make(format)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def layer(x: Tensor, i: Tensor, w: Tensor) -> Tensor:
        return lowgmm.moe_ffn(x * 2, w13, w2, i, w)

    for tokens in (9, 3, 5):
        x, i, w = hidden[:tokens], ids[:tokens], weights[:tokens]
        assert torch.equal(layer(x, i, w), lowgmm.moe_ffn(x * 2, w13, w2, i, w))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "activation": ({"activation": "swish"}, UnsupportedError, "activation 'swish' is not one of silu"),
    "layout": ({"gate_up": "transposed"}, UnsupportedError, "gate_up 'transposed' is not one of"),
    "requantize": ({"requantize": "tensor"}, UnsupportedError, "requantize 'tensor' is not one of"),
    "no gate with 2I rows": ({"gate_up": "none", "activation": "relu2"}, ShapeError, "w2"),
    "swiglu without a gate": ({"gate_up": "none", "activation": "swiglu_oai"}, UnsupportedError, "need gate and up"),
    "alpha of silu": ({"alpha": 1.5}, UnsupportedError, "alpha belongs to swiglu_oai"),
    "limit": ({"limit": -1.0}, ShapeError, "positive"),
    "static without scales": ({"requantize": "static"}, ShapeError, "belong together"),
    "scales without static": ({"scales_h": torch.ones(4)}, ShapeError, "belong together"),
    "bias of another size": ({"bias_w13": torch.ones(4, 3)}, ShapeError, "bias_w13"),
    "bias of integers": ({"bias_w2": torch.ones(4, 48).int()}, DtypeError, "bias_w2"),
    "clip": ({"clip": 0.0}, ShapeError, "clip"),
    "config on a CPU": ({"config": "x"}, UnsupportedError, "leave it out"),
    "impl": ({"impl": "cuda"}, UnsupportedError, "impl 'cuda'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    options, error, message = BAD[name]
    args = make("int8")
    with pytest.raises(error, match=message):
        lowgmm.moe_ffn(*args, **options)
    lowgmm.moe_ffn(*args, impl=CPU.impl)


def test_requantisation_of_float_weights_is_refused() -> None:
    with pytest.raises(ShapeError, match="applies to a quantised w2"):
        lowgmm.moe_ffn(*make(None), requantize="group128")


@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("name", ["llama-4", "weights on the input and biases"])
def test_ids_and_weights_of_any_layout(format: str | None, name: str) -> None:
    args, options = arguments(format, name, "cpu", torch.float32)
    hidden, w13, w2, ids, weights = args
    expected = lowgmm.moe_ffn(*args, **options)
    across = ids.T.contiguous().T, weights.T.contiguous().T
    assert not across[0].is_contiguous()
    assert torch.equal(lowgmm.moe_ffn(hidden, w13, w2, *across, **options), expected)
