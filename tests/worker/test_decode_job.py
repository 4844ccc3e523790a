from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from native._ring import ffi
from tests.worker.conftest import OpenStage
from tests.worker.stage import Page, Stage, prompt, run, step
from zerocopy.daemon.incoming import PROBE_TOLERANCE
from zerocopy.handoff.components import Component
from zerocopy.runtime.base import EngineError, Logits
from zerocopy.worker import prefill_job
from zerocopy.worker import protocol as p
from zerocopy.worker.decode_job import DecodeJob, compare

EVERYTHING = "nemotron_h_moe+mtp"
FAMILIES = ("llama", "gemma3", "mamba2", "nemotron_h", EVERYTHING, "qwen35+mtp")
PROMPT = prompt(77)

Damage = Callable[[Page], None]


def hand_over(play: Stage, tokens: list[int] = PROMPT, damage: Damage = lambda page: None) -> DecodeJob:
    """Export on one lane, land everything, and step the import until it waits for what comes after it."""
    pages = play.exported(tokens)
    for page in pages:
        damage(page)
    play.outbox.messages.clear()
    return land(play, tokens, pages)


def land(play: Stage, tokens: list[int], pages: list[Page]) -> DecodeJob:
    job = play.generate(tokens, imported=True)
    for page in pages:
        play.land(page)
    run(job)
    job.state_complete = True
    run(job)
    return job


def commit(job: DecodeJob) -> None:
    job.committed = True
    run(job)


def moved_and_local(play: Stage) -> tuple[p.Generated, p.Generated]:
    """The same prompt, handed over and evaluated where it is continued."""
    commit(hand_over(play))
    moved = play.outbox.one(p.Generated)
    play.sink.clear()
    play.outbox.messages.clear()
    run(play.generate(PROMPT, imported=False))
    return moved, play.outbox.one(p.Generated)


# -- the whole way


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_prompt_continues_bit_for_bit_as_one_that_never_left(stage: OpenStage, family: str) -> None:
    """V1, V3: logits, MTP logits, tokens and re-exported state."""
    moved, local = moved_and_local(stage(family))
    assert moved.proof == local.proof
    assert moved.proof is not None
    assert len(moved.proof["logits"]) == 8  # type: ignore[arg-type]
    assert (moved.prompt_tokens_evaluated, local.prompt_tokens_evaluated) == (1, len(PROMPT))


