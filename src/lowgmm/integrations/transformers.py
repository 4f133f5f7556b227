"""Run the experts of a Hugging Face model through lowgmm, by name:

    from lowgmm.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="lowgmm_int8")

| name          | experts' weights                      | activations                  |
|---------------|---------------------------------------|------------------------------|
| `lowgmm`      | as the checkpoint has them            | as the model has them        |
| `lowgmm_int8` | INT8, one scale per output channel    | INT8, one scale per token    |
| `lowgmm_fp8`  | FP8 e4m3, one scale per output channel | FP8 e4m3, one scale per token |
| `lowgmm_int4` | INT4, one scale per output channel    | INT8, one scale per token    |
| `lowgmm_int4_g32` | INT4, one scale per 32 of K       | INT8, one scale per token    |

``check_model(model)`` says whether all of a model's experts are ones that lowgmm runs: transformers ignores the name
where a model's experts do not go through its experts interface (Llama-4's do not).

Nothing else of the model changes. Weights are quantised at the first forward pass and kept until the module goes away
or its weights change (writes through ``.data`` cannot be noticed); the model's own tensors stay as they are, so memory
grows by the copy. For inference: gradients do not pass through, and a model in training mode is refused.
Needs transformers >= 5.17.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from lowgmm import MoEExperts, moe_ffn
from lowgmm.shapes import UnsupportedError

FORMATS: dict[str, str | None] = {"lowgmm": None} | {f"lowgmm_{f}": f for f in ("int8", "fp8", "int4", "int4_g32")}
"""Registered name -> quantisation format (None: the weights as they are)."""


class UnsupportedExpertsError(UnsupportedError):
    """An experts module whose layout or arithmetic lowgmm's layer does not compute."""


class MissingDependencyError(ImportError):
    """An optional dependency is not installed; the message says how to install it."""


@dataclass(frozen=True)
class _Quantised:
    """A quantised copy, and what tells whether the weights it was made from are still the module's weights."""

    w13: ReferenceType[Tensor]
    w2: ReferenceType[Tensor]
    fingerprints: tuple[object, object]
    act_fn: object
    experts: MoEExperts

    def is_of(self, w13: Tensor, w2: Tensor, act_fn: object) -> bool:
        # Identity as well as address: a freed tensor's address may be the next one's.
        same = self.w13() is w13 and self.w2() is w2 and self.act_fn is act_fn
        return same and self.fingerprints == (_fingerprint(w13), _fingerprint(w2))


# Keyed weakly by the model's own experts module: a model that is dropped takes its quantised copy with it.
_quantised: WeakKeyDictionary[nn.Module, dict[str, _Quantised]] = WeakKeyDictionary()


def register() -> tuple[str, ...]:
    """Register lowgmm's names in transformers' experts interface and return them; calling it again changes nothing.

    Raises:
        MissingDependencyError: transformers is not installed or too old to have the interface.

    >>> register()  # doctest: +SKIP
    ('lowgmm', 'lowgmm_int8', 'lowgmm_fp8', 'lowgmm_int4', 'lowgmm_int4_g32')
    """
    interface = _interface()
    for name, function in _FUNCTIONS.items():
        if interface.get(name) is not function:
            interface.register(name, function)
    return tuple(_FUNCTIONS)


def _interface() -> Any:
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise MissingDependencyError(
            "lowgmm.integrations.transformers needs transformers >= 5.17, which has the experts interface; "
            'install it with: pip install "transformers>=5.17"'
        ) from error
    return ALL_EXPERTS_FUNCTIONS


def dispatched(model: nn.Module) -> list[nn.Module]:
    """The experts modules of a model that transformers runs by the name of an experts implementation."""
    # What its decorator leaves in every instance. The others run their own code, whatever the name.
    return [m for m in model.modules() if "is_concatenated" in vars(m) and hasattr(m, "config")]


def check_model(model: nn.Module) -> int:
    """How many expert layers of a transformers model lowgmm runs once one of its names is set; at least one.

    Raises:
        UnsupportedExpertsError: the model has no experts that transformers dispatches by name, or some that lowgmm does
            not compute.
    """
    modules = dispatched(model)
    if not modules:
        raise UnsupportedExpertsError(
            f"lowgmm: {type(model).__name__} has no experts that go through transformers' experts interface, so an "
            "experts implementation changes nothing in it. Build lowgmm.MoEExperts from its weights instead."
        )
    for module in modules:
        check_supported(module)
    return len(modules)


