"""The prefiller's end alone: negotiation, credit, completeness, deadlines, release."""

from __future__ import annotations

import msgspec
import pytest

from tests.handoff.scene import EPOCH, HANDOFF, IDENTITY, SCHEMA, SEED, TOKENS, C, Page, pages, prefill, replaced
from zerocopy.handoff import messages as m
from zerocopy.handoff.components import Component, record_bytes
from zerocopy.handoff.errors import LocalProtocolError
from zerocopy.handoff.machine import Action, Ended, Outcome, Release, Send
from zerocopy.handoff.source import SourceHandoff
from zerocopy.handoff.states import State

LARGEST = 360


def minted(**changes: object) -> SourceHandoff:
    return SourceHandoff(prefill(**changes), IDENTITY, SCHEMA, largest_page=LARGEST, now=100.0)


def grant(**changes: object) -> m.Grant:
    fields: dict[str, object] = {
        "handoff_id": HANDOFF, "epoch": EPOCH, "credit": 1 << 20, "seed": SEED, "deadline_s": 20.0,
    }  # fmt: skip
    return m.Grant(**{**fields, **changes})  # type: ignore[arg-type]


def streaming(credit: int = 1 << 20) -> SourceHandoff:
    source = minted()
    source.reserve()
    assert source.receive(grant(credit=credit), 105.0) == []
    return source


def sealed() -> SourceHandoff:
    source = streaming()
    for header, _ in pages():
        source.page_sent(header)
        assert source.page_done() == []
    source.manifest(9, 9)
    return source


def sent(actions: list[Action]) -> list[m.HandoffMessage]:
    return [a.message for a in actions if isinstance(a, Send)]


def ended(actions: list[Action]) -> Outcome:
    return next(a.outcome for a in actions if isinstance(a, Ended))


def test_it_asks_for_exactly_what_the_schema_says_will_come() -> None:
    reserve = sent(minted().reserve())[0]
    assert isinstance(reserve, m.Reserve)
    assert (reserve.tokens, reserve.largest_page, reserve.tenant) == (TOKENS, LARGEST, "anna")
    assert (reserve.identity, reserve.state) == (IDENTITY, SCHEMA)
    assert {e.component for e in reserve.components} == set(Component)
    estimates = {e.component: e.nbytes for e in reserve.components}
    assert estimates[C.RECURRENT] == 96 + 104 + 112
    assert estimates[C.TOKENS] == 40


def test_without_a_probe_none_is_announced() -> None:
    reserve = sent(minted(probe=False).reserve())[0]
    assert isinstance(reserve, m.Reserve)
    assert C.PROBE not in {e.component for e in reserve.components}


def test_a_prompt_for_another_model_is_refused_with_both_values() -> None:
    source = minted(identity=msgspec.structs.replace(IDENTITY, kv_type="q8_0/q8_0"))
    actions = source.reserve()
    abort = sent(actions)[0]
    assert isinstance(abort, m.Abort)
    assert abort.reason == "identity-mismatch"
    assert "decoder has KV type q8_0/q8_0, prefiller f16/f16" in abort.message
    assert actions[1:] == [Ended(Outcome(False, abort.reason, abort.message)), Release()]


def test_a_one_token_prompt_has_nothing_to_hand_over() -> None:
    source = minted(prompt=m.pack_tokens([1]))
    assert ended(source.reserve()).reason == "prompt-too-short"


def test_grant_tells_the_exporter_its_epoch_and_seed() -> None:
    source = streaming()
    assert source.grant is not None
    assert (source.grant.epoch, source.grant.seed) == (EPOCH, SEED)
    assert source.state is State.STREAMING


def test_reject_ends_it_with_the_sinks_reason() -> None:
    source = minted()
    source.reserve()
    reject = m.Reject(handoff_id=HANDOFF, reason="no-memory", message="no ring", have="0", want="1")
    assert source.receive(reject, 101.0) == [Ended(Outcome(False, "no-memory", "no ring", by_peer=True)), Release()]


def test_no_page_leaves_before_grant() -> None:
    source = minted()
    assert not source.may_send(pages()[0][0])
    with pytest.raises(LocalProtocolError, match="while the source of this handoff was queued"):
        source.page_sent(pages()[0][0])
    with pytest.raises(LocalProtocolError, match="has not been granted"):
        _ = source.next_sequence


def test_credit_counts_whole_records_and_only_up_to_the_limit() -> None:
    (first, _), (second, _) = pages()[:2]
    cost = record_bytes(first.component, first.payload_bytes)
    source = streaming(credit=2 * cost - 1)
    assert source.may_send(first)
    source.page_sent(first)
    assert not source.may_send(second)
    with pytest.raises(LocalProtocolError, match="no credit left"):
        source.page_sent(second)
    source.receive(m.Credit(handoff_id=HANDOFF, epoch=EPOCH, limit=2 * cost), 106.0)
    assert source.may_send(second)


def test_snapshot_parts_need_no_credit() -> None:
    source = streaming(credit=0)
    snapshot = next(h for h, _ in pages() if h.component is C.RECURRENT)
    assert source.may_send(snapshot)


def test_a_page_that_no_credit_lets_out_is_an_error_at_once() -> None:
    """Else it would wait until the deadline: the deadlock of buffers."""
    with pytest.raises(LocalProtocolError, match="the decoder's window is 100: raise its ring size") as caught:
        streaming(credit=100).may_send(pages()[0][0])
    assert caught.value.reason == "page-too-large"


def test_credit_that_goes_back_is_refused() -> None:
    source = streaming(credit=1000)
    actions = source.receive(m.Credit(handoff_id=HANDOFF, epoch=EPOCH, limit=999), 106.0)
    assert ended(actions).reason == "credit"
    assert "from 1000 to 999" in ended(actions).message


