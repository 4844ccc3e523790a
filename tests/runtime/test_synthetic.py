"""`synthetic`: Nemotron 3 Super's exact sizes, a state that cannot be damaged unseen, and a speed one can set."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.handover import KEY, State, export_state, greedy, import_state, prefill, prompt, same
from zerocopy.handoff.components import Component
from zerocopy.runtime import synthetic
from zerocopy.runtime.base import EngineError
from zerocopy.runtime.llama.engine import LlamaOptions
from zerocopy.runtime.synthetic import Descriptor, SyntheticOptions, SyntheticRuntime
from zerocopy.worker.main import WorkerOptions, open_runtime

SMALL = SyntheticOptions(n_ctx=256, chunk_tokens=64, page_tokens=32)
TOKENS = 100


def write(folder: Path, descriptor: Descriptor) -> Path:
    path = folder / f"a{synthetic.SUFFIX}"
    synthetic.write_descriptor(path, descriptor)
    return path


def opened(folder: Path, options: SyntheticOptions = SMALL, **speeds: float) -> SyntheticRuntime:
    return SyntheticRuntime(write(folder, Descriptor(geometry="small", **speeds)), options)


@pytest.fixture
def runtime(tmp_path: Path) -> SyntheticRuntime:
    return opened(tmp_path)


def exported(runtime: SyntheticRuntime, history: list[int]) -> State:
    lane = runtime.open_lane()
    prefill(lane, runtime.facts, history)
    return export_state(lane, runtime.facts, len(history))


# -- geometry ----------------------------------------------------------------------------------------------------------


def test_nemotron_3_super_has_the_bytes_of_the_machine_profiles(tmp_path: Path) -> None:
    schema = SyntheticRuntime(write(tmp_path, Descriptor()), SyntheticOptions()).facts.schema
    spec = {c.component: c for c in schema.components}
    assert sum(spec[Component.ATTENTION_KV].layer_bytes) == 8192
    assert sum(spec[Component.MTP_KV].layer_bytes) == 1024
    assert sum(spec[Component.RECURRENT].layer_bytes) == 167_772_160
    assert sum(spec[Component.CONVOLUTION].layer_bytes) == 4_915_200
    assert schema.snapshot_bytes() == 172_687_360
    assert spec[Component.MTP_HIDDEN].layer_bytes == (16_384,)
    assert [spec[c].layers for c in (Component.ATTENTION_KV, Component.RECURRENT, Component.CONVOLUTION)] == [8, 40, 40]


def test_it_says_in_its_identity_that_it_is_no_model(runtime: SyntheticRuntime) -> None:
    identity = runtime.facts.identity
    for text in (identity.model, identity.tokenizer, identity.architecture, identity.engine, identity.exactness):
        assert text.startswith("synthetic")
    assert runtime.facts.model_name.startswith("synthetic")


def test_hosts_of_different_speed_may_pair(tmp_path: Path, runtime: SyntheticRuntime) -> None:
    assert opened(tmp_path, prefill_tokens_per_s=5.0).facts.identity == runtime.facts.identity


def test_a_worker_takes_it_by_the_name_of_its_file_only(tmp_path: Path) -> None:
    path = write(tmp_path, Descriptor(geometry="small"))
    options = LlamaOptions(n_ctx=512, chunk_tokens=128, page_tokens=64)
    facts = open_runtime(WorkerOptions(str(path), ("decode",), options)).facts
    assert (facts.n_ctx, facts.chunk_tokens, facts.page_tokens) == (512, 128, 64)
    renamed = path.rename(tmp_path / "a.gguf")
    with pytest.raises(EngineError) as refused:
        open_runtime(WorkerOptions(str(renamed), ("decode",), options))
    assert refused.value.reason != "descriptor"


@pytest.mark.parametrize(
    "text", ["", "{", '{"geometry": "other"}', '{"speed": 3}', '{"prefill_tokens_per_s": -1}', "[" * 9000, "\xff"]
)
def test_a_descriptor_that_is_not_one_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / f"bad{synthetic.SUFFIX}"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(EngineError, match="model make synthetic") as refused:
        SyntheticRuntime(path, SMALL)
    assert refused.value.reason == "descriptor"


@pytest.mark.parametrize(
    "options",
    [
        SyntheticOptions(n_ctx=256, chunk_tokens=64, page_tokens=48),
        SyntheticOptions(n_ctx=32, chunk_tokens=64, page_tokens=32),
        SyntheticOptions(n_ctx=256, chunk_tokens=64, page_tokens=-1),
        SyntheticOptions(kv_type="q8_0"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: SyntheticOptions) -> None:
    with pytest.raises(EngineError) as refused:
        opened(tmp_path, options)
    assert refused.value.reason == "engine-options"


# -- continuation ------------------------------------------------------------------------------------------------------


def test_an_imported_state_continues_as_the_source_does_and_reexports_the_same_bytes(runtime: SyntheticRuntime) -> None:
    history = prompt(runtime.facts, TOKENS)
    source, sink = runtime.open_lane(), runtime.open_lane()
    prefill(source, runtime.facts, history[:-1])
    import_state(sink, export_state(source, runtime.facts, TOKENS - 1))
    assert sink.positions() == source.positions()
    assert sink.state_digests(KEY) == source.state_digests(KEY)
    here, there = greedy(source, history[-1], TOKENS - 1, 5), greedy(sink, history[-1], TOKENS - 1, 5)
    assert here[0] == there[0] and same(here[1], there[1])


def test_a_probe_says_what_evaluation_will_and_changes_nothing(runtime: SyntheticRuntime) -> None:
    lane, history = runtime.open_lane(), prompt(runtime.facts, TOKENS)
    prefill(lane, runtime.facts, history[:-1])
    before = lane.state_digests(KEY)
    foretold = lane.probe(history[-1], TOKENS - 1)
    mtp = lane.mtp_logits()
    assert lane.state_digests(KEY) == before
    assert np.array_equal(foretold, lane.evaluate(history[-1], TOKENS - 1))
    assert mtp is not None and np.array_equal(mtp, lane.mtp_logits())


@pytest.mark.parametrize("at", [0, 57, TOKENS - 2])
def test_one_other_token_anywhere_gives_other_logits(runtime: SyntheticRuntime, at: int) -> None:
    history, rows = prompt(runtime.facts, TOKENS), []
    other = [*history[:at], (history[at] + 1) % runtime.facts.n_vocab, *history[at + 1 :]]
    for tokens in (history, other, [history[1], history[0], *history[2:]]):
        lane = runtime.open_lane()
        prefill(lane, runtime.facts, tokens[:-1])
        rows.append(lane.evaluate(tokens[-1], TOKENS - 1))
    assert not np.array_equal(rows[0], rows[1]) and not np.array_equal(rows[0], rows[2])
    assert np.sqrt(np.mean((rows[0] - rows[1]) ** 2)) > 0.1  # far above what a probe tolerates


def test_pages_of_any_size_hold_the_same_rows(runtime: SyntheticRuntime) -> None:
    lane, sink = runtime.open_lane(), runtime.open_lane()
    prefill(lane, runtime.facts, prompt(runtime.facts, TOKENS))
    import_state(sink, export_state(lane, runtime.facts, TOKENS, page_tokens=7))
    assert sink.state_digests(KEY) == lane.state_digests(KEY)


# -- damage ------------------------------------------------------------------------------------------------------------


def damaged(state: State, part: int) -> memoryview:
    """A view of one part of the state: page 0, 1, ..., then snapshot, then hidden row."""
    assert state.snapshot is not None and state.hidden is not None
    return [*(page for _, _, page in state.pages), state.snapshot, state.hidden][part]


@pytest.mark.parametrize("part", range(10))  # pages; snapshot; hidden row
@pytest.mark.parametrize("where", [0.0, 0.3, 0.77, 1.0])
def test_one_changed_bit_anywhere_is_refused(runtime: SyntheticRuntime, part: int, where: float) -> None:
    history = prompt(runtime.facts, TOKENS)
    state = exported(runtime, history)
    view = damaged(state, part)
    view[int(where * (len(view) - 1))] ^= 0x10
    lane = runtime.open_lane()
    with pytest.raises(EngineError) as refused:
        import_state(lane, state)
    assert refused.value.reason == "page-content"
    with pytest.raises(EngineError, match="clear the lane"):
        lane.evaluate(history[-1], TOKENS)


def test_a_changed_stamp_behind_the_first_layer_is_refused_by_the_page_itself(
    runtime: SyntheticRuntime,
) -> None:
    component, tokens, page = exported(runtime, prompt(runtime.facts, TOKENS)).pages[0]
    page[len(page) // 2] ^= 1  # the second of two layers starts there
    with pytest.raises(EngineError, match="cells do not agree"):
        runtime.open_lane().import_page(component, tokens, page)


@pytest.mark.parametrize("part", range(10))
def test_a_part_that_did_not_wholly_arrive_is_refused(runtime: SyntheticRuntime, part: int) -> None:
    """Memory is wiped before it is lent, so what never came is zeros."""
    state = exported(runtime, prompt(runtime.facts, TOKENS))
    view = damaged(state, part)
    view[len(view) - 1024 :] = bytes(1024)
    with pytest.raises(EngineError) as refused:
        import_state(runtime.open_lane(), state)
    assert refused.value.reason == "page-content"


@pytest.mark.parametrize("part", [1, 8, 9])
def test_a_part_of_another_prompt_is_refused(runtime: SyntheticRuntime, part: int) -> None:
    state = exported(runtime, prompt(runtime.facts, TOKENS))
    foreign = exported(runtime, prompt(runtime.facts, TOKENS, seed=1))
    damaged(state, part)[:] = damaged(foreign, part)
    with pytest.raises(EngineError) as refused:
        import_state(runtime.open_lane(), state)
    assert refused.value.reason == "page-content"


def test_a_page_of_an_earlier_prompt_beside_its_own_mtp_page_changes_the_logits(runtime: SyntheticRuntime) -> None:
    """Two pages that agree with each other cannot be told at import; the probe tells."""
    history = prompt(runtime.facts, TOKENS)
    other = [*prompt(runtime.facts, 32, seed=1), *history[32:]]
    rows = []
    for swapped in (False, True):
        state, foreign = exported(runtime, history), exported(runtime, other)
        if swapped:
            state.pages[:2] = foreign.pages[:2]
        lane = runtime.open_lane()
        import_state(lane, state)
        rows.append(lane.evaluate(1, TOKENS))
    assert not np.array_equal(*rows)


def test_pages_out_of_order_a_snapshot_too_early_and_wrong_sizes_are_refused(runtime: SyntheticRuntime) -> None:
    state = exported(runtime, prompt(runtime.facts, TOKENS))
    assert state.snapshot is not None
    lane = runtime.open_lane()
    component, tokens, page = state.pages[2]
    with pytest.raises(EngineError, match="starts at 32, the lane holds 0"):
        lane.import_page(component, tokens, page)
    with pytest.raises(EngineError, match="attention KV holds 0"):
        lane.import_snapshot(state.snapshot, TOKENS)
    with pytest.raises(EngineError, match="bytes, not"):
        lane.import_page(component, (0, 31), page)
    with pytest.raises(EngineError, match="does not travel in pages"):
        lane.import_page(Component.RECURRENT, (0, 32), page)


def test_what_was_not_computed_is_not_exported(runtime: SyntheticRuntime) -> None:
    lane = runtime.open_lane()
    view = memoryview(bytearray(2 * 1024 * 32))
    with pytest.raises(EngineError, match="the lane holds 0"):
        lane.export_page(Component.ATTENTION_KV, (0, 32), view)
    with pytest.raises(EngineError, match="holds none"):
        lane.export_hidden(memoryview(bytearray(1024)))


def test_a_cleared_lane_holds_nothing_and_starts_again(runtime: SyntheticRuntime) -> None:
    lane, history = runtime.open_lane(), prompt(runtime.facts, TOKENS)
    prefill(lane, runtime.facts, history)
    first = lane.state_digests(KEY)
    lane.clear()
    assert lane.positions().target == -1 and not lane._prefix.any()
    prefill(lane, runtime.facts, history)
    assert lane.state_digests(KEY) == first


def test_more_tokens_than_the_context_or_outside_the_vocabulary_are_refused(runtime: SyntheticRuntime) -> None:
    lane = runtime.open_lane()
    with pytest.raises(EngineError, match="vocabulary"):
        lane.prefill([512], 0)
    with pytest.raises(EngineError, match="this lane takes 1 to 64"):
        lane.prefill([1] * 65, 0)
    prefill(lane, runtime.facts, [1] * 256)
    with pytest.raises(EngineError, match="do not fit a context of 256"):
        lane.evaluate(1, 256)


# -- speed -------------------------------------------------------------------------------------------------------------


def test_work_takes_at_least_the_time_that_the_speed_says(tmp_path: Path) -> None:
    lane = opened(tmp_path, prefill_tokens_per_s=640.0, decode_tokens_per_s=20.0).open_lane()
    began = time.monotonic()
    lane.prefill([1] * 64, 0)
    prefilled = time.monotonic()
    lane.probe(1, 64)
    lane.evaluate(1, 64)
    assert prefilled - began >= 0.1
    assert time.monotonic() - prefilled >= 0.1
    assert lane.counters().prompt_tokens == 64 and lane.counters().single_tokens == 1
