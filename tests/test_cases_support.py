"""What these tests share: the backends, and an oracle and an error budget for whole expert layers. Holds no tests."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lowgmm import cpu, reference
from lowgmm.formats import FORMATS, QuantTensor
from lowgmm.quant import dequantize
from lowgmm.testing import assert_within_budget

HAS_CUDA = torch.cuda.is_available()
RUNS_KERNELS = HAS_CUDA or importlib.util.find_spec("triton") is not None


class Backend(NamedTuple):
    """Where a call runs: its tensors' device and the ``impl`` argument."""

    device: str
    impl: str
    packed: bool = False

    def place(self, w: QuantTensor) -> QuantTensor:
        """Weights as this backend is given them."""
        return cpu.pack(w) if self.packed and w.format.exact else w.to(self.device)


CPU = Backend("cpu", "auto")
PACKED = Backend("cpu", "auto", packed=True)  # as MoEExperts has them: one native call for a whole layer
KERNELS = Backend("cuda" if HAS_CUDA else "cpu", "triton")
kernels_only = pytest.mark.skipif(not RUNS_KERNELS, reason="kernels need a CUDA device or Triton's interpreter")
BACKENDS = [pytest.param(CPU, id="cpu"), pytest.param(KERNELS, id="kernels", marks=kernels_only)]
LAYERS = [*BACKENDS, pytest.param(PACKED, id="packed")]

SMALL = "16x32x64-swap-persistent1-4w2s"
"""A tile that the interpreter runs quickly."""
LAUNCHES = (SMALL, "16x32x64-grid-4w2s", "16x32x64-swap-queue1-4w2s", "16x32x64-expert-4w2s")

# Every way to run a gmm call: the CPU backend, and the kernels in each launch mode.
GMM_RUNS = [pytest.param(CPU, None, id="cpu")] + [
    pytest.param(KERNELS, config, id=config, marks=kernels_only) for config in LAUNCHES
]


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "relu2": lambda gate: gate.clamp(min=0) ** 2,
    "none": lambda gate: gate,
}


def gate(gate_up: Tensor, activation: str, options: dict[str, Any]) -> Tensor:
    """h of ``gate_up``; written apart from the library's, on purpose."""
    layout, limit = options.get("gate_up", "concatenated"), options.get("limit")
    if layout == "none":
        return ACTIVATIONS[activation](gate_up)
    inner = gate_up.shape[-1] // 2
    g, u = gate_up.split(inner, -1) if layout == "concatenated" else gate_up.unflatten(-1, (inner, 2)).unbind(-1)
    if activation == "swiglu_oai":
        limit, alpha = limit or 7.0, options.get("alpha") or 1.702
        g, u = g.minimum(torch.full_like(g, limit)), u.clamp(-limit, limit)
        return g / (1 + torch.exp(-alpha * g)) * (1 + u)
    if limit is not None:
        g, u = g.minimum(torch.full_like(g, limit)), u.clamp(-limit, limit)
    return ACTIVATIONS[activation](g) * u


def dense(w: Tensor | QuantTensor) -> Tensor:
    """The values that ``w`` stands for, in float32."""
    return dequantize(w) if isinstance(w, QuantTensor) else w.float()


def _rounded(x: Tensor, w: Tensor | QuantTensor) -> Tensor:
    """``x [rows, K]`` as the format of ``w`` holds it, one scale per row; not the library's quantiser, on purpose."""
    if not isinstance(w, QuantTensor):
        return x
    qmax = FORMATS[w.format.name].qmax
    scale = x.abs().amax(1, keepdim=True) / qmax
    q = torch.where(scale > 0, x / scale, 0).clamp(-qmax, qmax)
    q = q.round() if w.format.name == "int8" else q.float().to(w.format.dtype).to(x.dtype)
    return q * scale


def _requantised(h: Tensor, w2: Tensor | QuantTensor, expert: int, options: dict[str, Any]) -> Tensor:
    how = options.get("requantize", "token")
    if how == "group128":
        return torch.cat([_rounded(part, w2) for part in h.split(128, 1)], 1)
    if how == "static":
        assert isinstance(w2, QuantTensor)
        qmax, scale = FORMATS[w2.format.name].qmax, options["scales_h"][expert].to(h.dtype)
        q = (h / scale).clamp(-qmax, qmax)
        return (q.round() if w2.format.name == "int8" else q.float().to(w2.format.dtype).to(h.dtype)) * scale
    return _rounded(h, w2)


def compose_layer(
    hidden: Tensor,
    w13: Tensor | QuantTensor,
    w2: Tensor | QuantTensor,
    ids: Tensor,
    weights: Tensor,
    activation: str,
    compute: torch.dtype,
    between: torch.dtype,
    **options: Any,
) -> Tensor:
    """The expert layer as a loop over experts, multiplying in ``compute`` what the operands stand for.

    ``between`` is the dtype that h is rounded to, and in float32 the experts' outputs. Nothing here calls the library's
    layer code.
    """
    w13_EJH, w2_EHI = dense(w13).to(compute), dense(w2).to(compute)
    out = torch.zeros(hidden.shape, dtype=compute, device=hidden.device)
    for e in range(len(w13_EJH)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if not len(token):
            continue
        weight = weights[token, slot].to(compute).unsqueeze(1)
        gate_up = _rounded(hidden[token].to(compute), w13) @ w13_EJH[e].T
        if options.get("weight_on_input"):
            gate_up, weight = gate_up * weight, torch.ones_like(weight)
        if (bias := options.get("bias_w13")) is not None:
            gate_up = gate_up + bias[e].to(compute)
        if compute == torch.float32 and gate_up.is_cuda and isinstance(w13, QuantTensor) and not w13.format.exact:
            # Hopper keeps about 14 bits of an FP8 partial sum. That moves few results by more than FP32 would, but it
            # takes some of them over a rounding edge of the requantised intermediate, a step of up to 1/16.
            noise = torch.rand(gate_up.shape, generator=torch.Generator().manual_seed(e)).to(gate_up) - 0.5
            gate_up = gate_up + noise * gate_up.abs().amax(1, keepdim=True) * 2.0**-13
        h = gate(gate_up, activation, options).to(between).to(compute)
        y = _requantised(h, w2, e, options) @ w2_EHI[e].T
        if (bias := options.get("bias_w2")) is not None:
            y = y + bias[e].to(compute)
        y = y.to(between).to(compute) if compute == torch.float32 else y
        out.index_add_(0, token, y * weight)
    return out


def check_layer(
    result: Tensor,
    hidden: Tensor,
    w13: Tensor | QuantTensor,
    w2: Tensor | QuantTensor,
    ids: Tensor,
    weights: Tensor,
    activation: str = "silu",
    **options: Any,
) -> None:
    """Hold a layer's result against the float64 layer, and against the same with its activations quantised.

    The first shows that it is the right function; the second leaves no room for a fault the size of the format's
    error.
    """
    assert result.dtype == hidden.dtype
    between = torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32
    arguments = (hidden, w13, w2, ids, weights, activation)
    independent = compose_layer(*arguments, torch.float32, between, **options).to(hidden.dtype)
    known = {name: value for name, value in options.items() if name != "scales_h"}
    exact = reference.moe_ffn(hidden, dense(w13), dense(w2), ids, weights, activation=activation, **known)
    assert_within_budget(result, exact, independent, "moe_ffn")
    contract = compose_layer(*arguments, torch.float64, between, **options)
    assert_within_budget(result, contract, independent, "moe_ffn on quantised activations")
