"""What source and sink have in common: one outcome, one deadline, memory given back once, late things counted.

A machine never blocks, sleeps or sends: every method returns the actions its host must carry out, in order. It keeps
no thread's lock; calls for one handoff must not run at the same time.
"""

from __future__ import annotations

import msgspec

from zerocopy.handoff.errors import HandoffError, LocalProtocolError, RemoteProtocolError
from zerocopy.handoff.messages import Abort, CommitAck, Credit, HandoffMessage, Manifest
from zerocopy.handoff.states import INITIAL, OVER, Event, Role, State, advance

_OF_AN_EPOCH = Credit | Manifest | CommitAck | Abort


class Outcome(msgspec.Struct, frozen=True):
    """How a handoff ended. `reason` is "committed" or the slug of what went wrong; `by_peer`: the peer said so."""

    committed: bool
    reason: str
    message: str = ""
    by_peer: bool = False


class Send(msgspec.Struct, frozen=True):
    """Send this to the peer. When the link is gone, do nothing."""

    message: HandoffMessage


class Ended(msgspec.Struct, frozen=True):
    """The outcome; exactly one per handoff. After an abort the engine's session must be dropped too."""

    outcome: Outcome


class Release(msgspec.Struct, frozen=True):
    """Wipe and give back ring and slab; exactly one per handoff, after `Ended` and once no link touches a page."""


Action = Send | Ended | Release


class Machine:
    """State, outcome, deadline and drain of one end. Subclasses add what is theirs."""

    def __init__(self, role: Role, handoff_id: bytes, queue_deadline_s: float, now: float) -> None:
        self.handoff_id = handoff_id
        self.state = INITIAL[role]
        self.outcome: Outcome | None = None
        self.epoch = 0
        self.late = 0  # messages and pages that came after the end, or of an epoch that is over
        self._role = role
        self._start_clock(queue_deadline_s, now)
        self._pages_in_flight = 0

    @property
    def over(self) -> bool:
        """The outcome is decided."""
        return self.state in OVER

    def receive(self, message: HandoffMessage, now: float) -> list[Action]:
        """A message of this handoff from the peer. What the protocol does not allow ends the handoff."""
        if message.handoff_id != self.handoff_id:
            raise LocalProtocolError("routing", f"{message!r} was given to handoff {self.handoff_id.hex()}")
        if self.over or self._stale(message):
            self.late += 1
            return []
        if expired := self.tick(now):
            self.late += 1
            return expired
        try:
            self._check_epoch(message)
            if isinstance(message, Abort):
                self._advance(Event.ABORT)
                return self._end(Outcome(False, message.reason, message.message, by_peer=True))
            return self._receive(message, now)
        except RemoteProtocolError as error:
            return self.fail_with(error)

    def tick(self, now: float) -> list[Action]:
        """Call at `deadline` or later, as often as you like."""
        if self.over or now < self.deadline:
            return []
        if self.epoch:
            return self.fail("transfer-deadline", f"not committed within {self._allowed_s:g} s of GRANT")
        return self.fail("queue-deadline", f"not granted within {self._allowed_s:g} s of queueing")

    def fail(self, reason: str, message: str) -> list[Action]:
        """End it from this side: cancel, fault, lost link. Does nothing once there is an outcome."""
        if self.over:
            return []
        tell_peer = self.state is not State.MINTED
        self._advance(Event.FAIL)
        abort = Abort(handoff_id=self.handoff_id, epoch=self.epoch, reason=reason, message=message[:1024])
        ending = self._end(Outcome(False, reason, message))
        return [Send(abort), *ending] if tell_peer else ending

    def fail_with(self, error: HandoffError) -> list[Action]:
        return self.fail(error.reason, str(error))

    def _receive(self, message: HandoffMessage, now: float) -> list[Action]:
        raise NotImplementedError

    def _stale(self, message: HandoffMessage) -> bool:
        """Of an epoch that is over; an ABORT of epoch 0 was sent before its sender knew the epoch."""
        if isinstance(message, Abort) and message.epoch == 0:
            return False
        return isinstance(message, _OF_AN_EPOCH) and message.epoch < self.epoch

    def _check_epoch(self, message: HandoffMessage) -> None:
        if isinstance(message, _OF_AN_EPOCH) and message.epoch > self.epoch:
            raise RemoteProtocolError(
                "epoch", f"{type(message).__name__} is of epoch {message.epoch}, granted was {self.epoch}"
            )

    def _start_clock(self, allowed_s: float, now: float) -> None:
        self._allowed_s = allowed_s
        self.deadline = now + allowed_s

    def _advance(self, event: Event) -> None:
        self.state = advance(self._role, self.state, event)

    def _unexpected(self, message: HandoffMessage) -> RemoteProtocolError:
        return RemoteProtocolError("out-of-order", f"the peer sent {type(message).__name__} to the {self._role.value}")

    def _end(self, outcome: Outcome) -> list[Action]:
        self.outcome = outcome
        return [Ended(outcome), *self._drain()]

    def _page_begins(self) -> None:
        self._pages_in_flight += 1

    def _page_ends(self) -> list[Action]:
        """A link has let go of one page's memory."""
        if self._pages_in_flight == 0:
            raise LocalProtocolError("page-accounting", "a page ended that had not begun")
        self._pages_in_flight -= 1
        return self._drain()

    def _drain(self) -> list[Action]:
        if self.state not in (State.COMMITTED, State.ABORTED) or self._pages_in_flight:
            return []
        self._advance(Event.DRAINED)
        return [Release()]
