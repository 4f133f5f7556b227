"""Launch the expert layer on Hopper: arrange, both products (``hopper_layer.py``), combine; one token: the products."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowgmm.formats import format_of
from lowgmm.gpu import describe
from lowgmm.kernels.arrange import arrange
from lowgmm.kernels.combine import combine
from lowgmm.kernels.grouped_mm import promote_every
from lowgmm.kernels.hopper import BOXES
from lowgmm.kernels.hopper_layer import hopper_layer_kernel
from lowgmm.kernels.hopper_read import box_of
from lowgmm.kernels.queue import counters
from lowgmm.layer import LayerSpec, Weights
from lowgmm.plan import LayerConfig
from lowgmm.relaunch import descriptor
from lowgmm.replay import empty, launch
from lowgmm.routing import max_row_tiles

WIDTH = 8192
"""Columns of a token that a warpgroup holds in registers."""

MAX_ROWS = 64
"""Rows of h that one task quantises, at most: eight 16-byte loads a thread."""


def moe_ffn(
    hidden: Tensor,
    w13: Weights,
    w2: Weights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    spec: LayerSpec,
    config: LayerConfig,
) -> Tensor:
    """[T, H] in ``hidden``'s dtype: ``lowgmm.moe_ffn`` of checked arguments that ``config`` supports, T > 0.

    Scratch memory for 8-bit weights and a bfloat16 ``hidden`` is R · 3 · max(H, I) bytes and a few words per row and
    expert: h and the slots' outputs share 2 · R · max(H, I), the quantised tokens and the quantised h the rest. With
    bfloat16 weights it is R · 4 · max(H, I): there the tokens share with the outputs. A direct launch takes
    R · 2 · (H + I) and the one quantised token.
    """
    values13, values2 = (w.operands[0].contiguous() for w in (w13, w2))
    num_tokens, (num_experts, width, inner) = len(topk_ids), values2.shape
    rows, fmt, device = topk_ids.numel(), format_of(values2.dtype), hidden.device
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    between = torch.bfloat16 if hidden.dtype == torch.bfloat16 or fmt is None else torch.float32
    bm, bn, bk = config.block_m, config.down_n, config.down_k
    direct = config.launch == "direct"
    stride = width + inner if direct else max(width, inner)
    shared = empty((rows, stride), between, device)
    second = empty((1 if direct else rows, stride), values2.dtype, device)
    y, h, x, hq = (shared, shared, second, second) if fmt is not None else (shared, second, shared, second)
    if direct:  # side by side, for an output is written while others still read h
        y, h = shared[:, :width], shared[:, width:]
    blocks = rows if direct else rows // bm + num_experts + 1
    columns = -(-width // bn) * (bn // 64) if direct else 0
    scales_x, scales_h = (empty((rows,), torch.float32, device) for _ in range(2))
    out = empty((num_tokens, width), hidden.dtype, device)
    parts = (4, rows, 2 * blocks, columns)
    number = sum(parts)
    order, inverse, offsets = None, None, None
    if direct:
        zeros = counters(device, number)
    else:
        order, inverse, offsets, zeros = arrange(ids, hidden, x, scales_x, num_experts, fmt, spec.clip, number)
    ticket, absmax, ready, arrived = zeros[:number].split(parts)
    layout, constants = _constants(
        config, spec, values2.dtype, between, promote_every(values2.dtype, describe(device)) > 0,
        w13.bias is not None, w2.bias is not None,
        *((rows, min(triton.next_power_of_2(width), WIDTH)) if direct else (0, 0)),
    )  # fmt: skip

    def tiles(values: Tensor, columns: int, row_stride: int, block: list[int]) -> Any:
        rows = -(-values.numel() // row_stride)
        return descriptor(TensorDescriptor, values, (rows, columns), (row_stride, 1), block, layout=layout)

    # Rows of gate and up, seen as two matrices: below each other, or in turns.
    across, expert_rows = (2, inner) if spec.gate_up == "interleaved" else (1, values13.shape[1])
    gate = values13.view(-1)
    up = gate[{"concatenated": inner * width, "interleaved": width, "none": 0}[spec.gate_up] :]
    of_rows = box_of(bm, bn, x.element_size())
    token = (hidden, x, ids, out) if direct else (None, None, None, None)
    written = (y, h, hq, scales_x, scales_h)
    of_channels = (w13.scales, w2.scales, w13.bias, w2.bias)
    launch(
        hopper_layer_kernel,
        _programs(rows, num_experts, width, inner, config, describe(device).sms),
        tiles(x, width, stride, of_rows),
        tiles(gate, width, across * width, [min(64, bn // 2), bk]),
        tiles(up, width, across * width, [min(64, bn // 2), bk]),
        tiles(hq, inner, stride, of_rows),
        tiles(values2.view(-1), inner, inner, [64, bk]),
        *token,
        *written,
        *(absmax, *of_channels, order, weights, offsets, ticket, ready, arrived if direct else None),
        *(rows, num_experts, width, inner, blocks, expert_rows, stride),
        *(math.inf if spec.clip is None else spec.clip, spec.slope, spec.bound or 0.0),
        *constants,
        num_warps=4,
        enable_fp_fusion=False,  # the epilogues' roundings are the contract's
        launch_pdl=not direct,
    )
    if not direct:
        combine(y, inverse, ids, weights, out, num_experts, spec, True)
    return out


def _programs(rows: int, num_experts: int, width: int, inner: int, config: LayerConfig, sms: int) -> int:
    """One per SM, unless no kind of task has as many."""
    most = max(-(-width // config.down_n), -(-inner // config.up_n))
    return config.programs or min(sms, max_row_tiles(rows, num_experts, config.block_m) * most)


@functools.lru_cache(maxsize=1024)
def _constants(
    config: LayerConfig,
    spec: LayerSpec,
    dtype: torch.dtype,
    between: torch.dtype,
    promote: bool,
    biased13: bool,
    biased2: bool,
    slots: int,
    token_width: int,
) -> tuple[gl.NVMMASharedLayout, tuple[Any, ...]]:
    """The operands' layout in shared memory, and the kernel's compile-time arguments."""
    layout, out = (gl.NVMMASharedLayout(128, d.itemsize * 8, rank=2) for d in (dtype, between))
    fmt = format_of(dtype)
    constants = (
        config.block_m,
        config.down_n,
        config.down_k,
        config.num_stages,
        BOXES,
        min(config.block_m, MAX_ROWS),
        out,
        dtype == torch.int8,
        promote,
        0.0 if fmt is None else fmt.qmax,
        config.launch == "direct",
        slots,
        token_width,
        spec.activation,
        spec.gate_up,
        spec.bound is not None,
        spec.weight_on_input,
        biased13,
        biased2,
    )
    return layout, constants
