"""What people see: columns break between words, values are never markup, and nothing of a value is lost (U3)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from zerocopy.cli.screen import pairs, show, table

SENTENCE = "one for every two of 2 cores, at most 4"
DIGEST = "a4e747c8421f82418fbe197aeedab0e3fad4233326ce39aede7de6570496c8b7"


def shown(item: RenderableType, width: int) -> list[str]:
    console = Console(highlight=False, width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(item)
    return [line.rstrip() for line in captured.get().splitlines()]


def peers() -> RenderableType:
    rows = table("name", "connected", "rtt ms", "streams reason", right=frozenset({2}))
    rows.add_row("prefiller", "yes", "0.415", SENTENCE)
    rows.add_row("two", "no", "", "")
    return rows


def test_columns_break_between_words_and_numbers_not_at_all() -> None:
    """At 80 columns `status` said `connec ted` and `model show` `attenti on KV`."""
    assert shown(peers(), 80) == [
        "name       connected  rtt ms  streams reason",
        f"prefiller  yes         0.415  {SENTENCE}",
        "two        no",
    ]
    assert shown(peers(), 44) == [
        "name       connected  rtt ms  streams reason",
        "prefiller  yes         0.415  one for every",
        "                              two of 2",
        "                              cores, at most",
        "                              4",
        "two        no",
    ]


def test_where_the_words_have_no_room_each_row_is_a_list_of_what_it_has() -> None:
    assert shown(peers(), 30) == [
        "name            prefiller",
        "connected       yes",
        "rtt ms          0.415",
        "streams reason  one for every",
        "                two of 2",
        "                cores, at most",
        "                4",
        "",
        "name       two",
        "connected  no",
    ]


def test_names_stay_whole_beside_a_value_that_is_one_long_word() -> None:
    assert shown(pairs({"model": DIGEST, "flash attention": "on"}), 60) == [
        f"model            {DIGEST[:43]}",
        f"                 {DIGEST[43:]}",
        "flash attention  on",
    ]


@pytest.mark.parametrize("value", ["[fe80::1%eth0]:7600", "[/x] y", "[bold]", r"\[red]"])
def test_a_value_is_never_markup(value: str) -> None:
    """Link-local addresses vanished, and what a peer wrote could end the command with a traceback."""
    rows = table("path")
    rows.add_row(value)
    assert shown(rows, 80) == ["path", value]
    assert shown(pairs({"path": value}), 80) == [f"path  {value}"]


@given(
    st.lists(st.lists(st.text("ab [](:", max_size=30), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(12, 100),
)
def test_nothing_of_a_value_is_lost_at_any_width(cells: list[list[str]], width: int) -> None:
    rows = table("1", "2", "3")
    for row in cells:
        rows.add_row(*row)
    lines = shown(rows, width)
    letters = Counter("".join(lines))
    for letter in "ab[](:":
        assert letters[letter] == sum(cell.count(letter) for row in cells for cell in row)
    assert max(map(len, lines)) <= width


def test_into_a_pipe_lines_are_whole_and_end_with_their_last_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show(pairs({"reason": SENTENCE * 4, "x": "y"}))
    assert capsys.readouterr().out == f"reason  {SENTENCE * 4}\nx       y\n"
