"""What an expert layer computes around its two matrix products: the one description that every backend reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LAYOUTS = ("concatenated", "interleaved", "none")
"""Rows of w13: all gate rows, then all up rows [E, 2I, H]; gate and up rows in turns [E, 2I, H]; no gate [E, I, H]."""

REQUANTIZE = ("token", "group128", "static")
"""Scales of the intermediate in front of quantised w2: one per row, one per row and 128 columns, one given per
expert."""

GROUP = 128
"""Columns that share a scale with ``requantize="group128"``."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda gate: gate * torch.sigmoid(gate),
    "gelu": torch.nn.functional.gelu,
    "relu2": lambda gate: torch.relu(gate).square(),
    "none": lambda gate: gate,
}
"""What is applied to the gate: SiLU, exact (erf) GELU, squared ReLU, nothing. ``swiglu_oai`` mixes gate and up, see
:func:`activate`."""


class Weights(NamedTuple):
    """One of a layer's two weights as it crosses the op boundary."""

    operands: list[Tensor]
    """[w [E, N, K]], or a QuantTensor's operands."""
    scales: Tensor | None
    """[E, N] float32; None for unquantised weights."""
    bias: Tensor | None
    """[E, N] float."""


@dataclass(frozen=True)
class LayerSpec:
    """The choices of a ``moe_ffn`` call that are not tensors; meanings as there."""

    activation: str = "silu"
    gate_up: str = "concatenated"
    alpha: float | None = None
    limit: float | None = None
    weight_on_input: bool = False
    requantize: str = "token"
    clip: float | None = None

    @property
    def gated(self) -> bool:
        return self.gate_up != "none"

    @property
    def slope(self) -> float:
        """alpha of swiglu_oai; GPT-OSS has 1.702."""
        return 1.702 if self.alpha is None else self.alpha

    @property
    def bound(self) -> float | None:
        """Where gate and up are clamped, if they are; GPT-OSS clamps at 7."""
        return 7.0 if self.limit is None and self.activation == "swiglu_oai" else self.limit


def activate(gate_up: Tensor, spec: LayerSpec) -> Tensor:
    """The intermediate h [..., I] of ``gate_up [..., 2I]`` (or [..., I] without a gate), in the dtype given.

    ``act(gate) · up``, or ``act(x)`` without a gate; with a limit, gate is clamped from above and up on both sides
    first. swiglu_oai is ``gate · sigmoid(alpha · gate) · (up + 1)``.

    >>> activate(torch.tensor([2.0, -1.0, 3.0, 5.0]), LayerSpec("relu2")).tolist()
    [12.0, 0.0]
    >>> activate(torch.tensor([2.0, 3.0, -1.0, 5.0]), LayerSpec("relu2", "interleaved")).tolist()
    [12.0, 0.0]
    """
    if not spec.gated:
        return ACTIVATIONS[spec.activation](gate_up)
    gate, up = gate_up.chunk(2, -1) if spec.gate_up == "concatenated" else (gate_up[..., ::2], gate_up[..., 1::2])
    if spec.bound is not None:
        gate, up = gate.clamp(max=spec.bound), up.clamp(-spec.bound, spec.bound)
    if spec.activation == "swiglu_oai":
        return gate * torch.sigmoid(spec.slope * gate) * (up + 1)
    return ACTIVATIONS[spec.activation](gate) * up
