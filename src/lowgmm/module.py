"""The expert layer as an nn.Module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowgmm.api import moe_ffn
from lowgmm.formats import INT8, QuantTensor
from lowgmm.quant import quantize


class MoEExperts(nn.Module):
    """The experts of one MoE layer, quantised or not; the router stays outside.

    ``forward(hidden [T, H], topk_ids [T, A], topk_weights [T, A]) -> [T, H]``: see :func:`lowgmm.moe_ffn`.

    On a CPU, INT8 weights are packed for oneDNN when the module is built and their plain form is released.

    >>> import torch, lowgmm
    >>> layer = lowgmm.MoEExperts.from_dense(torch.randn(4, 32, 8), torch.randn(4, 8, 16), "int8")
    >>> layer(torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 1]]), torch.full((3, 2), 0.5)).shape
    torch.Size([3, 8])
    """

    def __init__(self, w13: Tensor | QuantTensor, w2: Tensor | QuantTensor, activation: str = "silu") -> None:
        super().__init__()
        self.w13 = _packed(w13)
        self.w2 = _packed(w2)
        self.activation = activation

    @classmethod
    def from_dense(cls, w13: Tensor, w2: Tensor, format: str | None = None, activation: str = "silu") -> MoEExperts:
        """From dense weights w13 [E, 2I, H] (gate rows first) and w2 [E, H, I]; ``format=None`` keeps their dtype."""
        if format is None:
            return cls(w13, w2, activation)
        return cls(quantize(w13, format), quantize(w2, format), activation)

    def forward(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return moe_ffn(hidden, self.w13, self.w2, topk_ids, topk_weights, activation=self.activation)

    def extra_repr(self) -> str:
        e, h, i = self.w2.shape
        kind = self.w13.format.name if isinstance(self.w13, QuantTensor) else str(self.w13.dtype).removeprefix("torch.")
        return f"experts={e}, hidden={h}, intermediate={i}, format={kind}, activation={self.activation}"


def _packed(w: Tensor | QuantTensor) -> Tensor | QuantTensor:
    if isinstance(w, QuantTensor) and w.values is not None and w.format is INT8 and w.device.type == "cpu":
        from lowgmm.cpu import pack

        return pack(w)
    return w
