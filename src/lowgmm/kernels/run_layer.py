"""Launch the expert layer's kernels: scratch memory, descriptors, and which launches follow each other."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowgmm.formats import format_of
from lowgmm.gpu import describe
from lowgmm.kernels.grouped_mm import promote_every
from lowgmm.kernels.moe_layer import BOTH, DOWN, UP, combine_kernel, moe_layer_kernel
from lowgmm.kernels.queue import counters
from lowgmm.kernels.route import TILE_FIELDS, prepare
from lowgmm.layer import GROUP, LayerSpec, Weights
from lowgmm.plan import LayerConfig
from lowgmm.routing import max_row_tiles

TYPES = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv, torch.bfloat16: tl.bfloat16}
HEAD = 4
"""Words of a workspace in front of its tables: the queue's ticket, the number of row tiles, two spare."""


def moe_ffn(
    hidden: Tensor,
    w13: Weights,
    w2: Weights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    spec: LayerSpec,
    scales_h: Tensor | None,
    config: LayerConfig,
) -> Tensor:
    """[T, H] in ``hidden``'s dtype: ``lowgmm.moe_ffn`` of checked arguments that ``config`` supports, T > 0.

    Scratch memory for a bfloat16 ``hidden`` is R · (2 · I + 2 · H) + T · H bytes (h; the slots' outputs, unless A = 1;
    quantised tokens) and a few words per row and tile.
    """
    (num_tokens, width), top_k = hidden.shape, topk_ids.shape[1]
    num_experts, inner = w2.operands[0].shape[0], w2.operands[0].shape[2]
    values13, values2 = (w.operands[0].contiguous() for w in (w13, w2))
    fmt = format_of(values2.dtype)
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    rows, device = ids.numel(), hidden.device
    between = torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32
    pdl = config.pdl and config.launch != "direct"
    after: dict[str, Any] = {"launch_pdl": True} if pdl else {}  # no other backend knows the option
    direct, split = config.launch == "direct", config.launch == "split"

    biased = (w13.bias is not None, w2.bias is not None)
    constexprs = constants(spec, config, values2.dtype, width, inner, biased)
    groups = constexprs["GROUPS"]
    done_in_up = split and fmt is not None and spec.requantize == "token"
    bound = top_k if direct else max_row_tiles(rows, num_experts, config.block_m)
    out = torch.empty((num_tokens, width), dtype=hidden.dtype, device=device)
    h = torch.empty((rows, inner), dtype=between, device=device)
    hq = h
    if fmt is not None and done_in_up:  # in place, so that it takes no memory
        hq = h.view(torch.uint8)[:, :inner].view(fmt.dtype)
    y = out if top_k == 1 else torch.empty((rows, width), dtype=between, device=device)
    size = HEAD + bound * (TILE_FIELDS.value + 1) + rows * (1 + groups)
    if direct:
        workspace = counters(device, size + triton.cdiv(width, config.down_n))
        x, scales_x = hidden, h
    else:
        workspace = torch.empty(size, dtype=torch.int32, device=device)
        x, scales_x = hidden, h
        if fmt is not None:
            x = torch.empty((num_tokens, width), dtype=fmt.dtype, device=device)
            scales_x = torch.empty(num_tokens, dtype=torch.float32, device=device)
        prepare(ids, hidden, x, scales_x, out, workspace, num_experts, config.block_m, fmt, spec.clip, groups, pdl)

    tma = config.tma and values13.data_ptr() % 16 == 0 and values2.data_ptr() % 16 == 0
    operands: dict[str, Any] = {"w13": values13, "w2": values2, "hq": hq}
    if tma:
        across = 2 if spec.gate_up == "interleaved" else 1
        view13 = values13.view(-1, across * width)
        operands["w13"] = TensorDescriptor.from_tensor(view13, [config.up_n, config.up_k])
        operands["w2"] = TensorDescriptor.from_tensor(values2.view(-1, inner), [config.down_n, config.down_k])
    gpu = describe(device)
    grid = (config.programs or gpu.sms * config.programs_per_sm,)
    for phase in (UP, DOWN) if split else (BOTH,):
        requantize = "none" if fmt is None else spec.requantize
        if done_in_up and phase == DOWN:
            requantize = "done"
            if tma:
                operands["hq"] = TensorDescriptor.from_tensor(hq, [config.block_m, config.down_k])
        moe_layer_kernel[grid](
            x,
            scales_x,
            operands["w13"],
            w13.scales,
            w13.bias,
            operands["w2"],
            values2,
            w2.scales,
            w2.bias,
            scales_h,
            h,
            operands["hq"],
            y,
            out,
            ids,
            weights,
            workspace,
            rows,
            bound,
            num_experts,
            width,
            inner,
            x.stride(0),
            hq.stride(0),
            math.inf if spec.clip is None else spec.clip,
            spec.slope,
            spec.bound or 0.0,
            PHASE=phase,
            DIRECT=direct,
            REQUANTISE=done_in_up and phase == UP,
            PREFETCH=config.prefetch and gpu.backend == "cuda",
            PDL=pdl,
            A=top_k,
            TMA=tma,
            **constexprs,
            REQUANTIZE=requantize,
            num_warps=config.num_warps,
            enable_fp_fusion=False,  # the epilogues' roundings are the contract's
            **after,
        )
    if top_k > 1 and not direct:
        block = min(1024, triton.next_power_of_2(width))
        combine_kernel[(num_tokens, triton.cdiv(width, block))](
            y, ids, weights, out, num_experts, width, A=top_k, WEIGHT_ON_INPUT=spec.weight_on_input, PDL=pdl,
            BLOCK=block, num_warps=4, enable_fp_fusion=False, **after,
        )  # fmt: skip
    return out


def constants(
    spec: LayerSpec, config: LayerConfig, dtype: torch.dtype, width: int, inner: int, biased: tuple[bool, bool]
) -> dict[str, Any]:
    """The layer kernel's compile-time arguments that all of its launches share."""
    fmt, by_group = format_of(dtype), spec.requantize == "group128"
    return {
        "BM": config.block_m,
        "BN1": config.up_n,
        "BK1": config.up_k,
        "BN2": config.down_n,
        "BK2": config.down_k,
        "STAGES": config.num_stages,
        "SWAP": config.swap_ab,
        "EVEN_K1": width % config.up_k == 0,
        "EVEN_K2": inner % config.down_k == 0,
        "TYPE": TYPES[dtype],
        "ACC": tl.int32 if dtype == torch.int8 else tl.float32,
        "PROMOTE": min(promote_every(dtype), config.up_k, config.down_k),
        "QMAX": 0.0 if fmt is None else fmt.qmax,
        "ACTIVATION": spec.activation,
        "LAYOUT": spec.gate_up,
        "CLAMPED": spec.bound is not None,
        "WEIGHT_ON_INPUT": spec.weight_on_input,
        "BIAS1": biased[0],
        "BIAS2": biased[1],
        "GROUPS": 0 if fmt is None or spec.requantize == "static" else triton.cdiv(inner, GROUP) if by_group else 1,
        "GROUP": GROUP if by_group else 1 << 30,
        "BLOCK_H": min(max(128, triton.next_power_of_2(width)), 4096),
    }
