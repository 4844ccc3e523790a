"""One TCP link: a control connection, its bulk streams, and the pages on both.

The connecting side opens the streams and replaces lost ones; both sides send on all of them. A link ends as a whole on
a broken protocol, a failed tag, a silent peer, or when no stream could be had for `dead_s`; `link_closed` is called
after the last thread has ended, so from then on no page memory is touched.

Everything here runs on the event loop; threads speak through the mailbox. Bounds: `MAX_STREAMS`, and those of the
modules it joins.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import socket
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from transport.address import SocketAddress
from transport.dial import dial
from transport.frames import (
    APPLICATION,
    ID_BYTES,
    INTERNAL,
    OPENING,
    RECORD_HEADER,
    SECRET_BYTES,
    VERSION,
    WINDOW,
    Announce,
    Bye,
    Cancel,
    Done,
    Hello,
    Internal,
    KeyChain,
    Kind,
    OpenStream,
    Ping,
    Pong,
    RecordHeader,
    StreamReady,
    check_hello,
    decode,
    encode,
    key_chains,
    malformed,
    preamble,
    seal,
    unseal,
)
from transport.incoming import IncomingPages
from transport.keys import KeyStore
from transport.link import LinkError, LinkOwner, Timing
from transport.mailbox import Mailbox
from transport.outgoing import OutgoingPage, OutgoingPages, PageFuture
from transport.stats import TcpStats
from transport.streams import StreamCount
from transport.tcp_bulk import BulkStream, tune
from transport.tcp_control import Control
from transport.tcp_info import TcpInfo

MAX_STREAMS: Final = 16
# Acknowledgements leave at least this far apart; pages that complete meanwhile share one. Each costs a wake-up,
# a TLS record and a system call on both sides: a tenth of all CPU time at 2 MiB a page. At 10 Gb/s it holds 2.5 MB of a
# sender's ring.
ACK_DELAY_S: Final = 0.002
_FLUSH_S: Final = 1.0  # for the last frames of a closing control connection
_OPEN: Final = RecordHeader(Kind.OPEN, False, 0, 0, 0)


class LinkHost(Protocol):
    """What a link needs of its endpoint."""

    keys: KeyStore
    owner: LinkOwner
    timing: Timing
    record_bytes: int
    key_bytes: int
    congestion: str | None
    expected: dict[bytes, tuple[TcpLink, bytes]]  # stream id -> who waits for it, secret

    def link_opening(self, link: TcpLink) -> None:
        """Raises LinkError when the peer has too many links."""

    def link_ended(self, link: TcpLink) -> None: ...


class TcpLink:
    transport = "tcp"

    def __init__(self, host: LinkHost, *, connecting: tuple[str, SocketAddress, StreamCount] | None) -> None:
        """`connecting` is (peer, address, streams) on the side that connects."""
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._connecting = connecting
        self.peer = connecting[0] if connecting else ""
        self.stats = TcpStats()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.ended = asyncio.Event()
        self._mailbox = Mailbox(self._loop)
        self._outgoing = OutgoingPages(host.record_bytes, self.stats, self._page_stopped)
        self._incoming: IncomingPages | None = None
        self._control: Control | None = None
        self._streams: set[BulkStream] = set()
        self._ready: dict[bytes, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._acks: deque[int] = deque()
        self._ack_due = False
        self._acked = 0.0  # when acknowledgements left last
        self._error: LinkError | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._ping = (0, 0.0)
        self._shortest_rtt_s = math.inf
        self._moved = (time.monotonic(), 0, 0)  # when, and page bytes sent and received by then
        self._heard = 0
        self._silent_ticks = 0
        self._dry_ticks = 0

    # -- Link

    def send(self, message: bytes) -> None:
        if self._error is not None or self._incoming is None or self._control is None:
            raise self._closed()
        self._control.send(APPLICATION, message)

    def send_page(self, header: bytes, payload: memoryview) -> PageFuture:
        if self._error is not None or self._incoming is None:
            raise self._closed()
        return self._outgoing.put(header, payload, self._loop)

    def tcp_info(self) -> list[TcpInfo]:
        """The kernel's view of each bulk connection that is up."""
        return [info for stream in self._streams if (info := stream.info()) is not None]

    def close(self, reason: str) -> None:
        self._end(LinkError(reason, f"the link to {self.peer} was closed here: {reason}"))

    def _closed(self) -> LinkError:
        if self._error is not None:
            return LinkError(self._error.reason, str(self._error))
        return LinkError("closed", f"the link to {self.peer} is not open yet: wait for link_opened")

    # -- control connection

    def control_opened(self, control: Control) -> None:
        if self._error is not None:
            control.fail(self._error)
            return
        self._control = control
        peer = self._host.keys.peer_of(control.certificate)
        if peer is None or (self._connecting and peer != self.peer):
            control.fail(LinkError("wrong-key", f"the other side's key is not that of {self.peer or 'a trusted peer'}"))
            return
        self.peer = peer
        control.send(INTERNAL, encode(Hello(VERSION)))

    def control_frame(self, channel: int, body: bytes) -> None:
        try:
            if self._incoming is None:
                self._greeted(decode(body) if channel == INTERNAL else None)
            elif channel == APPLICATION:
                self._host.owner.link_message(self, body)
            else:
                self._internal(decode(body))
        except LinkError as error:
            self._end(error)

    def control_broken(self, error: LinkError) -> None:
        self._end(error)

    def _greeted(self, message: Internal | None) -> None:
        if isinstance(message, Bye):
            raise LinkError(f"peer-closed/{message.reason}", f"{self.peer} refused the link: {message.reason}")
        check_hello(message, self.peer)
        self._host.link_opening(self)
        sink = self._host.owner.link_opened(self)
        self._incoming = IncomingPages(sink, self.stats, self._acknowledge, self._host.timing.dead_s)
        self._tick()
        if not self.opened.done():
            self.opened.set_result(None)

    def _internal(self, message: Internal) -> None:
        assert self._incoming is not None
        match message:
            case Ping(number):
                self._tell(Pong(number))
            case Pong(number):
                if number == self._ping[0]:
                    self._measured(time.monotonic() - self._ping[1])
            case Done(pages):
                self._outgoing.acknowledge(pages)
            case Announce(page, announcement):
                self._incoming.announce(page, announcement)
            case Cancel(page):
                self._incoming.cancel(page)
            case OpenStream(stream_id, secret) if not self._connecting:
                self._expect(stream_id, secret)
            case StreamReady(stream_id) if stream_id in self._ready:
                if not self._ready[stream_id].done():
                    self._ready[stream_id].set_result(None)
            case StreamReady() if self._connecting:
                return  # answered after this side gave up waiting
            case Bye(reason):
                self._end(LinkError(f"peer-closed/{reason}", f"{self.peer} closed the link: {reason}"))
            case _:
                raise malformed(f"{type(message).__name__} from the wrong side")

    def control_lost(self, error: LinkError) -> None:
        self._control = None
        self._end(error)
        self._finish()

    def _tell(self, message: Internal) -> None:
        if self._error is None and self._control is not None:
            try:
                self._control.send(INTERNAL, encode(message))
            except LinkError as error:
                self._end(error)

    # -- liveness

    def _tick(self) -> None:
        timing = self._host.timing
        heard = self._control.frames_received if self._control is not None else 0
        self._silent_ticks = self._silent_ticks + 1 if heard == self._heard else 0
        self._dry_ticks = 0 if self._streams else self._dry_ticks + 1
        self._heard = heard
        # Ticks are counted, not seconds: a host that was suspended itself must not blame its peers on waking.
        if self._silent_ticks * timing.ping_s >= timing.dead_s:
            silent = f"{self.peer} was silent for {timing.dead_s:g} s: check host and path"
            self._end(LinkError("peer-unresponsive", silent))
        elif self._dry_ticks * timing.ping_s >= timing.dead_s:
            self._end(LinkError("streams-lost", f"no bulk connection with {self.peer} for {timing.dead_s:g} s"))
        else:
            self._ping = (self._ping[0] + 1, time.monotonic())  # uvloop caches `loop.time`
            self._tell(Ping(self._ping[0]))
            self._ticker = self._loop.call_later(timing.ping_s, self._tick)

    # -- streams: the listening side

    def _expect(self, stream_id: bytes, secret: bytes) -> None:
        if stream_id in self._host.expected:
            raise malformed("a stream id that is taken already")
        mine = [key for key, (link, _) in self._host.expected.items() if link is self]
        if len(mine) + len(self._streams) >= MAX_STREAMS:
            if not mine:
                raise malformed(f"more than {MAX_STREAMS} streams")
            del self._host.expected[mine[0]]  # the peer gave up on it, or it was lost before it came
        self._host.expected[stream_id] = (self, secret)
        self._tell(StreamReady(stream_id))

    # -- streams: the connecting side

    async def open_streams(self) -> None:
        assert self._connecting is not None
        streams = self._connecting[2]
        for _ in range(streams.count):
            await self._open_stream()
        self.stats.streams_reason = streams.reason

    def _measured(self, rtt_s: float) -> None:
        """A long path may need more streams than this link began with."""
        self.stats.rtt_s = rtt_s
        # Where the kernel tells, of the path alone: a ping also waits for two event loops, and for a transfer's queues.
        self._shortest_rtt_s = min([rtt_s, self._shortest_rtt_s, *(info.shortest_rtt_s for info in self.tcp_info())])
        moved = (time.monotonic(), self.stats.page_bytes_sent, self.stats.page_bytes_received)
        seconds, *nbytes = (now - before for now, before in zip(moved, self._moved, strict=True))
        self._moved = moved
        if self._connecting is None or not self._streams:
            return
        streams = self._connecting[2]
        if streams.observe(self._shortest_rtt_s, 8 * max(nbytes) / seconds):  # the busier direction
            self.stats.streams_reason = streams.reason
            self._spawn(self._add_stream())

    async def _open_stream(self) -> None:
        """Raises LinkError or OSError if no authenticated stream could be had."""
        if self._error is not None:
            raise self._closed()
        stream_id, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        ready = self._ready[stream_id] = self._loop.create_future()
        try:
            self._tell(OpenStream(stream_id, secret))
            async with asyncio.timeout(self._host.timing.greet_s):
                await ready
                await self._dial(stream_id, secret)
        except TimeoutError:
            raise LinkError("stream-refused", f"{self.peer} did not answer a bulk connection in time") from None
        finally:
            del self._ready[stream_id]

    async def _dial(self, stream_id: bytes, secret: bytes) -> None:
        assert self._connecting is not None
        sock = await dial(self._connecting[1])
        try:
            keys = key_chains(secret, stream_id, connecting=True, key_bytes=self._host.key_bytes)
            await self._loop.sock_sendall(sock, preamble(stream_id) + opening(keys[0], stream_id))
            answer = await receive_exactly(self._loop, sock, OPENING)
            check_opening(keys[1], stream_id, answer)
            self.adopt(sock, keys)
        except BaseException:
            sock.close()
            raise

    async def _add_stream(self) -> None:
        pause = 0.05
        while self._error is None:
            try:
                await self._open_stream()
                return
            except (LinkError, OSError):
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)

    # -- streams: both sides

    def adopt(self, sock: socket.socket, keys: tuple[KeyChain, KeyChain]) -> None:
        """Take over an authenticated bulk connection. Raises LinkError if the link is closing."""
        if self._error is not None or self._incoming is None:
            raise self._closed()
        timeout_s = self._host.timing.dead_s
        tune(sock, timeout_s, self._host.congestion)
        pages = (self._outgoing, self._incoming)
        stream = BulkStream(sock, keys, pages, self._stream_failed, self._stream_done, self.peer, timeout_s)
        self._streams.add(stream)
        self.stats.streams = len(self._streams)
        stream.start()

    def _stream_failed(self, error: LinkError) -> None:
        self._mailbox.post(self._end, error)

    def _stream_done(self, stream: BulkStream) -> None:
        self._mailbox.post(self._stream_ended, stream)

    def _stream_ended(self, stream: BulkStream) -> None:
        stream.release()
        self._streams.discard(stream)
        self.stats.streams = len(self._streams)
        if self._error is not None:
            self._finish()
            return
        self.stats.streams_lost += 1
        for page in self._outgoing.lose(stream):
            self._tell(Announce(page.number, page.shape.packed))
        if self._connecting:
            self._spawn(self._add_stream())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- pages: from threads to the peer

    def _acknowledge(self, number: int) -> None:
        self._acks.append(number)
        if not self._ack_due:
            self._ack_due = True
            self._mailbox.post(self._schedule_acks)

    def _schedule_acks(self) -> None:
        wait_s = self._acked + ACK_DELAY_S - time.monotonic()
        if wait_s > 0:
            self._loop.call_later(wait_s, self._send_acks)
        else:
            self._send_acks()

    def _send_acks(self) -> None:
        self._ack_due = False  # first: a page that completes from here on asks for another round
        self._acked = time.monotonic()
        while self._acks and self._error is None:
            count = min(len(self._acks), WINDOW)
            self._tell(Done(tuple(self._acks.popleft() for _ in range(count))))

    def _page_stopped(self, page: OutgoingPage) -> None:
        self._mailbox.post(self._settle, page)

    def _settle(self, page: OutgoingPage) -> None:
        if self._outgoing.settle(page):
            self._tell(Cancel(page.number))

    # -- the end

    def _end(self, error: LinkError) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._control is not None and not error.reason.startswith("peer-closed/"):
            with contextlib.suppress(LinkError):
                self._control.send(INTERNAL, encode(Bye(error.reason)))
        if self._ticker is not None:
            self._ticker.cancel()
        for task in self._tasks:
            task.cancel()
        for stream_id in [key for key, (link, _) in self._host.expected.items() if link is self]:
            del self._host.expected[stream_id]
        for waiting in (self.opened, *self._ready.values()):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # perhaps nobody waits: no "never retrieved" in the log
        self._outgoing.close(error)
        for stream in self._streams:
            stream.stop()
        if self._control is not None:
            self._control.fail(error, flush=True)
            self._loop.call_later(_FLUSH_S, self._control.fail, error)
        self._mailbox.post(self._finish)  # not at once: the owner may have called `close` from within a callback

    def _finish(self) -> None:
        """Once nothing runs any more."""
        if self._streams or self._error is None:
            return
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.close()
            self._host.owner.link_closed(self, self._error.reason)
        if self._control is None and not self.ended.is_set():
            self.ended.set()
            self._host.link_ended(self)


# -- the first record of a bulk connection, each way


def opening(keys: KeyChain, stream_id: bytes) -> bytes:
    record = memoryview(bytearray(OPENING))
    seal(keys, _OPEN, b"", preamble(stream_id), record)
    return bytes(record)


def check_opening(keys: KeyChain, stream_id: bytes, record: bytes) -> None:
    """Raises LinkError unless the other side holds the stream's secret."""
    if RecordHeader.unpack(record) != _OPEN:
        raise malformed("the first record was no OPEN")
    empty = memoryview(bytearray(0))
    unseal(keys, record[:RECORD_HEADER], memoryview(record)[RECORD_HEADER:], preamble(stream_id), empty)


async def receive_exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise LinkError("stream-refused", "the other side closed a bulk connection before its first record")
        data += more
    return data
