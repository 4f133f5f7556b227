"""From logits to experts, and the kernels that sort slots: held against the definitions in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import routing
from lowgmm.routing import Router, select_experts
from lowgmm.shapes import DtypeError, ShapeError, UnsupportedError
from test_cases_support import BACKENDS, KERNELS, Backend, kernels_only
from test_routing import ROUTINGS, random_ids

E = 24
ROUTERS: dict[str, dict[str, Any]] = {
    "Mixtral": {"top_k": 2},
    "Qwen2-MoE": {"top_k": 4, "renormalize": False},
    "Llama-4": {"top_k": 1, "scoring": "sigmoid", "renormalize": False},
    "bias": {"top_k": 3, "scoring": "sigmoid", "bias": True},
    "DeepSeek-V3": {
        "top_k": 4, "scoring": "sigmoid", "bias": True, "num_groups": 6, "topk_groups": 3, "scale": 2.5,
    },
    "groups of one expert": {"top_k": 3, "num_groups": E, "topk_groups": 5},
    "every expert": {"top_k": E},
}  # fmt: skip


def one_token(logits: Tensor, bias: Tensor | None, options: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The router in float64, spelt out."""
    z = logits.double()
    score = [float(v) for v in (z.softmax(0) if options.get("scoring", "softmax") == "softmax" else z.sigmoid())]
    choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(score)]
    groups = options.get("num_groups", 1)
    size = E // groups
    best = {g: sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(groups)}
    kept = sorted(best, key=lambda g: -best[g])[: options.get("topk_groups", 1)]
    eligible = [e for e in range(E) if e // size in kept]
    ids = sorted(eligible, key=lambda e: -choice[e])[: options["top_k"]]
    total = sum(score[e] for e in ids) if options.get("renormalize", True) else 1.0
    return ids, [score[e] / total * options.get("scale", 1.0) for e in ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_router(backend: Backend, name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    options = dict(ROUTERS[name])
    # A permutation, so that no two scores of a token are close: rounding cannot decide.
    logits = torch.stack([torch.randperm(E, generator=generator) for _ in range(5)]).div(4).sub(3).to(dtype)
    bias = torch.randn(E, generator=generator) / 10 if options.pop("bias", False) else None
    on = backend.device
    r = lowgmm.route(
        logits=logits.to(on), bias=None if bias is None else bias.to(on), impl=backend.impl, **options
    )  # fmt: skip
    assert r.topk_ids is not None
    assert r.topk_weights is not None
    assert (r.topk_ids.dtype, r.topk_weights.dtype, r.top_k) == (torch.int32, torch.float32, options["top_k"])
    for t in range(len(logits)):
        ids, weights = one_token(logits[t], bias, options)
        assert r.topk_ids[t].tolist() == ids
        assert torch.allclose(r.topk_weights[t].cpu().double(), torch.tensor(weights).double(), rtol=1e-5)
    given = lowgmm.route(r.topk_ids, E, impl=backend.impl)
    assert torch.equal(r.order, given.order)
    assert torch.equal(r.offsets, given.offsets)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_scores_the_lower_id_comes_first(backend: Backend) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 1.0], [0.0] * 6], device=backend.device)
    r = lowgmm.route(logits=logits, top_k=4, impl=backend.impl)
    assert r.topk_ids is not None
    assert r.topk_ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_bias_of_any_layout(backend: Backend, generator: torch.Generator) -> None:
    logits, bias = (torch.randn(n, generator=generator).to(backend.device) for n in ((5, E), (E,)))
    expected = lowgmm.route(logits=logits, bias=bias, top_k=3, impl=backend.impl)
    table = torch.zeros(E, 3, device=backend.device)
    table[:, 1] = bias
    r = lowgmm.route(logits=logits.T.contiguous().T, bias=table[:, 1], top_k=3, impl=backend.impl)
    assert r.topk_ids is not None
    assert expected.topk_ids is not None
    assert torch.equal(r.topk_ids, expected.topk_ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_are_valid_whatever_the_logits(backend: Backend) -> None:
    """NaN and infinities give weights that say so, but never an id twice or outside the experts."""
    logits = torch.zeros(4, 6)
    logits[0] = float("nan")
    logits[1, 2] = float("nan")
    logits[2] = float("-inf")
    logits[3, 4] = float("inf")
    for scoring in routing.SCORINGS:
        r = lowgmm.route(logits=logits.to(backend.device), top_k=5, scoring=scoring, impl=backend.impl)
        assert r.topk_ids is not None
        for ids in r.topk_ids.tolist():
            assert sorted(set(ids)) == sorted(ids)
            assert all(0 <= e < 6 for e in ids)


@kernels_only
@pytest.mark.parametrize(("T", "A", "E"), ROUTINGS)
@pytest.mark.parametrize("spread", [0, 3])
def test_sort_kernel(T: int, A: int, E: int, spread: int) -> None:
    ids = random_ids(T, A, E, spread, torch.int32)
    made, defined = lowgmm.route(ids.to(KERNELS.device), E, impl="triton"), routing.route(ids, E)
    for field in ("order", "inverse", "sizes", "offsets"):
        assert torch.equal(getattr(made, field).cpu(), getattr(defined, field))


@kernels_only
@pytest.mark.parametrize("rows", [127, 128, 129, 1500, 4097])
def test_sort_kernel_in_several_blocks(rows: int) -> None:
    ids = random_ids(rows, 1, 3, 1, torch.int64)
    made, defined = lowgmm.route(ids.to(KERNELS.device), 3, impl="triton"), routing.route(ids, 3)
    assert torch.equal(made.order.cpu(), defined.order)
    assert torch.equal(made.inverse.cpu(), defined.inverse)


def test_opcheck(device: torch.device) -> None:
    torch.library.opcheck(torch.ops.lowgmm.route.default, (torch.tensor([[0, 2], [1, -1]], device=device), 3, "auto"))
    args = (torch.randn(3, 8, device=device), None, 2, "softmax", True, 1, 1, 1.0, "auto")
    torch.library.opcheck(torch.ops.lowgmm.select_experts.default, args)


IDS = torch.zeros(2, 2, dtype=torch.int32)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({}, ShapeError, "topk_ids and num_experts, or logits"),
    "top_k beside ids": ({"topk_ids": IDS, "num_experts": 4, "top_k": 2}, ShapeError, "or logits and top_k"),
    "bias beside ids": ({"topk_ids": IDS, "num_experts": 4, "bias": torch.zeros(4)}, ShapeError, "or logits and top_k"),
    "more experts than the kernel sorts": (
        {"topk_ids": IDS, "num_experts": 4095, "impl": "triton"}, UnsupportedError, "more than the 4094"
    ),
    "no top_k": ({"logits": torch.zeros(2, 4)}, ShapeError, "topk_ids and num_experts, or logits"),
    "too many": ({"logits": torch.zeros(2, 4), "top_k": 5}, ShapeError, "top_k is 5, expected 1 to 4"),
    "too many for the groups": (
        {"logits": torch.zeros(2, 4), "top_k": 3, "num_groups": 2}, ShapeError, "top_k is 3, expected 1 to 2"
    ),
    "groups": ({"logits": torch.zeros(2, 4), "top_k": 1, "num_groups": 3}, ShapeError, "must divide E=4"),
    "scoring": ({"logits": torch.zeros(2, 4), "top_k": 1, "scoring": "tanh"}, UnsupportedError, "scoring 'tanh'"),
    "bias": ({"logits": torch.zeros(2, 4), "top_k": 1, "bias": torch.zeros(3)}, ShapeError, "expected \\[E=4\\]"),
    "integers": ({"logits": torch.zeros(2, 4).int(), "top_k": 1}, DtypeError, "logits"),
    "one row": ({"logits": torch.zeros(4), "top_k": 1}, ShapeError, "expected \\[T, E\\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        lowgmm.route(**options)


def test_the_definition_takes_groups_by_their_two_best() -> None:
    """One outstanding expert does not carry a group; two good ones do."""
    logits = torch.tensor([[5.0, -9.0, 2.0, 2.0]])
    ids, _ = select_experts(logits, Router(2, "sigmoid", num_groups=2))
    assert ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("choice", [{"scoring": "sigmoid"}, {"renormalize": False}, {"scale": 2.0}, {"num_groups": 2}])
def test_choices_for_logits_are_not_ignored_beside_ids(choice: dict[str, object]) -> None:
    with pytest.raises(ShapeError, match="choose experts from logits"):
        lowgmm.route(torch.tensor([[0, 1]]), 4, **choice)  # type: ignore[arg-type]
