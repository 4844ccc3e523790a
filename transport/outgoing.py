"""Pages on their way out of one link: which record goes on which stream next, and when a payload may be reused.

Streams pull: whichever is ready takes the next record, so a slow stream carries less and one more or one fewer is
normal. Pages start in the order they were queued. A stream stays on the page it began while others wait, which saves
announcing each page on each stream, and helps with others' pages when none waits, so the last page is striped over all.
A payload is held until the peer acknowledged the page, so that the
records of a lost stream can go out again on another. Owns no socket and no payload memory.

Threads: `take` and `read` belong to the stream's sender thread, everything else to the event loop's.
Bounds: `MAX_QUEUED_PAGES` waiting, `WINDOW` on their way.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from transport.frames import WINDOW, PageShape, check_page, malformed
from transport.link import LinkError
from transport.rate import BandwidthEstimate
from transport.stats import TcpStats

MAX_QUEUED_PAGES: Final = 4096


class PageFuture(asyncio.Future[None]):
    """Cancelling asks; the future is cancelled once no thread reads the payload any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.stop: Callable[[], None] = lambda: None

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        self.stop()
        return True

    def settle(self, *, cancelled: bool, error: LinkError | None) -> None:
        if self.done():
            return
        if cancelled:
            super().cancel()
        elif error is not None:
            self.set_exception(error)
            self.exception()  # `link_closed` reports it too: no "never retrieved" in the log
        else:
            self.set_result(None)


@dataclass(eq=False)
class OutgoingPage:
    shape: PageShape
    payload: memoryview
    future: PageFuture
    number: int = -1  # given when the first record leaves
    home: Hashable = None  # the stream that stays on it; None if that was lost
    carriers: list[Hashable] = field(default_factory=list)  # per record taken so far: the stream it went to
    readers: int = 0  # threads that read the payload now
    done: bool = False
    cancelled: bool = False


