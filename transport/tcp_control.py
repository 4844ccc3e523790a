"""The control connection of a link: frames over TLS, in order, bounded.

`Control` is an asyncio protocol; it cuts and joins frames, bounds what waits to be sent, and tells its user. It knows
no links.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol, cast

from transport.frames import FrameReader, frame
from transport.link import MAX_MESSAGE, MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES, LinkError

_WRITE_BUFFER: Final = 1 << 20


class ControlUser(Protocol):
    def control_opened(self, control: Control) -> None:
        """TLS is up; `control.certificate` proved its key (the server's) or soon will have (the client's)."""

    def control_frame(self, channel: int, body: bytes) -> None: ...

    def control_broken(self, error: LinkError) -> None:
        """The peer sent a frame out of bounds; nothing after it is read."""

    def control_lost(self, error: LinkError) -> None: ...


class Control(asyncio.Protocol):
    def __init__(self, user: ControlUser) -> None:
        self._user = user
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._paused = False
        self._error: LinkError | None = None
        self.certificate: bytes | None = None
        self.frames_received = 0

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is none of asyncio's
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        self.certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        self._user.control_opened(self)

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        try:
            for channel, body in self._reader.feed(data):
                self.frames_received += 1
                self._user.control_frame(channel, body)
                if self._error is not None:
                    return
        except LinkError as error:
            self._user.control_broken(error)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        while self._queue and not self._paused and self._transport is not None:
            data = self._queue.popleft()
            self._queued_bytes -= len(data)
            self._transport.write(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._error is None:
            why = f" ({exc})" if exc is not None else ""
            self._error = LinkError("connection-lost", f"the peer's control connection ended{why}: is it running?")
        self._transport = None
        self._queue.clear()
        self._user.control_lost(self._error)

    # -- the link

    def send(self, channel: int, body: bytes) -> None:
        """Raises LinkError when closed, over `MAX_MESSAGE`, or at the bound of what may wait."""
        if self._error is not None or self._transport is None:
            raise self._error or LinkError("closed", "the control connection is not open")
        if len(body) > MAX_MESSAGE:
            raise LinkError("message-bounds", f"message of {len(body)} bytes, the limit is {MAX_MESSAGE}: split it")
        data = frame(channel, body)
        if not self._paused:
            self._transport.write(data)
            return
        if len(self._queue) >= MAX_QUEUED_MESSAGES or self._queued_bytes + len(data) > MAX_QUEUED_BYTES:
            raise LinkError("queue-full", f"{len(self._queue)} messages wait already: the peer does not read")
        self._queue.append(data)
        self._queued_bytes += len(data)

    def fail(self, error: LinkError, *, flush: bool = False) -> None:
        """End the connection; `control_lost(error)` follows. `flush` gives what was written a chance to leave."""
        if self._error is None:
            self._error = error
        if self._transport is not None:
            if flush:
                self._transport.close()
            else:
                self._transport.abort()
