"""Check a grouped matmul honestly: inputs with awkward sizes, a measured error budget, and mutants the budget must
reject.

A tolerance is never a literal. A result may be as wrong as twice an *independent* low-precision computation of the same
thing, plus 2⁻⁹ of the reference's scale; both for the worst element and for every 64×64 tile's RMS, so that neither one
bad element nor one bad tile can hide in a large tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowgmm import reference
from lowgmm.formats import FLOATS, QuantFormat, QuantTensor, format_of, get_format, pack_nibbles, scale_per_element
from lowgmm.quant import quantize, quantize_rows

FLOOR = 2.0**-9
TILE = 64


@dataclass(frozen=True)
class Operands:
    """The operands of one gmm call, already quantised (or float, with scales None)."""

    x: Tensor
    w: Tensor
    scales_x: Tensor | None
    scales_w: Tensor | None
    sizes: Tensor
    format: str | None = None
    """Of the weights where their dtype does not tell: the int4 formats, of which ``w`` holds the codes, one a byte."""

    @property
    def weights(self) -> Tensor | QuantTensor:
        fmt = format_of(self.w.dtype) if self.format is None else get_format(self.format)
        if fmt is None or self.scales_w is None:
            return self.w
        return QuantTensor(pack_nibbles(self.w) if fmt.bits == 4 else self.w, self.scales_w, fmt)

    @property
    def offsets(self) -> Tensor:
        return torch.nn.functional.pad(self.sizes.cumsum(0, dtype=torch.int32), (1, 0))

    def exact(self) -> Tensor:
        """The fp64 oracle on these operands."""
        return reference.gmm(self.x, self.w, self.scales_x, self.scales_w, expert_sizes=self.sizes)

    def baseline(self, dtype: torch.dtype) -> Tensor:
        """An independent low-precision computation: dequantise, multiply in fp32 expert by expert, round to
        ``dtype``."""
        x = self.x.float() if self.scales_x is None else self.x.float() * self.scales_x[:, None]
        w = self.w.float()
        if self.scales_w is not None:
            w = w * scale_per_element(self.scales_w, w.shape[2])
        groups = x[: int(self.sizes.sum())].split(self.sizes.tolist())
        y = torch.cat(
            [g @ w[e].T for e, g in enumerate(groups)] + [x.new_zeros(len(x) - int(self.sizes.sum()), w.shape[1])]
        )
        return y.to(dtype)


def make_operands(
    sizes: Sequence[int],
    n_size: int,
    k_size: int,
    dtype: str = "int8",
    *,
    extra_rows: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Operands:
    """Random operands: ``dtype`` is a format name (quantised from normal data) or "bfloat16", "float16", "float32".

    >>> make_operands([3, 0, 2], 8, 16, "int8").x.shape
    torch.Size([5, 16])
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes) + extra_rows, k_size, generator=g)
    # Tokens and channels of different magnitude: a scale applied along the wrong axis must show.
    x *= torch.rand(len(x), 1, generator=g) * 4 + 0.5
    w = torch.randn(len(sizes), n_size, k_size, generator=g) * (torch.rand(len(sizes), n_size, 1, generator=g) + 0.5)
    counts = torch.tensor(list(sizes), dtype=torch.int32)
    floats = {str(d).removeprefix("torch."): d for d in FLOATS}
    if dtype in floats:
        made = Operands(x.to(floats[dtype]), w.to(floats[dtype]), None, None, counts)
    else:
        q = quantize(w, dtype)
        xq, scales = quantize_rows(x, q.format.activations)
        made = Operands(xq, q.codes(), scales, q.scales, counts, dtype if q.format.bits == 4 else None)
    return replace(made, **{name: t.to(device) for name, t in made.__dict__.items() if isinstance(t, Tensor)})  # type: ignore[arg-type]


def draw_operands(
    sizes: Sequence[int], n_size: int, k_size: int, dtype: str, *, seed: int = 0, device: torch.device | str = "cuda"
) -> Operands:
    """Random operands made where they are used, for problems too large to be quantised on a CPU first: codes are drawn
    themselves, scales are near 1 (near 1/√K for float weights).

    >>> draw_operands([3, 0, 2], 8, 16, "fp8", device="cpu").w.dtype
    torch.float8_e4m3fn
    """
    g = torch.Generator(device).manual_seed(seed)
    floats = {str(d).removeprefix("torch."): d for d in FLOATS}
    fmt = None if dtype in floats else get_format(dtype)

    def values(fmt: QuantFormat | None, *shape: int) -> Tensor:
        if fmt is not None and fmt.exact:
            most = int(fmt.qmax)
            return torch.randint(-most, most + 1, shape, generator=g, device=device, dtype=torch.int8)
        drawn = torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16)
        return drawn.mul_(64).to(fmt.dtype) if fmt is not None else drawn.to(floats[dtype])

    rows, experts = sum(sizes), len(sizes)
    counts = torch.tensor(list(sizes), dtype=torch.int32, device=device)
    x = values(fmt and fmt.activations, rows, k_size)
    w = values(fmt, experts, n_size, k_size)
    if fmt is None:
        return Operands(x, w.mul_(k_size**-0.5), None, None, counts)
    blocks = fmt.blocks(k_size)
    scales_x = torch.rand(rows, generator=g, device=device) + 0.5
    scales_w = torch.rand((experts, blocks, n_size), generator=g, device=device).add_(0.5).mT
    scales_w = scales_w if blocks > 1 else scales_w.squeeze(-1)
    return Operands(x, w, scales_x, scales_w, counts, dtype if fmt.bits == 4 else None)


