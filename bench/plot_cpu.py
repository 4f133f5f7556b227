"""bench/cpu_layer.py's results as bars, in an SVG that needs no plotting library.

python bench/plot_cpu.py IN.jsonl OUT.svg
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path

COLOURS = {
    "torch bf16": "#9aa5b1",
    "oneDNN u8": "#7b8794",
    "int8": "#1f6feb",
    "int4": "#0a9d6e",
    "int4_g32": "#8fdcbf",
    "int4_g128": "#55c79f",
}
GGML = ("#e8a33d", "#d9822b", "#c4681a", "#a8500f")
WIDTH, BAR, GAP, LEFT, ROOM = 900, 15, 26, 190, 560


def bars(line: dict) -> list[tuple[str, float, str]]:
    """Name, µs and colour of each rival, fastest last."""
    found = [(name, us, COLOURS[name]) for name, us in line["layer_us"].items()]
    ggml = line.get("ggml_us", {})
    found += [(f"ggml {name}", us["layer"], colour) for (name, us), colour in zip(ggml.items(), GGML, strict=False)]
    return sorted(found, key=lambda bar: -bar[1])


def draw(lines: list[dict]) -> str:
    parts, y = [], 56
    for line in lines:
        title = f"{line['shape']}, {line['T']} token{'s' if line['T'] > 1 else ''}"
        parts.append(f'<text x="16" y="{y}" font-weight="bold">{escape(title)}</text>')
        y += 8
        longest = max(us for _, us, _ in bars(line))
        for name, us, colour in bars(line):
            width = ROOM * us / longest
            parts.append(f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + 11}">{us / 1e3:.2f} ms</text>')
            y += BAR
        y += GAP
    here = lines[0]["environment"]
    about = f"One expert layer, median time. {here['cpu']}, {here['threads']} threads, torch {here['torch']}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="12">'
    )
    body = f'<rect width="100%" height="100%" fill="white"/><text x="16" y="26" font-size="14">{escape(about)}</text>'
    return "\n".join([head, body, *parts, "</svg>\n"])


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    lines = [json.loads(text) for text in source.read_text().splitlines()]
    target.write_text(draw(sorted(lines, key=lambda line: (line["shape"], line["T"]))))


if __name__ == "__main__":
    main()
