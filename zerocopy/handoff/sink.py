"""The decoder's end of a handoff: lets pages in, and commits only a whole, proven state.

Owns the page ledger, the credit it has given, and the one decision that matters. Landing memory, engine session and
tokens belong to the host, which must not generate before `outcome.committed` (H3).

    offer() -> RESERVE -> grant() -> accept_page(), page_landed(), released() ... -> MANIFEST
    imported() and verified() as the engine gets there; commit() when `committable`
"""

from __future__ import annotations

from collections.abc import Sequence

from zerocopy.handoff.components import (
    MAX_PAGE_BYTES,
    SNAPSHOT,
    Component,
    Identity,
    PageHeader,
    StateSchema,
    page_checksum,
    record_bytes,
)
from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError
from zerocopy.handoff.ledger import Binding, Ledger, required_components
from zerocopy.handoff.machine import Action, Machine, Outcome, Send
from zerocopy.handoff.matching import Mismatch, identity_mismatch, schema_mismatch
from zerocopy.handoff.messages import (
    CommitAck,
    Credit,
    Grant,
    HandoffMessage,
    Manifest,
    Prefill,
    Reject,
    Reserve,
    pack_tokens,
)
from zerocopy.handoff.states import Event, Role, State


class SinkHandoff(Machine):
    """One prompt handed to a prefiller. `handoff_id` must be 16 fresh random bytes; `page_room` is the biggest payload
    that a landing record takes, in bytes."""

    def __init__(
        self,
        handoff_id: bytes,
        identity: Identity,
        schema: StateSchema,
        prompt: Sequence[int],
        *,
        tenant: str,
        probe: bool,
        queue_deadline_s: float,
        now: float,
        page_room: int = MAX_PAGE_BYTES,
    ) -> None:
        super().__init__(Role.SINK, handoff_id, queue_deadline_s, now)
        if len(prompt) < 2:
            raise LocalProtocolError("prompt-too-short", "a one-token prompt has no state to hand over")
        self.tokens = len(prompt) - 1  # transferred; the last one is evaluated here
        self.manifest: Manifest | None = None
        self.same_class = False  # RESERVE named this host's own exactness class: the probe must agree bit for bit
        self.proven = False  # manifest and ledger agree that everything is here
        self.required = required_components(schema, probe)
        if probe and Component.PROBE not in self.required:
            raise LocalProtocolError("schema", f"schema of family {schema.family} has no continuation probe")
        self._probe = probe
        self._identity = identity
        self._schema = schema
        self._prompt = pack_tokens(prompt)
        self._tenant = tenant
        self._page_room = page_room
        self._ledger: Ledger | None = None
        self._seed = 0
        self._imported = False
        self._verified = False
        self.largest_page = 0
        self._window = self._accepted = self._released = self._limit = 0

    def offer(self) -> list[Action]:
        """Send the prompt to the prefiller."""
        self._advance(Event.PREFILL)
        prefill = Prefill(
            handoff_id=self.handoff_id,
            identity=self._identity,
            prompt=self._prompt,
            tenant=self._tenant,
            queue_deadline_s=self._allowed_s,
            probe=self._probe,
            largest_page=self._page_room,
        )
        return [Send(prefill)]

    def grant(self, *, epoch: int, seed: int, window: int, deadline_s: float, now: float) -> list[Action]:
        """Landing memory is here. `window` is what the ring can always hold: its capacity less one largest record,
        so that padding at the wrap still fits. `seed` is 64 secret random bits. Starts the transfer's clock."""
        largest = record_bytes(Component.ATTENTION_KV, self.largest_page)
        if largest > window:
            return self.reject(
                "page-too-large", "a page does not fit the landing ring: raise it or lower --page-tokens",
                have=f"{window} bytes", want=f"{largest} bytes",
            )  # fmt: skip
        self._advance(Event.GRANT)
        self.epoch, self._seed = epoch, seed
        self._window = self._limit = window
        self._start_clock(deadline_s, now)
        binding = Binding(self.handoff_id, self._identity.digest(), epoch)
        self._ledger = Ledger(self._schema, self.required, self.tokens, binding)
        grant = Grant(handoff_id=self.handoff_id, epoch=epoch, credit=window, seed=seed, deadline_s=deadline_s)
        return [Send(grant)]

    def reject(self, reason: str, message: str, *, have: str = "", want: str = "") -> list[Action]:
        """Answer RESERVE with a refusal."""
        self._advance(Event.REJECT)
        reject = Reject(handoff_id=self.handoff_id, reason=reason, message=message, have=have, want=want)
        return [Send(reject), *self._end(Outcome(False, reason, message))]

    def accept_page(self, header: PageHeader, payload_bytes: int) -> tuple[bool, list[Action]]:
        """Before any memory is claimed for a page: True to let it in. False to drop it: it is late, or it broke the
        protocol and the actions end this handoff. Answer True with one page_landed or page_discarded."""
        if self.over or header.epoch < self.epoch:
            self.late += 1
            return False, []
        try:
            self._advance(Event.PAGE)
            self._check_length(header, payload_bytes)
            self._granted_ledger().claim(header)
            self._check_room(header)
        except RemoteProtocolError as error:
            return False, self.fail_with(error)
        self._accepted += record_bytes(header.component, header.payload_bytes)
        self._page_begins()
        return True, []

    def inspect_page(self, header: PageHeader, payload: memoryview) -> RemoteProtocolError | None:
        """What is wrong with a payload that has arrived, if anything. Changes nothing: needs no lock."""
        actual = page_checksum(payload, self._seed, header.component, header.layers, header.tokens)
        if actual != header.checksum:
            return RemoteProtocolError("page-checksum", f"{header.address}: payload does not match its checksum")
        if header.component is Component.TOKENS:
            expected = memoryview(self._prompt)[4 * header.tokens[0] : 4 * header.tokens[1]]
            if payload != expected:
                return RemoteProtocolError("token-history", f"{header.address}: not the tokens of this prompt")
        return None

    def page_landed(self, header: PageHeader, fault: RemoteProtocolError | None) -> tuple[bool, list[Action]]:
        """All bytes are here and `inspect_page` gave `fault`. True: publish the page. False: discard it."""
        if self.over:
            self.late += 1
            return False, self._page_ends()
        try:
            if fault is not None:
                raise fault
            self._granted_ledger().land(header)
            self._prove()
        except RemoteProtocolError as error:
            return False, [*self.fail_with(error), *self._page_ends()]
        return True, self._page_ends()

    def page_discarded(self, header: PageHeader) -> list[Action]:
        """An accepted page will not complete; so neither will the handoff."""
        lost = self.fail("page-lost", f"{header.address}: the link gave it up before its last byte")
        return [*lost, *self._page_ends()]

    def released(self, header: PageHeader) -> list[Action]:
        """The page's landing record is free again; now and then this makes a CREDIT."""
        self._released += record_bytes(header.component, header.payload_bytes)
        if self._released > self._accepted:
            raise LocalProtocolError("page-accounting", f"{header.address}: released more than was accepted")
        if self.over:
            return []
        limit = self._released + self._window
        # A quarter of the window keeps messages few. An idle ring is told at once: a page of nearly the whole window
        # may be waiting for the last byte.
        if limit - self._limit < self._window // 4 and self._released < self._accepted:
            return []
        return self._announce(limit)

    def landed(self, component: Component) -> bool:
        """Every page of a required component is here and verified."""
        return self._ledger is not None and self._ledger.landed(component)

    @property
    def state_complete(self) -> bool:
        """All state is here (the probe is proof, not state): the snapshot may be imported now, last."""
        return all(self.landed(c) for c in self.required if c is not Component.PROBE)

    def imported(self) -> None:
        """The engine holds the whole state and its positions agree."""
        if self.over:
            return
        if not self.state_complete:
            raise LocalProtocolError("import-too-early", "imported before every component was here")
        self._advance(Event.IMPORTED)
        self._imported = True

    def verified(self, ok: bool, detail: str) -> list[Action]:
        """The engine evaluated the last prompt token and compared it with the source's probe."""
        if self.over:
            return []
        if not (self._imported and self._probe and self.landed(Component.PROBE)):
            raise LocalProtocolError("verify-too-early", "verified before state and probe were here")
        if not ok:
            return self.fail("probe-mismatch", f"the imported state does not continue as the source's does: {detail}")
        self._advance(Event.VERIFIED)
        self._verified = True
        return []

    @property
    def committable(self) -> bool:
        return self.state is State.SEALED and not self._lacking()

    def commit(self, now: float) -> list[Action]:
        """Decide. Commits unless the handoff is over or out of time: look at `outcome` before generating."""
        if self.over:
            return []
        if expired := self.tick(now):
            return expired
        if lacking := self._lacking():
            raise LocalProtocolError("commit-too-early", f"not committed: {', '.join(lacking)}")
        self._advance(Event.COMMIT_ACK)
        ack = CommitAck(handoff_id=self.handoff_id, epoch=self.epoch)
        return [Send(ack), *self._end(Outcome(True, "committed"))]

    def _lacking(self) -> list[str]:
        facts = {
            "no manifest": self.manifest is not None,
            "manifest and pages not proven equal": self.proven,
            "state not imported": self._imported,
            "probe not verified": self._verified or not self._probe,
        }
        return [name for name, present in facts.items() if not present]

    def _receive(self, message: HandoffMessage, now: float) -> list[Action]:
        match message:
            case Reserve():
                self._advance(Event.RESERVE)
                return self._check_reserve(message)
            case Manifest():
                self._advance(Event.MANIFEST)
                self._check_manifest(message)
                self.manifest = message
                self._prove()
                return []
        raise self._unexpected(message)

    def _check_reserve(self, reserve: Reserve) -> list[Action]:
        mismatch = identity_mismatch(self._identity, reserve.identity) or schema_mismatch(self._schema, reserve.state)
        mismatch = mismatch or self._other_request(reserve)
        if mismatch:
            return self.reject(mismatch.reason, str(mismatch), have=mismatch.have, want=mismatch.want)
        self.largest_page = reserve.largest_page
        self.same_class = self._identity.exactness == reserve.identity.exactness
        return []

    def _other_request(self, reserve: Reserve) -> Mismatch | None:
        """RESERVE must be for this prompt, this tenant, and announce every component that must come."""
        if reserve.tenant != self._tenant:
            return Mismatch("RESERVE is for another tenant", "", "", reason="tenant-mismatch")
        if reserve.tokens != self.tokens:
            have, want = f"{self.tokens} tokens", f"{reserve.tokens} tokens"
            return Mismatch(f"decoder expects {have}, prefiller offers {want}", have, want, reason="token-mismatch")
        offered = {e.component for e in reserve.components}
        for component in self.required:
            if component not in offered:
                message = f"prefiller does not offer {component.label}, which this model's state needs"
                return Mismatch(message, component.label, "absent", reason="component-missing")
        return None

    def _check_manifest(self, manifest: Manifest) -> None:
        stated = {entry.component for entry in manifest.components}
        for component in self.required:
            if component not in stated:
                raise RemoteProtocolError("component-missing", f"manifest lacks {component.label}")
        end = self.tokens - 1
        mtp_end = end if Component.MTP_KV in self.required else None
        if (manifest.position, manifest.mtp_position) != (end, mtp_end):
            raise RemoteProtocolError(
                "position-mismatch",
                f"source ended at {manifest.position}, MTP {manifest.mtp_position}; expected {end}, MTP {mtp_end}",
            )

    def _prove(self) -> None:
        """Once as many pages have landed as the manifest counts: are they what it says, and all there must be?"""
        if self.manifest is None:
            return
        ledger = self._granted_ledger()
        stated = sum(entry.pages for entry in self.manifest.components)
        if ledger.pages > stated:
            raise RemoteProtocolError("manifest-mismatch", f"manifest counts {stated} pages, {ledger.pages} came")
        if ledger.landed_pages() < stated:
            return
        ledger.check_manifest(self.manifest)
        ledger.check_complete()
        self.proven = True

    def _check_length(self, header: PageHeader, payload_bytes: int) -> None:
        if payload_bytes != header.payload_bytes:
            raise RemoteProtocolError(
                "page-size", f"{header.address}: header says {header.payload_bytes} bytes, the link {payload_bytes}"
            )

    def _check_room(self, header: PageHeader) -> None:
        size = header.payload_bytes
        if header.component not in SNAPSHOT and size > self.largest_page:  # at the wrap there is room for no larger one
            raise RemoteProtocolError(
                "page-size", f"{header.address}: {size} bytes, RESERVE announced at most {self.largest_page}"
            )
        used = self._accepted + record_bytes(header.component, header.payload_bytes)
        if used > self._limit:
            raise RemoteProtocolError("credit", f"{header.address}: would use {used} of {self._limit} bytes of credit")

    def _announce(self, limit: int) -> list[Action]:
        if limit == self._limit:
            return []
        self._advance(Event.CREDIT)
        self._limit = limit
        return [Send(Credit(handoff_id=self.handoff_id, epoch=self.epoch, limit=limit))]

    def _granted_ledger(self) -> Ledger:
        if self._ledger is None:
            raise LocalProtocolError("out-of-order", f"handoff {self.handoff_id.hex()} has not been granted")
        return self._ledger
