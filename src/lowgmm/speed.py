"""The timing table: one grouped matmul as a loop of 16-bit matmuls, as a 16-bit GMM, and as an INT8 (and FP8) GMM.

Every rival computes the same product from the same random weights, is checked against the fp64 oracle on its own
operands, and is timed in turns with the others. Quantised rivals get quantised activations, as an expert layer that
quantises while it sorts does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import lowgmm
from lowgmm import cpu, reference, roofline, timing
from lowgmm.formats import QuantTensor


@dataclass(frozen=True)
class Shape:
    """A grouped matmul with even experts: E experts, N output channels, reduction K, ``rows`` rows per expert."""

    E: int
    N: int
    K: int
    rows: int

    def __str__(self) -> str:
        return f"E={self.E} N={self.N} K={self.K}, {self.rows} tokens per expert"


GPU_SHAPE = Shape(E=64, N=2048, K=4096, rows=16)
"""64 experts and 1024 routed tokens: a decode batch, memory bound in every format."""

CPU_SHAPE = Shape(E=64, N=1024, K=2048, rows=16)
"""The same experts and tokens with N and K halved: a quarter of the bytes, and still several times any cache."""


@dataclass(frozen=True)
class Row:
    """One line of the table. ``speedup`` is over the 16-bit loop, within each round; ``gb_per_s`` counts every operand
    once."""

    label: str
    format: str
    timing: timing.Timing
    speedup: float
    gb_per_s: float
    share_of_roof: float | None
    """Of the machine's floor; None where the machine's rate in this format is unknown."""

    def figures(self) -> dict[str, Any]:
        """Everything that :func:`table` shows, and the samples that it comes from."""
        t = self.timing
        return asdict(self) | {"timing": asdict(t) | {"median_s": t.median_s, "p20_s": t.p20_s, "p80_s": t.p80_s}}


@dataclass(frozen=True)
class _Entry:
    """A rival before timing: its calls, one per weight set, and what each must return."""

    label: str
    format: str
    calls: list[Callable[[], Tensor]]
    expected: list[Tensor]
    graph: bool = True


LOOP = "loop of {} matmuls, bf16"
BF16_TOLERANCE = 2.0**-8
"""Twice bf16's rounding error: outputs are bf16, accumulation is in fp32 or exact. A zeroed tile errs by more than
1e-2."""


def compare(
    device: torch.device,
    machine: roofline.Machine,
    shape: Shape | None = None,
    *,
    rounds: int = 20,
    seconds: float = 8.0,
    progress: Callable[[], object] | None = None,
) -> list[Row]:
    """Build, check and time the table's rivals; the 16-bit loop is the first row. FP8 is included where the hardware
    has it.

    Args:
        machine: rates of ``device`` (:func:`lowgmm.timing.measure_machine`).
        shape: :data:`GPU_SHAPE` or :data:`CPU_SHAPE` by default.
        rounds, seconds: as for :func:`lowgmm.timing.interleave`.

    Raises:
        CheckError: a rival computes something wrong; nothing is timed then.
    """
    shape = shape or (GPU_SHAPE if device.type == "cuda" else CPU_SHAPE)
    entries = _entries(shape, device)
    rivals = [timing.Rival(e.label, e.calls, _checker(e.expected), e.graph) for e in entries]
    timings = timing.interleave(rivals, device, rounds=rounds, seconds=seconds, progress=progress)
    rows = []
    for entry, t in zip(entries, timings, strict=True):
        out_format = "fp32" if entry.format == "fp32" else "bf16"
        load = roofline.Load(shape.N, shape.K, roofline.even(shape.E, shape.rows), entry.format, out_format)
        known = entry.format in machine.peaks
        share = roofline.share_of_roof(load, machine, t.median_s) if known else None
        rate = roofline.traffic(load).total / t.median_s / 1e9
        speedup = timing.paired(timings[0].samples, t.samples).median
        rows.append(Row(entry.label, entry.format, t, speedup, rate, share))
    return rows


def _checker(expected: list[Tensor]) -> Callable[[int, Tensor], None]:
    def check(index: int, output: Tensor) -> None:
        want = expected[index]
        if output.shape != want.shape:
            raise AssertionError(f"shape is {list(output.shape)}, expected {list(want.shape)}")
        error = float((output.double() - want).norm() / want.norm())
        if not error <= BF16_TOLERANCE:  # written so that a NaN fails
            raise AssertionError(f"relative error {error:.2e}, expected at most {BF16_TOLERANCE:.2e}")

    return check


def _entries(shape: Shape, device: torch.device) -> list[_Entry]:
    E, N, K = shape.E, shape.N, shape.K
    generator = torch.Generator(device).manual_seed(0)
    offsets = torch.arange(0, (E + 1) * shape.rows, shape.rows, dtype=torch.int32, device=device)
    x = torch.randn(E * shape.rows, K, generator=generator, device=device).to(torch.bfloat16)
    sets = [
        torch.stack(
            [(torch.randn(N, K, generator=generator, device=device) * K**-0.5).to(torch.bfloat16) for _ in range(E)]
        )
        for _ in range(timing.weight_sets(E * N * K, device))  # counted in bytes of the 8-bit formats, the smallest
    ]
    exact = [reference.gmm(x, w, expert_offsets=offsets) for w in sets]
    on_cpu = device.type == "cpu"
    loop = LOOP.format(E)
    entries = [_Entry(loop, "bf16", [_loop(x, w, shape.rows) for w in sets], exact)]
    if on_cpu:  # on many CPUs fp32 is the faster loop; a table without it would flatter the rest
        wide = [_loop(x.float(), w.float(), shape.rows) for w in sets]
        entries.append(_Entry(f"loop of {E} matmuls, fp32", "fp32", wide, exact))
    else:
        entries.append(_Entry(f"{loop}, launched one by one", "bf16", entries[0].calls, exact, graph=False))
    entries.append(_Entry("GMM bf16", "bf16", [_grouped(x, w, offsets) for w in sets], exact))
    for format in ("int8",) if on_cpu or torch.cuda.get_device_capability(device) < (8, 9) else ("int8", "fp8"):
        entries.append(_quantised(format, x, sets, offsets))
    return entries


def _quantised(format: str, x: Tensor, sets: list[Tensor], offsets: Tensor) -> _Entry:
    xq, scales = lowgmm.quantize_tokens(x, format)
    calls, expected = [], []
    for w in sets:
        q = lowgmm.quantize(w, format)
        expected.append(reference.gmm(xq, q, scales_x=scales, expert_offsets=offsets))
        calls.append(_grouped(xq, cpu.pack(q) if x.device.type == "cpu" else q, offsets, scales))
    return _Entry(f"GMM {format.upper()}", format, calls, expected)


def _loop(x: Tensor, w: Tensor, rows: int) -> Callable[[], Tensor]:
    y = torch.empty(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)
    parts = [(x[e * rows : (e + 1) * rows], w[e].T, y[e * rows : (e + 1) * rows]) for e in range(w.shape[0])]

    def call() -> Tensor:
        for a, b, out in parts:
            torch.mm(a, b, out=out)
        return y

    return call


def _grouped(x: Tensor, w: Tensor | QuantTensor, offsets: Tensor, scales: Tensor | None = None) -> Callable[[], Tensor]:
    return lambda: lowgmm.gmm(x, w, scales_x=scales, expert_offsets=offsets, out_dtype=torch.bfloat16)


def table(rows: list[Row]) -> str:
    """The rows as text."""
    width = max(len(r.label) for r in rows)
    lines = [
        f"{'':{width}} {'median ms':>11} {'p20':>9} {'p80':>9} {'speed-up':>9} {'GB/s':>7} {'of roof':>8}  timed by"
    ]
    for r in rows:
        times = f"{r.timing.median_s * 1e3:>11.3f} {r.timing.p20_s * 1e3:>9.3f} {r.timing.p80_s * 1e3:>9.3f}"
        share = "-" if r.share_of_roof is None else f"{r.share_of_roof:.0%}"
        rates = f"{r.speedup:>8.2f}x {r.gb_per_s:>7.0f} {share:>8}"
        lines.append(f"{r.label:{width}} {times} {rates}  {r.timing.method}")
    return "\n".join(lines)
