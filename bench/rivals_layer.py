"""Our expert layer beside other libraries': lines of results from the harness's, and their parts of documents.

bench/rivals.py is the command. What is timed goes from bf16 tokens and their experts to the sum over experts: sorting,
quantising, both matmuls, the activation and the requantisation; the router is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common import geomean
from layer import PEAK, READ

from lowgmm.workloads import MOE_SHAPES

OURS = "lowgmm"
NAMES = {
    "mixtral": "mixtral-8x7b",
    "qwen3": "qwen3-30b-a3b",
    "dsv3ep8": "deepseek-v3-ep8",
    "olmoe": "olmoe-1b-7b",
    "seed": "article",
}
"""The harness's names of our shapes."""
ROUTINGS = ("uniform", "zipf")
OWN = ("int8", "fp8", "bf16")
EIGHT_BIT = ("int8", "fp8", "fp8blk")
"""What the harness calls 8-bit weights; "fp8blk" has scales of blocks of 128."""
RIVALS = {"int8": EIGHT_BIT, "fp8": EIGHT_BIT, "bf16": ("bf16",)}
"""Formats of ours, and those of the rivals that each is held against. "int4" is held against nothing."""
TYPES = {
    "int8": ("int8", lambda ln: ln["format"] == "int8"),
    "int8, activations too": ("int8", lambda ln: ln["format"] == "int8" and "a16" not in ln["rival"]),
    "fp8": ("fp8", lambda ln: ln["format"] in ("fp8", "fp8blk")),
    "bf16": ("bf16", lambda ln: ln["format"] == "bf16"),
}
"""Format of ours, and the rivals of the same type that its error is held against."""
EVEN = 0.99
"""A ratio below this counts as slower."""
Line = dict[str, Any]


def convert(results: Sequence[Line]) -> list[Line]:
    """A line per layer, routing, T and rival. What is unknown, unchecked or there twice ends the program."""
    known = {"model": tuple(NAMES), "routing": ROUTINGS, "dt": (*EIGHT_BIT, "bf16", "int4"), "ok": (True,)}
    lines: dict[tuple[Any, ...], Line] = {}
    for r in results:
        for key, values in known.items():
            if r[key] not in values:
                raise SystemExit(f"{r['peer']}: {key} is {r[key]!r}, not one of {', '.join(map(str, values))}")
        shape = MOE_SHAPES[NAMES[r["model"]]]
        if (r["E"], r["topk"], r["H"], r["I"]) != (shape.E, shape.A, shape.H, shape.I):
            raise SystemExit(f"{r['model']} has other sizes than {shape}")
        line = {"model": shape.name, "routing": r["routing"], "T": r["T"], "active_experts": r["active"]}
        line |= {"rival": r["peer"].removeprefix("ours "), "format": r["dt"]}
        if tuple(line.values()) in lines:
            raise SystemExit(f"twice: {line}")
        times = {"us": r["us"], "us_burst": r.get("us_burst") or r["us"]}
        lines[tuple(line.values())] = {**line, **times, "tflops": round(r["tflops"], 1), "relative_error": r["err"]}
    return list(lines.values())


@dataclass(frozen=True)
class Point:
    """A layer with T tokens: our line of each format, and the rivals'."""

    model: str
    routing: str
    T: int
    ours: dict[str, Line]
    rivals: list[Line]

    def __str__(self) -> str:
        return f"{self.model} {self.routing} T={self.T}"

    def fastest(self, format: str) -> Line:
        """The fastest of the rivals that ``format`` is held against."""
        return min((ln for ln in self.rivals if ln["format"] in RIVALS[format]), key=lambda ln: ln["us"])

    def ratio(self, format: str) -> float:
        return self.fastest(format)["us"] / self.ours[format]["us"]

    def of_floor(self, format: str) -> float:
        """Our time in units of the floor of 8-bit weights: reading the experts' and the tokens, or multiplying."""
        shape, mine = MOE_SHAPES[self.model], self.ours[format]
        size = mine["active_experts"] * 3 * shape.H * shape.I + 4 * self.T * shape.H
        return mine["us"] / 1e6 / max(size / READ, 6 * self.T * shape.A * shape.H * shape.I / PEAK)


