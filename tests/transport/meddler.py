"""A TCP proxy between two endpoints that leaves control connections alone and meddles with bulk ones.

It knows the cleartext of the wire (preamble, record headers) and no key: what an attacker on the path, or a broken
path, can do. One fault is planted on the first bulk connection; later ones pass, or are refused with `then_refuse`.
Tested itself in `test_meddler.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from transport.frames import PREAMBLE, RECORD_HEADER, TAG

Pieces = AsyncIterator[bytes]
Fault = Callable[[Pieces], Pieces]


async def untouched(pieces: Pieces) -> Pieces:
    async for piece in pieces:
        yield piece


def flip(position: int, mask: int = 0x01) -> Fault:
    """One bit of the byte at `position` of the connection."""

    async def fault(pieces: Pieces) -> Pieces:
        start = 0
        async for piece in pieces:
            if start <= position < start + len(piece):
                changed = bytearray(piece)
                changed[position - start] ^= mask
                piece = bytes(changed)
            start += len(piece)
            yield piece

    return fault


def truncate(after: int) -> Fault:
    """The connection ends after `after` bytes."""

    async def fault(pieces: Pieces) -> Pieces:
        left = after
        async for piece in pieces:
            yield piece[:left]
            left -= len(piece[:left])
            if not left:
                return

    return fault


def truncate_pieces(after: int) -> Fault:
    """The connection ends after `after` pieces: the preamble, then record by record."""

    async def fault(pieces: Pieces) -> Pieces:
        count = 0
        async for piece in pieces:
            yield piece
            count += 1
            if count == after:
                return

    return fault


def duplicate(index: int) -> Fault:
    """Piece `index` comes twice."""

    async def fault(pieces: Pieces) -> Pieces:
        count = 0
        async for piece in pieces:
            yield piece * 2 if count == index else piece
            count += 1

    return fault


def drop(index: int) -> Fault:
    async def fault(pieces: Pieces) -> Pieces:
        count = 0
        async for piece in pieces:
            if count != index:
                yield piece
            count += 1

    return fault


def swap(index: int) -> Fault:
    """Piece `index` comes after the next one."""

    async def fault(pieces: Pieces) -> Pieces:
        count, held = 0, b""
        async for piece in pieces:
            if count == index:
                held = piece
            else:
                yield piece + held
                held = b""
            count += 1

    return fault


async def cut(reader: asyncio.StreamReader) -> Pieces:
    """The connecting side's bytes: preamble, then whole records."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        yield await reader.readexactly(PREAMBLE)
        while True:
            header = await reader.readexactly(RECORD_HEADER)
            (length,) = struct.unpack_from("<I", header, 4)
            yield header + await reader.readexactly(length + TAG)


@dataclass
class Meddler:
    target: str
    fault: Fault = untouched
    then_refuse: bool = False
    bulk: int = 0  # bulk connections seen
    sent: list[bytes] = field(default_factory=list)  # what the first one carried towards the target, as forwarded
    paused: bool = False  # nothing passes, nothing is closed
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _bulk_writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def close(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def sever(self) -> None:
        """Reset every bulk connection there is now."""
        for writer in self._bulk_writers:
            with contextlib.suppress(OSError):
                writer.transport.abort()
        self._bulk_writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._relay(reader, writer)
        except RuntimeError as error:
            if "the handler is closed" not in str(error):  # uvloop's word for a connection that has just gone
                raise

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(1)
        bulk = first == b"Z"
        self.bulk += bulk
        number = self.bulk
        if bulk and self.then_refuse and number > 1:
            writer.transport.abort()
            return
        reader._buffer[:0] = first  # type: ignore[attr-defined]  # back where it was
        host, port = self.target.rsplit(":", 1)
        there, out = await asyncio.open_connection(host, int(port))
        for end in (writer, out):
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._writers |= {writer, out}
        if bulk:
            self._bulk_writers += [writer, out]
        fault = self.fault if number == 1 else untouched
        pieces = fault(cut(reader)) if bulk else self._chunks(reader)
        keep = self.sent if bulk and number == 1 else None
        await asyncio.gather(self._forward(pieces, out, keep), self._forward(self._chunks(there), writer, None))
        self._writers -= {writer, out}

    async def _chunks(self, reader: asyncio.StreamReader) -> Pieces:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                yield data

    async def _forward(self, pieces: Pieces, writer: asyncio.StreamWriter, keep: list[bytes] | None) -> None:
        with contextlib.suppress(ConnectionError):
            async for piece in pieces:
                while self.paused:
                    await asyncio.sleep(0.01)
                if keep is not None:
                    keep.append(piece)
                writer.write(piece)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def meddled(
    target: str, fault: Fault = untouched, *, then_refuse: bool = False
) -> AsyncIterator[tuple[Meddler, str]]:
    """(proxy, its address)."""
    meddler = Meddler(target, fault, then_refuse)
    try:
        yield meddler, await meddler.start()
    finally:
        await meddler.close()
