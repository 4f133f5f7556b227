"""Named problems: grouped matmuls of public MoE models, and those of the article that the library started from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GmmCase:
    """One grouped matmul: N, K and the rows of each of the E experts."""

    name: str
    N: int
    K: int
    sizes: tuple[int, ...]

    @property
    def E(self) -> int:
        return len(self.sizes)

    @property
    def M(self) -> int:
        return sum(self.sizes)


def even(name: str, E: int, N: int, K: int, rows: int) -> GmmCase:
    """Every expert gets ``rows`` rows."""
    return GmmCase(name, N, K, (rows,) * E)


# fmt: off
SKEWED_SIZES = (
    64, 8, 200, 16, 4, 128, 32, 96, 2, 256, 24, 48, 12, 80, 6, 160,
    40, 20, 112, 2, 72, 10, 144, 28, 56, 3, 88, 14, 176, 36, 64, 47,
)
# fmt: on
"""32 experts from 2 to 256 tokens, 2048 in all: the imbalance that the article reports from a real service."""


def zipf(E: int, M: int) -> tuple[int, ...]:
    """M rows over E experts in proportion to 1, 1/2, 1/3, …: the skew that trained routers show. Largest remainders
    make the sum exact.

    >>> zipf(4, 25)
    (12, 6, 4, 3)
    """
    total = sum(1 / (e + 1) for e in range(E))
    exact = [M / (e + 1) / total for e in range(E)]
    sizes = [int(v) for v in exact]
    for e in sorted(range(E), key=lambda e: sizes[e] - exact[e])[: M - sum(sizes)]:
        sizes[e] += 1
    return tuple(sizes)


GMM_CASES = {
    case.name: case
    for case in (
        even("article-decode", 64, 2048, 4096, 16),
        even("article-balanced", 32, 4096, 4096, 64),
        GmmCase("article-skewed", 4096, 4096, SKEWED_SIZES),
        *(even(f"article-small-k-{rows}", 64, 3072, 768, rows) for rows in (16, 128)),
        even("mixtral-prefill", 8, 28672, 4096, 2048),
        *(even(f"qwen3-gate-up-{rows}", 128, 1536, 2048, rows) for rows in (4, 64, 512)),
        *(even(f"qwen3-down-{rows}", 128, 2048, 768, rows) for rows in (4, 64, 512)),
        *(even(f"deepseek-v3-gate-up-{rows}", 32, 4096, 7168, rows) for rows in (4, 32, 256, 1024)),
        *(even(f"deepseek-v3-down-{rows}", 32, 7168, 2048, rows) for rows in (4, 32, 256, 1024)),
        even("gpt-oss-16", 128, 5760, 2880, 16),
    )
}
"""What the grouped matmul is measured on: decode, prefill, skewed and odd shapes of public models."""


LAUNCH_CASES = {
    case.name: case
    for case in (
        GMM_CASES["article-decode"],
        GMM_CASES["article-balanced"],
        GMM_CASES["article-skewed"],
        GmmCase("article-zipf", 4096, 4096, zipf(32, 2048)),
        even("balanced-512", 32, 4096, 4096, 512),
        GmmCase("zipf-512", 4096, 4096, zipf(32, 32 * 512)),
    )
}
"""What the ways to hand out tiles are compared on: the same weights and tokens, even and skewed."""


@dataclass(frozen=True)
class MoeShape:
    """The expert layer of a model: E experts, A of them per token, hidden size H, intermediate size I."""

    name: str
    E: int
    A: int
    H: int
    I: int

    def gemms(self) -> dict[str, tuple[int, int]]:
        """(N, K) of its two grouped matmuls."""
        return {"gate-up": (2 * self.I, self.H), "down": (self.H, self.I)}


MOE_SHAPES = {
    shape.name: shape
    for shape in (
        MoeShape("mixtral-8x7b", 8, 2, 4096, 14336),
        MoeShape("mixtral-8x22b", 8, 2, 6144, 16384),
        MoeShape("qwen3-30b-a3b", 128, 8, 2048, 768),
        MoeShape("qwen3-235b-a22b", 128, 8, 4096, 1536),
        MoeShape("qwen3-next-80b", 512, 10, 2048, 512),
        MoeShape("deepseek-v3", 256, 8, 7168, 2048),
        MoeShape("deepseek-v3-ep8", 32, 2, 7168, 2048),  # one of 8 expert-parallel ranks; A is its share of the load
        MoeShape("deepseek-v2-lite", 64, 6, 2048, 1408),
        MoeShape("kimi-k2", 384, 8, 7168, 2048),
        MoeShape("gpt-oss-20b", 32, 4, 2880, 2880),
        MoeShape("gpt-oss-120b", 128, 4, 2880, 2880),
        MoeShape("glm-4.5-air", 128, 8, 4096, 1408),
        MoeShape("llama-4-scout", 16, 1, 5120, 8192),
        MoeShape("olmoe-1b-7b", 64, 8, 2048, 1024),
        MoeShape("phi-3.5-moe", 16, 2, 4096, 6400),
        MoeShape("minimax-m2", 256, 8, 3072, 1536),
        MoeShape("article", 64, 1, 4096, 2048),
    )
}
"""Expert layers of public models."""
