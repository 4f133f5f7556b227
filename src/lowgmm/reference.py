"""The oracle: plain loops over experts in float64, on any device, with no kernels and no clever layout.

It takes the *dequantised* operands' exact values, so what it measures is a kernel's own error. It rounds only where the
numerics contract rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowgmm.formats import QuantTensor, scale_per_element
from lowgmm.layer import LayerSpec, activate


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
        w = weights[e].double()
        if scales_w is not None and scales_w.dim() == 3 and scales_w.shape[2] > 1:
            y = input[rows].double() @ (w * scale_per_element(scales_w[e : e + 1].double(), w.shape[1])[0]).T
        else:
            y = input[rows].double() @ w.T
            if scales_w is not None:
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


def moe_ffn(
    hidden: Tensor,
    w13: Tensor | QuantTensor,
    w2: Tensor | QuantTensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    bias_w13: Tensor | None = None,
    bias_w2: Tensor | None = None,
    spec: LayerSpec | None = None,
    **options: Any,
) -> Tensor:
    """The expert layer in float64, without quantising an activation.

    ``out[t] = Σ_a w · (act(x W13ₑ[:I]ᵀ + b13) · (x W13ₑ[I:]ᵀ + b13)) W2ₑᵀ + w · b2`` with ``w = topk_weights[t, a]``
    and ``e = topk_ids[t, a]``; with ``weight_on_input`` w multiplies ``x W13ₑᵀ`` instead.

    hidden [T, H], w13 [E, 2I, H] (or [E, I, H] without a gate), w2 [E, H, I], topk_ids and topk_weights [T, A]; returns
    [T, H] float64. Ids outside [0, E) contribute nothing. ``options`` are those of :class:`lowgmm.layer.LayerSpec`.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> y = moe_ffn(torch.ones(1, 1), torch.ones(1, 2, 1), one, torch.tensor([[0]]), torch.tensor([[2.0]]))
    >>> round(y.item(), 4)  # 2 · silu(1) · 1
    1.4621
    """
    spec = spec or LayerSpec(**options)
    num_experts = w13.shape[0]
    out = torch.zeros(hidden.shape[0], w2.shape[1], dtype=torch.float64, device=hidden.device)
    up, down = _dense(w13), _dense(w2)
    for e in range(num_experts):
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        weight = topk_weights[token, slot].double().unsqueeze(1)
        gate_up = hidden[token].double() @ up(e).T
        if spec.weight_on_input:
            gate_up = gate_up * weight
        if bias_w13 is not None:
            gate_up = gate_up + bias_w13[e].double()
        y = activate(gate_up, spec) @ down(e).T
        if bias_w2 is not None:
            y = y + bias_w2[e].double()
        out.index_add_(0, token, y if spec.weight_on_input else y * weight)
    return out


def _dense(w: Tensor | QuantTensor) -> Callable[[int], Tensor]:
    """Expert -> its matrix in float64."""
    if isinstance(w, QuantTensor):
        values, scales = w.codes(), scale_per_element(w.scales, w.shape[2])
        return lambda e: values[e].double() * scales[e].double()
    return lambda e: w[e].double()
