"""Launching a Triton kernel a second time without the work of the first.

At every launch Triton's binder looks at each argument to find the compiled kernel that fits it: 15 to 19 µs for a
grouped matmul, a good part of what one takes. Where the caller knows what decides that (its key), the kernel found
before is launched directly, in the way that Triton documents for a compiled kernel: ``compiled[grid](*arguments)``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

ALIGNED = 16
"""Bytes. Triton compiles another kernel for a pointer that is no multiple of that."""

MOST = 4096
"""Keys remembered per kernel; then all are forgotten."""


class Relauncher:
    """A ``@triton.jit`` (or Gluon) kernel with a memory of what was bound.

    >>> class Compiled:
    ...     def __getitem__(self, grid):
    ...         return lambda *arguments: print("compiled", grid, arguments)
    >>> class Kernel:
    ...     def __getitem__(self, grid):
    ...         return lambda *arguments, **options: print("bound", grid, arguments) or Compiled()
    >>> launch = Relauncher(Kernel())
    >>> launch(7, "key", [], (1, 2), num_warps=4)
    bound (7,) (1, 2)
    >>> launch(8, "key", [], (3, 4), num_warps=4)
    compiled (8, 1, 1) (3, 4)
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.bound: dict[Hashable, Any] = {}

    def __call__(
        self,
        programs: int,
        key: Hashable,
        pointers: Sequence[Tensor | None],
        arguments: tuple[Any, ...],
        **options: Any,
    ) -> None:
        """Launch.

        Args:
            programs: the grid.
            key: must differ wherever Triton would compile another kernel: the device, dtypes, compile-time values,
                options, and of each specialised integer whether it is 1 and a multiple of 16. Its value itself will do.
            pointers: the tensors among ``arguments``, or None. Which of them are None belongs to the key by itself, and
                their alignment is looked at: if all are, as allocators make them, the remembered kernel is right, else
                Triton decides.
            arguments: every parameter of the kernel in order, compile-time ones too.
            options: ``num_warps`` and such.
        """
        aligned, given = True, 0
        for t in pointers:
            given <<= 1
            if t is not None:
                given |= 1
                if t.data_ptr() % ALIGNED:
                    aligned = False
        if not aligned:
            self.kernel[(programs,)](*arguments, **options)
            return
        compiled = self.bound.get((key, given))
        if compiled is not None:
            compiled[(programs, 1, 1)](*arguments)
            return
        compiled = self.kernel[(programs,)](*arguments, **options)
        if hasattr(compiled, "__getitem__"):  # the interpreter returns nothing that could be launched again
            if len(self.bound) >= MOST:
                self.bound.clear()
            self.bound[key, given] = compiled


def descriptor(
    kind: Any, base: Tensor, shape: Sequence[int], strides: Sequence[int], block: list[int], **more: Any
) -> Any:
    """A ``TensorDescriptor`` of either Triton or Gluon, without its checks (3 µs each), for callers that made them."""
    made = object.__new__(kind)
    made.__dict__.update(base=base, shape=list(shape), strides=list(strides), block_shape=block, **more)
    return made