class OutgoingPages:
    def __init__(self, record_bytes: int, stats: TcpStats, settled: Callable[[OutgoingPage], None]) -> None:
        """`settled` is called from a sender thread when a stopped page's payload is no longer read; it must lead
        to `settle` on the loop."""
        self._record_bytes = record_bytes
        self._stats = stats
        self._settled = settled
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[OutgoingPage] = deque()
        self._open: list[OutgoingPage] = []  # begun, with records not yet taken; oldest first
        self._again: deque[tuple[OutgoingPage, int]] = deque()
        self._in_flight: dict[int, OutgoingPage] = {}
        self._next_number = 0
        self._gone: set[Hashable] = set()
        self._error: LinkError | None = None
        self._rate = BandwidthEstimate()

    def put(self, header: bytes, payload: memoryview, loop: asyncio.AbstractEventLoop) -> PageFuture:
        """Queue one page. Raises LinkError when closed, full, or the page is out of bounds."""
        check_page(header, payload)
        future = PageFuture(loop)
        page = OutgoingPage(PageShape(payload.nbytes, self._record_bytes, header), payload.cast("B"), future)
        future.stop = lambda: self._cancel(page)
        with self._lock:
            if self._error is not None:
                raise self._error
            if len(self._waiting) >= MAX_QUEUED_PAGES:
                raise LinkError("queue-full", f"{MAX_QUEUED_PAGES} pages wait already: wait for some to leave")
            self._waiting.append(page)
            self._changed.notify(min(page.shape.records, 64))
        return future

    # -- a stream's sender thread

    def take(self, stream: Hashable) -> tuple[OutgoingPage, int] | None:
        """The next record for `stream` to send, or None when it should end. Blocks. Call `read` once sealed."""
        with self._lock:
            while self._error is None and stream not in self._gone:
                found = self._next(stream)
                if found is not None:
                    page, index = found
                    if index == len(page.carriers):
                        page.carriers.append(stream)
                    else:
                        page.carriers[index] = stream
                    page.readers += 1
                    return found
                self._changed.wait()
        return None

    def _next(self, stream: Hashable) -> tuple[OutgoingPage, int] | None:
        while self._again:
            page, index = self._again.popleft()
            if not (page.done or page.cancelled):
                return page, index
        own = None
        for page in self._open:
            if page.home in (stream, None):
                own = page
                break
        if own is None and self._waiting and len(self._in_flight) < WINDOW:
            own = self._begin()
        if own is not None:
            own.home = stream
        elif not self._open:
            return None
        page = own or self._open[0]
        index = len(page.carriers)
        if index + 1 == page.shape.records:
            self._open.remove(page)
        return page, index

    def _begin(self) -> OutgoingPage:
        page = self._waiting.popleft()
        page.number = self._next_number
        self._next_number += 1
        self._in_flight[page.number] = page
        self._open.append(page)
        self._rate.busy(time.monotonic())
        return page

    def read(self, page: OutgoingPage, length: int) -> None:
        """The record taken is sealed: this thread no longer reads the payload."""
        with self._lock:
            self._stats.page_bytes_sent += length
            page.readers -= 1
            stopped = page.readers == 0 and (page.done or page.cancelled or self._error is not None)
        if stopped:
            self._settled(page)

    def leave(self, stream: Hashable) -> None:
        """`take` returns None to this stream from now on. Any thread."""
        with self._lock:
            self._gone.add(stream)
            self._changed.notify_all()

    # -- the loop

    def settle(self, page: OutgoingPage) -> bool:
        """Resolve the page's future if nothing reads its payload. Idempotent. True, once, if the peer has begun to
        receive a page that was cancelled and must be told."""
        with self._lock:
            ready = page.readers == 0 and (page.done or page.cancelled or self._error is not None)
        if not ready or page.future.done():
            return False
        page.payload.release()  # its memory may be unmapped from here on
        page.future.settle(cancelled=page.cancelled, error=None if page.done else self._error)
        return page.cancelled and not page.done and page.number >= 0

    def acknowledge(self, numbers: Iterable[int]) -> None:
        """The peer has these pages, or dropped them. Raises LinkError for a page that is not on its way."""
        pages: list[OutgoingPage] = []
        with self._lock:
            if len(self._in_flight) >= WINDOW:
                self._changed.notify_all()
            for number in numbers:
                page = self._in_flight.pop(number, None)
                if page is None:
                    raise malformed(f"page {number} acknowledged, which is not on its way")
                page.done = True
                self._stop_taking(page)
                pages.append(page)
            self._stats.pages_sent += len(pages)
            delivered = sum(page.shape.payload_bytes for page in pages)
            self._rate.delivered(delivered, time.monotonic(), idle=not self._in_flight)
            self._stats.bandwidth_bps = self._rate.bps
        for page in pages:
            self.settle(page)

    def lose(self, stream: Hashable) -> list[OutgoingPage]:
        """Queue again whatever `stream` carried and nobody acknowledged; returns the pages it had announced."""
        announced = []
        with self._lock:
            self._gone.discard(stream)  # its threads have ended: nobody asks for it again
            for page in self._in_flight.values():
                page.home = None if page.home == stream else page.home
                lost = [index for index, carrier in enumerate(page.carriers) if carrier == stream]
                if lost and not page.cancelled:
                    announced.append(page)
                    self._again.extend((page, index) for index in lost)
            self._changed.notify_all()
        return announced

    def _cancel(self, page: OutgoingPage) -> None:
        with self._lock:
            if page.number < 0 and self._error is None and not page.cancelled:
                self._waiting.remove(page)
            page.cancelled = True
            self._stop_taking(page)
        self._settled(page)

    def _stop_taking(self, page: OutgoingPage) -> None:
        if page in self._open:
            self._open.remove(page)

    def close(self, error: LinkError) -> None:
        """Fail everything. A page still being read fails when `read` says it no longer is."""
        with self._lock:
            self._error = error
            pages = [*self._waiting, *self._in_flight.values()]
            self._waiting.clear()
            self._in_flight.clear()
            self._again.clear()
            self._open.clear()
            self._changed.notify_all()
        for page in pages:
            self.settle(page)
