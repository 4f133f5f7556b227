"""The public functions: normalise the arguments, make one operator call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowgmm import ops, ops_layer, replay
from lowgmm.formats import FLOATS, QuantTensor, get_format
from lowgmm.plan import LayerConfig
from lowgmm.routing import Routing
from lowgmm.shapes import DtypeError, ShapeError, UnsupportedError, check_no_overlap
from lowgmm.tile_config import TileConfig
from lowgmm.validate import check_sizes


def gmm(
    input: Tensor,
    weights: Tensor | QuantTensor,
    scales_x: Tensor | None = None,
    scales_w: Tensor | None = None,
    expert_offsets: Tensor | None = None,
    expert_sizes: Tensor | None = None,
    output: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    clip: float | None = None,
    config: TileConfig | str | None = None,
    fast_accum: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Grouped matrix multiplication of expert-sorted rows by their experts' weights.

    ``Y[m, n] = (Σ_k X[m, k] · W[e, n, k]) · scales_w[e, n] · scales_x[m] + bias[e, n]`` for the rows
    ``offsets[e] <= m < offsets[e + 1]`` of expert e. Rows behind the last expert are exactly zero.

    Precision: INT8 products are summed exactly in INT32 over all of K (at most 131 071), then converted once;
    grouped int4 products are summed so within a group, and the groups' sums, each times its scale, in FP32 in K order.
    FP8 and 16-bit products are summed in FP32, on Hopper with FP8 partial sums promoted to FP32 every 128 of K. The two
    scales are applied in the order above, in FP32.

    Args:
        input: [M, K] rows sorted by expert. int8 or float8_e4m3fn with ``scales_x``; or bfloat16, float16, float32:
            multiplied as it is when the weights are of the same dtype, quantised per token by this call when the
            weights are quantised.
        weights: [E, N, K], K contiguous: int8, float8_e4m3fn or the input's own float dtype; or a :class:`QuantTensor`
            of any format, which brings its ``scales_w``. int4 weights take int8 input.
        scales_x: [M] (or [M, 1]) float scale per token; None means 1, or dynamic quantisation of a float input.
        scales_w: [E, N] (or [E, N, 1]) float scale per output channel; None means 1.
        expert_offsets: [E+1] int32, or int64 (which a GPU call converts each time), ``offsets[0] = 0``, not decreasing,
            ``offsets[E] <= M``.
        expert_sizes: [E] rows of each expert. Either is enough; given both, they must agree.
        output: [M, N] tensor to write into and return; must not overlap an operand, offsets and sizes among them.
        bias: [E, N] float, added after the scales.
        out_dtype: dtype of the result; default: ``output``'s, a float input's own, else bfloat16. ``torch.int32``
            returns the raw accumulators of int8 operands (no scales, no bias).
        clip: threshold for outlier tokens when a float input is quantised, see :func:`quantize_tokens`.
        config: a :class:`lowgmm.tile_config.TileConfig` (or its string) to force on a GPU; default: ``tune.pick``'s.
        fast_accum: leave FP8 sums in the matrix unit's accumulator over all of K instead of promoting them every 128.
            Hopper's keeps about 14 bits: sometimes faster, with an error that grows with K (docs/accumulation.md has
            both). No effect elsewhere.
        impl: ``"auto"``, ``"reference"`` (float64 oracle) or ``"triton"``.

    Returns:
        [M, N] on the input's device.

    Raises:
        ShapeError, DtypeError, DeviceError: an argument contradicts another; the message names it, what was expected
        and what came.
        UnsupportedError: an explicit request this machine cannot fulfil.

    On a GPU the contents of offsets and sizes are not read back; set ``LOWGMM_DEBUG=1`` to have them checked. Inference
    only: a backward pass through the result raises.

    >>> import torch, lowgmm
    >>> x, w = torch.randn(6, 64), torch.randn(3, 32, 64)
    >>> y = lowgmm.gmm(x, lowgmm.quantize(w, "int8"), expert_sizes=torch.tensor([1, 0, 5]))
    >>> exact = lowgmm.reference.gmm(x, w, expert_sizes=torch.tensor([1, 0, 5]))
    >>> y.shape, bool((y - exact).norm() / exact.norm() < 0.02)
    (torch.Size([6, 32]), True)
    """
    if isinstance(weights, QuantTensor):
        if scales_w is not None:
            raise ShapeError(
                "gmm: argument 'scales_w' was given, but weights is a QuantTensor, which brings its own: pass None."
            )
        operands, scales_w = weights.operands, weights.scales
    else:
        operands = [weights]
    offsets = _offsets(expert_offsets, expert_sizes, operands[0])
    tile = None if config is None else str(config)
    if output is not None:
        if out_dtype is not None and out_dtype != output.dtype:
            raise ShapeError(f"gmm: out_dtype is {out_dtype}, but output is {output.dtype}: leave out_dtype out.")
        made = offsets is not expert_offsets or expert_sizes is not None  # the operator does not see what was given
        if made and not torch.compiler.is_compiling():
            check_no_overlap("gmm", output, expert_offsets=expert_offsets, expert_sizes=expert_sizes)
        ops.gmm_out(input, operands, scales_x, scales_w, offsets, bias, clip, impl, tile, output, fast_accum)
        if not torch.compiler.is_compiling() and not output.is_inference():
            torch.autograd.graph.increment_version(output)  # or a graph that saved it would not notice
        return output
    if out_dtype is None:
        out_dtype = input.dtype if input.dtype in FLOATS else torch.bfloat16
    y = ops.gmm(input, operands, scales_x, scales_w, offsets, bias, clip, impl, tile, out_dtype, fast_accum)
    return _for_inference(y, "gmm")


