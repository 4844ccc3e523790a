"""Sinks at every stage, and a source that plays by no rules but its own."""

from __future__ import annotations

from tests.handoff.scene import (
    EPOCH,
    HANDOFF,
    IDENTITY,
    PROMPT,
    SCHEMA,
    SEED,
    TOKENS,
    Page,
    pages,
)
from zerocopy.handoff import messages as m
from zerocopy.handoff.components import Component, StateSchema
from zerocopy.handoff.ledger import Binding, Ledger
from zerocopy.handoff.machine import Action, Ended, Outcome, Send
from zerocopy.handoff.sink import SinkHandoff

WINDOW = 1 << 20
PAGE_ROOM = 360_000


def minted(*, probe: bool = True, schema: StateSchema = SCHEMA, prompt: list[int] = PROMPT) -> SinkHandoff:
    return SinkHandoff(
        HANDOFF, IDENTITY, schema, prompt,
        tenant="anna", probe=probe, queue_deadline_s=10.0, now=100.0, page_room=PAGE_ROOM,
    )  # fmt: skip


def reserve(**changes: object) -> m.Reserve:
    fields: dict[str, object] = {
        "handoff_id": HANDOFF,
        "identity": IDENTITY,
        "state": SCHEMA,
        "tenant": "anna",
        "tokens": TOKENS,
        "largest_page": 384,
        "components": tuple(m.Estimate(c, 1) for c in Component),
    }
    return m.Reserve(**{**fields, **changes})  # type: ignore[arg-type]


def reserved(**changes: object) -> tuple[SinkHandoff, list[Action]]:
    sink = minted()
    sink.offer()
    return sink, sink.receive(reserve(**changes), 101.0)


def landing(window: int = WINDOW, *, probe: bool = True) -> SinkHandoff:
    sink = minted(probe=probe)
    sink.offer()
    assert sink.receive(reserve(), 101.0) == []
    assert sink.grant(epoch=EPOCH, seed=SEED, window=window, deadline_s=20.0, now=102.0)
    return sink


def land(sink: SinkHandoff, some: list[Page]) -> list[Action]:
    """What the daemon does with every page; the actions of the last one."""
    actions: list[Action] = []
    for header, payload in some:
        accepted, actions = sink.accept_page(header, len(payload))
        if accepted:
            _published, actions = sink.page_landed(header, sink.inspect_page(header, memoryview(payload)))
        if sink.over:
            break
    return actions


def manifest_of(some: list[Page], **changes: object) -> m.Manifest:
    """What a source without a conscience writes: whatever it sent is all there is."""
    required = dict.fromkeys(h.component for h, _ in some)
    ledger = Ledger(SCHEMA, required, TOKENS, Binding(HANDOFF, IDENTITY.digest(), EPOCH))
    for header, _ in some:
        ledger.claim(header)
        ledger.land(header)
    fields: dict[str, object] = {
        "handoff_id": HANDOFF, "epoch": EPOCH, "components": ledger.summary(), "position": 9, "mtp_position": 9,
    }  # fmt: skip
    return m.Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def ready() -> SinkHandoff:
    """Everything there, imported and verified: one call from its commit."""
    sink = landing()
    assert land(sink, pages()) == []
    assert sink.receive(manifest_of(pages()), 103.0) == []
    sink.imported()
    assert sink.verified(True, "bit-equal") == []
    return sink


def messages(actions: list[Action]) -> list[m.HandoffMessage]:
    return [a.message for a in actions if isinstance(a, Send)]


def ended(actions: list[Action]) -> Outcome:
    return next(a.outcome for a in actions if isinstance(a, Ended))


def offered(sink: SinkHandoff) -> m.Prefill:
    offer = messages(sink.offer())[0]
    assert isinstance(offer, m.Prefill)
    return offer
