"""The QUIC endpoint: one UDP port for everything, the same keys and the same `Link` as over TCP.

A connection proves both keys inside its TLS 1.3 handshake before anything of it is seen here; an address proves itself
with a Retry token before anything is allocated for it. Owns the engine and the links. Bounds: `MAX_LINKS_PER_PEER`
links a peer, and the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

from native._quic import ffi
from transport.address import Address, SocketAddress, from_socket, parse, resolve
from transport.keys import KeyStore
from transport.link import LinkError, LinkOwner, Timing, check_share
from transport.mailbox import Mailbox
from transport.quic_engine import Congestion, Engine, EngineOptions
from transport.quic_link import QuicLink

_ANYWHERE: Final = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


class QuicEndpoint:
    """Construct inside a running event loop."""

    def __init__(
        self,
        keys: KeyStore,
        owner: LinkOwner,
        *,
        timing: Timing | None = None,
        congestion: Congestion = "bbr",
        datagram_bytes: int = 1452,
        options: EngineOptions | None = None,
    ) -> None:
        """`datagram_bytes` above 1452 is for paths known to carry it: a LAN with jumbo frames."""
        self.keys = keys
        self.owner = owner
        self.timing = timing or Timing()
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self._options = options or EngineOptions(
            congestion=congestion,
            datagram_bytes=datagram_bytes,
            idle_s=self.timing.dead_s,
            ping_s=self.timing.ping_s,
            greet_s=self.timing.greet_s,
        )
        self._engine: Engine | None = None
        self._callers: dict[int, int] = {}  # address family -> socket to connect from
        self._links: set[QuicLink] = set()
        self._connections: dict[int, QuicLink] = {}  # the loop's: number -> link
        # The engine's thread.
        self._peers: dict[int, str] = {}  # links that verify their peer's certificate: who it has to be, or is
        self._receiving: dict[int, QuicLink] = {}

    @property
    def engine(self) -> Engine:
        """The engine, started when first needed. Raises LinkError when this host has no key."""
        if self._engine is None:
            self._engine = Engine(_identity(self.keys), self, self._options)
        return self._engine

    async def listen(self, address: str) -> str:
        where = parse(address)
        family, sockaddr = (await resolve(where, passive=True))[0]
        bound = await self._bind(where, family, sockaddr)
        if (
            bound.host == _ANYWHERE[socket.AF_INET6]
        ):  # that socket is for IPv6 alone: the engine's options are by family
            await self._bind(where, socket.AF_INET, (_ANYWHERE[socket.AF_INET], bound.port))
        return str(bound)

    async def _bind(self, where: Address, family: int, sockaddr: SocketAddress) -> Address:
        sock = socket.socket(family, socket.SOCK_DGRAM)
        try:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(sockaddr)
        except OSError as error:
            sock.close()
            raise LinkError("cannot-listen", f"cannot listen on {where} (UDP): {error.strerror or error}") from error
        bound = from_socket(sock.getsockname())
        try:
            await self._call(lambda engine: engine.add_socket(sock, accept=True))
        except LinkError:
            sock.close()
            raise
        return bound

    async def connect(self, peer: str, address: str) -> QuicLink:
        """Raises LinkError; `link_closed` follows if `link_opened` was called."""
        if peer not in self.keys.trusted():
            raise LinkError("unknown-peer", f"no key is trusted for {peer}: `zc-handoff keys trust {peer} FILE` first")
        failure = LinkError("unreachable", f"{address} has no address")
        for family, sockaddr in await resolve(parse(address)):
            try:
                return await self._greet(peer, address, family, sockaddr)
            except OSError as error:  # this host has none of that family
                failure = LinkError("unreachable", f"{peer} at {address} cannot be reached: {error}")
            except LinkError as error:
                if error.reason != "unreachable":
                    raise
                failure = error
        raise failure

    async def _greet(self, peer: str, address: str, family: int, sockaddr: SocketAddress) -> QuicLink:
        link = await self._dial(peer, family, sockaddr)
        try:
            async with asyncio.timeout(2 * self.timing.greet_s):  # the handshake has its own; this is for the hello
                await link.opened
        except BaseException as error:
            link.close("connect-failed")
            if isinstance(error, TimeoutError):
                raise LinkError("unreachable", f"{peer} at {address} did not complete its greeting in time") from error
            raise
        return link

    async def close(self) -> None:
        """Close every link with reason "shutdown" and wait until thread and sockets are gone."""
        for link in list(self._links):
            link.close("shutdown")
        await asyncio.gather(*(link.ended.wait() for link in list(self._links)))
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)

    async def _dial(self, peer: str, family: int, sockaddr: SocketAddress) -> QuicLink:
        packed = pack_address(family, sockaddr)
        made: asyncio.Future[QuicLink] = asyncio.get_running_loop().create_future()

        def connect(engine: Engine) -> int:
            if family not in self._callers:
                sock = socket.socket(family, socket.SOCK_DGRAM)
                sock.bind((_ANYWHERE[socket.AddressFamily(family)], 0))
                self._callers[family] = engine.add_socket(sock, accept=False)
            number = engine.connect(self._callers[family], packed)
            if number == 0:
                raise LinkError("too-many-links", "this host has as many QUIC links as it may: close some")
            self._peers[number] = peer
            self.mailbox.post(self._dialled, number, peer, made)  # before anything is heard of it
            return number

        try:
            await self._call(connect)
        except BaseException:
            if not made.cancel():
                made.result().close("connect-failed")
            raise
        return made.result()  # it may have ended already: then `opened` says why

    async def _call(self, command: Callable[[Engine], int]) -> int:
        """The command's result, from the engine's thread. Raises what it raises, or LinkError once that has ended."""
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                self.mailbox.post(_resolve, result, command(engine), None)
            except Exception as error:
                self.mailbox.post(_resolve, result, 0, error)

        engine = self.engine
        if not engine.post(run):
            raise LinkError("closed", "this host's QUIC endpoint has been closed: start another one")
        return await result

    # -- the loop: what the engine's thread reported

    def _dialled(self, number: int, peer: str, made: asyncio.Future[QuicLink]) -> None:
        link = QuicLink(self, number, peer, connecting=True)
        self._links.add(link)
        self._connections[number] = link
        if made.cancelled():
            link.close("connect-failed")
        else:
            made.set_result(link)

    def _opened(self, number: int, peer: str) -> None:
        if number not in self._connections:
            link = QuicLink(self, number, peer, connecting=False)
            self._links.add(link)
            self._connections[number] = link
        link = self._connections[number]
        self.engine.post(lambda: self._receive(number, link))
        link.start()

    def _report(self, number: int, what: str, *args: Any) -> None:
        link = self._connections.get(number)
        if link is not None:
            getattr(link, what)(*args)

    def _closed(self, number: int, why: int, code: int, reason: str) -> None:
        link = self._connections.pop(number, None)
        if link is not None:
            link.connection_closed(why, code, reason)

    # -- on the engine's thread

    def _receive(self, number: int, link: QuicLink) -> None:
        if number in self._peers:  # else it has ended meanwhile
            self._receiving[number] = link

    def verify(self, link: int, certificate: bytes) -> bool:
        with contextlib.suppress(LinkError, OSError):
            name = self.keys.peer_of(certificate)
            return name is not None and self._peers.setdefault(link, name) == name
        return False

    def opened(self, link: int) -> None:
        self.mailbox.post(self._opened, link, self._peers[link])

    def control(self, link: int, data: bytes) -> None:
        self.mailbox.post(self._report, link, "control_data", data)

    def control_acked(self, link: int, size: int) -> None:
        self.mailbox.post(self._report, link, "control_acked", size)

    def claim(self, link: int, page: int, header: bytes, payload_bytes: int) -> Any:
        return self._receiving[link].on_claim(page, header, payload_bytes) if link in self._receiving else ffi.NULL

    def landed(self, link: int, page: int) -> None:
        self._receiving[link].on_landed(page)

    def lost(self, link: int, page: int, written: int) -> None:
        self._receiving[link].on_lost(page, written)

    def sent(self, link: int, page: int, outcome: int) -> None:
        self.mailbox.post(self._report, link, "page_sent", page, outcome)

    def closed(self, link: int, why: int, code: int, reason: str) -> None:
        self._peers.pop(link, None)
        self._receiving.pop(link, None)
        self.mailbox.post(self._closed, link, why, code, reason)

    # -- for links

    def link_opening(self, link: QuicLink) -> None:
        check_share(link, self._links)

    def link_ended(self, link: QuicLink) -> None:
        self._links.discard(link)


def _identity(keys: KeyStore) -> str:
    keys.show()  # refuses a missing key and loose permissions
    return (keys.directory / "identity.pem").read_text()


def _resolve(result: asyncio.Future[int], value: int, error: Exception | None) -> None:
    if result.done():
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)


def pack_address(family: int, sockaddr: SocketAddress) -> bytes:
    """A struct sockaddr_in or sockaddr_in6."""
    size = 16 if family == socket.AF_INET else 28
    head = struct.pack("=H", family) if sys.platform == "linux" else struct.pack("=BB", size, family)
    port = struct.pack("!H", sockaddr[1])
    if family == socket.AF_INET:
        return head + port + socket.inet_aton(sockaddr[0]) + bytes(8)
    scope = struct.pack("=I", sockaddr[3])
    return head + port + bytes(4) + socket.inet_pton(socket.AF_INET6, sockaddr[0].partition("%")[0]) + scope
