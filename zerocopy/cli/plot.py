"""Draws a sweep as an SVG file: throughput above, processor time below, one line per series. No dependency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

import msgspec

WIDTH: Final = 760
PANEL: Final = 240
LEFT, RIGHT, TOP, GAP, LEGEND = 70, 20, 40, 60, 20
COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


class Panel(msgspec.Struct, frozen=True):
    """One chart over the labels of `ticks`. `series`: name to value per tick (None: not measured); `levels`: horizontal
    lines, name to value."""

    title: str
    ticks: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    levels: Mapping[str, float] = {}


def svg(title: str, panels: Sequence[Panel]) -> str:
    """The document. Series keep their colour over all panels."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(names)}
    height = TOP + len(panels) * (PANEL + GAP) + LEGEND * len(names) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 22, title, size=15),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (PANEL + GAP) + 16, colours)
    for number, name in enumerate(names):
        y = TOP + len(panels) * (PANEL + GAP) + LEGEND * number
        parts.append(f'<rect x="{LEFT}" y="{y - 9}" width="12" height="12" fill="{colours[name]}"/>')
        parts.append(_text(LEFT + 20, y + 2, name))
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, top: float, colours: Mapping[str, str]) -> list[str]:
    values = [v for many in panel.series.values() for v in many if v is not None] + list(panel.levels.values())
    ceiling = _ceiling(max(values, default=1.0))

    def x(index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / max(len(panel.ticks), 1)

    def y(value: float) -> float:
        return top + PANEL * (1 - value / ceiling)

    parts = [_text(LEFT, top - 8, panel.title, size=13)]
    for step in range(5):
        at = y(ceiling * step / 4)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{ceiling * step / 4:g}", anchor="end"))
    parts += [_text(x(n), top + PANEL + 18, tick, anchor="middle") for n, tick in enumerate(panel.ticks)]
    for name, level in panel.levels.items():
        at = y(level)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#444" stroke-dasharray="5 4"/>'
        )
        parts.append(_text(WIDTH - RIGHT, at - 4, f"{name} {level:g}", anchor="end"))
    for name, many in panel.series.items():
        points = [(x(n), y(value)) for n, value in enumerate(many) if value is not None]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colours[name]}"/>' for a, b in points]
    return parts


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _ceiling(highest: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten: quarters of it are short numbers."""
    if highest <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= highest:
        power *= 10
    while power > highest and power > 1e-9:
        power /= 10
    return next(power * step for step in (1, 2, 4, 8, 10) if power * step >= highest)
