"""Plots as self-contained SVG, from result files alone: python bench/plot.py FILE.jsonl writes FILE.svg."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

COLOURS = {"int8": "#2563a8", "fp8": "#d97706", "bf16": "#4b8b3b"}
OTHERS = ("#2563a8", "#d97706", "#4b8b3b", "#a03a6a", "#6b6b6b", "#1f9a9a")
STYLE = "text{font:12px sans-serif;fill:#222}.t{font-size:15px;font-weight:bold}.s{font-size:10px}.g{stroke:#ddd}"
ARTICLE_BALANCE = (40.0, 80.0)
"""FLOP per byte between which the article puts a GPU's FP16 balance point."""


def document(width: int, panels: Sequence[tuple[int, str]]) -> str:
    """Panels (height, SVG) one below the other."""
    total, parts = 0, []
    for height, body in panels:
        parts.append(f'<g transform="translate(0,{total})">{body}</g>')
        total += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" viewBox="0 0 {width} {total}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def text(x: float, y: float, value: str, anchor: str = "start", cls: str = "", turn: float = 0) -> str:
    extra = f' class="{cls}"' if cls else ""
    extra += f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(value)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, style: str = 'class="g"') -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" {style}/>'


def legend(names: Sequence[str], colours: Sequence[str], x: float, y: float) -> str:
    parts = []
    for name, colour in zip(names, colours, strict=True):
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>')
        parts.append(text(x + 14, y, name))
        x += 26 + 7 * len(name)
    return "".join(parts)


def bars(
    title: str,
    groups: Sequence[str],
    series: dict[str, Sequence[float | None]],
    colours: Sequence[str],
    *,
    unit: str,
    marks: dict[str, Sequence[float | None]] | None = None,
    log: bool = False,
    top: float | None = None,
    width: int = 1180,
) -> tuple[int, str]:
    """Grouped bars, one colour per series; ``marks`` draws a black line at a value over a series' bar."""
    height, left, bottom, plot_top = 400, 64, 270, 50
    values = [v for s in [*series.values(), *(marks or {}).values()] for v in s if v is not None and v > 0]
    high = top or max(values, default=1.0)
    low = 10 ** math.floor(math.log10(min(values, default=1.0))) if log else 0.0
    high = 10 ** math.ceil(math.log10(high)) if log and not top else high * (1 if top else 1.05)

    def y(value: float) -> float:
        if log:
            share = math.log(max(value, low) / low) / math.log(high / low)
        else:
            share = value / high
        return bottom - min(1.0, share) * (bottom - plot_top)

    step = 10 ** math.floor(math.log10(high)) / (5 if high < 2 * 10 ** math.floor(math.log10(high)) else 2)
    decades = range(round(math.log10(low)), round(math.log10(high)) + 1) if log else ()
    ticks = [10.0**d for d in decades] if log else [step * i for i in range(math.floor(high / step) + 1)]
    out = [text(left, 22, title, cls="t"), legend(list(series), colours, left, 40)]
    for tick in ticks:
        out += [line(left, y(tick), width - 10, y(tick)), text(left - 6, y(tick) + 4, f"{tick:,.6g}", "end")]
    out.append(text(14, (plot_top + bottom) / 2, unit, "middle", turn=-90))
    slot = (width - 10 - left) / max(1, len(groups))
    bar = slot * 0.8 / max(1, len(series))
    for i, group in enumerate(groups):
        for j, (name, numbers) in enumerate(series.items()):
            x, value = left + slot * (i + 0.1) + bar * j, numbers[i]
            if value is None:
                continue
            tip = f"<title>{escape(f'{group}, {name}: {value:.4g} {unit}')}</title>"
            out.append(
                f'<rect x="{x:.1f}" y="{y(value):.1f}" width="{bar * 0.92:.1f}" height="{bottom - y(value):.1f}" '
                f'fill="{colours[j]}">{tip}</rect>'
            )
            mark = (marks or {}).get(name, [None] * len(groups))[i]
            if mark is not None:
                out.append(line(x, y(mark), x + bar * 0.92, y(mark), 'stroke="black" stroke-width="2"'))
        out.append(text(left + slot * (i + 0.5), bottom + 14, group, "end", "s", turn=-35))
    return height, "".join(out)