def points_of(lines: Sequence[Line]) -> list[Point]:
    groups: dict[tuple[int, str, int], list[Line]] = {}
    for ln in lines:
        groups.setdefault((ROUTINGS.index(ln["routing"]), ln["model"], ln["T"]), []).append(ln)
    points = []
    for (routing, model, T), of_point in sorted(groups.items()):
        ours = {ln["format"]: ln for ln in of_point if ln["rival"].startswith(OURS)}
        rivals = [ln for ln in of_point if not ln["rival"].startswith(OURS)]
        points.append(Point(model, ROUTINGS[routing], T, ours, rivals))
    return points


def formats_of(points: Sequence[Point]) -> list[str]:
    """Ours that the run has: of some, 8-bit weights were timed alone."""
    return [f for f in RIVALS if any(f in p.ours for p in points)]


@dataclass(frozen=True)
class Part:
    """Points that are averaged, and what their mean was aimed to be."""

    label: str
    tokens: range = range(1, 2**31)
    target: float | None = None
    model: str | None = None
    routing: str | None = None

    def of(self, points: Sequence[Point]) -> list[Point]:
        return [
            p
            for p in points
            if p.T in self.tokens and self.model in (None, p.model) and self.routing in (None, p.routing)
        ]


ONE, MANY = range(1, 2), range(2048, 2**31)
AT_ONE = {"qwen3-30b-a3b": 1.5, "olmoe-1b-7b": 1.5, "article": 1.5}
AT_MANY = {"qwen3-30b-a3b": 1.25, "olmoe-1b-7b": 1.25}
RATIOS = (
    Part("all", target=1.3),
    *(Part(routing, routing=routing) for routing in ROUTINGS),
    Part("T = 1", ONE),
    *(Part(f"T = 1, {model}", ONE, AT_ONE.get(model), model) for model in NAMES.values()),
    Part("T ≥ 2048", MANY),
    *(Part(f"T ≥ 2048, {model}", MANY, AT_MANY.get(model), model) for model in NAMES.values()),
)
"""Where the fastest rival's time by ours is averaged; a target is a least mean."""
FLOORS = (
    Part("T = 1", ONE),
    Part("T = 8 to 128", range(8, 129), 1.2),
    Part("T = 512", range(512, 513)),
    Part("T ≥ 2048", MANY, 1.45),
)
"""Where our time by the floor is averaged; a target is a greatest mean."""


def render(lines: Sequence[Line]) -> str:
    """The tables of a run."""
    points = points_of(lines)
    tables = [
        table for routing in ROUTINGS for table in (f"### {routing.capitalize()} routing", times(points, routing))
    ]
    verdicts = [verdict(points, format) for format in OWN[:2]]
    means = [ratios(points), rival_by_rival(points), floors(points), errors(points)]
    return "\n\n".join([*tables, "### Means", *verdicts, slower(points), *means])


README_ROWS = {
    "1 token: Qwen3-30B / OLMoE / the article's / Mixtral / DeepSeek-V3": [
        (model, 1) for model in ("qwen3-30b-a3b", "olmoe-1b-7b", "article", "mixtral-8x7b", "deepseek-v3-ep8")
    ],
    **{
        f"{label}, 8 / 128 / 2048 / 8192 tokens": [(model, T) for T in (8, 128, 2048, 8192)]
        for label, model in (
            ("Qwen3-30B", "qwen3-30b-a3b"),
            ("OLMoE", "olmoe-1b-7b"),
            ("Mixtral", "mixtral-8x7b"),
            ("DeepSeek-V3, 32 local experts", "deepseek-v3-ep8"),
        )
    },
}
"""Rows of the README's table, with uniform routing."""


def headline(lines: Sequence[Line]) -> str:
    """The README's part: a sentence on each format, and a few points."""
    points = points_of(lines)
    said = [said_of(format, [p.ratio(format) for p in points], "points") for format in OWN[:2]]
    uniform = {(p.model, p.T): p for p in points if p.routing == ROUTINGS[0]}
    rows = []
    for label, keys in README_ROWS.items():
        chosen = [uniform[key] for key in keys]
        columns = [[p.ours[format]["us"] for p in chosen] for format in OWN[:2]]
        columns.append([p.fastest("int8")["us"] for p in chosen])
        rows.append([label, *(" / ".join(f"{us:.{us < 100:d}f}" for us in column) for column in columns)])
    return "\n\n".join(["\n".join(said), table(["µs, uniform routing", "INT8", "FP8", "fastest 8-bit rival"], *rows)])


