"""The experts functions inside real transformers models: tiny, random, and of several families."""

from __future__ import annotations

import gc

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from lowgmm import MoEExperts, moe_ffn, quantize  # noqa: E402
from lowgmm.integrations import transformers as integration  # noqa: E402

LAYERS, HIDDEN, WIDTH = 2, 64, 48
COMMON = {
    "vocab_size": 128,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": WIDTH, "intermediate_size": 96, "num_experts": 8, "head_dim": 16},
    "mixtral": {"intermediate_size": WIDTH, "num_local_experts": 8, "head_dim": 16},
    "olmoe": {"intermediate_size": WIDTH, "num_experts": 8},
    "qwen2_moe": {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH, "num_experts": 8},
    "deepseek_v3": {
        "moe_intermediate_size": WIDTH,
        "intermediate_size": 96,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {
        "moe_intermediate_size": WIDTH,
        "intermediate_size": 96,
        "n_routed_experts": 8,
        "first_k_dense_replace": 0,
        "head_dim": 16,
    },
    "phimoe": {"intermediate_size": WIDTH, "num_local_experts": 8},
}
"""Those that the README says work."""
IDS = torch.arange(3, 37).view(2, 17)


def tiny_model(family: str = "qwen3_moe", **changes):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**COMMON, **FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for p in model.parameters():
        if p.dim() >= 2:
            torch.nn.init.normal_(p, std=0.08)  # the default 0.02 makes experts too weak to be seen in the logits
    return model


@torch.no_grad()
def logits(model, implementation: str) -> torch.Tensor:
    model.set_experts_implementation(implementation)
    return model(IDS).logits


def experts_of(model) -> list[torch.nn.Module]:
    return [m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "num_experts")]


@pytest.fixture(autouse=True, scope="module")
def _registered_and_one_thread():
    """Matrices this small are slower on several threads, and much slower beside other programs."""
    integration.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats of the quantised copies made, in order."""
    log: list[str] = []
    original = MoEExperts.from_dense

    def counted(w13, w2, format=None, activation="silu"):
        log.append(format)
        return original(w13, w2, format, activation)

    monkeypatch.setattr(MoEExperts, "from_dense", counted)
    return log


def test_register_is_idempotent_and_leaves_others_alone():
    before = dict(ALL_EXPERTS_FUNCTIONS.items())
    assert integration.register() == integration.register() == tuple(integration.FORMATS)
    assert dict(ALL_EXPERTS_FUNCTIONS.items()) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantised_equals_the_models_own_code(family: str):
    model = tiny_model(family)
    expected = logits(model, "eager")
    # Both sum the same fp32 products in different orders: one rounding for each of the H + I terms of a layer, at most.
    budget = LAYERS * (HIDDEN + WIDTH) * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (logits(model, "lowgmm") - expected).abs().max() <= budget


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["lowgmm_int8", "lowgmm_fp8"])
def test_quantised_is_close_and_really_quantised(family: str, name: str):
    """Held against what losing each token's last expert does to the same model."""
    model = tiny_model(family)

    def lost_slot(module, hidden, ids, weights):
        return ALL_EXPERTS_FUNCTIONS["lowgmm"](module, hidden, ids[:, :-1], weights[:, :-1])

    ALL_EXPERTS_FUNCTIONS.register("test_lost_slot", lost_slot)
    expected = logits(model, "eager")
    error, lost = (float((logits(model, n) - expected).norm() / expected.norm()) for n in (name, "test_lost_slot"))
    assert error > 1e-5, "nothing was quantised"
    assert error < lost / 4