def roofline_panel(head: dict[str, Any], lines: Sequence[dict[str, Any]], width: int = 1180) -> tuple[int, str]:
    """Measured rate over arithmetic intensity, under each format's roof; the article's balance points as a band."""
    height, left, right, plot_top, bottom = 430, 64, width - 10, 50, 380
    bandwidth, rates = head["read_bandwidth"] / 1e12, {f: r / 1e12 for f, r in head["dense_rates"].items()}
    x0, x1 = 1.0, 10 ** math.ceil(math.log10(max([ln["intensity"] for ln in lines] + [1000.0])))
    y0, y1 = 1.0, 10 ** math.ceil(math.log10(max([*rates.values(), 1000.0])))

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = left + (right - left) * math.log(max(intensity, x0) / x0) / math.log(x1 / x0)
        return x, bottom - (bottom - plot_top) * math.log(max(rate, y0) / y0) / math.log(y1 / y0)

    formats = [f for f in COLOURS if any(ln["format"] == f for ln in lines)]
    out = [text(left, 22, "Roofline: rate over arithmetic intensity", cls="t")]
    out.append(legend(formats, [COLOURS[f] for f in formats], left, 40))
    (band0, _), (band1, _) = at(ARTICLE_BALANCE[0], 1), at(ARTICLE_BALANCE[1], 1)
    out.append(
        f'<rect x="{band0:.1f}" y="{plot_top}" width="{band1 - band0:.1f}" height="{bottom - plot_top}" '
        f'fill="#f3ead7"/>'
    )
    out.append(text((band0 + band1) / 2, plot_top + 14, "article: FP16 balance 40 to 80", "middle", "s"))
    for d in range(round(math.log10(x1)) + 1):
        out += [line(*at(10.0**d, y0), *at(10.0**d, y1)), text(at(10.0**d, 1)[0], bottom + 16, f"{10**d}", "middle")]
    for d in range(round(math.log10(y1)) + 1):
        out += [line(*at(x0, 10.0**d), *at(x1, 10.0**d)), text(left - 6, at(1, 10.0**d)[1] + 4, f"{10**d}", "end")]
    out += [
        text((left + right) / 2, bottom + 34, "FLOP per byte", "middle"),
        text(14, 215, "TFLOP/s", "middle", turn=-90),
    ]
    for i, f in enumerate(formats):
        if f in rates:
            balance, style = rates[f] / bandwidth, f'stroke="{COLOURS[f]}" stroke-width="1.5"'
            out += [
                line(*at(x0, bandwidth), *at(balance, rates[f]), style),
                line(*at(balance, rates[f]), *at(x1, rates[f]), style),
            ]
            x, y = at(balance, rates[f])
            out.append(text(x, y - 6 - 12 * i, f"{f} balance {balance:.0f}", "middle", "s"))
    for ln in lines:
        x, y = at(ln["intensity"], ln["tflops"])
        tip = escape(f"{ln['case']} {ln['format']}: {ln['intensity']:.0f} FLOP/B, {ln['tflops']:.0f} TFLOP/s")
        fill = COLOURS[ln["format"]]
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" fill-opacity="0.8"><title>{tip}</title>')
        out.append("</circle>")
    return height, "".join(out)


def gmm_report(head: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """Time against the floor, bytes and operations per second, and the roofline, of one file of bench/gmm.py."""
    cases = list(dict.fromkeys(ln["case"] for ln in lines))
    formats = [f for f in COLOURS if any(ln["format"] == f for ln in lines)]
    colours = [COLOURS[f] for f in formats]

    def series(field: str) -> dict[str, list[float | None]]:
        found = {(ln["case"], ln["format"]): ln.get(field) for ln in lines}
        return {f: [found.get((c, f)) for c in cases] for f in formats}

    env = head["environment"]
    what = (
        f"{env.get('device_name')}, torch {env.get('torch')}, Triton {env.get('triton')}, {env.get('commit', '')[:12]}"
    )
    return document(
        1180,
        [
            bars(
                f"Time; black: the floor (bytes and operations at this run's rates). {what}",
                cases, series("us"), colours, unit="µs", marks=series("floor_us"), log=True,
            ),
            bars("Bytes per second", cases, series("tb_per_s"), colours, unit="TB/s"),
            bars("Operations per second", cases, series("tflops"), colours, unit="TFLOP/s"),
            roofline_panel(head, lines),
        ],
    )  # fmt: skip


def main() -> None:
    from common import read_lines

    for name in sys.argv[1:]:
        path = Path(name)
        path.with_suffix(".svg").write_text(gmm_report(*read_lines(path)), encoding="utf-8")
        print(path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
