"""Grouped matmuls that exercise one thing each."""

from __future__ import annotations

from dataclasses import dataclass

from lowgmm.testing import Operands, make_operands


@dataclass(frozen=True)
class Case:
    """Group sizes and a GEMM shape, with the reason it is tested."""

    why: str
    sizes: tuple[int, ...]
    N: int = 48
    K: int = 64
    extra_rows: int = 0

    def operands(self, dtype: str, device: str = "cpu") -> Operands:
        return make_operands(self.sizes, self.N, self.K, dtype, extra_rows=self.extra_rows, device=device)

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


CASES = (
    Case("sizes around a tile", (1, 15, 16, 17, 33)),
    Case("several row tiles", (129, 2)),
    Case("empty experts first middle last", (0, 8, 0, 0, 16, 0)),
    Case("no rows at all", (0, 0, 0)),
    Case("one expert", (20,)),
    Case("all rows on one expert", (0, 0, 40, 0)),
    Case("rows behind the last expert", (3, 5), extra_rows=20),
    Case("N and K below any tile", (4, 9), N=33, K=100),
    Case("K of gpt-oss scaled down", (7, 3), N=90, K=180),
    Case("K of gpt-oss and N below a tile", (7, 3), N=33, K=2880),
    Case("one row per expert", (1,) * 12, N=32, K=32),
)
