"""Draws spans of time as rows of blocks, so that what overlapped is seen at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.text import Text

WIDTH: Final = 58
_STYLES: Final = ("cyan", "blue", "magenta", "yellow", "dim", "green")


def timeline(rows: Mapping[str, Sequence[Sequence[float]]], width: int = WIDTH) -> Text:
    """One line per row; a cell is filled where a span touches it, so that even the shortest is seen."""
    end = max((span[1] for spans in rows.values() for span in spans), default=0.0)
    label = max((len(name) for name in rows), default=0)
    text = Text()
    for (name, spans), style in zip(rows.items(), _STYLES * len(rows), strict=False):
        text.append(f"{name:<{label}} ", style="dim")
        text.append(_cells(spans, end, width), style=style)
        text.append(f"  {_busy(spans):>8}\n")
    text.append(f"{'':<{label}} 0{_seconds(end):>{width - 1}}", style="dim")
    return text


def _cells(spans: Sequence[Sequence[float]], end: float, width: int) -> str:
    cells = ["·"] * width
    for began, ended, *_ in spans:
        first = min(width - 1, int(began / end * width)) if end else 0
        last = min(width - 1, int(ended / end * width)) if end else 0
        for cell in range(max(0, first), last + 1):
            cells[cell] = "█"
    return "".join(cells)


def _busy(spans: Sequence[Sequence[float]]) -> str:
    return _seconds(sum(ended - began for began, ended, *_ in spans))


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
