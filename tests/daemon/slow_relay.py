"""A TCP relay with a rate that can be changed while it runs: a path that is slower than another, on one machine.

Owns its listening socket and its connections. It knows nothing of what it carries. And the hosts of which one has
nothing but that path.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence

from tests.transport.udp_relay import Relay
from transport.quic_choice import SCHEME
from zerocopy.cli.hosts import Host, Hosts

PIECE = 64 << 10


class SlowRelay:
    """`bits_per_s` holds per connection and direction."""

    def __init__(self, target: str, bits_per_s: float) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self.bits_per_s = bits_per_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def listen(self) -> str:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=PIECE)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """The cable is pulled: every connection ends and none is accepted any more."""
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Every connection ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there = await asyncio.open_connection(*self._target, limit=PIECE)
            for ends in ((reader, there[1]), (there[0], writer)):
                task = asyncio.create_task(self._carry(*ends))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while piece := await reader.read(PIECE):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(8 * len(piece) / self.bits_per_s)
        finally:
            writer.close()


@contextlib.contextmanager
def slow_path_to(port: int, bits_per_s: float, transport: str) -> Iterator[tuple[str, SlowRelay | Relay]]:
    """Where that port can be reached at that speed, per connection and direction, and what makes it slow."""
    relay: SlowRelay | Relay = SlowRelay(f"127.0.0.1:{port}", bits_per_s)
    if transport == "quic":
        relay = Relay(("127.0.0.1", port), bits_per_s=bits_per_s)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(relay.listen(), loop).result(30), relay
    finally:
        asyncio.run_coroutine_threadsafe(relay.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


def prefiller_far_and_near(
    hosts: Hosts, flags: Sequence[str], address: str, slow_path: str, transport: str = "tcp"
) -> tuple[Host, Host, Host]:
    """A prefiller at `address`, a decoder that knows it by the slow path only, and one that is told its address. All
    ready: the prefiller first, so that nobody has to hear over the slow path that its engine is up."""
    scheme = SCHEME if transport == "quic" else ""
    prefiller = hosts.add("prefiller", ["--role", "prefill", *flags, "--listen", address, "--advertise", slow_path])
    prefiller.address = address
    far = hosts.add("far", ["--role", "decode", *flags, "--peer", f"prefiller={scheme}{slow_path}"])
    near = hosts.add("near", ["--role", "decode", *flags], peers=[prefiller], transport=transport)
    prefiller.start()
    prefiller.wait_ready()
    for host in (far, near):
        host.start()
    for host in (far, near):
        host.wait_ready(connected_to=["prefiller"])
    return prefiller, far, near
