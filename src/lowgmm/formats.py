"""Number formats as data: a format is a row in :data:`FORMATS`, never an if-branch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowgmm.shapes import DtypeError, ShapeError, UnsupportedError, bind


@dataclass(frozen=True)
class QuantFormat:
    """What defines a quantised format.

    The value of an element is ``values * scale``; weights carry one scale per output channel, or one per channel and
    ``group`` elements along K; activations one per token.
    """

    name: str
    """The name that crosses every API and op schema."""
    dtype: torch.dtype
    """Storage dtype of the values; uint8 for 4-bit ones, of which two share a byte (:func:`pack_nibbles`)."""
    qmax: float
    """The largest magnitude used; scale = absmax / qmax. INT8 leaves -128 out so that the range is symmetric."""
    bits: int
    """Bits of one stored value."""
    exact: bool
    """True if products accumulate exactly (INT32, within a group); False if they accumulate in FP32."""
    group: int | None = None
    """Elements along K that share a scale; None: all of K."""

    @property
    def bytes(self) -> float:
        return self.bits / 8

    @property
    def element(self) -> torch.dtype:
        """dtype of one value by itself (:meth:`QuantTensor.codes`)."""
        return torch.int8 if self.bits == 4 else self.dtype

    @property
    def activations(self) -> QuantFormat:
        """The format of the activations that weights of this format are multiplied by."""
        return INT8 if self.bits == 4 else self

    def blocks(self, K: int) -> int:
        """Scales along K."""
        return 1 if self.group is None else -(-K // self.group)


INT8 = QuantFormat("int8", torch.int8, 127.0, 8, exact=True)
FP8 = QuantFormat("fp8", torch.float8_e4m3fn, 448.0, 8, exact=False)
INT4 = QuantFormat("int4", torch.uint8, 7.0, 4, exact=True)
GROUPS = (32, 64, 128)
"""Group sizes of the int4 formats."""
INT4_GROUPED = tuple(QuantFormat(f"int4_g{g}", torch.uint8, 7.0, 4, exact=True, group=g) for g in GROUPS)
FORMATS: dict[str, QuantFormat] = {f.name: f for f in (INT8, FP8, INT4, *INT4_GROUPED)}

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Unquantised operand dtypes."""


def get_format(name: str) -> QuantFormat:
    """The format called ``name``, or an error that lists the known ones."""
    if name not in FORMATS:
        raise UnsupportedError(f"unknown quantisation format {name!r}; known formats: {', '.join(FORMATS)}.")
    return FORMATS[name]


def format_of(dtype: torch.dtype) -> QuantFormat | None:
    """The format stored as ``dtype`` (the per-channel one of several), or None for an unquantised dtype."""
    return next((f for f in FORMATS.values() if f.dtype == dtype), None)


