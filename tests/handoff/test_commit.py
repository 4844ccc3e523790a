"""The decoder commits a whole, proven state in time, or nothing, whatever the source claims (H2, H3)."""

from __future__ import annotations

import msgspec
import pytest

from tests.handoff.decoder import ended, land, landing, manifest_of, messages, minted, ready, reserve
from tests.handoff.scene import (
    EPOCH,
    HANDOFF,
    SCHEMA,
    TOKENS,
    C,
    Page,
    pages,
    renumbered,
    replaced,
)
from zerocopy.handoff import messages as m
from zerocopy.handoff.components import Component
from zerocopy.handoff.errors import LocalProtocolError
from zerocopy.handoff.machine import Ended, Outcome, Release, Send


def test_it_commits_once_everything_is_proven() -> None:
    sink = ready()
    assert sink.committable
    ack = m.CommitAck(handoff_id=HANDOFF, epoch=EPOCH)
    assert sink.commit(104.0) == [Send(ack), Ended(Outcome(True, "committed")), Release()]
    assert sink.commit(104.0) == []
    assert sink.fail("cancelled", "too late") == []
    assert sink.outcome == Outcome(True, "committed")


def without(component: Component) -> list[Page]:
    return renumbered([p for p in pages() if p[0].component is not component])


@pytest.mark.parametrize("component", list(Component))
def test_a_manifest_without_a_component_is_refused_naming_it(component: Component) -> None:
    sink = landing()
    land(sink, without(component))
    actions = sink.receive(manifest_of(without(component)), 103.0)
    assert ended(actions) == Outcome(False, "component-missing", f"manifest lacks {component.label}")


@pytest.mark.parametrize("component", list(Component))
def test_a_manifest_that_claims_a_component_that_never_came_waits_and_runs_out(component: Component) -> None:
    sink = landing()
    land(sink, without(component))
    assert sink.receive(manifest_of(pages()), 103.0) == []
    assert not sink.committable
    with pytest.raises(LocalProtocolError, match="manifest and pages not proven equal"):
        sink.commit(104.0)
    assert ended(sink.tick(122.0)).reason == "transfer-deadline"


@pytest.mark.parametrize("component", [C.ATTENTION_KV, C.MTP_KV, C.RECURRENT, C.CONVOLUTION])
def test_a_component_without_one_page_is_refused_naming_it_and_the_gap(component: Component) -> None:
    """Omitted by a source that writes a manifest to match."""
    gone = next(p for p in pages() if p[0].component is component)
    kept = renumbered([p for p in pages() if p != gone])
    sink = landing()
    land(sink, kept)
    actions = sink.receive(manifest_of(kept), 103.0)
    assert ended(actions).reason == "state-incomplete"
    assert f"{component.label} lacks layers" in ended(actions).message


@pytest.mark.parametrize("component", [C.RECURRENT, C.CONVOLUTION])
def test_layers_swapped_with_each_other_are_refused(component: Component) -> None:
    """Another layer's payload does not have this layer's size; where sizes are equal the checksum's address differs."""
    spec = SCHEMA.spec(component)
    assert spec is not None
    one, other = ((header, payload) for header, payload in pages() if header.component is component)
    swapped = [(replaced(one[0], sequence=0), other[1])]
    accepted, actions = landing().accept_page(swapped[0][0], len(other[1]))
    assert not accepted
    assert component.label in ended(actions).message
    relabelled = replaced(other[0], sequence=0, layers=(0, 2), payload_bytes=spec.page_bytes((0, 2), (0, TOKENS)))
    fault = landing().inspect_page(relabelled, memoryview(one[1]))
    assert fault is not None
    assert component.label in str(fault)


def test_the_manifest_may_overtake_the_pages() -> None:
    """It travels on another stream."""
    sink = landing()
    assert sink.receive(manifest_of(pages()), 103.0) == []
    assert not sink.proven
    assert land(sink, pages()) == []
    assert sink.proven


def test_more_pages_than_the_manifest_counts_end_it() -> None:
    whole = manifest_of(pages())
    fewer = tuple(msgspec.structs.replace(e, pages=1) if e.component is C.ATTENTION_KV else e for e in whole.components)
    sink = landing()
    sink.receive(msgspec.structs.replace(whole, components=fewer), 103.0)
    actions = land(sink, pages())
    assert ended(actions).reason == "manifest-mismatch"
    assert "attention KV: manifest says pages 1, landed were 3" in ended(actions).message


def test_a_manifest_that_comes_last_must_count_every_page() -> None:
    sink = landing()
    land(sink, pages())
    whole = manifest_of(pages())
    fewer = tuple(msgspec.structs.replace(e, pages=1) for e in whole.components)
    actions = sink.receive(msgspec.structs.replace(whole, components=fewer), 103.0)
    assert ended(actions).message == f"manifest counts 7 pages, {len(pages())} came"


