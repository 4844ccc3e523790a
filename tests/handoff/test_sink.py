"""The decoder's end alone: negotiation, pages, credit (H8, S8, X2, X3, X7)."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.handoff.decoder import PAGE_ROOM, ended, land, landing, messages, minted, offered, reserved
from tests.handoff.scene import (
    EPOCH,
    HANDOFF,
    IDENTITY,
    PROMPT,
    SCHEMA,
    SEED,
    TOKENS,
    C,
    page,
    pages,
    renumbered,
    replaced,
)
from zerocopy.handoff import messages as m
from zerocopy.handoff.components import Component, ComponentSpec, PageHeader, StateSchema, record_bytes
from zerocopy.handoff.errors import LocalProtocolError
from zerocopy.handoff.machine import Outcome, Release
from zerocopy.handoff.sink import SinkHandoff
from zerocopy.handoff.source import SourceHandoff
from zerocopy.handoff.states import State

# -- negotiation -------------------------------------------------------------------------------------------------------


def test_the_offer_carries_the_whole_prompt_and_this_hosts_identity() -> None:
    offer = messages(minted().offer())[0]
    assert isinstance(offer, m.Prefill)
    assert m.unpack_tokens(offer.prompt) == PROMPT
    assert (offer.identity, offer.tenant, offer.queue_deadline_s, offer.probe) == (IDENTITY, "anna", 10.0, True)
    assert offer.largest_page == PAGE_ROOM


def test_a_fitting_reserve_waits_for_landing_memory() -> None:
    sink, actions = reserved()
    assert actions == []
    assert sink.state is State.RESERVED


@pytest.mark.parametrize("field", ["model", "tokenizer", "kv_type", "flash_attention", "engine", "schema"])
def test_another_identity_is_rejected_with_both_values_before_any_page(field: str) -> None:
    """Acceptance 5 of issue 2."""
    _, actions = reserved(identity=msgspec.structs.replace(IDENTITY, **{field: "theirs"}))
    reject = messages(actions)[0]
    assert isinstance(reject, m.Reject)
    assert (reject.reason, reject.have, reject.want) == ("identity-mismatch", getattr(IDENTITY, field), "theirs")
    assert ended(actions) == Outcome(False, "identity-mismatch", reject.message)
    assert actions[-1] == Release()


@pytest.mark.parametrize("component", list(Component))
def test_a_state_schema_without_a_component_is_rejected_naming_it(component: Component) -> None:
    lesser = tuple(s for s in SCHEMA.components if s.component is not component)
    _, actions = reserved(state=msgspec.structs.replace(SCHEMA, components=lesser))
    assert component.label in ended(actions).message


@pytest.mark.parametrize("component", list(Component))
def test_a_reserve_that_leaves_out_a_component_is_rejected_naming_it(component: Component) -> None:
    _, actions = reserved(components=tuple(m.Estimate(c, 1) for c in Component if c is not component))
    assert ended(actions).reason == "component-missing"
    assert component.label in ended(actions).message


def test_a_reserve_of_another_tenant_is_rejected() -> None:
    """X3, X7. Neither tenant is named to the other."""
    _, actions = reserved(tenant="boris")
    assert ended(actions).reason == "tenant-mismatch"
    assert not {"anna", "boris"} & set(ended(actions).message.split())


def test_a_reserve_for_another_number_of_tokens_is_rejected() -> None:
    _, actions = reserved(tokens=TOKENS + 1)
    assert "decoder expects 10 tokens, prefiller offers 11 tokens" in ended(actions).message


def test_a_page_larger_than_the_landing_ring_is_rejected_with_both_values() -> None:
    sink, _ = reserved(largest_page=5000)
    actions = sink.grant(epoch=EPOCH, seed=SEED, window=4096, deadline_s=20.0, now=102.0)
    reject = messages(actions)[0]
    assert isinstance(reject, m.Reject)
    assert (reject.reason, reject.have, reject.want) == ("page-too-large", "4096 bytes", "5248 bytes")


def test_this_host_may_reject_for_reasons_of_its_own() -> None:
    sink, _ = reserved()
    actions = sink.reject("no-memory", "the decoder has no free landing ring")
    assert ended(actions).reason == "no-memory"
    assert sink.state is State.RELEASED


def test_a_sink_needs_two_tokens_and_a_probe_that_exists() -> None:
    with pytest.raises(LocalProtocolError, match="one-token prompt"):
        minted(prompt=[1])
    with pytest.raises(LocalProtocolError, match="no continuation probe"):
        minted(schema=msgspec.structs.replace(SCHEMA, components=SCHEMA.components[:-1]))


# -- pages -------------------------------------------------------------------------------------------------------------


def test_no_page_is_let_in_before_grant() -> None:
    sink, _ = reserved()
    accepted, actions = sink.accept_page(pages()[0][0], 360)
    assert not accepted
    assert ended(actions).reason == "out-of-order"


def test_the_pages_of_a_whole_state_are_let_in_and_published() -> None:
    sink = landing()
    for header, payload in pages():
        assert sink.accept_page(header, len(payload)) == (True, [])
        assert sink.page_landed(header, sink.inspect_page(header, memoryview(payload))) == (True, [])
    assert sink.state_complete
    assert all(sink.landed(c) for c in Component)


def test_state_is_complete_before_the_probe_has_come() -> None:
    """The snapshot is imported while the source still computes its proof."""
    sink = landing()
    land(sink, [p for p in pages() if p[0].component is not C.PROBE])
    assert sink.state_complete
    assert not sink.landed(C.PROBE)


@pytest.mark.parametrize("component", list(Component))
def test_a_page_whose_bytes_changed_on_the_way_ends_it_naming_the_component(component: Component) -> None:
    sink = landing()
    for header, payload in pages():
        bad = bytes([payload[0] ^ 1]) + payload[1:] if header.component is component else payload
        actions = land(sink, [(header, bad)])
        if actions:
            break
    assert ended(actions).reason == "page-checksum"
    assert component.label in ended(actions).message
    assert actions[-1] == Release()


def test_a_page_of_another_handoff_with_the_same_address_fails_its_checksum() -> None:
    """Taken from another request: sums are seeded per handoff."""
    foreign = pages(seed=SEED ^ 1)[0]
    assert ended(land(landing(), [foreign])).reason == "page-checksum"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"handoff_id": bytes(16)}, "page-foreign"),
        ({"identity": bytes(16)}, "page-foreign"),
        ({"epoch": EPOCH + 1}, "page-foreign"),
        ({"sequence": 1}, "page-sequence"),
        ({"layers": (1, 3)}, "page-range"),
        ({"tokens": (9, 13)}, "page-range"),
        ({"payload_bytes": 1 << 31}, "page-size"),
        ({"component": C.MTP_KV}, "page-range"),
        ({"source": 1}, "page-foreign"),
    ],
)
def test_a_page_that_does_not_belong_here_is_not_let_in(change: dict[str, object], reason: str) -> None:
    header, payload = pages()[0]
    sink = landing()
    wrong = replaced(header, **change)
    accepted, actions = sink.accept_page(wrong, wrong.payload_bytes if "payload_bytes" in change else len(payload))
    assert not accepted
    assert ended(actions).reason == reason
    assert actions[-1] == Release()


def test_a_page_of_a_dead_epoch_is_dropped_and_counted() -> None:
    sink = landing()
    late = replaced(pages()[0][0], epoch=EPOCH - 1)
    assert sink.accept_page(late, 360) == (False, [])
    assert sink.late == 1
    assert not sink.over


def test_header_and_link_must_agree_on_the_length() -> None:
    accepted, actions = landing().accept_page(pages()[0][0], 359)
    assert not accepted
    assert "the link 359" in ended(actions).message


def test_a_token_history_of_another_prompt_ends_it() -> None:
    """S7. Its own checksum is right; the tokens are not ours."""
    sink = landing()
    history = next(h for h, _ in pages() if h.component is C.TOKENS)
    before = [p for p in pages() if p[0].sequence < history.sequence]
    assert land(sink, before) == []
    actions = land(sink, [page(history, m.pack_tokens([*PROMPT[:9], 999]))])
    assert ended(actions).reason == "token-history"
    assert "999" not in ended(actions).message


def test_a_page_the_link_gives_up_ends_it() -> None:
    sink = landing()
    header, payload = pages()[0]
    sink.accept_page(header, len(payload))
    actions = sink.page_discarded(header)
    assert ended(actions).reason == "page-lost"
    assert actions[-1] == Release()


def test_memory_is_released_only_when_no_link_writes_any_more() -> None:
    """Abort freed pages while a write was in flight, and the next request got them: not here."""
    sink = landing()
    (first, one), (second, two) = pages()[:2]
    sink.accept_page(first, len(one))
    sink.accept_page(second, len(two))
    assert Release() not in sink.fail("cancelled", "client left")
    assert sink.page_landed(first, None) == (False, [])
    assert sink.page_discarded(second) == [Release()]
    assert sink.late == 1


# -- credit ------------------------------------------------------------------------------------------------------------


def cost(header: PageHeader) -> int:
    return record_bytes(header.component, header.payload_bytes)


def test_a_page_beyond_the_credit_is_refused_before_memory_is_claimed() -> None:
    headers = [h for h, _ in pages()]
    sink = landing(window=cost(headers[0]) + cost(headers[1]) - 1)
    assert sink.accept_page(headers[0], headers[0].payload_bytes) == (True, [])
    accepted, actions = sink.accept_page(headers[1], headers[1].payload_bytes)
    assert not accepted
    assert ended(actions).reason == "credit"


def test_a_page_larger_than_was_announced_is_the_sources_fault() -> None:
    """The window leaves room at the ring's wrap for what was announced: a larger page would find the ring full within
    its credit, and this host would blame itself."""
    (header, _), *_ = pages()
    sink, _ = reserved(largest_page=header.payload_bytes - 1)
    sink.grant(epoch=EPOCH, seed=SEED, window=1 << 20, deadline_s=20.0, now=102.0)
    accepted, actions = sink.accept_page(header, header.payload_bytes)
    assert not accepted
    assert ended(actions).reason == "page-size"
    assert f"at most {header.payload_bytes - 1}" in ended(actions).message


def test_freed_records_become_credit() -> None:
    sink = landing(window=1000)
    header, payload = pages()[0]
    land(sink, [(header, payload)])
    credit = messages(sink.released(header))[0]
    assert isinstance(credit, m.Credit)
    assert (credit.epoch, credit.limit) == (EPOCH, 1000 + cost(header))


def test_credit_is_told_by_quarters_of_the_window_while_more_is_held() -> None:
    """Messages stay few: not one per page."""
    headers = [h for h, _ in pages()][:3]
    sink = landing(window=4 * cost(headers[0]) + 64)
    land(sink, pages()[:3])
    assert sink.released(headers[0]) == []
    told = messages(sink.released(headers[1]))[0]
    assert isinstance(told, m.Credit)
    assert told.limit == 4 * cost(headers[0]) + 64 + cost(headers[0]) + cost(headers[1])


def test_an_idle_ring_is_told_at_once_so_that_the_largest_page_always_fits() -> None:
    header, payload = pages()[0]
    sink = landing(window=100 * cost(header))
    land(sink, [(header, payload)])
    assert messages(sink.released(header)), "a small release, but nothing else is held"


def test_any_mix_of_page_sizes_up_to_the_window_gets_through() -> None:
    """The deadlock of buffers: source waits for credit, sink for pages."""
    schema = StateSchema("history", (ComponentSpec(C.TOKENS, True, (4,)),))
    prompt = list(range(5001))
    rng = random.Random(1)
    for _ in range(30):
        sink = SinkHandoff(
            HANDOFF, IDENTITY, schema, prompt, tenant="anna", probe=False, queue_deadline_s=10.0, now=0.0
        )
        source = SourceHandoff(offered(sink), IDENTITY, schema, largest_page=800, now=0.0)
        sink.receive(messages(source.reserve())[0], 0.0)
        grant = sink.grant(epoch=EPOCH, seed=SEED, window=1024, deadline_s=20.0, now=0.0)
        source.receive(messages(grant)[0], 0.0)
        start, held = 0, list[PageHeader]()
        while start < 5000:
            end = min(start + rng.randrange(1, 201), 5000)
            header = replaced(
                pages()[-2][0], sequence=source.next_sequence, tokens=(start, end), payload_bytes=4 * (end - start),
                final=end == 5000,
            )  # fmt: skip
            while not source.may_send(header):
                assert held, "stuck: nothing is held and still there is no credit"
                for credit in messages(sink.released(held.pop(0))):
                    source.receive(credit, 0.0)
            source.page_sent(header)
            payload = m.pack_tokens(prompt[start:end])
            assert land(sink, [page(header, payload)]) == []
            held.append(header)
            start = end
        assert sink.state_complete


def test_parts_of_the_snapshot_use_no_credit() -> None:
    sink = landing(window=1000)
    snapshot = [p for p in pages() if p[0].component in (C.RECURRENT, C.CONVOLUTION)]
    assert land(sink, renumbered(snapshot)) == []
    assert sink.released(snapshot[0][0]) == []


def test_more_cannot_be_released_than_came() -> None:
    with pytest.raises(LocalProtocolError, match="released more than was accepted"):
        landing().released(pages()[0][0])


def test_records_freed_after_the_end_make_no_credit() -> None:
    sink = landing()
    land(sink, pages()[:1])
    sink.fail("cancelled", "client left")
    assert sink.released(pages()[0][0]) == []
