"""Whatever decides about a call tells it apart from those that are remembered, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import ops, replay
from lowgmm.formats import QuantTensor
from lowgmm.relaunch import Start
from lowgmm.testing import Operands, make_operands


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call that was taken for a new one."""
    found: list[str] = []
    noted = replay._noted
    monkeypatch.setattr(replay, "serves", lambda t: type(t) is Tensor)
    monkeypatch.setattr(replay, "_plans", {})
    monkeypatch.setattr(replay, "_noted", lambda call, *rest: found.append(call.__name__) or noted(call, *rest))
    return found


def gmm_arguments() -> dict[str, Any]:
    o = make_operands([5, 0, 7], 48, 64, "int8")
    return {"input": o.x, "weights": o.w, "scales_x": o.scales_x, "scales_w": o.scales_w, "expert_offsets": o.offsets}


def strided(t: Tensor) -> Tensor:
    """The same values, further apart."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 64, dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


BIAS = torch.randn(3, 48)
GMM_CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "rows": lambda a: {
        "input": a["input"][:11], "scales_x": a["scales_x"][:11], "expert_offsets": a["expert_offsets"].clamp(max=11),
    },
    "channels": lambda a: {"weights": a["weights"][:, :32].clone(), "scales_w": a["scales_w"][:, :32].clone()},
    "reduction": lambda a: {"input": a["input"][:, :32].contiguous(), "weights": a["weights"][..., :32].contiguous()},
    "experts": lambda a: {
        "weights": a["weights"][:2], "scales_w": a["scales_w"][:2], "expert_offsets": a["expert_offsets"][:3],
    },
    "stride of the input": lambda a: {"input": strided(a["input"])},
    "stride of the weights": lambda a: {"weights": strided(a["weights"])},
    "stride of scales_w": lambda a: {"scales_w": strided(a["scales_w"])},
    "dtype of scales_x": lambda a: {"scales_x": a["scales_x"].bfloat16()},
    "dtype of scales_w": lambda a: {"scales_w": a["scales_w"].half()},
    "dtype of the offsets": lambda a: {"expert_offsets": a["expert_offsets"].long()},
    "dtype of the input": lambda a: {"input": a["input"].float(), "scales_x": None},
    "axis of scales_x": lambda a: {"scales_x": a["scales_x"][:, None]},
    "axis of scales_w": lambda a: {"scales_w": a["scales_w"][..., None]},
    "no scales_x": lambda a: {"scales_x": None},
    "no scales_w": lambda a: {"scales_w": None},
    "bias": lambda a: {"bias": BIAS},
    "dtype of the bias": lambda a: {"bias": BIAS.half()},
    "out_dtype": lambda a: {"out_dtype": torch.float32},
    "output": lambda a: {"output": torch.empty(12, 48, dtype=torch.bfloat16)},
    "dtype of the output": lambda a: {"output": torch.empty(12, 48)},
    "stride of the output": lambda a: {"output": torch.empty(12, 64, dtype=torch.bfloat16)[:, :48]},
    "clip": lambda a: {"input": a["input"].float(), "scales_x": None, "clip": 3.0},
    "another clip": lambda a: {"input": a["input"].float(), "scales_x": None, "clip": 4.0},
    "fast_accum": lambda a: {"fast_accum": True},
    "impl": lambda a: {"impl": "reference"},
}  # fmt: skip


def test_whatever_decides_tells_calls_of_gmm_apart(kinds: list[str]):
    for number, (name, change) in enumerate({"": lambda a: {}, **GMM_CHANGES}.items(), 1):
        arguments = aligned(gmm_arguments())
        for _ in range(2):
            lowgmm.gmm(**aligned(arguments | change(arguments)))
            assert len(kinds) == number, name
    for change in (lambda a: {}, *GMM_CHANGES.values()):
        arguments = gmm_arguments()
        lowgmm.gmm(**aligned(arguments | change(arguments)))
    assert len(kinds) == number, "nothing else does"


def aligned(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same, where memory starts at multiples of 16, as on a GPU."""

    def moved(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.data_ptr() % 16 == 0:
            return t
        room = torch.empty(t.untyped_storage().nbytes() + 16, dtype=torch.uint8)
        room = room[-room.data_ptr() % 16 :][: t.untyped_storage().nbytes()].view(t.dtype)
        return room.as_strided(t.shape, t.stride(), room.storage_offset()).copy_(t)

    return {name: moved(value) for name, value in arguments.items()}


def test_a_configuration_tells_calls_of_gmm_apart(kinds: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "_gmm_into", lambda *a: None)
    a = gmm_arguments()
    for config in (None, "16x64x128-swap-queue2-4w3s", "16x64x128-swap-queue2-4w4s"):
        lowgmm.gmm(**a, config=config)
        lowgmm.gmm(**a, config=config)
    assert len(kinds) == 3


def layer_arguments() -> dict[str, Any]:
    w13, w2 = (lowgmm.quantize(torch.randn(4, *shape), "int8") for shape in ((48, 32), (32, 24)))
    ids, weights = torch.randint(0, 4, (3, 2)), torch.rand(3, 2)
    return {"hidden": torch.randn(3, 32), "w13": w13, "w2": w2, "topk_ids": ids, "topk_weights": weights}


LAYER_CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "tokens": lambda a: {name: a[name][:2] for name in ("hidden", "topk_ids", "topk_weights")},
    "experts per token": lambda a: {name: a[name][:, :1].contiguous() for name in ("topk_ids", "topk_weights")},
    "stride of hidden": lambda a: {"hidden": strided(a["hidden"])},
    "dtype of hidden": lambda a: {"hidden": a["hidden"].bfloat16()},
    "dtype of the ids": lambda a: {"topk_ids": a["topk_ids"].int()},
    "stride of the ids": lambda a: {"topk_ids": strided(a["topk_ids"])},
    "dtype of the weights": lambda a: {"topk_weights": a["topk_weights"].half()},
    "bias_w13": lambda a: {"bias_w13": torch.zeros(4, 48)},
    "bias_w2": lambda a: {"bias_w2": torch.zeros(4, 32)},
    "activation": lambda a: {"activation": "gelu"},
    "gate_up": lambda a: {"gate_up": "interleaved"},
    "alpha": lambda a: {"activation": "swiglu_oai", "alpha": 1.5},
    "another alpha": lambda a: {"activation": "swiglu_oai", "alpha": 1.6},
    "limit": lambda a: {"limit": 2.0},
    "weight_on_input": lambda a: {"weight_on_input": True},
    "requantize": lambda a: {"requantize": "group128"},
    "scales_h": lambda a: {"requantize": "static", "scales_h": torch.ones(4)},
    "clip": lambda a: {"clip": 2.0},
    "impl": lambda a: {"impl": "reference", "w13": plain(a["w13"]), "w2": plain(a["w2"])},
}


