"""One launch of a compiled Triton kernel, kept to be made again with other addresses.

``compiled[grid](*arguments)`` costs 40 to 60 µs on an H200's host where the launch itself costs 5: hooks that nobody
set are called, every pointer is looked up in the driver, every tensor map is encoded again. A kept launch calls the C
function underneath, with integers for pointers and tensor maps that were made before. What that function takes is no
documented interface, so it is called only in the forms of the Triton versions in :data:`FORMS`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

MOST_MAPS = 4096
"""Tensor maps that are kept (256 bytes each); then all are forgotten."""

_maps: dict[tuple[str, int], Any] = {}
"""Tensor maps by everything that is in one: the form of its tiles, and an address."""

Place = Callable[[Tensor], tuple[int, int]]
"""Where a tensor starts: which of a call's addresses, and how many bytes behind it."""


class Start(NamedTuple):
    """How to start a compiled kernel: ``function(x, y, z, stream, *options, …)`` and its arguments, ``flat`` or in a
    list."""

    function: Callable[..., None]
    options: tuple[Any, ...]
    flat: bool


def _start_3_6(compiled: Any) -> Start:
    run = compiled.run
    # A launcher of descriptors is a function around the one in C, which it has as `launcher`.
    function = (
        inspect.getclosurevars(run.launch).nonlocals["launcher"] if inspect.isfunction(run.launch) else run.launch
    )
    attributes = (run.launch_cooperative_grid, run.launch_pdl)
    return Start(function, (compiled.function, *attributes, None, None, compiled.packed_metadata, *[None] * 3), True)


def _start_3_7(compiled: Any) -> Start:
    from triton.runtime import driver

    run = compiled.run
    attributes = (run.launch_cooperative_grid, run.launch_pdl, compiled.packed_metadata)
    described = (run.arg_annotations, run.kernel_signature)
    return Start(driver.active.utils.launch, (compiled.function, *attributes, *[None] * 5, *described), False)


FORMS: dict[str, Callable[[Any], Start]] = {"3.6": _start_3_6, "3.7": _start_3_7}
"""Triton versions whose launcher is known. Its options are, in order: cooperative grid, programmatic dependent launch,
the kernel's metadata, what hooks get, two hooks, two kinds of scratch memory; in 3.6 the last come third."""


def start_of(compiled: Any) -> Start | None:
    """How to start the kernel; None where only Triton knows."""
    import triton

    form = FORMS.get(".".join(triton.__version__.split(".")[:2]))
    run: Any = getattr(compiled, "run", None)
    if form is None or type(run).__module__ != "triton.backends.nvidia.driver":
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None  # memory that Triton takes at every launch
    return form(compiled)


class Tiles:
    """The tensor maps of one descriptor argument: all but the address is fixed."""

    def __init__(self, descriptor: Any, meta: Any) -> None:
        self.kind, self.meta = type(descriptor), meta
        self.fixed = {name: value for name, value in vars(descriptor).items() if name != "base"}  # keeps no tensor
        self.form = f"{self.kind.__module__} {self.fixed} {meta}"

    def expand(self, address: int) -> list[Any]:
        """What the launcher gets for the descriptor: its tensor map, and its sizes and strides."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        moved = object.__new__(self.kind)
        moved.__dict__.update(self.fixed, base=SimpleNamespace(data_ptr=lambda: address))
        expanded: list[Any] = make_tensordesc_arg(moved, self.meta)
        return expanded

    def encode(self, address: int) -> Any:
        """The tensor map, from now on in ``_maps``."""
        if len(_maps) >= MOST_MAPS:
            _maps.clear()
        made = _maps[self.form, address] = self.expand(address)[0]
        return made


STREAM = 3
"""Where a launcher takes its stream: behind the grid."""


class Launch:
    """A launch that was made, with holes where its addresses were."""

    def __init__(self, compiled: Any, start: Start, programs: int, arguments: Sequence[Any], place: Place) -> None:
        self.compiled, (self.function, options, flat) = compiled, start
        before = [programs, 1, 1, 0, *options]
        self.nested = None if flat else before
        self.arguments: list[Any] = before if flat else []
        self.pointers: list[tuple[int, int, int]] = []
        self.tiles: list[tuple[int, int, int, Tiles]] = []
        metas = iter(compiled.metadata.tensordesc_meta or ())
        for argument in arguments:
            if isinstance(argument, Tensor):
                self.pointers.append((len(self.arguments), *place(argument)))
                self.arguments.append(None)
            elif hasattr(argument, "block_shape"):
                tiles = Tiles(argument, next(metas))
                self.tiles.append((len(self.arguments), *place(argument.base), tiles))
                self.arguments += [None, *tiles.expand(argument.base.data_ptr())[1:]]
            else:
                self.arguments.append(argument)

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on a stream of the current device; ``addresses`` are multiples of 16, as those of the first time."""
        arguments = self.arguments.copy()
        for at, which, behind in self.pointers:
            arguments[at] = addresses[which] + behind
        for at, which, behind, tiles in self.tiles:
            address = addresses[which] + behind
            arguments[at] = _maps.get((tiles.form, address)) or tiles.encode(address)
        if self.nested is None:
            arguments[STREAM] = stream
            self.function(*arguments)
        else:
            before = self.nested.copy()
            before[STREAM] = stream
            self.function(*before, arguments)


@functools.cache
def _runtime() -> Any:
    """Triton's settings; None where there is no Triton, or one without them."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.runtime


def hooked() -> bool:
    """Does somebody want to know of every launch, as profilers do? Then only Triton's own way tells them; as where
    that cannot be found out."""
    runtime = _runtime()
    if runtime is None:
        return True
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def descriptor(
    kind: Any, base: Tensor, shape: Sequence[int], strides: Sequence[int], block: list[int], **more: Any
) -> Any:
    """A ``TensorDescriptor`` of either Triton or Gluon, without its checks (3 µs each), for callers that made them."""
    made = object.__new__(kind)
    made.__dict__.update(base=base, shape=list(shape), strides=list(strides), block_shape=block, **more)
    return made
