"""Which record goes out next, and when a payload may be reused: one thread at a time, no socket."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.frames import WINDOW
from transport.link import LinkError
from transport.outgoing import MAX_QUEUED_PAGES, OutgoingPage, OutgoingPages, PageFuture
from transport.stats import TcpStats

from .conftest import Run

RECORD = 4096
GONE = LinkError("gone", "the link is gone")


class Bench:
    """Pages out of one buffer; settles at once, as the link does a loop turn later."""

    def __init__(self) -> None:
        self.stats = TcpStats()
        self.told: list[int] = []
        self.pages = OutgoingPages(RECORD, self.stats, self._settled)

    def _settled(self, page: OutgoingPage) -> None:
        if self.pages.settle(page):
            self.told.append(page.number)

    def put(self, records: int) -> PageFuture:
        payload = memoryview(bytearray(records * RECORD))
        return self.pages.put(b"h", payload, asyncio.get_running_loop())

    def take(self, stream: str) -> tuple[OutgoingPage, int]:
        found = self.pages.take(stream)
        assert found is not None
        return found

    def send(self, stream: str) -> tuple[int, int]:
        page, index = self.take(stream)
        self.pages.read(page, RECORD)
        return page.number, index


def test_a_stream_stays_on_its_page_while_others_wait_and_helps_when_none_does(run: Run) -> None:
    async def work() -> None:
        bench = Bench()
        for records in (3, 2, 4):
            bench.put(records)
        taken = [bench.send("ab"[i % 2]) for i in range(9)]
        assert taken == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]

    run(work())


def test_a_page_whose_stream_was_lost_is_taken_over_before_a_new_one_begins(run: Run) -> None:
    async def work() -> None:
        bench = Bench()
        for records in (3, 1, 1):
            bench.put(records)
        assert bench.send("a") == (0, 0)
        bench.pages.lose("a")
        assert [bench.send("b") for _ in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]

    run(work())


def test_a_payload_is_held_until_the_peer_has_the_page(run: Run) -> None:
    async def work() -> None:
        bench = Bench()
        future = bench.put(1)
        page, _ = bench.take("a")
        bench.pages.read(page, RECORD)
        assert not future.done()
        bench.pages.acknowledge((0,))
        assert future.done() and future.exception() is None
        with pytest.raises(ValueError, match="released"):
            page.payload[0]
        assert bench.stats.pages_sent == 1 and bench.stats.page_bytes_sent == RECORD

    run(work())


def test_a_page_that_still_waits_may_be_cancelled_twice(run: Run) -> None:
    """Whoever awaits the future may be cancelled as well as whoever holds it."""

    async def work() -> None:
        settled: list[OutgoingPage] = []
        pages = OutgoingPages(RECORD, TcpStats(), settled.append)
        future = pages.put(b"h", memoryview(bytearray(RECORD)), asyncio.get_running_loop())
        assert future.cancel() and future.cancel()
        for page in settled:
            assert not pages.settle(page), "the peer never heard of it"
        assert future.cancelled()

    run(work())


def test_an_acknowledged_page_that_is_still_read_resolves_only_afterwards(run: Run) -> None:
    """The receiver has the page while a repetition of one of its records is being sealed."""

    async def work() -> None:
        bench = Bench()
        future = bench.put(1)
        bench.send("a")
        bench.pages.lose("a")
        page, index = bench.take("b")
        assert index == 0
        bench.pages.acknowledge((0,))
        assert not future.done()
        bench.pages.read(page, RECORD)
        assert future.done()

    run(work())


def test_records_of_a_lost_stream_go_out_again_first_and_only_they(run: Run) -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(4)
        bench.put(1)
        assert [bench.send(s) for s in "abba"] == [(0, 0), (1, 0), (0, 1), (0, 2)]
        bench.pages.leave("a")
        assert bench.pages.take("a") is None
        announced = bench.pages.lose("a")
        assert [page.number for page in announced] == [0]
        assert [bench.send("b") for _ in range(3)] == [(0, 0), (0, 2), (0, 3)]
        assert [page.number for page in bench.pages.lose("b")] == [0, 1]
        assert [bench.send("c") for _ in range(5)] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]

    run(work())


def test_a_cancelled_page_is_not_taken_again_and_the_peer_is_told_once(run: Run) -> None:
    async def work() -> None:
        bench = Bench()
        started, waiting, after = bench.put(3), bench.put(1), bench.put(1)
        page, _ = bench.take("a")
        assert started.cancel() and waiting.cancel()
        assert waiting.cancelled(), "nothing read it yet"
        assert not started.done(), "a thread reads it"
        bench.pages.read(page, RECORD)
        assert started.cancelled() and bench.told == [0]
        assert bench.send("a") == (1, 0), "the page that never began has no number"
        bench.pages.lose("a")
        assert bench.send("b") == (1, 0), "records of a cancelled page are not repeated"
        bench.pages.acknowledge((0, 1))
        assert after.done() and bench.told == [0]
        assert not started.cancel()

    run(work())


def test_closing_fails_every_page_once_it_is_no_longer_read(run: Run) -> None:
    async def work() -> None:
        bench = Bench()
        read, unread, waiting = bench.put(1), bench.put(1), bench.put(1)
        page, _ = bench.take("a")
        bench.send("a")
        bench.pages.close(GONE)
        assert unread.exception() is GONE and waiting.exception() is GONE
        assert not read.done()
        bench.pages.read(page, RECORD)
        assert read.exception() is GONE
        assert bench.pages.take("a") is None
        with pytest.raises(LinkError, match="gone"):
            bench.put(1)

    run(work())


def test_a_sleeping_stream_wakes_for_work_for_its_own_end_and_for_the_links(run: Run) -> None:
    async def work() -> None:
        bench = Bench()
        got: list[object] = []

        def wait(stream: str) -> threading.Thread:
            thread = threading.Thread(target=lambda: got.append(bench.pages.take(stream)))
            thread.start()
            return thread

        for wake in (lambda: bench.put(1), lambda: bench.pages.leave("a"), lambda: bench.pages.close(GONE)):
            thread = wait("a")
            wake()
            await asyncio.to_thread(thread.join, 30)
            assert not thread.is_alive()
            bench.pages.lose("b")
        assert [found is None for found in got] == [False, True, True]

    run(work())


def test_what_waits_and_what_is_on_its_way_are_bounded(run: Run) -> None:
    async def work() -> None:
        bench = Bench()
        for _ in range(MAX_QUEUED_PAGES):
            bench.put(1)
        with pytest.raises(LinkError) as caught:
            bench.put(1)
        assert caught.value.reason == "queue-full"
        for _ in range(WINDOW):
            bench.send("a")
        taken = threading.Thread(target=lambda: bench.send("a"), daemon=True)
        taken.start()
        taken.join(0.05)
        assert taken.is_alive(), "the window is full"
        bench.pages.acknowledge((17,))
        taken.join(30)
        assert not taken.is_alive()

    run(work())


@pytest.mark.parametrize("number", [0, 1, 2**63])
def test_an_acknowledgement_out_of_the_blue_is_refused(run: Run, number: int) -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(1)
        with pytest.raises(LinkError) as caught:
            bench.pages.acknowledge((number,))
        assert caught.value.reason == "frame-malformed"

    run(work())


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.lists(st.integers(0, 9), max_size=60))
@settings(max_examples=150, deadline=None)
def test_whatever_is_lost_every_record_is_carried_by_a_stream_that_lives(sizes: list[int], steps: list[int]) -> None:
    """The receiver may miss whatever a lost stream carried: after the last loss, live streams must have carried all."""

    async def work() -> None:
        bench, alive, born = Bench(), ["s0", "s1"], 2
        carried: dict[str, set[tuple[int, int]]] = {name: set() for name in alive}
        left = sum(sizes)
        for records in sizes:
            bench.put(records)
        for step in steps:
            stream = alive[step % len(alive)]
            if step >= 8:
                left += len(carried.pop(stream))
                bench.pages.leave(stream)
                bench.pages.lose(stream)
                alive[alive.index(stream)] = f"s{born}"
                carried[f"s{born}"] = set()
                born += 1
            elif left:
                carried[stream].add(bench.send(stream))
                left -= 1
        while left:
            carried[alive[0]].add(bench.send(alive[0]))
            left -= 1
        everything = sorted(record for records in carried.values() for record in records)
        assert everything == [(page, index) for page, size in enumerate(sizes) for index in range(size)]

    asyncio.run(work())
