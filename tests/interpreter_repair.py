"""Make Triton's interpreter compute what a GPU computes for bf16, FP8 and INT8.

The interpreter keeps bf16 as uint16 and FP8 as uint8 NumPy arrays, and in every release so far (3.6 to 3.9)

- multiplies those bit patterns in `tl.dot` when the operands are bf16;
- truncates on the way to bf16 instead of rounding to nearest even;
- loses the mantissa's carry on the way to FP8, and turns NaN and large values into something else;
- adds and compares bf16 and FP8 tensors as if they were integers.

`install()` replaces the conversions by torch's, the dot by an fp32 or fp64 matmul of decoded operands, and makes
arithmetic on bf16 and FP8 tensors an error: our kernels convert to fp32 first, as Triton's own GPU lowering does.

Only tests import this module, and only after `TRITON_INTERPRET=1` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from triton.runtime import interpreter

Array = npt.NDArray[Any]

FLOATS: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
PACKED = {"bf16", "fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16"}  # held as bit patterns, not as NumPy floats
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
TORCH_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

original_convert_float: Callable[..., Array] = interpreter._convert_float
_original_cast_impl: Callable[..., Any] = interpreter.InterpreterBuilder.cast_impl


def version(text: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in text.split(".")[:2])


def decode(bits: Array, dtype: Any) -> torch.Tensor:
    """The values that the array `bits` holds as Triton dtype `dtype`, as a torch tensor of the same type."""
    torch_dtype = FLOATS[dtype.scalar.name]
    words = np.array(bits, order="C").view(SIGNED[torch_dtype.itemsize])  # a copy: torch wants writable memory
    return torch.from_numpy(words).view(torch_dtype)


def encode(values: torch.Tensor, dtype: Any) -> Array:
    """`values` rounded to nearest even as Triton dtype `dtype`, as the bit patterns that the interpreter holds."""
    torch_dtype = FLOATS[dtype.scalar.name]
    if torch_dtype.itemsize == 1:
        # The hardware's conversion saturates, infinities included, and keeps NaN; torch saturates in some releases.
        largest = torch.finfo(torch_dtype).max
        values = values.clamp(-largest, largest)
    words = values.to(torch_dtype).view(TORCH_BITS[torch_dtype.itemsize]).numpy()
    return words.view(UNSIGNED[torch_dtype.itemsize])


def _convert_float(bits: Array, source: Any, target: Any, rounding: Any) -> Array:
    known = source.scalar.name in FLOATS and target.scalar.name in FLOATS
    if not known or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        return original_convert_float(bits, source, target, rounding)  # towards zero is what the original does right
    values = decode(bits, source)
    return encode(values if values.dtype == torch.float64 else values.float(), target)


def _cast_impl(builder: Any, handle: Any, target: Any) -> Any:
    """Casts to and from bf16 and FP8 that the original does as if the bit pattern were an integer."""
    source, target_scalar = handle.dtype.scalar, target.scalar
    if target_scalar.name in PACKED or source.name in PACKED:
        if target_scalar.name in FLOATS and source.name in FLOATS:
            bits = _convert_float(handle.data, source, target_scalar, None)
        elif target_scalar.name in FLOATS:  # an integer
            bits = encode(torch.from_numpy(handle.data.astype(np.float64)).float(), target_scalar)
        else:
            raise NotImplementedError(f"convert {source} to fp32 before {target_scalar}")
        return interpreter.TensorHandle(bits.view(interpreter._get_np_dtype(target_scalar)), target_scalar)
    return _original_cast_impl(builder, handle, target)


def _create_dot(builder: Any, a: Any, b: Any, acc: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    if a.dtype.scalar.is_floating():
        product = np.matmul(decode(a.data, a.dtype).float().numpy(), decode(b.data, b.dtype).float().numpy())
    else:
        # fp64 holds every partial sum exactly (|acc| < 2⁵³) and has a BLAS; NumPy's integer matmul is a plain loop.
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.int64)
    return interpreter.TensorHandle(product.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)


def _refuse_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, except that a bf16 or FP8 operand is an error instead of integer arithmetic on its bits."""

    def checked(builder: Any, handle: Any, *rest: Any) -> Any:
        if handle.dtype.scalar.name in PACKED:
            raise NotImplementedError(
                f"arithmetic on {handle.dtype.scalar}: the interpreter needs a cast to fp32 first"
            )
        return original(builder, handle, *rest)

    return checked


def install() -> None:
    """Repair the interpreter of this process. Calling it again changes nothing."""
    if version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4):
        raise RuntimeError(
            f"Triton {triton.__version__}'s interpreter cannot loop up to an argument with NumPy {np.__version__}: "
            f"install numpy<2.4 or triton>=3.7.1"
        )
    builder = interpreter.InterpreterBuilder
    if builder.cast_impl is _cast_impl:
        return
    interpreter._convert_float = _convert_float
    builder.cast_impl = _cast_impl
    builder.create_dot = _create_dot
    builder.binary_op = _refuse_packed(builder.binary_op)
    builder.unary_op = _refuse_packed(builder.unary_op)
