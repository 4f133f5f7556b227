"""Which tile configuration runs a problem: ``predict`` says how long one should take, ``pick`` which it is.

The model's form is here; its numbers and the candidates are data (``measured/``), fitted to a sweep by
``bench/fit.py``. Nothing here runs anything on a GPU.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from lowgmm import replay, tune_cache
from lowgmm.gpu import Gpu
from lowgmm.shapes import UnsupportedError
from lowgmm.tile_config import Problem, TileConfig, supports
from lowgmm.tune_cache import Rates, Shipped

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
"""Hopper's candidates of 4-bit weights by elements that share a scale (0: all of K): of three to six of each height on
an H200. Not so 32 rows, which follow INT8's; and groups of 32 take those of 64, 4 % off their own best at 64 rows."""

NIBBLES_PORTABLE = (
    "16x128x128-swap-tma-persistent2-4w3s",
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
