"""The error budget rejects every mutant and accepts the correct result: a check that cannot fail is no check."""

from __future__ import annotations

import pytest
import torch

import lowgmm
from lowgmm.testing import MUTANTS, check_gmm, judge, make_operands

SHAPES = (([5, 0, 33, 90], 200, 300), ([16] * 6, 96, 256), ([130, 1], 64, 512))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_budget(mutant: str, shape: tuple[list[int], int, int], dtype: str, out_dtype: torch.dtype) -> None:
    o = make_operands(*shape, dtype)
    y = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=out_dtype)
    check_gmm(y, o)
    spoiled = MUTANTS[mutant](y.clone(), o)
    assert not judge(spoiled, o.exact(), o.baseline(out_dtype)).ok
    with pytest.raises(AssertionError, match="error budget"):
        check_gmm(spoiled, o)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_results_fail(value: float) -> None:
    o = make_operands([8, 8], 32, 64, "int8")
    y = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes)
    y[3, 5] = value
    assert not judge(y, o.exact(), o.baseline(y.dtype)).ok
