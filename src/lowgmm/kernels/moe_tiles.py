"""The two tiles an expert layer is made of: gate/up with its activation, and down with its requantised input."""

from __future__ import annotations

import triton
import triton.language as tl

from lowgmm.kernels.quantize import round_to, scales_of


@triton.jit
def on_rows(v, SWAP: tl.constexpr):
    """A vector over the tile's rows, ready to broadcast against the accumulator."""
    return tl.expand_dims(v, 0 if SWAP else 1)


@triton.jit
def on_columns(v, SWAP: tl.constexpr):
    """A vector over the tile's columns, likewise."""
    return tl.expand_dims(v, 1 if SWAP else 0)


@triton.jit
def multiply(a, b, acc, SWAP: tl.constexpr, ACC: tl.constexpr, PROMOTE: tl.constexpr):
    """acc + a [BM, BK] · b [BN, BK]ᵀ, or its transpose with SWAP (the weights on the matrix instruction's M side).

    FP8 sums are promoted as in ``tiles.accumulate``.
    """
    if SWAP:
        a, b = b, a
    if PROMOTE == a.shape[1] and a.shape[0] * b.shape[0] <= 64 * 128:
        acc += tl.dot(a, b.T)
    else:
        acc = tl.dot(a, b.T, acc, input_precision="ieee", max_num_imprecise_acc=PROMOTE, out_dtype=ACC)
    return acc


@triton.jit
def load_weights(w, row, rows, column, k, K, stride, TMA: tl.constexpr, EVEN_K: tl.constexpr):
    """[BN, BK] weights at ``column`` from row ``row`` of a descriptor, or from the pointers' ``rows``; 0 for k >= K."""
    if TMA:
        b = w.load([row, column])
    elif EVEN_K:
        b = tl.load(w + rows[:, None] * stride + (column + k)[None, :])
    else:
        b = tl.load(w + rows[:, None] * stride + (column + k)[None, :], mask=(k < K)[None, :], other=0.0)
    return b


