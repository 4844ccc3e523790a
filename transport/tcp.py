"""The TCP endpoint: listens on one port for control and bulk connections, connects to peers, keeps the links.

What a connection must prove, and how, is `docs/attacks.md`. Owns the door and the links; a link owns its connections.
Bounds: `MAX_LINKS_PER_PEER`, the door's strangers, and those of a link.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from native.cores import usable_cores
from transport.address import SocketAddress, parse, resolve
from transport.dial import dial
from transport.frames import ID_BYTES, KEY_BYTES, MAGIC, MAX_RECORD, MIN_RECORD, OPENING, PREAMBLE, key_chains
from transport.keys import KeyStore
from transport.link import LinkError, LinkOwner, Timing, check_share
from transport.streams import StreamCount
from transport.tcp_bulk import SOCKET_BUFFER
from transport.tcp_control import Control
from transport.tcp_door import Door, DoorCounts, StrangerLimits
from transport.tcp_link import MAX_STREAMS, TcpLink, check_opening, opening, receive_exactly

DEFAULT_RECORD_BYTES: Final = (
    2 << 20
)  # measured beside 256 KiB to 4 MiB: each costs its Python, cold, and some wake-ups
_TLS_NAME: Final = "zc-handoff"  # sent in the clear, so the same for everyone; never checked


def stream_count(configured: int = 0) -> StreamCount:
    """What a link connected from here begins with."""
    return StreamCount(configured, usable_cores(), SOCKET_BUFFER)


class TcpEndpoint:
    """Construct inside a running event loop. `streams` and `record_bytes` apply to links connected from here; 0 streams
    are chosen for the path (`transport.streams`)."""

    def __init__(
        self,
        keys: KeyStore,
        owner: LinkOwner,
        *,
        streams: int = 0,
        record_bytes: int = DEFAULT_RECORD_BYTES,
        timing: Timing | None = None,
        limits: StrangerLimits | None = None,
        congestion: str | None = None,
        key_bytes: int = KEY_BYTES,
    ) -> None:
        """`congestion` names a TCP congestion control for bulk connections; the kernel's default otherwise."""
        if not 0 <= streams <= MAX_STREAMS or not MIN_RECORD <= record_bytes <= MAX_RECORD:
            raise ValueError(f"{streams} streams of {record_bytes}-byte records are out of bounds")
        self.keys = keys
        self.owner = owner
        self.timing = timing or Timing()
        self.record_bytes = record_bytes
        self.key_bytes = key_bytes
        self.congestion = congestion
        self.expected: dict[bytes, tuple[TcpLink, bytes]] = {}
        self._streams = streams
        self._links: set[TcpLink] = set()
        self._door = Door(self._greet_control, self._greet_bulk, self.timing.greet_s, limits or StrangerLimits())

    @property
    def strangers(self) -> DoorCounts:
        return self._door.counts

    async def listen(self, address: str) -> str:
        return str(await self._door.listen(parse(address)))

    async def connect(self, peer: str, address: str) -> TcpLink:
        """A link with all its streams. Raises LinkError; `link_closed` follows if `link_opened` was called."""
        context = self.keys.client_context(peer)
        sock, sockaddr = await self._reach(peer, address)
        link = TcpLink(self, connecting=(peer, sockaddr, stream_count(self._streams)))
        self._links.add(link)
        try:
            async with asyncio.timeout(self.timing.greet_s):
                await self._handshake(link, sock, context, f"{peer} at {address}")
                await link.opened
            await link.open_streams()
        except BaseException as error:
            link.close("connect-failed")
            if isinstance(error, TimeoutError):
                raise LinkError("unreachable", f"{peer} at {address} did not complete its greeting in time") from error
            if isinstance(error, LinkError) and error.reason == "connection-lost":
                hint = "is this host's key trusted there? Compare `keys list` there with `keys show --json` here"
                raise LinkError("refused", f"{peer} at {address} hung up during the greeting: {hint}") from error
            if isinstance(error, OSError):
                raise LinkError("unreachable", f"{peer} at {address}: bulk connection failed ({error})") from error
            raise
        return link

    async def close(self) -> None:
        """Close every link with reason "shutdown" and wait until all threads and sockets are gone."""
        await self._door.close()
        links = list(self._links)
        for link in links:
            link.close("shutdown")
        await asyncio.gather(*(link.ended.wait() for link in links))

    # -- connecting

    async def _reach(self, peer: str, address: str) -> tuple[socket.socket, SocketAddress]:
        failure: Exception | None = None
        for _, sockaddr in await resolve(parse(address)):
            try:
                async with asyncio.timeout(self.timing.greet_s):
                    return await dial(sockaddr), sockaddr
            except OSError as error:  # a timeout, too
                failure = error
        why = failure or "no address"
        raise LinkError("unreachable", f"{peer} at {address} cannot be reached ({why}): is its daemon running?")

    async def _handshake(self, link: TcpLink, sock: socket.socket, context: ssl.SSLContext, whom: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(
                lambda: Control(link),
                sock=sock,
                ssl=context,
                server_hostname=_TLS_NAME,
                ssl_handshake_timeout=self.timing.greet_s,
                ssl_shutdown_timeout=1.0,
            )
        except ssl.SSLCertVerificationError as error:
            hint = "compare `zc-handoff keys show --json` there with `keys list` here"
            raise LinkError("wrong-key", f"{whom} showed a key that is not the one trusted: {hint}") from error
        except OSError as error:
            raise LinkError("refused", f"{whom} ended the TLS handshake ({error}): is it zc-handoff?") from error

    # -- accepting

    async def _greet_control(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            context = self.keys.server_context()
        except (LinkError, OSError):
            sock.close()
            raise
        link = TcpLink(self, connecting=None)
        self._links.add(link)
        try:
            await loop.connect_accepted_socket(  # owns the socket from here on, also when it fails
                lambda: Control(link),
                sock,
                ssl=context,
                ssl_handshake_timeout=self.timing.greet_s,
                ssl_shutdown_timeout=1.0,
            )
            await link.opened
        except BaseException:
            link.close("stranger")
            raise

    async def _greet_bulk(self, sock: socket.socket) -> None:
        try:
            await self._accept_stream(sock)
        except BaseException:
            sock.close()
            raise

    async def _accept_stream(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        first = await receive_exactly(loop, sock, PREAMBLE)
        stream_id = first[len(MAGIC) :]
        if not first.startswith(MAGIC) or len(stream_id) != ID_BYTES or stream_id not in self.expected:
            raise LinkError("stranger", "no link expects this bulk connection")
        link, secret = self.expected[stream_id]
        keys = key_chains(secret, stream_id, connecting=False, key_bytes=self.key_bytes)
        check_opening(keys[1], stream_id, await receive_exactly(loop, sock, OPENING))
        if self.expected.pop(stream_id, None) is None:
            raise LinkError("stranger", "the stream was opened by someone else, or its link closed, meanwhile")
        await loop.sock_sendall(sock, opening(keys[0], stream_id))
        link.adopt(sock, keys)

    # -- for links

    def link_opening(self, link: TcpLink) -> None:
        check_share(link, self._links)

    def link_ended(self, link: TcpLink) -> None:
        self._links.discard(link)
