"""One bulk TCP connection of a link: a thread that seals and sends, a thread that receives and unseals.

Two large calls a record on each side, both without the GIL: `encrypt_into` from the page into staging and `sendall`;
`recv_into` to staging and `decrypt_into` to the landing. Staging holds ciphertext only. `stop` shuts the socket down,
which ends both threads wherever they wait.

Owns the socket, the two threads and their staging (about two records). Owns no page.
"""

from __future__ import annotations

import mmap
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from transport.frames import (
    MAX_ANNOUNCEMENT,
    MAX_RECORD,
    OPENING,
    RECORD_HEADER,
    TAG,
    KeyChain,
    Kind,
    PageShape,
    RecordHeader,
    malformed,
    seal,
    unseal,
)
from transport.incoming import IncomingPages, wipe
from transport.link import LinkError
from transport.outgoing import OutgoingPage, OutgoingPages
from transport.tcp_info import TcpInfo, read_tcp_info

SOCKET_BUFFER: Final = 4 << 20
_STREAM_REASONS: Final = frozenset({"stream-lost", "stream-stalled"})  # end this stream, not the link


def tune(sock: socket.socket, timeout_s: float, congestion: str | None) -> None:
    """For an authenticated bulk connection: never for a stranger, whose bytes would fill these buffers."""
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, sysctl in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if _buffer_limit(sysctl) >= SOCKET_BUFFER:  # a clamped request would only turn the kernel's own tuning off
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    if congestion is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def _buffer_limit(sysctl: str) -> int:
    try:
        return int(Path("/proc/sys/net/core", sysctl).read_text())
    except OSError:
        return SOCKET_BUFFER  # not Linux: the kernel takes what it can


def _staging(size: int) -> memoryview:
    """Pre-faulted, page-aligned memory outside Python's heap."""
    view = memoryview(mmap.mmap(-1, size))
    wipe(view)
    return view


