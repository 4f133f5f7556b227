"""How a GPU runs an expert layer: in how many launches, with which tiles. Frozen data; every choice can be forced."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowgmm.formats import FLOATS, format_of
from lowgmm.gpu import Gpu
from lowgmm.layer import GROUP
from lowgmm.shapes import UnsupportedError

LAUNCHES = ("direct", "queue", "split")
"""direct: one token, one launch. queue: prepare, both products from one queue, combine. split: prepare, gate/up, down,
combine."""

MAX_SLOTS = 32
"""Slots of one token that a warp of ``kernels/hopper_layer.py`` looks at together."""

LONG_READ = 24 << 20
"""Weights of each matrix that one token needs. Above, steps of 128 bytes are quicker than of 256: 34 µs instead of 36
for two of DeepSeek's experts, but 25 instead of 23 for eight of OLMoE's."""

MAX_BINS = 4094
"""Experts that the counting sort of ``kernels/route.py`` can tell apart."""


@dataclass(frozen=True)
class LayerProblem:
    """An expert layer as the choice of a configuration sees it."""

    T: int
    A: int
    E: int
    H: int
    I: int
    dtype: torch.dtype
    """dtype of both operands in the matrix instruction."""
    requantize: str = "token"
    gate_up: str = "concatenated"
    h_size: int = 2
    """Bytes of an element of h and of the slots' outputs: 2, or 4 for a ``hidden`` that is not bfloat16."""
    aligned: bool = True
    """Both weights start at a multiple of 16 bytes, as TMA needs."""

    @property
    def rows_per_expert(self) -> float:
        """Rows of each expert that has any, if the router spreads the tokens evenly."""
        return max(1.0, self.T * self.A / self.E)


@dataclass(frozen=True)
class LayerConfig:
    """One way to run a layer. ``str(config)`` and :meth:`parse` are inverse, so it can cross an op schema.

    >>> str(LayerConfig("queue", 16, 64, 256, 128, 256, swap_ab=True, tma=True, programs_per_sm=2, num_stages=4))
    'queue-16-64x256-128x256-swap-tma-4w4s2p'
    >>> LayerConfig.parse("split-128-64x128-128x128-tma-8w3s1p").down_n
    128
    """

    launch: str
    block_m: int
    up_n: int
    """Gate columns of a gate/up tile; it computes as many up columns beside them."""
    up_k: int
    down_n: int
    down_k: int
    swap_ab: bool = True
    """Put the weights on the matrix instruction's M side."""
    tma: bool = True
    """Load weights through TMA descriptors."""
    gather: bool = False
    """Write a quantised row for every slot, sorted, so that gate/up tiles read whole rows (and through TMA)."""
    prefetch: bool = False
    """A down tile that must wait asks L2 for its weights meanwhile."""
    pdl: bool = False
    """Programmatic dependent launch: a launch starts while the one before it ends, and waits on the device."""
    warp_specialize: bool = False
    """Hopper only: warps that load and warps that multiply (``kernels/hopper_layer.py``)."""
    num_warps: int = 4
    num_stages: int = 4
    programs_per_sm: int = 2
    programs: int = 0
    """Programs of the launch, if not programs_per_sm on each SM."""

    @property
    def flags(self) -> tuple[bool, ...]:
        return self.swap_ab, self.tma, self.gather, self.prefetch, self.pdl, self.warp_specialize

    def __str__(self) -> str:
        flags = "".join(
            f"-{name}" for name, on in zip(("swap", "tma", "gather", "pre", "pdl", "ws"), self.flags, strict=True) if on
        )
        grid = f"{self.programs}t" if self.programs else f"{self.programs_per_sm}p"
        tiles = f"{self.block_m}-{self.up_n}x{self.up_k}-{self.down_n}x{self.down_k}"
        return f"{self.launch}-{tiles}{flags}-{self.num_warps}w{self.num_stages}s{grid}"

    @staticmethod
    @functools.cache
    def parse(text: str) -> LayerConfig:
        """The configuration that ``str`` wrote."""
        # No number is 0: a launch of no programs would leave the result as it was allocated.
        pattern = r"(\w+)-(#)-(#)x(#)-(#)x(#)(-swap)?(-tma)?(-gather)?(-pre)?(-pdl)?(-ws)?-(#)w(#)s(#)([pt])"
        m = re.fullmatch(pattern.replace("#", r"[1-9]\d*"), text)
        if m is None or m[1] not in LAUNCHES:
            raise UnsupportedError(
                f"moe_ffn: config {text!r} is not a layer configuration; expected e.g. "
                f"'queue-16-64x256-128x256-swap-tma-4w4s2p'."
            )
        block_m, up_n, up_k, down_n, down_k, warps, stages, programs = (int(m[i]) for i in (2, 3, 4, 5, 6, 13, 14, 15))
        per_sm, total = (programs, 0) if m[16] == "p" else (1, programs)
        swap, tma, gather, pre, pdl, ws = (bool(m[i]) for i in range(7, 13))
        tiles = (block_m, up_n, up_k, down_n, down_k)
        return LayerConfig(m[1], *tiles, swap, tma, gather, pre, pdl, ws, warps, stages, per_sm, total)

    def shared_memory(self, element_size: int, h_size: int = 2) -> int:
        """Bytes of shared memory of the hungrier operand pipeline, its activations and weights."""
        if self.warp_specialize:
            ring = (self.block_m + self.down_n) * self.down_k * element_size * self.num_stages
            # up, on its way to the warpgroup with the gate; with 64 also the sums of half of the steps
            passed = {64: 2, 128: 1, 256: 0}[self.down_n] * 4 * 64 * self.block_m
            if self.launch == "direct":
                passed += 2 * 1024 * self.block_m  # two chunks of h (``kernels/hopper_direct.py``)
            return ring + 2 * 64 * self.block_m * h_size + passed + 16 * self.block_m + 16 * self.num_stages + 768
        up = (self.block_m + 2 * self.up_n) * self.up_k * element_size
        # The down tile's intermediate arrives as it was written in the queue, whatever the weights have.
        down = self.block_m * self.down_k * (h_size if self.launch in ("direct", "queue") else element_size)
        down += self.down_n * self.down_k * element_size
        return max(up, down) * self.num_stages + 1024


