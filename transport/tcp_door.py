"""Accepts connections and tells peers from strangers before anything is spent on them.

One port: the first byte is peeked at. A TLS ClientHello leads to the control handshake, the bulk preamble to a stream
that some link expects; anything else is closed at once. Until a connection has proved its key it is a stranger: one
socket, one small task, a deadline, and a place among `total` (`each` per address); when those are full the oldest
stranger goes, so peers, who need milliseconds, still get in.

Owns listening sockets and strangers' sockets. What happens to a connection that is no stranger is the endpoint's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from transport.address import Address, SocketAddress, from_socket, resolve
from transport.dial import resolve_once
from transport.frames import MAGIC
from transport.link import LinkError

_TLS_HANDSHAKE: Final = 0x16
_BACKLOG: Final = 64
_ACCEPTS_PER_WAKE: Final = 16
_EXHAUSTED_PAUSE_S: Final = 1.0

Greeting = Callable[[socket.socket], Awaitable[None]]


@dataclass(frozen=True)
class StrangerLimits:
    total: int = 32
    each: int = 8


@dataclass
class _Ownership:
    sock: socket.socket
    here: bool = True  # until a greeting takes it


@dataclass
class DoorCounts:
    accepted: int = 0
    refused: int = 0  # ended without having proved a key, for whatever reason


class Door:
    def __init__(self, control: Greeting, bulk: Greeting, deadline_s: float, limits: StrangerLimits) -> None:
        """`control` and `bulk` get a non-blocking socket and own it from then on; they raise unless it proved its
        key, and are cancelled at the deadline."""
        self._loop = asyncio.get_running_loop()
        self._greetings = {_TLS_HANDSHAKE: control, MAGIC[0]: bulk}
        self._deadline_s = deadline_s
        self._limits = limits
        self._listening: set[socket.socket] = set()
        self._strangers: dict[asyncio.Task[None], str] = {}  # oldest first -> address
        self._leaving: set[asyncio.Task[None]] = set()
        self.counts = DoorCounts()

    async def listen(self, address: Address) -> Address:
        family, sockaddr = (await resolve(address, passive=True))[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind(sockaddr)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            taken = error.errno == errno.EADDRINUSE
            hint = (
                "is a daemon running there already? Else choose another address" if taken else "give one of this host's"
            )
            raise LinkError(
                "cannot-listen", f"cannot listen on {address}: {error.strerror or error}: {hint}"
            ) from error
        self._watch(sock)
        return from_socket(sock.getsockname())

    async def close(self) -> None:
        for sock in self._listening:
            self._loop.remove_reader(sock)
            sock.close()
        self._listening.clear()
        for task in list(self._strangers):
            self._evict(task)
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _watch(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self._listening.add(sock)
            self._loop.add_reader(sock, self._accept, sock)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_WAKE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors or memory: the connection stays in the backlog
                self._loop.remove_reader(listening)
                self._loop.call_later(_EXHAUSTED_PAUSE_S, self._watch, listening)
                return
            self._admit(sock, origin(address))

    def _admit(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(False)
        self.counts.accepted += 1
        alike = [task for task, other in self._strangers.items() if other == address]
        if len(alike) >= self._limits.each:
            self._evict(alike[0])
        elif len(self._strangers) >= self._limits.total:
            self._evict(next(iter(self._strangers)))
        owner = _Ownership(sock)
        task = self._loop.create_task(self._greet(owner))
        self._strangers[task] = address
        task.add_done_callback(functools.partial(self._left, owner))

    def _evict(self, task: asyncio.Task[None]) -> None:
        del self._strangers[task]
        self._leaving.add(task)
        task.cancel()

    def _left(self, owner: _Ownership, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._leaving.discard(task)
        if owner.here:  # also if the task was cancelled before it ever ran
            owner.sock.close()
        failure = None if task.cancelled() else task.exception()
        self.counts.refused += task.cancelled() or failure is not None
        if failure is not None and not isinstance(failure, (OSError, LinkError)):
            self._loop.call_exception_handler({"message": "greeting a connection failed", "exception": failure})

    async def _greet(self, owner: _Ownership) -> None:
        async with asyncio.timeout(self._deadline_s):
            greeting = self._greetings.get(await self._first_byte(owner.sock))
            if greeting is None:
                raise LinkError("stranger", "neither TLS nor a bulk connection")
            owner.here = False
            await greeting(owner.sock)

    async def _first_byte(self, sock: socket.socket) -> int:
        """Peek; the byte stays for whoever takes over. -1 if there is none."""
        readable = self._loop.create_future()
        self._loop.add_reader(sock, resolve_once, readable)
        try:
            await readable
        finally:
            self._loop.remove_reader(sock)
        with contextlib.suppress(BlockingIOError):
            return (sock.recv(1, socket.MSG_PEEK) or b"\xff")[0]
        return -1


def origin(address: SocketAddress) -> str:
    """What counts as one address: an IPv6 host owns its whole /64."""
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))
