"""Who this host knows and what each of them can do now: links, hellos, reconnecting.

Owns the links. Every configured peer with an address is dialled until a link stands, again whenever it falls. A peer
may also dial us; with two links between the same hosts the newest carries new handoffs and the other ends with its
last. A peer is usable for nothing until its HELLO has come. A new boot id under the same name means the peer
restarted: what was known of it is forgotten first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from planner.placement import Prefiller
from transport.link import Endpoint, Link, LinkError, PageSink
from zerocopy.daemon.telemetry import log_event
from zerocopy.handoff.components import Identity
from zerocopy.handoff.errors import HandoffError, RemoteProtocolError
from zerocopy.handoff.matching import identity_mismatch
from zerocopy.handoff.messages import AnyMessage, Hello, decode, encode

FIRST_REDIAL_S: Final = 0.2
MAX_REDIAL_S: Final = 5.0


class LinkListener(Protocol):
    """Who serves the messages of a peer once it has said HELLO."""

    def sink(self, link: Link) -> PageSink: ...

    def peer_message(self, link: Link, message: AnyMessage) -> None: ...

    def link_lost(self, link: Link, reason: str) -> None: ...


@dataclass
class Peer:
    """One peer as this host sees it. `links` is newest last; `last_error` says why it is not connected."""

    name: str
    addresses: tuple[str, ...] = ()
    links: list[Link] = field(default_factory=list)
    hello: Hello | None = None
    last_error: str = "not connected yet"

    @property
    def link(self) -> Link | None:
        return self.links[-1] if self.links else None


class Peers:
    """Implements `transport.link.LinkOwner`."""

    def __init__(
        self, addresses: Mapping[str, tuple[str, ...]], hello: Callable[[], Hello], listener: LinkListener
    ) -> None:
        self._peers = {name: Peer(name, many) for name, many in addresses.items()}
        self._hello = hello
        self._listener = listener
        self._greeted: dict[Link, Hello] = {}

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    async def dial(self, endpoint: Endpoint) -> None:
        """Keep every configured peer connected, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for peer in self.all():
                if peer.addresses:
                    group.create_task(self._keep_connected(endpoint, peer))

    async def _keep_connected(self, endpoint: Endpoint, peer: Peer) -> None:
        delay = FIRST_REDIAL_S
        for address in itertools.cycle(peer.addresses):
            if peer.link is None:
                try:
                    await endpoint.connect(peer.name, address)
                    delay = FIRST_REDIAL_S
                except (LinkError, OSError) as error:
                    if str(error) != peer.last_error:
                        log_event("cannot reach peer", level=logging.WARNING, peer=peer.name, detail=str(error))
                    peer.last_error = str(error)
                    delay = min(2 * delay, MAX_REDIAL_S)
            await asyncio.sleep(delay)

    def announce(self) -> None:
        """Tell every connected peer what this host is now (engine up or down)."""
        for peer in self.all():
            for link in list(peer.links):
                _say(link, self._hello())

    # -- LinkOwner -----------------------------------------------------------------------------------------

    def link_opened(self, link: Link) -> PageSink:
        peer = self._peers.setdefault(link.peer, Peer(link.peer))
        peer.links.append(link)
        log_event("link open", peer=link.peer, transport=link.transport)
        # Not in this very call: the link takes messages once it has its sink.
        asyncio.get_running_loop().call_soon(lambda: _say(link, self._hello()))
        return self._listener.sink(link)

    def link_message(self, link: Link, message: bytes) -> None:
        try:
            decoded = decode(message)
            if isinstance(decoded, Hello):
                self._greet(link, decoded)
            elif link in self._greeted:
                self._listener.peer_message(link, decoded)
            else:
                raise RemoteProtocolError("no-hello", "peer sent a message before HELLO")
        except HandoffError as error:
            log_event("closing link", level=logging.ERROR, peer=link.peer, reason=error.reason, detail=str(error))
            link.close(error.reason)

    def link_closed(self, link: Link, reason: str) -> None:
        peer = self._peers[link.peer]
        peer.links = [other for other in peer.links if other is not link]
        self._greeted.pop(link, None)
        peer.hello = self._greeted.get(peer.links[-1]) if peer.links else None
        peer.last_error = f"link closed: {reason}"
        log_event("link closed", peer=link.peer, reason=reason)
        self._listener.link_lost(link, reason)

    def _greet(self, link: Link, hello: Hello) -> None:
        self._greeted[link] = hello
        peer = self._peers[link.peer]
        if peer.hello is not None and peer.hello.boot_id != hello.boot_id:
            log_event("peer restarted", level=logging.WARNING, peer=link.peer)
            for old in [other for other in peer.links if other is not link]:
                old.close("peer-restarted")
        peer.hello = hello

    # -- what they can do ----------------------------------------------------------------------------------

    def prefillers(self, mine: Identity) -> list[Prefiller]:
        """Every peer as a candidate, with the obstacle that keeps it from prefilling for this host."""
        return [Prefiller(peer.name, _obstacle(peer, "prefill", mine)) for peer in self.all()]

    def link_to(self, name: str) -> Link | None:
        peer = self._peers.get(name)
        return peer.link if peer else None

    def share(self, places: int) -> int:
        """How many of so many places one peer may hold: all but one where there are others to keep it for."""
        return places - 1 if sum(peer.link is not None for peer in self.all()) > 1 else places

    def decoder(self) -> Link | None:
        """A connected peer whose engine is up and that decodes: where a prefill-only host sends its requests."""
        for peer in self.all():
            if peer.link and peer.hello and "decode" in peer.hello.roles and peer.hello.identity:
                return peer.link
        return None


def _obstacle(peer: Peer, role: str, mine: Identity) -> str | None:
    if peer.link is None:
        return peer.last_error
    if peer.hello is None:
        return "it has not said hello yet"
    if role not in peer.hello.roles:
        return f"its roles are {', '.join(peer.hello.roles)}, not {role}"
    if peer.hello.identity is None:
        return "its engine is not up"
    mismatch = identity_mismatch(decoder=mine, prefiller=peer.hello.identity)
    return None if mismatch is None else str(mismatch)


def _say(link: Link, hello: Hello) -> None:
    try:
        link.send(encode(hello))
    except LinkError as error:
        log_event("could not greet", level=logging.WARNING, peer=link.peer, detail=str(error))
