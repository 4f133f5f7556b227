"""Time rivals fairly: check first, interleave, cold caches, medians, and a record of the machine.

On a GPU every rival's calls are captured in a CUDA graph and the graph is replayed, so that Python and launch costs do
not hide what the kernels cost; where capture is impossible the calls are timed as they are and the result says so. On
a CPU a clock is read around each call. Every round times each rival once, in an order of its own, and rivals are
compared round by round (:func:`paired`): a machine that slows down then slows both sides of a ratio down.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowgmm import native
from lowgmm.ops import on_device
from lowgmm.roofline import Machine
from lowgmm.shapes import ShapeError, UnsupportedError

GPU_SAMPLE_S = 2e-3
"""A graph is filled with calls up to about this long: the few microseconds of a replay and its events vanish in it."""

MAX_CALLS_PER_GRAPH = 64


class CheckError(RuntimeError):
    """A rival's output failed its check, so its time means nothing and is not taken."""


@dataclass(frozen=True)
class Rival:
    """One way to compute something.

    name   shown in the result
    calls  one callable per weight set, each returning its output; they take turns so that no call finds its weights in
           a cache
    check  ``check(index, output)`` raises if the output of ``calls[index]`` is wrong
    graph  False times plain calls on a GPU, launch costs included
    """

    name: str
    calls: Sequence[Callable[[], Tensor]]
    check: Callable[[int, Tensor], None]
    graph: bool = True


@dataclass(frozen=True)
class Spread:
    """A figure that every round gives once: its median, and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least two values.

    >>> spread([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
    Spread(median=3.5, p20=2.0, p80=5.0)
    """
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Spread(statistics.median(values), fifths[0], fifths[3])


