"""Number formats as data: a format is a row in :data:`FORMATS`, never an if-branch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowgmm.shapes import ShapeError, UnsupportedError


@dataclass(frozen=True)
class QuantFormat:
    """What defines a quantised format.

    The value of an element is ``values * scale``; weights carry one scale per output channel, activations one per
    token.
    """

    name: str
    """The name that crosses every API and op schema."""
    dtype: torch.dtype
    """Storage dtype of the values."""
    qmax: float
    """The largest magnitude used; scale = absmax / qmax. INT8 leaves -128 out so that the range is symmetric."""
    bits: int
    """Bits of one stored value."""
    exact: bool
    """True if products accumulate exactly (INT32); False if they accumulate in FP32."""

    @property
    def bytes(self) -> float:
        return self.bits / 8


INT8 = QuantFormat("int8", torch.int8, 127.0, 8, exact=True)
FP8 = QuantFormat("fp8", torch.float8_e4m3fn, 448.0, 8, exact=False)
FORMATS: dict[str, QuantFormat] = {f.name: f for f in (INT8, FP8)}

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Unquantised operand dtypes."""


def get_format(name: str) -> QuantFormat:
    """The format called ``name``, or an error that lists the known ones."""
    if name not in FORMATS:
        raise UnsupportedError(f"unknown quantisation format {name!r}; known formats: {', '.join(FORMATS)}.")
    return FORMATS[name]


def format_of(dtype: torch.dtype) -> QuantFormat | None:
    """The format stored as ``dtype``, or None for an unquantised dtype."""
    return next((f for f in FORMATS.values() if f.dtype == dtype), None)


@dataclass(frozen=True)
class QuantTensor:
    """Quantised weights: values, scales and format together. Not a Tensor subclass, so that a stray torch op fails
    loudly.

    values  [E, N, K] in the format's dtype, or None once a backend has packed them
    scales  [E, N] float32
    packed  a backend's own form of ``values`` (E tensors of [K, N]); when it is there, ``values`` is not: one copy is
    alive
    """

    values: Tensor | None
    scales: Tensor
    format: QuantFormat
    packed: tuple[Tensor, ...] = field(default=())

    def __post_init__(self) -> None:
        if (self.values is None) == (not self.packed):
            raise ShapeError("QuantTensor: exactly one of 'values' and 'packed' must be given.")

    @property
    def operands(self) -> list[Tensor]:
        """What crosses the op boundary: one [E, N, K] tensor, or E packed [K, N] tensors."""
        return [self.values] if self.values is not None else list(self.packed)

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]."""
        if self.values is not None:
            return self.values.shape
        k_size, n_size = self.packed[0].shape
        return torch.Size((len(self.packed), n_size, k_size))

    @property
    def device(self) -> torch.device:
        return self.scales.device

    def plain(self) -> Tensor:
        """[E, N, K] values, unpacked into a new tensor if a backend had packed them."""
        if self.values is not None:
            return self.values
        return torch.stack([w.to_dense().T for w in self.packed])

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same weights on ``device``, in plain form."""
        return QuantTensor(self.plain().to(device), self.scales.to(device), self.format)