def supports(problem: LayerProblem, config: LayerConfig, gpu: Gpu) -> str | None:
    """None if ``config`` can run ``problem`` on ``gpu``, else the reason it cannot. The one statement of every
    constraint."""
    fmt, size = format_of(problem.dtype), problem.dtype.itemsize
    if (why := gpu.lacks(fmt)) is not None:
        return why
    if gpu.fnuz and fmt is not None and not fmt.exact:
        return f"{gpu.name} multiplies e4m3fnuz, and the layer's kernels quantise to e4m3fn."
    if fmt is not None and fmt.bits == 4:
        return "the layer's kernels multiply int8, float8_e4m3fn and bfloat16; 4-bit weights run as a sequence."
    if fmt is None and problem.dtype in (torch.float16, torch.float32):
        return f"the layer's kernels multiply int8, float8_e4m3fn and bfloat16, not {problem.dtype}."
    if problem.E > MAX_BINS:
        return f"E={problem.E} is more than {MAX_BINS}, for which the counting sort has bins."
    if config.warp_specialize and (why := _lacks_for_warps(problem, config, gpu)) is not None:
        return why
    blocks = (config.block_m, config.up_n, config.up_k, config.down_n, config.down_k)
    if any(b & (b - 1) or b < 16 for b in blocks):
        return f"tiles {blocks} need powers of two of at least 16 (tl.dot)."
    if size == 1 and min(config.up_k, config.down_k) < 32:
        return "8-bit matrix instructions consume K in steps of 32: up_k and down_k must be at least 32."
    if config.launch == "direct" and problem.T != 1:
        return f"a direct launch serves one token, got T={problem.T}."
    if config.gather and (config.launch == "direct" or fmt is None):
        return "gather quantises the rows of several tokens; a direct launch and unquantised weights have none."
    if problem.requantize == "group128" and (config.up_n > GROUP or config.down_k > GROUP):
        return f"group128 needs up_n and down_k of at most {GROUP}: a tile must lie in one group."
    if config.pdl and not gpu.tma:
        return f"{gpu.name} has no programmatic dependent launch; use a configuration without it."
    if config.tma:
        if not gpu.tma:
            return f"{gpu.name} has no TMA; use a configuration without it."
        if not problem.aligned:
            return "TMA needs weights that start at a multiple of 16 bytes; w13 or w2 is a view that does not."
        if problem.H * size % 16 or problem.I * size % 16:
            return f"TMA needs rows that are a multiple of 16 bytes; H={problem.H}, I={problem.I} are not."
        if problem.gate_up == "interleaved" and problem.H % config.up_k and not config.warp_specialize:
            return f"TMA reads interleaved rows only where up_k={config.up_k} divides H={problem.H}."
    need = config.shared_memory(size, problem.h_size)
    if need > gpu.shared_memory:
        return f"{config} needs {need} bytes of shared memory, {gpu.name} has {gpu.shared_memory} per block."
    return None


