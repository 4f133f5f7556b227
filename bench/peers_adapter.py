"""lowgmm as one entry of a harness that times other libraries' grouped matmuls beside it.

The harness lives outside this repository and calls ``ours(case)``; its copy needs one line,
``from peers_adapter import ours``, with this folder and ``src`` on ``PYTHONPATH``. A case has ``kind``, ``sizes`` (rows
of each expert), ``M``, ``N``, and ``x(format)`` -> (values, scales [M, 1]) and ``w(format)`` -> [(values, scales
[E, N, 1]), ...] for "int8", "fp8" and "bf16" (scales None). Each callable takes the index of a weight set and returns
[M, N] bf16; everything it does is timed, finding the tiles from the offsets included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lowgmm


def ours(case: Any) -> dict[str, Callable[[int], Tensor]] | None:
    """``{name: callable}`` for a grouped matmul; None for what the adapter does not cover."""
    if case.kind != "gemm":
        return None
    offsets = torch.tensor([0, *case.sizes]).cumsum(0, dtype=torch.int32).cuda()
    return {f"lowgmm_{format}": _entry(case, format, offsets) for format in ("int8", "fp8", "bf16")}


def _entry(case: Any, format: str, offsets: Tensor) -> Callable[[int], Tensor]:
    x, scales_x = case.x(format)
    weights = case.w(format)
    y = torch.empty(case.M, case.N, device=x.device, dtype=torch.bfloat16)

    def call(index: int) -> Tensor:
        w, scales_w = weights[index]
        return lowgmm.gmm(x, w, scales_x, scales_w, offsets, output=y)

    return call
