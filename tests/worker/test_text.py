from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocopy.worker.text import TextStream

MIXED = "Grüße, 東京 — 🙂 déjà vu"


def stream(pieces: list[bytes], *stop: str) -> tuple[list[str], bool]:
    """(what a client was shown, piece by piece and at the end; whether a stop string ended it)"""
    text = TextStream(stop)
    shown = [text.feed(piece) for piece in pieces]
    return [*shown, text.finish()], text.stopped


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("at", range(len(MIXED.encode()) + 1))
def test_a_character_cut_anywhere_is_shown_whole_or_not_yet(at: int) -> None:
    data = MIXED.encode()
    shown, _ = stream([data[:at], data[at:]])
    assert "".join(shown) == MIXED
    assert shown[0] == data[:at].decode(errors="ignore")


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert "".join(stream([b"a\xff", b"b\xe6\x9d", b"c"])[0]) == "a\ufffdb\ufffdc"


def test_a_character_that_never_ends_is_replaced_at_the_end() -> None:
    assert stream([b"a\xe6\x9d"]) == (["a", "\ufffd"], False)


def test_a_stop_string_across_pieces_is_never_shown() -> None:
    shown, stopped = stream([b"hello E", b"N", b"D and more"], "END")
    assert shown == ["hello ", "", "", ""]
    assert stopped


def test_what_only_looked_like_a_stop_string_is_shown_once_that_is_clear() -> None:
    assert stream([b"hello E", b"N", b"JOY"], "END")[0] == ["hello ", "", "ENJOY", ""]


def test_what_is_held_back_at_the_end_is_shown() -> None:
    assert stream([b"hello EN"], "END") == (["hello ", "EN"], False)


def test_nothing_is_shown_after_a_stop_string() -> None:
    text = TextStream(["x"])
    assert text.feed(b"axb") == "a"
    assert text.feed(b"c") == ""
    assert text.finish() == ""


def test_the_stop_string_that_is_complete_first_counts() -> None:
    """However the pieces fall: "c" is complete before "bcd" is."""
    assert stream([b"abcd"], "bcd", "c") == (["ab", ""], True)
    assert stream([b"a", b"b", b"c", b"d"], "bcd", "c")[0] == ["a", "", "b", "", ""]


def test_of_two_that_are_complete_at_once_the_longer_is_removed() -> None:
    assert stream([b"abc"], "c", "bc") == (["a", ""], True)


def test_an_empty_stop_string_stops_nothing() -> None:
    assert stream([b"abc"], "") == (["abc", ""], False)


def test_a_stop_string_may_overlap_its_own_false_start() -> None:
    assert "".join(stream([b"aab", b"aaab"], "aaab")[0]) == "aab"


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="abü🙂", max_size=24),
    st.lists(st.text(alphabet="abü🙂", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_what_a_client_sees_does_not_depend_on_where_tokens_end(text: str, stop: list[str], at: list[int]) -> None:
    data = text.encode()
    whole, stopped = stream([data], *stop)
    pieces, also_stopped = stream(cut(data, [min(n, len(data)) for n in at]), *stop)
    assert "".join(pieces) == "".join(whole)
    assert also_stopped == stopped == any(s in text for s in stop)
    assert not any(s in "".join(pieces) for s in stop)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_any_bytes_in_any_pieces_give_the_text_of_the_whole(data: bytes, at: list[int]) -> None:
    pieces, _ = stream(cut(data, [min(n, len(data)) for n in at]))
    assert "".join(pieces) == data.decode(errors="replace")
