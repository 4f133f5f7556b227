"""A grouped matmul as kernels and the tuner see it, the ways to run one, and which of them can run it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import torch

from lowgmm.formats import FORMATS, format_of
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
    """dtype of both operands; uint8: of 4-bit weights, two to a byte, for INT8 activations."""
    out_dtype: torch.dtype = torch.bfloat16
    group: int = 0
    """Elements along K that share a scale of 4-bit weights; 0: all of them."""

    @staticmethod
    def of(E: int, M: int, N: int, K: int, format: str, out_dtype: torch.dtype = torch.bfloat16) -> Problem:
        """With operands of a quantisation format, or "bf16".

        >>> Problem.of(64, 1024, 2048, 4096, "int4_g128").group
        128
        """
        fmt = FORMATS.get(format)
        if fmt is None:
            return Problem(E, M, N, K, torch.bfloat16, out_dtype)
        group = fmt.group if fmt.group is not None and fmt.blocks(K) > 1 else 0  # one scale is a scale for all of K
        return Problem(E, M, N, K, fmt.dtype, out_dtype, group)

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
        if problem.K % 2:
            return f"two 4-bit values share a byte, but K={problem.K} is odd."
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
