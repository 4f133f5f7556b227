"""The expert layer as an nn.Module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowgmm.api import moe_ffn
from lowgmm.formats import INT8, QuantTensor, by_channels
from lowgmm.layer import LayerSpec, Weights
from lowgmm.ops_layer import Shortcut
from lowgmm.quant import quantize
from lowgmm.validate import check_experts

WEIGHTS = ("w13", "w2", "bias_w13", "bias_w2", "scales_h")
"""What a layer holds; the last three may be None."""


class MoEExperts(nn.Module):
    """The experts of one MoE layer, quantised or not; the router stays outside.

    ``forward(hidden [T, H], topk_ids [T, A], topk_weights [T, A]) -> [T, H]``: see :func:`lowgmm.moe_ffn`.

    On a CPU, INT8 and INT4 weights live in a packed form only: packed when the module is built or moved there, and
    unpacked for ``state_dict`` and for a move to another device. ``.half()`` and the like leave quantised weights and
    their scales as they are.
    Inference only: the weights are not parameters.

    >>> import torch, lowgmm
    >>> layer = lowgmm.MoEExperts.from_dense(torch.randn(4, 32, 8), torch.randn(4, 8, 16), "int8")
    >>> layer(torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 1]]), torch.full((3, 2), 0.5)).shape
    torch.Size([3, 8])
    >>> sorted(layer.state_dict())
    ['w13.scales', 'w13.values', 'w2.scales', 'w2.values']
    """

    w13: Tensor | QuantTensor
    w2: Tensor | QuantTensor
    bias_w13: Tensor | None
    bias_w2: Tensor | None
    scales_h: Tensor | None
    _shortcut: Shortcut | None = None

    def __init__(
        self,
        w13: Tensor | QuantTensor,
        w2: Tensor | QuantTensor,
        activation: str = "silu",
        *,
        bias_w13: Tensor | None = None,
        bias_w2: Tensor | None = None,
        scales_h: Tensor | None = None,
        **options: Any,
    ) -> None:
        """``options`` are those of :class:`lowgmm.layer.LayerSpec`: gate_up, alpha, limit, weight_on_input, requantize,
        clip."""
        super().__init__()
        self.spec = LayerSpec(activation, **options)
        check_experts(w13, w2, bias_w13, bias_w2, scales_h, self.spec)
        for name, w in zip(WEIGHTS, (w13, w2, bias_w13, bias_w2, scales_h), strict=True):
            setattr(self, name, _settle(w.detach() if isinstance(w, Tensor) else w))

    @classmethod
    def from_dense(
        cls, w13: Tensor, w2: Tensor, format: str | None = None, activation: str = "silu", **rest: Any
    ) -> MoEExperts:
        """From dense weights w13 [E, 2I, H] and w2 [E, H, I]; ``format=None`` keeps their dtype.

        Raises: as :func:`lowgmm.quantize`; ShapeError: the weights do not belong together.
        """
        if format is None:
            return cls(w13, w2, activation, **rest)
        return cls(quantize(w13, format), quantize(w2, format), activation, **rest)

    def forward(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._moe_ffn(hidden, topk_ids, topk_weights)
        shortcut = self._shortcut  # another thread may be giving us other weights
        if shortcut is None:
            shortcut = self._shortcut = self._find_shortcut()
        y = shortcut(hidden, topk_ids, topk_weights)
        if y is None:
            y = self._moe_ffn(hidden, topk_ids, topk_weights)
            shortcut.seen(hidden, topk_ids, topk_weights)
        return y

    def _moe_ffn(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return moe_ffn(
            hidden,
            self.w13,
            self.w2,
            topk_ids,
            topk_weights,
            bias_w13=self.bias_w13,
            bias_w2=self.bias_w2,
            scales_h=self.scales_h,
            **{field: getattr(self.spec, field) for field in LayerSpec.__dataclass_fields__},
        )

    def _find_shortcut(self) -> Shortcut:
        up, down = (
            Weights(w.operands, w.scales, bias) if isinstance(w, QuantTensor) else Weights([w], None, bias)
            for w, bias in ((self.w13, self.bias_w13), (self.w2, self.bias_w2))
        )
        return Shortcut(up, down, self.spec)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in (*WEIGHTS, "spec"):  # what a shortcut was found for
            self._shortcut = None

    def extra_repr(self) -> str:
        e, h, i = self.w2.shape
        kind = self.w13.format.name if isinstance(self.w13, QuantTensor) else str(self.w13.dtype).removeprefix("torch.")
        return f"experts={e}, hidden={h}, intermediate={i}, format={kind}, activation={self.spec.activation}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoEExperts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in WEIGHTS:
            w = getattr(self, name)
            # As bytes they are no floats, so fn moves them but cannot convert FP8 or scales to another dtype.
            if isinstance(w, QuantTensor):
                values, scales = (fn(t.view(torch.uint8)).view(t.dtype) for t in _parts(w).values())
                w = QuantTensor(values, scales, w.format)
            elif name == "scales_h" and w is not None:
                w = fn(w.contiguous().view(torch.uint8)).view(w.dtype)
            elif w is not None:
                w = fn(w)
            setattr(self, name, _settle(w))
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shortcut": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in WEIGHTS:  # which may have been written on another device
            setattr(self, name, _settle(getattr(self, name)))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # what users have added
        for name in WEIGHTS:
            destination.update({f"{prefix}{name}{part}": t for part, t in _parts(getattr(self, name)).items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known: set[str] = set()
        for name in WEIGHTS:
            w = getattr(self, name)
            old = {f"{prefix}{name}{part}": t for part, t in _parts(w).items()}
            known |= old.keys()
            missing = [key for key in old if key not in state_dict]
            missing_keys += missing
            new: list[Tensor] = [state_dict[key] for key in old if key in state_dict]
            for (key, was), now in zip(old.items(), new, strict=False):
                if not missing and (now.shape != was.shape or now.dtype != was.dtype):
                    missing = [key]
                    error_msgs.append(
                        f"{key}: expected {list(was.shape)} {was.dtype}, got {list(now.shape)} {now.dtype}."
                    )
            if old and not missing:
                if not local_metadata.get("assign_to_params_buffers", False):
                    new = [t.detach().clone().to(was.device) for t, was in zip(new, old.values(), strict=True)]
                loaded = QuantTensor(new[0], new[1], w.format) if isinstance(w, QuantTensor) else new[0]
                setattr(self, name, _settle(loaded))
        others = {key: t for key, t in state_dict.items() if key not in known}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


def _parts(w: Tensor | QuantTensor | None) -> dict[str, Tensor]:
    """The tensors of a weight under their names in a state dict."""
    if w is None:
        return {}
    if not isinstance(w, QuantTensor):
        return {"": w}
    return {".values": w.plain(), ".scales": w.scales.contiguous()}  # safetensors takes no others


def _settle(w: Tensor | QuantTensor | None) -> Tensor | QuantTensor | None:
    """A weight in the form its device's backend wants."""
    if not isinstance(w, QuantTensor) or w.values is None:
        return w
    if w.format.activations is INT8 and w.device.type == "cpu":
        from lowgmm.cpu import pack

        return pack(w)
    return QuantTensor(w.values, by_channels(w.scales), w.format) if w.scales.dim() == 3 else w
