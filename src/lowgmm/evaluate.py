"""Accuracy audit: one causal language model, several experts implementations, the same text.

This measures *format error*: how far a quantised model is from the unquantised one. (How far a kernel is from exact
arithmetic on the same quantised numbers is another question; the tests answer it with ``lowgmm.reference``.)

Definitions, for T tokens, L mixture-of-experts layers and A experts per token:

    perplexity      exp(mean over predicted tokens of -log p(token))
    sets matched    share of the T·L (token, layer) pairs whose chosen expert set equals the reference's
    experts matched share of the T·L·A chosen experts that the reference chose too
    cosine          of the logits of one token over the vocabulary; mean over the tokens, and the worst token
    top-1           share of tokens whose most likely next token is the reference's
    near-tie        a (token, layer) at which the reference itself was nearly undecided: see :data:`NEAR_TIE`

Both models read the same text, so what is compared is every decision under equal conditions up to the layers in front
of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowgmm import dequantize, gmm, quantize, quantize_tokens, route
from lowgmm.formats import get_format
from lowgmm.integrations.transformers import check_supported, dispatched
from lowgmm.shapes import ShapeError, UnsupportedError

NEAR_TIE = 0.05
"""A near-tie: the best expert left out had at least exp(-0.05) = 95 % of the probability of the last one taken.

The gap between two router logits is the log of the ratio of their probabilities, so the definition does not depend on
whether a model hands out logits or probabilities, nor on how many experts it has."""

NEAR_TIE_TEXT = f"reference gap between rank k and k+1 below {NEAR_TIE} in router logits (95 % of the probability)"


@dataclass(frozen=True)
class Fidelity:
    """How one implementation compares with the reference. Shares are in [0, 1]."""

    name: str
    perplexity: float
    perplexity_change: float
    """perplexity / reference's - 1; 0.001 is +0.1 %."""
    experts_matched: float
    sets_matched: float
    cosine_mean: float
    cosine_worst: float
    top1_agreement: float
    near_ties_among_mismatches: float
    """Of the (token, layer) pairs whose sets differ, the share at which the reference was nearly undecided. NaN: none
    differ."""
    mismatches: int
    """(token, layer) pairs whose sets differ."""


@dataclass(frozen=True)
class Audit:
    """The audit of a model: the reference's own figures, and one :class:`Fidelity` per implementation."""

    reference: str
    perplexity: float
    tokens: int
    layers: int
    top_k: int
    near_ties: float
    """Share of near-ties among *all* (token, layer) pairs: what the mismatches' share is to be compared with."""
    load: list[list[float]]
    """[L][E]: share of the tokens that chose the expert, in the reference. Even load is A / E."""
    results: list[Fidelity] = field(default_factory=list)


