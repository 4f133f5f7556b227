"""What stands between the grouped matmuls of an expert layer: a row of the sorted slots at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowgmm.kernels.moe_tiles import activate
from lowgmm.kernels.quantize import quantize_row, round_to, scales_of


@triton.jit
def gather_kernel(
    x,  # (T, H) float, row stride stride_x
    order,  # (R,) int32: row -> slot
    rows,  # (R, H) int8 or float8e4nv, written; bfloat16 with QMAX = 0
    scales,  # (R,) float32, written
    H,
    stride_x,
    clip,
    A: tl.constexpr,
    QMAX: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R,): each slot's token, quantised. A token is read again for each of its experts, from the cache."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = x + (tl.load(order + row) // A).to(tl.int64) * stride_x
    if QMAX > 0:
        quantize_row(token, rows + row * H, scales + row, H, clip, QMAX, BLOCK)
    else:
        k = tl.arange(0, BLOCK)
        for start in tl.range(0, H, BLOCK):
            inside = start + k < H
            tl.store(rows + row * H + start + k, tl.load(token + start + k, mask=inside, other=0.0), mask=inside)


@triton.jit
def activate_kernel(
    gate_up,  # (R, 2I) float32; (R, I) without a gate
    h,  # (R, I) bfloat16 or float32, written: the result with QMAX = 0, else on the way to it
    hq,  # (R, I) int8 or float8e4nv, written
    scales,  # (R,) float32, written
    order,  # (R,) int32: row -> slot
    ids,  # (T·A,): slot -> expert
    topk_weights,  # (T·A,)
    bias,  # (E, 2I), with WEIGHT_ON_INPUT only; else the matmul has added it
    E,
    I,
    slope,
    bound,
    ACTIVATION: tl.constexpr,
    LAYOUT: tl.constexpr,
    CLAMPED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    BIAS: tl.constexpr,
    QMAX: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R,): h of a row of gate and up, rounded once, then requantised by the row's absmax."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    GATED: tl.constexpr = LAYOUT != "none"
    WIDTH: tl.constexpr = 2 if GATED else 1
    STEP: tl.constexpr = 2 if LAYOUT == "interleaved" else 1
    if LAYOUT == "interleaved":
        second = 1
    else:
        second = I
    weight = 1.0
    expert = tl.zeros((), dtype=tl.int64)
    if WEIGHT_ON_INPUT:
        slot = tl.load(order + row)
        e = tl.load(ids + slot).to(tl.int64)
        live = (e >= 0) & (e < E)
        expert = tl.where(live, e, 0)
        weight = tl.where(live, tl.load(topk_weights + slot).to(tl.float32), 0.0)
    k = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    nans = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in tl.range(0, I, BLOCK):
        inside = start + k < I
        at = (start + k) * STEP
        values = gate_up + row * (WIDTH * I)
        gate = tl.load(values + at, mask=inside, other=0.0)
        up = gate
        if GATED:
            up = tl.load(values + at + second, mask=inside, other=0.0)
        if WEIGHT_ON_INPUT:
            gate, up = gate * weight, up * weight
            if BIAS:
                shift = bias + expert * (WIDTH * I)
                gate += tl.load(shift + at, mask=inside, other=0.0).to(tl.float32)
                if GATED:
                    up += tl.load(shift + at + second, mask=inside, other=0.0).to(tl.float32)
        v = activate(gate, up, slope, bound, ACTIVATION, GATED, CLAMPED).to(h.dtype.element_ty)
        tl.store(h + row * I + start + k, v, mask=inside)
        v = tl.where(inside, v.to(tl.float32), 0.0)
        nan = v != v
        nans += nan.to(tl.int32)
        largest = tl.maximum(largest, tl.where(nan, 0.0, tl.abs(v)))
    if QMAX > 0:
        absmax = tl.where(tl.sum(nans, 0) > 0, float("nan"), tl.max(largest, 0))
        inverse, scale = scales_of(absmax, QMAX)
        tl.store(scales + row, scale)
        tl.debug_barrier()  # the row's other elements were written by other threads
        for start in tl.range(0, I, BLOCK):
            inside = start + k < I
            v = tl.load(h + row * I + start + k, mask=inside, other=0.0).to(tl.float32) * inverse
            tl.store(hq + row * I + start + k, round_to(v, QMAX, hq.dtype.element_ty), mask=inside)