class _NoGradient(torch.autograd.Function):
    """The identity, through which no gradient passes: it would be lost without a word otherwise."""

    @staticmethod
    def forward(y: Tensor, op: str) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:  # torch.func wants it apart
        _, ctx.op = inputs

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            f"{ctx.op}: backward() reached its result, but lowgmm computes no gradients. Call it under "
            "torch.no_grad(), or train with another implementation."
        )


def _for_inference(y: Tensor, op: str) -> Tensor:
    if not y.requires_grad or torch.compiler.is_compiling():
        return y
    result: Tensor = _NoGradient.apply(y, op)  # type: ignore[no-untyped-call]
    return result


def _offsets(offsets: Tensor | None, sizes: Tensor | None, weights: Tensor) -> Tensor:
    """[E+1] offsets from whichever was given."""
    for name, given in (("expert_offsets", offsets), ("expert_sizes", sizes)):
        if given is not None and not isinstance(given, Tensor):
            raise DtypeError(
                f"gmm: argument '{name}' is a {type(given).__name__}, expected an int32 tensor on the input's device: "
                "torch.tensor(…, dtype=torch.int32)."
            )
    if sizes is None:
        if offsets is None:
            raise ShapeError("gmm: pass expert_offsets [E+1] or expert_sizes [E].")
    else:
        check_sizes(sizes, offsets, weights)
        if offsets is None:
            # A GPU's kernels take int32. On a CPU the sums are looked at, so they must not have wrapped.
            dtype = torch.int32 if sizes.is_cuda else sizes.dtype
            return torch.nn.functional.pad(sizes.cumsum(0, dtype=dtype), (1, 0))
    if offsets.is_cuda and offsets.dtype == torch.int64 and not replay.debugging():
        return offsets.int()  # as the operator would, which could not be replayed then
    return offsets


