"""The audit: its counts on hand-made numbers, and its verdict on models that are right, slightly off, and broken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowgmm import evaluate
from lowgmm.shapes import ShapeError, UnsupportedError

pytest.importorskip("transformers")

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lowgmm.integrations.transformers import register

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def test_route_match_ignores_order_and_counts_experts():
    reference = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    chosen = torch.tensor([[1, 0], [2, 0], [6, 7], [6, 7]])
    shared, same = evaluate.route_match(chosen, reference, EXPERTS)
    assert shared.tolist() == [2, 1, 0, 2]
    assert same.tolist() == [True, False, False, True]
    with pytest.raises(ShapeError, match=r"chosen is \[4, 2\], reference \[4, 1\]"):
        evaluate.route_match(chosen, reference[:, :1], EXPERTS)


def test_router_gap_is_the_same_from_logits_and_from_probabilities():
    logits = torch.tensor([[4.0, 1.0, 3.5, -2.0], [0.0, 0.01, 5.0, 0.02]])
    expected = torch.tensor([2.5, 0.01])
    assert torch.allclose(evaluate.router_gap(logits, 2), expected, atol=1e-5)
    assert torch.allclose(evaluate.router_gap(logits.softmax(-1), 2), expected, atol=1e-4)
    assert evaluate.router_gap(logits, 4).isinf().all()


class Dispatched(torch.nn.Module):
    """What transformers leaves in experts that it runs by an implementation's name."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        self.is_concatenated = True

    def forward(self, hidden: Tensor, topk_ids: Tensor) -> None:
        pass


class ByHand(torch.nn.Module):
    """A 'model' that returns prepared logits and router logits for each implementation."""

    bias = 0.0
    """Of its choice of experts."""

    def __init__(self, outputs: dict[str, tuple[Tensor, Tensor]], top_k: int = 1) -> None:
        super().__init__()
        self.outputs = outputs
        self.experts = torch.nn.ModuleList(Dispatched() for _ in next(iter(outputs.values()))[1])
        self.config = type("Config", (), {"num_experts_per_tok": top_k, "_experts_implementation": "before"})()

    def set_experts_implementation(self, name: str) -> None:
        self.config._experts_implementation = name

    def forward(self, input_ids: Tensor, **_: object):
        logits, router = self.outputs[self.config._experts_implementation]
        for experts, choice in zip(self.experts, router, strict=False):
            experts(logits, (choice + self.bias).topk(self.config.num_experts_per_tok).indices.int())
        return type("Out", (), {"logits": logits.view(*input_ids.shape, -1), "router_logits": tuple(router)})()


def test_figures_of_a_case_counted_by_hand():
    """2 tokens, 1 layer, 3 experts, top-1. The reference nearly ties at token 0, and there the other goes elsewhere."""
    router = torch.tensor([[[1.00, 0.97, 0.0], [3.0, 0.0, 0.0]]])
    other_router = torch.tensor([[[0.97, 1.00, 0.0], [3.0, 0.0, 0.0]]])
    logits, other_logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    model = ByHand({"ref": (logits, router), "other": (other_logits, other_router)})
    found = evaluate.audit(model, torch.tensor([[0, 1]]), ["other"], reference="ref")
    assert (found.tokens, found.layers, found.top_k, found.near_ties) == (2, 1, 1, 0.5)
    assert found.load == [[1.0, 0.0, 0.0]]
    assert found.perplexity == pytest.approx(1 + math.e)  # token 1 had probability 1 / (1 + e)
    r = found.results[0]
    assert (r.experts_matched, r.sets_matched, r.mismatches, r.near_ties_among_mismatches) == (0.5, 0.5, 1, 1.0)
    assert r.perplexity_change == pytest.approx(0, abs=1e-12)  # token 0's logits are the same
    assert (r.cosine_mean, r.cosine_worst) == pytest.approx(((1 + 0.5**0.5) / 2, 0.5**0.5))
    assert r.top1_agreement == 0.5
    assert model.config._experts_implementation == "before"


def identity(module, hidden, ids, weights):
    """Broken: the experts do nothing."""
    return hidden * 0


def with_nan(module, hidden, ids, weights):
    out = hidden * 0
    out[0, 0] = math.nan
    return out


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Matrices this small are slower on several threads, and much slower beside other programs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    register()
    ALL_EXPERTS_FUNCTIONS.register("test_identity", identity)
    ALL_EXPERTS_FUNCTIONS.register("test_nan", with_nan)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[],
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(64, (6, 16), generator=torch.Generator().manual_seed(1))


def test_a_model_matches_itself_exactly(model, windows: Tensor):
    found = evaluate.audit(model, windows, ["eager"], batch=4)
    r = found.results[0]
    assert (r.experts_matched, r.sets_matched, r.top1_agreement, r.mismatches) == (1, 1, 1, 0)
    assert r.perplexity_change == 0
    assert r.cosine_worst == pytest.approx(1, abs=1e-6)
    assert math.isnan(r.near_ties_among_mismatches)
    assert all(sum(layer) == pytest.approx(TOP_K) for layer in found.load)
    assert len(found.load) == LAYERS


