"""Number formats as data: a format is a row in :data:`FORMATS`, never an if-branch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowgmm.shapes import DtypeError, ShapeError, UnsupportedError, bind


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
class Packed:
    """A backend's own form of [E, N, K] values."""

    stand_in: Tensor
    """Has the values' shape and dtype, but no data."""
    parts: tuple[Tensor, ...]
    unpack: Callable[[Packed], Tensor]
    """Back to the values."""


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """Quantised weights: values, scales and format together. Not a Tensor subclass, so that a stray torch op fails
    loudly.

    values  [E, N, K] in the format's dtype, or None once a backend has packed them
    scales  [E, N] float32
    packed  the values in a backend's own form; when it is there, ``values`` is not: one copy is alive
    """

    values: Tensor | None
    scales: Tensor
    format: QuantFormat
    packed: Packed | None = None

    def __post_init__(self) -> None:
        if (self.values is None) == (self.packed is None):
            raise ShapeError("QuantTensor: exactly one of 'values' and 'packed' must be given.")
        values = self.operands[0]
        if values.dtype != self.format.dtype:
            raise DtypeError(
                f"QuantTensor: values are {values.dtype}, expected {self.format.name}'s {self.format.dtype}."
            )
        bind("QuantTensor", values=(values, "E N K"), scales=(self.scales, "E N 1?"))

    @property
    def operands(self) -> list[Tensor]:
        """What crosses the op boundary: the [E, N, K] values; or their stand-in, then the packed parts."""
        if self.packed is not None:
            return [self.packed.stand_in, *self.packed.parts]
        assert self.values is not None
        return [self.values]

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]."""
        return self.operands[0].shape

    @property
    def device(self) -> torch.device:
        return self.scales.device

    def plain(self) -> Tensor:
        """[E, N, K] values, unpacked into a new tensor if a backend had packed them."""
        if self.packed is not None:
            return self.packed.unpack(self.packed)
        assert self.values is not None
        return self.values

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same weights on ``device``, in plain form."""
        return QuantTensor(self.plain().to(device), self.scales.to(device), self.format)
