from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerocopy.cli.timeline import timeline


def lines(rows: dict[str, list[tuple[float, ...]]], width: int = 10) -> list[str]:
    return timeline(rows, width).plain.split("\n")


def test_spans_of_two_rows_share_one_scale() -> None:
    assert lines({"prefill": [(0, 1)], "wire": [(1, 2)]}) == [
        "prefill ██████····    1.00 s",
        "wire    ·····█████    1.00 s",
        "        0   2.00 s",
    ]


def test_several_spans_of_a_row_add_up() -> None:
    assert lines({"export": [(0, 0.2), (0.8, 1.0)]})[0] == "export ███·····██  400.0 ms"


def test_the_shortest_span_is_seen() -> None:
    assert lines({"a": [(0, 10)], "b": [(5, 5)]})[1] == "b ·····█····    0.0 ms"


def test_a_span_at_the_very_end_is_seen() -> None:
    assert lines({"a": [(0, 10)], "b": [(10, 10)]})[1].startswith("b ·········█")


def test_what_began_before_zero_is_drawn_from_zero() -> None:
    assert lines({"a": [(-5, 5), (9, 10)]})[0].startswith("a ██████···█")


def test_more_than_begin_and_end_is_ignored() -> None:
    assert lines({"a": [(0, 1, 4096)]}) == lines({"a": [(0, 1)]})


@pytest.mark.parametrize("rows", [{}, {"a": []}, {"a": [(0.0, 0.0)]}])
def test_nothing_to_draw_is_no_error(rows: dict[str, list[tuple[float, ...]]]) -> None:
    assert "0.0 ms" in lines(rows)[-1]


def test_every_row_has_its_own_style() -> None:
    rows = {str(n): [(0.0, 1.0)] for n in range(9)}
    text = timeline(rows, 10)
    assert len(text.plain.split("\n")) == 10
    assert len({str(span.style) for span in text.spans}) == 6


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=6),
        st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)).map(sorted).map(tuple), max_size=5),
        max_size=5,
    ),
    st.integers(10, 80),
)
def test_every_row_is_as_wide_as_was_asked(rows: dict[str, list[tuple[float, ...]]], width: int) -> None:
    for line in lines(rows, width)[:-1]:
        assert line.count("█") + line.count("·") == width
