"""The compiled INT8 loops of the CPU backend (``int8_gmm.c``), through ctypes.

Optional: where the extension was not built, or the CPU lacks AVX512-VNNI, :func:`library` is None and oneDNN does the
work. ``LOWGMM_NATIVE=0`` turns it off.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHANNELS, K_STEP = 64, 4
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int8: 3}

_p, _i64, _i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Quantize(ctypes.Structure):
    _fields_ = [
        *((name, _p) for name in ("x", "q", "scales", "sums")),
        *((name, _i64) for name in ("rows", "K", "x_stride", "q_stride")),
        ("kind", _i32),
        ("clip", ctypes.c_float),
        ("next", _i64),
    ]


class _Gmm(ctypes.Structure):
    _fields_ = [
        *((name, _p) for name in ("x", "sums", "scales_x", "w", "scales_w", "bias", "out", "offsets")),
        *((name, _i64) for name in ("E", "N", "K", "x_stride", "out_stride")),
        ("out_kind", _i32),
        ("next", _i64),
    ]


@functools.cache
def library() -> Any | None:
    """The loaded library, or None where it cannot run."""
    # Only what this interpreter built: a folder may hold another Python's library, of another version of the code.
    names = (Path(__file__).with_name(f"_int8{suffix}") for suffix in EXTENSION_SUFFIXES)
    built = next((path for path in names if path.exists()), None)
    if built is None or os.environ.get("LOWGMM_NATIVE", "1") == "0":
        return None
    loaded = ctypes.CDLL(str(built))
    if not loaded.lowgmm_supported():
        return None
    if loaded.lowgmm_layout() != ctypes.sizeof(_Quantize) << 16 | ctypes.sizeof(_Gmm):
        raise ImportError(f"{built} was built from another version of lowgmm: build it again (pip install).")
    return loaded


@functools.cache
def _parallel() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded; None (one thread) where it uses another."""
    try:
        with open("/proc/self/maps") as maps:
            lines = [line.rstrip("\n").split(maxsplit=5) for line in maps]
        paths = {fields[5] for fields in lines if len(fields) == 6 and "libgomp" in Path(fields[5]).name}
        inside = [p for p in paths if "torch" in p] or list(paths)
        if len(inside) != 1:
            return None
        return ctypes.cast(ctypes.CDLL(inside[0]).GOMP_parallel, _p).value
    except (OSError, AttributeError):
        return None


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for the C code: on the CPU and of this dtype, whatever the caller's defaults are."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def pack(values: Tensor) -> Tensor:
    """``values [E, N, K]`` int8 -> uint8 [E, N/64, K/4, 64, 4], padded: see int8_gmm.c."""
    E, N, K = values.shape
    blocks, steps = -(-N // CHANNELS), -(-K // K_STEP)
    out = _new((E, blocks, steps, CHANNELS, K_STEP), torch.uint8)
    advise_huge_pages(out)
    for e in range(E):  # expert by expert, so that the padded working copy is one expert's
        padded = _new((blocks * CHANNELS, steps * K_STEP), torch.int8).zero_()
        padded[:N, :K] = values[e]
        blocked = padded.view(torch.uint8).view(blocks, CHANNELS, steps, K_STEP).transpose(1, 2)
        torch.bitwise_xor(blocked, 128, out=out[e])
    return out


def advise_huge_pages(t: Tensor) -> None:
    """2 MiB pages where the system gives them on request: a stream of weights then translates fewer addresses."""
    huge, advice = 2 << 20, 14  # MADV_HUGEPAGE
    start = -(-t.data_ptr() // huge) * huge
    length = (t.data_ptr() + t.nbytes - start) // huge * huge
    if length > 0:
        ctypes.CDLL(None).madvise(_p(start), ctypes.c_size_t(length), advice)  # a hint: refusal changes nothing


def unpack(packed: Tensor, N: int, K: int) -> Tensor:
    """The inverse of :func:`pack`: [E, N, K] int8."""
    E, blocks, steps = packed.shape[:3]
    values = packed.bitwise_xor(128).view(torch.int8).transpose(2, 3).reshape(E, blocks * CHANNELS, steps * K_STEP)
    return values[:, :N, :K].contiguous()


_kept = threading.local()
KEEP_BYTES = 64 << 20
"""Scratch kept between calls, per Python thread: fresh pages would be zeroed by the kernel at every call."""


def _scratch(rows: int, width: int) -> Tensor:
    """[rows, width] int8, valid until this thread's next call."""
    size = rows * width
    if size > KEEP_BYTES:
        return _new((rows, width), torch.int8)
    kept: Tensor | None = getattr(_kept, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = _kept.scratch = _new((size,), torch.int8)
        advise_huge_pages(kept)
    return kept[:size].view(rows, width)


def quantize_tokens(x: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """``quant.quantize_rows`` for INT8, to the bit: values [M, K] and scales [M] of a float ``x``."""
    q = _new(x.shape, torch.int8)
    _, scales = _quantize_into(q, x, None, clip)
    assert scales is not None
    return q, scales


def _quantize_into(q: Tensor, x: Tensor, scales: Tensor | None, clip: float | None) -> tuple[Tensor, Tensor | None]:
    """Fill ``q [M, K or more]`` (zeros behind K) from ``x [M, K]``; return the sum of each row, and the scales.

    A float ``x`` is quantised; an int8 one is copied, or only summed if ``q`` is ``x``, and keeps its ``scales``.
    """
    rows, K = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    sums = _new((rows,), torch.int32)
    if x.dtype != torch.int8:
        scales = _new((rows,), torch.float32)
    args = _Quantize(
        x.data_ptr(),
        None if q.data_ptr() == x.data_ptr() else q.data_ptr(),
        None if scales is None else scales.data_ptr(),
        sums.data_ptr(),
        rows,
        K,
        x.stride(0),
        q.stride(0),
        KINDS[x.dtype],
        math.inf if clip is None else clip,
    )
    lib = library()
    assert lib is not None
    lib.lowgmm_quantize(ctypes.byref(args), _p(_parallel()), torch.get_num_threads())
    return sums, scales


def gmm(
    out: Tensor,
    x: Tensor,
    packed: Tensor,
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
) -> None:
    """Fill the rows of ``out [M, N]`` that belong to an expert; ``offsets [E+1]`` have been checked."""
    K = x.shape[1]
    ready = x.dtype == torch.int8 and K % K_STEP == 0 and x.stride(1) == 1
    q = x if ready else _scratch(len(x), -(-K // K_STEP) * K_STEP)
    sums, scales_x = _quantize_into(q, x, scales_x, clip)
    offsets = offsets.long().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    args = _Gmm(
        q.data_ptr(),
        sums.data_ptr(),
        None if scales_x is None else scales_x.data_ptr(),
        packed.data_ptr(),
        None if scales_w is None else scales_w.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        offsets.data_ptr(),
        packed.shape[0],
        out.shape[1],
        K,
        q.stride(0),
        out.stride(0),
        KINDS[out.dtype],
    )
    lib = library()
    assert lib is not None
    lib.lowgmm_gmm(ctypes.byref(args), _p(_parallel()), torch.get_num_threads())
