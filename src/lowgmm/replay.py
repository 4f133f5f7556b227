"""Calls made again by their launches alone.

All that a call decides on the host follows from shapes, strides, dtypes, the device and options: what its checks say,
the configuration, compile-time values, grids, sizes of scratch memory, which compiled kernel Triton takes. Deciding it
costs 100 µs; a grouped matmul in decode takes 30. So a call of a new kind is made in full, and a :class:`Tape` notes
what memory it takes and what it launches. For the next call of the kind that is the whole work: take the memory, put
the new addresses in, launch.

What cannot be told apart so goes the long way at every call: a pointer that is no multiple of 16 (Triton compiles
another kernel for it), memory that came from elsewhere than :func:`empty` and :func:`counted` (a copy made contiguous,
say), a launcher that is not known.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowgmm.relaunch import Launch, Start, hooked, start_of
from lowgmm.shapes import byte_span

ALIGNED = 16
"""Bytes. Triton compiles another kernel for a pointer that is no multiple of that."""

PIECE = 512
"""Bytes. Allocators on a GPU start a tensor at a multiple of that; so does each part of scratch memory."""

MOST = 4096
"""Keys of calls remembered (a plan takes 6 KB); then all are forgotten."""

KINDS = 64
"""Most kinds of calls with the same key, such as other experts and devices; the one noted first gives way. All their
guards take 10 µs, a tenth of a call in full."""

Guard = Callable[..., bool]
_plans: dict[Hashable, tuple[tuple[Guard, Plan | None], ...]] = {}
"""Plans, with what tells whether tensors are like those of the call that was noted; None where it had none."""


class Absent(Tensor):
    """Stands for None among tensors: no other is of this type, which guards look at as well."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


with _disable_current_modes():  # somebody's fake tensors, where they import us
    ABSENT = tuple(torch.empty(0, device="cpu").as_subclass(Absent) for _ in range(32))
"""One for every place: guards take no tensor twice."""


class _Thread(threading.local):
    tape: Tape | None = None
    """What this thread's call is noted on."""


_thread = _Thread()


def serves(first: Any) -> bool:
    """Are calls with this tensor remembered? Those on a GPU, with tensors that have memory."""
    return type(first) is Tensor and first.is_cuda


def run(
    call: Callable[..., Tensor], arguments: Sequence[Any], tensors: Sequence[Tensor | None], options: Sequence[Hashable]
) -> Tensor:
    """``call(*arguments)``, or what it did for arguments that differ in nothing but addresses and contents.

    Args:
        call: launches by :func:`launch` alone, into memory from :func:`empty` and :func:`counted`; returns such memory,
            or one of ``tensors``.
        tensors: all those among the arguments, in a fixed order.
        options: everything else among them.
    """
    if not serves(tensors[0]):
        return call(*arguments)
    known, filled, plan = _find(call, tensors, options)
    if not known and len({*map(id, filled)}) == len(filled) and _addresses(filled) is not None:
        return _noted(call, arguments, filled, options)
    result = None if plan is None else _repeat(plan, filled)
    return call(*arguments) if result is None else result


def again(call: Callable[..., Tensor], tensors: Sequence[Tensor | None], options: Sequence[Hashable]) -> Tensor | None:
    """:func:`run` of a call that is known; None if it is not, or cannot be replayed.

    Knowing it includes that PyTorch's dispatcher would do the same with these tensors as with those that were noted.
    """
    if not serves(tensors[0]):
        return None
    _, filled, plan = _find(call, tensors, options)
    return None if plan is None else _repeat(plan, filled)


def _key(call: Callable[..., Tensor], filled: list[Tensor], options: Sequence[Hashable]) -> Hashable:
    """What guards do not tell apart; and a shape, so that few of them have to be asked."""
    return (call, len(filled), filled[0].shape, torch.is_grad_enabled(), *options)


def _find(
    call: Callable[..., Tensor], tensors: Sequence[Tensor | None], options: Sequence[Hashable]
) -> tuple[bool, list[Tensor], Plan | None]:
    """Is such a call known? The tensors as guards want them. The plan for it, if there is one."""
    filled = [absent if t is None else t for t, absent in zip(tensors, ABSENT, strict=False)]
    for guard, plan in _plans.get(_key(call, filled, options), ()):
        if guard(*filled):
            return True, filled, plan
    return False, filled, None


def _addresses(filled: list[Tensor]) -> list[int] | None:
    """The tensors' addresses; None where a launch is not ours to make."""
    addresses = [*map(Tensor.data_ptr, filled)]
    return None if reduce(or_, addresses) % ALIGNED or debugging() or hooked() else addresses


def _repeat(plan: Plan, filled: list[Tensor]) -> Tensor | None:
    addresses = _addresses(filled)
    if addresses is None:
        return None
    if _thread.tape is not None:  # the call around this one cannot say what was launched
        _thread.tape.known = False
    return plan(filled, addresses)


def _noted(
    call: Callable[..., Tensor], arguments: Sequence[Any], filled: list[Tensor], options: Sequence[Hashable]
) -> Tensor:
    around, tape, plans = _thread.tape, Tape(), _plans
    if around is not None:
        around.known = False
    try:
        _thread.tape = tape
        result = call(*arguments)
    finally:
        _thread.tape = around
    if len(plans) >= MOST:
        plans.clear()
    key = _key(call, filled, options)
    plans[key] = (_guarded(filled, tape, result), *plans.get(key, ())[: KINDS - 1])
    return result