def group_size(K: int, blocks: int) -> int:
    """Elements along K that share a scale, where there are ``blocks`` scales: no two group sizes give the same number.

    >>> group_size(4096, 1), group_size(4096, 32), group_size(100, 4)
    (4096, 128, 32)
    """
    found = K if blocks == 1 else next((g for g in GROUPS if -(-K // g) == blocks), None)
    if found is None:
        allowed = ", ".join(f"{-(-K // g)} (groups of {g})" for g in GROUPS)
        raise ShapeError(f"{blocks} scales along K={K}: expected 1 (per channel), {allowed}.")
    return found


def scale_per_element(scales: Tensor, K: int) -> Tensor:
    """Scales [E, N] or [E, N, k] in a form that multiplies [E, N, K] values: [E, N, 1] or [E, N, K].

    >>> scale_per_element(torch.tensor([[[1.0, 2.0]]]), 34)[0, 0, 31:33]
    tensor([1., 2.])
    """
    if scales.dim() == 2:
        return scales.unsqueeze(-1)
    if scales.shape[-1] == 1:
        return scales
    return scales.repeat_interleave(group_size(K, scales.shape[-1]), -1)[..., :K]


def by_channels(scales: Tensor) -> Tensor:
    """Scales [E, N, k] laid out so that those of neighbouring channels are neighbours, as kernels read them; a copy if
    they are not.

    >>> by_channels(torch.ones(1, 3, 2)).stride()
    (6, 1, 3)
    """
    return scales.mT.contiguous().mT


def pack_nibbles(codes: Tensor) -> Tensor:
    """int8 ``[..., K]`` in [-8, 7], K even -> uint8 ``[..., K/2]``: element 2j in the low half of byte j, 2j+1 in the
    high half.

    >>> pack_nibbles(torch.tensor([1, -1], dtype=torch.int8)).tolist()
    [241]
    """
    low, high = codes.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = (low & 15) | (high << 4)
    return packed


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack_nibbles`."""
    signed = packed.view(torch.int8)  # >> of int8 keeps the sign
    return torch.stack([(signed << 4) >> 4, signed >> 4], -1).flatten(-2)


@dataclass(frozen=True)
class Packed:
    """A backend's own form of a QuantTensor's values."""

    stand_in: Tensor
    """Has shape [E, N, K] and the values' dtype, but no data."""
    parts: tuple[Tensor, ...]
    unpack: Callable[[Packed], Tensor]
    """Back to the values as they are stored plainly."""
    pack: Callable[[QuantTensor], QuantTensor]
    """From those to this form, or to what takes its place on another machine."""


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """Quantised weights: values, scales and format together. Not a Tensor subclass, so that a stray torch op fails
    loudly.

    values  [E, N, K] in the format's dtype ([E, N, K/2] bytes for 4 bits), or None once a backend has packed them
    scales  [E, N] float32; [E, N, k] with k groups along K in a grouped format, in any layout (kernels read one with N
            contiguous; others are copied to it at every call)
    packed  the values in a backend's own form; when it is there, ``values`` is not: one copy is alive
    """

    values: Tensor | None
    scales: Tensor
    format: QuantFormat
    packed: Packed | None = None
    _stand_in: ClassVar[Tensor | None] = None
    """Of 4-bit values (see :attr:`operands`), made once: it takes 5 µs of a call otherwise."""

    def __post_init__(self) -> None:
        if (self.values is None) == (self.packed is None):
            raise ShapeError("QuantTensor: exactly one of 'values' and 'packed' must be given.")
        dtype = (self.values if self.packed is None else self.packed.stand_in).dtype  # type: ignore[union-attr]
        if dtype != self.format.dtype:
            raise DtypeError(f"QuantTensor: values are {dtype}, expected {self.format.name}'s {self.format.dtype}.")
        blocks = self.format.blocks(self.shape[-1])
        sizes = bind("QuantTensor", values=(self, "E N K"), scales=(self.scales, "E N k" if blocks > 1 else "E N 1?"))
        if blocks > 1 and sizes["k"] != blocks:
            raise ShapeError(
                f"QuantTensor: scales have {sizes['k']} groups along K={sizes['K']}, expected {self.format.name}'s "
                f"{blocks}."
            )
        if self.values is not None and self.format.bits == 4:
            object.__setattr__(self, "_stand_in", self.values.new_empty(1).expand(self.shape))

    def __reduce__(self) -> tuple[Callable[..., QuantTensor], tuple[object, ...]]:
        # As plain bytes: packed weights belong to this CPU, some cannot be copied at all, and pickle knows no float8.
        pack = None if self.packed is None else self.packed.pack
        return _restored, (self.plain().view(torch.uint8), self.scales, self.format.name, pack)

    @property
    def operands(self) -> list[Tensor]:
        """What crosses the op boundary: the [E, N, K] values; or a stand-in of that shape, then the parts that hold
        the data (4-bit values, or a backend's packed form)."""
        if self.packed is not None:
            return [self.packed.stand_in, *self.packed.parts]
        assert self.values is not None
        return [self.values] if self._stand_in is None else [self._stand_in, self.values]

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]."""
        if self.packed is not None:
            return self.packed.stand_in.shape
        assert self.values is not None
        *outer, last = self.values.shape
        return torch.Size((*outer, last * 2)) if self.format.bits == 4 else self.values.shape

    @property
    def device(self) -> torch.device:
        return self.scales.device

    def codes(self) -> Tensor:
        """[E, N, K] values one by one, in the format's ``element`` dtype: times their scales they are the weights."""
        return unpack_nibbles(self.plain()) if self.format.bits == 4 else self.plain()

    def plain(self) -> Tensor:
        """``values`` as they are stored, in a new tensor if a backend had packed them."""
        if self.packed is not None:
            return self.packed.unpack(self.packed)
        assert self.values is not None
        return self.values

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same weights on ``device``, in plain form."""
        return QuantTensor(self.plain().to(device), self.scales.to(device), self.format)


def _restored(
    values: Tensor, scales: Tensor, format: str, pack: Callable[[QuantTensor], QuantTensor] | None
) -> QuantTensor:
    """What a copied or unpickled QuantTensor is made of."""
    fmt = get_format(format)
    plain = QuantTensor(values.view(fmt.dtype), scales, fmt)
    return plain if pack is None else pack(plain)