def paired(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The ratio of two rivals: each round's own, and then the median.

    Medians taken apart may come from different minutes of a machine whose memory is twice as fast in one as in another.

    >>> paired([20.0, 60.0], [10.0, 30.0])
    Spread(median=2.0, p20=2.0, p80=2.0)
    """
    return spread([a / b for a, b in zip(over, under, strict=True)])


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, by round, and how they were taken."""

    name: str
    samples: tuple[float, ...]
    """One per round; the rivals of one :func:`interleave` have theirs in common."""
    method: str
    """``cuda graph replay``, ``cuda calls`` (with the reason when a graph was wanted), or ``cpu clock``."""

    @property
    def rounds(self) -> int:
        return len(self.samples)

    @property
    def median_s(self) -> float:
        return spread(self.samples).median

    @property
    def p20_s(self) -> float:
        return spread(self.samples).p20

    @property
    def p80_s(self) -> float:
        return spread(self.samples).p80


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """A bar on stderr when that is a terminal and tqdm is installed, nothing otherwise."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:  # `lowgmm[demo]` brings it; `lowgmm tune` runs without that
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    with tqdm(total=total, desc=title, leave=False, file=sys.stderr) as bar:
        yield bar.update


def weight_sets(bytes_per_set: float, device: torch.device) -> int:
    """How many sets of weights a rotation needs so that none is still cached when its turn comes: four caches' worth.

    Even under random replacement, of data read in a cycle over four times the cache only exp(-4), 2 %, survives it.
    """
    return max(1, -(-4 * cache_bytes(device) // max(1, int(bytes_per_set))))


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache: a GPU's L2, a CPU's L3 (32 MiB where the system does not say)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index3/size") as f:
            return int(f.read().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


def interleave(
    rivals: Sequence[Rival],
    device: torch.device,
    *,
    rounds: int = 20,
    seconds: float = 10.0,
    progress: Callable[[], object] | None = None,
) -> list[Timing]:
    """Check every rival, then time them in turns.

    The order of turns is drawn anew in every round (from a fixed seed): over many, each rival is as often early as
    late, and finds the caches and clocks that any other one leaves behind.

    Args:
        rivals: at least one, with distinct names.
        device: where they run.
        rounds: how often each is sampled; fewer, but at least 5, if ``seconds`` run out first.
        progress: called after each check and each round, ``len(rivals) + rounds`` times at most.

    Raises:
        CheckError: an output is wrong (nothing has been timed then), or a replayed graph's output is.

    >>> one = torch.ones(4)
    >>> def check(index, y):
    ...     assert torch.equal(y, one * 2)
    >>> [t.name for t in interleave([Rival("double", [lambda: one * 2], check)], torch.device("cpu"), rounds=5)]
    ['double']
    """
    names = [r.name for r in rivals]
    if not rivals or len(set(names)) != len(names) or any(not r.calls for r in rivals):
        raise ShapeError(f"interleave: expected rivals with distinct names and at least one call each, got {names}.")
    with on_device(device):  # or events and graphs would be another's
        samplers = []
        for rival in rivals:
            for index, call in enumerate(rival.calls):
                _check(rival, index, call())
            samplers.append(_gpu_sampler(rival, device) if device.type == "cuda" else _cpu_sampler(rival))
            if progress is not None:
                progress()
        for sample, _ in samplers:
            sample()  # clocks, allocators and page tables settle
        samples: list[list[float]] = [[] for _ in rivals]
        order, draw = list(range(len(rivals))), random.Random(0)
        stop = time.perf_counter() + seconds
        for done in range(max(5, rounds)):
            if done >= 5 and time.perf_counter() > stop:
                break
            draw.shuffle(order)
            for turn in order:
                samples[turn].append(samplers[turn][0]())
            if progress is not None:
                progress()
    return [
        Timing(r.name, tuple(taken), method) for r, taken, (_, method) in zip(rivals, samples, samplers, strict=True)
    ]


def _check(rival: Rival, index: int, output: Tensor) -> None:
    try:
        rival.check(index, output)
    except Exception as error:
        raise CheckError(f"{rival.name}: output of weight set {index} is wrong, so it is not timed: {error}") from error


def _cpu_sampler(rival: Rival) -> tuple[Callable[[], float], str]:
    turn = 0

    def sample() -> float:
        nonlocal turn
        call = rival.calls[turn % len(rival.calls)]
        turn += 1
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return sample, "cpu clock"


def _gpu_sampler(rival: Rival, device: torch.device) -> tuple[Callable[[], float], str]:
    """A function that returns seconds per call, and the method's name."""
    plain = [rival.calls[i % len(rival.calls)] for i in range(_calls_per_sample(rival, device))]

    def eager() -> None:
        for call in plain:
            call()

    run: Callable[[], Any] = eager
    method = "cuda calls"
    if rival.graph:
        try:
            run, method = _captured(rival, plain, device), "cuda graph replay"
        except CheckError:
            raise
        except RuntimeError as error:  # a call that synchronises cannot be captured; time it as it is, and say so
            torch.cuda.synchronize(device)
            method = f"cuda calls (no graph: {str(error).splitlines()[0][:100]})"

    def sample() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / len(plain)

    return sample, method


def _calls_per_sample(rival: Rival, device: torch.device) -> int:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for call in rival.calls:
        call()
    end.record()
    end.synchronize()
    each = max(1e-6, float(start.elapsed_time(end)) / 1e3 / len(rival.calls))
    turns = min(MAX_CALLS_PER_GRAPH, max(1, round(GPU_SAMPLE_S / each)))
    return -(-turns // len(rival.calls)) * len(rival.calls)  # whole rotations


def _captured(rival: Rival, calls: Sequence[Callable[[], Tensor]], device: torch.device) -> Callable[[], None]:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # capture wants everything lazily created (workspaces, modules) to exist already
        for call in rival.calls:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    outputs: list[Tensor] = []
    with torch.cuda.graph(graph, stream=side):  # by default one of the device that the first capture was on
        for call in calls:
            outputs.append(call())
    graph.replay()
    torch.cuda.synchronize(device)
    # The graph's last rotation: what is timed is checked, not only what was called before it.
    for index in range(len(rival.calls)):
        _check(rival, index, outputs[len(calls) - len(rival.calls) + index])
    del outputs  # the replay writes into the graph's own pool; `graph` keeps that alive
    return graph.replay


# ------------------------------------------------------------------------------------------------- rates of this
# machine


def read_bandwidth(device: torch.device, *, size: int | None = None, repeats: int = 5) -> float:
    """Bytes per second of the best of ``repeats`` sums over ``size`` bytes: 4 GiB on a GPU, 512 MiB on a CPU, less
    where memory is short."""
    if size is None:
        size = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 4) if device.type == "cuda" else 512 << 20
    data = torch.empty(size // 8, dtype=torch.int64, device=device)
    if device.type == "cpu":
        native.advise_huge_pages(data)  # as the library's own weights have them
    data.fill_(1)

    def check(_: int, total: Tensor) -> None:
        assert int(total) == data.numel(), f"sum is {int(total)}, expected {data.numel()}"

    return data.numel() * 8 / _best(Rival("read", [lambda: data.sum()], check), device, repeats)


def dense_rate(format: str, device: torch.device, *, size: int | None = None, repeats: int = 3) -> float:
    """Operations per second of the best of ``repeats`` dense square matmuls in ``format``, by torch's own operator.

    Raises:
        UnsupportedError: torch has no such matmul on this device (FP8 on a CPU, or on a GPU without FP8 instructions).
    """
    n = size or (8192 if device.type == "cuda" else 2048)
    return 2.0 * n**3 / _best(dense_rival(format, format, n, device), device, repeats)


def dense_rival(name: str, format: str, n: int, device: torch.device) -> Rival:
    """A dense product of two n×n matrices in ``format`` by torch's own operator, to be timed beside others.

    Raises:
        UnsupportedError: as :func:`dense_rate`.
    """
    call, reference, tolerance = _dense_call(format, n, device)

    def check(_: int, y: Tensor) -> None:
        error = float((y[:64, :64].double() - reference).abs().max() / reference.abs().max())
        assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"

    return Rival(name, [call], check)


def _dense_call(format: str, n: int, device: torch.device) -> tuple[Callable[[], Tensor], Tensor, float]:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randint(-8, 9, (n, n), generator=generator, device=device) for _ in range(2))
    reference = (
        a[:64].double() @ b[:64].double().T
    )  # the corner that is checked; small integers are exact in every format
    if format in ("bf16", "fp16", "fp32"):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[format]
        x, w = a.to(dtype), b.to(dtype)
        return (lambda: x @ w.T), reference, 2.0**-7
    if format == "int8":
        x, w = a.to(torch.int8), b.to(torch.int8)
        return (_onednn_int8(x, w) if device.type == "cpu" else lambda: torch._int_mm(x, w.T)), reference, 0.0
    if format == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        x, w = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        # fast accumulation: the rate of the instruction itself, which is what a roof is
        call = lambda: torch._scaled_mm(x, w.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: E731
        return call, reference, 2.0**-6
    raise UnsupportedError(f"dense_rate: torch has no {format!r} matmul on {device}.")


def _onednn_int8(x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    """oneDNN's int8 product on unsigned activations, which is up to three times as fast as ``torch._int_mm`` on x86."""
    packed, unsigned = torch.ops.onednn.qlinear_prepack(w, None), x.view(torch.uint8) ^ 128
    ones, zeros = torch.ones(len(w)), torch.zeros(len(w), dtype=torch.int64)
    linear = torch.ops.onednn.qlinear_pointwise.default
    return lambda: linear(unsigned, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], "")


def _best(rival: Rival, device: torch.device, repeats: int) -> float:
    with on_device(device):
        _check(rival, 0, rival.calls[0]())
        sample, _ = _gpu_sampler(rival, device) if device.type == "cuda" else _cpu_sampler(rival)
        return min(sample() for _ in range(repeats + 1))


def measure_machine(device: torch.device, formats: Sequence[str] = ("fp32", "bf16", "int8", "fp8")) -> Machine:
    """This machine as :class:`lowgmm.roofline.Machine`: read bandwidth, and the dense rate of each format torch can
    multiply.

    Takes a second or two. FP8 on a CPU without FP8 instructions runs on widened weights, so it gets FP32's rate.
    """
    from lowgmm.environment import device_name

    peaks: dict[str, float] = {}
    for format in formats:
        try:
            peaks[format] = dense_rate(format, device)
        except (UnsupportedError, NotImplementedError):
            continue
    is_gpu = device.type == "cuda"
    native_fp8 = "fp8" in peaks
    if not is_gpu and "fp8" in formats and not native_fp8:
        peaks["fp8"] = peaks.get("fp32") or dense_rate("fp32", device)
    return Machine(f"{device_name(device)} (measured)", read_bandwidth(device), peaks, is_gpu, native_fp8)
