"""The one interface every link implements: messages, pages, and where a page lands.

A link joins this host to one authenticated peer. Messages are small, ordered and reliable. A page is an opaque
header (at most `MAX_HEADER` bytes) and a payload of any size; it goes out of, and lands in, shared memory. Order
between pages is kept per link up to the moment they are claimed: `PageSink.claim` is called in sending order.

Threads: everything on `Link` belongs to the event loop's thread; `PageSink.claim` and `Landing` methods are called
from receiver threads (`discard` also from the loop, for a page that is cancelled or left when the link ends). Bounds:
one message, one header and the number of queued messages are limited here; payload memory belongs to the caller on
both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

MAX_HEADER: Final = 256
MAX_MESSAGE: Final = 8 << 20  # a token history of 1M tokens is 4 MiB; a manifest of a long prompt well below
MAX_QUEUED_MESSAGES: Final = 4096
MAX_QUEUED_BYTES: Final = 8 * MAX_MESSAGE  # of those messages
MAX_LINKS_PER_PEER: Final = 8  # a peer that restarts may come back before its old link was found dead


class LinkError(Exception):
    """The link failed or was refused. `reason` is a stable slug; the message names the peer and the next step."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Timing:
    """Seconds. A dead peer is noticed after at most `dead_s + ping_s`."""

    ping_s: float = 1.0
    dead_s: float = 10.0
    greet_s: float = 5.0  # for a stranger to prove its key, and for a peer to answer a connect


class Landing(Protocol):
    """Room for one incoming page in shared memory. Exactly one of `publish` and `discard` is called, once."""

    view: memoryview  # writable, exactly the payload's length; the link writes each byte once

    def publish(self) -> None:
        """Every byte has arrived and every authentication tag verified."""

    def discard(self) -> None:
        """The page will not complete; the room is free again."""


class PageSink(Protocol):
    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        """Room for a page, or None to drop it (a dead epoch). Raising means the peer broke the protocol: the
        link closes. Nothing is allocated for a page before this call; the header is authenticated, not trusted.
        Must not wait: other pages of the link wait for it."""


class LinkOwner(Protocol):
    """Who is told about links. All calls on the event loop's thread, except through the sink."""

    def link_opened(self, link: Link) -> PageSink: ...

    def link_message(self, link: Link, message: bytes) -> None: ...

    def link_closed(self, link: Link, reason: str) -> None:
        """Last call for this link. No page memory of it, sent or landing, is touched from now on."""


class LinkStats(Protocol):
    """Counters since the link opened. `rtt_s` is the latest control round trip, `bandwidth_bps` what recent pages
    reached; None before the first."""

    rtt_s: float | None
    bandwidth_bps: float | None
    page_bytes_sent: int
    page_bytes_received: int
    pages_dropped: int
    streams: int  # bulk connections now, and why so many
    streams_reason: str


class Link(Protocol):
    peer: str  # the name under which the peer's key is trusted
    transport: str  # "tcp" or "quic"

    @property
    def stats(self) -> LinkStats: ...

    def send(self, message: bytes) -> None:
        """Queue one message. Raises LinkError when the link is closed or the queue is at its bound."""

    def send_page(self, header: bytes, payload: memoryview) -> asyncio.Future[None]:
        """Queue one page. The future resolves once `payload` may be reused, or fails with LinkError; cancelling
        it stops the page at the next record and *still resolves only when* `payload` is no longer read."""

    def close(self, reason: str) -> None: ...


def check_share(link: Link, links: Iterable[Link]) -> None:
    """Raises LinkError when the peer of `link`, which is one of an endpoint's `links`, has more than it may."""
    alike = sum(other.peer == link.peer for other in links)
    if alike > MAX_LINKS_PER_PEER:
        raise LinkError("too-many-links", f"{link.peer} has {alike - 1} links already: close some")


class Endpoint(Protocol):
    """Listens and connects. `advertised` addresses are what peers are told; bind and advertise are separate."""

    async def listen(self, address: str) -> str:
        """Bind `host:port` (port 0 picks one); returns the bound address."""

    async def connect(self, peer: str, address: str) -> Link: ...

    async def close(self) -> None: ...
