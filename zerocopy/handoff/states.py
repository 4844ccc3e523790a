"""Every state a handoff can be in, in one table.

THEORY

A handoff moves one prompt's state from a *source* (the prefiller) to a *sink* (the decoder). Each side runs one
machine of its own; they never share state, only messages, so each must be right whatever the other does.

Both machines are a straight line from minted to COMMITTED with a trapdoor, ABORTED, beside every step. Three rules
make that enough:

1. COMMITTED and ABORTED exclude each other and neither can be left except to RELEASED. So a handoff has exactly one
   outcome. Whatever comes after the outcome is late: it is counted and dropped, it is never an error, because the
   peer may have sent it before it knew.
2. The sink alone decides. It commits when nothing is missing any more (`SinkHandoff.commit`) and says so; the source
   can only hear of it. If the source has given up meanwhile, the sink still has the whole state, so nothing is lost:
   a source that is COMMITTED implies a sink that is, and not the other way round.
3. Memory is given back on the way to RELEASED and nowhere else, and only when no page is being read or written by a
   link any more (`drained`). A slot can therefore not be reused while a late frame of this handoff may still touch it.

An event is either *local* (this host decided it) or *remote* (the peer sent it). One that the table does not allow
is that one's fault: LocalProtocolError or RemoteProtocolError. A remote one ends the handoff, not the link.

A self-loop means "allowed here, and changes nothing in the table"; what else must hold (credit, coverage, proof) is
checked by the machine that owns it.

`python -m zerocopy.handoff.diagram` draws `docs/states.svg` from the table.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError


class Role(StrEnum):
    SOURCE = "source"
    SINK = "sink"


class State(StrEnum):
    MINTED = "minted"  # sink: has an id. Nothing was sent
    QUEUED = "queued"  # source: waits for its turn. Sink: waits for RESERVE
    RESERVED = "reserved"  # source: waits for GRANT. Sink: waits for landing memory
    STREAMING = "streaming"  # pages flow; the transfer's deadline runs
    SEALED = "sealed"  # the manifest is out: no new page may be added
    COMMITTED = "committed"  # the sink may generate, the source may forget
    ABORTED = "aborted"
    RELEASED = "released"  # nothing of this handoff is held any more


class Event(StrEnum):
    PREFILL = "PREFILL"
    RESERVE = "RESERVE"
    GRANT = "GRANT"
    REJECT = "REJECT"
    PAGE = "page"
    CREDIT = "CREDIT"
    MANIFEST = "MANIFEST"
    IMPORTED = "imported"
    VERIFIED = "verified"
    COMMIT_ACK = "COMMIT_ACK"
    FAIL = "fail"  # cancel, deadline, fault, lost link
    ABORT = "ABORT"  # the peer's
    DRAINED = "drained"


_SOURCE: Final = {
    State.QUEUED: {
        Event.RESERVE: State.RESERVED,
        Event.FAIL: State.ABORTED,
        Event.ABORT: State.ABORTED,
    },
    State.RESERVED: {
        Event.GRANT: State.STREAMING,
        Event.REJECT: State.ABORTED,
        Event.FAIL: State.ABORTED,
        Event.ABORT: State.ABORTED,
    },
    State.STREAMING: {
        Event.PAGE: State.STREAMING,
        Event.CREDIT: State.STREAMING,
        Event.MANIFEST: State.SEALED,
        Event.FAIL: State.ABORTED,
        Event.ABORT: State.ABORTED,
    },
    State.SEALED: {
        Event.CREDIT: State.SEALED,
        Event.COMMIT_ACK: State.COMMITTED,
        Event.FAIL: State.ABORTED,
        Event.ABORT: State.ABORTED,
    },
    State.COMMITTED: {Event.DRAINED: State.RELEASED},
    State.ABORTED: {Event.DRAINED: State.RELEASED},
    State.RELEASED: {},
}

_SINK: Final = {
    State.MINTED: {
        Event.PREFILL: State.QUEUED,
        Event.FAIL: State.ABORTED,
    },
    State.QUEUED: {
        Event.RESERVE: State.RESERVED,
        Event.FAIL: State.ABORTED,
        Event.ABORT: State.ABORTED,
    },
    State.RESERVED: {
        Event.GRANT: State.STREAMING,
        Event.REJECT: State.ABORTED,
        Event.FAIL: State.ABORTED,
        Event.ABORT: State.ABORTED,
    },
    State.STREAMING: {
        Event.PAGE: State.STREAMING,
        Event.CREDIT: State.STREAMING,
        Event.MANIFEST: State.SEALED,
        Event.IMPORTED: State.STREAMING,
        Event.VERIFIED: State.STREAMING,
        Event.FAIL: State.ABORTED,
        Event.ABORT: State.ABORTED,
    },
    State.SEALED: {  # pages may still be on their way: the manifest travels on another stream
        Event.PAGE: State.SEALED,
        Event.CREDIT: State.SEALED,
        Event.IMPORTED: State.SEALED,
        Event.VERIFIED: State.SEALED,
        Event.COMMIT_ACK: State.COMMITTED,
        Event.FAIL: State.ABORTED,
        Event.ABORT: State.ABORTED,
    },
    State.COMMITTED: {Event.DRAINED: State.RELEASED},
    State.ABORTED: {Event.DRAINED: State.RELEASED},
    State.RELEASED: {},
}

TRANSITIONS: Final[dict[Role, dict[State, dict[Event, State]]]] = {Role.SOURCE: _SOURCE, Role.SINK: _SINK}

REMOTE: Final[dict[Role, frozenset[Event]]] = {
    Role.SOURCE: frozenset({Event.GRANT, Event.REJECT, Event.CREDIT, Event.COMMIT_ACK, Event.ABORT}),
    Role.SINK: frozenset({Event.RESERVE, Event.PAGE, Event.MANIFEST, Event.ABORT}),
}

INITIAL: Final = {Role.SOURCE: State.QUEUED, Role.SINK: State.MINTED}
OVER: Final = frozenset({State.COMMITTED, State.ABORTED, State.RELEASED})


def advance(role: Role, state: State, event: Event) -> State:
    """The next state. Raises for an event that the table does not allow, saying whose fault it is."""
    following = TRANSITIONS[role][state].get(event)
    if following is not None:
        return following
    remote = event in REMOTE[role]
    error = RemoteProtocolError if remote else LocalProtocolError
    who = "the peer sent" if remote else "this host did"
    raise error("out-of-order", f"{who} {event.value} while the {role.value} of this handoff was {state.value}")