@triton.jit
def sigmoid(x, NVIDIA: tl.constexpr):
    """1 / (1 + exp(-x)), within a few units in the last place."""
    if NVIDIA:
        # 4 instructions instead of 14, because neither overflow nor subnormals need care: exp(-x) = inf gives 0.
        s = tl.inline_asm_elementwise(
            "{.reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, t;}",
            "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        s = tl.sigmoid(x)
    return s


@triton.jit
def activate(
    gate, up, slope, bound, ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, NVIDIA: tl.constexpr
):  # fmt: skip
    """h of gate and up, as ``layer.activate`` defines it; NaN stays NaN through the clamps."""
    if CLAMPED:
        gate = tl.minimum(gate, bound, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, bound, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -bound, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "silu":
        h = gate * sigmoid(gate, NVIDIA)
    elif ACTIVATION == "gelu":
        h = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        h = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        h = h * h
    elif ACTIVATION == "swiglu_oai":
        h = gate * sigmoid(slope * gate, NVIDIA)
        up = up + 1.0
    else:
        h = gate
    if GATED:
        h = h * up
    return h


@triton.jit
def scaled(
    acc, scales_w, bias, channel, in_columns, row_scale, row_weight,
    SWAP: tl.constexpr, QUANTISED: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """acc · scales_w · row_scale · row_weight + bias in float32, in this order in every backend."""
    v = acc.to(tl.float32)
    if QUANTISED:
        v = v * on_columns(tl.load(scales_w + channel, mask=in_columns, other=0.0), SWAP) * on_rows(row_scale, SWAP)
    if WEIGHTED:
        v = v * on_rows(row_weight, SWAP)
    if BIAS:
        v = v + on_columns(tl.load(bias + channel, mask=in_columns, other=0.0).to(tl.float32), SWAP)
    return v


@triton.jit
def gate_up_tile(
    x,  # (T, H), row stride stride_x: values, or with DIRECT one row of floats, quantised as it is loaded; GATHERED:
    # (R, H) values by sorted row, with TMA a descriptor of [BM, BK]
    scales_x,  # (T,) float32; GATHERED (R,)
    direct_inverse,  # with DIRECT the token's 1 / scale …
    direct_scale,  # … and scale
    w13,  # (E, 2I, H): descriptor of [BN, BK] or pointer
    scales_w13,  # (E, 2I) float32
    bias_w13,  # (E, 2I)
    h,  # (R, I), written
    absmax,  # (R, GROUPS) int32: bits of the running absmax of each row of h
    order,  # (R,) int32: row -> slot
    topk_weights,  # (R,)
    expert, row, end, n_tile, H, I, A, stride_x, slope, bound,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr,
    PROMOTE: tl.constexpr, QMAX: tl.constexpr, DIRECT: tl.constexpr, GATHERED: tl.constexpr,
    ACTIVATION: tl.constexpr, LAYOUT: tl.constexpr,
    CLAMPED: tl.constexpr, NVIDIA: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """h[rows, columns] = act(x W_gateᵀ, x W_upᵀ) in h's dtype, and its share of each row's absmax.

    Interleaved rows are read as a matrix of twice the width, [E·I, 2H]: gate on the left, up on the right.
    """
    GATED: tl.constexpr = LAYOUT != "none"
    QUANTISED: tl.constexpr = QMAX > 0
    if SWAP:
        gate = tl.zeros((BN, BM), dtype=ACC)
        up = tl.zeros((BN, BM), dtype=ACC)
    else:
        gate = tl.zeros((BM, BN), dtype=ACC)
        up = tl.zeros((BM, BN), dtype=ACC)
    rm, rk = row + tl.arange(0, BM), tl.arange(0, BK)
    rn = n_tile * BN + tl.arange(0, BN)
    in_rows, in_columns = rm < end, rn < I
    # Rows and columns past the edge re-read the tile's first one: no mask in the loop, no access outside the tensors.
    if DIRECT:
        slot = tl.where(in_rows, rm, row)
    else:
        slot = tl.load(order + tl.where(in_rows, rm, row))
    x_row = slot // A
    if GATHERED:
        x_row = tl.where(in_rows, rm, row)
    x_row = x_row.to(tl.int64)
    w_row = expert * I
    stride = H
    up_row = 0
    up_column = 0
    if LAYOUT == "concatenated":
        w_row *= 2
        up_row = I
    if LAYOUT == "interleaved":
        stride = 2 * H
        up_column = H
    rows = w_row.to(tl.int64) + tl.where(in_columns, rn, 0)
    w_row += n_tile * BN
    for start in tl.range(0, H, BK, num_stages=STAGES):
        k = start + rk
        if DIRECT:
            # One live row: its values are made once, then put into the tile (as bytes: FP8 has no select).
            v = tl.load(x + k, mask=k < H, other=0.0)
            if QUANTISED:
                v = round_to(v.to(tl.float32) * direct_inverse, QMAX, TYPE).to(tl.int8, bitcast=True)
            a = tl.where((tl.arange(0, BM) == 0)[:, None], v[None, :], tl.zeros_like(v)[None, :])
            if QUANTISED:
                a = a.to(TYPE, bitcast=True)
        elif GATHERED and TMA:
            a = x.load([row, start])
        elif EVEN_K:
            a = tl.load(x + x_row[:, None] * stride_x + k[None, :])
        else:
            a = tl.load(x + x_row[:, None] * stride_x + k[None, :], mask=(k < H)[None, :], other=0.0)
        b = load_weights(w13, w_row, rows, start, rk, H - start, stride, TMA, EVEN_K)
        gate = multiply(a, b, gate, SWAP, ACC, PROMOTE)
        if GATED:
            c = load_weights(w13, w_row + up_row, rows + up_row, up_column + start, rk, H - start, stride, TMA, EVEN_K)
            up = multiply(a, c, up, SWAP, ACC, PROMOTE)

    row_scale = 0.0
    row_weight = 0.0
    if QUANTISED:
        if DIRECT:
            row_scale = tl.where(in_rows, direct_scale, 0.0)
        else:
            row_scale = tl.load(scales_x + x_row)
    if WEIGHT_ON_INPUT:
        row_weight = tl.load(topk_weights + slot).to(tl.float32)
    channel = expert.to(tl.int64) * I
    if LAYOUT == "concatenated":
        gate_channel, up_channel = channel * 2 + rn, channel * 2 + I + rn
    elif LAYOUT == "interleaved":
        gate_channel, up_channel = (channel + rn) * 2, (channel + rn) * 2 + 1
    else:
        gate_channel, up_channel = channel + rn, channel + rn
    g = scaled(
        gate, scales_w13, bias_w13, gate_channel, in_columns, row_scale, row_weight,
        SWAP, QUANTISED, WEIGHT_ON_INPUT, BIAS,
    )  # fmt: skip
    u = g
    if GATED:
        u = scaled(
            up, scales_w13, bias_w13, up_channel, in_columns, row_scale, row_weight,
            SWAP, QUANTISED, WEIGHT_ON_INPUT, BIAS,
        )  # fmt: skip
    value = activate(g, u, slope, bound, ACTIVATION, GATED, CLAMPED, NVIDIA).to(h.dtype.element_ty)
    live = on_rows(in_rows, SWAP) & on_columns(in_columns, SWAP)
    at = on_rows(rm.to(tl.int64) * I, SWAP) + on_columns(rn, SWAP)
    tl.store(h + at, value, mask=live)
    if GROUPS > 0:
        # Non-negative floats compare like their bits, and NaN is above all of them: it survives the maximum.
        bits = tl.where(live, tl.abs(value.to(tl.float32)), 0.0).to(tl.int32, bitcast=True)
        largest = tl.max(bits, 0 if SWAP else 1)
        tl.atomic_max(absmax + rm * GROUPS + n_tile * BN // GROUP, largest, mask=in_rows, sem="relaxed")


@triton.jit
def down_tile(
    h,  # (R, I), row stride stride_h: gate_up_tile's; with REQUANTIZE "done" its values, a descriptor or pointer
    absmax,  # (R, GROUPS) int32
    scales_h,  # (E,) float32
    w2,  # (E, H, I): descriptor of [BN, BK] or pointer
    scales_w2,  # (E, H) float32
    bias_w2,  # (E, H)
    y,  # (R, H), written, by slot; with FINAL (T, H)
    order,  # (R,) int32: row -> slot
    topk_weights,  # (R,)
    expert, row, end, n_tile, H, I, stride_h,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr,
    PROMOTE: tl.constexpr, QMAX: tl.constexpr, DIRECT: tl.constexpr, REQUANTIZE: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, FINAL: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """y[slots, columns] = h W2ᵀ, h quantised as it is loaded; with FINAL (one expert per token) times its weight."""
    QUANTISED: tl.constexpr = QMAX > 0
    BY_GROUP: tl.constexpr = REQUANTIZE == "group128"
    SUM: tl.constexpr = tl.float32 if BY_GROUP else ACC
    if SWAP:
        acc = tl.zeros((BN, BM), dtype=SUM)
    else:
        acc = tl.zeros((BM, BN), dtype=SUM)
    rm, rk = row + tl.arange(0, BM), tl.arange(0, BK)
    rn = n_tile * BN + tl.arange(0, BN)
    in_rows, in_columns = rm < end, rn < H
    safe = tl.where(in_rows, rm, row)
    inverse = 0.0
    row_scale = 0.0
    if REQUANTIZE == "static":
        row_scale = tl.load(scales_h + expert)
        inverse = tl.where(row_scale > 0, tl.div_rn(1.0, row_scale), 0.0)
        row_scale = tl.where(in_rows, row_scale, 0.0)
        inverse = tl.where(in_rows, inverse, 0.0)
    elif QUANTISED and not BY_GROUP:
        # Volatile: other programs have just written it.
        largest = tl.load(absmax + safe, volatile=True).to(tl.float32, bitcast=True)
        inverse, row_scale = scales_of(largest, QMAX)
    rows = expert.to(tl.int64) * H + tl.where(in_columns, rn, 0)
    w_row = expert * H + n_tile * BN
    for start in tl.range(0, I, BK, num_stages=STAGES):
        k = start + rk
        if REQUANTIZE == "done" and TMA:
            a = h.load([row, start])
        elif EVEN_K:
            a = tl.load(h + safe.to(tl.int64)[:, None] * stride_h + k[None, :])
        else:
            a = tl.load(h + safe.to(tl.int64)[:, None] * stride_h + k[None, :], mask=(k < I)[None, :], other=0.0)
        if BY_GROUP:
            bits = tl.load(absmax + safe * GROUPS + start // GROUP, volatile=True)
            group_inverse, group_scale = scales_of(bits.to(tl.float32, bitcast=True), QMAX)
            a = round_to(a.to(tl.float32) * group_inverse[:, None], QMAX, TYPE)
        elif QUANTISED and REQUANTIZE != "done":
            a = round_to(a.to(tl.float32) * tl.expand_dims(inverse, 1), QMAX, TYPE)
        b = load_weights(w2, w_row, rows, start, rk, I - start, I, TMA, EVEN_K)
        if BY_GROUP:
            zero = tl.zeros(acc.shape, dtype=ACC)
            acc += multiply(a, b, zero, SWAP, ACC, PROMOTE).to(tl.float32) * on_rows(group_scale, SWAP)
        else:
            acc = multiply(a, b, acc, SWAP, ACC, PROMOTE)

    if DIRECT:
        slot = safe
    else:
        slot = tl.load(order + safe)
    if BY_GROUP:
        row_scale = tl.where(in_rows, 1.0, 0.0)
    value = scaled(
        acc, scales_w2, bias_w2, expert.to(tl.int64) * H + rn, in_columns, row_scale, row_scale,
        SWAP, QUANTISED, False, BIAS,
    )  # fmt: skip
    if FINAL and not WEIGHT_ON_INPUT:
        if y.dtype.element_ty == tl.bfloat16:
            value = value.to(tl.bfloat16).to(tl.float32)  # rounded once per slot, as where a sum over slots follows
        value = value * on_rows(tl.load(topk_weights + slot).to(tl.float32), SWAP)
    at = on_rows(slot.to(tl.int64) * H, SWAP) + on_columns(rn, SWAP)
    live = on_rows(in_rows, SWAP) & on_columns(in_columns, SWAP)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=live)
