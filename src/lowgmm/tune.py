"""Which tile configuration runs a problem: ``supports`` says what can run, ``pick`` what does."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import torch

from lowgmm.formats import format_of
from lowgmm.gpu import Gpu
from lowgmm.shapes import UnsupportedError

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
    """dtype of both operands in the matrix instruction."""
    out_dtype: torch.dtype = torch.bfloat16

    @property
    def rows_per_expert(self) -> float:
        return self.M / max(self.E, 1)

    @property
    def element_size(self) -> int:
        return self.dtype.itemsize


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
    """Hopper only: a warp that loads and two warpgroups that multiply (``kernels/hopper.py``), weights on the M side."""
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
        pattern = r"(\d+)x(\d+)x(\d+)(-swap)?(-tma)?(-ws)?-(grid|persistent|queue|expert)(\d*)-(\d+)w(\d+)s"
        m = re.fullmatch(pattern, text)
        if m is None:
            raise UnsupportedError(
                f"config {text!r} is not a tile configuration; expected e.g. '16x128x256-swap-tma-persistent2-4w4s'."
            )
        bm, bn, bk, *flags, launch, per_sm, warps, stages = m.groups()
        return TileConfig(
            int(bm), int(bn), int(bk), *map(bool, flags), launch, int(per_sm or 1), int(warps), int(stages)
        )

    @property
    def boxes(self) -> int:
        """Tiles whose scales may wait for their epilogue in a warp-specialised program; the largest tile leaves room
        for one."""
        return 1 if self.block_m * self.block_n >= 128 * 256 else 4

    def shared_memory(self, element_size: int, out_size: int) -> int:
        """Bytes of shared memory: the operand pipeline, and beside it (a flattened loop loads the next tile meanwhile)
        the output tile on its way to a coalesced store, and barriers."""
        pipeline = (self.block_m + self.block_n) * self.block_k * element_size * self.num_stages
        if self.warp_specialize:
            boxes = self.boxes * (4 * (self.block_m + self.block_n) + 64)
            return pipeline + 2 * 64 * self.block_m * out_size + boxes + 64 * self.num_stages
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
    if config.launch not in LAUNCHES:
        return f"launch {config.launch!r} is not one of {', '.join(LAUNCHES)}."
    if config.tma:
        if not gpu.tma:
            return f"{gpu.name} has no TMA; use a configuration without it."
        if problem.K * problem.element_size % 16:
            return f"TMA needs rows that are a multiple of 16 bytes; K={problem.K} of {problem.dtype} is not."
    if config.warp_specialize:
        if (gpu.backend, gpu.capability) != ("cuda", (9, 0)):
            return f"warp-specialised tiles use Hopper's warpgroup instructions, which {gpu.name} lacks."
        if not (config.tma and config.swap_ab and config.launch == "queue" and config.programs_per_sm == 1):
            return "warp-specialised tiles come as '-swap-tma-ws-queue1' only."
        if config.block_n not in (128, 256) or config.block_m > 128 or config.num_warps != 4:
            return "warp-specialised tiles need block_n 128 or 256, block_m up to 128, and 4 warps per warpgroup."
        if problem.element_size > 2 or config.block_k * problem.element_size % 128:
            return "warp-specialised tiles need 8- or 16-bit operands and block_k of a multiple of 128 bytes."
    need = config.shared_memory(problem.element_size, problem.out_dtype.itemsize)
    if need > gpu.shared_memory:
        return f"{config} needs {need} bytes of shared memory, {gpu.name} has {gpu.shared_memory} per block."
    return None


@functools.lru_cache(maxsize=4096)  # bounded: every token count is a problem of its own
def pick(problem: Problem, gpu: Gpu) -> TileConfig:
    """The configuration used when none is asked for: by rows per expert, then made to fit the GPU.

    From a sweep of 21 cases on an H200 (``bench/sweep.py``): with up to 96 rows per expert the weights go on the M
    side, because Hopper's matrix instruction has 64 rows there and the tokens would waste them. From there on two small
    programs per SM (128x128, 4 warps) beat one large one (128x256, 8 warps) by 12 %: one computes while the other
    stores.
    """
    rows, size = problem.rows_per_expert, problem.element_size
    # Elsewhere nothing is measured yet. What holds by construction: Blackwell's FP8 instruction wants 128 rows on its M
    # side, and with mma.sync a 128x128 tile spills unless 8 warps share it.
    hopper = gpu.backend == "cuda" and gpu.capability[0] == 9
    if problem.dtype == torch.float32:
        # The exact fp32 path runs on the CUDA cores: small tiles, no tensor-core layout to respect.
        config = TileConfig(16 if rows <= 16 else 64, 64, 32, launch="persistent", programs_per_sm=2, num_stages=2)
    elif rows <= 16:
        config = TileConfig(16, 64 if hopper else 128, 256 // size, True, True, False, "persistent", 2, 4, 4)
    elif rows <= 32:
        config = TileConfig(32, 128, 128 // size, True, True, False, "persistent", 2, 4, 4)
    elif rows <= 96:
        config = TileConfig(64, 128, 128 // size, True, True, False, "persistent", 2, 4, 4)
    else:
        config = TileConfig(128, 128, 128 // size, False, True, False, "persistent", 2, 4 if hopper else 8, 3)
    if not gpu.tma or problem.K * size % 16:
        config = replace(config, tma=False)
    # Made to fit by giving up first what costs least: pipeline depth, then the tile.
    for field, least in (("num_stages", 2), ("block_n", 64), ("block_m", 64), ("block_k", 64)):
        while supports(problem, config, gpu) is not None and (now := getattr(config, field)) > least:
            changes = {field: now - 1 if field == "num_stages" else now // 2}
            config = replace(config, **changes, num_warps=config.num_warps if field == "num_stages" else 4)
    if (why := supports(problem, config, gpu)) is not None:
        raise UnsupportedError(f"no tile configuration runs {problem} on {gpu.name}: {why}")
    return config
