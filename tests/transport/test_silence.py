"""Peers and paths that fall silent, stop, die or only rest, over both transports: typed ends in bounded time (H7)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from transport.link import LinkError, Timing

from .conftest import Run
from .hosts import QUICK, Host, linked, pattern, two_hosts, unmap
from .meddler import Meddler, meddled
from .udp_relay import Relay, relay

MIB = 1 << 20
NEVER_S = 300.0  # far beyond a test's own limit


@contextlib.asynccontextmanager
async def pausable(transport: str, address: str) -> AsyncIterator[tuple[Meddler | Relay, str]]:
    """A path to `address` on which nothing passes while it is `paused`, and its own address."""
    if transport == "tcp":
        async with meddled(address) as both:
            yield both
    else:
        async with relay(address) as path:
            yield path, path.address


def test_a_path_that_falls_silent_ends_the_link_on_both_sides_and_frees_its_pages(
    run: Run, tmp_path: Path, transport: str
) -> None:
    """The cable is pulled: no reset, no end of stream."""

    async def work() -> None:
        async with (
            two_hosts(tmp_path, transport, timing=QUICK) as (a, b, address),
            pausable(transport, address) as (path, there),
        ):
            link = await a.endpoint.connect("b", there)
            path.paused = True
            view = pattern(32 * MIB)
            with pytest.raises(LinkError) as caught:
                await link.send_page(b"page", view)
            assert caught.value.reason == "peer-unresponsive"
            unmap(view)
            await a.until(lambda: a.closed == ["peer-unresponsive"])
            await b.until(lambda: b.closed == ["peer-unresponsive"])

    run(work())


def test_a_silence_shorter_than_the_limit_is_survived(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with (
            two_hosts(tmp_path, transport, timing=Timing(ping_s=0.05, dead_s=NEVER_S)) as (a, b, address),
            pausable(transport, address) as (path, there),
        ):
            link = await a.endpoint.connect("b", there)
            path.paused = True
            sending = link.send_page(b"page", pattern(4 * MIB))
            await asyncio.sleep(0.5)
            assert not sending.done()
            path.paused = False
            await sending
            await b.landed(1)
            assert b.landings.payload(b"page") == pattern(4 * MIB)

    run(work())


def test_a_page_that_has_not_begun_is_free_at_once_though_the_path_is_silent(
    run: Run, tmp_path: Path, transport: str
) -> None:
    async def work() -> None:
        async with (
            two_hosts(tmp_path, transport, timing=Timing(ping_s=0.05, dead_s=NEVER_S)) as (a, _, address),
            pausable(transport, address) as (path, there),
        ):
            link = await a.endpoint.connect("b", there)
            path.paused = True
            for _ in range(300):  # more than there are QUIC streams
                link.send_page(b"begun", pattern(100))
            view = pattern(MIB)
            waiting = link.send_page(b"waiting", view)
            waiting.cancel()
            await asyncio.wait([waiting], timeout=30)
            assert waiting.cancelled()
            unmap(view)

    run(work())


_PEER = """
import asyncio, sys
from pathlib import Path
from tests.transport.hosts import Landings, endpoint
from transport.keys import KeyStore

class Owner:
    def link_opened(self, link): return Landings()
    def link_message(self, link, message): link.send(message)
    def link_closed(self, link, reason): print(reason, flush=True)

async def main(transport, keys, address):
    print(await endpoint(transport, KeyStore(Path(keys)), Owner()).listen(address), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def process(b: Host, address: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Host b, listening in a process of its own: killed at the end."""
    command = [sys.executable, "-c", _PEER, b.transport, str(b.keys.directory), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


def _pair(directory: Path, transport: str, timing: Timing) -> tuple[Host, Host]:
    a, b = Host(directory, "a", transport), Host(directory, "b", transport)
    a.trust(b)
    b.trust(a)
    a.open(timing=timing)
    return a, b


def test_a_stopped_process_is_given_up_and_hears_of_it_and_a_restarted_one_is_reached_again(
    run: Run, tmp_path: Path, transport: str
) -> None:
    async def work() -> None:
        a, b = _pair(tmp_path, transport, QUICK)
        with process(b) as (child, address):
            link = await a.endpoint.connect("b", address)
            await link.send_page(b"page", pattern(MIB))
            os.kill(child.pid, signal.SIGSTOP)
            with pytest.raises(LinkError, match="silent"):
                await link.send_page(b"big", pattern(64 * MIB))
            await a.until(lambda: a.closed == ["peer-unresponsive"])
            os.kill(child.pid, signal.SIGCONT)
            assert child.stdout is not None
            heard = await asyncio.to_thread(child.stdout.readline)
            assert heard.strip() in ("connection-lost", "peer-closed/peer-unresponsive"), "it had to find out itself"
        with process(b, address):
            link = await a.endpoint.connect("b", address)
            await link.send_page(b"page", pattern(MIB))
        await a.endpoint.close()

    run(work())


def test_a_peer_whose_process_died_is_given_up_long_before_it_counts_as_silent(
    run: Run, tmp_path: Path, transport: str
) -> None:
    """The kernel closes a TCP connection; over QUIC its host answers that nobody listens there."""
    if transport == "quic" and sys.platform != "linux":
        pytest.skip("only Linux tells whom such an answer is about")

    async def work() -> None:
        a, b = _pair(tmp_path, transport, Timing(dead_s=NEVER_S))
        with process(b) as (child, address):
            link = await a.endpoint.connect("b", address)
            sending = link.send_page(b"page", pattern(64 * MIB))
            child.kill()
            await a.until(lambda: a.closed == ["connection-lost"])
            with pytest.raises(LinkError):
                await sending
        await a.endpoint.close()

    run(work())


def test_a_host_that_was_suspended_itself_does_not_blame_its_peer(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport, timing=QUICK) as (a, b, link):
            time.sleep(3 * QUICK.dead_s)  # the loop stands still
            await asyncio.sleep(2 * QUICK.ping_s)
            await link.send_page(b"page", pattern(1000))
            assert not a.closed and not b.closed

    run(work())


def test_an_idle_link_stays_open_beyond_every_time_limit(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport, timing=Timing(ping_s=0.05, dead_s=1.0)) as (a, b, link):
            await asyncio.sleep(1.5)
            await link.send_page(b"page", pattern(1000))
            assert not a.closed and not b.closed and link.stats.streams == 1

    run(work())
