"""The expert layer as a sequence of operations, for any backend that has a grouped matmul and a token quantiser."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowgmm.formats import QuantFormat, format_of
from lowgmm.layer import GROUP, LayerSpec, Weights, activate
from lowgmm.quant import quantize_with_scales
from lowgmm.routing import route

Gmm = Callable[[Tensor, list[Tensor], Tensor | None, Tensor | None, Tensor, Tensor | None, torch.dtype], Tensor]
"""(x, operands, scales_x, scales_w, offsets, bias, out_dtype) -> [M, N]"""
Quantize = Callable[[Tensor, QuantFormat, float | None], tuple[Tensor, Tensor]]
"""(x, format, clip) -> values, scales"""


def moe_ffn(
    hidden: Tensor,
    w13: Weights,
    w2: Weights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    spec: LayerSpec,
    scales_h: Tensor | None,
    gmm: Gmm,
    quantize_tokens: Quantize,
) -> Tensor:
    """[T, H] in ``hidden``'s dtype: ``lowgmm.moe_ffn`` of checked arguments, one operation after the other."""
    num_experts = w13.operands[0].shape[0]
    between = torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32
    routing = route(topk_ids, num_experts)
    # A slot without an expert has zeros everywhere, but its weight may be anything.
    has_expert = (topk_ids >= 0) & (topk_ids < num_experts)
    weights = topk_weights.float().where(has_expert, 0.0)

    rows, fmt = routing.tokens, _activations(w13)
    if fmt is None:
        x, scales = hidden[rows], None
    else:
        # Each token is quantised once, not once per expert. index_select of float8 is missing on some backends; the
        # bytes are the same.
        x, scales = quantize_tokens(hidden, fmt, spec.clip)
        x, scales = x.view(torch.uint8)[rows].view(x.dtype), scales[rows]
    bias = None if spec.weight_on_input else w13.bias
    # Rounded once, as h: a second rounding would take some values over an edge of the format that h is quantised to.
    gate_up = gmm(x, w13.operands, scales, w13.scales, routing.offsets, bias, torch.float32)
    if spec.weight_on_input:
        gate_up = gate_up * weights.reshape(-1)[routing.order].unsqueeze(1)
        if w13.bias is not None:
            gate_up += w13.bias[topk_ids.reshape(-1)[routing.order].clamp(0, num_experts - 1)]
    h = activate(gate_up, spec).to(between)

    y = _down(h, w2, routing.offsets, between, spec, scales_h, gmm, quantize_tokens)
    y = y[routing.inverse].view(*topk_ids.shape, -1).float()
    # No matrix product: autocast lowers those.
    y = y.where(has_expert.unsqueeze(-1), 0.0) if spec.weight_on_input else y * weights.unsqueeze(-1)
    return y.sum(1).to(hidden.dtype)


def _down(
    h: Tensor,
    w2: Weights,
    offsets: Tensor,
    out_dtype: torch.dtype,
    spec: LayerSpec,
    scales_h: Tensor | None,
    gmm: Gmm,
    quantize_tokens: Quantize,
) -> Tensor:
    """The second product; h [R, I] is quantised as the spec says where ``w2`` is."""
    fmt = _activations(w2)
    if fmt is None:
        if w2.operands[0].dtype == torch.float16:
            return _down_fp16(h, w2, offsets, out_dtype, gmm)
        return gmm(h, w2.operands, None, None, offsets, w2.bias, out_dtype)
    if spec.requantize == "token":
        hq, scales = quantize_tokens(h, fmt, None)
        return gmm(hq, w2.operands, scales, w2.scales, offsets, w2.bias, out_dtype)
    if spec.requantize == "static":
        assert scales_h is not None
        expert = torch.searchsorted(offsets, torch.arange(len(h), device=h.device), right=True) - 1
        scales = scales_h.float()[expert.clamp(max=len(scales_h) - 1)]
        hq = quantize_with_scales(h, scales, fmt)
        return gmm(hq, w2.operands, scales, w2.scales, offsets, w2.bias, out_dtype)
    total = torch.zeros(len(h), w2.operands[0].shape[1], dtype=torch.float32, device=h.device)
    for start in range(0, h.shape[1], GROUP):
        columns = slice(start, start + GROUP)
        hq, scales = quantize_tokens(h[:, columns], fmt, None)
        operands = [w2.operands[0][:, :, columns]]
        if len(w2.operands) > 1:  # packed weights cannot be cut: multiply zeros outside the group instead
            whole = torch.zeros(h.shape, dtype=hq.dtype, device=h.device)
            whole[:, columns] = hq
            hq, operands = whole, w2.operands
        total += gmm(hq, operands, scales, w2.scales, offsets, w2.bias if start == 0 else None, torch.float32)
    return total.to(out_dtype)


def _activations(w: Weights) -> QuantFormat | None:
    """The format of the activations that ``w`` is multiplied by."""
    fmt = format_of(w.operands[0].dtype)
    return None if fmt is None else fmt.activations


def _down_fp16(h: Tensor, w2: Weights, offsets: Tensor, out_dtype: torch.dtype, gmm: Gmm) -> Tensor:
    """A power of two per row keeps fp16 operands in range and costs no rounding: act(gate)·up easily exceeds
    65 504."""
    exponent = torch.frexp(h.abs().amax(-1, keepdim=True)).exponent.clamp(min=0)
    y = gmm(torch.ldexp(h, -exponent).half(), w2.operands, None, None, offsets, None, torch.float32)
    y = torch.ldexp(y, exponent)
    if w2.bias is not None:
        expert = torch.searchsorted(offsets, torch.arange(len(h), device=h.device), right=True) - 1
        y += w2.bias[expert.clamp(max=len(w2.bias) - 1)]
    return y.to(out_dtype)