def route_match(chosen: Tensor, reference: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Compare chosen experts [..., A] with the reference's, order ignored.

    Returns:
        (shared, same): how many of the A experts both chose [...], and whether the sets are equal [...].

    >>> shared, same = route_match(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 0], [3, 0]]), num_experts=4)
    >>> shared.tolist(), same.tolist()
    ([2, 1], [True, False])
    """
    if chosen.shape != reference.shape:
        raise ShapeError(
            f"route_match: chosen is {list(chosen.shape)}, reference {list(reference.shape)}; expected equal shapes."
        )
    masks = [
        torch.zeros(*t.shape[:-1], num_experts, dtype=torch.bool, device=t.device).scatter_(-1, t, True)
        for t in (chosen, reference)
    ]
    shared = (masks[0] & masks[1]).sum(-1)
    return shared, (masks[0] == masks[1]).all(-1)


def router_gap(router: Tensor, top_k: int) -> Tensor:
    """Logit gap between rank ``top_k`` and ``top_k + 1``: [..., E] router logits (or their softmax) -> [...].

    Infinite when every expert is chosen (E == top_k): there is nothing to tie with.

    >>> round(router_gap(torch.tensor([3.0, 1.0, 0.9]), top_k=2).item(), 3)
    0.1
    """
    if router.shape[-1] <= top_k:
        return torch.full(router.shape[:-1], math.inf, device=router.device)
    router = router.float()
    # Models differ in what they hand out. A softmax is recognised by its sum; its log has the logits' gaps.
    if bool((router >= 0).all()) and bool(((router.sum(-1) - 1).abs() < 1e-2).all()):
        router = router.log()
    top = router.topk(top_k + 1, -1).values
    return top[..., top_k - 1] - top[..., top_k]


@dataclass
class _Sums:
    """Running sums of one implementation; nothing per token is kept."""

    nll: float = 0.0
    shared: int = 0
    same: int = 0
    ties: int = 0
    cosine: float = 0.0
    worst: float = math.inf
    top1: int = 0


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    before = model.config._experts_implementation
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextmanager
def _watched(model: Any) -> Iterator[list[Tensor]]:
    """A list of the expert ids [T, A] that each experts module is called with."""
    found: list[Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, args: found.append(args[1])) for m in dispatched(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def audit(
    model: Any,
    windows: Tensor,
    implementations: Sequence[str],
    *,
    reference: str = "eager",
    batch: int = 8,
    progress: Callable[[int], object] | None = None,
) -> Audit:
    """Compare experts implementations of ``model`` with ``reference`` on ``windows`` of text.

    Every batch is run by the reference and then by each implementation, so only one batch's logits are ever alive.

    Args:
        model: a transformers causal LM in eval mode whose routers choose the top-k of a softmax (Qwen-MoE, Mixtral,
            OLMoE ...) and that can return router logits. Grouped or biased routing (DeepSeek, MiniMax-M2) does not
            follow from them and is refused.
        windows: [W, L] token ids on the model's device; each window is read by itself.
        implementations: names registered in transformers' experts interface.
        reference: the name to compare with; ``"eager"`` is the model's own code.
        batch: windows per forward pass.
        progress: called with the number of windows done, once per forward pass.

    Raises:
        ShapeError: ``windows`` is not [W, L] with W >= 1, L >= 2. UnsupportedError: no router logits from this model,
            others than it chooses its experts by, or experts that it runs itself, whatever the implementation's name.
    """
    if windows.dim() != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ShapeError(f"audit: windows has shape {list(windows.shape)}, expected [W, L] with W >= 1 and L >= 2.")
    top_k = _top_k(model)
    sums = [_Sums() for _ in implementations]
    load: Tensor | None = None
    near_ties, nll = 0, 0.0
    with _restored(model):
        for ids in windows.split(batch):
            with _watched(model) as taken:
                logits, router = _forward(model, ids, reference)
            if (found := len(dispatched(model))) < len(router):
                raise UnsupportedError(
                    f"audit: {type(model).__name__} has {len(router)} mixture-of-experts layers, but transformers runs "
                    f"the experts of {found} of them by the name of an implementation: the others would be compared "
                    "with themselves."
                )
            chosen, near = router.topk(top_k, -1).indices, router_gap(router, top_k) < NEAR_TIE
            num_experts = router.shape[-1]
            if bool((~route_match(torch.stack(taken).long(), chosen, num_experts)[1] & ~near).any()):
                raise UnsupportedError(
                    f"audit: {type(model).__name__} chooses other experts than the top {top_k} of its router logits "
                    "(a bias, groups?), so they do not tell which. Supported: routers that take the top-k of a softmax "
                    "(Qwen-MoE, Mixtral, OLMoE)."
                )
            counts = torch.stack([c.flatten().bincount(minlength=num_experts) for c in chosen]).double()
            load = counts if load is None else load + counts
            near_ties += int(near.sum())
            nll += _nll(logits, ids)
            for name, s in zip(implementations, sums, strict=True):
                other, other_router = _forward(model, ids, name)
                _add(s, other, logits, ids)
                shared, same = route_match(other_router.topk(top_k, -1).indices, chosen, num_experts)
                s.shared += int(shared.sum())
                s.same += int(same.sum())
                s.ties += int((near & ~same).sum())
                if progress is not None:
                    progress(len(ids))
            if progress is not None:
                progress(len(ids))
    assert load is not None
    tokens, layers = windows.numel(), load.shape[0]
    predicted = tokens - windows.shape[0]
    base = math.exp(nll / predicted)
    results = [
        _fidelity(name, s, base, tokens, layers, top_k, predicted)
        for name, s in zip(implementations, sums, strict=True)
    ]
    return Audit(
        reference, base, tokens, layers, top_k, near_ties / (tokens * layers), (load / tokens).tolist(), results
    )


def _top_k(model: Any) -> int:
    config = model.config
    for name in ("n_group", "topk_group"):
        if (getattr(config, name, None) or 1) > 1:
            raise UnsupportedError(
                f"audit: config.{name} is {getattr(config, name)}; grouped routing does not follow from router logits. "
                f"Supported: routers that take the top-k of a softmax (Qwen-MoE, Mixtral, OLMoE)."
            )
    top_k = getattr(config, "num_experts_per_tok", None)
    if not isinstance(top_k, int):
        raise UnsupportedError(
            f"audit: config.num_experts_per_tok is {top_k!r}, expected an integer; "
            f"is {type(model).__name__} a mixture of experts?"
        )
    return top_k


def _forward(model: Any, ids: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and router outputs [L, T, E] in float32; T counts the tokens of the batch."""
    model.set_experts_implementation(implementation)
    out = model(input_ids=ids, output_router_logits=True, use_cache=False)
    router = getattr(out, "router_logits", None)
    router = [r for r in router or () if r is not None and r.dim() == 2]
    if not router:
        raise UnsupportedError(
            f"audit: {type(model).__name__} returned no router logits, expected one [T, E] tensor per layer "
            f"(output_router_logits=True)."
        )
    return out.logits.flatten(0, 1).float(), torch.stack([r.float() for r in router])


