"""Where the time of a grouped matmul must go: bytes, operations, the bound they set, and what to change.

Pure functions on frozen data; nothing here needs a GPU. Units: bytes, operations (a multiply and an add count as two,
written FLOP for integers too), seconds. Element counts are the textbook ones: each operand crosses the memory bus once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lowgmm.shapes import ShapeError, UnsupportedError

if TYPE_CHECKING:
    from lowgmm.gpu import Gpu

OPERAND_BYTES: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
"""Bytes of one input or weight element. A leaf table on purpose: torch dtypes are not needed to reason about bytes."""

SCALE_BYTES = 4
"""Scales are float32, one per token and one per output channel, in the quantised formats only."""

QUANTISED = ("int8", "fp8")

TABLE_ROWS = (1, 4, 8, 16, 64, 256, 1024)
"""Rows per expert in the intensity table: decode to prefill. 8 and 64 are the pair usually quoted for N = K = 4096."""

FEW_PROGRAMS = 264
"""Two programs on each of an H200's 132 SMs: fewer than that leave part of a large GPU idle."""

GOOD_SHARE = 0.75
"""Share of the roof above which a kernel is called good. Tuned kernels here reach 0.85-0.95; the rest is launch and
tail."""


@dataclass(frozen=True)
class Machine:
    """What a machine can do, measured or given.

    name       shown in every text
    bandwidth  read bandwidth of the memory that holds the weights, bytes/s
    peaks      dense matmul rate by format, FLOP/s; a format that is missing has no rate (it is not guessed)
    is_gpu     decides which advice is given
    native_fp8 False when FP8 has to be widened before it can be multiplied (CPUs without FP8 instructions)
    """

    name: str
    bandwidth: float
    peaks: Mapping[str, float] = field(default_factory=dict)
    is_gpu: bool = True
    native_fp8: bool = True

    def balance(self, format: str) -> float:
        """FLOP per byte at which both limits meet: below it a problem waits for memory.

        >>> Machine("toy", bandwidth=1e12, peaks={"bf16": 100e12}).balance("bf16")
        100.0
        """
        if format not in self.peaks:
            known = ", ".join(self.peaks) or "none"
            raise UnsupportedError(
                f"machine {self.name!r} has no rate for {format!r}, only for: {known}. Add it to peaks."
            )
        return self.peaks[format] / self.bandwidth


H200 = Machine("NVIDIA H200 (measured once)", 4.6e12, {"bf16": 0.75e15, "fp16": 0.75e15, "int8": 1.4e15, "fp8": 1.4e15})
"""Rates one H200 showed: reading 4 GiB, and the best dense matmuls sustained for about 15 ms. For `--machine h200`."""


@dataclass(frozen=True)
class Load:
    """One grouped matmul as a load on a machine: ``Y[S_e] = X[S_e] @ W[e].T``.

    N, K     output channels and reduction length
    sizes    rows of each expert, so E = len(sizes); an expert without rows moves no bytes
    format   of inputs and weights: fp32, bf16, fp16, int8 or fp8
    out_format  of the output
    """

    N: int
    K: int
    sizes: tuple[int, ...]
    format: str = "int8"
    out_format: str = "bf16"

    def __post_init__(self) -> None:
        for name, value in (("format", self.format), ("out_format", self.out_format)):
            if value not in OPERAND_BYTES:
                raise UnsupportedError(f"roofline: {name} is {value!r}, expected one of {', '.join(OPERAND_BYTES)}.")
        if self.N < 1 or self.K < 1 or not self.sizes or min(self.sizes) < 0:
            raise ShapeError(
                f"roofline: expected N >= 1, K >= 1 and at least one expert of size >= 0, "
                f"got N={self.N}, K={self.K}, {len(self.sizes)} experts, smallest size {min(self.sizes, default=0)}."
            )

    @property
    def rows(self) -> int:
        """Rows of all experts together."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Traffic:
    """Bytes each operand moves, each counted once."""

    x: float
    weights: float
    scales: float
    output: float

    @property
    def total(self) -> float:
        return self.x + self.weights + self.scales + self.output


def even(E: int, rows: int) -> tuple[int, ...]:
    """Sizes of E experts with ``rows`` rows each."""
    return (rows,) * E


def element_intensity(M: int, N: int, K: int) -> float:
    """Operations per element moved: ``2 M N K / (M K + N K + M N)``; divide by bytes per element for FLOP/byte.

    >>> round(element_intensity(64, 4096, 4096), 1), round(element_intensity(8, 4096, 4096), 1)
    (124.1, 15.9)
    """
    if min(M, N, K) < 1:
        return 0.0
    return 2 * M * N * K / (M * K + N * K + M * N)


def flops(load: Load) -> float:
    """``2 M N K`` over all experts."""
    return 2.0 * load.rows * load.N * load.K


def traffic(load: Load) -> Traffic:
    """Bytes of x, of the weights of experts that have rows, of the scales, and of the output.

    >>> traffic(Load(N=4, K=8, sizes=(2, 0), format="int8", out_format="bf16"))
    Traffic(x=16, weights=32, scales=24, output=16)
    """
    element = OPERAND_BYTES[load.format]
    active = sum(1 for s in load.sizes if s)
    scales = SCALE_BYTES * (load.rows + active * load.N) if load.format in QUANTISED else 0
    return Traffic(
        x=load.rows * load.K * element,
        weights=active * load.N * load.K * element,
        scales=scales,
        output=load.rows * load.N * OPERAND_BYTES[load.out_format],
    )


def intensity(load: Load) -> float:
    """FLOP per byte with the real byte sizes of every operand; 0 for a load without rows."""
    total = traffic(load).total
    return flops(load) / total if total else 0.0


def memory_time(load: Load, machine: Machine) -> float:
    """Seconds to move the bytes once."""
    return traffic(load).total / machine.bandwidth


def compute_time(load: Load, machine: Machine) -> float:
    """Seconds of arithmetic at the machine's dense rate."""
    return flops(load) / (machine.balance(load.format) * machine.bandwidth)