def said_of(format: str, found: Sequence[float], what: str) -> str:
    ahead, behind = sum(r > 1 for r in found), sum(r < EVEN for r in found)
    return (
        f"- {format.upper()} is ahead of the fastest 8-bit rival at {ahead} of {len(found)} {what}, behind by more "
        f"than 1 % at {behind}: least {min(found):.3f}×, geometric mean {geomean(found):.3f}×."
    )


def table(head: Sequence[str], *rows: Sequence[Any]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def times(points: Sequence[Point], routing: str) -> str:
    rows = []
    for p in Part("", routing=routing).of(points):
        best = p.fastest("int8")
        ours = [f"{p.ours[f]['us']:.1f} ({p.ratio(f):.2f}×, floor × {p.of_floor(f):.2f})" for f in OWN[:2]]
        rows.append([p.model, p.T, f"{best['us']:.1f} {best['rival']}", *ours])
    return table(["layer", "T", "fastest 8-bit rival", "INT8", "FP8"], *rows)


def aims(points: Sequence[Point], format: str) -> Iterator[tuple[str, bool]]:
    """What was aimed at with what was measured, and whether that suffices. A run that was cut short lacks points."""
    least = min(p.ratio(format) for p in points)
    yield f"never slower by more than 1 % (least {least:.3f}×)", least >= EVEN
    for part in RATIOS:
        if part.target is not None and (chosen := part.of(points)):
            mean = geomean([p.ratio(format) for p in chosen])
            yield f"{part.target}× for {part.label} ({mean:.3f}×)", mean >= part.target
    for part in FLOORS:
        if part.target is not None and (chosen := part.of(points)):
            mean = geomean([p.of_floor(format) for p in chosen])
            yield f"{part.target} times the floor for {part.label} ({mean:.3f})", mean <= part.target


def verdict(points: Sequence[Point], format: str) -> str:
    """One sentence: which targets are reached."""
    found = list(aims(points, format))
    said = ["; ".join(text for text, reached in found if reached is want) or "none" for want in (True, False)]
    return f"Of its targets {format.upper()} reaches: {said[0]}. It misses: {said[1]}."


def slower(points: Sequence[Point]) -> str:
    found = [f"{f} {p} ({p.ratio(f):.3f}×)" for f in formats_of(points) for p in points if p.ratio(f) < EVEN]
    return f"Slower by more than 1 % than the fastest rival: {', '.join(found) or 'none'}."


def summary(values: Sequence[float]) -> str:
    return f"{geomean(values):.3f}× / {min(values):.3f}× / {sum(v < EVEN for v in values)}" if values else "–"


def ratios(points: Sequence[Point]) -> str:
    rows, formats = [], formats_of(points)
    for part in RATIOS:
        chosen = part.of(points)
        rows.append(
            [part.label, len(chosen), part.target or "", *(summary([p.ratio(f) for p in chosen]) for f in formats)]
        )
    return table(["against the fastest rival: mean / least / below 0.99", "points", "target", *formats], *rows)


def rival_by_rival(points: Sequence[Point]) -> str:
    rows = []
    for name in dict.fromkeys(ln["rival"] for p in points for ln in p.rivals if ln["format"] not in RIVALS["bf16"]):
        pairs = [(ln["us"], p) for p in points for ln in p.rivals if ln["rival"] == name]
        rows.append([name, len(pairs), *(summary([us / p.ours[f]["us"] for us, p in pairs]) for f in OWN[:2])])
    return table(["against one rival: mean / least / below 0.99", "points", *OWN[:2]], *rows)


def floors(points: Sequence[Point]) -> str:
    rows = []
    for part in FLOORS:
        chosen = part.of(points)
        found = [[p.of_floor(f) for p in chosen] for f in OWN[:2]]
        cells = (f"{geomean(v):.3f} / {max(v):.3f}" if v else "–" for v in found)
        rows.append([part.label, len(chosen), part.target or "", *cells])
    return table(["times the floor: mean / greatest", "points", "target", *OWN[:2]], *rows)


def errors(points: Sequence[Point]) -> str:
    rows = []
    for name, (format, is_one) in TYPES.items():
        if format not in formats_of(points):
            continue
        row = [name]
        for pick in (max, min):
            found = []
            for p in points:
                rival = pick(filter(is_one, p.rivals), key=lambda ln: ln["relative_error"])
                ratio = p.ours[format]["relative_error"] / rival["relative_error"]
                found.append((ratio, f"{rival['rival']}, {p}"))
            row.append("{:.3f}× ({})".format(*max(found)))
        rows.append(row)
    return table(["error, ours by the rival's, where largest", "the type's worst", "the type's best"], *rows)
