"""What is TCP's own: its keys per connection, and streams of one link that break while pages fly (T1, H6, X1)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from pathlib import Path

import pytest

from transport import tcp
from transport.address import SocketAddress
from transport.dial import dial
from transport.link import LinkError

from .conftest import Run
from .hosts import QUICK, Host, linked, pattern, sockets, two_hosts
from .meddler import meddled

RECORD = 16 << 10


def test_keys_are_renewed_long_before_their_limit_and_nothing_is_noticed(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path, record_bytes=RECORD, key_bytes=3 * RECORD) as (_, b, link):
            page = pattern(5 << 20)
            await link.send_page(b"page", page)
            assert b.landings.payload(b"page") == page
            assert link.stats.streams_lost == 0

    run(work())


def test_streams_may_break_again_and_again_while_pages_fly(run: Run, tmp_path: Path) -> None:
    """Every page arrives exactly once, in claim order, whatever was under way when a stream was cut (issue 3)."""

    async def work() -> None:
        chance = random.Random(7)
        async with (
            two_hosts(tmp_path, streams=3, record_bytes=RECORD) as (a, b, address),
            meddled(address) as (meddler, proxy),
        ):
            link = await a.endpoint.connect("b", proxy)
            pages = [(b"%d" % i, pattern(chance.randrange(1, 30 * RECORD), i)) for i in range(80)]
            futures = [link.send_page(*page) for page in pages]
            back = [b.links[0].send_page(*page) for page in pages[:40]]
            for _ in range(6):
                done = len(b.landings.published)
                await b.until(lambda done=done: len(b.landings.published) > min(done + 5, 75))  # type: ignore[misc]
                meddler.sever()
            await asyncio.gather(*futures, *back)
            for host, expected in ((b, pages), (a, pages[:40])):
                assert host.landings.claimed == [header for header, _ in expected]
                assert len(host.landings.published) == len(expected)
                assert all(host.landings.payload(header) == page for header, page in expected)
            assert link.stats.streams_lost > 0

    run(work())


def test_a_link_whose_control_connection_stands_but_has_no_stream_any_more_is_given_up(
    run: Run, tmp_path: Path
) -> None:
    """H7: pages on it would wait for ever, and its peer answers every ping."""

    async def work() -> None:
        async with (
            two_hosts(tmp_path, streams=1, record_bytes=RECORD, timing=QUICK) as (a, b, address),
            meddled(address) as (meddler, proxy),
        ):
            link = await a.endpoint.connect("b", proxy)
            await link.send_page(b"first", pattern(RECORD))
            meddler.then_refuse = True
            meddler.sever()
            with pytest.raises(LinkError):
                await link.send_page(b"second", pattern(RECORD))
            await b.until(lambda: bool(a.closed and b.closed))
            assert {*a.closed, *b.closed} <= {"streams-lost", "peer-closed/streams-lost"}

    run(work())


def test_one_stream_lost_of_two_does_not_wait_for_its_replacement(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            two_hosts(tmp_path, streams=2, record_bytes=RECORD) as (a, b, address),
            meddled(address, then_refuse=False) as (meddler, proxy),
        ):
            link = await a.endpoint.connect("b", proxy)
            await link.send_page(b"first", pattern(10 * RECORD))
            meddler.then_refuse = True  # no replacement can be had
            for writer in meddler._bulk_writers[:2]:
                writer.transport.abort()
            await a.until(lambda: link.stats.streams == 1)
            await link.send_page(b"second", pattern(10 * RECORD, 2))
            assert b.landings.payload(b"second") == pattern(10 * RECORD, 2)

    run(work())


def test_a_host_that_resets_the_connection_at_once_is_a_link_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was reset as soon as it stood had no peer to ask the kernel for: OSError, and its socket stayed."""

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:

            async def dial_and_be_reset(address: SocketAddress) -> socket.socket:
                sock = await dial(address)
                accepted, _ = server.accept()
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                accepted.close()
                with contextlib.suppress(OSError):
                    while True:
                        sock.getpeername()
                        await asyncio.sleep(0.01)
                return sock

            monkeypatch.setattr(tcp, "dial", dial_and_be_reset)
            a, b = Host(tmp_path, "a"), Host(tmp_path, "b")
            a.trust(b)
            before = sockets()
            endpoint = a.open()
            with pytest.raises(LinkError) as caught:
                await endpoint.connect("b", f"127.0.0.1:{server.getsockname()[1]}")
            assert caught.value.reason == "refused"
            await endpoint.close()
            assert sockets() == before

    run(work())
