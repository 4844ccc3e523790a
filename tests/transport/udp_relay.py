"""A UDP path between two endpoints that loses, repeats, swaps, cuts and changes datagrams, by a seeded choice.

Can also change the address that the client seems to have (a NAT that forgot it, a laptop on another network), have a
rate and a short queue before it, stop, and remember what passed. Its own test is `test_udp_relay.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

MAX_KEPT = 4096
ROOM = 8 << 20
MAX_WAIT_S = 0.2  # what would wait longer for the rate is lost, as at any bottleneck


@dataclass
class Chances:
    """Per datagram, each way."""

    lose: float = 0.0
    repeat: float = 0.0
    swap: float = 0.0  # with the next one
    cut: float = 0.0
    flip: float = 0.0  # one bit


class _Side(asyncio.DatagramProtocol):
    def __init__(self, receive: Callable[[bytes, Any], None]) -> None:
        self.receive = receive
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        sock = transport.get_extra_info("socket")
        for option in (7, 8):  # SO_SNDBUF, SO_RCVBUF
            with contextlib.suppress(OSError):
                sock.setsockopt(1, option, ROOM)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.receive(data, addr)

    def error_received(self, exc: Exception) -> None: ...


@dataclass
class Relay:
    server: tuple[str, int]
    chances: Chances = field(default_factory=Chances)
    seed: int = 1
    bits_per_s: float = math.inf  # each way
    client: str = "127.0.0.1"  # the host that the server sees
    kept: list[tuple[str, bytes]] = field(default_factory=list)  # ("up" to the server or "down", datagram)
    passed: int = 0
    lost: int = 0
    paused: bool = False
    address: str = ""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._client: Any = None
        self._held: dict[str, bytes] = {}
        self._free_at = {"up": 0.0, "down": 0.0}

    async def listen(self) -> str:
        loop = asyncio.get_running_loop()
        _, self._front = await loop.create_datagram_endpoint(lambda: _Side(self._up), local_addr=("127.0.0.1", 0))
        await self.rebind()
        host, port = self._front.transport.get_extra_info("sockname")
        self.address = f"{host}:{port}"
        return self.address

    async def rebind(self) -> None:
        """From now on the server sees another client address."""
        loop = asyncio.get_running_loop()
        old = getattr(self, "_back", None)
        _, self._back = await loop.create_datagram_endpoint(lambda: _Side(self._down), local_addr=(self.client, 0))
        if old is not None:
            old.transport.close()

    async def close(self) -> None:
        self._front.transport.close()
        self._back.transport.close()

    def inject(self, data: bytes) -> None:
        """To the server, from the address that the client has there."""
        self._back.transport.sendto(data, self.server)

    def _up(self, data: bytes, addr: Any) -> None:
        self._client = addr
        self._pass("up", data, lambda one: self._back.transport.sendto(one, self.server))

    def _down(self, data: bytes, addr: Any) -> None:
        self._pass("down", data, lambda one: self._front.transport.sendto(one, self._client))

    def _pass(self, way: str, data: bytes, send: Callable[[bytes], None]) -> None:
        if len(self.kept) < MAX_KEPT:
            self.kept.append((way, data))
        for one in self.fate(way, data):
            wait_s = self.wait_s(way, len(one), time.monotonic())
            if wait_s > MAX_WAIT_S:
                self.lost += 1
                continue
            self.passed += 1
            if wait_s > 0:
                asyncio.get_running_loop().call_later(wait_s, send, one)
            else:
                send(one)

    def wait_s(self, way: str, size: int, now: float) -> float:
        """How long a datagram that came now waits for its turn; one that would wait too long takes no turn."""
        wait_s = max(self._free_at[way] - now, 0.0)
        if wait_s <= MAX_WAIT_S:
            self._free_at[way] = now + wait_s + 8 * size / self.bits_per_s
        return wait_s

    def fate(self, way: str, data: bytes) -> list[bytes]:
        """What comes out for what came in."""
        dice, chance = self._random.random, self.chances
        if self.paused or dice() < chance.lose:
            self.lost += 1
            return []
        if dice() < chance.cut:
            data = data[: self._random.randrange(1, len(data) + 1)]
        if dice() < chance.flip:
            at = self._random.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
        out = [data, data] if dice() < chance.repeat else [data]
        if way in self._held:
            return [*out, self._held.pop(way)]
        if dice() < chance.swap:
            self._held[way] = data
            return out[1:]
        return out


@contextlib.asynccontextmanager
async def relay(server: str, chances: Chances | None = None, **how: Any) -> AsyncIterator[Relay]:
    host, _, port = server.rpartition(":")
    path = Relay((host, int(port)), chances or Chances(), **how)
    await path.listen()
    try:
        yield path
    finally:
        await path.close()
