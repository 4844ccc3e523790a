"""Several sequences in one engine context: each is what it would be alone, within what the batch's shape changes, and
none leaves anything in another (Q1, G6)."""

from __future__ import annotations

import random
import secrets

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.process_memory import occurrences, readable
from tests.runtime.conftest import TINY, OpenRuntime
from tests.runtime.handover import KEY, Refusing, bits, export_state, greedy, import_state, prefill, prompt, same
from zerocopy.handoff.components import Component
from zerocopy.runtime import models
from zerocopy.runtime.base import EngineError, Output, Row
from zerocopy.runtime.llama import blob
from zerocopy.runtime.llama import lane as lane_module
from zerocopy.runtime.llama.context import FIRST_LIVE_SEQUENCE, PROBE_SEQUENCE, Run
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime
from zerocopy.runtime.llama.lane import LlamaLane
from zerocopy.runtime.llama.pool import LlamaPool

FOUR = LlamaOptions(n_ctx=512, chunk_tokens=64, page_tokens=32, threads=1, sequences=4, kv_tokens=1024)
ENDED = FIRST_LIVE_SEQUENCE - 1
# Measured: at most 2.5e-4 on the tiny models; a zeroed component is above 7e-2.
HONEST = 2e-3


def difference(mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Relative rms."""
    scale = np.sqrt(np.mean(np.square(theirs, dtype=np.float64)))
    return float(np.sqrt(np.mean(np.square(mine.astype(np.float64) - theirs))) / scale)


def roomy(**changes: object) -> LlamaOptions:
    how = {name: getattr(FOUR, name) for name in FOUR.__struct_fields__}
    return msgspec.convert(how | {"n_ctx": 1024, "chunk_tokens": 256, "kv_tokens": 2048} | changes, LlamaOptions)


def filled(pool: LlamaPool, runtime: LlamaRuntime, number: int, length: int) -> LlamaLane:
    lane = pool.lane(number)
    prefill(lane, runtime.facts, prompt(runtime.facts, length, seed=number))
    return lane


def test_the_first_lane_of_a_pool_gives_the_bits_of_a_context_of_its_own(open_runtime: OpenRuntime) -> None:
    """What makes a lone request on a serving host exact."""
    for family in models.FAMILIES:
        one, many = open_runtime(family, TINY), open_runtime(family, FOUR)
        alone, lane = one.open_lane(), many.open_pool().lane(0)
        tokens = prompt(one.facts, 200)
        for each in (alone, lane):
            prefill(each, one.facts, tokens[:-1])
        assert alone.state_digests(KEY) == lane.state_digests(KEY)
        assert same(greedy(alone, tokens[-1], 199, 5)[1], greedy(lane, tokens[-1], 199, 5)[1])


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_pool_that_became_empty_is_as_good_as_a_new_one(family: str, open_runtime: OpenRuntime) -> None:
    runtime = open_runtime(family, FOUR)
    used, new = runtime.open_pool(), runtime.open_pool()
    lanes = [filled(used, runtime, n, 60 + 50 * n) for n in (2, 0, 3)]
    for lane in lanes:
        lane.clear()
    a, b = filled(used, runtime, 1, 100), filled(new, runtime, 1, 100)
    assert a.state_digests(KEY) == b.state_digests(KEY)
    assert same(greedy(a, 5, 100, 5)[1], greedy(b, 5, 100, 5)[1])


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_batch_invariant_pool_gives_every_bit_of_a_lone_sequence(family: str, open_runtime: OpenRuntime) -> None:
    """Two threads, cells in another order and behind others', prompts cut elsewhere, and a batch of four."""
    how = {name: getattr(FOUR, name) for name in FOUR.__struct_fields__}
    runtime = open_runtime(family, LlamaOptions(**how | {"threads": 2, "kv_tokens": 2048, "batch_invariant": True}))
    lengths, order = (301, 77, 401, 130), (3, 0, 2, 1)
    prompts = [prompt(runtime.facts, length, seed=length) for length in lengths]
    alone = []
    for tokens in prompts:
        lane = runtime.open_pool().lane(0)
        prefill(lane, runtime.facts, tokens)
        alone.append((lane.state_digests(KEY), greedy(lane, 5, len(tokens), 4)[1]))
    pool = runtime.open_pool()
    for n in order:
        for start in range(0, lengths[n], 50):
            pool.lane(n).prefill(prompts[n][start : min(start + 50, lengths[n])], start)
    assert [pool.lane(n).state_digests(KEY) for n in range(4)] == [state for state, _ in alone]
    chosen = [5] * 4
    for step in range(4):
        rows = [Row(pool.lane(n), [chosen[n]], lengths[n] + step) for n in order]
        for n, output in zip(order, pool.evaluate(rows), strict=True):
            heads = [row for row in (output.logits, output.mtp_logits) if row is not None]
            assert same([[row.view(np.uint32) for row in heads]], [alone[n][1][step]])
            chosen[n] = int(output.logits.argmax())


@pytest.mark.parametrize("family", models.FAMILIES)
def test_sequences_that_come_and_go_leave_the_others_cells_in_token_order(
    family: str, open_runtime: OpenRuntime
) -> None:
    """Many times the pool's cells, evaluated or imported, token by token beside others, alone and by twos: every
    exported page is one, and every bit is a lone sequence's (Q1, Q2)."""
    how = {name: getattr(FOUR, name) for name in FOUR.__struct_fields__}
    runtime = open_runtime(family, LlamaOptions(**how | {"threads": 2, "kv_tokens": 512, "batch_invariant": True}))
    rng, pool, lone = random.Random(1), runtime.open_pool(), runtime.open_pool().lane(0)
    tokens: list[list[int]] = [[], [], [], []]
    for turn in range(20):
        n = turn % 4
        pool.lane(n).clear()
        tokens[n] = prompt(runtime.facts, rng.randint(1, 80), seed=turn)
        if turn % 2:
            prefill(pool.lane(n), runtime.facts, tokens[n])
        else:
            lone.clear()
            prefill(lone, runtime.facts, tokens[n])
            import_state(pool.lane(n), export_state(lone, runtime.facts, len(tokens[n])))
        for _ in range(rng.randint(1, 40)):
            live = [each for each in range(4) if tokens[each] and rng.random() < 0.6]
            rng.shuffle(live)
            given = {each: [turn] * (2 if rng.random() < 0.03 else 1) for each in live}
            if given:
                pool.evaluate([Row(pool.lane(each), row, len(tokens[each])) for each, row in given.items()])
            for each, row in given.items():
                tokens[each] += row
        if turn % 4 == 3:
            oldest = (n + 1) % 4
            lone.clear()
            prefill(lone, runtime.facts, tokens[oldest])
            assert pool.lane(oldest).state_digests(KEY) == lone.state_digests(KEY)
            probed = bits(pool.lane(oldest), pool.lane(oldest).probe(7, len(tokens[oldest])))
            assert same([probed], [bits(lone, lone.evaluate(7, len(tokens[oldest])))])


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_row_that_its_lane_refuses_is_answered_with_why_and_takes_no_part(
    family: str, open_runtime: OpenRuntime
) -> None:
    runtime = open_runtime(family, FOUR)
    pool, lone, lengths = runtime.open_pool(), runtime.open_pool(), (40, 50, 60, 70)
    for each in (pool, lone):
        for n, length in enumerate(lengths):
            filled(each, runtime, n, length)
    wrong = {1: Row(pool.lane(1), [5], 51), 2: Row(pool.lane(2), [runtime.facts.n_vocab], 60)}
    answers = pool.evaluate([wrong.get(n, Row(pool.lane(n), [5], lengths[n])) for n in range(4)])
    assert [getattr(answers[n], "reason", None) for n in range(4)] == [None, "state-incomplete", "token-range", None]
    expected = lone.evaluate([Row(lone.lane(n), [5], lengths[n]) for n in (0, 3)])
    for mine, theirs in zip((answers[0], answers[3]), expected, strict=True):
        assert np.array_equal(mine.logits, theirs.logits)
    for each in (pool, lone):
        assert all(
            isinstance(one, Output) for one in each.evaluate([Row(each.lane(n), [6], lengths[n]) for n in (1, 2)])
        )
    assert all(pool.lane(n).state_digests(KEY) == lone.lane(n).state_digests(KEY) for n in range(4))


@pytest.mark.parametrize("family", ["llama", "nemotron_h_moe+mtp"])
def test_after_a_call_that_failed_the_others_go_on_in_token_order(family: str, open_runtime: OpenRuntime) -> None:
    """Cells are taken behind the pool's back, so that the engine has none left for a slice: the call fails and its
    lanes are cleared. The third's next tokens have the bits they would have had (H6)."""
    how = {name: getattr(FOUR, name) for name in FOUR.__struct_fields__}
    runtime = open_runtime(family, LlamaOptions(**how | {"kv_tokens": 512, "batch_invariant": True}))
    pool, lone = runtime.open_pool(), runtime.open_pool().lane(0)
    lengths = (30, 30, 300)
    for n in range(3):
        filled(pool, runtime, n, lengths[n])
    for step in range(3):
        pool.evaluate([Row(pool.lane(n), [step], lengths[n] + step) for n in (1, 0, 2)])
    with pytest.raises(EngineError, match="decoding"):
        for start in range(0, 512, 16):
            pool.target.decode([Run(PROBE_SEQUENCE, [1] * 16, start)])
    slice_ = Row(pool.lane(3), prompt(runtime.facts, 40), 0)
    with pytest.raises(EngineError, match="decoding"):
        pool.evaluate([Row(pool.lane(0), [3], 33), Row(pool.lane(1), [3], 33), slice_])
    pool.target.drop(PROBE_SEQUENCE)
    for n in (0, 1, 3):
        pool.lane(n).clear()
    for step in range(3, 40):
        pool.evaluate([Row(pool.lane(2), [step], 300 + step)])
    prefill(lone, runtime.facts, prompt(runtime.facts, 300, seed=2) + list(range(40)))
    assert pool.lane(2).state_digests(KEY) == lone.state_digests(KEY)


@pytest.mark.parametrize("function", ["llama_state_seq_get_data_ext", "llama_state_seq_set_data_ext"])
@pytest.mark.parametrize("family", ["llama", "mamba2", "nemotron_h_moe+mtp"])
def test_what_is_moved_to_other_cells_is_wiped_even_if_the_engine_does_not_take_it_back(
    family: str, function: str, open_runtime: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X6. Nor is anything known then of a lane whose state is gone: it said that it could be exported."""
    runtime = open_runtime(family, FOUR)
    pool, rooms = runtime.open_pool(), list[memoryview]()
    lanes = [filled(pool, runtime, n, 40) for n in range(2)]
    room = lane_module._room
    monkeypatch.setattr(lane_module, "_room", lambda size: rooms.append(room(size)) or rooms[-1])
    refusing = Refusing(pool.target._c, function, after=1, half=True)
    monkeypatch.setattr(pool.target, "_c", refusing)
    with pytest.raises(EngineError, match=r"the engine (took 0|exported 0)"):
        pool._close_up(lanes)
    assert len(rooms) > 1 and not any(any(view) for view in rooms)
    if "set" in function:
        with pytest.raises(EngineError) as refused:
            lanes[-1].evaluate(1, 40)
        assert refused.value.reason == "state-incomplete"
    for lane in lanes:
        lane.clear()
    lone = runtime.open_pool()
    expected = filled(lone, runtime, 0, 40).state_digests(KEY)
    assert filled(pool, runtime, 0, 40).state_digests(KEY) == expected


@pytest.mark.parametrize("family", models.FAMILIES)
def test_tokens_and_slices_in_one_call_give_what_calls_of_their_own_give(
    family: str, open_runtime: OpenRuntime
) -> None:
    """Two that generate and a prompt's chunk, MTP head included."""
    runtime = open_runtime(family, FOUR)
    together, apart = runtime.open_pool(), runtime.open_pool()
    for pool in (together, apart):
        filled(pool, runtime, 0, 90), filled(pool, runtime, 1, 150)
    chunk = prompt(runtime.facts, 64, seed=9)
    for step in range(4):
        rows = [(0, [step + 3], 90 + step), (1, [step + 7], 150 + step)]
        rows += [(2, chunk, 0)] if step == 1 else [(2, [step], 62 + step)] if step > 1 else []
        outputs = [
            (output.logits.copy(), None if output.mtp_logits is None else output.mtp_logits.copy())
            for output in together.evaluate([Row(together.lane(n), tokens, at) for n, tokens, at in rows])
        ]
        for (n, tokens, at), (logits, mtp) in zip(rows, outputs, strict=True):
            (alone,) = apart.evaluate([Row(apart.lane(n), tokens, at)])
            assert difference(logits, alone.logits) < HONEST
            assert (mtp is None) == (alone.mtp_logits is None)
            if mtp is not None and alone.mtp_logits is not None:
                assert difference(mtp, alone.mtp_logits) < HONEST


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_state_imported_among_others_has_the_bytes_it_left_with(family: str, open_runtime: OpenRuntime) -> None:
    """Into cells that others have left holes in; and the others keep theirs."""
    runtime = open_runtime(family, FOUR)
    facts = runtime.facts
    source = runtime.open_lane()
    prefill(source, facts, prompt(facts, 229))
    state = export_state(source, facts, 229)
    pool = runtime.open_pool()
    lanes = [filled(pool, runtime, n, 100 + 30 * n) for n in range(3)]
    lanes[1].clear()
    before = [lanes[n].state_digests(KEY) for n in (0, 2)]
    target = pool.lane(3)
    import_state(target, state)
    assert target.state_digests(KEY) == source.state_digests(KEY)
    if runtime.facts.exporting_lanes > 1:
        assert [lanes[n].state_digests(KEY) for n in (0, 2)] == before
    expected, got = source.probe(7, 229).copy(), target.evaluate(7, 229)
    assert difference(got, expected) < HONEST


def test_a_sliding_window_lets_only_one_lane_export(open_runtime: OpenRuntime) -> None:
    """The engine gives cells behind the window away: the sequence does not need them, a late export would."""
    assert open_runtime("gemma3", FOUR).facts.exporting_lanes == 1
    assert open_runtime("nemotron_h", FOUR).facts.exporting_lanes == 4


def test_a_sliding_window_sequence_goes_on_rightly_after_others_took_its_old_cells(open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("gemma3", FOUR)
    pool, alone = runtime.open_pool(), runtime.open_lane()
    lanes = [filled(pool, runtime, n, 100 + 30 * n) for n in range(3)]
    prefill(alone, runtime.facts, prompt(runtime.facts, 160, seed=2))
    lanes[1].clear()
    filled(pool, runtime, 3, 200)
    for step in range(3):
        assert difference(lanes[2].evaluate(step, 160 + step), alone.evaluate(step, 160 + step)) < HONEST


@pytest.mark.parametrize("family", ["llama", "nemotron_h_moe+mtp"])
def test_a_probe_beside_others_changes_none_of_them(family: str, open_runtime: OpenRuntime) -> None:
    runtime = open_runtime(family, FOUR)
    pool = runtime.open_pool()
    a, b = filled(pool, runtime, 0, 80), filled(pool, runtime, 1, 120)
    before = a.state_digests(KEY), b.state_digests(KEY)
    foretold = bits(a, a.probe(3, 80))
    assert (a.state_digests(KEY), b.state_digests(KEY)) == before
    assert same([bits(a, a.evaluate(3, 80))], [foretold])


def test_cells_of_ended_sequences_are_gone_where_a_call_would_look_past_too_many(open_runtime: OpenRuntime) -> None:
    """Not for a token: moving what the others hold would take longer. The others go on as if nothing had been."""
    runtime = open_runtime("llama", roomy(batch_invariant=True))
    pool, lone = runtime.open_pool(), runtime.open_pool().lane(0)
    filled(pool, runtime, 0, 300)
    lane = filled(pool, runtime, 1, 400)
    pool.lane(0).clear()
    given = [*prompt(runtime.facts, 400, seed=1), 7, *prompt(runtime.facts, 256, seed=9)]
    pool.evaluate([Row(lane, given[400:401], 400)])
    assert pool.target.last_position(ENDED) == 299
    pool.evaluate([Row(lane, given[401:], 401)])
    assert pool.target.last_position(ENDED) == -1
    prefill(lone, runtime.facts, given)
    assert lane.state_digests(KEY) == lone.state_digests(KEY)


@readable
@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize("held", [40, 0])
def test_what_ended_sequences_left_is_wiped_and_not_the_whole_cache(
    flash_attention: bool, held: int, open_runtime: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X6, by looking: with a long cache, overwriting all of it after every answer takes longer than an engine call."""
    runtime = open_runtime("llama", roomy(flash_attention=flash_attention))
    pool, marker = runtime.open_pool(), secrets.token_bytes(32)
    spec = runtime.facts.schema.spec(Component.ATTENTION_KV)
    assert spec is not None
    lanes = [filled(pool, runtime, 0, 40) if held else pool.lane(0), pool.lane(1)]
    for start in (0, 150):
        page = memoryview(bytearray(spec.page_bytes((0, spec.layers), (0, 150))))
        np.frombuffer(page, dtype="V32", count=len(page) // 32)[:] = np.void(marker)
        blob.write_blank_page(page, pool.model.geometries[Component.ATTENTION_KV], (start, start + 150))
        lanes[1].import_page(Component.ATTENTION_KV, (start, start + 150), page)
        page[:] = bytes(len(page))
    before = lanes[0].state_digests(KEY)
    assert occurrences(marker * 2) > 9
    clear, calls = pool.target.clear, list[dict[str, bool]]()
    monkeypatch.setattr(pool.target, "clear", lambda **how: calls.append(how) or clear(**how))
    lanes[1].clear()
    assert calls == [{"cells": False}]
    assert occurrences(marker * 2) <= 2  # what is looked for, itself
    assert lanes[0].state_digests(KEY) == before
    assert pool.target.last_position(ENDED) == -1


def test_cells_of_an_ended_sequence_are_gone_at_once_where_the_others_hold_less(open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("llama", roomy())
    pool = runtime.open_pool()
    lanes = [filled(pool, runtime, n, length) for n, length in enumerate((300, 400, 500))]
    lanes[0].clear()
    assert pool.target.last_position(ENDED) == 299
    lanes[2].clear()
    assert pool.target.last_position(ENDED) == -1
    assert (lanes[1].positions().target, pool.target.last_position(lanes[1].sequence)) == (399, 399)


def test_cells_that_sequences_are_still_to_fill_are_in_nobody_s_way(open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("llama", roomy(sequences=16))
    pool = runtime.open_pool()
    lanes = [filled(pool, runtime, n, 8) for n in range(16)]
    pool.evaluate([Row(lane, [7], 8) for lane in lanes[:15]])
    pool.evaluate([Row(lanes[15], prompt(runtime.facts, 256), 8)])
    assert pool.target.last_position(ENDED) >= 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "nemotron_h_moe+mtp"])
def test_all_cells_can_be_used_however_they_were_left(family: str, open_runtime: OpenRuntime) -> None:
    """Q2: what the allocator promises, the engine has: no fragmentation makes it fail."""
    runtime = open_runtime(family, FOUR)
    facts, pool, rng = runtime.facts, runtime.open_pool(), random.Random(3)
    lengths = dict.fromkeys(range(4), 0)
    for turn in range(24):
        n = turn % 4
        pool.lane(n).clear()
        lengths[n] = 0
        free = min(facts.kv_tokens - sum(lengths.values()), facts.n_ctx)
        lengths[n] = free if turn % 3 == 0 else rng.randint(1, free)
        filled(pool, runtime, n, lengths[n])
        for _ in range(rng.randint(0, 80)):
            live = [each for each in range(4) if 0 < lengths[each] < facts.n_ctx and rng.random() < 0.7]
            live = live[: facts.kv_tokens - sum(lengths.values())]
            if live:
                pool.evaluate([Row(pool.lane(each), [turn], lengths[each]) for each in live])
            for each in live:
                lengths[each] += 1
        assert [pool.lane(each).positions().target for each in range(4)] == [lengths[each] - 1 for each in range(4)]


def test_a_row_of_another_context_stops_the_batch_before_the_engine(open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("llama", FOUR)
    pool = runtime.open_pool()
    lane = filled(pool, runtime, 0, 40)
    with pytest.raises(EngineError) as error:
        pool.evaluate([Row(lane, [1], 40), Row(runtime.open_lane(), [1], 0)])
    assert error.value.reason == "lane"
    assert lane.positions().target == 39
