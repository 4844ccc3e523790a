"""Who this host knows and what each of them can do now: links and hellos.

Owns the links. `PeerPaths` keeps every configured peer connected; a peer may also dial us. A link is usable for nothing
until HELLO has gone both ways, the dialler's first; until then it carries probe pages only. With several usable links
between two hosts the leader's choice carries new handoffs and the others end with their last. A new boot id under the
same name means the peer restarted: what was known of it is forgotten first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from planner.placement import Prefiller
from transport.link import Endpoint, Link, LinkError, PageSink
from transport.probe import ProbeSink
from zerocopy.daemon.paths import BY_PEER, PeerPaths
from zerocopy.daemon.telemetry import log_event
from zerocopy.handoff.components import Identity
from zerocopy.handoff.errors import HandoffError, RemoteProtocolError
from zerocopy.handoff.matching import identity_mismatch
from zerocopy.handoff.messages import AnyMessage, Hello, decode, encode

# A link that is not needed any more stays this long, and as long as it is busy: the peer may have sent something over
# it before it learned of the other one.
RETIRE_AFTER_S: Final = 5.0
# What a smaller handoff reaches says more about latency than about bandwidth.
MIN_TRANSFER_BYTES: Final = 4 << 20


class LinkListener(Protocol):
    """Who serves the messages of a peer once it has said HELLO."""

    def sink(self, link: Link) -> PageSink: ...

    def busy(self, link: Link) -> bool:
        """Whether a handoff or a request runs over it."""

    def peer_message(self, link: Link, message: AnyMessage) -> None: ...

    def link_lost(self, link: Link, reason: str) -> None: ...


@dataclass
class Peer:
    """One peer as this host sees it. `links` are the usable ones, newest last; `link` carries new handoffs;
    `last_error` says why there is none, `mismatch` why the two will not hand state to each other all the same."""

    name: str
    paths: PeerPaths | None = None  # where this host has addresses of it
    links: list[Link] = field(default_factory=list)
    link: Link | None = None
    preferred: Link | None = None  # of those that this host dialled
    hello: Hello | None = None
    last_error: str = "not connected yet"
    retiring: asyncio.TimerHandle | None = None  # of the links that are not needed
    mismatch: str | None = None


class Peers:
    """Implements `transport.link.LinkOwner`."""

    def __init__(
        self, addresses: Mapping[str, tuple[str, ...]], hello: Callable[[], Hello], listener: LinkListener
    ) -> None:
        self._peers = {name: Peer(name) for name in addresses}
        for name, many in addresses.items():
            if many:
                self._peers[name].paths = PeerPaths(name, many, _Paths(self, self._peers[name]))
        self._hello = hello
        self._listener = listener
        self._greeted: dict[Link, Hello] = {}  # the peer's HELLO came
        self._said: set[Link] = set()  # ours went
        self._dialled: set[Link] = set()

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    async def dial(self, endpoint: Endpoint) -> None:
        """Keep every configured peer connected, until cancelled: also where there is none."""
        async with asyncio.TaskGroup() as group:
            for peer in self.all():
                if peer.paths is not None:
                    group.create_task(peer.paths.keep(endpoint))
            await asyncio.Event().wait()

    def announce(self) -> None:
        """Tell every connected peer what this host is now (engine up or down)."""
        for peer in self.all():
            self._compare(peer)
            for link in list(peer.links):
                _say(link, self._hello())

    def transferred(self, name: str, nbytes: float, seconds: float) -> None:
        """A handoff with this peer committed after `nbytes` had needed `seconds` on the wire."""
        peer = self._peers.get(name)
        if peer and peer.paths and peer.link and nbytes >= MIN_TRANSFER_BYTES and seconds > 0:
            peer.paths.transferred(8 * nbytes / seconds, peer.link.stats.rtt_s)

    # -- LinkOwner -----------------------------------------------------------------------------------------

    def link_opened(self, link: Link) -> PageSink:
        return ProbeSink(self._listener.sink(link))

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
        peer, hello = self._peers.get(link.peer), self._greeted.pop(link, None)
        if peer is None or (hello is None and link not in self._said):
            return  # it was only measured, or never got further
        self._said.discard(link)
        self._dialled.discard(link)
        peer.last_error = f"link closed: {reason}"
        log_event("link closed", peer=link.peer, reason=reason)
        if hello is not None:
            peer.links.remove(link)
            self._settle(peer)
            peer.hello = self._greeted[peer.link] if peer.link else None
            self._listener.link_lost(link, reason)
        if peer.paths is not None:
            peer.paths.lost(link, reason)

    def _greet(self, link: Link, hello: Hello) -> None:
        peer = self._peers.setdefault(link.peer, Peer(link.peer))
        if peer.hello is not None and peer.hello.boot_id != hello.boot_id:
            log_event("peer restarted", level=logging.WARNING, peer=link.peer)
            for old in [other for other in peer.links if other is not link]:
                old.close("peer-restarted")
        if link not in self._said:
            self._said.add(link)
            _say(link, self._hello())
        if link not in self._greeted:
            peer.links.append(link)
            log_event("link open", peer=link.peer, transport=link.transport)
            if len(peer.links) > 1:
                self._retire_later(peer)
        self._greeted[link] = hello
        peer.hello = hello
        self._settle(peer)
        self._compare(peer)
        if peer.paths is not None:
            peer.paths.heard(hello.addresses)

    def _compare(self, peer: Peer) -> None:
        """Say once what keeps two hosts apart that are both up: requests may fall back in silence for ever."""
        why = _mismatch(self._hello(), peer.hello) if peer.hello else None
        if why is not None and why != peer.mismatch:
            log_event("no handoffs with peer", level=logging.WARNING, peer=peer.name, detail=why)
        peer.mismatch = why

    # -- which link ----------------------------------------------------------------------------------------

    def use(self, link: Link) -> None:
        """A link that this host dialled, for new handoffs once the peer has answered. Raises LinkError."""
        link.send(encode(self._hello()))
        self._said.add(link)
        self._dialled.add(link)
        self._peers.setdefault(link.peer, Peer(link.peer)).preferred = link

    def _settle(self, peer: Peer) -> None:
        """The leader's choice carries what is new; the other host follows it."""
        theirs = [link for link in peer.links if link not in self._dialled]
        usable = peer.links if self.leads(peer) else theirs or peer.links
        peer.link = peer.preferred if peer.preferred in usable else usable[-1] if usable else None

    def leads(self, peer: Peer) -> bool:
        """Both hosts come to the same answer: only one of them has dialled, or the lower boot id decides."""
        return peer.hello is None or self._dialled.issuperset(peer.links) or self._hello().boot_id < peer.hello.boot_id

    def idle(self, peer: Peer) -> bool:
        return not any(self._listener.busy(link) for link in peer.links)

    def _retire_later(self, peer: Peer) -> None:
        if peer.retiring is not None:
            peer.retiring.cancel()  # the newest of its links is to stay its time, too
        peer.retiring = asyncio.get_running_loop().call_later(RETIRE_AFTER_S, self._retire, peer)

    def _retire(self, peer: Peer) -> None:
        """The leader closes what is not needed; two who both did might close each other's."""
        spare = [link for link in peer.links if link is not peer.link] if self.leads(peer) else []
        busy = [link for link in spare if self._listener.busy(link)]
        for link in spare:
            if link not in busy:
                link.close("superseded")
        if busy:
            self._retire_later(peer)

    # -- what they can do ----------------------------------------------------------------------------------

    def describe(self, peer: Peer) -> dict[str, object]:
        """For /v1/status."""
        stats = peer.link.stats if peer.link else None
        return {
            "name": peer.name,
            "connected": peer.link is not None,
            "roles": list(peer.hello.roles) if peer.hello else [],
            "transport": peer.link.transport if peer.link else None,
            "rtt_ms": 1e3 * stats.rtt_s if stats and stats.rtt_s is not None else None,
            "streams": stats.streams if stats else None,
            "streams_reason": stats.streams_reason if stats else None,
            "last_error": None if peer.link else peer.last_error,
            "mismatch": peer.mismatch if peer.link else None,
            **(peer.paths.describe() if peer.paths else {"path": None, "path_reason": BY_PEER, "paths": []}),
        }

    def prefillers(self, mine: Identity) -> list[Prefiller]:
        """Every peer as a candidate, with the obstacle that keeps it from prefilling for this host."""
        return [Prefiller(peer.name, _obstacle(peer, "prefill", mine)) for peer in self.all()]

    def link_to(self, name: str) -> Link | None:
        peer = self._peers.get(name)
        return peer.link if peer else None

    def share(self, places: int) -> int:
        """How many of so many places one peer may hold: all but one where there are others to keep it for."""
        return places - 1 if sum(peer.link is not None for peer in self.all()) > 1 else places

    def decoder(self, mine: Identity) -> tuple[Link | None, str]:
        """A connected peer that decodes this host's model: where a prefill-only host sends its requests. Else why none.
        Other differences only keep state from being handed over; another model would answer in this one's name."""
        obstacles = list[str]()
        for peer in self.all():
            if peer.link is None or peer.hello is None or "decode" not in peer.hello.roles:
                continue
            why = _foreign(peer.hello.identity, mine)
            if why is None:
                return peer.link, ""
            obstacles.append(f"{peer.name}: {why}")
        return (
            None,
            f"no decode peer can serve ({'; '.join(obstacles)})" if obstacles else "no decode peer is connected",
        )


