"""What strangers may send to a QUIC port, and what it costs this host (X1, X2): addresses, replays, junk. Keys are in
`test_strangers`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("native._quic", reason="ngtcp2 is not installed")

from transport.link import LinkError, Timing
from transport.quic import QuicEndpoint
from transport.quic_engine import EngineOptions

from .conftest import Run
from .hosts import Host, pattern, two_hosts
from .udp_relay import Relay, relay

SHORT = Timing(ping_s=0.1, dead_s=2.0, greet_s=0.6)


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _retried(host: Host) -> int:
    return counts(host.endpoint)["retries_sent"]


def counts(endpoint: QuicEndpoint) -> dict[str, int]:
    return endpoint.engine.counts()


def test_an_address_that_proved_nothing_gets_one_small_datagram_and_no_memory(run: Run, tmp_path: Path) -> None:
    """A spoofed address must neither cost memory here nor be flooded by us."""

    async def work() -> None:
        async with two_hosts(tmp_path, "quic") as (a, b, address), relay(address) as path:
            await a.endpoint.connect("b", path.address)
            first = next(data for way, data in path.kept if way == "up")
            before = counts(b.endpoint)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as spoofer:
                spoofer.setblocking(False)
                for sent in range(1, 201):
                    spoofer.sendto(first, _pair(address))
                    if sent % 20 == 0:  # no more than fit the smallest receive buffer
                        await b.until(lambda sent=sent: _retried(b) == before["retries_sent"] + sent)  # type: ignore[misc]
                answers = [spoofer.recv(65536) for _ in range(100)]
            assert all(len(answer) < len(first) for answer in answers)
            assert counts(b.endpoint)["links"] == before["links"] == 1

    run(work())


def test_a_token_of_another_address_opens_nothing(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, "quic", timing=SHORT) as (a, b, address), relay(address) as path:
            passes = path.fate
            path.fate = lambda way, data: passes(way, data) if way == "down" or _retried(b) == 0 else []  # type: ignore[method-assign]
            with pytest.raises(LinkError) as caught:
                await a.endpoint.connect("b", path.address)
            assert caught.value.reason == "unreachable"
            with_token = [data for way, data in path.kept if way == "up"][-1]
            before = _retried(b)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as thief:
                thief.sendto(with_token, _pair(address))
                await b.until(lambda: _retried(b) == before + 1)
            assert counts(b.endpoint)["links"] == 0
            path.inject(with_token)  # the same from its own address
            await b.until(lambda: counts(b.endpoint)["links"] == 1)

    run(work())


def test_replaying_a_whole_connection_changes_nothing_during_it_or_after(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, "quic", timing=SHORT) as (a, b, address), relay(address) as path:
            link = await a.endpoint.connect("b", path.address)
            link.send(b"once")
            await link.send_page(b"page", pattern(300_000))
            await b.until(lambda: b.messages == [b"once"])
            recorded = [data for way, data in path.kept if way == "up"]
            for data in recorded:
                path.inject(data)
            await asyncio.sleep(0.2)
            await link.send_page(b"more", pattern(300_000, 2))
            assert b.landings.claimed == [b"page", b"more"] and b.messages == [b"once"]
            link.close("done")
            await b.until(lambda: bool(b.closed))
            await asyncio.sleep(0.3)  # past the closing period
            for data in recorded:
                path.inject(data)
            await asyncio.sleep(1.5)  # past what a handshake may take
            assert counts(b.endpoint)["links"] == 0
            assert len(b.links) == 1 and b.messages == [b"once"] and b.landings.claimed == [b"page", b"more"]

    run(work())


Passes = Callable[[str, bytes], bool]


def only_retries(way: str, data: bytes) -> bool:
    """Whoever dials begins handshakes and ends none."""
    return way == "up" or data[0] >> 4 == 0xF


@contextlib.contextmanager
def nothing_but(path: Relay, passes: Passes) -> Iterator[None]:
    fate = path.fate
    path.fate = lambda way, data: fate(way, data) if passes(way, data) else []  # type: ignore[method-assign]
    try:
        yield
    finally:
        path.fate = fate  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def few_greetings(directory: Path, greet_s: float) -> AsyncIterator[tuple[Host, Host, str]]:
    """Two hosts of which b has room for four handshakes at a time."""
    async with two_hosts(directory, "quic", timing=Timing(greet_s=greet_s)) as (a, b, _):
        await b.endpoint.close()
        yield a, b, await b.open(options=EngineOptions(greet_s=greet_s, max_greeting=4)).listen("127.0.0.1:0")


async def crowd(a: Host, b: Host, path: Relay, count: int = 7) -> list[asyncio.Task[Any]]:
    """So many handshakes that do not end, all of them begun."""
    before = counts(b.endpoint)
    dialling = [asyncio.create_task(a.endpoint.connect("b", path.address)) for _ in range(count)]
    begun = before["links"] + before["refused"] + count
    await b.until(lambda: counts(b.endpoint)["links"] + counts(b.endpoint)["refused"] >= begun)
    return dialling


def test_handshakes_that_never_end_are_bounded_and_over_in_time(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with few_greetings(tmp_path, 0.6) as (a, b, address), relay(address) as path:
            with nothing_but(path, only_retries):
                dialling = await crowd(a, b, path)
                assert counts(b.endpoint)["links"] == 4
                results = await asyncio.gather(*dialling, return_exceptions=True)
            assert all(isinstance(r, LinkError) and r.reason == "unreachable" for r in results)
            await b.until(lambda: counts(b.endpoint)["links"] == 0)

    run(work())


def test_a_crowd_of_handshakes_keeps_no_peer_out(run: Run, tmp_path: Path) -> None:
    """The oldest goes for a newer one; a peer needs milliseconds."""

    async def work() -> None:
        async with few_greetings(tmp_path, 60.0) as (a, b, address), relay(address) as path:
            with nothing_but(path, only_retries):
                dialling = await crowd(a, b, path)
                link = await a.endpoint.connect("b", address)
                await link.send_page(b"page", pattern(1000))
                for one in dialling:
                    one.cancel()

    run(work())


def test_a_crowd_ends_no_handshake_of_another_network(run: Run, tmp_path: Path) -> None:
    """One that is slow, because its path loses packets, is the oldest of all."""

    async def work() -> None:
        async with (
            few_greetings(tmp_path, 60.0) as (a, b, address),
            relay(address) as path,
            relay(address, client="127.0.0.2") as lossy,
        ):
            with nothing_but(path, only_retries):
                with nothing_but(lossy, lambda way, _: way == "down" or counts(b.endpoint)["links"] == 0):
                    (slow,) = await crowd(a, b, lossy, 1)
                    dialling = await crowd(a, b, path)
                link = await asyncio.wait_for(slow, 30)
                await link.send_page(b"page", pattern(1000))
                for one in dialling:
                    one.cancel()

    run(work())


def test_junk_of_every_size_is_ignored_while_pages_flow(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, "quic") as (a, b, address):
            link = await a.endpoint.connect("b", address)
            sending = asyncio.gather(*(link.send_page(b"%d" % i, pattern(1 << 20, i)) for i in range(20)))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                for size in range(0, 1500, 3):
                    stranger.sendto(os.urandom(size), _pair(address))
                    if size % 60 == 0:
                        await asyncio.sleep(0.005)  # or they would not all fit the smallest receive buffer
            await sending
            assert all(b.landings.payload(b"%d" % i) == pattern(1 << 20, i) for i in range(20))
            assert counts(b.endpoint)["links"] == 1 and counts(b.endpoint)["ignored"] > 300

    run(work())