def roof_time(load: Load, machine: Machine) -> float:
    """The floor in seconds: ``max(bytes / bandwidth, operations / rate)``. No kernel that touches each byte once beats
    it."""
    return max(memory_time(load, machine), compute_time(load, machine))


def bound(load: Load, machine: Machine) -> str:
    """``"memory"`` or ``"compute"``: which of the two times is the longer."""
    return "memory" if memory_time(load, machine) >= compute_time(load, machine) else "compute"


def share_of_roof(load: Load, machine: Machine, measured_s: float) -> float:
    """``roof_time / measured``: 1.0 is the floor reached. Above 1 the weights came from a cache.

    >>> toy = Machine("toy", 1e9, {"bf16": 1e12})
    >>> round(share_of_roof(Load(1000, 1000, (1,), "bf16"), toy, 4e-3), 2)
    0.5
    """
    if not measured_s > 0:
        raise ShapeError(f"roofline: measured time is {measured_s} s, expected a positive number of seconds.")
    return roof_time(load, machine) / measured_s


def intensity_rows(
    N: int, K: int, machine: Machine, formats: Sequence[str], rows: Sequence[int] = TABLE_ROWS
) -> list[dict[str, float | str]]:
    """The intensity table of one expert as data: per row count, FLOP/element, then FLOP/byte and bound by format."""
    table: list[dict[str, float | str]] = []
    for m in rows:
        line: dict[str, float | str] = {"M": m, "flop_per_element": element_intensity(m, N, K)}
        for f in formats:
            load = Load(N, K, (m,), f, "fp32" if f == "fp32" else "bf16")
            line[f"{f}_flop_per_byte"] = intensity(load)
            if f in machine.peaks:
                line[f"{f}_bound"] = bound(load, machine)
        table.append(line)
    return table


def intensity_table(N: int, K: int, machine: Machine, formats: Sequence[str], rows: Sequence[int] = TABLE_ROWS) -> str:
    """:func:`intensity_rows` as text. ``*`` marks what the machine's arithmetic limits; everything else waits for
    memory."""
    head = f"{'M_e':>6} {'FLOP/element':>13}" + "".join(f" {f + ' FLOP/B':>13}" for f in formats)
    lines = [f"arithmetic intensity of one expert, N={N} K={K} (* = compute bound on {machine.name})", head]
    for line in intensity_rows(N, K, machine, formats, rows):
        cells = "".join(
            f" {line[f'{f}_flop_per_byte']:>12.1f}{'*' if line.get(f'{f}_bound') == 'compute' else ' '}"
            for f in formats
        )
        lines.append(f"{line['M']:>6} {line['flop_per_element']:>13.1f}{cells}")
    balances = [f"{f} {machine.balance(f):.0f}" for f in formats if f in machine.peaks]
    lines.append(f"machine balance, FLOP/byte: {', '.join(balances) or 'no rates known'}")
    return "\n".join(lines)