class BulkStream:
    def __init__(
        self,
        sock: socket.socket,
        keys: tuple[KeyChain, KeyChain],
        pages: tuple[OutgoingPages, IncomingPages],
        failed: Callable[[LinkError], None],
        ended: Callable[[BulkStream], None],
        label: str,
        timeout_s: float,
    ) -> None:
        """`keys` are (to send, to receive), both past their OPEN record. `failed` is called by a thread whose error is
        to end the link, `ended` by the last thread. A record that has begun to arrive must go on within `timeout_s`."""
        self._sock = sock
        self._send_keys, self._receive_keys = keys
        self._outgoing, self._incoming = pages
        self._failed = failed
        self._ended = ended
        self._timeout_s = timeout_s
        self._low_water = 1
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._lock = threading.Lock()
        self._running = 2
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"zc-{kind} {label}", daemon=True)
            for kind, work in (("send", self._send), ("receive", self._receive))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads soon. Any thread, any number of times."""
        self._stopped = True
        self._outgoing.leave(self)
        self._incoming.wake()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def info(self) -> TcpInfo | None:
        return read_tcp_info(self._sock)

    def _is_stopped(self) -> bool:
        return self._stopped

    def release(self) -> None:
        """After `ended`: the threads are as good as gone."""
        for thread in self._threads:
            thread.join()
        self._sock.close()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            error = None
        except LinkError as failure:
            error = LinkError(failure.reason, str(failure))  # without its traceback, whose frames hold landing views
        except BlockingIOError:
            error = LinkError("stream-stalled", "the peer took no data for the whole time limit: is it overloaded?")
        except OSError as failure:
            error = LinkError("stream-lost", f"a bulk connection was lost ({failure}): check the path")
        except Exception as failure:  # the sink's own: its reason says what the peer did
            error = LinkError(getattr(failure, "reason", "sink-failed"), str(failure) or repr(failure))
        if error is not None and error.reason not in _STREAM_REASONS:
            self._failed(error)  # before the peer sees this stream end: it would send the page again over another
        self.stop()
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._ended(self)

    # -- sender thread

    def _send(self) -> None:
        staging = _staging(OPENING + RECORD_HEADER + MAX_ANNOUNCEMENT + TAG + RECORD_HEADER + MAX_RECORD + TAG)
        current: OutgoingPage | None = None
        while (work := self._outgoing.take(self)) is not None:
            page, index = work
            record = page.shape.record(page.number, index)
            try:
                size = self._seal_next(page, record, page is not current, staging)
            finally:
                self._outgoing.read(page, record.length)
            current = page
            self._sock.sendall(staging[:size])

    def _seal_next(self, page: OutgoingPage, record: RecordHeader, announce: bool, staging: memoryview) -> int:
        """Everything that must go out for one record of `page`, into staging; returns its size."""
        size = 0
        keys, announcement = self._send_keys, page.shape.packed
        if keys.worn:
            size += seal(keys, RecordHeader(Kind.REKEY, False, 0, 0, 0), b"", b"", staging)
            keys.advance()
        if announce:
            header = RecordHeader(Kind.PAGE, False, len(announcement), page.number, 0)
            size += seal(keys, header, announcement, b"", staging[size:])
        payload = page.payload[record.offset : record.offset + record.length]
        return size + seal(keys, record, payload, announcement, staging[size:])

    # -- receiver thread

    def _receive(self) -> None:
        staging = _staging(RECORD_HEADER + MAX_RECORD + TAG + RECORD_HEADER)
        number, shape, filled = -1, PageShape(0, 1, b""), 0
        while filled := self._fill(staging, filled, RECORD_HEADER, RECORD_HEADER):
            head = bytes(staging[:RECORD_HEADER])
            record = RecordHeader.unpack(head)
            end = RECORD_HEADER + record.length + TAG
            filled = self._fill(staging, filled, end, end + RECORD_HEADER)
            sealed = staging[RECORD_HEADER:end]
            if record.kind == Kind.DATA and record.page == number:
                self._land(record, head, shape, sealed)
            elif record.kind == Kind.PAGE:
                number, shape = record.page, self._announced(record, head, sealed)
            elif record.kind == Kind.REKEY:
                unseal(self._receive_keys, head, sealed, b"", sealed[:0])
                self._receive_keys.advance()
            else:
                raise malformed(f"record of kind {record.kind.name} for page {record.page} while page {number} is open")
            filled -= end
            staging[:filled] = staging[end : end + filled]

    def _announced(self, record: RecordHeader, head: bytes, sealed: memoryview) -> PageShape:
        announcement = memoryview(bytearray(record.length))
        unseal(self._receive_keys, head, sealed, b"", announcement)
        return self._incoming.announce(record.page, bytes(announcement))

    def _land(self, record: RecordHeader, head: bytes, shape: PageShape, sealed: memoryview) -> None:
        into = self._incoming.begin(record.page, shape.index_of(record), record, self._is_stopped)
        if into is None:
            scratch = memoryview(mmap.mmap(-1, record.length))  # rare: a dropped page, or one that came twice
            try:
                unseal(self._receive_keys, head, sealed, shape.packed, scratch)
            finally:
                wipe(scratch)
            return
        unseal(self._receive_keys, head, sealed, shape.packed, into)
        self._incoming.finish(record.page)

    def _fill(self, staging: memoryview, filled: int, least: int, most: int) -> int:
        """Receive until at least `least` of `staging` is filled, and up to `most` of what is there; returns how much
        is. 0 if the connection ended between two records, where alone it may stay silent without limit.

        The kernel wakes this thread when all that is missing has come, not for every segment: on loopback that was a
        tenth of both hosts' work. It must not wait inside `recv`, which goes on waiting for so much after taking some.
        """
        while filled < least:
            if least - filled != self._low_water:
                self._low_water = least - filled
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._low_water)
            came = self._poll.poll(1000 * self._timeout_s)
            try:
                count = self._sock.recv_into(staging[filled:most], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if came or not filled:
                    continue
                raise
            if not count:
                if not filled:
                    return 0
                raise LinkError("stream-lost", "a bulk connection ended inside a record: check the path")
            filled += count
        return filled