def quantize_tokens(x: Tensor, format: str, clip: float | None = None, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Quantise activations, one scale per token.

    ``xq[t, :] = clamp(round(x[t, :] / scale[t]), ±qmax)`` with ``scale[t] = min(max|x[t, :]|, clip) / qmax``.

    Args:
        x: [T, K] bfloat16, float16 or float32.
        format: ``"int8"`` (qmax 127) or ``"fp8"`` (e4m3, qmax 448).
        clip: optional threshold for outlier tokens, in the units of ``x``: larger magnitudes saturate at ``clip``, so
            one extreme value does not take the resolution from the rest of its token.
        impl: as in :func:`gmm`.

    Returns:
        ``(xq, scales)``: [T, K] in the format's dtype, [T] float32. Round half to even; a zero token has scale 0.

    Raises:
        UnsupportedError: unknown format. DtypeError: ``x`` is not floating point. ShapeError: ``x`` is not 2-D or clip
        <= 0.

    >>> import torch
    >>> xq, scales = quantize_tokens(torch.tensor([[0.5, -127.0, 2.5, 1.5]]), "int8")
    >>> xq.tolist(), scales.tolist()
    ([[0, -127, 2, 2]], [1.0])
    """
    ops.refuse_tangents("quantize_tokens", x)
    xq, scales = torch.ops.lowgmm.quantize_tokens(x, get_format(format).name, clip, impl)
    return _for_inference(xq, "quantize_tokens"), _for_inference(scales, "quantize_tokens")


def route(
    topk_ids: Tensor | None = None,
    num_experts: int | None = None,
    *,
    logits: Tensor | None = None,
    top_k: int | None = None,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    impl: str = "auto",
) -> Routing:
    """Choose experts from logits, or take the ids that are given, and sort the (token, expert) pairs by expert.

    With logits: ``score = softmax(logits)`` or ``sigmoid(logits)``; the ``top_k`` experts with the highest ``score +
    bias`` are chosen, of equal ones the lower id first; their weights are their scores, divided by the sum of the
    chosen if ``renormalize``, times ``scale``. With ``num_groups > 1`` only the ``topk_groups`` groups of experts count
    whose two best experts sum highest. (DeepSeek-V3: sigmoid, bias, 8 groups of which 4, scale 2.5.)

    Args:
        topk_ids: [T, A] int32 or int64 expert ids. Ids outside ``[0, num_experts)`` contribute nothing.
        num_experts: E; given with ``topk_ids``, and E of the logits otherwise.
        logits: [T, E] bfloat16, float16 or float32, instead of ``topk_ids``; the scores are float32.
        top_k: A, with logits.
        bias: [E] float, added for the choice only.
        impl: as in :func:`gmm`.

    Returns:
        A :class:`Routing`; with logits it holds ``topk_ids`` and ``topk_weights``, which :func:`moe_ffn` takes. Nothing
        is read back to the host.

    Raises:
        ShapeError: a shape, ``num_experts``, ``top_k`` or the groups. DtypeError: ids are not integers.
        UnsupportedError: unknown scoring.

    >>> import torch
    >>> r = route(torch.tensor([[2, 0], [0, 2], [2, -1]]), num_experts=3)
    >>> r.sizes.tolist(), r.offsets.tolist(), r.tokens.tolist()
    ([2, 0, 3], [0, 2, 2, 5], [0, 1, 0, 1, 2, 2])
    >>> r = route(logits=torch.tensor([[0.0, 2.0, 1.0, 2.0]]), top_k=2)
    >>> r.topk_ids.tolist(), r.topk_weights.tolist()
    ([[1, 3]], [[0.5, 0.5]])
    """
    weights = None
    if logits is not None:
        if topk_ids is not None or num_experts is not None or top_k is None:
            raise ShapeError("route: pass topk_ids and num_experts, or logits and top_k.")
        ops.refuse_tangents("route", logits, bias)
        topk_ids, weights = torch.ops.lowgmm.select_experts(
            logits, bias, top_k, scoring, renormalize, num_groups, topk_groups, scale, impl
        )
        weights = _for_inference(weights, "route")
        num_experts = logits.shape[1]
    elif topk_ids is None or num_experts is None or top_k is not None or bias is not None:
        raise ShapeError("route: pass topk_ids and num_experts, or logits and top_k.")
    elif (scoring, renormalize, num_groups, topk_groups, scale) != ("softmax", True, 1, 1, 1.0):
        raise ShapeError("route: scoring, renormalize, the groups and scale choose experts from logits, not given ids.")
    order, inverse, offsets = torch.ops.lowgmm.route(topk_ids, num_experts, impl)
    chosen = None if weights is None else topk_ids
    return Routing(order, inverse, offsets.diff(), offsets, topk_ids.shape[1], chosen, weights)


def moe_ffn(
    hidden: Tensor,
    w13: Tensor | QuantTensor,
    w2: Tensor | QuantTensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    bias_w13: Tensor | None = None,
    bias_w2: Tensor | None = None,
    activation: str = "silu",
    gate_up: str = "concatenated",
    alpha: float | None = None,
    limit: float | None = None,
    weight_on_input: bool = False,
    requantize: str = "token",
    scales_h: Tensor | None = None,
    clip: float | None = None,
    impl: str = "auto",
    config: LayerConfig | str | None = None,
) -> Tensor:
    """The expert layer: route, gather, gate and up GMM, activation, down GMM, weighted sum back in token order.

    ``out[t] = Σ_a topk_weights[t, a] · (act(x W13ₑ[:I]ᵀ) · (x W13ₑ[I:]ᵀ)) W2ₑᵀ`` with ``x = hidden[t]``, ``e =
    topk_ids[t, a]``; biases are added to each product.

    With quantised weights, each token is quantised before it is gathered (once, however many experts it visits) and the
    intermediate h is quantised again. h and the experts' outputs are bfloat16 for a bfloat16 ``hidden`` and float32
    otherwise: a float16 intermediate could overflow. The sum over experts is float32, in slot order, so the result has
    the same bits every time, and a token's does not depend on the other tokens of a call that runs the same kernels.

    Args:
        hidden: [T, H] bfloat16, float16 or float32.
        w13: [E, 2I, H]; a tensor of ``hidden``'s dtype or a :class:`QuantTensor`.
        w2: [E, H, I], likewise.
        topk_ids: [T, A] int32 or int64; ids outside [0, E) contribute nothing. A repeated id counts once per slot.
        topk_weights: [T, A] float.
        bias_w13: [E, 2I] float, in the order of w13's rows.
        bias_w2: [E, H] float.
        activation: ``"silu"`` (SwiGLU), ``"gelu"`` (GeGLU, exact), ``"relu2"`` (squared ReLU), ``"none"``, each of the
            gate; or ``"swiglu_oai"``: ``gate · sigmoid(alpha · gate) · (up + 1)``, clamped.
        gate_up: rows of w13: ``"concatenated"`` (gate rows first), ``"interleaved"`` (gate and up rows in turns) or
            ``"none"``: w13 is [E, I, H] and h is ``act(x W13ₑᵀ)``.
        alpha: of swiglu_oai; default 1.702.
        limit: clamp the gate to at most this and up to ±this; default 7 for swiglu_oai, else no clamp.
        weight_on_input: apply ``topk_weights`` to the tokens (``x W13ₑᵀ`` is multiplied) instead of the outputs.
        requantize: scales of the quantised h: ``"token"`` (one per row), ``"group128"`` (one per row and 128 columns)
            or ``"static"`` (``scales_h``, one per expert; larger values saturate).
        scales_h: [E] float, for ``requantize="static"``.
        clip: outlier threshold when ``hidden`` is quantised, see :func:`quantize_tokens`.
        impl: as in :func:`gmm`.
        config: a :class:`lowgmm.plan.LayerConfig` (or its string) to force on a GPU; default: chosen by size.

    Returns:
        [T, H] in ``hidden``'s dtype. A token without an expert gives exact zeros.

    Raises:
        As :func:`gmm` and :func:`route`.

    >>> import torch, lowgmm
    >>> w13, w2 = torch.randn(4, 2 * 16, 8), torch.randn(4, 8, 16)
    >>> ids, weights = torch.tensor([[0, 3], [2, -1]]), torch.tensor([[0.7, 0.3], [1.0, 0.0]])
    >>> x = torch.randn(2, 8)
    >>> y = lowgmm.moe_ffn(x, w13, w2, ids, weights)
    >>> torch.allclose(y.double(), lowgmm.reference.moe_ffn(x, w13, w2, ids, weights), rtol=1e-4, atol=1e-4)
    True
    """
    (up, scales_w13), (down, scales_w2) = (
        (w.operands, w.scales) if isinstance(w, QuantTensor) else ([w], None) for w in (w13, w2)
    )
    tiles = None if config is None else str(config)
    y = ops_layer.moe_ffn(
        hidden, up, scales_w13, bias_w13, down, scales_w2, bias_w2, topk_ids, topk_weights, scales_h,
        activation, gate_up, alpha, limit, weight_on_input, requantize, clip, impl, tiles,
    )  # fmt: skip
    return _for_inference(y, "moe_ffn")