class Tiles(Protocol):
    """What :func:`advice` reads of a tile configuration (a ``lowgmm.tile_config.TileConfig``)."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def swap_ab(self) -> bool: ...
    @property
    def launch(self) -> str: ...


def advice(load: Load, machine: Machine, *, measured_s: float | None = None, config: Tiles | None = None) -> list[str]:
    """What to change, most important first, as sentences. At least one; the last resort is to say that nothing is
    wrong.

    The order is the diagnosis: which limit holds, whether the kernel reaches it, and only then the tiles.

    >>> toy = Machine("toy", 4e12, {"bf16": 800e12})
    >>> advice(Load(4096, 4096, even(8, 4), "bf16"), toy)[0].split(":")[0]
    'memory bound'
    """
    share = None if measured_s is None else share_of_roof(load, machine, measured_s)
    found = _bound_advice(load, machine, share)
    if load.format == "fp8" and not machine.native_fp8:
        found.append(
            "FP8 is slow here: this machine has no FP8 matrix instructions, so every weight is widened before it is "
            "multiplied. Use int8 on it; fp8 is for checking accuracy."
        )
    found += _balance_advice(load, config)
    if config is not None and machine.is_gpu:
        found += _tile_advice(load, config)
    return found


def _bound_advice(load: Load, machine: Machine, share: float | None) -> list[str]:
    slow = share is not None and share < GOOD_SHARE
    if bound(load, machine) == "compute":
        text = "compute bound: every weight is used often enough; the matrix instructions are the limit. "
        if slow:
            return [text + "The kernel does not keep them busy: larger tiles, larger block_k, more stages."]
        return [text + "Only a format with a faster instruction (8-bit rather than 16-bit) lowers the floor."]
    moved = traffic(load)
    weights = moved.weights / moved.total if moved.total else 0.0
    text = f"memory bound: {weights:.0%} of the bytes are weights, and the arithmetic waits for them. "
    if slow:
        text += "The kernel does not reach the memory's rate: fix schedule and layout first, before the format. "
    if load.format not in QUANTISED:
        factor = OPERAND_BYTES[load.format]
        text += f"int8 or fp8 weights cut these bytes by {factor:.0f} and raise the intensity as much."
    else:
        text += "More instructions do not help; fewer bytes per weight do, or more tokens per expert (a larger batch)."
    return [text]


def _balance_advice(load: Load, config: Tiles | None) -> list[str]:
    active = [s for s in load.sizes if s]
    if not active or max(active) * len(active) <= 4 * sum(active):
        return []
    text = f"uneven experts: the largest has {max(active)} rows, the mean is {sum(active) / len(active):.0f}. "
    if config is not None and config.launch == "expert":
        return [text + "launch='expert' gives each expert one program, which waits for the largest: use 'queue'."]
    return [text + "Row tiles handed out by a queue balance this; one program per expert would not."]


def _tile_advice(load: Load, config: Tiles) -> list[str]:
    found = []
    line = config.block_k * OPERAND_BYTES[load.format]
    if line < 128:  # one 128-byte line is what a memory transaction and the swizzled shared-memory layout are built on
        wide = int(128 / OPERAND_BYTES[load.format])
        found.append(
            f"block_k={config.block_k} is too small: {line:.0f} bytes of a row per step leave the low-precision "
            f"instructions waiting between loads. Use block_k >= {wide}."
        )
    rows = max(load.sizes)
    if 0 < rows <= config.block_m // 2 and config.block_m > 32:
        found.append(f"block_m={config.block_m} is mostly padding: no expert has more than {rows} rows.")
    if config.launch == "expert" and len(load.sizes) < FEW_PROGRAMS:
        found.append(
            f"launch='expert' starts only {len(load.sizes)} programs: too few to fill a GPU. Use 'grid' or 'queue'."
        )
    return found


def explain(
    E: int,
    N: int,
    K: int,
    rows: int | Sequence[int],
    format: str = "int8",
    *,
    machine: Machine = H200,
    measured_s: float | None = None,
    config: Tiles | str | None = None,
    gpu: Gpu | None = None,
) -> str:
    """Explain one grouped matmul: intensity table, bound, floor, configuration, and what to change.

    Args:
        E, N, K: experts, output channels, reduction length.
        rows: rows of each expert: one number for all, or E numbers.
        format: fp32, bf16, fp16, int8 or fp8, of inputs and weights.
        machine: rates to compare with; ``lowgmm.timing.measure_machine`` measures this one.
        measured_s: a measured time in seconds, to be placed against the floor.
        config: the tile configuration to judge, or its string; default: with ``gpu``, the one the library would pick.
        gpu: facts about a GPU (``lowgmm.gpu.describe``), to name the configuration the library would pick there.

    Raises:
        ShapeError: sizes that make no problem. UnsupportedError: unknown format, or one the machine has no rate for.

    >>> print(explain(64, 2048, 4096, 16, "bf16").splitlines()[0])
    64 experts, N=2048 K=4096, 1024 rows (16 per expert), bf16, on NVIDIA H200 (measured once)
    """
    sizes = even(E, rows) if isinstance(rows, int) else tuple(rows)
    if len(sizes) != E:
        raise ShapeError(f"explain: rows has {len(sizes)} numbers, expected one number or E={E} of them.")
    load = Load(N, K, sizes, format, "fp32" if format == "fp32" else "bf16")
    if isinstance(config, str):
        from lowgmm.tile_config import TileConfig

        config = TileConfig.parse(config)
    config, chosen = (config, []) if gpu is None else _chosen(load, gpu, config)
    spread = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    formats = [format, *(f for f in ("bf16", "int8", "fp8") if f != format)]
    lines = [
        f"{E} experts, N={N} K={K}, {load.rows} rows ({spread} per expert), {format}, on {machine.name}",
        "",
        intensity_table(N, K, machine, formats, sorted({*TABLE_ROWS, max(1, load.rows // E)})),
        "",
        *_figures(load, machine),
    ]
    if measured_s is not None:
        lines.append(
            f"measured  {measured_s * 1e6:.1f} us: {share_of_roof(load, machine, measured_s):.0%} of the floor's rate"
        )
    if config is not None:
        lines += [f"tiles     {config}", *chosen]
    elif not machine.is_gpu:
        lines.append("tiles     none to choose on a CPU: experts run one after the other, weights packed once")
    lines += ["", "what to change"]
    lines += [f"  - {sentence}" for sentence in advice(load, machine, measured_s=measured_s, config=config)]
    return "\n".join(lines)


def _figures(load: Load, machine: Machine) -> list[str]:
    moved = traffic(load)
    return [
        f"work      {flops(load) / 1e9:.2f} GFLOP over {moved.total / 1e6:.2f} MB: weights {moved.weights / 1e6:.2f}, "
        f"x {moved.x / 1e6:.2f}, output {moved.output / 1e6:.2f}, scales {moved.scales / 1e6:.2f}",
        f"intensity {intensity(load):.1f} FLOP/byte; the machine balances at {machine.balance(load.format):.0f}: "
        f"{bound(load, machine)} bound",
        f"floor     {roof_time(load, machine) * 1e6:.1f} us (memory {memory_time(load, machine) * 1e6:.1f}, "
        f"arithmetic {compute_time(load, machine) * 1e6:.1f})",
    ]


def _chosen(load: Load, gpu: Gpu, config: Tiles | None) -> tuple[Tiles, list[str]]:
    """The given configuration, or the library's; and what the cost model expects of it and of its rivals."""
    # Lazily: bytes and operations can be counted without torch's dtypes and the tuner.
    import torch

    from lowgmm import formats, tile_config, tune

    floats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = floats[load.format] if load.format in floats else formats.get_format(load.format).dtype
    problem = tile_config.Problem(E=len(load.sizes), M=load.rows, N=load.N, K=load.K, dtype=dtype)
    tiles = config if isinstance(config, tile_config.TileConfig) else tune.pick(problem, gpu)
    if (why := tile_config.supports(problem, tiles, gpu)) is not None:
        return tiles, [f"cannot run on {gpu.name}: {why}"]
    us = {c: tune.predict(problem, c, gpu, load.sizes) * 1e6 for c in (tiles, *tune.candidates(problem, gpu))}
    rivals = sorted((v, str(c)) for c, v in us.items() if c != tiles)
    text = f"predicted {us[tiles]:.1f} us" + "".join(f"; {v:.1f} as {name}" for v, name in rivals[:2])
    return tiles, [text]
