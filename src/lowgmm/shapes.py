"""The dimension key, and the one place where arguments are checked against it.

| letter | meaning                     | letter | meaning                                   |
|--------|-----------------------------|--------|-------------------------------------------|
| T      | tokens                      | A      | experts per token                         |
| E      | experts                     | R      | routed rows, R = T·A                      |
| H      | hidden size                 | I      | intermediate size of one expert           |
| M N K  | a GEMM only: rows, output channels, reduction                                 |

A lower-case letter is the number of scale blocks along that axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


class ShapeError(ValueError):
    """A tensor's shape contradicts another argument's."""


class DtypeError(TypeError):
    """A tensor's dtype is not one the operation accepts."""


class DeviceError(ValueError):
    """Tensors of one call live on different devices."""


class UnsupportedError(RuntimeError):
    """An explicit request that this machine, backend or format cannot fulfil; nothing is substituted silently."""


class Shaped(Protocol):
    """Anything with a shape: a Tensor or a QuantTensor."""

    @property
    def shape(self) -> torch.Size: ...


def bind(op: str, **arguments: tuple[Shaped | None, str]) -> dict[str, int]:
    """Match shapes against letters and return the size of every letter.

    ``bind("gmm", input=(x, "M K"), weights=(w, "E N K"))`` returns ``{"M": …, "K": …, "E": …, "N": …}`` or raises
    :class:`ShapeError` with every argument's expected letters and actual shape. A token may be a letter or ``E+1``; a
    trailing ``1?`` stands for an optional axis of size 1 (a scale kept with ``keepdim=True``). ``None`` arguments are
    skipped.

    >>> import torch
    >>> bind("gmm", input=(torch.empty(5, 8), "M K"), weights=(torch.empty(2, 3, 8), "E N K"))
    {'M': 5, 'K': 8, 'E': 2, 'N': 3}
    """
    sizes: dict[str, int] = {}
    given = {name: (tensor, spec) for name, (tensor, spec) in arguments.items() if tensor is not None}
    for name, (tensor, spec) in given.items():
        shape, axes = tensor.shape, spec.split()
        rank = len(shape)
        if axes[-1] == "1?":
            axes.pop()
            rank -= rank == len(axes) + 1 and shape[-1] == 1
        if rank != len(axes):
            _fail(op, name, f"has {len(shape)} dimensions, expected {len(axes)}", given, sizes)
        for axis, size in zip(axes, shape, strict=False):
            times, letter, more = AXES[axis]
            known = sizes.get(letter)
            if known is None:
                if size < more or (size - more) % times:
                    _fail(op, name, f"has {size} where {axis} is expected", given, sizes)
                sizes[letter] = (size - more) // times
            elif size != known * times + more:
                _fail(op, name, f"has {size} where {axis}={known * times + more} is expected", given, sizes)
    return sizes


AXES = {letter: (1, letter, 0) for letter in "TAERHIMNKkhi"} | {"E+1": (1, "E", 1), "2I": (2, "I", 0)}
"""What an axis of a spec can be: its size is factor · letter + addend. A table, because parsing would cost a call's
microseconds (and Dynamo does not trace a cache)."""


def _fail(
    op: str, name: str, problem: str, given: Mapping[str, tuple[Shaped, str]], sizes: Mapping[str, int]
) -> NoReturn:
    lines = [f"{op}: argument '{name}' {problem}."]
    for other, (tensor, spec) in given.items():
        letters = ", ".join(axis for axis in spec.split() if axis != "1?")
        lines.append(f"  {other}: expected [{letters}], got {list(tensor.shape)}")
    known = ", ".join(f"{k}={v}" for k, v in sizes.items())
    lines.append(f"  sizes taken from the arguments so far: {known or 'none'}")
    raise ShapeError("\n".join(lines))


def check_dtype(op: str, name: str, tensor: Tensor | None, accepted: Iterable[torch.dtype], hint: str = "") -> None:
    """Raise :class:`DtypeError` unless ``tensor`` is None or has one of the ``accepted`` dtypes."""
    accepted = tuple(accepted)
    if tensor is not None and tensor.dtype not in accepted:
        names = ", ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in accepted))
        got = str(tensor.dtype).removeprefix("torch.")
        raise DtypeError(f"{op}: argument '{name}' is {got}, expected {names}.{' ' + hint if hint else ''}")


def check_device(op: str, **arguments: Tensor | None) -> torch.device:
    """Return the one device all tensors share, or raise :class:`DeviceError` naming each tensor's device."""
    given = {n: t for n, t in arguments.items() if t is not None}
    devices = {t.device for t in given.values()}
    if len(devices) != 1:
        where = ", ".join(f"{n} on {t.device}" for n, t in given.items())
        raise DeviceError(f"{op}: all tensors must be on one device, got {where}. Move them with .to(device).")
    return devices.pop()


def is_abstract(tensor: Tensor) -> bool:
    """A tensor without data: a tracer's, or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def check_no_overlap(op: str, output: Tensor, **inputs: Tensor | None) -> None:
    """Raise :class:`ShapeError` if ``output`` shares memory with an input: the kernel reads inputs while it writes."""
    if output.numel() == 0:
        return
    # Fake tensors have no address: there, two views of one storage are compared by their offsets in it.
    fake = is_abstract(output)
    a0, a1 = byte_span(output, fake)
    for name, tensor in inputs.items():
        if tensor is None or tensor.is_mkldnn or tensor.numel() == 0:
            continue
        if fake and tensor.untyped_storage()._cdata != output.untyped_storage()._cdata:
            continue
        b0, b1 = byte_span(tensor, fake)
        if a0 < b1 and b0 < a1:
            raise ShapeError(
                f"{op}: 'output' overlaps '{name}' in memory; the result would overwrite an operand still in use. "
                f"Pass a separate tensor (torch.empty_like) or leave 'output' out."
            )


def byte_span(t: Tensor, fake: bool = False) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one behind its last; of a fake one, offsets in its storage."""
    size = t.itemsize
    first = int(t.storage_offset()) * size if fake else t.data_ptr()
    if t.is_contiguous():
        return first, first + t.numel() * size
    last = first + int(sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * size
    return first, last + size
