"""Two hosts on loopback for the transport's tests: keys, owners that write down what they are told, landing memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from transport.keys import KeyStore
from transport.link import Landing, Link, LinkOwner, Timing
from transport.tcp import TcpEndpoint


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 on its loopback")

QUICK = Timing(ping_s=0.05, dead_s=0.5, greet_s=2.0)


def endpoint(transport: str, keys: KeyStore, owner: LinkOwner, **options: Any) -> Any:
    if transport == "tcp":
        return TcpEndpoint(keys, owner, **options)
    from transport.quic import QuicEndpoint  # not on a host without ngtcp2

    return QuicEndpoint(keys, owner, **options)


def small_steps(transport: str) -> dict[str, Any]:
    """Options with which a page takes many steps, so that something can happen between them."""
    if transport == "tcp":
        return {"record_bytes": 64 << 10}
    from transport.quic_engine import EngineOptions

    return {"options": EngineOptions(window_bytes=64 << 10)}


def mapped(size: int) -> memoryview:
    """Shared-memory-like room: page aligned, outside Python's heap."""
    return memoryview(mmap.mmap(-1, size))


def unmap(view: memoryview) -> None:
    """Give the memory back. Raises BufferError if anything else still holds a view of it."""
    memory = view.obj
    assert isinstance(memory, mmap.mmap)
    view.release()
    memory.close()


def pattern(size: int, seed: int = 1) -> memoryview:
    """`size` bytes without a short period, so that a misplaced record never looks right."""
    view = mapped(size)
    block = hashlib.shake_128(seed.to_bytes(8, "little")).digest(min(size, (1 << 16) + 13))
    for start in range(0, size, len(block)):
        part = view[start : start + len(block)]
        part[:] = block[: len(part)]
    for mark in range(0, size - 8, 4096):
        view[mark : mark + 8] = (mark + seed).to_bytes(8, "little")
    return view


def sockets() -> int:
    """Open socket descriptors of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


class Slot:
    """A landing that remembers its end."""

    def __init__(self, sink: Landings, header: bytes, size: int) -> None:
        self.view = mapped(size)
        self.header = header
        self._sink = sink

    def publish(self) -> None:
        with self._sink.lock:
            self._sink.published.append(self)
        if self._sink.on_publish is not None:
            self._sink.on_publish(self)

    def discard(self) -> None:
        with self._sink.lock:
            self._sink.discarded.append(self)


class Landings:
    """A sink that accepts every page, unless `refuse` says otherwise for its header."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.claimed: list[bytes] = []
        self.published: list[Slot] = []
        self.discarded: list[Slot] = []
        self.refuse: Callable[[bytes], bool] = lambda header: False
        self.on_publish: Callable[[Slot], object] | None = None

    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        with self.lock:
            self.claimed.append(header)
        return None if self.refuse(header) else Slot(self, header, payload_bytes)

    def payload(self, header: bytes) -> memoryview:
        return next(slot.view for slot in self.published if slot.header == header)


class Host:
    """Owner of one endpoint."""

    def __init__(self, directory: Path, name: str, transport: str = "tcp") -> None:
        self.name = name
        self.transport = transport
        self.keys = KeyStore(directory / name)
        self.keys.new(name)
        self.landings = Landings()
        self.links: list[Link] = []
        self.messages: list[bytes] = []
        self.closed: list[str] = []
        self._changed = asyncio.Event()
        self.endpoint: Any

    def open(self, **options: Any) -> Any:
        self.endpoint = endpoint(self.transport, self.keys, self, **options)
        return self.endpoint

    def trust(self, other: Host) -> None:
        self.keys.trust(other.name, other.keys.show()[0])

    def link_opened(self, link: Link) -> Landings:
        self.links.append(link)
        self._changed.set()
        return self.landings

    def link_message(self, link: Link, message: bytes) -> None:
        self.messages.append(message)
        self._changed.set()

    def link_closed(self, link: Link, reason: str) -> None:
        self.closed.append(reason)
        self._changed.set()

    async def landed(self, count: int) -> None:
        """So many pages. Their sender may know a little earlier."""
        await self.until(lambda: len(self.landings.published) >= count)

    async def page(self, header: bytes) -> memoryview:
        """The one that came under that header, once it has landed."""
        await self.until(lambda: any(slot.header == header for slot in self.landings.published))
        return self.landings.payload(header)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        """Wait for something this host is told, or for its threads' counters."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.02)


@contextlib.asynccontextmanager
async def two_hosts(directory: Path, transport: str = "tcp", **options: Any) -> AsyncIterator[tuple[Host, Host, str]]:
    """(a, b, b's address): each trusts the other, b listens. Checks that closing leaves no thread behind."""
    a, b = Host(directory, "a", transport), Host(directory, "b", transport)
    a.trust(b)
    b.trust(a)
    try:
        a.open(**options)
        address = await b.open(**options).listen("127.0.0.1:0")
        yield a, b, address
    finally:
        await a.endpoint.close()
        await b.endpoint.close()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("zc-")]
    assert not names, names


@contextlib.asynccontextmanager
async def linked(directory: Path, transport: str = "tcp", **options: Any) -> AsyncIterator[tuple[Host, Host, Any]]:
    async with two_hosts(directory, transport, **options) as (a, b, address):
        link = await a.endpoint.connect("b", address)
        await b.until(lambda: bool(b.links))
        yield a, b, link
