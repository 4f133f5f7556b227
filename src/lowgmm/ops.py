"""The registered operators: schemas, fakes, and which backend runs.

Device dispatch is PyTorch's: a CPU key, a CUDA key and a fake. ``impl`` is the one explicit override. Backends are
imported when an operator first runs, so importing lowgmm imports neither triton nor a compiler.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowgmm import replay
from lowgmm.formats import FLOATS, format_of, get_format, unpack_nibbles
from lowgmm.shapes import UnsupportedError, check_no_overlap, is_abstract
from lowgmm.tile_config import TileConfig
from lowgmm.validate import check_gmm, check_tokens, checked_bounds

OPERANDS = (
    "Tensor input, Tensor[] weights, Tensor? scales_x, Tensor? scales_w, Tensor expert_offsets, Tensor? bias, "
    "float? clip, str impl, str? config"
)

library = torch.library.Library("lowgmm", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
library.define(f"gmm({OPERANDS}, ScalarType out_dtype, bool fast_accum=False) -> Tensor", tags=TAGS)
library.define(f"gmm_out({OPERANDS}, Tensor(a!) output, bool fast_accum=False) -> ()", tags=TAGS)
library.define("quantize_tokens(Tensor x, str format, float? clip, str impl) -> (Tensor, Tensor)", tags=TAGS)


def check_offsets_now(offsets: Tensor, num_rows: int) -> None:
    """With LOWGMM_DEBUG=1, read device offsets back and check their contents. Costs a synchronisation, so it is off
    otherwise."""
    if replay.debugging():
        checked_bounds(offsets, num_rows)


# What a call costs on the host: a grouped matmul in decode takes 30 to 200 µs, and nothing may keep a GPU waiting that
# long. Each has a short way round: the dispatcher (12 µs) here, checks of shapes that were checked before (10 µs) here
# and on a GPU in `replay.py`, with everything else that was decided before.

Signature = tuple[object, ...]
_accepted: dict[Signature, tuple[int, int]] = {}
"""Signatures of calls that passed every check, and their (M, N)."""
MAX_ACCEPTED = 4096


def plain(*tensors: Tensor | None) -> bool:
    """Would the dispatcher do nothing but call us? True for ordinary tensors that nobody traces, compiles, transforms,
    or takes gradients of."""
    if not quiet():
        return False
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and (
            type(t) not in ORDINARY or not (t.is_cuda or t.is_cpu) or t.is_neg() or (grad and t.requires_grad)
        ):
            return False
    return True


def quiet() -> bool:
    """Does nobody trace, compile, transform or look at what is called?"""
    return not (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _transforms() is not None
        or _tracing() is not None
        or _autocast()
        or _profiling()
        or forward_ad._current_level >= 0
    )


def refuse_tangents(op: str, *tensors: Tensor | None) -> None:
    """Derivatives in forward mode would be 0 without a word: what is called through the dispatcher has none."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        for t in tensors:
            if isinstance(t, Tensor) and not t.is_mkldnn and forward_ad.unpack_dual(t).tangent is not None:
                raise UnsupportedError(f"{op}: an argument has a tangent (jvp, jacfwd), but lowgmm computes none.")


ORDINARY = (Tensor, torch.nn.Parameter)
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_autocast, _profiling = torch._C._is_any_autocast_enabled, torch._C._autograd._profiler_enabled


def signature(*tensors: Tensor | None) -> Signature:
    """All that a check can ask of tensors without looking into them."""
    return tuple([None if t is None else (t.shape, t.dtype, t.device) for t in tensors])


def _check_once(
    input: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
    impl: str,
    out_dtype: torch.dtype,
    output: Tensor | None = None,
) -> tuple[int, int]:
    """``check_gmm``, but of what depends only on shapes, dtypes and devices once: a signature that passed passes."""
    if type(input) is not Tensor:  # a fake tensor: its sizes may be symbols
        return check_gmm(input, weights, scales_x, scales_w, offsets, bias, clip, impl, out_dtype, output)
    key = (
        *signature(input, *weights, scales_x, scales_w, offsets, bias, output),
        len(weights),
        clip,
        impl,
        out_dtype,
        None if output is None else output.stride(),
    )
    shape = _accepted.get(key)
    if shape is None:
        shape = check_gmm(input, weights, scales_x, scales_w, offsets, bias, clip, impl, out_dtype, output)
        if len(_accepted) >= MAX_ACCEPTED:
            _accepted.clear()
        _accepted[key] = shape
    return shape


