"""The faults that other tests plant are what they say."""

from __future__ import annotations

import asyncio
import struct

import pytest

from transport.frames import PREAMBLE, RECORD_HEADER, TAG

from .conftest import Run
from .meddler import Fault, cut, drop, duplicate, flip, meddled, swap, truncate, truncate_pieces, untouched

A, B, C = (
    struct.pack("<BBHIQQ", 3, 0, 0, size, 0, 0) + bytes([mark]) * (size + TAG)
    for mark, size in ((1, 0), (2, 9), (3, 70))
)
P = b"ZCB1" + b"i" * 16


async def through(fault: Fault, data: bytes) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return b"".join([piece async for piece in fault(cut(reader))])


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (untouched, P + A + B + C),
        (truncate(0), b""),
        (truncate(PREAMBLE + 7), P + A[:7]),
        (truncate_pieces(2), P + A),
        (duplicate(0), P + P + A + B + C),
        (duplicate(2), P + A + B + B + C),
        (drop(1), P + B + C),
        (swap(1), P + B + A + C),
        (swap(2), P + A + C + B),
        (flip(0), b"[" + (P + A + B + C)[1:]),
        (flip(PREAMBLE + RECORD_HEADER, 0x80), P + A[:RECORD_HEADER] + b"\x81" + A[RECORD_HEADER + 1 :] + B + C),
    ],
)
def test_each_fault_changes_exactly_what_it_names(run: Run, fault: Fault, expected: bytes) -> None:
    async def work() -> None:
        assert await through(fault, P + A + B + C) == expected

    run(work())


def test_the_proxy_forwards_both_ways_untouched_and_severs_on_request(run: Run) -> None:
    async def work() -> None:
        echoed = await asyncio.start_server(_echo, "127.0.0.1", 0)
        port = echoed.sockets[0].getsockname()[1]
        async with meddled(f"127.0.0.1:{port}") as (meddler, address):
            for hello in (P + A + B, b"\x16tls or whatever else"):
                reader, writer = await asyncio.open_connection(*address.split(":"))
                writer.write(hello)
                assert await reader.readexactly(len(hello)) == hello
            assert meddler.bulk == 1 and b"".join(meddler.sent) == P + A + B
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(P + A)
            await reader.readexactly(len(P + A))
            meddler.sever()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        echoed.close()

    run(work())


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()
