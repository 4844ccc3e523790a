"""QUIC over paths that lose, repeat, reorder, cut and change datagrams, change under it, or fall silent (T1, H7)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("native._quic", reason="ngtcp2 is not installed")

from transport.link import LinkError
from transport.quic import QuicEndpoint
from transport.tcp_link import Timing

from .conftest import Run
from .hosts import pattern
from .quic_hosts import QuicHost, two_hosts
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
        async with two_hosts(tmp_path, congestion=congestion) as (a, b, address), relay(address, chances) as path:
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


def test_a_client_that_changes_its_address_keeps_its_link(run: Run, tmp_path: Path) -> None:
    """A NAT forgets, a laptop moves to another network: the server follows once the new address has answered."""

    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address), relay(address) as path:
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


def test_a_path_that_falls_silent_ends_the_link_on_both_sides_and_frees_its_pages(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        timing = Timing(ping_s=0.1, dead_s=0.8, greet_s=2.0)
        async with two_hosts(tmp_path, timing=timing) as (a, b, address), relay(address) as path:
            link = await a.endpoint.connect("b", path.address)
            await link.send_page(b"before", pattern(1000))
            path.paused = True
            page = pattern(4 * MIB)
            with pytest.raises(LinkError) as caught:
                await link.send_page(b"lost", page)
            assert caught.value.reason == "peer-unresponsive"
            page.release()
            await a.until(lambda: a.closed == ["peer-unresponsive"])
            await b.until(lambda: b.closed == ["peer-unresponsive"])

    run(work())


def test_a_server_that_restarted_says_so_at_once_and_only_to_those_it_served(run: Run, tmp_path: Path) -> None:
    """Without a stateless reset the client would wait for the idle timeout, ten seconds."""

    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address), relay(address) as path:
            link = await a.endpoint.connect("b", path.address)
            c = QuicHost(tmp_path, "c")
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


def test_a_silence_shorter_than_the_limit_is_survived(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        timing = Timing(ping_s=0.1, dead_s=4.0, greet_s=2.0)
        async with two_hosts(tmp_path, timing=timing) as (a, b, address), relay(address) as path:
            link = await a.endpoint.connect("b", path.address)
            sending = link.send_page(b"page", pattern(4 * MIB))
            path.paused = True
            await asyncio.sleep(1.0)
            path.paused = False
            await sending
            assert b.landings.payload(b"page") == pattern(4 * MIB)

    run(work())


_RECEIVER = """
import asyncio, sys
from pathlib import Path
from tests.transport.quic_hosts import QuicHost
from tests.transport.hosts import pattern

async def main(folder):
    b = QuicHost(folder, "b")
    b.keys.trust("a", (folder / "a.pem").read_text())
    (folder / "b.pem").write_text(b.keys.show()[0])
    print(await b.open().listen("127.0.0.1:0"), flush=True)
    await b.until(lambda: len(b.landings.published) == 24, 60)
    exact = all(slot.view == pattern(len(slot.view), int(slot.header)) for slot in b.landings.published)
    print("exact" if exact else "different", flush=True)
    await b.until(lambda: bool(b.closed), 60)
    await b.endpoint.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def _resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def test_a_receiver_stopped_in_mid_transfer_costs_no_memory_and_the_transfer_resumes_exactly(
    run: Run, tmp_path: Path
) -> None:
    """Issue 4, acceptance 4; the process is frozen, so nothing of it reads, lands or answers."""

    async def work() -> None:
        a = QuicHost(tmp_path, "a")
        a.open()
        (tmp_path / "a.pem").write_text(a.keys.show()[0])
        command = [sys.executable, "-c", _RECEIVER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            lines = receiver.stdout
            address = (await asyncio.to_thread(lines.readline)).strip()
            a.keys.trust("b", (tmp_path / "b.pem").read_text())
            link = await a.endpoint.connect("b", address)
            pages = [pattern(4 * MIB, i) for i in range(24)]
            sending = [link.send_page(b"%d" % i, page) for i, page in enumerate(pages)]
            await sending[2]
            os.kill(receiver.pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            mine, its = _resident_kib(os.getpid()), _resident_kib(receiver.pid)
            began = time.monotonic()
            while time.monotonic() - began < 3.0:
                await asyncio.sleep(0.25)
                assert _resident_kib(os.getpid()) - mine < 8 << 10
                assert _resident_kib(receiver.pid) - its < 8 << 10
            assert not all(future.done() for future in sending)
            os.kill(receiver.pid, signal.SIGCONT)
            await asyncio.gather(*sending)
            assert (await asyncio.to_thread(lines.readline)).strip() == "exact"
            link.close("done")
            await asyncio.to_thread(receiver.wait)
        await a.endpoint.close()

    run(work())
