"""What every command shows on a terminal: results on stdout, progress and errors on stderr, exit codes.

Results go through `show` or `show_json`, so that a pipe gets exactly one of them. An expected failure is a `CliError`,
or any error of ours that carries a `reason`: one line on stderr with the next step, never a traceback.
Colour follows the terminal and NO_COLOR (rich does that).
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


class ExitCode(IntEnum):
    """Stable; documented in docs/configuration.md."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    INTERRUPTED = 130


class CliError(Exception):
    """An expected failure: a sentence that ends in what to do next."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code


def show(item: RenderableType) -> None:
    """One result for people."""
    Console(highlight=False).print(item)


def show_json(value: object) -> None:
    """One result for programs: a single JSON object on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def show_error(message: str) -> None:
    """One line, however long: scripts grep it, and a terminal wraps it."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("zc-handoff: ", "bold red"), " ".join(message.split())))


def note(message: str) -> None:
    """What is going on, on stderr, for people only: silent when stderr is not a terminal."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(message, style="dim", markup=False)


def table(*columns: str, right: frozenset[int] = frozenset(), title: str | None = None) -> Table:
    """The one table style: no box, room between columns; `right` are columns of numbers."""
    result = Table(
        box=None, pad_edge=False, padding=(0, 3, 0, 0), title=title, title_justify="left", header_style="bold"
    )
    for index, name in enumerate(columns):
        result.add_column(name, justify="right" if index in right else "left", overflow="fold")
    return result


def pairs(rows: dict[str, Any]) -> Table:
    """Names and values, one a line."""
    result = table("", "")
    result.show_header = False
    for name, value in rows.items():
        result.add_row(Text(name, style="dim"), value if isinstance(value, Text) else str(value))
    return result


def bytes_text(count: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
