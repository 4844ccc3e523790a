"""Measures a link: its round trip, and its bandwidth by a short burst of pages that nobody keeps (T5).

Probe pages travel like any other, sealed and acknowledged, but land in one scratch page of this process that nobody
reads. Decides nothing and opens nothing. Bounds: `MAX_BYTES`, `MAX_S` and `DRAIN_S` a probe, one scratch page of
`MAX_PAGE`.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from transport.link import Landing, Link, LinkError, PageSink

MAX_BYTES: Final = 32 << 20  # 26 ms of 10 Gb/s, beyond any start-up of TCP on a LAN
MAX_S: Final = 0.25  # of sending, no longer than a person would notice
DRAIN_S: Final = 0.5  # for what is on its way then: as much as had arrived, on a link as slow as it was
# Pages double in size and, up to a bound, in number with what has arrived: a slow link acknowledges some within MAX_S
# and keeps no long queue for the handoff that comes next, a fast one is not measured by what a page costs.
FIRST_PAGE: Final = 64 << 10
MAX_PAGE: Final = 1 << 20
FIRST_IN_FLIGHT, MAX_IN_FLIGHT = 2, 8
WARM_SHARE: Final = 0.25  # of the bytes come before the rate counts, which then needs as large a share of the time
ROUND_TRIP_WAIT_S: Final = 2.0
HEADER: Final = b"zc-handoff probe page"  # no page of a handoff has a header of this length

_scratch: Final = memoryview(mmap.mmap(-1, MAX_PAGE))
_zeros: Final = memoryview(mmap.mmap(-1, MAX_PAGE)).toreadonly()


@dataclass(frozen=True)
class Reading:
    rtt_s: float
    bandwidth_bps: float


class ProbeSink:
    """Takes probe pages itself and leaves all others to `sink`."""

    def __init__(self, sink: PageSink) -> None:
        self._sink = sink

    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        if header != HEADER:
            return self._sink.claim(header, payload_bytes)
        if payload_bytes > MAX_PAGE:
            raise LinkError("probe-bounds", f"probe page of {payload_bytes} bytes, the limit is {MAX_PAGE}")
        return _Scratch(payload_bytes)


class _Scratch:
    def __init__(self, payload_bytes: int) -> None:
        self.view = _scratch[:payload_bytes]

    def publish(self) -> None: ...

    def discard(self) -> None: ...


async def measure(link: Link, interrupted: Callable[[], bool] = lambda: False) -> Reading | None:
    """None when `interrupted()` came true meanwhile: the link has better to do. Raises LinkError when it fails."""
    rtt_s = await _round_trip(link)
    burst = _Burst(link, interrupted)
    try:
        await burst.run()
    finally:
        await burst.stop()
    return None if interrupted() else Reading(rtt_s, burst.bandwidth_bps())


async def _round_trip(link: Link) -> float:
    """The latest control ping's; a new link sends its first at once."""
    deadline = time.monotonic() + ROUND_TRIP_WAIT_S
    while (rtt_s := link.stats.rtt_s) is None:
        if time.monotonic() > deadline:
            raise LinkError("no-answer", f"{link.peer} answered no ping within {ROUND_TRIP_WAIT_S:g} s")
        await asyncio.sleep(0.002)
    return rtt_s


@dataclass
class _Burst:
    link: Link
    interrupted: Callable[[], bool]
    sent: int = 0
    page: int = FIRST_PAGE
    flying: deque[asyncio.Future[None]] = field(default_factory=deque)
    arrived: list[tuple[float, int]] = field(default_factory=list)  # when the peer had how many more bytes

    async def run(self) -> None:
        self.began = time.monotonic()
        deadline = self.began + MAX_S
        while (left := deadline - time.monotonic()) > 0 and not self.interrupted():
            while len(self.flying) < min(FIRST_IN_FLIGHT + len(self.arrived), MAX_IN_FLIGHT) and self.sent < MAX_BYTES:
                self._send()
            if not self.flying:
                return
            await asyncio.wait(self.flying, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            while self.flying and self.flying[0].done():
                self.flying.popleft().result()
        if self.flying and not self.interrupted():
            await asyncio.wait(self.flying, timeout=DRAIN_S)  # or it would delay whatever comes next

    def _send(self) -> None:
        nbytes = min(self.page, MAX_BYTES - self.sent)
        future = self.link.send_page(HEADER, _zeros[:nbytes])
        future.add_done_callback(lambda done: self._arrived(done, nbytes))
        self.flying.append(future)
        self.sent += nbytes
        self.page = min(2 * self.page, MAX_PAGE)

    def _arrived(self, future: asyncio.Future[None], nbytes: int) -> None:
        if not future.cancelled() and future.exception() is None:
            self.arrived.append((time.monotonic(), nbytes))

    async def stop(self) -> None:
        """Call back what is still on its way; nothing of it is read afterwards."""
        for future in self.flying:
            future.cancel()
        if self.flying:
            await asyncio.wait(self.flying)

    def bandwidth_bps(self) -> float:
        """Of what came after the warm-up; of everything where that was too short to say; else what was not reached."""
        if not self.arrived:
            return 8 * FIRST_PAGE / MAX_S
        total, end = sum(nbytes for _, nbytes in self.arrived), self.arrived[-1][0]
        warm = 0
        for moment, nbytes in self.arrived:
            warm += nbytes
            if warm >= WARM_SHARE * total:
                if end - moment >= WARM_SHARE * (end - self.began):
                    return 8 * (total - warm) / (end - moment)
                break
        return 8 * total / (end - self.began)