def _guarded(filled: list[Tensor], tape: Tape, result: Tensor) -> tuple[Guard, Plan | None]:
    # What torch.compile guards its code with: exact types, dispatch keys as modes and transforms leave them, dtypes,
    # devices, sizes, strides, and whether tensors require gradients. A tenth of the time of a look at each.
    try:
        guards = torch._C._dynamo.guards.TensorGuards(*filled, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (AttributeError, TypeError):  # another PyTorch's: nothing tells calls apart, so all run in full
        return lambda *_: True, None
    return guards.check, tape.plan(filled, result)


def forget() -> None:
    """Decide everything anew: something other than the calls themselves has changed."""
    global _plans
    _plans = {}  # calls that are being noted, as decided before, still go into the old one


_environment: Any = getattr(os.environ, "_data", None)
"""``os.environ`` without its conversions, which cost 1 µs a look."""


def debugging() -> bool:
    """With LOWGMM_DEBUG=1, contents are checked too, at every call."""
    if _environment is not None and b"LOWGMM_DEBUG" not in _environment and os.name == "posix":
        return False
    return os.environ.get("LOWGMM_DEBUG", "0") not in ("", "0")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty``, which a plan can repeat."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if _thread.tape is not None:
        _thread.tape.made.append(made)
    return made


def counted(take: Callable[[int], Tensor], stream: int) -> Tensor:
    """``take(stream)``, which a plan has to call again: memory that depends on the stream."""
    found = take(stream)
    if _thread.tape is not None:
        _thread.tape.taken.append((found, take))
    return found


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """``kernel[(programs,)](*arguments, **options)``, which a plan can repeat.

    Args:
        kernel: of ``@triton.jit`` or ``@gluon.jit``.
        arguments: its parameters in order; the last, compile-time ones may be among the options.
        options: those, and ``num_warps`` and such.
    """
    compiled = kernel[(programs,)](*arguments, **options)
    if _thread.tape is not None:
        rest = (options[name] for name in kernel.arg_names[len(arguments) :])
        _thread.tape.launched(compiled, programs, (*arguments, *rest))


class Tape:
    """What a call takes and launches."""

    def __init__(self) -> None:
        self.known = True
        self.made: list[Tensor] = []
        self.taken: list[tuple[Tensor, Callable[[int], Tensor]]] = []
        self.launches: list[tuple[Any, Start, int, tuple[Any, ...]]] = []

    def launched(self, compiled: Any, programs: int, arguments: tuple[Any, ...]) -> None:
        start = start_of(compiled)
        if start is None:
            self.known = False
        else:
            self.launches.append((compiled, start, programs, arguments))

    def plan(self, tensors: Sequence[Tensor], result: Tensor) -> Plan | None:
        """How to do the same for tensors at other addresses; None where that cannot be told."""
        # Addresses come in this order: the tensors', the result's, all scratch memory's, and of what is taken.
        count, scratch = len(tensors), 0
        spans = [(*byte_span(t), i, 0) for i, t in enumerate(tensors) if type(t) is not Absent]
        for t in self.made:
            mine = t is result
            spans.append((*byte_span(t), count if mine else count + 1, 0 if mine else scratch))
            scratch += 0 if mine else -(-t.nbytes // PIECE) * PIECE
        spans += [(*byte_span(t), count + 2 + i, 0) for i, (t, _) in enumerate(self.taken)]
        spans.sort()
        if not self.known or any(second[0] < first[1] for first, second in pairwise(spans)):
            return None  # whose memory an address is in would be a guess
        given = [i for i, t in enumerate(tensors) if t is result]
        if not given and not any(t is result for t in self.made):
            return None  # a part of something, or from elsewhere

        def place(t: Tensor) -> tuple[int, int]:
            at = t.data_ptr()
            return next((which, behind + at - start) for start, end, which, behind in spans if start <= at < end)

        try:
            launches = [Launch(*made, place) for made in self.launches]
        except StopIteration:
            return None
        written = given[0] if given else count
        if not any(written == which for made in launches for _, which, _ in made.pointers):
            return None  # it came about in another way
        return Plan(tensors, result, written, scratch, [take for _, take in self.taken], launches)


class Plan:
    """A call that differs from one that was made in addresses and contents only."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        result: Tensor,
        written: int,
        scratch: int,
        taken: list[Callable[[int], Tensor]],
        launches: list[Launch],
    ) -> None:
        self.device, self.index, self.taken, self.launches = result.device, result.device.index, taken, launches
        self.written = written if written < len(tensors) else None
        self.result = (tuple(result.shape), result.stride(), result.dtype)
        self.scratch = ((scratch,), (1,), torch.uint8) if scratch else None
        self.current, self.stream, self.empty = _functions(self.device)

    def __call__(self, tensors: Sequence[Tensor], addresses: list[int]) -> Tensor:
        """Launch; ``addresses``, of the tensors, are added to."""
        if self.current() != self.index:
            with torch.cuda.device(self.device):
                return self(tensors, addresses)
        result = self.empty(*self.result) if self.written is None else tensors[self.written]
        addresses.append(result.data_ptr())
        if self.scratch is None:
            addresses.append(0)
        else:
            scratch = self.empty(*self.scratch)  # until the last launch
            addresses.append(scratch.data_ptr())
        stream = self.stream(self.index)
        taken = [take(stream) for take in self.taken]  # likewise: it may have been made for this call
        addresses += map(Tensor.data_ptr, taken)
        for again in self.launches:
            again(stream, addresses)
        return result


def _functions(device: torch.device) -> tuple[Callable[[], int | None], Callable[[Any], int], Callable[..., Tensor]]:
    """Of the device's kind: which one is current, its stream, and ``torch.empty_strided`` without the dispatcher."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    # What torch.compile's own code allocates with: a third of the time.
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    if allocate is None:
        allocate = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=kind)  # noqa: E731
    if kind == "cpu":
        return lambda: None, lambda _: 0, allocate
    return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, allocate
