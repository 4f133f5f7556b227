"""Which tile configuration runs a problem: ``supports`` says what can run, ``predict`` how long it should take,
``pick`` what does.

The model's form is here; its numbers and the candidates are data (``measured/``), fitted to a sweep by
``bench/fit.py``. Nothing here runs anything on a GPU.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowgmm import replay, tune_cache
from lowgmm.formats import format_of
from lowgmm.gpu import Gpu
from lowgmm.shapes import UnsupportedError
from lowgmm.tune_cache import Rates, Shipped

LAUNCHES = ("grid", "persistent", "queue", "expert")
"""One program per tile; a static stride over tiles; tickets from an atomic counter; one program per expert (the
article's first)."""


@dataclass(frozen=True)
class Problem:
    """A grouped matmul as the tuner sees it. ``M`` is the total over the experts."""

    E: int
    M: int
    N: int
    K: int
    dtype: torch.dtype
    """dtype of both operands; uint8: of 4-bit weights, two to a byte, for INT8 activations."""
    out_dtype: torch.dtype = torch.bfloat16
    group: int = 0
    """Elements along K that share a scale of 4-bit weights; 0: all of them."""

    @property
    def rows_per_expert(self) -> float:
        return self.M / max(self.E, 1)

    @property
    def element_size(self) -> int:
        """Bytes of an activation."""
        return self.dtype.itemsize

    @property
    def four_bits(self) -> bool:
        return self.dtype == torch.uint8

    @property
    def weight_size(self) -> float:
        """Bytes of a weight."""
        return 0.5 if self.four_bits else self.element_size

    @property
    def format(self) -> str:
        """What tables call the operands: both 16-bit types run alike."""
        fmt = format_of(self.dtype)
        if self.group:
            return f"int4_g{self.group}"
        return fmt.name if fmt is not None else "fp32" if self.element_size == 4 else "bf16"

    @property
    def key(self) -> str:
        """Its name in a table of measurements."""
        return f"{self.format} E{self.E} M{self.M} N{self.N} K{self.K} -> {str(self.out_dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class TileConfig:
    """One way to run the mainloop. ``str(config)`` and :meth:`parse` are inverse, so a configuration can cross an op
    schema.

    >>> str(TileConfig(16, 128, 256, swap_ab=True, tma=True, launch="persistent", programs_per_sm=2, num_stages=4))
    '16x128x256-swap-tma-persistent2-4w4s'
    >>> TileConfig.parse("64x64x128-grid-4w3s").block_n
    64
    """

    block_m: int
    block_n: int
    block_k: int
    swap_ab: bool = False
    """Put the weights on the matrix instruction's M side: acc is [block_n, block_m]. Few tokens then waste no rows."""
    tma: bool = False
    """Load through TMA descriptors instead of pointers."""
    warp_specialize: bool = False
    """Hopper only: one warp loads and two warpgroups multiply (``kernels/hopper.py``), the weights on the M side."""
    launch: str = "grid"
    programs_per_sm: int = 1
    """Programs per SM of a persistent or queue launch."""
    num_warps: int = 4
    num_stages: int = 3

    def __str__(self) -> str:
        flags = "".join(
            name for name, on in (("-swap", self.swap_ab), ("-tma", self.tma), ("-ws", self.warp_specialize)) if on
        )
        per_sm = str(self.programs_per_sm) if self.launch in ("persistent", "queue") else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{tile}{flags}-{self.launch}{per_sm}-{self.num_warps}w{self.num_stages}s"

    @staticmethod
    @functools.cache
    def parse(text: str) -> TileConfig:
        """The configuration that ``str`` wrote."""
        # No number is 0: a launch of no programs would leave the result as it was allocated.
        pattern = r"(#)x(#)x(#)(-swap)?(-tma)?(-ws)?-(grid|persistent|queue|expert)(#)?-(#)w(#)s"
        m = re.fullmatch(pattern.replace("#", r"[1-9]\d*"), text)
        if m is None:
            raise UnsupportedError(
                f"config {text!r} is not a tile configuration; expected e.g. '16x128x256-swap-tma-persistent2-4w4s'."
            )
        bm, bn, bk, swap, tma, ws, launch, per_sm, warps, stages = m.groups()
        tile, flags = (int(bm), int(bn), int(bk)), (bool(swap), bool(tma), bool(ws))
        return TileConfig(*tile, *flags, launch, int(per_sm or 1), int(warps), int(stages))

    def portable(self) -> TileConfig:
        """The same tile in the portable kernel."""
        if not self.warp_specialize:
            return self
        large = self.block_m * self.block_n > 64 * 128  # spills unless 8 warps share it
        programs, warps, stages = (1, 8, 3) if large else (2, 4, 4)
        return TileConfig(
            *(self.block_m, self.block_n, self.block_k, self.swap_ab, self.tma),
            launch="persistent",
            programs_per_sm=programs,
            num_warps=warps,
            num_stages=min(self.num_stages, stages),
        )

    def by_pointers(self) -> TileConfig:
        """The same tile for operands that no descriptor can address. Addresses take registers: 8 warps share a large
        tile, at most 128x128."""
        config = replace(self.portable(), tma=False)
        if config.block_m * config.block_n < 128 * 128:
            return config
        bm, bn, stages = min(config.block_m, 128), min(config.block_n, 128), min(config.num_stages, 3)
        return TileConfig(
            *(bm, bn, config.block_k, config.swap_ab), launch="persistent", num_warps=8, num_stages=stages
        )

    def pipeline(self, problem: Problem) -> int:
        """Bytes of the operands that are on their way at a time."""
        row = self.block_m * problem.element_size + self.block_n * problem.weight_size
        return int(row * self.block_k) * self.num_stages

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of shared memory: the operand pipeline, and beside it (a flattened loop loads the next tile meanwhile)
        the output tile on its way to a coalesced store, and barriers."""
        pipeline, out_size = self.pipeline(problem), problem.out_dtype.itemsize
        if self.warp_specialize:
            return pipeline + 2 * 64 * self.block_m * out_size + 16 * self.block_m + 16 * self.num_stages + 512
        return pipeline + self.block_m * self.block_n * out_size + 256


def supports(problem: Problem, config: TileConfig, gpu: Gpu) -> str | None:
    """None if ``config`` can run ``problem`` on ``gpu``, else the reason it cannot. The one statement of every
    constraint."""
    if (why := gpu.lacks(format_of(problem.dtype))) is not None:
        return why
    blocks = (config.block_m, config.block_n, config.block_k)
    if any(b & (b - 1) or b < 16 for b in blocks):
        return f"tile {blocks} needs powers of two of at least 16 (tl.dot)."
    if problem.element_size == 1 and config.block_k < 32:
        return "8-bit matrix instructions consume K in steps of 32: block_k must be at least 32."
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"{config.num_warps} warps: Triton programs have 1, 2, 4, 8 or 16."
    if config.tma and max(config.block_m, config.block_n) > 256:
        return f"tile {blocks}: a TMA box has at most 256 rows."
    if config.launch not in LAUNCHES:
        return f"launch {config.launch!r} is not one of {', '.join(LAUNCHES)}."
    if config.tma:
        if not gpu.tma:
            return f"{gpu.name} has no TMA; use a configuration without it."
        if problem.K * problem.weight_size % 16:
            return f"TMA needs rows that are a multiple of 16 bytes; K={problem.K} of {problem.format} is not."
    if config.warp_specialize:
        if (gpu.backend, gpu.capability) != ("cuda", (9, 0)):
            return f"warp-specialised tiles use Hopper's warpgroup instructions, which {gpu.name} lacks."
        if gpu.interpreted:
            return "Triton's interpreter does not run Gluon, in which the warp-specialised kernel is written."
        if not (config.tma and config.swap_ab and config.launch == "queue" and config.programs_per_sm == 1):
            return "warp-specialised tiles come as '-swap-tma-ws-queue1' only."
        if config.block_n not in (128, 256) or config.block_m > 128 or config.num_warps != 4:
            return "warp-specialised tiles need block_n 128 or 256, block_m up to 128, and 4 warps per warpgroup."
        if config.num_stages < 2:
            return "warp-specialised tiles need 2 stages: a slot is emptied once the next one has been multiplied."
        if problem.element_size > 2 or config.block_k * problem.element_size % 128:
            return "warp-specialised tiles need 8- or 16-bit operands and block_k of a multiple of 128 bytes."
    if problem.four_bits:
        whole = 256 if config.warp_specialize else max(problem.group, 64)
        if not config.swap_ab:
            return "4-bit weights are unpacked in registers, so they go on the M side: '-swap'."
        if config.warp_specialize and config.block_n != 128:
            return "4-bit weights have warp-specialised tiles with block_n 128 only."
        if config.block_k % whole:
            return (
                f"such tiles of 4-bit weights with {problem.group or 'all'} of K to a scale need block_k in {whole}s."
            )
    need = config.shared_memory(problem)
    if need > gpu.shared_memory:
        return f"{config} needs {need} bytes of shared memory, {gpu.name} has {gpu.shared_memory} per block."
    return None


UNMEASURED = {
    size: (
        f"16x128x{256 // size}-swap-tma-persistent2-4w4s",
        f"32x128x{128 // size}-swap-tma-persistent2-4w4s",
        f"64x128x{128 // size}-swap-tma-persistent2-4w4s",
        f"128x128x{128 // size}-tma-persistent2-8w3s",
    )
    for size in (1, 2)
}
"""Candidates where no sweep was taken, by element size. What holds by construction: Blackwell's FP8 instruction wants
128 rows on its M side, and with mma.sync a 128x128 tile spills unless 8 warps share it."""

EXACT_FP32 = ("16x64x32-persistent2-4w2s", "64x64x32-persistent2-4w2s")
"""The fp32 path runs on the CUDA cores: small tiles, no tensor-core layout to respect."""

NIBBLES = {
    0: (
        "16x128x512-swap-tma-ws-queue1-4w3s",
        "32x128x256-swap-tma-ws-queue1-4w4s",
        "64x128x256-swap-tma-ws-queue1-4w4s",
        "128x128x256-swap-tma-ws-queue1-4w4s",
    ),
    128: (
        "16x128x512-swap-tma-ws-queue1-4w3s",
        "32x128x256-swap-tma-ws-queue1-4w4s",
        "64x128x512-swap-tma-ws-queue1-4w2s",
        "128x128x256-swap-tma-ws-queue1-4w3s",
    ),
    64: (
        "16x128x512-swap-tma-ws-queue1-4w3s",
        "32x128x256-swap-tma-ws-queue1-4w4s",
        "64x128x256-swap-tma-ws-queue1-4w4s",
    ),
}
NIBBLES[32] = NIBBLES[64]
"""Hopper's candidates of 4-bit weights by elements that share a scale (0: all of K): the best by rows on an H200."""

NIBBLES_PORTABLE = (
    "16x128x128-swap-tma-persistent2-4w4s",
    "32x128x128-swap-tma-persistent2-4w4s",
    "64x128x128-swap-tma-persistent2-8w3s",
)
"""Those of other GPUs, not measured: what compiles everywhere without spilling."""

MAX_CANDIDATES = 8
"""Per format: the most that is ever compiled for one layer, whatever the number of tokens."""


def candidates(problem: Problem, gpu: Gpu, table: Shipped | None = None) -> list[TileConfig]:
    """The configurations that ``pick`` chooses from, adapted to the problem's operands and made to fit the GPU.

    At most :data:`MAX_CANDIDATES` per format whatever the number of tokens, so no more than that are ever compiled.
    """
    if problem.dtype == torch.float32:
        texts: tuple[str, ...] = EXACT_FP32
    elif problem.four_bits:
        runs = supports(problem, TileConfig.parse(NIBBLES[problem.group][0]), gpu) is None
        texts = NIBBLES[problem.group] if runs else NIBBLES_PORTABLE
    elif gpu.backend == "cuda" and gpu.capability[0] == 9:
        texts = (table or tune_cache.nearest(gpu.name)).candidates[problem.format]
    else:
        texts = UNMEASURED[problem.element_size]
    found = (_fitted(problem, TileConfig.parse(text), gpu) for text in texts)
    configs = list(dict.fromkeys(c for c in found if c is not None))
    # A tile of twice the rows that an expert has is padding; of the low ones the lowest always stays.
    rows, lowest = problem.rows_per_expert, min((c.block_m for c in configs), default=0)
    return [c for c in configs if c.block_m == lowest or c.block_m < 2 * rows]


def by_pointers(problem: Problem, config: TileConfig) -> TileConfig:
    """``config``'s tile for operands that no descriptor can address."""
    if problem.four_bits:
        portable = map(TileConfig.parse, NIBBLES_PORTABLE)
        config = max((c for c in portable if c.block_m <= config.block_m), key=lambda c: c.block_m)
    return config.by_pointers()


def _fitted(problem: Problem, config: TileConfig, gpu: Gpu) -> TileConfig | None:
    """``config`` made to run this problem here, giving up first what costs least; None if nothing helps."""
    if config.tma and (not gpu.tma or problem.K * problem.weight_size % 16):
        config = by_pointers(problem, config)
    if config.warp_specialize and supports(problem, replace(config, num_stages=2), gpu) is not None:
        config = config.portable()
    for field, least in (("num_stages", 2), ("block_n", 64), ("block_m", 64), ("block_k", 64)):
        while supports(problem, config, gpu) is not None and (now := getattr(config, field)) > least:
            changes = {field: now - 1 if field == "num_stages" else now // 2}
            config = replace(config, **changes, num_warps=config.num_warps if field == "num_stages" else 4)
    return config if supports(problem, config, gpu) is None else None


def bucket(problem: Problem) -> Problem:
    """The problem that stands for this one: rows per expert rounded up to 2ⁿ or 3·2ⁿ (with fewer rows than experts, the
    rows).

    Tuning and picking happen per bucket, so that a new number of tokens is nothing new.

    >>> [bucket(Problem(8, M, 64, 64, torch.int8)).M for M in (1, 5, 8, 9, 17, 100)]
    [1, 6, 8, 16, 24, 128]
    """
    if problem.M <= problem.E:
        return replace(problem, M=min(_round_up(problem.M), problem.E))
    return replace(problem, M=problem.E * _round_up(-(-problem.M // problem.E)))


def _round_up(rows: int) -> int:
    power = 1 << max(0, rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


@functools.lru_cache(maxsize=4096)  # bounded: every token count is a problem of its own
def pick(problem: Problem, gpu: Gpu) -> TileConfig:
    """The configuration used when none is asked for: the measured one if the user's cache or the table shipped for this
    GPU has this bucket, else the one with the least predicted time."""
    return _pick(bucket(problem), gpu)


@functools.lru_cache(maxsize=1024)
def _pick(problem: Problem, gpu: Gpu) -> TileConfig:
    table = tune_cache.shipped(gpu.name)
    for measured in (tune_cache.user(gpu.name), table.measured if table is not None else {}):
        text = measured.get(problem.key)
        if text is not None and (config := _stored(text, problem, gpu)) is not None:
            return config
    return predicted(problem, gpu)


def _stored(text: str, problem: Problem, gpu: Gpu) -> TileConfig | None:
    """The configuration of a table's entry, or None and a warning if it cannot run here."""
    try:
        config = TileConfig.parse(text)
        why = supports(problem, config, gpu)
    except UnsupportedError as error:
        why = str(error)
    if why is None:
        return config
    warnings.warn(f"lowgmm: the measured configuration of {problem.key} is ignored: {why}", stacklevel=2)
    return None


def predicted(problem: Problem, gpu: Gpu, table: Shipped | None = None) -> TileConfig:
    """The candidate with the least predicted time; measurements are not asked."""
    table = table or tune_cache.nearest(gpu.name)
    found = candidates(problem, gpu, table)
    if not found:
        raise UnsupportedError(f"no tile configuration runs {problem} on {gpu.name}: {_why_not(problem, gpu)}")
    return min(found, key=lambda config: model(problem, config, gpu, table.rates, table.factors))


WGMMA_ROWS = 64
"""Rows of Hopper's matrix instruction: a lower tile on its M side pays for 64."""
FP32_SLOWER = 20
"""Exact fp32 runs on the CUDA cores: that many times slower than the 8-bit matrix instruction on an H200."""
REGISTERS = 65_536
"""32-bit registers of an SM."""


def predict(problem: Problem, config: TileConfig, gpu: Gpu, sizes: Sequence[int] | None = None) -> float:
    """Seconds that ``config`` should need for ``problem``: launch + memory time and SM time, whichever is longer.

    The rates are those shipped for the GPU, else an H200's, which then only rank configurations.

    Args:
        sizes: rows of each expert; default: even, on as many experts as there are rows where those are fewer.

    >>> from lowgmm.gpu import H200
    >>> decode = Problem(64, 64 * 16, 2048, 4096, torch.int8)
    >>> 100e-6 < predict(decode, pick(decode, H200), H200) < 200e-6
    True
    """
    table = tune_cache.nearest(gpu.name)
    return model(problem, config, gpu, table.rates, table.factors, sizes)


def model(
    problem: Problem,
    config: TileConfig,
    gpu: Gpu,
    rates: Rates,
    factors: Mapping[str, Mapping[str, float]],
    sizes: Sequence[int] | None = None,
) -> float:
    """The cost model itself, which ``bench/fit.py`` fits ``rates`` and ``factors`` of."""
    bm, bn, size, out_size = config.block_m, config.block_n, problem.element_size, problem.out_dtype.itemsize
    if sizes is None:
        active = max(1, min(problem.E, problem.M))
        row_tiles: float = active * math.ceil(problem.M / active / bm)
        largest = row_tiles / active
    else:
        active = sum(1 for s in sizes if s)
        row_tiles, largest = sum(-(-s // bm) for s in sizes), -(-max(sizes) // bm)
    columns, steps = -(-problem.N // bn), -(-problem.K // config.block_k)
    tiles, programs = row_tiles * columns, resident(problem, config, gpu)

    m_side, n_side = (bn, bm) if config.swap_ab else (bm, bn)
    area = max(m_side, WGMMA_ROWS) * max(n_side, rates.narrow)
    mma = 2 * area * config.block_k / (rates.mma / (size if size < 4 else FP32_SLOWER))
    load = config.pipeline(problem) / config.num_stages / rates.l2
    promote = 0.0
    if size == 1 and problem.dtype.is_floating_point:
        promote = rates.promote * bm * bn / 128 * max(1, config.block_k / 128)
    alone = mma + promote + rates.step
    fixed = rates.tile + bm * bn * out_size / rates.store
    if config.launch == "persistent" or config.warp_specialize:
        fixed *= rates.overlap
    # The SM as a whole cannot do a tile in less than `busy`; one program alone cannot in less than `span`.
    busy = steps * max(mma, load, promote)
    span = steps * max(alone, load, rates.latency / max(1, config.num_stages - 1)) + fixed
    on_sm = max(math.ceil(tiles / gpu.sms) * busy, math.ceil(tiles / (gpu.sms * programs)) * span)
    if config.launch == "expert":
        on_sm = max(on_sm, largest * columns * span)
    on_sm *= factors.get(problem.format, {}).get(str(config), 1.0)
    moved = active * problem.N * problem.K * problem.weight_size + problem.M * (problem.K * size + problem.N * out_size)
    joined = ((moved / rates.dram) ** rates.blend + on_sm**rates.blend) ** (1 / rates.blend)
    return rates.launch + float(joined)


def resident(problem: Problem, config: TileConfig, gpu: Gpu) -> int:
    """Programs of one SM that run at a time: what was asked for, shared memory and threads allowing."""
    shared = config.pipeline(problem) + 1024
    registers = config.block_m * config.block_n + 96 * 32 * config.num_warps  # the accumulator and everything else
    fits = max(1, min(gpu.shared_memory // shared, REGISTERS // registers, 64 // config.num_warps))
    return min(fits, config.programs_per_sm) if config.launch in ("persistent", "queue") else fits


def forget() -> None:
    """Ask the tables again at the next pick: after tuning, or when LOWGMM_CACHE has changed."""
    pick.cache_clear()
    _pick.cache_clear()
    tune_cache.user.cache_clear()
    replay.forget()


def _why_not(problem: Problem, gpu: Gpu) -> str:
    return supports(problem, TileConfig(16, 16, 32), gpu) or "every candidate is too large"
