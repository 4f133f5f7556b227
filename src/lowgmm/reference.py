"""The oracle: plain loops over experts in float64, on any device, with no kernels and no clever layout.

It takes the *dequantised* operands' exact values, so what it measures is a kernel's own error. It rounds only where the
numerics contract rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowgmm.formats import QuantTensor, scale_per_element
from lowgmm.routing import route


def gmm(
    input: Tensor,
    weights: Tensor | QuantTensor,
    scales_x: Tensor | None = None,
    scales_w: Tensor | None = None,
    expert_offsets: Tensor | None = None,
    expert_sizes: Tensor | None = None,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """``Y[m, n] = (Σ_k X[m, k] · W[e, n, k] · scales_w[e, n]) · scales_x[m] + bias[e, n]`` in float64.

    Shapes as :func:`lowgmm.gmm`; ``scales_w`` may be [E, N, k], one per group of K. Rows that belong to no expert are
    zero. Without scales the integer sum is exact: |Σ| < 2^53.

    >>> import torch
    >>> w = torch.tensor([[[1.0, 1.0]], [[2.0, 2.0]]])
    >>> gmm(torch.ones(3, 2), w, expert_sizes=torch.tensor([1, 2])).flatten().tolist()
    [2.0, 4.0, 4.0]
    """
    if isinstance(weights, QuantTensor):
        scales_w = weights.scales
        weights = weights.codes()
    num_rows, num_experts = input.shape[0], weights.shape[0]
    bounds = _bounds(expert_offsets, expert_sizes)
    out = torch.zeros(num_rows, weights.shape[1], dtype=torch.float64, device=input.device)
    for e in range(num_experts):
        rows = slice(bounds[e], bounds[e + 1])
        w, grouped = weights[e].double(), scales_w is not None and scales_w.dim() == 3 and scales_w.shape[2] > 1
        if grouped:
            w = w * scale_per_element(scales_w[e : e + 1].double(), w.shape[1])[0]
        y = input[rows].double() @ w.T
        if scales_w is not None and not grouped:
            y = y * scales_w[e].reshape(-1).double()
        if scales_x is not None:
            y = y * scales_x[rows].reshape(-1, 1).double()
        if bias is not None:
            y = y + bias[e].double()
        out[rows] = y
    return out


def _bounds(offsets: Tensor | None, sizes: Tensor | None) -> list[int]:
    if offsets is not None:
        return [int(v) for v in offsets.tolist()]
    assert sizes is not None, "expert_offsets or expert_sizes"
    return [0, *(int(v) for v in sizes.cumsum(0).tolist())]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda gate: gate * torch.sigmoid(gate),
    "gelu": torch.nn.functional.gelu,
}
"""What is applied to the gate: SwiGLU's SiLU, or GeGLU's exact (erf) GELU."""


def activate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``act(gate) · up`` for ``gate_up [..., 2I]`` with the gate half first, in the dtype given."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def moe_ffn(
    hidden: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """The expert layer of dense (or dequantised) weights in float64.

    ``out[t] = Σ_a topk_weights[t, a] · (act(x W13ₑ[:I]ᵀ) · (x W13ₑ[I:]ᵀ)) W2ₑᵀ`` with ``e = topk_ids[t, a]``.

    hidden [T, H], w13 [E, 2I, H] (gate rows first), w2 [E, H, I], topk_ids and topk_weights [T, A]; returns [T, H]
    float64.
    Ids outside [0, E) contribute nothing.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> y = moe_ffn(torch.ones(1, 1), torch.ones(1, 2, 1), one, torch.tensor([[0]]), torch.tensor([[2.0]]))
    >>> round(y.item(), 4)  # 2 · silu(1) · 1
    1.4621
    """
    num_experts, (num_tokens, top_k) = w13.shape[0], topk_ids.shape
    r = route(topk_ids, num_experts)
    gate_up = gmm(hidden[r.tokens], w13, expert_offsets=r.offsets)
    y = gmm(activate(gate_up, activation), w2, expert_offsets=r.offsets)
    y = y[r.inverse].view(num_tokens, top_k, -1)
    return (y * topk_weights.double().unsqueeze(-1)).sum(1)
