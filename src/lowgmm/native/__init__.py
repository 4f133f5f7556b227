"""The CPU backend's compiled code (``lowgmm.h`` says what is in it), through ctypes.

Optional: where the extension was not built, or the CPU has none of its instruction sets, :func:`library` is None and
oneDNN does the work. ``LOWGMM_NATIVE=0`` turns it off, ``LOWGMM_CPU_ISA`` forces one instruction set.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowgmm.formats import by_channels, group_size, pack_nibbles, unpack_nibbles
from lowgmm.layer import LayerSpec, Weights
from lowgmm.shapes import UnsupportedError

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int8: 3}
ACTIVATIONS = {"silu": 0, "gelu": 1, "relu2": 2, "none": 3, "swiglu_oai": 4}
ON_REQUEST = ("amx", "scalar")
"""Instruction sets that are not chosen unless forced: AMX has only run emulated, and oneDNN is faster than plain C."""

_p, _i64, _i32, _f32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Weights(ctypes.Structure):
    _fields_ = [
        *((name, _p) for name in ("packed", "scales")),
        *((name, _i64) for name in ("scale_expert", "scale_group", "E", "N", "K", "group", "bits")),
    ]


class _Quantize(ctypes.Structure):
    _fields_ = [
        *((name, _p) for name in ("x", "q", "scales", "start")),
        *((name, _i64) for name in ("rows", "K", "x_stride", "q_stride", "group")),
        *((name, _i32) for name in ("kind", "offset")),
        ("clip", _f32),
        ("unused", _i32),
        ("next", _i64),
    ]


class _Gmm(ctypes.Structure):
    _fields_ = [
        ("w", _Weights),
        *((name, _p) for name in ("x", "scales_x", "bias", "out", "offsets", "scratch")),
        *((name, _i64) for name in ("scratch_bytes", "rows", "x_stride", "out_stride")),
        *((name, _i32) for name in ("kind", "out_kind", "offset_bytes")),
        ("clip", _f32),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("w13", _Weights),
        ("w2", _Weights),
        *((name, _p) for name in ("bias_w13", "bias_w2", "hidden", "ids", "topk_weights", "out", "scratch")),
        *((name, _i64) for name in ("scratch_bytes", "T", "A", "hidden_stride")),
        *((name, _i32) for name in ("kind", "between", "activation", "ids_bytes")),
        *((name, _f32) for name in ("alpha", "limit", "clip")),
        ("unused", _i32),
    ]


@dataclass(frozen=True)
class Library:
    """The compiled code and the instruction set chosen for it."""

    call: Any
    """The ctypes library."""
    parallel: int | None
    """See :func:`_parallel`."""
    index: int
    """Of the instruction set."""
    name: str
    channels: int
    """Output channels of a packed block."""
    unsigned8: bool
    """INT8 weights are packed as w + 128."""
    pad: dict[int, int]
    """Bits of the weights -> multiple to which K is padded."""

    def offset(self, bits: int) -> int:
        """What was added to the packed weights."""
        return 8 if bits == 4 else 128 if self.unsigned8 else 0


@functools.cache
def library() -> Library | None:
    """The compiled code for this CPU, or None where it cannot run."""
    return _choose()[0]


def explain() -> str:
    """What :func:`library` chose, and why, in words."""
    return _choose()[1]


@functools.cache
def _choose() -> tuple[Library | None, str]:
    forced = os.environ.get("LOWGMM_CPU_ISA", "")
    if os.environ.get("LOWGMM_NATIVE", "1") == "0":
        return None, "native code turned off (LOWGMM_NATIVE=0)"
    # Only what this interpreter built: a folder may hold another Python's library, of another version of the code.
    names = (Path(__file__).with_name(f"_native{suffix}") for suffix in EXTENSION_SUFFIXES)
    built = next((path for path in names if path.exists()), None)
    if built is None:
        if forced:
            raise UnsupportedError(f"LOWGMM_CPU_ISA={forced}: the native code was not built (pip install builds it).")
        return None, "native code not built (no C compiler at installation)"
    call = ctypes.CDLL(str(built))
    sizes = (ctypes.sizeof(_Quantize) << 40) | (ctypes.sizeof(_Gmm) << 20) | ctypes.sizeof(_Layer)
    call.lowgmm_layout.restype = _i64
    for function in (call.lowgmm_quantize, call.lowgmm_gmm, call.lowgmm_layer):
        function.argtypes, function.restype = (_p, _i64, _p, ctypes.c_uint), _i64
    call.lowgmm_quantize.restype = None
    if call.lowgmm_layout() != sizes:
        raise ImportError(f"{built} was built from another version of lowgmm: build it again (pip install).")
    found = _instruction_sets(call)
    usable = [name for name, (_, supported) in found.items() if supported]
    if forced and forced not in usable:
        raise UnsupportedError(f"LOWGMM_CPU_ISA={forced}: this CPU and build have {', '.join(usable)}.")
    name = forced or next((name for name in usable if name not in ON_REQUEST), None)
    if name is None:
        return None, f"native code built, but this CPU has none of {', '.join(n for n in found if n not in ON_REQUEST)}"
    layout = (_i32 * 4)()
    call.lowgmm_isa_layout(_i64(found[name][0]), layout)
    chosen = Library(call, _parallel(), found[name][0], name, layout[0], bool(layout[1]), {8: layout[2], 4: layout[3]})
    why = "forced by LOWGMM_CPU_ISA" if forced else "the fastest of " + ", ".join(usable)
    return chosen, f"native {name} loops ({why})"


def _instruction_sets(call: Any) -> dict[str, tuple[int, bool]]:
    """Compiled instruction sets, best first: name -> index, and whether this CPU has it."""
    call.lowgmm_isa_name.restype = ctypes.c_char_p
    found: dict[str, tuple[int, bool]] = {}
    while (name := call.lowgmm_isa_name(_i64(len(found)))) is not None:
        found[name.decode()] = len(found), bool(call.lowgmm_isa_supported(_i64(len(found))))
    return found


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


class _Scratch(threading.local):
    """Kept between calls, per Python thread: fresh pages would be zeroed by the kernel at every call."""

    memory: Tensor | None = None
    address: int | None = None
    size = 0


_scratch = _Scratch()
KEEP_BYTES = 64 << 20
"""More than this is given back after the call."""


def _run(lib: Library, function: Any, args: _Gmm | _Layer, out: Tensor) -> int:
    """Fill ``out``: call the compiled code with the scratch it needs, on torch's threads and without the GIL (ctypes
    releases it)."""
    if out.nbytes >= MAPPED_BYTES:
        advise_huge_pages(out)
    kept = _scratch
    args.scratch, args.scratch_bytes = kept.address, kept.size
    result: int = function(ctypes.byref(args), lib.index, lib.parallel, torch.get_num_threads())
    if result <= 0:
        return result
    memory = _new((result,), torch.int8)
    advise_huge_pages(memory)
    args.scratch, args.scratch_bytes = memory.data_ptr(), result
    if result <= KEEP_BYTES:
        kept.memory, kept.address, kept.size = memory, args.scratch, result
    return int(function(ctypes.byref(args), lib.index, lib.parallel, torch.get_num_threads()))


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for the C code: on the CPU and of this dtype, whatever the caller's defaults are."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def pack(values: Tensor, bits: int) -> Tensor:
    """A QuantTensor's ``values`` [E, N, K] int8, or 4-bit [E, N, K/2] -> bytes [E, blocks, steps, bytes]: see
    lowgmm.h."""
    lib = library()
    assert lib is not None
    E, N, K = values.shape[0], values.shape[1], values.shape[2] * 8 // bits
    channels, per_step = lib.channels, 32 // bits
    shape, dtype = _layout(lib, E, N, K, bits)
    _, blocks, steps, _ = shape
    out = _new(shape, dtype)
    advise_huge_pages(out)
    for e in range(E):  # expert by expert, so that the padded working copy is one expert's
        padded = _new((blocks * channels, steps * per_step), torch.int8).zero_()
        padded[:N, :K] = unpack_nibbles(values[e]) if bits == 4 else values[e]
        shifted = padded.view(torch.uint8) + lib.offset(bits)  # wraps: w + 128 is w with its sign bit flipped
        blocked = shifted.view(blocks, channels, steps, -1, 4).permute(3, 0, 2, 1, 4)
        packed = blocked[0] if bits == 8 else blocked[0] | (blocked[1] << 4)
        out[e] = packed.reshape(blocks, steps, -1).view(dtype)
    return out


def _layout(lib: Library, E: int, N: int, K: int, bits: int) -> tuple[tuple[int, int, int, int], torch.dtype]:
    """Shape and dtype of packed weights: no two layouts have both in common. Bytes are int8 where nothing was added."""
    steps = -(-K // lib.pad[bits]) * lib.pad[bits] * bits // 32
    shape = (E, -(-N // lib.channels), steps, lib.channels * 4)
    return shape, torch.uint8 if lib.offset(bits) else torch.int8


def unpack(packed: Tensor, N: int, K: int, bits: int) -> Tensor:
    """The inverse of :func:`pack`."""
    lib = library()
    assert lib is not None
    E, blocks, steps = packed.shape[:3]
    values = _new((E, N, K * bits // 8), torch.int8 if bits == 8 else torch.uint8)
    for e in range(E):
        parts = [packed[e]] if bits == 8 else [packed[e] & 15, packed[e] >> 4]
        blocked = torch.stack([(part - lib.offset(bits)).view(blocks, steps, lib.channels, 4) for part in parts], 3)
        codes = blocked.transpose(1, 2).reshape(blocks * lib.channels, -1).view(torch.int8)[:N, :K]
        values[e] = codes if bits == 8 else pack_nibbles(codes.contiguous())
    return values


MAPPED_BYTES = 32 << 20
"""Memory of this size malloc takes from the system at every call. Touching it in pages of 4 KiB takes a fifth of the
time of a product with 128 rows per expert."""


def advise_huge_pages(t: Tensor) -> None:
    """2 MiB pages where the system gives them on request: a stream of weights then translates fewer addresses."""
    huge, advice = 2 << 20, 14  # MADV_HUGEPAGE
    start = -(-t.data_ptr() // huge) * huge
    length = (t.data_ptr() + t.nbytes - start) // huge * huge
    if length > 0:
        ctypes.CDLL(None).madvise(_p(start), ctypes.c_size_t(length), advice)  # a hint: refusal changes nothing


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def quantize_tokens(x: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """``quant.quantize_rows`` for INT8, to the bit: values [M, K] and scales [M] of a float ``x``."""
    lib = library()
    assert lib is not None
    x = x if x.stride(1) == 1 else x.contiguous()
    (M, K), q, scales = x.shape, _new(x.shape, torch.int8), _new(x.shape[:1], torch.float32)
    args = _Quantize(
        x=x.data_ptr(), q=q.data_ptr(), scales=scales.data_ptr(), start=None, rows=M, K=K, x_stride=x.stride(0),
        q_stride=K, group=K, kind=KINDS[x.dtype], clip=math.inf if clip is None else clip,
    )  # fmt: skip
    lib.call.lowgmm_quantize(ctypes.byref(args), lib.index, lib.parallel, torch.get_num_threads())
    return q, scales


def _weights(stand_in: Tensor, packed: Tensor, scales: Tensor | None) -> tuple[_Weights, Tensor | None]:
    """The C description, and the scales to keep alive with it. ``scales`` [E, N], or [E, N, k] in any layout."""
    (E, N, K), expert, step = stand_in.shape, 0, 0
    bits = 8 if stand_in.dtype == torch.int8 else 4
    lib = library()
    if lib is None or (packed.shape, packed.dtype) != _layout(lib, E, N, K, bits) or not packed.is_contiguous():
        here = "which does not run here" if lib is None else f"but not as {lib.name} on this CPU reads [{E}, {N}, {K}]"
        raise UnsupportedError(
            f"gmm: these weights were packed for the native code, {here}: {list(packed.shape)} {packed.dtype}. Packed "
            "weights belong to the CPU and the settings that they were packed under; pack plain ones again."
        )
    group = K
    if scales is not None and scales.dim() == 3:
        if scales.stride(1) != 1:  # the loops read neighbouring channels' scales as a vector
            scales = by_channels(scales)
        group = group_size(K, scales.shape[2])
        expert, step = scales.stride(0), scales.stride(2)
    elif scales is not None:
        expert = N
    return _Weights(packed.data_ptr(), _pointer(scales), expert, step, E, N, K, group, bits), scales


def gmm(
    out: Tensor,
    x: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
) -> bool:
    """Fill ``out [M, N]``; ``weights``: stand-in [E, N, K] and packed part. False, and nothing done, if the ``offsets
    [E+1]`` do not cut M rows into groups."""
    w, scales_w = _weights(weights[0], weights[1], scales_w)
    x = x if x.stride(1) == 1 else x.contiguous()
    offsets = offsets.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    args = _Gmm(
        w, x.data_ptr(), _pointer(scales_x), _pointer(bias), out.data_ptr(), offsets.data_ptr(), None,
        0, x.shape[0], x.stride(0), out.stride(0),
        KINDS[x.dtype], KINDS[out.dtype], offsets.element_size(), math.inf if clip is None else clip,
    )  # fmt: skip
    lib = library()
    assert lib is not None
    return _run(lib, lib.call.lowgmm_gmm, args, out) == 0


class Layer:
    """An expert layer's weights and options, described for the C code once: gate rows first, weights applied to the
    outputs, one scale per token. Calls fill in the tokens."""

    def __init__(self, w13: Weights, w2: Weights, spec: LayerSpec) -> None:
        biases = [None if w.bias is None else w.bias.float().contiguous() for w in (w13, w2)]
        (up, scales13), (down, scales2) = (_weights(w.operands[0], w.operands[1], w.scales) for w in (w13, w2))
        self._fixed = _Layer(
            w13=up, w2=down, bias_w13=_pointer(biases[0]), bias_w2=_pointer(biases[1]),
            activation=ACTIVATIONS[spec.activation], alpha=spec.slope,
            limit=math.inf if spec.bound is None else spec.bound, clip=math.inf if spec.clip is None else spec.clip,
        )  # fmt: skip
        self._alive = (w13.operands, w2.operands)
        self.kept = (scales13, biases[0], scales2, biases[1])
        """The scales and biases that calls read: those given, or copies of another dtype or layout."""

    def __call__(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        lib = library()
        assert lib is not None
        hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        ids, weights, dtype = topk_ids.contiguous(), topk_weights.float().contiguous(), hidden.dtype
        out = torch.empty(hidden.shape, dtype=dtype, device="cpu")
        args = _Layer.from_buffer_copy(self._fixed)
        args.hidden, args.ids, args.topk_weights = hidden.data_ptr(), ids.data_ptr(), weights.data_ptr()
        args.out, args.hidden_stride, args.ids_bytes = out.data_ptr(), hidden.stride(0), ids.element_size()
        args.T, args.A = ids.shape
        args.kind = args.between = KINDS[dtype]
        if dtype == torch.float16:
            args.between = KINDS[torch.float32]
        _run(lib, lib.call.lowgmm_layer, args, out)
        return out
