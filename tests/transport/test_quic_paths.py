"""QUIC over paths that lose, repeat, reorder, cut and change datagrams, or change under it (T1, H7)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import sys
from pathlib import Path

import pytest

pytest.importorskip("native._quic", reason="ngtcp2 is not installed")

from transport.link import Timing
from transport.quic import QuicEndpoint

from .conftest import Run
from .hosts import Host, linked, pattern, two_hosts
from .udp_relay import Chances, relay

MIB = 1 << 20


@pytest.mark.parametrize(
    "chances",
    [
        Chances(lose=0.05),
        Chances(repeat=0.2, swap=0.2),
        Chances(cut=0.03, flip=0.03),
        Chances(lose=0.02, repeat=0.05, swap=0.1, cut=0.01, flip=0.01),
    ],
    ids=["loss", "repeats", "damage", "everything"],
)
@pytest.mark.parametrize("congestion", ["bbr", "cubic"])
def test_pages_and_messages_arrive_exactly_in_order_and_once(
    run: Run, tmp_path: Path, chances: Chances, congestion: str
) -> None:
    async def work() -> None:
        async with (
            two_hosts(tmp_path, "quic", congestion=congestion) as (a, b, address),
            relay(address, chances) as path,
        ):
            link = await a.endpoint.connect("b", path.address)
            # Small ones in a row, so that one waits for the lost beginning of another.
            sizes = [100_000 + 77_777 * (i % 3) for i in range(12)] + 200 * [3000]
            pages = [(b"%d" % i, pattern(size, i)) for i, size in enumerate(sizes)]
            sending = [link.send_page(*page) for page in pages]
            sending += [b.links[0].send_page(*page) for page in pages[:4]]
            messages = [b"%d" % i * 300 for i in range(50)]
            for message in messages:
                link.send(message)
            await asyncio.gather(*sending)
            await b.until(lambda: len(b.messages) == 50)
            assert b.messages == messages
            assert b.landings.claimed == [header for header, _ in pages]
            assert a.landings.claimed == [header for header, _ in pages[:4]]
            assert all(b.landings.payload(header) == page for header, page in pages)
            assert all(a.landings.payload(header) == page for header, page in pages[:4])

    run(work())


@pytest.mark.parametrize("chances", [Chances(), Chances(lose=0.05, swap=0.2)], ids=["clean", "loss"])
def test_pages_cancelled_at_any_moment_all_end_and_hold_up_no_other(run: Run, tmp_path: Path, chances: Chances) -> None:
    """Of a stream that was reset before its first byte arrived nobody would hear, and every later page wait for it."""

    async def work() -> None:
        async with two_hosts(tmp_path, "quic") as (a, b, address), relay(address) as path:
            link = await a.endpoint.connect("b", path.address)
            path.chances = chances
            payloads = [pattern(size, size) for size in (300, 4000, 8000, 70_000, MIB)]
            for seed in range(60):
                chance = random.Random(seed)
                futures = [
                    link.send_page(b"%d" % seed, chance.choice(payloads)) for _ in range(chance.randrange(1, 12))
                ]
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random() * 0.002)
                for future in futures:
                    if chance.random() < 0.6:
                        future.cancel()
                _, waiting = await asyncio.wait(futures, timeout=30)
                assert not waiting
            await link.send_page(b"last", payloads[-1])
            assert await b.page(b"last") == payloads[-1]  # it waits for those that were cancelled before it
            assert all(slot.view == pattern(len(slot.view), len(slot.view)) for slot in b.landings.published)
            assert not a.closed and not b.closed

    run(work())


def test_a_client_that_changes_its_address_keeps_its_link(run: Run, tmp_path: Path) -> None:
    """A NAT forgets, a laptop moves to another network: the server follows once the new address has answered."""

    async def work() -> None:
        async with two_hosts(tmp_path, "quic") as (a, b, address), relay(address) as path:
            link = await a.endpoint.connect("b", path.address)
            for i in range(4):
                sending = [link.send_page(b"%d-%d" % (i, j), pattern(500_000, j)) for j in range(4)]
                await asyncio.sleep(0.01)
                await path.rebind()
                await asyncio.gather(*sending)
                await b.links[0].send_page(b"back-%d" % i, pattern(500_000))
            assert len(b.landings.published) == 16 and len(a.landings.published) == 4
            assert all(slot.view == pattern(500_000, int(slot.header[2:])) for slot in b.landings.published)
            assert not a.closed and not b.closed

    run(work())


def test_a_client_whose_own_socket_is_at_another_address_keeps_its_link(run: Run, tmp_path: Path) -> None:
    """Without a relay: its later datagrams come from another port of another address, and answers go there."""

    async def work() -> None:
        async with linked(tmp_path, "quic") as (a, b, link):
            (own,) = (sock for sock in a.endpoint.engine._sockets if sock.getsockname()[0] == "0.0.0.0")
            for i in range(3):
                sending = [link.send_page(b"%d-%d" % (i, j), pattern(2 * MIB, j)) for j in range(4)]
                await b.until(lambda i=i: len(b.landings.claimed) > 4 * i)  # type: ignore[misc]
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
                    other.bind((f"127.0.0.{2 + i}", 0))
                    os.set_blocking(other.fileno(), False)
                    os.dup2(other.fileno(), own.fileno(), inheritable=False)
                await asyncio.gather(*sending)
                await b.links[0].send_page(b"back-%d" % i, pattern(500_000))
            assert all(slot.view == pattern(2 * MIB, int(slot.header[2:])) for slot in b.landings.published)
            assert len(b.landings.published) == 12 and len(a.landings.published) == 3
            assert not a.closed and not b.closed

    run(work())


def test_a_datagram_that_somebody_else_sends_on_moves_no_link(run: Run, tmp_path: Path) -> None:
    """He saw it, stopped it and sends it from his own address: real, and newer than all before it. The new address has
    to answer a challenge, which takes the keys; he gets hardly more than he sent."""

    async def work() -> None:
        async with two_hosts(tmp_path, "quic") as (a, b, address), relay(address) as path:
            link = await a.endpoint.connect("b", path.address)
            passes, sent, got, chance = path.fate, 0, 0, random.Random(1)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as thief:
                thief.bind(("127.0.0.3", 0))
                thief.setblocking(False)

                def steal(way: str, data: bytes) -> list[bytes]:
                    nonlocal sent
                    if way == "down" or chance.random() > 0.1:
                        return passes(way, data)
                    sent += thief.sendto(data, path.server)
                    return []

                path.fate = steal  # type: ignore[method-assign]
                for i in range(4):
                    await link.send_page(b"%d" % i, pattern(MIB, i))
                    await b.links[0].send_page(b"%d" % i, pattern(MIB, i))
                path.fate = passes  # type: ignore[method-assign]
                await link.send_page(b"last", pattern(MIB))
                with contextlib.suppress(BlockingIOError):
                    while True:
                        got += len(thief.recv(65536))
            assert sent > 0 and got < 3 * sent
            assert all(b.landings.payload(b"%d" % i) == pattern(MIB, i) for i in range(4))
            assert all(a.landings.payload(b"%d" % i) == pattern(MIB, i) for i in range(4))
            assert not a.closed and not b.closed

    run(work())


def test_a_server_that_restarted_says_so_at_once_and_only_to_those_it_served(run: Run, tmp_path: Path) -> None:
    """Without a stateless reset the client would wait for the idle timeout, ten seconds."""

    async def work() -> None:
        async with two_hosts(tmp_path, "quic") as (a, b, address), relay(address) as path:
            link = await a.endpoint.connect("b", path.address)
            c = Host(tmp_path, "c", "quic")
            c.open()
            again = QuicEndpoint(b.keys, b)
            for endpoint, effect in ((c.endpoint, False), (again, True)):  # another host's reset is not believed
                host, _, port = (await endpoint.listen("127.0.0.1:0")).rpartition(":")
                path.server = (host, int(port))
                link.send(b"are you there? " * 20)
                await a.until(lambda e=endpoint: e.engine.counts()["resets_sent"] > 0)  # type: ignore[misc]
                await asyncio.sleep(0.1)
                assert a.closed == (["connection-lost"] if effect else [])
            await again.close()
            await c.endpoint.close()

    run(work())


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs a raw socket")
def test_a_forged_report_that_nobody_listens_ends_no_link(run: Run, tmp_path: Path) -> None:
    """Anybody can send one; only who sees the datagrams knows the connection id that it has to quote."""

    async def work() -> None:
        async with linked(tmp_path, "quic", timing=Timing(ping_s=60.0)) as (a, b, link):
            ports = [sock.getsockname()[1] for host in (a, b) for sock in host.endpoint.engine._sockets]
            with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
                for _ in range(8):
                    raw.sendto(_port_unreachable(*ports), ("127.0.0.1", 0))
                    await asyncio.sleep(0.1)  # longer than a report has to last, in all
            assert not a.closed and not b.closed
            await link.send_page(b"page", pattern(MIB))

    run(work())


def _port_unreachable(sender: int, receiver: int) -> bytes:
    """ICMP of a datagram that `sender` would have sent to `receiver`, both on 127.0.0.1 (RFC 792)."""
    home = socket.inet_aton("127.0.0.1")
    payload = bytes([0x40]) + bytes(59)
    quoted = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28 + len(payload), 0, 0, 64, socket.IPPROTO_UDP, 0, home, home)
    quoted += struct.pack("!HHHH", sender, receiver, 8 + len(payload), 0) + payload
    body = struct.pack("!BBHI", 3, 3, 0, 0) + quoted
    total = sum(struct.unpack(f"!{len(body) // 2}H", body))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return body[:2] + struct.pack("!H", ~total & 0xFFFF) + body[4:]
