"""The ledger lets in every page exactly once and knows what is missing (H8, acceptance 7 of issue 2)."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.handoff.scene import EPOCH, HANDOFF, IDENTITY, SCHEMA, TOKENS, C, Page, page, pages, renumbered, replaced
from zerocopy.handoff import ledger as ledger_module
from zerocopy.handoff.components import Component, ComponentSpec, StateSchema
from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError
from zerocopy.handoff.ledger import Binding, Ledger, required_components
from zerocopy.handoff.messages import ComponentManifest, Manifest

EVERY = list(Component)
BINDING = Binding(HANDOFF, IDENTITY.digest(), EPOCH)


def empty(sources: int = 1, schema: StateSchema = SCHEMA) -> Ledger:
    return Ledger(schema, required_components(schema, probe=True), TOKENS, BINDING, sources)


def filled(some: list[Page]) -> Ledger:
    ledger = empty()
    for header, _payload in some:
        ledger.claim(header)
        ledger.land(header)
    return ledger


def manifest(ledger: Ledger, **changes: object) -> Manifest:
    fields: dict[str, object] = {
        "handoff_id": HANDOFF, "epoch": EPOCH, "components": ledger.summary(), "position": 9, "mtp_position": 9,
    }  # fmt: skip
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def without(component: Component, last: bool = False) -> list[Page]:
    """All pages but those (or the last one) of a component, numbered as if nothing were missing."""
    all_pages = pages()
    dropped = [p for p in all_pages if p[0].component is component]
    dropped = dropped[-1:] if last else dropped
    return renumbered([p for p in all_pages if p not in dropped])


def first(component: Component) -> Page:
    return next(p for p in pages() if p[0].component is component)


def refuse(ledger: Ledger, header: object, reason: str, *words: str) -> None:
    """The page is refused for this reason, in these words, and leaves no trace."""
    before = (ledger.pages, ledger.next_sequence(), ledger.summary())
    with pytest.raises(RemoteProtocolError) as caught:
        ledger.claim(header)  # type: ignore[arg-type]
    assert caught.value.reason == reason
    for word in words:
        assert word in str(caught.value)
    assert (ledger.pages, ledger.next_sequence(), ledger.summary()) == before


def test_a_whole_state_is_complete() -> None:
    ledger = filled(pages())
    ledger.check_complete()
    ledger.check_manifest(manifest(ledger))
    assert all(ledger.landed(c) and not ledger.gaps(c) for c in EVERY)
    assert ledger.landed_pages() == ledger.pages == len(pages())


@pytest.mark.parametrize("component", EVERY)
def test_an_omitted_component_is_named(component: Component) -> None:
    ledger = filled(without(component))
    with pytest.raises(RemoteProtocolError, match=f"{component.label} lacks layers") as caught:
        ledger.check_complete()
    assert caught.value.reason == "state-incomplete"


@pytest.mark.parametrize("component", EVERY)
def test_a_component_without_its_last_page_is_named_with_the_gap(component: Component) -> None:
    """Truncated at a page boundary: the source stops early and pretends that it was all."""
    ledger = filled(without(component, last=True))
    with pytest.raises(RemoteProtocolError, match=component.label):
        ledger.check_complete()
    assert not ledger.landed(component)
    assert ledger.gaps(component)


def test_a_gap_is_named_with_layers_and_tokens() -> None:
    kept = renumbered([p for p in pages() if p[0].tokens != (4, 8) or p[0].component is not C.ATTENTION_KV])
    with pytest.raises(RemoteProtocolError, match=r"attention KV lacks layers \[0,2\) tokens \[4,8\)"):
        filled(kept).check_complete()


@pytest.mark.parametrize("component", EVERY)
def test_a_page_with_too_few_or_too_many_bytes_is_refused(component: Component) -> None:
    header, payload = first(component)
    ledger = empty()
    for change in (-1, 1, 1 << 31):
        wrong = replaced(header, payload_bytes=len(payload) + change, sequence=0)
        refuse(ledger, wrong, "page-size", component.label, str(len(payload)))


@pytest.mark.parametrize("component", EVERY)
def test_a_page_that_came_already_is_refused(component: Component) -> None:
    header, _payload = first(component)
    ledger = empty()
    opened = replaced(header, sequence=0, final=False)
    ledger.claim(opened)
    refuse(ledger, opened, "page-sequence", component.label, "duplicate")
    refuse(ledger, replaced(opened, sequence=1), "page-overlap", component.label, "came already")


def test_a_page_in_flight_counts_as_come() -> None:
    """Two pages of one address must not both be written, even before the first is whole."""
    ledger = empty()
    header = pages()[0][0]
    ledger.claim(header)
    assert not ledger.landed(C.ATTENTION_KV)
    refuse(ledger, replaced(header, sequence=1), "page-overlap")


def test_a_page_that_overlaps_another_only_in_part_is_refused() -> None:
    ledger = empty()
    header, _ = pages()[0]
    ledger.claim(header)
    spec = SCHEMA.spec(C.ATTENTION_KV)
    assert spec is not None
    for layers, tokens in (((0, 2), (3, 5)), ((1, 2), (0, 4)), ((0, 1), (2, 3))):
        moved = replaced(
            header, sequence=1, layers=layers, tokens=tokens, payload_bytes=spec.page_bytes(layers, tokens)
        )
        refuse(ledger, moved, "page-overlap", "attention KV")


def test_a_page_out_of_sequence_is_refused_at_once() -> None:
    ledger = empty()
    refuse(ledger, pages()[1][0], "page-sequence", "page number 1, expected 0", "a page before it is missing")


@pytest.mark.parametrize("component", EVERY)
def test_a_page_outside_the_state_is_refused(component: Component) -> None:
    header, _ = first(component)
    spec = SCHEMA.spec(component)
    assert spec is not None
    beyond_layers = replaced(header, sequence=0, layers=(spec.layers, spec.layers + 1))
    beyond_tokens = replaced(header, sequence=0, tokens=(0, TOKENS + 1))
    for outside in (beyond_layers, beyond_tokens):
        refuse(empty(), outside, "page-range", component.label)


def test_a_page_of_more_tokens_than_the_schema_allows_is_refused() -> None:
    """Sliding windows: a longer page would lose rows (llama-runtime.md)."""
    header, _ = pages()[0]
    refuse(empty(), replaced(header, tokens=(0, 5)), "page-range", "5 tokens in one page, the schema allows 4")


@pytest.mark.parametrize("component", [C.RECURRENT, C.CONVOLUTION, C.MTP_HIDDEN, C.PROBE])
def test_a_snapshot_of_a_part_of_the_tokens_is_refused(component: Component) -> None:
    header, _ = first(component)
    refuse(empty(), replaced(header, sequence=0, tokens=(0, 9)), "page-range", component.label, "all 10 tokens")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("handoff_id", bytes(16), "handoff is 0000"),
        ("identity", bytes(16), "identity is 0000"),
        ("epoch", EPOCH + 1, "epoch is 4, expected 3"),
        ("schema_version", 2, "schema version is 2, expected 1"),
        ("position_planes", 4, "position planes is 4, expected 1"),
        ("source", 1, "source 1, this handoff has 1"),
    ],
)
def test_a_page_of_something_else_is_refused_with_both_values(field: str, value: object, words: str) -> None:
    """X2, X7: cross-session, cross-model, replayed."""
    for header, _ in (first(C.ATTENTION_KV), first(C.RECURRENT)):
        refuse(empty(), replaced(header, sequence=0, **{field: value}), "page-foreign", header.component.label, words)


def test_a_component_that_was_not_asked_for_is_refused() -> None:
    ledger = Ledger(SCHEMA, required_components(SCHEMA, probe=False), TOKENS, BINDING)
    header, _ = first(C.PROBE)
    refuse(ledger, replaced(header, sequence=0), "page-unexpected", "continuation probe")


@pytest.mark.parametrize("component", EVERY)
def test_nothing_of_a_component_comes_after_its_final_page(component: Component) -> None:
    header, _ = first(component)
    ledger = empty()
    ledger.claim(replaced(header, sequence=0, final=True))
    refuse(ledger, replaced(header, sequence=1), "page-after-final", component.label)


@pytest.mark.parametrize("component", EVERY)
def test_a_component_without_a_final_page_is_not_complete(component: Component) -> None:
    unmarked = [(replaced(h, final=h.final and h.component is not component), p) for h, p in pages()]
    with pytest.raises(RemoteProtocolError, match=f"{component.label} has no page marked final"):
        filled(unmarked).check_complete()


def test_a_handoff_has_a_bounded_number_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_PAGES", 2)
    ledger = filled(pages()[:2])
    refuse(ledger, pages()[2][0], "page-count")


@pytest.mark.parametrize("component", EVERY)
@pytest.mark.parametrize("field", ["pages", "nbytes", "digest", "layers", "tokens"])
def test_a_manifest_that_says_something_else_is_refused_naming_the_component(component: Component, field: str) -> None:
    ledger = filled(pages())
    other: dict[str, object] = {"pages": 99, "nbytes": 1, "digest": bytes(16), "layers": (0, 9), "tokens": (0, 9)}
    entries = tuple(
        msgspec.structs.replace(e, **{field: other[field]}) if e.component is component else e for e in ledger.summary()
    )
    with pytest.raises(RemoteProtocolError, match=component.label) as caught:
        ledger.check_manifest(manifest(ledger, components=entries))
    assert caught.value.reason == "manifest-mismatch"


@pytest.mark.parametrize("component", EVERY)
def test_a_manifest_without_a_component_that_came_is_refused(component: Component) -> None:
    ledger = filled(pages())
    entries = tuple(e for e in ledger.summary() if e.component is not component)
    with pytest.raises(RemoteProtocolError, match=f"{component.label} is here but not in the manifest"):
        ledger.check_manifest(manifest(ledger, components=entries))


def test_a_manifest_with_a_component_that_did_not_come_is_refused() -> None:
    ledger = filled(without(C.PROBE))
    claimed = ComponentManifest(component=C.PROBE, layers=(0, 1), tokens=(0, 10), pages=1, nbytes=88, digest=bytes(16))
    with pytest.raises(RemoteProtocolError, match="continuation probe is in the manifest but not here"):
        ledger.check_manifest(manifest(ledger, components=(*ledger.summary(), claimed)))


def test_a_manifest_that_lists_a_component_twice_is_refused() -> None:
    ledger = filled(pages())
    twice = (*ledger.summary(), ledger.summary()[0])
    with pytest.raises(RemoteProtocolError, match="twice"):
        ledger.check_manifest(manifest(ledger, components=twice))


def test_the_digest_depends_on_addresses_and_checksums_and_not_on_arrival() -> None:
    header = {h.tokens: h for h, _ in pages() if h.component is C.ATTENTION_KV}
    ranges = list(header)
    digests = set()
    for order in itertools.permutations(ranges):
        some = [(replaced(header[tokens], final=False), b"") for tokens in order]
        digests.add(filled(renumbered(some)).summary()[0].digest)
    assert len(digests) == 1
    changed = {**header, ranges[0]: replaced(header[ranges[0]], checksum=1)}
    digests.add(filled(renumbered([(replaced(h, final=False), b"") for h in changed.values()])).summary()[0].digest)
    assert len(digests) == 2


def by_source(part: dict[Component, list[tuple[int, int]]], source: int) -> list[Page]:
    """What a host that holds only some layers of each component sends."""
    made: list[Page] = []
    for component, layer_ranges in part.items():
        spec = SCHEMA.spec(component)
        assert spec is not None
        for layers in layer_ranges:
            size = spec.page_bytes(layers, (0, TOKENS))
            base = first(component)[0]
            final = layers == layer_ranges[-1]
            header = replaced(base, layers=layers, tokens=(0, TOKENS), source=source, sequence=len(made), final=final)
            made.append(page(header, bytes(size)))
    return made


WIDE = msgspec.structs.replace(
    SCHEMA, components=tuple(msgspec.structs.replace(s, max_page_tokens=TOKENS) for s in SCHEMA.components)
)
STAGES: list[dict[Component, list[tuple[int, int]]]] = [
    {C.ATTENTION_KV: [(0, 1)], C.RECURRENT: [(0, 1), (1, 2)], C.CONVOLUTION: [(0, 2)]},
    {
        C.ATTENTION_KV: [(1, 2)], C.RECURRENT: [(2, 3)], C.CONVOLUTION: [(2, 3)], C.MTP_KV: [(0, 1)],
        C.MTP_HIDDEN: [(0, 1)], C.TOKENS: [(0, 1)], C.PROBE: [(0, 1)],
    },
]  # fmt: skip


@given(st.randoms(use_true_random=False))
def test_several_sources_send_their_own_layers_in_any_interleaving(rng: random.Random) -> None:
    """P2, later: the wire format already carries it; each source has its own order and its own manifest."""
    ledger = empty(sources=2, schema=WIDE)
    queues = [by_source(part, source) for source, part in enumerate(STAGES)]
    while any(queues):
        header, _ = rng.choice([q for q in queues if q]).pop(0)
        ledger.claim(header)
        ledger.land(header)
    ledger.check_complete()
    for source in (0, 1):
        ledger.check_manifest(manifest(ledger, components=ledger.summary(source), source=source))
    assert ledger.landed_pages(0) + ledger.landed_pages(1) == ledger.pages


def test_a_source_that_sends_the_layers_of_another_is_refused() -> None:
    """Stages in the wrong order are accepted silently by the engine (split-prefill.md): the ledger must not."""
    ledger = empty(sources=2, schema=WIDE)
    for header, _ in by_source(STAGES[0], 0):
        ledger.claim(header)
        ledger.land(header)
    stolen = replaced(by_source(STAGES[0], 1)[0][0], source=1)
    refuse(ledger, stolen, "page-overlap", "attention KV")


def test_one_source_of_two_is_not_the_whole_state() -> None:
    ledger = empty(sources=2, schema=WIDE)
    for header, _ in by_source(STAGES[0], 0):
        ledger.claim(header)
        ledger.land(header)
    with pytest.raises(RemoteProtocolError, match=r"attention KV lacks layers \[1,2\)"):
        ledger.check_complete()


def test_a_schema_that_cannot_be_handed_over_is_a_local_fault() -> None:
    hollow = StateSchema("llama", (ComponentSpec(C.ATTENTION_KV, True, ()),))
    with pytest.raises(LocalProtocolError, match="attention KV"):
        Ledger(hollow, [C.ATTENTION_KV], TOKENS, BINDING)
    with pytest.raises(LocalProtocolError, match="recurrent state"):
        Ledger(hollow, [C.RECURRENT], TOKENS, BINDING)


def test_a_long_prompt_costs_the_ledger_little() -> None:
    """128K tokens: 512 pages a component, no entry but one per page."""
    schema = StateSchema("llama", (ComponentSpec(C.ATTENTION_KV, True, (8,) * 93),))
    tokens = 512 * 256
    ledger = Ledger(schema, [C.ATTENTION_KV], tokens, BINDING)
    for sequence in range(512):
        span = (sequence * 256, sequence * 256 + 256)
        header = replaced(
            first(C.ATTENTION_KV)[0], sequence=sequence, layers=(0, 93), tokens=span, payload_bytes=8 * 93 * 256,
            final=sequence == 511,
        )  # fmt: skip
        ledger.claim(header)
        ledger.land(header)
    ledger.check_complete()
    assert ledger.summary()[0].pages == 512


def test_the_probe_is_required_only_when_asked_for() -> None:
    assert C.PROBE in required_components(SCHEMA, probe=True)
    assert set(required_components(SCHEMA, probe=False)) == set(EVERY) - {C.PROBE}
