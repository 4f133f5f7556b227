"""The expert layer around two grouped matmuls, and the kernels of ``rows.py`` between them."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from lowgmm.formats import format_of
from lowgmm.gpu import describe
from lowgmm.kernels.grouped_mm import grouped_mm
from lowgmm.kernels.moe_layer import combine_kernel
from lowgmm.kernels.route import sort_slots
from lowgmm.kernels.rows import activate_kernel, gather_kernel
from lowgmm.layer import LayerSpec, Weights

MAX_BLOCK = 4096


def by_gmm(
    hidden: Tensor, w13: Weights, w2: Weights, topk_ids: Tensor, topk_weights: Tensor, spec: LayerSpec
) -> Tensor:
    """[T, H]: sort, gather and quantise, gate/up, activate and requantise, down, combine. Six launches, but both
    products by the fastest kernel there is.

    Scratch memory, beside the result: at most R · max(H + 8 · I, 11 · I, I + 2 · H) bytes for 8-bit weights and a
    bfloat16 ``hidden``, because gate and up are kept in float32 and rounded once, as h.
    """
    (num_tokens, top_k), (num_experts, width, inner) = topk_ids.shape, w2.operands[0].shape
    values13, values2 = w13.operands[0], w2.operands[0]
    rows, fmt, device = topk_ids.numel(), format_of(values2.dtype), hidden.device
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    pdl = describe(device).tma and device.type == "cuda"
    after: dict[str, Any] = {"launch_pdl": True} if pdl else {}  # no other backend knows the option
    qmax, stored = (0.0, torch.bfloat16) if fmt is None else (fmt.qmax, fmt.dtype)

    order, inverse, offsets = sort_slots(ids, num_experts)
    x = torch.empty((rows, width), dtype=stored, device=device)
    scales_x = None if fmt is None else torch.empty(rows, dtype=torch.float32, device=device)
    gather_kernel[(rows,)](
        hidden, order, x, scales_x, width, hidden.stride(0), math.inf if spec.clip is None else spec.clip,
        A=top_k, QMAX=qmax, PDL=pdl, BLOCK=_block(width), num_warps=4, enable_fp_fusion=False, **after,
    )  # fmt: skip
    gate_up = torch.empty((rows, values13.shape[1]), dtype=torch.float32, device=device)
    bias = None if spec.weight_on_input else w13.bias
    grouped_mm(gate_up, x, values13, scales_x, w13.scales, offsets, bias)
    del x

    between = torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32
    h = torch.empty((rows, inner), dtype=between, device=device)
    hq = h if fmt is None else torch.empty((rows, inner), dtype=stored, device=device)
    scales_h = None if fmt is None else torch.empty(rows, dtype=torch.float32, device=device)
    activate_kernel[(rows,)](
        gate_up, h, hq, scales_h, order, ids, weights, w13.bias, num_experts, inner, spec.slope, spec.bound or 0.0,
        ACTIVATION=spec.activation, LAYOUT=spec.gate_up, CLAMPED=spec.bound is not None,
        WEIGHT_ON_INPUT=spec.weight_on_input, BIAS=w13.bias is not None, QMAX=qmax, PDL=pdl, BLOCK=_block(inner),
        num_warps=4, enable_fp_fusion=False, **after,
    )  # fmt: skip
    del gate_up, h
    y = torch.empty((rows, width), dtype=between, device=device)
    grouped_mm(y, hq, values2, scales_h, w2.scales, offsets, w2.bias)
    out = hidden.new_empty((num_tokens, width))
    combine(y, inverse, ids, weights, out, num_experts, spec, pdl)
    return out


def combine(
    y: Tensor,
    inverse: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    num_experts: int,
    spec: LayerSpec,
    pdl: bool,
) -> None:
    """``out[t] = Σ_a weights[t, a] · y[slot t·A + a]``; with ``inverse`` the rows of ``y`` are sorted by expert."""
    num_tokens, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    combine_kernel[(num_tokens * triton.cdiv(width, block),)](
        y, inverse, ids, weights, out, num_experts, width, A=ids.shape[1], SORTED=inverse is not None,
        WEIGHT_ON_INPUT=spec.weight_on_input, PDL=pdl, BLOCK=block, num_warps=4, enable_fp_fusion=False,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _block(width: int) -> int:
    return min(max(128, triton.next_power_of_2(width)), MAX_BLOCK)