@functools.cache
def _triton_backend() -> ModuleType:
    """The kernels, imported when an operator first needs them."""
    from lowgmm.kernels import grouped_mm

    return grouped_mm


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one, where it is not already (setting it costs microseconds)."""
    if device.type == "cpu" or torch._C._cuda_getDevice() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def flat_scales(scales: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """Scales as kernels see them: float32, contiguous, without a last axis of 1. The usual case is that they are.

    An axis of groups stays, in whatever layout.
    """
    if scales is not None and scales.dim() > len(shape) and scales.shape[-1] > 1:
        return scales.float()
    if scales is None or (scales.dtype == torch.float32 and scales.dim() == len(shape) and scales.is_contiguous()):
        return scales
    return scales.reshape(tuple(shape)).float().contiguous()


# gmm and gmm_out serve as their own fakes: the same checks, and no work on tensors without data.


def _gmm_into(
    out: Tensor,
    x: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
    impl: str,
    config: str | None,
    fast_accum: bool,
) -> None:
    on_gpu = out.device.type != "cpu"
    if impl == "auto":
        impl = "triton" if on_gpu else "cpu"
    if not on_gpu and (impl == "reference" or out.numel() == 0):  # the CPU backend checks them itself
        checked_bounds(offsets, x.shape[0])
    if out.numel() == 0:
        return
    scales_x, scales_w = (
        flat_scales(scales_x, (x.shape[0],)),
        flat_scales(scales_w, (weights[0].shape[0], out.shape[1])),
    )
    bias = None if bias is None else bias.contiguous()
    if config is not None and impl != "triton":
        raise UnsupportedError(f"gmm: config chooses a GPU tile, but the {impl} backend runs here; leave it out.")
    if impl == "triton":
        check_triton("gmm", out.device)
    if impl == "cpu":
        from lowgmm import cpu

        cpu.gmm(out, x, weights, scales_x, scales_w, offsets, bias, clip)
        return
    if x.dtype in FLOATS and (fmt := format_of(weights[0].dtype)) is not None:
        x, scales_x = _quantize_tokens(x, fmt.activations.name, clip, impl)
    if impl == "reference":
        from lowgmm import reference

        w = unpack_nibbles(weights[1]) if len(weights) > 1 else weights[0]
        out.copy_(reference.gmm(x, w, scales_x, scales_w, offsets, bias=bias))
        return
    if on_gpu:
        check_offsets_now(offsets, x.shape[0])
    tile = None if config is None else TileConfig.parse(config)
    with on_device(out.device):
        _triton_backend().grouped_mm(
            out, x, weights[-1], scales_x, scales_w, offsets.int().contiguous(), bias, tile, fast_accum=fast_accum
        )


def _gmm(*arguments: Any) -> Tensor:
    x, weights, *others = arguments
    return replay.run(_gmm_new, arguments, (x, *weights, *others[:4]), others[4:])


def _gmm_new(
    input: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    expert_offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
    impl: str,
    config: str | None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    shape = _check_once(input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, out_dtype)
    out = replay.empty(shape, out_dtype, input.device)
    if not is_abstract(out):
        _gmm_into(out, input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, config, fast_accum)
    return out


def _gmm_out(*arguments: Any) -> None:
    x, weights, scales_x, scales_w, offsets, bias, clip, impl, config, output, *fast_accum = arguments
    # Of all checks the one that depends on addresses.
    operands = {"input": x, "weights": weights[-1], "scales_x": scales_x, "scales_w": scales_w, "bias": bias}
    check_no_overlap("gmm", output, **operands, expert_offsets=offsets)
    tensors = (x, *weights, scales_x, scales_w, offsets, bias, output)
    replay.run(_gmm_out_new, arguments, tensors, (clip, impl, config, *fast_accum))


def _gmm_out_new(
    input: Tensor,
    weights: list[Tensor],
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    expert_offsets: Tensor,
    bias: Tensor | None,
    clip: float | None,
    impl: str,
    config: str | None,
    output: Tensor,
    fast_accum: bool = False,
) -> Tensor:
    _check_once(input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, output.dtype, output)
    if not is_abstract(output):
        _gmm_into(output, input, weights, scales_x, scales_w, expert_offsets, bias, clip, impl, config, fast_accum)
    return output


def check_triton(op: str, device: torch.device) -> None:
    """Can the kernels run on ``device``'s tensors?"""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        raise UnsupportedError(
            f"{op}: impl='triton' on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1 before import."
        )
    if not _triton_is_there():
        raise UnsupportedError(
            f"{op}: the GPU kernels need Triton, which is not installed: install the version that torch "
            f"{torch.__version__} is built for, or pass impl='reference', which is slow."
        )


