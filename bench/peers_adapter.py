"""lowgmm as one entry of a harness that times other libraries' grouped matmuls and expert layers beside it.

The harness lives outside this repository and calls ``ours(case)``; its copy needs one line,
``from peers_adapter import ours``, with this folder and ``src`` on ``PYTHONPATH``. Everything that a callable does is
timed: finding the tiles from the offsets, routing and quantising the tokens included.

A case of kind "gemm" has ``sizes`` (rows of each expert), ``M``, ``N``, and ``x(format)`` -> (values, scales [M, 1])
and ``w(format)`` -> [(values, scales [E, N, 1]), ...] for "int8", "fp8" and "bf16" (scales None); each callable takes
the index of a weight set and returns [M, N] bf16. One of kind "layer" has ``w(format)`` -> (w13, scales, w2, scales)
or, for "bf16", (w13, w2); each callable takes (x [T, H] bf16, topk_weights [T, A], topk_ids [T, A]) and returns [T, H].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lowgmm
from lowgmm.formats import FORMATS, QuantTensor

NAMES = ("int8", "fp8", "bf16")


def ours(case: Any) -> dict[str, Callable[..., Tensor]] | None:
    """``{name: callable}``; None for what the adapter does not cover."""
    if case.kind == "gemm":
        offsets = torch.tensor([0, *case.sizes]).cumsum(0, dtype=torch.int32).cuda()
        return {f"lowgmm_{format}": _gemm(case, format, offsets) for format in NAMES}
    if case.kind == "layer":
        return {f"lowgmm_{format}": _layer(case, format) for format in NAMES}
    return None


def _gemm(case: Any, format: str, offsets: Tensor) -> Callable[[int], Tensor]:
    x, scales_x = case.x(format)
    weights = case.w(format)
    y = torch.empty(case.M, case.N, device=x.device, dtype=torch.bfloat16)

    def call(index: int) -> Tensor:
        w, scales_w = weights[index]
        return lowgmm.gmm(x, w, scales_x, scales_w, offsets, output=y)

    return call


def _layer(case: Any, format: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if format == "bf16":
        w13, w2 = case.w(format)
    else:
        values13, scales13, values2, scales2 = case.w(format)
        w13, w2 = (
            QuantTensor(values, scales.squeeze(-1), FORMATS[format])
            for values, scales in ((values13, scales13), (values2, scales2))
        )
    return lambda x, topk_weights, topk_ids: lowgmm.moe_ffn(x, w13, w2, topk_ids, topk_weights)
