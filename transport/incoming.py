"""Pages arriving on one link: who claims which landing when, which record goes where, and when a page is whole.

Records of one page arrive on several streams in any order; `PageSink.claim` is called once per page in the sender's
order all the same: a stream whose page has to wait for an earlier one waits, at most `turn_s`. A landing is published
when every record has been decrypted with its tag verified; otherwise it is wiped and discarded. Owns no socket and no
landing memory.

Threads: `announce`, `begin` and `finish` are called from receiver threads, `announce` and `cancel` from the event
loop, `close` from the event loop after the receiver threads have ended. Bound: `WINDOW` pages.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from transport.frames import MAX_RECORD, WINDOW, PageShape, RecordHeader, malformed
from transport.link import Landing, LinkError, PageSink
from transport.stats import TcpStats

_ZEROS: Final = memoryview(mmap.mmap(-1, MAX_RECORD))  # never written: all one shared zero page


def wipe(view: memoryview) -> None:
    for start in range(0, len(view), MAX_RECORD):
        part = view[start : start + MAX_RECORD]
        part[:] = _ZEROS[: len(part)]


@dataclass(eq=False)
class IncomingPage:
    shape: PageShape
    landing: Landing | None = None
    taken: bytearray = field(default_factory=bytearray)  # one byte a record, allocated after the claim
    left: int = 0  # records not yet taken
    writers: int = 0
    dead: bool = False  # cancelled: the last writer discards

    def discard(self) -> None:
        if self.landing is not None:
            if any(self.taken):
                wipe(self.landing.view)
            self.landing.discard()


class IncomingPages:
    def __init__(self, sink: PageSink, stats: TcpStats, acknowledge: Callable[[int], None], turn_s: float) -> None:
        """`acknowledge` is called from any thread, once per page."""
        self._sink = sink
        self._stats = stats
        self._acknowledge = acknowledge
        self._turn_s = turn_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pages: dict[int, IncomingPage] = {}
        self._next_claim = 0
        self._skipped: set[int] = set()  # cancelled before their turn

    def announce(self, number: int, announcement: bytes) -> PageShape:
        """A PAGE record, or its repetition. Raises LinkError if it is out of bounds or contradicts an earlier one."""
        shape = PageShape.unpack(announcement)
        with self._lock:
            known = self._pages.get(number)
            if known is not None and known.shape != shape:
                raise malformed(f"page {number} announced twice, differently")
            if number >= self._next_claim + WINDOW or len(self._pages) >= WINDOW + 1:
                raise malformed(f"page {number} announced while {len(self._pages)} are open, the limit is {WINDOW}")
            if known is None and number >= self._next_claim and number not in self._skipped:
                self._pages[number] = IncomingPage(shape)
                self._changed.notify_all()
        return shape

    def begin(self, number: int, index: int, record: RecordHeader, stopped: Callable[[], bool]) -> memoryview | None:
        """Where to decrypt this record, or None: verify and drop it. Call `finish` after writing. Raises LinkError
        ("stream-lost") if it would have to wait for its turn and `stopped()`, see `wake`."""
        with self._lock:
            self._claim_through(number, stopped)
            page = self._pages.get(number)
            if page is None or page.landing is None or page.dead or page.taken[index]:
                self._stats.records_repeated += 1
                return None
            page.taken[index] = 1
            page.left -= 1
            page.writers += 1
            return page.landing.view[record.offset : record.offset + record.length]

    def _claim_through(self, number: int, stopped: Callable[[], bool]) -> None:
        """Claim every page up to `number`, in order, waiting for announcements that other streams carry."""
        if number < self._next_claim:
            return
        deadline = time.monotonic() + self._turn_s
        while self._next_claim <= number:
            turn = self._next_claim
            if turn in self._skipped:
                self._skipped.remove(turn)
                self._next_claim += 1
            elif turn in self._pages:
                self._next_claim += 1
                self._claim(turn, self._pages[turn])
            elif stopped():  # what it waits for may have been on this very stream, and comes again on another
                raise LinkError("stream-lost", "a bulk connection ended while a page waited for its turn")
            elif not self._changed.wait(deadline - time.monotonic()):
                raise LinkError(
                    "page-order", f"page {turn} was not announced within {self._turn_s:g} s of page {number}"
                )

    def _claim(self, number: int, page: IncomingPage) -> None:
        landing = self._sink.claim(page.shape.header, page.shape.payload_bytes)
        if landing is None:
            del self._pages[number]
            self._stats.pages_dropped += 1
            self._acknowledge(number)
            return
        page.landing = landing
        if len(landing.view) != page.shape.payload_bytes:
            raise LinkError("bad-landing", f"landing of {len(landing.view)} bytes for {page.shape.payload_bytes}")
        page.taken = bytearray(page.shape.records)
        page.left = page.shape.records

    def finish(self, number: int) -> None:
        """The record begun is decrypted and its tag verified; publishes the page if it was the last."""
        with self._lock:
            page = self._pages[number]
            page.writers -= 1
            if page.writers or (page.left and not page.dead):
                return
            del self._pages[number]
        if page.dead:
            page.discard()
            return
        assert page.landing is not None
        page.landing.publish()
        with self._lock:
            self._stats.pages_received += 1
            self._stats.page_bytes_received += page.shape.payload_bytes
        self._acknowledge(number)

    def cancel(self, number: int) -> None:
        """The sender gave the page up. Unknown if it is complete already: then nothing happens."""
        with self._lock:
            if number >= self._next_claim + WINDOW:
                raise malformed(f"page {number} cancelled, far beyond page {self._next_claim}")
            page = self._pages.get(number)
            if (page is None and number < self._next_claim) or (page is not None and page.dead):
                return
            if number >= self._next_claim:
                self._skipped.add(number)
            else:
                self._stats.pages_dropped += 1
            if page is not None:
                page.dead = True
                if not page.writers:
                    del self._pages[number]
                    page.discard()
            self._changed.notify_all()
        self._acknowledge(number)

    def wake(self) -> None:
        """A stream stopped: its receiver must not wait any longer. Any thread."""
        with self._lock:
            self._changed.notify_all()

    def close(self) -> None:
        """Wipe and discard whatever is not whole."""
        for page in self._pages.values():
            page.discard()
        self._pages.clear()
