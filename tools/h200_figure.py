#!/usr/bin/env python3
"""Draw docs/h200.svg from docs/h200.json: speeds of Lily and llama.cpp on one GPU, by length.

    python tools/h200_figure.py

Both axes are logarithmic. The figure is drawn anew when the measurements change; a test compares the two.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PANEL = (360, 260)  # width and height, pixels
LEFT, TOP, GAP, BOTTOM = 64, 56, 84, 64
ENGINES = (("lily", "Lily", "#1f5fbf"), ("llama", "llama.cpp", "#b4552d"))
PANELS = (
    ("prefill", "Reading a prompt", (5_000, 10_000, 20_000, 40_000)),
    ("decode", "Decoding behind it", (150, 250, 400, 700)),
)
STYLE = "text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"


def short(number: int) -> str:
    """Write a length or a speed as people say it: 512, 4K, 20,000."""
    return f"{number // 1024}K" if number >= 1024 and number % 1024 == 0 else f"{number:,}"


def panel(
    rows: dict[str, list[dict[str, Any]]], key: str, title: str, ticks: Sequence[int], x0: int
) -> list[str]:
    """Return the elements of one diagram."""
    width, height = PANEL
    lengths = [int(row["tokens"]) for row in rows["lily"]]
    low, high = math.log(ticks[0]), math.log(ticks[-1])

    def x(tokens: float) -> float:
        return x0 + width * math.log(tokens / lengths[0]) / math.log(lengths[-1] / lengths[0])

    def y(speed: float) -> float:
        return TOP + height * (high - math.log(speed)) / (high - low)

    made = [f'<text x="{x0}" y="{TOP - 30}" font-weight="bold">{title}</text>']
    made.append(f'<text x="{x0}" y="{TOP - 13}">tokens per second</text>')
    for tick in ticks:
        made.append(f'<line class="grid" x1="{x0}" x2="{x0 + width}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        made.append(f'<text x="{x0 - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    made += [
        f'<text x="{x(tokens):.1f}" y="{TOP + height + 18}" text-anchor="middle">{short(tokens)}</text>'
        for tokens in lengths
    ]
    made.append(f'<text x="{x0 + width / 2}" y="{TOP + height + 38}" text-anchor="middle">tokens</text>')
    for engine, name, colour in ENGINES:
        points = [(x(row["tokens"]), y(row[key])) for row in rows[engine]]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        made.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        made += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        middle = points[len(points) // 2]
        made.append(
            f'<text x="{middle[0]:.1f}" y="{middle[1] - 10:.1f}" text-anchor="middle" '
            f'style="fill:{colour}">{name}</text>'
        )
    return made


def figure(results: dict[str, Any]) -> str:
    """Return the figure as SVG."""
    width, height = LEFT + 2 * PANEL[0] + GAP + 24, TOP + PANEL[1] + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>Speed of Lily and llama.cpp on one H200, by length</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    rows = {engine: results[engine] for engine, _, _ in ENGINES}
    for place, (key, title, ticks) in enumerate(PANELS):
        lines += panel(rows, key, title, ticks, LEFT + place * (PANEL[0] + GAP))
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write the figure."""
    results = json.loads((DOCS / "h200.json").read_text(encoding="utf-8"))
    (DOCS / "h200.svg").write_text(figure(results), encoding="utf-8")


if __name__ == "__main__":
    main()