def _lacks_for_warps(problem: LayerProblem, config: LayerConfig, gpu: Gpu) -> str | None:
    """Why a warp-specialised configuration cannot run, of what others can."""
    size = problem.dtype.itemsize
    if (gpu.backend, gpu.capability) != ("cuda", (9, 0)):
        return f"warp-specialised tiles use Hopper's warpgroup instructions, which {gpu.name} lacks."
    if gpu.interpreted:
        return "Triton's interpreter does not run Gluon, in which the warp-specialised kernel is written."
    if format_of(problem.dtype) is not None and problem.requantize != "token":
        return f"warp-specialised tiles take one scale per row of h, not {problem.requantize!r}."
    if config.launch == "split" or config.flags != (True, True, False, False, False, True):
        return "warp-specialised tiles come as 'queue-…-swap-tma-ws-…' and 'direct-…-swap-tma-ws-…' only."
    if config.launch == "direct" and (size > 1 or problem.A > MAX_SLOTS or config.block_m != 16 or config.down_n > 128):
        return (
            f"a direct launch of warp-specialised tiles needs 8-bit weights, block_m of 16, down_n of 64 or 128 and "
            f"A <= {MAX_SLOTS}."
        )
    if config.num_warps != 4 or config.programs_per_sm != 1:
        return "warp-specialised tiles have 4 warps per warpgroup and one program per SM."
    if config.num_stages < 2:
        return "warp-specialised tiles need 2 stages: a slot is emptied once the next one has been multiplied."
    up_n = config.down_n if problem.gate_up == "none" else config.down_n // 2
    wide = config.down_n in (128, 256) and config.block_m <= 128
    narrow = config.down_n == 64 and config.block_m == 16 and problem.gate_up != "none"
    if not (wide or narrow) or (config.up_n, config.up_k) != (up_n, config.down_k):
        return (
            "warp-specialised tiles need block_m up to 128 and down_n 128 or 256 (with a gate also 16 and 64), "
            "up_k = down_k, and up_n of half down_n (without a gate, of down_n)."
        )
    if config.down_n == 64 and (config.down_k * size != 128 or config.num_stages % 2):
        # In an odd ring a slot goes from one warpgroup to the other, which would not notice that it is a phase ahead.
        return "warp-specialised tiles with down_n 64 need up_k and down_k of 128 bytes, and an even number of stages."
    if config.down_k * size % 128:
        return "warp-specialised tiles need up_k and down_k of a multiple of 128 bytes."
    return None