def _nll(logits: Tensor, ids: Tensor) -> float:
    shifted = logits.view(*ids.shape, -1)[:, :-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(shifted, ids[:, 1:].flatten(), reduction="none").double().sum())


def _add(sums: _Sums, logits: Tensor, reference: Tensor, ids: Tensor) -> None:
    sums.nll += _nll(logits, ids)
    cosine = torch.nn.functional.cosine_similarity(logits, reference, dim=-1).double()
    # min() would drop a NaN silently on some devices; a model that produces one must not pass an audit.
    worst = float(cosine.min()) if bool(cosine.isfinite().all()) else math.nan
    sums.cosine += float(cosine.sum())
    sums.worst = worst if math.isnan(worst) else min(sums.worst, worst)
    sums.top1 += int((logits.argmax(-1) == reference.argmax(-1)).sum())


def _fidelity(name: str, s: _Sums, base: float, tokens: int, layers: int, top_k: int, predicted: int) -> Fidelity:
    pairs = tokens * layers
    perplexity = math.exp(min(s.nll / predicted, 700.0)) if not math.isnan(s.nll) else math.nan
    return Fidelity(
        name=name,
        perplexity=perplexity,
        perplexity_change=perplexity / base - 1,
        experts_matched=s.shared / (pairs * top_k),
        sets_matched=s.same / pairs,
        cosine_mean=s.cosine / tokens,
        cosine_worst=s.worst,
        top1_agreement=s.top1 / tokens,
        near_ties_among_mismatches=s.ties / (pairs - s.same) if pairs > s.same else math.nan,
        mismatches=pairs - s.same,
    )


SOURCES = ("weights", "activations")
"""What a quantised expert layer rounds."""


def error_by_source(
    model: Any,
    windows: Tensor,
    format: str,
    *,
    reference: str = "eager",
    batch: int = 8,
    progress: Callable[[int], object] | None = None,
) -> Audit:
    """The audit with one side rounded at a time: only the experts' weights, then only their activations, to ``format``.

    Everything else is computed in FP32, so the two results say which side costs the accuracy. Arguments as for
    :func:`audit`, whose results are named ``lowgmm_<format>_weights_only`` and ``lowgmm_<format>_activations_only``.

    Raises:
        UnsupportedError: unknown format. UnsupportedExpertsError: experts that lowgmm does not compute.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    names = []
    for source in SOURCES:
        names.append(f"lowgmm_{get_format(format).name}_{source}_only")
        ALL_EXPERTS_FUNCTIONS.register(names[-1], _one_sided(format, source))
    return audit(model, windows, names, reference=reference, batch=batch, progress=progress)


def _one_sided(format: str, source: str) -> Callable[..., Tensor]:
    """An experts function in FP32 that rounds the weights, or every GEMM's input, to ``format`` and back."""

    def weights(w: Tensor) -> Tensor:
        return dequantize(quantize(w.detach(), format)) if source == "weights" else w.detach().float()

    def tokens(x: Tensor) -> Tensor:
        if source == "weights":
            return x
        values, scales = quantize_tokens(x, format)
        return values.float() * scales.view(-1, 1)

    def forward(module: Any, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        check_supported(module)
        r = route(topk_ids, module.num_experts)
        x = tokens(hidden.float())[r.tokens]
        gate, up = gmm(x, weights(module.gate_up_proj), expert_offsets=r.offsets).chunk(2, -1)
        h = tokens(module.act_fn(gate) * up)
        y = gmm(h, weights(module.down_proj), expert_offsets=r.offsets)[r.inverse].view(*topk_ids.shape, -1)
        return (y * topk_weights.float().unsqueeze(-1)).sum(1).to(hidden.dtype)

    return forward