def _foreign(decoder: Identity | None, mine: Identity) -> str | None:
    if decoder is None:
        return "its engine is not up"
    if (decoder.model, decoder.tokenizer, decoder.architecture) == (mine.model, mine.tokenizer, mine.architecture):
        return None
    return str(identity_mismatch(decoder=decoder, prefiller=mine))  # which names these first


def _mismatch(mine: Hello, theirs: Hello) -> str | None:
    """Why two hosts whose roles fit will not hand state over; None also while the engine of one is not up."""
    if mine.identity is None or theirs.identity is None:
        return None
    if "decode" in mine.roles and "prefill" in theirs.roles:
        found = identity_mismatch(decoder=mine.identity, prefiller=theirs.identity)
    elif "prefill" in mine.roles and "decode" in theirs.roles:
        found = identity_mismatch(decoder=theirs.identity, prefiller=mine.identity)
    else:
        return None  # two decoders may know each other
    return None if found is None else str(found)


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


class _Paths:
    """One peer, as `PeerPaths` sees it."""

    def __init__(self, peers: Peers, peer: Peer) -> None:
        self._peers = peers
        self._peer = peer

    def standing(self) -> Link | None:
        return self._peer.link

    def leads(self) -> bool:
        return self._peers.leads(self._peer)

    def idle(self) -> bool:
        return self._peers.idle(self._peer)

    def use(self, link: Link) -> None:
        self._peers.use(link)

    def unreachable(self, why: str) -> None:
        if why != self._peer.last_error:
            log_event("cannot reach peer", level=logging.WARNING, peer=self._peer.name, detail=why)
        self._peer.last_error = why


def _say(link: Link, hello: Hello) -> None:
    try:
        link.send(encode(hello))
    except LinkError as error:
        log_event("could not greet", level=logging.WARNING, peer=link.peer, detail=str(error))