@dataclass(frozen=True)
class Verdict:
    """How a result compares with its budget; errors are in units of the allowed error, so <= 1 passes."""

    max_error: float
    tile_error: float

    @property
    def ok(self) -> bool:
        return self.max_error <= 1 and self.tile_error <= 1

    def __str__(self) -> str:
        return f"worst element {self.max_error:.3g} x budget, worst {TILE}x{TILE} tile {self.tile_error:.3g} x budget"


def judge(result: Tensor, exact: Tensor, baseline: Tensor) -> Verdict:
    """Hold ``result`` against ``exact`` (fp64) with the budget that ``baseline`` (low precision, independent) earns.

    All [M, N]. A NaN or Inf anywhere fails.
    """
    exact = exact.double()
    error, allowed = (t.double() - exact for t in (result, baseline))
    if exact.numel() == 0:
        return Verdict(0.0, 0.0)
    scale = exact.abs().max()
    worst = error.abs().max() / (2 * allowed.abs().max() + FLOOR * scale).clamp(min=1e-300)
    rms = _tile_rms(exact)
    tile = _tile_rms(error) / (2 * _tile_rms(allowed) + FLOOR * rms).clamp(min=1e-300)
    both = [float(v.nan_to_num(nan=torch.inf)) for v in (worst, tile.nan_to_num(nan=torch.inf).max())]
    return Verdict(*both)


def assert_within_budget(result: Tensor, exact: Tensor, baseline: Tensor, what: str = "result") -> None:
    """Raise AssertionError with the verdict unless ``result`` keeps its budget."""
    assert result.shape == exact.shape, f"{what}: shape {list(result.shape)}, expected {list(exact.shape)}"
    verdict = judge(result, exact, baseline)
    assert verdict.ok, f"{what} exceeds its error budget: {verdict}"


def check_gmm(result: Tensor, operands: Operands, what: str = "gmm") -> None:
    """Assert that ``result [M, N]`` is ``gmm`` of ``operands`` within budget."""
    assert_within_budget(result, operands.exact(), operands.baseline(result.dtype), what)


def _tile_rms(t: Tensor) -> Tensor:
    """RMS of every TILE×TILE tile; partial tiles are averaged over the elements they have."""
    rows, columns = (-t.shape[0]) % TILE, (-t.shape[1]) % TILE

    def sums(v: Tensor) -> Tensor:
        v = torch.nn.functional.pad(v, (0, columns, 0, rows))
        v = v.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
        return v.sum((1, 3))

    mean_square: Tensor = sums(t.square()) / sums(torch.ones_like(t))
    return mean_square.sqrt()


def _zero_tile(y: Tensor, _: Operands) -> Tensor:
    y[:TILE, :TILE] = 0
    return y


def _wrong_expert(y: Tensor, o: Operands) -> Tensor:
    """The largest expert's rows multiplied by its neighbour's weights."""
    e = int(o.sizes.argmax())
    scales_w = None if o.scales_w is None else o.scales_w.roll(1, 0)
    other = Operands(o.x, o.w.roll(1, 0), o.scales_x, scales_w, o.sizes, o.format)
    a, b = o.offsets[e], o.offsets[e + 1]
    y[a:b] = other.baseline(y.dtype)[a:b]
    return y


def _dropped_k_tail(_: Tensor, o: Operands) -> Tensor:
    w = o.w.clone()
    w[:, :, -max(1, w.shape[2] // 32) :] = 0
    return Operands(o.x, w, o.scales_x, o.scales_w, o.sizes, o.format).baseline(_.dtype)


def _bad_element(y: Tensor, _: Operands) -> Tensor:
    """One element of median size with its sign flipped."""
    flat = y.view(-1)
    flat[int(flat.abs().float().argsort()[len(flat) // 2])] *= -1
    return y


MUTANTS: dict[str, Callable[[Tensor, Operands], Tensor]] = {
    "all zeros": lambda y, _: torch.zeros_like(y),
    "one zeroed tile": _zero_tile,
    "rows from the wrong expert": _wrong_expert,
    "neighbouring rows swapped": lambda y, _: torch.cat([y[1:2], y[:1], y[2:]]),
    "1 % scale error": lambda y, _: (y.float() * 1.01).to(y.dtype),
    "dropped K tail": _dropped_k_tail,
    "one bad element": _bad_element,
}
"""What an error budget must reject: each takes a correct result (a copy it may spoil) and its operands."""