@functools.cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


# quantize_tokens


def _quantize_tokens(x: Tensor, format: str, clip: float | None, impl: str) -> tuple[Tensor, Tensor]:
    check_tokens(x, format, clip, impl)
    fmt = get_format(format)
    if impl == "reference":
        from lowgmm.quant import quantize_rows

        return quantize_rows(x, fmt, clip)
    if impl == "auto" and x.device.type == "cpu":
        from lowgmm import cpu

        return cpu.quantize_tokens(x, fmt, clip)
    check_triton("quantize_tokens", x.device)
    from lowgmm.gpu import describe
    from lowgmm.kernels.quantize import quantize_tokens

    gpu = describe(x.device)
    if (why := gpu.lacks(fmt)) is not None:
        raise UnsupportedError(f"quantize_tokens: {why}")
    if gpu.fnuz and not fmt.exact:  # the kernel would need to store e4m3fn, which that hardware cannot make
        from lowgmm.quant import quantize_rows

        return quantize_rows(x, fmt, clip)
    with on_device(x.device):
        return quantize_tokens(x, fmt, clip)


def _quantize_tokens_fake(x: Tensor, format: str, clip: float | None, impl: str) -> tuple[Tensor, Tensor]:
    check_tokens(x, format, clip, impl)
    return x.new_empty(x.shape, dtype=get_format(format).dtype), x.new_empty(x.shape[:1], dtype=torch.float32)


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients (out= variants refuse operands that need one) and autocast (it would lower the FP32 sums)."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        device = args[0].device.type
        with torch.no_grad():
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return function(*args)
            return function(*args)

    return run


def register(name: str, function: Any, fake: Any) -> None:
    function = _plainly(function)
    for key in ("CPU", "MkldnnCPU", "CUDA"):  # a packed weight's key outranks CPU's
        library.impl(name, function, key)
    torch.library.register_fake(f"lowgmm::{name}", fake, lib=library)


def gmm(*arguments: Any) -> Tensor:
    """``torch.ops.lowgmm.gmm``; without the dispatcher where that would only call :func:`_gmm`."""
    x, weights, *others = arguments
    tensors = (x, *weights, *others[:4])
    if quiet() and (known := replay.again(_gmm_new, tensors, others[4:])) is not None:
        return known
    if plain(*tensors):
        return _gmm(*arguments)
    refuse_tangents("gmm", *tensors)
    result: Tensor = torch.ops.lowgmm.gmm(*arguments)
    return result


def gmm_out(*arguments: Any) -> None:
    """``torch.ops.lowgmm.gmm_out``, likewise."""
    x, weights, scales_x, scales_w, offsets, bias, _clip, _impl, _config, output, *_ = arguments
    tensors = (x, *weights, scales_x, scales_w, offsets, bias, output)
    if plain(*tensors):
        _gmm_out(*arguments)
        return
    refuse_tangents("gmm", *tensors)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise UnsupportedError(
            "gmm: an argument requires a gradient, which would not pass through 'output'. Call it under "
            "torch.no_grad(), or leave 'output' out."
        )
    torch.ops.lowgmm.gmm_out(*arguments)


register("gmm", _gmm, _gmm)
register("gmm_out", _gmm_out, _gmm_out)
register("quantize_tokens", _quantize_tokens, _quantize_tokens_fake)
