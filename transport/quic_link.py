"""One QUIC link: messages on its control stream, pages on streams of their own, the end of both.

Frames of the control stream are those of the TCP link; only `Hello` is sent of the link's own messages, because QUIC
itself acknowledges, pings and says goodbye. Pages are not cut: the engine reads a payload in place and writes an
incoming one into its landing. `link_closed` is called after the engine has let go of every page.

Threads: methods named `on_...` are called on the engine's thread, everything else belongs to the event loop. Bounds:
`MAX_QUEUED_MESSAGES`, `MAX_QUEUED_BYTES` and `MAX_QUEUED_PAGES` waiting to be acknowledged, and those of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from native._quic import ffi, lib
from transport.frames import (
    APPLICATION,
    INTERNAL,
    VERSION,
    FrameReader,
    Hello,
    check_hello,
    check_page,
    decode,
    encode,
    frame,
    malformed,
)
from transport.incoming import wipe
from transport.link import (
    MAX_MESSAGE,
    MAX_QUEUED_BYTES,
    MAX_QUEUED_MESSAGES,
    Landing,
    LinkError,
    LinkOwner,
    PageSink,
    Timing,
)
from transport.mailbox import Mailbox
from transport.outgoing import MAX_QUEUED_PAGES, PageFuture
from transport.quic_engine import Engine
from transport.rate import BandwidthEstimate

FLUSH_S: Final = 1.0  # for the last messages of a closing link
_CRYPTO_ERROR: Final = 0x100  # RFC 9001, 4.8: plus a TLS alert


@dataclass
class QuicStats:
    rtt_s: float | None = None
    bandwidth_bps: float | None = None
    page_bytes_sent: int = 0
    page_bytes_received: int = 0
    pages_sent: int = 0  # acknowledged by the peer
    pages_received: int = 0  # published
    pages_dropped: int = 0  # refused by the sink, or given up by the peer after it began
    datagram_bytes: int = 0  # what the path carries
    streams: int = 1
    streams_reason: str = "one QUIC connection"


@dataclass(eq=False)
class Outgoing:
    future: PageFuture
    payload: memoryview
    pinned: Any  # cffi's hold on `payload`


class LinkHost(Protocol):
    """What a link needs of its endpoint."""

    owner: LinkOwner
    timing: Timing
    mailbox: Mailbox

    @property
    def engine(self) -> Engine: ...

    def link_opening(self, link: QuicLink) -> None:
        """Raises LinkError when the peer has too many links."""

    def link_ended(self, link: QuicLink) -> None: ...


class QuicLink:
    transport = "quic"

    def __init__(self, host: LinkHost, number: int, peer: str, *, connecting: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._number = number
        self._connecting = connecting
        self.peer = peer
        self.stats = QuicStats()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.ended = asyncio.Event()
        self._reader = FrameReader()
        self._greeted = False
        self._error: LinkError | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._queued: deque[int] = deque()  # sizes of the frames that are not acknowledged
        self._queued_bytes = 0
        self._names = itertools.count()
        self._outgoing: dict[int, Outgoing] = {}
        self._rate = BandwidthEstimate()
        # The engine's thread.
        self._sink: PageSink | None = None
        self._landings: dict[int, tuple[Landing, Any]] = {}

    # -- Link

    def send(self, message: bytes) -> None:
        if self._error is not None or not self._greeted:
            raise self._closed()
        if len(message) > MAX_MESSAGE:
            raise LinkError("message-bounds", f"message of {len(message)} bytes, the limit is {MAX_MESSAGE}: split it")
        if len(self._queued) >= MAX_QUEUED_MESSAGES or self._queued_bytes + len(message) > MAX_QUEUED_BYTES:
            raise LinkError("queue-full", f"{len(self._queued)} messages wait already: the peer does not read")
        self._tell(APPLICATION, message)

    def send_page(self, header: bytes, payload: memoryview) -> PageFuture:
        if self._error is not None or not self._greeted:
            raise self._closed()
        check_page(header, payload)
        if len(self._outgoing) >= MAX_QUEUED_PAGES:
            raise LinkError("queue-full", f"{MAX_QUEUED_PAGES} pages wait already: wait for some to leave")
        name, future, view = next(self._names), PageFuture(self._loop), payload.cast("B")
        page = self._outgoing[name] = Outgoing(future, view, ffi.from_buffer("uint8_t[]", view))
        future.stop = lambda: self._post(lambda engine: engine.cancel_page(self._number, name))
        self._rate.busy(time.monotonic())
        self._post(lambda engine: self._on_send_page(engine, name, header, page.pinned))
        return future

    def close(self, reason: str) -> None:
        self.end(LinkError(reason, f"the link to {self.peer} was closed here: {reason}"))

    def _closed(self) -> LinkError:
        if self._error is not None:
            return LinkError(self._error.reason, str(self._error))
        return LinkError("closed", f"the link to {self.peer} is not open yet: wait for link_opened")

    def _post(self, command: Callable[[Engine], None]) -> None:
        engine = self._host.engine
        engine.post(lambda: command(engine))

    def _tell(self, channel: int, body: bytes) -> None:
        data = frame(channel, body)
        self._queued.append(len(data))
        self._queued_bytes += len(data)
        self._post(lambda engine: engine.send_control(self._number, data))

    # -- beginning

    def start(self) -> None:
        """Both sides have proved their keys to this side's engine. The other side's hello says that it accepts."""
        if self._error is None:
            self._tick()
        if self._connecting and self._error is None:
            self._tell(INTERNAL, encode(Hello(VERSION)))

    def _greet(self, channel: int, body: bytes) -> None:
        check_hello(decode(body) if channel == INTERNAL else None, self.peer)
        self._host.link_opening(self)
        if not self._connecting:
            self._tell(INTERNAL, encode(Hello(VERSION)))
        self._greeted = True
        sink = self._host.owner.link_opened(self)
        self._post(partial(self._on_accept, sink))
        if not self.opened.done():
            self.opened.set_result(None)

    def _tick(self) -> None:
        self._post(self._on_measure)
        self._ticker = self._loop.call_later(self._host.timing.ping_s, self._tick)

    # -- what the engine's thread reported

    def control_data(self, data: bytes) -> None:
        try:
            for channel, body in self._reader.feed(data):
                if self._error is not None:
                    return
                if not self._greeted:
                    self._greet(channel, body)
                elif channel == APPLICATION:
                    self._host.owner.link_message(self, body)
                else:
                    raise malformed("a second hello, or a message that QUIC links do not have")
        except LinkError as error:
            self.end(error)
        except Exception as error:  # a bug of the owner's: asyncio ends a TCP connection then
            self.end(LinkError("owner-failed", f"this host's {type(error).__name__} over a message of {self.peer}"))
            raise
        self._post(lambda engine: engine.consumed(self._number, len(data)))

    def control_acked(self, size: int) -> None:
        self._queued_bytes -= size
        while size > 0:
            size -= self._queued.popleft()

    def page_sent(self, name: int, outcome: int) -> None:
        if outcome == lib.QUIC_FAILED and self._error is None:
            return  # `connection_closed` comes next, and knows why
        page = self._outgoing.pop(name)
        size = page.payload.nbytes
        ffi.release(page.pinned)
        page.payload.release()  # its memory may be unmapped from here on
        if outcome in (lib.QUIC_SENT, lib.QUIC_DROPPED):
            self.stats.pages_sent += 1
            self.stats.page_bytes_sent += size
            self._rate.delivered(size, time.monotonic(), idle=not self._outgoing)
            self.stats.bandwidth_bps = self._rate.bps
        failed = self._closed() if outcome == lib.QUIC_FAILED else None
        page.future.settle(cancelled=outcome == lib.QUIC_CANCELLED, error=failed)

    def connection_closed(self, why: int, code: int, reason: str) -> None:
        """The last of the engine's reports."""
        self.end(self._why(why, code, reason))
        for name in list(self._outgoing):  # queued after the engine's link had ended
            self.page_sent(name, lib.QUIC_FAILED)
        assert self._error is not None
        if self._greeted:
            self._host.owner.link_closed(self, self._error.reason)
        self.ended.set()
        self._host.link_ended(self)

    def _why(self, why: int, code: int, reason: str) -> LinkError:
        if why == lib.QUIC_CLOSED_BY_PEER:
            said = reason if reason.isprintable() and reason else "unknown"
            return LinkError(f"peer-closed/{said}", f"{self.peer} closed the link: {said}")
        if why == lib.QUIC_CLOSED_UNTRUSTED:
            hint = "compare `zc-handoff keys show --json` there with `keys list` here"
            return LinkError("wrong-key", f"{self.peer} showed a key that is not the one trusted: {hint}")
        if why == lib.QUIC_CLOSED_REFUSED and _CRYPTO_ERROR <= code < 2 * _CRYPTO_ERROR:
            hint = "is this host's key trusted there? Compare `keys list` there with `keys show --json` here"
            return LinkError("refused", f"{self.peer} refused the handshake (TLS alert {code - _CRYPTO_ERROR}): {hint}")
        if why == lib.QUIC_CLOSED_SILENT:
            silent = f"{self.peer} was silent for {self._host.timing.dead_s:g} s: check host and path"
            return LinkError("peer-unresponsive", silent)
        if why == lib.QUIC_CLOSED_FORGOTTEN:
            return LinkError("connection-lost", f"{self.peer} has restarted and does not know this link any more")
        if why == lib.QUIC_CLOSED_GONE and self._greeted:
            return LinkError("connection-lost", f"{self.peer} has ended: nothing listens at its address any more")
        if why in (lib.QUIC_CLOSED_GONE, lib.QUIC_CLOSED_NO_ANSWER):
            found = "nothing listens there" if why == lib.QUIC_CLOSED_GONE else "no answer"
            hint = "is its daemon running, and UDP let through?"
            return LinkError("unreachable", f"{self.peer} cannot be reached ({found}): {hint}")
        if why == lib.QUIC_CLOSED_HERE:
            return LinkError(reason, f"the link to {self.peer} was closed here: {reason}")
        return malformed(f"{self.peer} broke the link's rules ({reason or f'QUIC error {code:#x}'})")

    def measured(self, rtt_s: float | None, datagram_bytes: int) -> None:
        self.stats.rtt_s = rtt_s
        self.stats.datagram_bytes = datagram_bytes

    # -- the end

    def end(self, error: LinkError) -> None:
        """Idempotent. `connection_closed` follows."""
        if self._error is not None:
            return
        self._error = error
        if self._ticker is not None:
            self._ticker.cancel()
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # perhaps nobody waits: no "never retrieved" in the log
        self._post(lambda engine: engine.close(self._number, error.reason, FLUSH_S))

    # -- the engine's thread

    def _on_accept(self, sink: PageSink, engine: Engine) -> None:
        self._sink = sink
        engine.accept_pages(self._number)

    def _on_measure(self, engine: Engine) -> None:
        path = engine.path(self._number)
        if path is not None:
            self._host.mailbox.post(self.measured, path.rtt_s, path.datagram_bytes)

    def _on_send_page(self, engine: Engine, name: int, header: bytes, pinned: Any) -> None:
        if not engine.send_page(self._number, name, header, pinned):
            self._host.mailbox.post(self._not_sent, name)

    def _not_sent(self, name: int) -> None:
        """The engine's link had ended, which `connection_closed` has reported or will."""
        if name in self._outgoing:
            self.end(LinkError("connection-lost", f"the link to {self.peer} ended"))
            self.page_sent(name, lib.QUIC_FAILED)

    def on_claim(self, page: int, header: bytes, payload_bytes: int) -> Any:
        if self._sink is None:
            return ffi.NULL
        try:
            landing = self._sink.claim(header, payload_bytes)
            if landing is None:
                self.stats.pages_dropped += 1
                return ffi.NULL
            if len(landing.view) != payload_bytes:
                landing.discard()
                raise LinkError("bad-landing", f"landing of {len(landing.view)} bytes for {payload_bytes}")
        except Exception as error:  # whatever the sink thinks of it, no further page may land
            self._on_broken(error)
            return ffi.NULL
        room = ffi.from_buffer("uint8_t[]", landing.view, require_writable=True)
        self._landings[page] = (landing, room)
        return ffi.cast("uint8_t *", room)

    def on_landed(self, page: int) -> None:
        landing, room = self._landings.pop(page)
        size = len(room)
        ffi.release(room)
        try:
            landing.publish()
        except Exception as error:
            self._on_broken(error)
            return
        self.stats.pages_received += 1
        self.stats.page_bytes_received += size

    def on_lost(self, page: int, written: int) -> None:
        landing, room = self._landings.pop(page)
        ffi.release(room)
        wipe(landing.view[:written])
        self.stats.pages_dropped += 1
        # Behind the messages that came before: one of them says why its sender gave the page up.
        self._host.mailbox.post(landing.discard)

    def _on_broken(self, error: Exception) -> None:
        self._sink = None
        reason = getattr(error, "reason", "page-refused")
        self._host.mailbox.post(self.end, LinkError(reason, f"a page from {self.peer} was refused: {error}"))