def test_experts_really_run_through_the_operator(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def spy(hidden, w13, w2, ids, weights, **options):
        seen.append((tuple(hidden.shape), tuple(ids.shape), options["activation"]))
        return moe_ffn(hidden, w13, w2, ids, weights, **options)

    monkeypatch.setattr(integration, "moe_ffn", spy)
    logits(tiny_model(), "lowgmm")
    assert seen == [((34, HIDDEN), (34, 2), "silu")] * LAYERS


def test_bf16_model_stays_bf16():
    model = tiny_model().to(torch.bfloat16)
    assert logits(model, "lowgmm_int8").dtype == torch.bfloat16


def test_weights_are_quantised_once(built: list[str]):
    model = tiny_model()
    first = logits(model, "lowgmm_int8")
    assert torch.equal(logits(model, "lowgmm_int8"), first)
    assert built == ["int8"] * LAYERS
    logits(model, "lowgmm_fp8")
    logits(model, "lowgmm_int8")
    assert built == ["int8"] * LAYERS + ["fp8"] * LAYERS


@pytest.mark.parametrize("change", ["in place", "new parameter", "new data", "other dtype"])
def test_changed_weights_are_quantised_again(change: str, built: list[str]):
    model = tiny_model()
    before = logits(model, "lowgmm_int8")
    experts = experts_of(model)[0]
    with torch.no_grad():
        if change == "in place":
            experts.down_proj.mul_(2)
        elif change == "new parameter":
            experts.down_proj = torch.nn.Parameter(experts.down_proj * 2)
        elif change == "new data":
            experts.down_proj.data = experts.down_proj.data * 2
        else:
            experts.down_proj.data = experts.down_proj.data.to(torch.float64).to(torch.float16) * 2
            experts.gate_up_proj.data = experts.gate_up_proj.data.to(torch.float16)
    after = logits(model, "lowgmm_int8")
    assert built == ["int8"] * (LAYERS + 1)  # the changed layer alone
    assert not torch.equal(before, after)


def test_a_dropped_model_takes_its_quantised_copy_along():
    gc.collect()  # models of other tests
    kept = len(integration._quantised)
    model = tiny_model()
    logits(model, "lowgmm_int8")
    assert len(integration._quantised) == kept + LAYERS
    del model
    gc.collect()
    assert len(integration._quantised) == kept


def test_from_pretrained_by_name(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="lowgmm_int8").eval()
    assert torch.equal(again(IDS).logits, logits(model, "lowgmm_int8"))


def test_training_is_refused_and_inference_needs_no_no_grad():
    model = tiny_model()
    model.set_experts_implementation("lowgmm_int8")
    assert model(IDS).logits.isfinite().all()
    with pytest.raises(integration.UnsupportedExpertsError, match=r"expected model.eval\(\): lowgmm has no gradient"):
        model.train()(IDS)
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()


class Layer(torch.nn.Module):
    """The attributes of an experts module that can be computed; the tests change one at a time."""

    def __init__(self, **changes: object) -> None:
        super().__init__()
        self.num_experts = 2
        self.gate_up_proj = torch.nn.Parameter(torch.ones(2, 8, 4))
        self.down_proj = torch.nn.Parameter(torch.ones(2, 4, 4))
        self.act_fn = torch.nn.SiLU()
        for name, value in changes.items():
            setattr(self, name, value)
        self.eval()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"is_transposed": True}, "is_transposed is True, expected False", id="GPT-OSS, Aria"),
        pytest.param({"is_concatenated": False}, "is_concatenated is False, expected True", id="interleaved rows"),
        pytest.param({"has_bias": True}, "has_bias is True, expected False", id="biases"),
        pytest.param({"has_gate": False}, "has_gate is False, expected True", id="Nemotron-H"),
        pytest.param({"has_post_expert_norm": True}, "has_post_expert_norm is True", id="a norm behind"),
        pytest.param({"_is_expert_parallel": True}, "_is_expert_parallel is True", id="expert parallel"),
        pytest.param({"act_fn": torch.nn.ReLU()}, "act_fn is ReLU, expected SiLU", id="relu"),
        pytest.param({"act_fn": torch.nn.GELU("tanh")}, "act_fn is GELU, expected SiLU", id="approximate gelu"),
    ],
)
@pytest.mark.parametrize("name", integration.FORMATS)
def test_what_is_not_computed_is_refused(name: str, changes: dict[str, object], named: str):
    function = ALL_EXPERTS_FUNCTIONS[name]
    call = (torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert function(Layer(), *call).shape == (3, 4)
    with pytest.raises(integration.UnsupportedExpertsError, match=f"Layer.{named}.*set_experts_implementation"):
        function(Layer(**changes), *call)


def test_a_models_own_gate_is_refused():
    layer = type("Clamped", (Layer,), {"_apply_gate": lambda self, x: x})()
    with pytest.raises(integration.UnsupportedExpertsError, match="_apply_gate is the model's own"):
        integration.check_supported(layer)


def test_gpt_oss_is_refused_as_a_whole():
    model = tiny_model("gpt_oss", intermediate_size=WIDTH, num_local_experts=8, head_dim=16, sliding_window=16)
    with pytest.raises(integration.UnsupportedExpertsError, match="GptOssExperts"):
        logits(model, "lowgmm_int8")


def test_gelu_experts():
    layer = Layer(act_fn=torch.nn.GELU())
    x, ids, weights = torch.randn(3, 4), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
    q13, q2 = quantize(layer.gate_up_proj.detach(), "int8"), quantize(layer.down_proj.detach(), "int8")
    expected = moe_ffn(x, q13, q2, ids, weights, activation="gelu")
    found = ALL_EXPERTS_FUNCTIONS["lowgmm_int8"](layer, x, ids, weights)
    # gelu of a large negative gate is a difference of nearly equal numbers: torch's float32 gelu(-5.49) is off by half.
    assert torch.allclose(found, expected, atol=1e-6 * float(expected.abs().max()))


def test_missing_transformers_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers.integrations.moe", None)
    with pytest.raises(integration.MissingDependencyError, match='pip install "transformers'):
        integration.register()


def test_compiled_experts_give_the_same():
    layer, x = Layer(), torch.randn(3, 4)
    call = (torch.tensor([[0], [1], [0]]), torch.ones(3, 1))
    function = ALL_EXPERTS_FUNCTIONS["lowgmm_int8"]
    compiled = torch.compile(lambda hidden: function(layer, hidden, *call), backend="eager")
    assert torch.equal(compiled(x), function(layer, x, *call))


def test_models_whose_experts_are_not_dispatched_are_refused():
    assert integration.check_model(tiny_model()) == 2
    llama = {"intermediate_size": WIDTH, "intermediate_size_mlp": 96, "num_local_experts": 8, "head_dim": 16}
    with pytest.raises(integration.UnsupportedExpertsError, match="Llama4ForCausalLM has no experts that go through"):
        integration.check_model(tiny_model("llama4_text", **llama))
    with pytest.raises(integration.UnsupportedExpertsError, match="GptOssExperts"):
        integration.check_model(
            tiny_model("gpt_oss", intermediate_size=WIDTH, num_local_experts=8, head_dim=16, sliding_window=16)
        )


def test_experts_without_a_gates_weights_are_refused_by_name():
    """As Nemotron-H's, which have ``up_proj``."""
    module = type("UpOnly", (torch.nn.Module,), {"has_gate": False, "act_fn": torch.nn.ReLU()})().eval()
    call = (torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    for name in integration.FORMATS:
        with pytest.raises(integration.UnsupportedExpertsError, match=r"UpOnly\.has_gate is False"):
            ALL_EXPERTS_FUNCTIONS[name](module, *call)