def plain(w: lowgmm.QuantTensor) -> lowgmm.QuantTensor:
    return lowgmm.QuantTensor(w.plain(), w.scales, w.format)


def test_whatever_decides_tells_calls_of_moe_ffn_apart(kinds: list[str]):
    for number, (name, change) in enumerate({"": lambda a: {}, **LAYER_CHANGES}.items(), 1):
        arguments = aligned(layer_arguments())
        for _ in range(2):
            lowgmm.moe_ffn(**aligned(arguments | change(arguments)))
            assert kinds.count("_moe_ffn_new") == number, name


def test_overlap_is_seen_before_a_replay(monkeypatch: pytest.MonkeyPatch):
    a = gmm_arguments()
    output = torch.empty(12, 48, dtype=torch.bfloat16)
    lowgmm.gmm(**a, output=output)
    monkeypatch.setattr(replay, "run", lambda *a: pytest.fail("was let through"))
    over = a["weights"].view(-1)[: 12 * 96].view(torch.bfloat16).view(12, 48)
    with pytest.raises(lowgmm.shapes.ShapeError, match="overlaps 'weights'"):
        lowgmm.gmm(**a, output=over)


class Noticed:
    """A kernel, run as ever; a launch that is made again is only noticed, with its addresses."""

    def __init__(self, kernel: Any, again: list[list[Any]]) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names
        self.compiled = SimpleNamespace(
            function=lambda *a: again.append(a), metadata=SimpleNamespace(tensordesc_meta=())
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments, **options: self.kernel[grid](*arguments, **options) or self.compiled


@pytest.mark.interpreter
def test_calls_of_4_bit_weights_are_replayed_unless_their_scales_have_to_be_copied(monkeypatch: pytest.MonkeyPatch):
    from lowgmm.kernels import grouped_mm, nibbles

    again: list[list[Any]] = []
    monkeypatch.setattr(replay, "serves", lambda t: type(t) is Tensor)
    monkeypatch.setattr(replay, "_plans", {})
    monkeypatch.setattr(replay, "hooked", lambda: False)
    monkeypatch.setattr(replay, "start_of", lambda compiled: Start(compiled.function, (), True))
    for module, name in ((grouped_mm, "grouped_mm_kernel"), (nibbles, "unzip_kernel")):
        monkeypatch.setattr(module, name, Noticed(getattr(module, name), again))

    def call(o: Operands, copied: bool) -> None:
        scales = o.scales_w.contiguous() if copied else o.scales_w
        a = aligned({"x": o.x, "w": o.weights.values, "scales": scales, "scales_x": o.scales_x, "offsets": o.offsets})
        weights, options = QuantTensor(a["w"], a["scales"], o.weights.format), {"out_dtype": torch.float32}
        calls = {"impl": "triton", "config": "16x32x128-swap-grid-4w2s"}, {}
        made = [lowgmm.gmm(a["x"], weights, a["scales_x"], None, a["offsets"], **options, **more) for more in calls]
        if again:
            unzip, multiply = again
            assert a["x"].data_ptr() in unzip
            assert {a["w"].data_ptr(), a["scales"].data_ptr(), made[0].data_ptr()} <= {*multiply}
        else:
            assert torch.equal(*made)

    for copied in (True, False):
        for seed in range(3):
            call(make_operands([5, 0, 7], 48, 96, "int4_g32", seed=seed), copied)
            assert len(again) == (0 if copied or not seed else 2)
            again.clear()