def test_mtp_pages_of_several_ranges_continue_bit_for_bit_too(
    stage: OpenStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V1, V3: as models export them whose MTP layer is small beside their KV."""
    monkeypatch.setattr(prefill_job, "span", lambda spec, _: {Component.MTP_KV: 32}.get(spec.component, 16))
    play = stage(EVERYTHING)
    ranges = [page.header.tokens for page in play.exported(PROMPT) if page.header.component is Component.MTP_KV]
    assert ranges == [(0, 32), (32, 64), (64, 76)]
    moved, local = moved_and_local(stage(EVERYTHING))
    assert moved.proof is not None and moved.proof == local.proof


def test_pages_of_what_gathered_behind_a_full_ring_continue_bit_for_bit_too(stage: OpenStage) -> None:
    """V1, V3: pages of more tokens than a chunk."""
    tokens = prompt(400)
    play = stage(EVERYTHING, ring_bytes=96 << 10)
    pages = play.exported(tokens, late=True)
    assert max(page.header.tokens[1] - page.header.tokens[0] for page in pages if page.header.component == 1) > 32
    play.outbox.messages.clear()
    commit(land(play, tokens, pages))
    moved = play.outbox.one(p.Generated)
    play.sink.clear()
    play.outbox.messages.clear()
    run(play.generate(tokens, imported=False))
    assert moved.proof is not None and moved.proof == play.outbox.one(p.Generated).proof


def test_an_import_beside_others_is_evaluated_in_their_engine_call(stage: OpenStage) -> None:
    """Q1: they do not wait for a second one; what is left of the prompt is still one token."""
    play = stage("llama")
    pages = play.exported(PROMPT)
    job = play.generate(PROMPT, imported=True)
    job.shared = job.state_complete = True
    for page in pages:
        play.land(page)
    while job.work():
        assert not play.outbox.all(p.Imported)
    row = job.wanted()
    assert row is not None
    assert (list(row.tokens), row.start, job.decoding) == (PROMPT[-1:], len(PROMPT) - 1, True)
    run(job)
    assert not play.outbox.one(p.Imported).solo and not job.decoding
    commit(job)
    assert play.outbox.one(p.Generated).prompt_tokens_evaluated == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_of_a_sound_import_is_bit_equal(stage: OpenStage, family: str) -> None:
    play = stage(family)
    hand_over(play)
    verified = play.outbox.one(p.Verified)
    assert (verified.exact, verified.error) == (True, 0.0)


def test_nothing_is_generated_before_the_commit(stage: OpenStage) -> None:
    """H3."""
    play = stage(EVERYTHING)
    job = hand_over(play)
    for _ in range(20):
        assert step(job) is False
    assert [type(m) for m in play.outbox.messages] == [p.Imported, p.Verified]
    commit(job)
    assert play.outbox.one(p.Generated).completion_tokens == 8


def test_pages_are_imported_while_others_are_still_on_their_way(stage: OpenStage) -> None:
    """S1: what has landed is in the engine, and its landing memory free, long before the last page comes."""
    play = stage(EVERYTHING)
    pages = play.exported(PROMPT)
    job = play.generate(PROMPT, imported=True)
    for page in pages:
        play.land(page)
        run(job)
        if page.header.component is Component.ATTENTION_KV:
            assert play.landing.used_bytes == 0
    assert not play.outbox.all(p.Imported)
    job.state_complete = True
    run(job)
    assert play.outbox.one(p.Verified).exact


def test_the_probe_may_come_long_after_the_state(stage: OpenStage) -> None:
    play = stage("nemotron_h")
    *state, probe = play.exported(PROMPT)
    job = play.generate(PROMPT, imported=True)
    for page in state:
        play.land(page)
    job.state_complete = True
    run(job)
    assert play.outbox.one(p.Imported)
    assert not play.outbox.all(p.Verified)
    play.land(probe)
    run(job)
    assert play.outbox.one(p.Verified).exact


def test_without_a_probe_the_import_ends_with_the_positions(stage: OpenStage) -> None:
    play = stage(EVERYTHING)
    for page in play.exported(PROMPT, probe=False):
        play.land(page)
    job = play.generate(PROMPT, imported=True, probe=False)
    job.state_complete = True
    run(job)
    assert play.outbox.all(p.Imported)
    assert not play.outbox.all(p.Verified)
    commit(job)
    assert play.outbox.one(p.Generated)


def test_import_times_are_told_page_by_page(stage: OpenStage) -> None:
    """M1."""
    play = stage(EVERYTHING)
    hand_over(play)
    imported = play.outbox.one(p.Imported)
    assert len(imported.imports) == 5 + 5 + 2 + 1 + 1  # KV, MTP KV, hidden row and history, probe, snapshot
    assert all(began <= ended and nbytes > 0 for began, ended, nbytes in imported.imports)
    assert list(imported.marks) == ["started", "imported", "evaluated"]


# -- a state that is not what it should be


def refusal(play: Stage, damage: Damage = lambda page: None) -> EngineError:
    with pytest.raises(EngineError) as refused:
        hand_over(play, damage=damage)
    assert not play.outbox.all(p.Imported)
    play.landing.recycle()  # every record was released
    return refused.value


def test_a_token_history_of_another_prompt_is_refused(stage: OpenStage) -> None:
    """S7, X7."""

    def damage(page: Page) -> None:
        if page.header.component is Component.TOKENS:
            page.payload[40] ^= 1

    assert refusal(stage("llama"), damage=damage).reason == "token-history"


def test_a_page_whose_engine_header_is_damaged_is_refused_and_lets_go_of_its_record(stage: OpenStage) -> None:
    def damage(page: Page) -> None:
        if page.header.component is Component.ATTENTION_KV and page.header.tokens[0] == 32:
            page.payload[0] ^= 0xFF

    refusal(stage("nemotron_h"), damage=damage)


def test_an_engine_that_refuses_while_it_looks_at_the_page_does_not_keep_the_record(stage: OpenStage) -> None:
    play = stage("llama")

    def refuse(component: Component, tokens: tuple[int, int], payload: memoryview) -> None:
        held = ffi.from_buffer(payload)  # as the engine binding does; the exception's traceback keeps it alive
        raise EngineError("engine-import", f"the engine took 0 of {len(held)} bytes")

    play.sink.import_page = refuse  # type: ignore[method-assign]
    assert refusal(play).reason == "engine-import"


def test_an_engine_that_refuses_the_snapshot_is_heard(stage: OpenStage) -> None:
    play = stage("mamba2")

    def refuse(blob_: memoryview, n_tokens: int) -> None:
        held = ffi.from_buffer(blob_)
        raise EngineError("engine-import", f"the engine took 0 of {len(held)} bytes")

    play.sink.import_snapshot = refuse  # type: ignore[method-assign]
    assert refusal(play).reason == "engine-import"


def test_a_lane_that_stands_elsewhere_after_the_import_is_refused(stage: OpenStage) -> None:
    """The commit gate: positions of target and MTP must be that of the last transferred token."""
    play = stage(EVERYTHING)
    found = play.sink.positions()
    play.sink.positions = lambda: type(found)(75, 74)  # type: ignore[method-assign]
    assert refusal(play).reason == "position"


def test_a_kv_page_that_never_came_is_noticed_before_anything_is_evaluated(stage: OpenStage) -> None:
    """Even if daemon and ledger were wrong: the worker's own gate."""
    play = stage("llama")
    job = play.generate(PROMPT, imported=True)
    for page in play.exported(PROMPT):
        if page.header.tokens != (64, 76):
            play.land(page)
    job.state_complete = True
    with pytest.raises(EngineError) as refused:
        run(job)
    assert refused.value.reason == "position"


def test_a_snapshot_part_does_not_travel_in_the_ring(stage: OpenStage) -> None:
    play = stage("mamba2")
    job = play.generate(PROMPT, imported=True)
    slot = play.landing.claim(128 + len(play.exported(PROMPT)[0].payload))
    page = next(page for page in play.read_slab() if page.header.component is Component.CONVOLUTION)
    assert slot is not None
    slot.view[:128], slot.view[128:] = page.header.pack(), page.payload
    slot.commit()
    with pytest.raises(EngineError, match="convolution state does not travel in the ring"):
        run(job)


@pytest.mark.parametrize("family", ["llama", EVERYTHING])
def test_a_wrong_value_in_a_kv_page_shows_in_the_probe(stage: OpenStage, family: str) -> None:
    """Where no checksum helps, because the source's own memory was wrong."""

    def damage(page: Page) -> None:
        if page.header.component is Component.ATTENTION_KV:
            page.payload[-600:-300] = bytes(300)  # the last values; on hybrids more headers follow

    play = stage(family)
    hand_over(play, damage=damage)
    verified = play.outbox.one(p.Verified)
    assert not verified.exact
    assert verified.error > 0


def test_a_wrong_mtp_state_cannot_hide_behind_a_right_target(stage: OpenStage) -> None:
    """S6, G7: MTP is part of the proof."""

    def damage(page: Page) -> None:
        if page.header.component is Component.MTP_HIDDEN:
            page.payload[:] = bytes(len(page.payload))

    play = stage(EVERYTHING)
    hand_over(play, damage=damage)
    assert play.outbox.one(p.Verified).error > PROBE_TOLERANCE


# -- generation


def generated(play: Stage, **changes: object) -> p.Generated:
    job = play.generate(PROMPT, imported=False, **changes)
    run(job)
    assert job.finished
    return play.outbox.one(p.Generated)


def test_generation_ends_at_max_tokens_and_counts_each(stage: OpenStage) -> None:
    play = stage("llama")
    done = generated(play, max_tokens=5)
    assert (done.reason, done.completion_tokens) == ("length", 5)
    assert sum(delta.tokens for delta in play.outbox.all(p.TextDelta)) == 5


def test_generation_of_nothing_evaluates_the_prompt_only(stage: OpenStage) -> None:
    play = stage("llama")
    done = generated(play, max_tokens=0)
    assert (done.reason, done.completion_tokens) == ("length", 0)
    assert play.outbox.text == ""


def test_a_stop_string_ends_generation_and_is_not_shown(stage: OpenStage) -> None:
    play = stage("llama")
    generated(play, max_tokens=8)
    pieces = [delta.text for delta in play.outbox.all(p.TextDelta)]
    play.sink.clear()
    play.outbox.messages.clear()
    stop = pieces[2] + pieces[3][:2]
    done = generated(play, max_tokens=8, stop=(stop,))
    assert (done.reason, done.completion_tokens) == ("stop", 4)
    assert play.outbox.text == "".join(pieces[:2])


def test_the_end_token_ends_generation_without_text(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    play = stage("llama")
    monkeypatch.setattr(play.runtime, "is_end", lambda token: True)
    done = generated(play)
    assert (done.reason, done.completion_tokens) == ("stop", 1)
    assert play.outbox.text == ""


def test_generation_ends_with_the_context(stage: OpenStage) -> None:
    play = stage("llama")
    job = play.generate(prompt(510), imported=False, max_tokens=100)
    run(job)
    assert play.outbox.one(p.Generated).completion_tokens == 3  # positions 510 and 511, and what follows them


def test_one_step_is_one_token_so_that_other_lanes_get_their_turn(stage: OpenStage) -> None:
    play = stage("llama")
    job = play.generate(PROMPT, imported=False)
    counts = []
    while step(job):
        counts.append(len(play.outbox.all(p.TextDelta)))
    assert counts == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7]  # chunks, then an engine call a token, the last prompt token too


def test_no_proof_is_made_unless_it_was_asked_for(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """X4: no digest of content exists without a key that the client made."""
    play = stage(EVERYTHING)
    monkeypatch.setattr(play.sink, "state_digests", lambda key: pytest.fail("digests without a key"))
    assert generated(play, proof_key=None).proof is None


def test_proofs_under_two_keys_have_nothing_in_common(stage: OpenStage) -> None:
    """X4."""
    proofs = []
    for key in (b"1" * 32, b"2" * 32):
        play = stage(EVERYTHING)
        proof = generated(play, proof_key=key).proof
        assert proof is not None
        proofs.append({str(value) for value in proof.values()})
    assert not proofs[0] & proofs[1]


@pytest.mark.parametrize("steps", range(0, 16, 3))
def test_an_import_can_be_closed_after_any_step_and_leaves_the_memory_free(stage: OpenStage, steps: int) -> None:
    """H7, X6."""
    play = stage(EVERYTHING)
    for page in play.exported(PROMPT):
        play.land(page)
    job = play.generate(PROMPT, imported=True)
    job.state_complete = True
    for _ in range(steps):
        step(job)
    job.close()
    assert step(job) is False
    play.landing.recycle()
    play.slabs["landing"].release()


# -- the comparison


def rows(*values: list[float]) -> Logits:
    return np.array(values, dtype=np.float32)


def test_equal_bits_are_exact_even_where_numbers_are_not_equal() -> None:
    nan = rows([1.0, float("nan")])
    assert compare(nan, nan.copy()) == (True, 0.0)


def test_numbers_that_are_equal_without_equal_bits_are_not_exact() -> None:
    exact, error = compare(rows([0.0, 1.0]), rows([-0.0, 1.0]))
    assert (exact, error) == (False, 0.0)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (rows([1.0, float("nan")]), rows([1.0, 2.0])),
        (rows([1.0, 2.0]), rows([1.0, float("nan")])),
        (rows([1.0, 2.0]), rows([1.0, float("inf")])),
        (rows([1.0, float("-inf")]), rows([1.0, 2.0])),
        (rows([1.0, 2.0]), rows([1.0, 2.0], [1.0, 2.0])),
        (rows([1.0, 2.0]), rows([1.0, 2.0, 3.0])),
        (rows([1.0, 2.0]), rows([0.0, 0.0])),
    ],
)
def test_what_cannot_be_compared_is_never_within_tolerance(mine: Logits, theirs: Logits) -> None:
    exact, error = compare(mine, theirs)
    assert not exact
    assert error > 1


def test_the_error_is_relative_to_the_sources_own_row() -> None:
    exact, error = compare(rows([100.0, 101.0]), rows([100.0, 100.0]))
    assert not exact
    assert error == pytest.approx(0.5**0.5 / 100)


def test_the_worst_row_counts_not_the_average() -> None:
    right, wrong = [1000.0] * 100, [1.0] * 100
    _, error = compare(rows(right, wrong), rows(right, [-1.0] * 100))
    assert error == pytest.approx(2.0)