@pytest.mark.parametrize(("position", "mtp"), [(8, 9), (10, 9), (9, 8), (9, None), (0, 9)])
def test_positions_that_do_not_fit_the_prompt_are_refused(position: int, mtp: int | None) -> None:
    sink = landing()
    land(sink, pages())
    actions = sink.receive(manifest_of(pages(), position=position, mtp_position=mtp), 103.0)
    assert ended(actions).reason == "position-mismatch"
    assert f"source ended at {position}, MTP {mtp}; expected 9, MTP 9" in ended(actions).message


def test_a_manifest_of_another_epoch_is_not_this_handoffs() -> None:
    sink = landing()
    assert sink.receive(manifest_of(pages(), epoch=EPOCH - 1), 103.0) == []
    assert sink.late == 1
    assert ended(sink.receive(manifest_of(pages(), epoch=EPOCH + 1), 103.0)).reason == "epoch"


def test_a_second_manifest_ends_it() -> None:
    sink = landing()
    sink.receive(manifest_of(pages()), 103.0)
    assert ended(sink.receive(manifest_of(pages()), 103.0)).reason == "out-of-order"


def test_nothing_is_imported_before_all_state_is_here() -> None:
    sink = landing()
    land(sink, pages()[:-2])
    with pytest.raises(LocalProtocolError, match="before every component"):
        sink.imported()


def test_nothing_is_verified_before_it_is_imported_and_the_probe_is_here() -> None:
    sink = landing()
    land(sink, pages()[:-1])
    with pytest.raises(LocalProtocolError, match="before state and probe"):
        sink.verified(True, "")
    sink.imported()
    with pytest.raises(LocalProtocolError, match="before state and probe"):
        sink.verified(True, "")
    land(sink, pages()[-1:])
    assert sink.verified(True, "") == []


def test_a_probe_that_differs_ends_it() -> None:
    """H2: fluent text from a wrong state is the worst outcome there is."""
    sink = landing()
    land(sink, pages())
    sink.receive(manifest_of(pages()), 103.0)
    sink.imported()
    actions = sink.verified(False, "relative rms error 0.31, at most 0.001")
    assert ended(actions).reason == "probe-mismatch"
    assert "0.31" in ended(actions).message
    assert sink.commit(104.0) == []
    assert not sink.committable


@pytest.mark.parametrize("left_out", ["manifest", "imported", "verified"])
def test_it_does_not_commit_without(left_out: str) -> None:
    sink = landing()
    land(sink, pages())
    if left_out != "manifest":
        sink.receive(manifest_of(pages()), 103.0)
    if left_out != "imported":
        sink.imported()
    if left_out == "manifest":
        sink.verified(True, "")
    assert not sink.committable
    with pytest.raises(LocalProtocolError, match="not committed: ") as caught:
        sink.commit(104.0)
    assert left_out in str(caught.value)
    assert not sink.over


def test_without_a_probe_it_commits_on_import() -> None:
    sink = landing(probe=False)
    stateful = [p for p in pages() if p[0].component is not C.PROBE]
    land(sink, stateful)
    sink.receive(manifest_of(stateful), 103.0)
    sink.imported()
    assert sink.committable
    with pytest.raises(LocalProtocolError):
        sink.verified(True, "")


def test_it_never_commits_after_its_deadline() -> None:
    """Expired lease: a stalled decoder ends in abort, never in commit."""
    sink = ready()
    actions = sink.commit(122.0)
    assert ended(actions).reason == "transfer-deadline"
    assert isinstance(messages(actions)[0], m.Abort)


def test_an_abort_that_crossed_grant_on_its_way_counts() -> None:
    sink = landing()
    abort = m.Abort(handoff_id=HANDOFF, epoch=0, reason="cancelled", message="prefiller stops")
    assert sink.receive(abort, 103.0) == [
        Ended(Outcome(False, "cancelled", "prefiller stops", by_peer=True)),
        Release(),
    ]


def test_the_engines_word_after_the_end_changes_nothing() -> None:
    sink = landing()
    land(sink, pages())
    sink.fail("cancelled", "client left")
    sink.imported()
    assert sink.verified(True, "") == []
    assert sink.verified(False, "") == []
    assert sink.outcome is not None
    assert sink.outcome.reason == "cancelled"


def test_nobody_is_told_of_a_handoff_that_was_never_offered() -> None:
    actions = minted().fail("cancelled", "client left")
    assert messages(actions) == []
    assert actions[-1] == Release()


@pytest.mark.parametrize("message", [m.Credit(handoff_id=HANDOFF, epoch=EPOCH, limit=1), reserve()])
def test_a_message_out_of_order_ends_it(message: m.HandoffMessage) -> None:
    assert ended(landing().receive(message, 103.0)).reason == "out-of-order"
