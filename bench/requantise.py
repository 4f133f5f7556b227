"""What each way to requantise the intermediate costs in accuracy, on a CPU or a GPU.

    python bench/requantise.py

Error of the whole layer against float64 with the same dequantised weights, relative (Frobenius), on normal data and
with one outlier channel in the intermediate (one gate/up row of each expert 30 times as large). `none` quantises the
tokens but keeps the intermediate, so the difference is what requantising adds. The static scale is the calibration
tokens' largest absolute value over qmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

import lowgmm
from lowgmm import reference
from lowgmm.formats import get_format
from lowgmm.layer import LayerSpec, activate

E, A, H, I, T = 8, 2, 1024, 768, 64


def layer(outlier: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * I, H, generator=g) * H**-0.5
    if outlier:
        w13[:, I + 5] *= 30
    return w13, torch.randn(E, H, I, generator=g) * I**-0.5


def main() -> None:
    g = torch.Generator().manual_seed(1)
    hidden, calibration = torch.randn(2, T, H, generator=g).bfloat16()
    weights, ids = torch.rand(T, E, generator=g).topk(A)
    print(f"{'format':7} {'data':8} " + " ".join(f"{name:>9}" for name in ("none", "token", "group128", "static")))
    for format in ("int8", "fp8"):
        for outlier in (False, True):
            q13, q2 = (lowgmm.quantize(w, format) for w in layer(outlier))
            dense13 = lowgmm.dequantize(q13)
            exact = reference.moe_ffn(hidden, q13, q2, ids, weights)
            h = activate(calibration.float() @ dense13.transpose(1, 2), LayerSpec())
            scales_h = h.abs().amax((1, 2)) / get_format(format).qmax
            only_tokens = reference.moe_ffn(_quantised(hidden, format), q13, q2, ids, weights)
            errors = [_error(only_tokens, exact)]
            for how in ("token", "group128", "static"):
                options = {"scales_h": scales_h} if how == "static" else {}
                y = lowgmm.moe_ffn(hidden, q13, q2, ids, weights, requantize=how, **options)
                errors.append(_error(y, exact))
            name = "outlier" if outlier else "normal"
            print(f"{format:7} {name:8} " + " ".join(f"{e:9.2e}" for e in errors))


def _quantised(x: Tensor, format: str) -> Tensor:
    q, scales = lowgmm.quantize_tokens(x, format)
    return q.float() * scales.unsqueeze(1)


def _error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