def check_supported(module: nn.Module) -> str:
    """The activation of an experts module that lowgmm can compute.

    Raises:
        UnsupportedExpertsError: anything of the layer differs from ``(act_fn(x @ gate.T) * (x @ up.T)) @ down.T``; the
            message names the attribute, what was expected and what came.
    """
    # Attributes differ between versions and models, so every one has the interface's default.
    expected = {
        "has_gate": (True, "experts without a gate projection"),
        "has_bias": (False, "biases of the experts' projections"),
        "is_transposed": (False, "weights stored [E, K, N]"),
        "is_concatenated": (True, "interleaved gate and up rows"),
        "has_post_expert_norm": (False, "a norm behind each expert"),
        "_is_expert_parallel": (False, "expert parallelism inside transformers"),
    }
    for name, (supported, meaning) in expected.items():
        got = getattr(module, name, supported)
        if bool(got) is not supported:
            raise _unsupported(module, f"{name} is {got!r}, expected {supported!r} ({meaning})")
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__name__ != "_default_apply_gate":  # what the interface gives a class without its own
        raise _unsupported(module, "_apply_gate is the model's own, expected the default act_fn(gate) * up")
    act_fn = getattr(module, "act_fn", None)
    activation = _activation(act_fn)
    if activation is None:
        raise _unsupported(module, f"act_fn is {type(act_fn).__name__}, expected SiLU or exact GELU")
    return activation


def _unsupported(module: nn.Module, what: str) -> UnsupportedExpertsError:
    return UnsupportedExpertsError(
        f"lowgmm: {type(module).__name__}.{what}. This is not supported; select another experts implementation "
        f'for this model, for example model.set_experts_implementation("grouped_mm").'
    )


def _weights(module: nn.Module) -> tuple[Tensor, Tensor]:
    w13, w2 = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(w13, Tensor) and isinstance(w2, Tensor)):
        check_supported(module)
        raise _unsupported(module, "gate_up_proj or down_proj is missing, expected both as tensors")
    return w13, w2


def _activation(act_fn: object) -> str | None:
    kind = type(act_fn).__name__
    if isinstance(act_fn, nn.SiLU) or kind == "SiLUActivation" or act_fn is nn.functional.silu:
        return "silu"
    if isinstance(act_fn, nn.GELU) and act_fn.approximate == "none":
        return "gelu"
    # transformers' own class; use_gelu_python selects another way to compute the same exact function
    return "gelu" if kind == "GELUActivation" else None


def _forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, format: str | None
) -> Tensor:
    """The experts function: hidden [T, H], ids and weights [T, A] -> [T, H] in the dtype of ``hidden_states``."""
    if module.training and torch.is_grad_enabled():
        raise _unsupported(
            module, "training is True and gradients are on, expected model.eval(): lowgmm has no gradient"
        )
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _compute(module, hidden_states, top_k_index, top_k_weights, format)
    return _compute(module, hidden_states, top_k_index, top_k_weights, format)


def _compute(module: nn.Module, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, format: str | None) -> Tensor:
    if format is None:
        w13, w2 = _weights(module)
        return moe_ffn(hidden, w13, w2, topk_ids, topk_weights, activation=check_supported(module))
    # Caching by identity is for Python, not for a graph; what keeps it out of one takes µs of a call that needs none.
    find = _untraced_experts if torch.compiler.is_compiling() else quantised_experts
    out = find(module, format)(hidden, topk_ids, topk_weights)
    assert isinstance(out, Tensor)
    return out


def quantised_experts(module: nn.Module, format: str) -> MoEExperts:
    """The quantised copy of an experts module, made at the first call and again whenever its weights have changed."""
    w13, w2 = _weights(module)
    act_fn = getattr(module, "act_fn", None)
    copies = _quantised.get(module)
    found = None if copies is None else copies.get(format)
    if found is not None and found.is_of(w13, w2, act_fn):
        return found.experts
    activation = check_supported(module)
    copies = _quantised.setdefault(module, {})
    copies.pop(format, None)  # freed before the new copy is made, so that the two never live side by side
    found = None
    experts = MoEExperts.from_dense(w13.detach(), w2.detach(), format, activation=activation)
    copies[format] = _Quantised(ref(w13), ref(w2), (_fingerprint(w13), _fingerprint(w2)), act_fn, experts)
    return experts


_untraced_experts = torch.compiler.disable(quantised_experts)


def _fingerprint(w: Tensor) -> tuple[object, ...]:
    # Tensors made under inference_mode have no version counter: in-place writes to those go unnoticed.
    return w.data_ptr(), None if w.is_inference() else w._version, w.device, w.dtype, w.shape


def _named(name: str, format: str | None) -> Callable[..., Tensor]:
    def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _forward(module, hidden_states, top_k_index, top_k_weights, format=format)

    experts_forward.__name__ = experts_forward.__qualname__ = f"{name}_experts_forward"
    return experts_forward


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {name: _named(name, format) for name, format in FORMATS.items()}
