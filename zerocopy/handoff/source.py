"""The prefiller's end of a handoff: asks for room, streams under credit, proves that nothing was left out.

Owns the credit account and a ledger of what it has sent. Pages, ring and engine state belong to the worker; the host
keeps them until `Release` and the source's engine state until `Ended` (H4).

    queued -> reserve() -> GRANT -> page_sent() ... -> manifest() -> COMMIT_ACK
"""

from __future__ import annotations

from collections.abc import Mapping

from zerocopy.handoff.components import Component, Identity, PageHeader, StateSchema, record_bytes
from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError
from zerocopy.handoff.ledger import Binding, Ledger, required_components
from zerocopy.handoff.machine import Action, Machine, Outcome, Send
from zerocopy.handoff.matching import identity_mismatch
from zerocopy.handoff.messages import (
    CommitAck,
    Credit,
    Estimate,
    Grant,
    HandoffMessage,
    Manifest,
    Prefill,
    Reject,
    Reserve,
)
from zerocopy.handoff.states import Event, Role


class SourceHandoff(Machine):
    """One PREFILL being served. `largest_page` is the biggest payload that will ride in a ring record, in bytes."""

    def __init__(
        self, prefill: Prefill, identity: Identity, schema: StateSchema, *, largest_page: int, now: float
    ) -> None:
        super().__init__(Role.SOURCE, prefill.handoff_id, prefill.queue_deadline_s, now)
        self.tokens = prefill.tokens - 1  # the decoder evaluates the last one itself
        self.probe = prefill.probe
        self.grant: Grant | None = None  # epoch and checksum seed for the exporter, once granted
        self.required = required_components(schema, prefill.probe)
        self._prefill_identity = prefill.identity
        self._tenant = prefill.tenant
        self._identity = identity
        self._schema = schema
        self._largest_page = largest_page
        self._ledger: Ledger | None = None
        self._spent = 0
        self._limit = 0

    def reserve(self) -> list[Action]:
        """This handoff's turn has come: ask the decoder for room, or refuse a prompt that does not fit this host."""
        if self.tokens < 1:
            return self.fail("prompt-too-short", "a one-token prompt has no state to hand over: prefill it locally")
        if mismatch := identity_mismatch(decoder=self._prefill_identity, prefiller=self._identity):
            return self.fail_with(mismatch)
        self._advance(Event.RESERVE)
        reserve = Reserve(
            handoff_id=self.handoff_id,
            identity=self._identity,
            state=self._schema,
            tenant=self._tenant,
            tokens=self.tokens,
            largest_page=self._largest_page,
            components=tuple(Estimate(c, self._estimate(c)) for c in self.required),
        )
        return [Send(reserve)]

    def may_send(self, header: PageHeader) -> bool:
        """There is credit for this page now. Raises LocalProtocolError for one that no amount of credit lets out."""
        cost = record_bytes(header.component, header.payload_bytes)
        if self.grant is not None and cost > self.grant.credit:
            raise LocalProtocolError(
                "page-too-large",
                f"{header.address}: needs {cost} bytes of landing ring, the decoder's window is {self.grant.credit}: "
                "raise its ring size or lower the page size here",
            )
        return self._spent + cost <= self._limit

    @property
    def next_sequence(self) -> int:
        """The number that the next page must carry."""
        return self._granted_ledger().next_sequence()

    def page_sent(self, header: PageHeader) -> None:
        """A page goes to the link. Raises LocalProtocolError for one that the sink would refuse."""
        self._advance(Event.PAGE)
        if not self.may_send(header):
            raise LocalProtocolError("credit", f"{header.address}: no credit left, {self._spent} of {self._limit} used")
        ledger = self._granted_ledger()
        try:
            ledger.claim(header)
        except RemoteProtocolError as error:  # the ledger blames whoever made the page: here, this host
            raise LocalProtocolError(error.reason, str(error)) from None
        ledger.land(header)
        self._spent += record_bytes(header.component, header.payload_bytes)
        self._page_begins()

    def page_done(self) -> list[Action]:
        """The link reads one sent page no more, whether it arrived or not."""
        return self._page_ends()

    def manifest(
        self, position: int, mtp_position: int | None, timings: Mapping[str, float] | None = None, *, solo: bool = False
    ) -> list[Action]:
        """All is sent. Raises LocalProtocolError naming the component that is missing or has a gap."""
        ledger = self._granted_ledger()
        try:
            ledger.check_complete()
        except RemoteProtocolError as error:
            raise LocalProtocolError(error.reason, str(error)) from None
        self._advance(Event.MANIFEST)
        manifest = Manifest(
            handoff_id=self.handoff_id,
            epoch=self.epoch,
            components=ledger.summary(),
            position=position,
            mtp_position=mtp_position,
            solo=solo,
            timings=dict(timings or {}),
        )
        return [Send(manifest)]

    def _receive(self, message: HandoffMessage, now: float) -> list[Action]:
        match message:
            case Grant():
                self._advance(Event.GRANT)
                self._accept(message, now)
                return []
            case Credit():
                self._advance(Event.CREDIT)
                return self._raise_limit(message.limit)
            case Reject():
                self._advance(Event.REJECT)
                return self._end(Outcome(False, message.reason, message.message, by_peer=True))
            case CommitAck():
                self._advance(Event.COMMIT_ACK)
                return self._end(Outcome(True, "committed"))
        raise self._unexpected(message)

    def _accept(self, grant: Grant, now: float) -> None:
        self.grant = grant
        self.epoch = grant.epoch
        self._limit = grant.credit
        self._start_clock(grant.deadline_s, now)
        binding = Binding(self.handoff_id, self._identity.digest(), grant.epoch)
        self._ledger = Ledger(self._schema, self.required, self.tokens, binding)

    def _raise_limit(self, limit: int) -> list[Action]:
        if limit < self._limit:
            raise RemoteProtocolError("credit", f"credit limit went back from {self._limit} to {limit}")
        self._limit = limit
        return []

    def _granted_ledger(self) -> Ledger:
        if self._ledger is None:
            raise LocalProtocolError("out-of-order", f"handoff {self.handoff_id.hex()} has not been granted")
        return self._ledger

    def _estimate(self, component: Component) -> int:
        """Bytes if sent as one page; every further page adds its overheads."""
        spec = self._schema.spec(component)
        return spec.page_bytes((0, spec.layers), (0, self.tokens)) if spec else 0
