"""Streams that break, peers that fall silent or restart: typed ends in bounded time, nothing lost or doubled."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transport.link import LinkError
from transport.tcp_link import Timing

from .conftest import Run
from .hosts import QUICK, Host, linked, pattern, two_hosts, unmap
from .meddler import meddled

RECORD = 16 << 10


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


def test_a_silent_path_is_noticed_within_the_stated_bound(run: Run, tmp_path: Path) -> None:
    """The cable is pulled: no reset, no end of stream. Both sides end with a typed reason and free everything."""

    async def work() -> None:
        async with (
            two_hosts(tmp_path, timing=QUICK, record_bytes=RECORD) as (a, b, address),
            meddled(address) as (meddler, proxy),
        ):
            link = await a.endpoint.connect("b", proxy)
            meddler.black_hole = True
            view = pattern(32 << 20)
            future = link.send_page(b"page", view)
            start = time.monotonic()
            with pytest.raises(LinkError) as caught:
                await future
            assert caught.value.reason == "peer-unresponsive"
            assert time.monotonic() - start < 5
            unmap(view)
            await a.until(lambda: a.closed == ["peer-unresponsive"])
            await b.until(lambda: b.closed == ["peer-unresponsive"])

    run(work())


PEER = """
import asyncio, sys
from pathlib import Path
from transport.keys import KeyStore
from transport.tcp import TcpEndpoint
from tests.transport.hosts import Landings

class Owner:
    def link_opened(self, link): return Landings()
    def link_message(self, link, message): link.send(message)
    def link_closed(self, link, reason): pass

async def main():
    endpoint = TcpEndpoint(KeyStore(Path(sys.argv[1])), Owner())
    print(await endpoint.listen(sys.argv[2]), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def start_peer(directory: Path, address: str) -> tuple[subprocess.Popen[str], str]:
    child = subprocess.Popen([sys.executable, "-c", PEER, str(directory), address], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_a_stopped_process_is_noticed_and_a_restarted_one_reached_again(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        a, b = Host(tmp_path, "a"), Host(tmp_path, "b")
        a.trust(b)
        b.trust(a)
        a.open(timing=QUICK)
        child, address = start_peer(tmp_path / "b", "127.0.0.1:0")
        try:
            link = await a.endpoint.connect("b", address)
            await link.send_page(b"page", pattern(1 << 20))
            os.kill(child.pid, signal.SIGSTOP)
            with pytest.raises(LinkError, match="silent"):
                await link.send_page(b"big", pattern(64 << 20))
            await a.until(lambda: a.closed == ["peer-unresponsive"])
            child.kill()
            child.wait()
            child, _ = start_peer(tmp_path / "b", address)
            link = await a.endpoint.connect("b", address)
            await link.send_page(b"page", pattern(1 << 20))
            child.kill()
            await a.until(lambda: len(a.closed) == 2)
            assert a.closed[1] == "connection-lost"
        finally:
            child.kill()
            child.wait()
            await a.endpoint.close()

    run(work())


def test_a_host_that_was_suspended_itself_does_not_blame_its_peer(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path, timing=QUICK) as (a, b, link):
            time.sleep(3 * QUICK.dead_s)  # the whole process, loop included, stands still
            await asyncio.sleep(2 * QUICK.ping_s)
            await link.send_page(b"page", pattern(1000))
            assert not a.closed and not b.closed

    run(work())


def test_an_idle_link_stays_open_beyond_every_time_limit(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        brisk = Timing(ping_s=0.05, dead_s=0.2, greet_s=2)
        async with linked(tmp_path, timing=brisk) as (a, b, link):
            await asyncio.sleep(0.8)
            await link.send_page(b"page", pattern(1000))
            assert link.stats.streams_lost == 0 and not a.closed and not b.closed

    run(work())
