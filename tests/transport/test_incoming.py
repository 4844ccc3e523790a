"""Claims in order, records in any order, publication only of what is whole: no socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.frames import MAX_RECORD, WINDOW, PageShape
from transport.incoming import IncomingPages, wipe
from transport.link import Landing, LinkError
from transport.stats import TcpStats

from .hosts import Landings, mapped

RECORD = 4096


class Bench:
    def __init__(self, turn_s: float = 30) -> None:
        self.sink = Landings()
        self.stats = TcpStats()
        self.acknowledged: list[int] = []
        self.pages = IncomingPages(self.sink, self.stats, self.acknowledged.append, turn_s)
        self.stopped = False

    def announce(self, number: int, records: int = 1) -> PageShape:
        return self.pages.announce(number, shape(records, number).packed)

    def begin(self, number: int, index: int = 0, records: int = 1) -> memoryview | None:
        record = shape(records, number).record(number, index)
        return self.pages.begin(number, index, record, lambda: self.stopped)

    def land(self, number: int, index: int = 0, records: int = 1) -> bool:
        view = self.begin(number, index, records)
        if view is None:
            return False
        view[:] = bytes([(number + 1) % 256]) * len(view)
        self.pages.finish(number)
        return True

    def later(self, work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.02)
        return thread


def shape(records: int, number: int) -> PageShape:
    return PageShape(records * RECORD - 1, RECORD, b"%d" % number)


def test_a_page_is_published_when_its_last_record_is_in_and_not_before() -> None:
    bench = Bench()
    bench.announce(0, 3)
    for index in (2, 0):
        assert bench.land(0, index, 3)
        assert not bench.sink.published and not bench.acknowledged
    assert bench.land(0, 1, 3)
    assert bench.sink.published[0].view == bytes([1]) * (3 * RECORD - 1)
    assert bench.acknowledged == [0]
    assert bench.stats.pages_received == 1 and bench.stats.page_bytes_received == 3 * RECORD - 1


def test_nothing_is_published_while_a_record_is_still_being_decrypted() -> None:
    bench = Bench()
    bench.announce(0, 2)
    assert bench.begin(0, 0, 2) is not None
    assert bench.land(0, 1, 2)
    assert not bench.sink.published
    bench.pages.finish(0)
    assert len(bench.sink.published) == 1


def test_claims_come_in_page_order_whatever_arrives_first() -> None:
    bench = Bench()
    bench.announce(1)
    waiting = bench.later(lambda: bench.land(1))
    assert bench.sink.claimed == []
    bench.announce(0)  # as another stream, or the control connection, brings it
    waiting.join(30)
    assert bench.sink.claimed == [b"0", b"1"]
    assert bench.acknowledged == [1]
    assert bench.land(0)


def test_waiting_for_a_turn_is_bounded_and_names_both_pages() -> None:
    bench = Bench(turn_s=0.05)
    bench.announce(3)
    with pytest.raises(LinkError, match=r"page 0 was not announced within 0\.05 s of page 3") as caught:
        bench.land(3)
    assert caught.value.reason == "page-order" and bench.sink.claimed == []


def test_a_stream_that_stops_gives_up_its_turn() -> None:
    bench, ends = Bench(), list[LinkError]()

    def land() -> None:
        try:
            bench.land(1)
        except LinkError as error:
            ends.append(error)

    bench.announce(1)
    waiting = bench.later(land)
    bench.stopped = True
    bench.pages.wake()
    waiting.join(30)
    assert [error.reason for error in ends] == ["stream-lost"]


def test_a_record_that_comes_twice_is_dropped_and_counted() -> None:
    bench = Bench()
    bench.announce(0, 2)
    assert bench.land(0, 0, 2)
    assert not bench.land(0, 0, 2)
    assert bench.land(0, 1, 2)
    bench.announce(0, 2)  # repeated after the page was complete
    assert not bench.land(0, 1, 2)
    assert bench.stats.records_repeated == 2
    assert bench.sink.claimed == [b"0"] and len(bench.sink.published) == 1 and bench.acknowledged == [0]


def test_a_declined_page_is_acknowledged_and_its_records_dropped() -> None:
    bench = Bench()
    bench.sink.refuse = lambda header: header == b"0"
    bench.announce(0)
    bench.announce(1)
    assert not bench.land(0)
    assert bench.land(1)
    assert bench.acknowledged == [0, 1] and bench.stats.pages_dropped == 1


@pytest.mark.parametrize("announced", [True, False])
def test_a_page_cancelled_before_its_turn_is_never_claimed(announced: bool) -> None:
    bench = Bench()
    if announced:
        bench.announce(0)
    bench.announce(1)
    bench.pages.cancel(0)
    assert bench.land(1)
    bench.announce(0)  # late, on a slow stream
    assert not bench.land(0)
    assert bench.sink.claimed == [b"1"] and bench.acknowledged == [0, 1]


def test_a_page_cancelled_half_way_is_wiped_when_its_last_writer_is_done() -> None:
    bench = Bench()
    bench.announce(0, 3)
    bench.land(0, 0, 3)
    view = bench.begin(0, 1, 3)
    assert view is not None
    bench.pages.cancel(0)
    assert not bench.sink.discarded, "a thread still writes"
    view[:] = b"x" * len(view)
    bench.pages.finish(0)
    assert not any(bench.sink.discarded[0].view)
    assert not bench.land(0, 2, 3)
    bench.pages.cancel(0)
    assert bench.acknowledged == [0] and len(bench.sink.discarded) == 1 and not bench.sink.published


def test_cancelling_a_complete_page_changes_nothing() -> None:
    bench = Bench()
    bench.announce(0)
    bench.land(0)
    bench.pages.cancel(0)
    assert bench.acknowledged == [0] and len(bench.sink.published) == 1 and not bench.sink.discarded


def test_closing_wipes_and_discards_what_is_not_whole() -> None:
    bench = Bench()
    for number in range(3):
        bench.announce(number, 2)
    bench.land(1, 0, 2)
    bench.pages.close()
    assert len(bench.sink.claimed) == len(bench.sink.discarded) == 2
    assert not any(any(slot.view) for slot in bench.sink.discarded)


def test_an_announcement_that_contradicts_an_earlier_one_is_refused() -> None:
    bench = Bench()
    bench.announce(0, 2)
    with pytest.raises(LinkError, match="differently"):
        bench.announce(0, 3)


@pytest.mark.parametrize("number", [WINDOW, 2**31, 2**63, 2**64 - 1])
def test_numbers_far_ahead_are_refused_before_anything_is_kept(number: int) -> None:
    bench = Bench()
    for refused in (bench.announce, bench.pages.cancel):
        with pytest.raises(LinkError) as caught:
            refused(number)
        assert caught.value.reason == "frame-malformed"


def test_open_pages_are_bounded() -> None:
    bench = Bench()
    for number in range(WINDOW):
        bench.announce(number, 2)
        bench.land(number, 0, 2)
    with pytest.raises(LinkError):
        for number in range(WINDOW, WINDOW + 3):
            bench.announce(number)


def test_a_landing_of_another_size_is_this_hosts_fault_and_said_so() -> None:
    bench = Bench()
    bench.sink.claim = lambda header, size: _Small()  # type: ignore[method-assign]
    bench.announce(0)
    with pytest.raises(LinkError) as caught:
        bench.land(0)
    assert caught.value.reason == "bad-landing"


class _Small(Landing):
    view = memoryview(bytearray(1))

    def publish(self) -> None: ...

    def discard(self) -> None: ...


def test_wiping_covers_every_byte_of_any_length() -> None:
    for size in (1, RECORD, MAX_RECORD - 1, MAX_RECORD + 1, 2 * MAX_RECORD + 5):
        view = mapped(size)
        view[::7] = b"\xff" * len(view[::7])
        view[-1] = 0xFF
        wipe(view)
        assert not any(view[::7]) and not view[-1]


@given(st.permutations([(page, index) for page in range(4) for index in range(3)]), st.data())
@settings(max_examples=100, deadline=None)
def test_any_order_with_repetitions_publishes_every_page_once_and_exactly(
    order: list[tuple[int, int]], data: st.DataObject
) -> None:
    bench = Bench()
    for page in range(4):
        bench.announce(page, 3)
    for place in data.draw(st.lists(st.integers(0, len(order)), max_size=6)):
        order.insert(place, order[place % len(order)])
    for page, index in order:
        bench.land(page, index, 3)
    assert bench.sink.claimed == [b"0", b"1", b"2", b"3"]
    assert sorted(bench.acknowledged) == [0, 1, 2, 3]
    assert all(slot.view == bytes([int(slot.header) + 1]) * len(slot.view) for slot in bench.sink.published)
    assert bench.stats.records_repeated == len(order) - 12
