"""What every command shows on a terminal: results on stdout, progress and errors on stderr, exit codes.

Results go through `show` or `show_json`, so that a pipe gets exactly one of them. An expected failure is a `CliError`,
or any error of ours that carries a `reason`: one line on stderr with the next step, never a traceback.
Colour follows the terminal and NO_COLOR (rich does that).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

PIPED_COLUMNS: Final = 240  # nobody looks at it, and who searches it wants whole lines
GAP: Final = 2  # between columns, where there is room for it


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
    """One result for people. Into a pipe or a file lines are as long as they need to be."""
    columns = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS
    console = Console(highlight=False, width=columns)
    with console.capture() as captured:
        console.print(item)
    sys.stdout.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))


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


class Rows:
    """The one table style: no box, room between columns. Cells are text, never markup: a peer may have written them.

    Columns break between words. Where not even the words fit beside each other, each row becomes a list of its own.
    """

    def __init__(self, columns: Sequence[str], right: frozenset[int] = frozenset(), *, header: bool = True) -> None:
        """`right` are columns of numbers, which never break."""
        self._columns = columns
        self._right = right
        self._header = header
        self._rows: list[tuple[Text, ...]] = []

    @property
    def row_count(self) -> int:
        return len(self._rows)

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append(tuple(cell if isinstance(cell, Text) else Text(cell) for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needs = [self._needs(console, options, index) for index in range(len(self._columns))]
        least, between = sum(need.minimum for need in needs), len(needs) - 1
        gap = 1 if self._header and least + GAP * between > options.max_width else GAP
        room = options.max_width - gap * between
        if self._header and least > room:
            yield from self._lists()
            return
        result = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", show_header=self._header)
        for index, (name, width) in enumerate(zip(self._columns, _share(needs, room), strict=True)):
            justify: JustifyMethod = "right" if index in self._right else "left"
            result.add_column(Text(name), justify=justify, overflow="fold", width=width)
        for row in self._rows:
            result.add_row(*row)
        yield result

    def _needs(self, console: Console, options: ConsoleOptions, index: int) -> Measurement:
        """The width of a column's longest word, and of its longest line."""
        cells = [Text(self._columns[index])] if self._header else []
        cells += [row[index] for row in self._rows]
        measured = [Measurement.get(console, options.update(max_width=1 << 16), cell) for cell in cells]
        longest = max((m.maximum for m in measured), default=0)
        whole = index in self._right or (index == 0 and not self._header)
        return Measurement(longest if whole else max((m.minimum for m in measured), default=0), longest)

    def _lists(self) -> Iterator[RenderableType]:
        for number, row in enumerate(self._rows):
            if number:
                yield Text("")
            yield pairs({name: cell for name, cell in zip(self._columns, row, strict=True) if cell.plain})


def _share(needs: Sequence[Measurement], room: int) -> list[int]:
    """A width for each column: what its longest word needs, and a fair share of what is left."""
    widths = list[int]()
    for need in needs:  # the last of two breaks inside a word where it must
        widths.append(max(1, min(need.minimum, room - sum(widths))))
    open_columns = {n for n, need in enumerate(needs) if need.maximum > widths[n]}
    while open_columns and (spare := room - sum(widths)) > 0:
        part = max(1, spare // len(open_columns))
        for n in sorted(open_columns, key=lambda n: needs[n].maximum - widths[n]):
            widths[n] += min(part, needs[n].maximum - widths[n], room - sum(widths))
        open_columns = {n for n in open_columns if needs[n].maximum > widths[n]}
    return widths


def table(*columns: str, right: frozenset[int] = frozenset()) -> Rows:
    return Rows(columns, right)


def pairs(rows: Mapping[str, Any]) -> Rows:
    """Names and values, one a line."""
    result = Rows(("", ""), header=False)
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