def test_each_implementation_is_counted_by_itself(model, windows: Tensor):
    """Also the reference among those that are compared with it, and a name that is given twice."""
    one = evaluate.audit(model, windows, ["lowgmm_int8"])
    found = evaluate.audit(model, windows, ["eager", "lowgmm_int8", "lowgmm_int8"])
    assert found.perplexity == one.perplexity
    assert found.results[1:] == one.results * 2


def test_perplexity_does_not_depend_on_batches(model, windows: Tensor):
    with torch.no_grad():
        loss = model(input_ids=windows, labels=windows).loss  # transformers' own mean over the predicted tokens
    for batch in (1, 4, 6):
        found = evaluate.audit(model, windows, [], batch=batch)
        assert found.perplexity == pytest.approx(math.exp(loss.item()), rel=1e-5)


def test_formats_rank_and_broken_experts_are_seen(model, windows: Tensor):
    names = ["lowgmm", "lowgmm_int8", "lowgmm_fp8", "test_identity"]
    exact, int8, fp8, broken = evaluate.audit(model, windows, names).results
    assert exact.experts_matched == 1
    assert exact.cosine_worst > 1 - 1e-5
    assert exact.cosine_mean > int8.cosine_mean > fp8.cosine_mean > 0.98
    assert broken.cosine_mean < 0.95
    assert broken.experts_matched < min(int8.experts_matched, fp8.experts_matched)
    assert broken.perplexity != exact.perplexity


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_each_source_of_error_is_smaller_than_both(model, windows: Tensor, format: str):
    weights, activations = evaluate.error_by_source(model, windows, format).results
    both = evaluate.audit(model, windows, [f"lowgmm_{format}"]).results[0]
    assert [r.name for r in (weights, activations)] == [f"lowgmm_{format}_{s}_only" for s in ("weights", "activations")]
    for one in (weights, activations):
        assert both.cosine_mean < one.cosine_mean < 1 - 1e-6


def test_nan_is_never_averaged_away(model, windows: Tensor):
    r = evaluate.audit(model, windows, ["test_nan"], batch=2).results[0]
    assert math.isnan(r.cosine_worst)
    assert math.isnan(r.cosine_mean)
    assert math.isnan(r.perplexity)


def test_progress_counts_every_forward_pass(model, windows: Tensor):
    steps: list[int] = []
    evaluate.audit(model, windows, ["lowgmm"], batch=4, progress=steps.append)
    assert steps == [4, 4, 2, 2]


def test_implementation_is_restored_after_an_error(model, windows: Tensor):
    before = model.config._experts_implementation
    with pytest.raises((ValueError, KeyError)):
        evaluate.audit(model, windows, ["no_such_experts"])
    assert model.config._experts_implementation == before


@pytest.mark.parametrize("shape", [(4,), (0, 8), (2, 1)])
def test_unusable_windows(model, shape: tuple[int, ...]):
    with pytest.raises(ShapeError, match=r"expected \[W, L\] with W >= 1 and L >= 2"):
        evaluate.audit(model, torch.zeros(shape, dtype=torch.int64), [])


def test_models_that_cannot_be_audited_are_refused():
    ids = torch.zeros(1, 4, dtype=torch.int64)
    dense = ByHand({"ref": (torch.zeros(4, 2), torch.zeros(0))})
    with pytest.raises(UnsupportedError, match="returned no router logits"):
        evaluate.audit(dense, ids, [], reference="ref")
    dense.config.n_group = 4
    with pytest.raises(UnsupportedError, match=r"config.n_group is 4; grouped routing"):
        evaluate.audit(dense, ids, [], reference="ref")
    dense.config.n_group, dense.config.num_experts_per_tok = None, None
    with pytest.raises(UnsupportedError, match="num_experts_per_tok is None"):
        evaluate.audit(dense, ids, [], reference="ref")


def test_router_logits_that_do_not_tell_the_experts_are_refused():
    router, logits = torch.tensor([[[1.0, 0.0, 0.0], [3.0, 2.97, 0.0]]]), torch.zeros(2, 2)
    model, ids = ByHand({"ref": (logits, router)}), torch.tensor([[0, 1]])
    model.bias = torch.tensor([0.0, 0.05, 0.0])  # decides near-ties only, as rounding might
    evaluate.audit(model, ids, [], reference="ref")
    model.bias = torch.tensor([0.0, 0.0, 2.0])
    with pytest.raises(UnsupportedError, match="ByHand chooses other experts than the top 1 of its router logits"):
        evaluate.audit(model, ids, [], reference="ref")


def test_experts_that_ignore_the_implementation_are_no_proof():
    router, logits = torch.tensor([[[1.0, 0.0, 0.0], [3.0, 0.0, 0.0]]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    model = ByHand({"ref": (logits, router), "other": (logits, router)})
    model.experts = torch.nn.ModuleList()
    with pytest.raises(UnsupportedError, match=r"ByHand has 1 mixture-of-experts layers, but .* of 0 of them"):
        evaluate.audit(model, torch.tensor([[0, 1]]), ["other"], reference="ref")
