from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerocopy.daemon.trace import Trace, between, busy
from zerocopy.handoff.components import Component


def trace(**changes: object) -> Trace:
    return Trace("ab" * 16, "decoder", "p", "tcp", 100, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0),
        ([(1, 3, 9)], 2),
        ([(1, 3, 9), (5, 6, 9)], 3),
        ([(1, 3, 9), (2, 6, 9)], 5),
        ([(1, 6, 9), (2, 3, 9), (5, 7, 9)], 6),
        ([(5, 6, 9), (1, 3, 9)], 3),
        ([(1, 1, 9)], 0),
    ],
)
def test_time_counts_once_however_many_spans_cover_it(spans: list[tuple[float, float, int]], seconds: float) -> None:
    assert busy(spans) == seconds


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12))
def test_busy_time_is_the_number_of_instants_that_some_span_covers(some: list[tuple[int, int]]) -> None:
    covered = {instant for began, length in some for instant in range(began, began + length)}
    assert busy([(float(began), float(began + length), 0) for began, length in some]) == len(covered)


def test_pages_are_counted_by_component() -> None:
    """M1."""
    seen = trace()
    seen.page(Component.ATTENTION_KV, (1.0, 2.0, 100))
    seen.page(Component.ATTENTION_KV, (2.0, 3.0, 50))
    seen.page(Component.MTP_KV, (3.0, 4.0, 10))
    seen.page(Component.RECURRENT, (4.0, 5.0, 1000))
    assert seen.component_bytes == {"attention KV": 150, "MTP KV": 10, "recurrent state": 1000}
    assert seen.component_pages == {"attention KV": 2, "MTP KV": 1, "recurrent state": 1}
    assert seen.kv_bytes == 160


def test_overlap_counts_kv_that_had_arrived_by_the_end_of_prefill() -> None:
    seen = trace(marks={"prefilled": 2.0})
    seen.page(Component.ATTENTION_KV, (1.0, 2.0, 30))
    seen.page(Component.ATTENTION_KV, (1.5, 2.5, 60))
    seen.page(Component.RECURRENT, (1.0, 1.5, 1000))
    seen.page(Component.MTP_KV, (2.5, 3.0, 10))
    assert seen.kv_bytes_by(2.0) == 30
    assert seen.record().overlap == pytest.approx(0.3)


def test_two_traces_share_nothing() -> None:
    one, other = trace(), trace()
    one.page(Component.TOKENS, (0.0, 1.0, 4))
    one.marks["asked"] = 1.0
    assert (other.wire, other.marks, other.component_bytes) == ([], {}, {})


def test_seconds_between_marks_are_there_once_both_are() -> None:
    assert between({"a": 1.0}, "a", "b") is None
    assert between({"b": 1.0}, "a", "b") is None
    assert between({"a": 1.0, "b": 3.5}, "a", "b") == 2.5


def test_a_committed_handoff_is_recorded_with_its_phases() -> None:
    seen = trace(
        outcome="committed",
        reason="committed",
        marks={"asked": 1.0, "granted": 1.5, "prefilled": 4.0, "imported": 5.0, "committed": 5.25},
        imports=[(2.0, 3.0, 10), (2.5, 3.5, 10)],
    )
    seen.page(Component.ATTENTION_KV, (2.0, 2.5, 10))
    record = seen.record()
    assert (record.outcome, record.reason, record.tail_s) == ("ok", "ok", 1.25)
    assert record.phase_s == {"wire": 0.5, "import": 1.5, "queue": 0.5, "commit": 0.25}
    assert record.component_bytes == {Component.ATTENTION_KV: 10}


def test_a_failed_handoff_is_recorded_with_its_reason_and_what_there_is() -> None:
    record = trace(outcome="aborted", reason="link-lost", marks={"asked": 1.0}).record()
    assert (record.outcome, record.reason) == ("failed", "link-lost")
    assert (record.phase_s, record.overlap, record.tail_s) == ({}, None, None)