def test_the_next_page_is_numbered() -> None:
    source = streaming()
    for expected, (header, _) in enumerate(pages()):
        assert source.next_sequence == expected
        source.page_sent(header)


def test_a_page_that_the_sink_would_refuse_does_not_leave() -> None:
    source = streaming()
    with pytest.raises(LocalProtocolError, match="page number 1, expected 0"):
        source.page_sent(pages()[1][0])


@pytest.mark.parametrize("component", list(Component))
def test_a_manifest_over_a_missing_component_is_refused_naming_it(component: Component) -> None:
    """An empty or failed export is an error, never an empty component."""
    source = streaming()
    kept = [p for p in pages() if p[0].component is not component]
    for sequence, (header, _) in enumerate(kept):
        source.page_sent(replaced(header, sequence=sequence))
    with pytest.raises(LocalProtocolError, match=component.label):
        source.manifest(9, 9)
    assert source.state is State.STREAMING


def test_the_manifest_itemises_every_component() -> None:
    source = streaming()
    everything = pages()
    for header, _ in everything:
        source.page_sent(header)
    manifest = sent(source.manifest(9, 9, {"prefill_end_s": 2.0}))[0]
    assert isinstance(manifest, m.Manifest)
    assert (manifest.position, manifest.mtp_position, manifest.timings) == (9, 9, {"prefill_end_s": 2.0})
    for entry in manifest.components:
        mine: list[Page] = [p for p in everything if p[0].component is entry.component]
        assert (entry.pages, entry.nbytes) == (len(mine), sum(len(p) for _, p in mine))
    assert {e.component for e in manifest.components} == set(Component)


def test_state_is_kept_until_commit_ack() -> None:
    """H4."""
    source = sealed()
    assert source.outcome is None
    actions = source.receive(m.CommitAck(handoff_id=HANDOFF, epoch=EPOCH), 110.0)
    assert actions == [Ended(Outcome(True, "committed")), Release()]
    assert source.state is State.RELEASED


def test_no_ack_commits_what_was_not_sealed() -> None:
    source = streaming()
    actions = source.receive(m.CommitAck(handoff_id=HANDOFF, epoch=EPOCH), 110.0)
    assert not ended(actions).committed
    assert ended(actions).reason == "out-of-order"


def test_memory_is_released_only_when_the_link_has_let_go_of_every_page() -> None:
    source = streaming()
    for header, _ in pages()[:3]:
        source.page_sent(header)
    assert not any(isinstance(a, Release) for a in source.fail("cancelled", "client left"))
    assert source.page_done() == []
    assert source.page_done() == []
    assert source.page_done() == [Release()]
    with pytest.raises(LocalProtocolError, match="had not begun"):
        source.page_done()


def test_queueing_and_transfer_have_their_own_deadlines() -> None:
    """The deadline measures the wrong queue: transfer time starts at GRANT."""
    source = minted()
    assert source.deadline == 110.0
    assert source.tick(109.9) == []
    source.reserve()
    source.receive(grant(), 109.9)
    assert source.deadline == 129.9
    assert source.tick(129.8) == []
    actions = source.tick(129.9)
    assert ended(actions) == Outcome(False, "transfer-deadline", "not committed within 20 s of GRANT")
    assert source.tick(200.0) == []


def test_a_queue_that_takes_too_long_says_so() -> None:
    actions = minted().tick(110.0)
    assert ended(actions) == Outcome(False, "queue-deadline", "not granted within 10 s of queueing")
    abort = sent(actions)[0]
    assert isinstance(abort, m.Abort)
    assert abort.epoch == 0


def test_a_message_that_comes_after_the_deadline_does_not_save_it() -> None:
    source = sealed()
    actions = source.receive(m.CommitAck(handoff_id=HANDOFF, epoch=EPOCH), 200.0)
    assert ended(actions).reason == "transfer-deadline"
    assert source.late == 1


def test_the_peers_abort_is_not_answered() -> None:
    abort = m.Abort(handoff_id=HANDOFF, epoch=EPOCH, reason="probe-mismatch", message="logits differ")
    actions = sealed().receive(abort, 110.0)
    assert actions == [Ended(Outcome(False, "probe-mismatch", "logits differ", by_peer=True)), Release()]


def test_messages_of_another_epoch_do_nothing_or_end_it() -> None:
    source = streaming()
    old = m.Credit(handoff_id=HANDOFF, epoch=EPOCH - 1, limit=1 << 30)
    assert source.receive(old, 106.0) == []
    assert source.late == 1
    actions = source.receive(m.Credit(handoff_id=HANDOFF, epoch=EPOCH + 1, limit=1 << 30), 106.0)
    assert ended(actions).message == "Credit is of epoch 4, granted was 3"


def test_everything_after_the_end_is_late() -> None:
    source = sealed()
    source.receive(m.CommitAck(handoff_id=HANDOFF, epoch=EPOCH), 110.0)
    for message in (grant(), m.Abort(handoff_id=HANDOFF, epoch=EPOCH, reason="late", message="")):
        assert source.receive(message, 111.0) == []
    assert source.late == 2
    assert source.fail("cancelled", "too late") == []
    assert source.outcome == Outcome(True, "committed")


@pytest.mark.parametrize("message", [prefill(), m.Credit(handoff_id=HANDOFF, epoch=1, limit=1)])
def test_a_message_out_of_order_ends_the_handoff_and_not_the_link(message: m.HandoffMessage) -> None:
    actions = minted().receive(message, 101.0)
    assert ended(actions).reason in ("out-of-order", "epoch")
    assert isinstance(sent(actions)[0], m.Abort)


def test_a_message_for_another_handoff_is_this_hosts_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="was given to handoff"):
        minted().receive(grant(handoff_id=bytes(16)), 101.0)
