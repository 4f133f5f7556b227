"""What INT8 activations cost: one product against the same dequantised weights and unquantised activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import cpu

FORMATS = ["int8", "int4", "int4_g32", "int4_g64", "int4_g128"]


def error(x: Tensor, w: Tensor, offsets: Tensor, format: str) -> tuple[float, float]:
    """``‖y − y*‖ / ‖y*‖`` (Frobenius) of ``y = gmm(x, quantize(w))`` against fp64 ``y* = x · dequantize(quantize(w))``;
    and what rounding ``x`` alone predicts: errors uniform in ±scale/2, each independent of the others."""
    q = lowgmm.quantize(w, format)
    y = lowgmm.gmm(x, cpu.pack(q), expert_offsets=offsets, out_dtype=torch.float32).double()
    dense, scales = lowgmm.dequantize(q).double(), lowgmm.quantize_tokens(x, "int8")[1].double()
    groups = [slice(a, b) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    exact = torch.cat([x[rows].double() @ dense[e].T for e, rows in enumerate(groups)])
    squares = sum(float(scales[rows].square().sum() / 12 * dense[e].square().sum()) for e, rows in enumerate(groups))
    return float((y - exact).norm() / exact.norm()), squares**0.5 / float(exact.norm())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("K", [512, 2048])
def test_the_error_is_that_of_rounding_the_activations(K: int, format: str) -> None:
    """Nothing else adds to it. Normal activations have a largest element of 3 to 4 times their rms: 0.7 to 0.9 %."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, K, generator=g), torch.randn(4, 256, K, generator=g)
    found, predicted = error(x, w, torch.tensor([0, 10, 10, 40, 64]), format)
    assert found == pytest.approx(predicted, rel=0.03)
    assert 0.006 < found < 0.009


@pytest.fixture(scope="module")
def products() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows sorted by expert, w13 and offsets of every layer of the shipped model on held-out text."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    found = []

    def keep(module: torch.nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        r = lowgmm.route(ids, module.num_experts)
        found.append((hidden[r.tokens], module.gate_up_proj.detach(), r.offsets))
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, ids, weights)

    ALL_EXPERTS_FUNCTIONS.register("keep", keep)
    folder = Path(lowgmm.__file__).parent / "demo_model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="keep"
    ).eval()
    text = (folder / "heldout.txt").read_text()[:3000]
    with torch.no_grad():
        model(tokenizer(text, return_tensors="pt").input_ids[:, :256])
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_products_of_the_shipped_model(products: list[tuple[Tensor, Tensor, Tensor]], format: str) -> None:
    """At most 0.8 % with the activations of a real model, in every layer."""
    errors = [error(x, w, offsets, format)[0] for x, w, offsets in products]
    assert len(errors) == 4
    assert max(errors) <= 0.008, errors