def _first_choice(problem: LayerProblem, gpu: Gpu) -> LayerConfig:
    """By rows per expert, not yet made to fit."""
    size, rows = problem.dtype.itemsize, problem.rows_per_expert
    wide, narrow = 256 // size, 128 // size
    if problem.T == 1:
        # Few tasks: narrow tiles, so that every SM has some. Two programs per SM share A · I / up_n of them.
        up_n = 16
        while up_n < 64 and problem.A * problem.I // (2 * up_n) >= 2 * gpu.sms:
            up_n *= 2
        down_n = 32
        while down_n < 64 and problem.A * problem.H // (2 * down_n) >= 2 * gpu.sms:
            down_n *= 2
        return LayerConfig("direct", 16, up_n, wide if up_n < 64 else narrow, down_n, wide, prefetch=True)
    if rows <= 16:
        return LayerConfig("queue", 16, 64, narrow, 64, wide, prefetch=True)
    if rows <= 32:
        return LayerConfig("queue", 32, 64, narrow, 128, narrow)
    if rows <= 96:
        return LayerConfig("queue", 64, 64, narrow, 128, narrow)
    if gpu.backend == "cuda" and gpu.capability[0] == 10:  # not measured; what compiles there without spilling
        return LayerConfig("split", 64, 64, narrow, 64, narrow)
    return LayerConfig(
        "split", 128, 64, narrow, 128, narrow, swap_ab=False, gather=size == 1, num_warps=8, num_stages=3,
        programs_per_sm=1,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)  # bounded: every token count is a problem of its own
def pick(problem: LayerProblem, gpu: Gpu) -> LayerConfig | None:
    """The configuration used when none is asked for, made to fit the GPU; None where the layer has no kernels and runs
    as a sequence of operations."""
    return _warp_specialised(problem, gpu) or own_kernels(problem, gpu)


def _warp_specialised(problem: LayerProblem, gpu: Gpu) -> LayerConfig | None:
    """The tile for the rows that an expert has, with as many stages as fit; None where the kernel cannot run it."""
    rows, size = problem.rows_per_expert, problem.dtype.itemsize
    # Experts differ in their rows, and a second tile reads the weights again: the tile is higher than the mean.
    block_m = next((m for most, m in ((16, 16), (24, 32), (96, 64)) if rows <= most), 128)
    down_n, width, most = (256, 128, 4) if block_m == 128 else (128, 256, 6)
    launch, tasks = "queue", min(problem.E, problem.T * problem.A) * -(-problem.I // 64)
    if problem.T == 1 and size == 1 and problem.A <= MAX_SLOTS:
        launch = "direct"
        if problem.A * problem.H * problem.I > LONG_READ:
            width, most = 128, 8
    elif block_m == 16 and problem.gate_up != "none" and tasks <= gpu.sms // 2:
        down_n, width, most = 64, 128, 16  # where few experts have rows, so that more SMs read weights
    up_n = down_n if problem.gate_up == "none" else down_n // 2
    for stages in range(most, 1, -1):
        tiles = (block_m, up_n, width // size, down_n, width // size)
        config = LayerConfig(launch, *tiles, warp_specialize=True, num_stages=stages, programs_per_sm=1)
        if supports(problem, config, gpu) is None:
            return config
    return None


def own_kernels(problem: LayerProblem, gpu: Gpu) -> LayerConfig | None:
    """What would be picked if only the layer's own kernels were there."""
    if problem.dtype in FLOATS and problem.dtype != torch.bfloat16:
        return None
    config = _first_choice(problem, gpu)
    if problem.requantize == "group128":
        config = replace(config, down_k=min(config.down_k, GROUP))
    size = problem.dtype.itemsize
    interleaved_edge = problem.gate_up == "interleaved" and problem.H % config.up_k
    if not (gpu.tma and problem.aligned) or problem.H * size % 16 or problem.I * size % 16 or interleaved_edge:
        config = replace(config, tma=False)
    # Programs that share an SM share its memory.
    while (
        config.num_stages > 2
        and config.shared_memory(size, problem.h_size) * config.programs_per_sm > gpu.shared_memory
    ):
        config = replace(config, num_stages=config.num_stages - 1)
    # Made to fit by giving up first what costs least: pipeline depth, then the tiles.
    for field, least in (("num_stages", 2), ("down_n", 64), ("up_n", 32), ("up_k", 64), ("down_k", 64)):
        while supports(problem, config, gpu) is not None and (now := getattr(config, field)) > least:
            smaller: dict[str, Any] = {field: now - 1 if field == "num_stages" else now // 2}
            config = replace(config, **smaller)
    return config if supports(problem, config, gpu) is None else None
