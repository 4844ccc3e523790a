"""A lane refuses whatever would leave it with a state that is not whole, before the engine sees it (H3, field reports:
"state left out silently")."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

from tests.process_memory import occurrences, readable
from tests.runtime.conftest import OpenRuntime
from tests.runtime.handover import (
    KEY,
    Refusing,
    State,
    bits,
    export_state,
    import_state,
    page_room,
    prefill,
    prompt,
    room,
    same,
)
from zerocopy.handoff.components import Component
from zerocopy.runtime import models
from zerocopy.runtime.base import EngineCounters, EngineError, Positions
from zerocopy.runtime.llama import lane as lane_module
from zerocopy.runtime.llama.engine import LlamaRuntime
from zerocopy.runtime.llama.lane import LlamaLane

FULL = "nemotron_h_moe+mtp"  # the family with every component
N = 99


def reason(error: pytest.ExceptionInfo[EngineError]) -> str:
    return error.value.reason


@pytest.fixture
def runtime(open_runtime: OpenRuntime) -> LlamaRuntime:
    return open_runtime(FULL)


@pytest.fixture
def source(runtime: LlamaRuntime) -> LlamaLane:
    lane = runtime.open_lane()
    prefill(lane, runtime.facts, prompt(runtime.facts, N))
    return lane


@pytest.fixture
def decoder(runtime: LlamaRuntime) -> LlamaLane:
    return runtime.open_lane()


@pytest.mark.parametrize("missing", ["attention KV", "recurrent state", "MTP KV", "MTP hidden row"])
def test_nothing_is_evaluated_while_a_component_is_missing(
    missing: str, runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane
) -> None:
    state = export_state(source, runtime.facts, N)
    state.pages = [p for p in state.pages if p[0].label != missing]
    if missing == "recurrent state":
        state.snapshot = None
    if missing == "MTP hidden row":
        state.hidden = None
    if missing in ("attention KV", "MTP KV"):
        with pytest.raises(EngineError):  # attention: the snapshot is refused; MTP: its row is of no position
            import_state(decoder, state)
            decoder.evaluate(0, N)
    else:
        import_state(decoder, state)
    for attempt in (decoder.evaluate, decoder.probe):
        with pytest.raises(EngineError) as error:
            attempt(0, N)
        assert reason(error) == "state-incomplete"
    with pytest.raises(EngineError, match="valid after"):
        decoder.prefill([0, 1], N)


def test_a_missing_component_is_named(runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane) -> None:
    state = export_state(source, runtime.facts, N)
    state.snapshot = None
    import_state(decoder, state)
    with pytest.raises(EngineError, match=f"recurrent state is valid after 0 tokens, position {N} needs {N}"):
        decoder.evaluate(0, N)


def test_a_gap_in_the_last_page_is_noticed(runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane) -> None:
    state = export_state(source, runtime.facts, N)
    state.pages = [p for p in state.pages if p[:2] != (Component.MTP_KV, (96, N))]
    import_state(decoder, state)
    with pytest.raises(EngineError, match="MTP KV is valid after 96 tokens"):
        decoder.evaluate(0, N)


def test_a_page_out_of_order_is_refused(runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane) -> None:
    pages = [p for p in export_state(source, runtime.facts, N).pages if p[0] == Component.ATTENTION_KV]
    decoder.import_page(*pages[0])
    for page in (pages[0], pages[2]):  # again, and one too far
        with pytest.raises(EngineError) as error:
            decoder.import_page(*page)
        assert reason(error) == "page-order"
    decoder.import_page(*pages[1])


def test_a_snapshot_before_its_pages_is_refused(runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane) -> None:
    """The engine takes it and loses it, silently."""
    state = export_state(source, runtime.facts, N)
    assert state.snapshot is not None
    for component, tokens, page in [(None, (0, 0), None), *(p for p in state.pages if p[1][1] < N)]:
        if component is not None:
            decoder.import_page(component, tokens, page)
        with pytest.raises(EngineError) as error:
            decoder.import_snapshot(state.snapshot, N)
        assert reason(error) == "snapshot-last"


def test_a_page_after_the_snapshot_is_refused(runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane) -> None:
    """The engine would drop the recurrent state with it."""
    early, late = export_state(source, runtime.facts, 64), export_state(source, runtime.facts, N)
    assert late.snapshot is not None
    for page in early.pages:
        decoder.import_page(*page)
    decoder.import_snapshot(late.snapshot, 64)
    with pytest.raises(EngineError) as error:
        decoder.import_page(*next(p for p in late.pages if p[1][0] == 64))
    assert reason(error) == "snapshot-last"


def test_a_hidden_row_counts_only_after_the_pages_it_follows(
    runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane
) -> None:
    state = export_state(source, runtime.facts, N)
    hidden, state.hidden = state.hidden, None
    assert hidden is not None
    state.pages.sort(key=lambda page: page[0])
    import_state(decoder, State(N, [p for p in state.pages if p[0] == Component.ATTENTION_KV], hidden=hidden))
    import_state(decoder, State(N, [p for p in state.pages if p[0] == Component.MTP_KV], state.snapshot))
    with pytest.raises(EngineError, match="MTP hidden row is valid after 0 tokens"):
        decoder.evaluate(0, N)
    decoder.import_hidden(hidden)
    decoder.evaluate(0, N)


def test_what_a_misbehaving_engine_exports_never_leaves(
    runtime: LlamaRuntime, source: LlamaLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export is checked like an import: here the engine writes cells and rows that nobody asked for."""

    def fill(*arguments: object) -> None:
        arguments[-1][:] = b"\x01" * len(arguments[-1])  # type: ignore[index, arg-type]

    monkeypatch.setattr(source._target, "export_range", fill)
    monkeypatch.setattr(source._target, "export_recurrent", fill)
    with pytest.raises(EngineError) as error:
        source.export_page(Component.ATTENTION_KV, (0, 32), page_room(runtime.facts, Component.ATTENTION_KV, (0, 32)))
    assert reason(error) == "blob"
    with pytest.raises(EngineError) as error:
        source.export_snapshot(room(runtime.facts.schema.snapshot_bytes()))
    assert reason(error) == "blob"


def test_evaluation_at_the_wrong_position_is_refused(runtime: LlamaRuntime, source: LlamaLane) -> None:
    for position in (0, N - 1, N + 1):
        with pytest.raises(EngineError) as error:
            source.evaluate(0, position)
        assert reason(error) == "state-incomplete"
    source.evaluate(0, N)


@pytest.mark.parametrize("which", ["target", "mtp"])
def test_the_engines_own_position_is_a_gate_too(which: str, runtime: LlamaRuntime, source: LlamaLane) -> None:
    """Should our books ever say more than the engine holds."""
    context = source._target if which == "target" else source._mtp.context  # type: ignore[union-attr]
    context.drop(source.sequence)
    with pytest.raises(EngineError) as error:
        source.evaluate(0, N)
    assert reason(error) == "position"


@pytest.mark.parametrize("token", [-1, models.N_VOCAB, 1 << 31])
def test_a_token_outside_the_vocabulary_is_refused(token: int, source: LlamaLane) -> None:
    for attempt in (source.evaluate, source.probe):
        with pytest.raises(EngineError) as error:
            attempt(token, N)
        assert reason(error) == "token-range" and str(error.value).endswith("vocabulary of 128")  # X4: not which
    source.evaluate(0, N)


def test_a_chunk_of_the_wrong_size_is_refused(runtime: LlamaRuntime, decoder: LlamaLane) -> None:
    for tokens in ([], [0] * (runtime.facts.chunk_tokens + 1)):
        with pytest.raises(EngineError) as error:
            decoder.prefill(tokens, 0)
        assert reason(error) == "chunk-size"


def test_the_context_can_be_filled_to_its_last_cell_and_no_further(open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("gemma3")
    lane, n_ctx = runtime.open_lane(), runtime.facts.n_ctx
    history = prompt(runtime.facts, n_ctx - 1)
    prefill(lane, runtime.facts, history)
    foretold = bits(lane, lane.probe(1, n_ctx - 1))
    assert same([bits(lane, lane.evaluate(1, n_ctx - 1))], [foretold])
    with pytest.raises(EngineError) as error:
        lane.evaluate(1, n_ctx)
    assert reason(error) == "context-full"


@pytest.mark.parametrize("delta", [-1, 1])
def test_a_page_of_the_wrong_size_is_refused(delta: int, runtime: LlamaRuntime, source: LlamaLane) -> None:
    size = len(page_room(runtime.facts, Component.MTP_KV, (0, 32))) + delta
    for attempt in (source.export_page, runtime.open_lane().import_page):
        with pytest.raises(EngineError) as error:
            attempt(Component.MTP_KV, (0, 32), room(size))
        assert reason(error) == "page-size"


@pytest.mark.parametrize("tokens", [(0, 0), (3, 2), (-1, 3), (0, N + 1), (1 << 31, (1 << 31) + 1), (511, 513)])
def test_a_range_the_lane_does_not_hold_is_refused(tokens: tuple[int, int], source: LlamaLane) -> None:
    spec = source._m.schema.spec(Component.ATTENTION_KV)
    assert spec is not None
    with pytest.raises(EngineError) as error:
        source.export_page(
            Component.ATTENTION_KV, tokens, room(max(0, min(spec.page_bytes((0, spec.layers), tokens), 1 << 20)))
        )
    assert reason(error) == "page-range"


def test_a_page_longer_than_the_window_is_refused(open_runtime: OpenRuntime) -> None:
    """The engine would leave the masked rows out."""
    runtime = open_runtime("gemma3")
    lane = runtime.open_lane()
    prefill(lane, runtime.facts, prompt(runtime.facts, 100))
    tokens = (0, models.WINDOW + 1)
    with pytest.raises(EngineError) as error:
        lane.export_page(Component.ATTENTION_KV, tokens, page_room(runtime.facts, Component.ATTENTION_KV, tokens))
    assert reason(error) == "page-range"


def test_components_a_family_lacks_are_refused(open_runtime: OpenRuntime) -> None:
    lane = open_runtime("llama").open_lane()
    attempts = [
        lambda: lane.export_page(Component.MTP_KV, (0, 1), room(1)),
        lambda: lane.export_page(Component.TOKENS, (0, 1), room(4)),
        lambda: lane.import_page(Component.PROBE, (0, 1), room(4)),
        lambda: lane.export_snapshot(room(1)),
        lambda: lane.import_snapshot(room(1), 1),
        lambda: lane.export_hidden(room(256)),
        lambda: lane.import_hidden(room(256)),
    ]
    for attempt in attempts:
        with pytest.raises(EngineError) as error:
            attempt()
        assert reason(error) == "component"


def test_snapshot_and_hidden_row_of_another_size_are_refused(
    runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane
) -> None:
    size = runtime.facts.schema.snapshot_bytes()
    attempts = [
        lambda: source.export_snapshot(room(size - 1)),
        lambda: decoder.import_snapshot(room(size + 1), N),
        lambda: source.export_hidden(room(4)),
        lambda: decoder.import_hidden(room(4)),
    ]
    for attempt in attempts:
        with pytest.raises(EngineError) as error:
            attempt()
        assert reason(error) == "page-size"


def test_exporting_from_an_empty_sequence_is_an_error_never_an_empty_component(
    runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane
) -> None:
    size = runtime.facts.schema.snapshot_bytes()
    for attempt in (lambda: decoder.export_snapshot(room(size)), lambda: decoder.export_hidden(room(256))):
        with pytest.raises(EngineError) as error:
            attempt()
        assert reason(error) == "engine-export"
    source.export_hidden(room(256))


def test_export_needs_a_writable_view(runtime: LlamaRuntime, source: LlamaLane) -> None:
    page = page_room(runtime.facts, Component.ATTENTION_KV, (0, 32)).toreadonly()
    with pytest.raises(BufferError):
        source.export_page(Component.ATTENTION_KV, (0, 32), page)


def test_the_counters_are_the_engines_and_tell_none_from_one(runtime: LlamaRuntime, decoder: LlamaLane) -> None:
    decoder.reset_counters()
    assert decoder.counters() == EngineCounters(0, 0)
    decoder.prefill([1, 2, 3], 0)
    assert decoder.counters() == EngineCounters(3, 0)
    decoder.evaluate(4, 3)
    decoder.evaluate(5, 4)
    assert decoder.counters() == EngineCounters(3, 2)
    decoder.reset_counters()
    assert decoder.counters() == EngineCounters(0, 0)


def test_after_an_import_exactly_one_token_is_evaluated(
    runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane
) -> None:
    state = export_state(source, runtime.facts, N)
    decoder.reset_counters()
    import_state(decoder, state)
    assert decoder.counters() == EngineCounters(0, 0)
    decoder.evaluate(1, N)
    assert decoder.counters() == EngineCounters(0, 1)


def test_positions_show_how_far_each_context_is(runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane) -> None:
    state = export_state(source, runtime.facts, N)
    assert decoder.positions() == Positions(-1, -1)
    for page in state.pages:
        decoder.import_page(*page)
    assert decoder.positions() == Positions(-1, N - 1)  # a hybrid stands nowhere before its snapshot
    assert state.snapshot is not None
    decoder.import_snapshot(state.snapshot, N)
    assert decoder.positions() == Positions(N - 1, N - 1) == source.positions()


@pytest.mark.parametrize("family", models.FAMILIES)
def test_clear_leaves_nothing_behind(family: str, open_runtime: OpenRuntime) -> None:
    runtime = open_runtime(family)
    lane = runtime.open_lane()
    prefill(lane, runtime.facts, prompt(runtime.facts, N))
    lane.evaluate(1, N)
    lane.clear()
    positions = lane.positions()
    assert positions.target == -1 and positions.mtp in (None, -1)
    assert lane.mtp_logits() is None
    assert not any(lane._target._batch.token[0 : runtime.facts.chunk_tokens])
    if lane._mtp:
        assert not lane._mtp._rows.any() and not lane._mtp._pending.any()
    with pytest.raises(EngineError):
        lane.evaluate(1, N + 1)


@readable
@pytest.mark.parametrize("family", ["llama", "mamba2", FULL])
def test_clear_wipes_the_state_from_memory(family: str, open_runtime: OpenRuntime) -> None:
    """X6, by looking: rows of a marker are imported, found all over the process, and gone after `clear`."""
    runtime = open_runtime(family)
    source, decoder = runtime.open_lane(), runtime.open_lane()
    prefill(source, runtime.facts, prompt(runtime.facts, N))
    state = export_state(source, runtime.facts, N)
    marker = secrets.token_bytes(32)
    for spec in runtime.facts.schema.components:
        if spec.component in (Component.CONVOLUTION, Component.RECURRENT):
            assert state.snapshot is not None
            for layer, size in enumerate(spec.layer_bytes):
                start = runtime.facts.schema.slab_offset(spec.component, layer) + spec.layer_overhead
                _fill(state.snapshot[start : start + size], marker)
    for component, tokens, page in state.pages:  # the last layer's V rows end the KV part, headers are before them
        after = 60 if component == Component.ATTENTION_KV and state.snapshot else 0
        rows = (tokens[1] - tokens[0]) * 64
        _fill(page[len(page) - after - rows : len(page) - after], marker)
    if state.hidden:
        _fill(state.hidden, marker)
    import_state(decoder, state)
    for part in (*(page for _, _, page in state.pages), state.snapshot, state.hidden):
        if part is not None:
            part[:] = bytes(len(part))
    assert occurrences(marker * 2) > 90
    decoder.clear()
    assert occurrences(marker * 2) < 9  # this test's own copies of it


def test_state_that_was_being_digested_is_wiped_even_if_the_engine_fails(
    open_runtime: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X6: pages before the one that failed, and a whole snapshot, stayed in the heap."""
    runtime, rooms = open_runtime(FULL), list[memoryview]()
    lane = runtime.open_lane()
    prefill(lane, runtime.facts, prompt(runtime.facts, N))
    made = lane_module._room
    monkeypatch.setattr(lane_module, "_room", lambda size: rooms.append(made(size)) or rooms[-1])
    exports = -(-N // 64)  # of attention KV; the snapshot's comes after those of the MTP head
    target = lane._target._c
    for after in range(exports + 1):
        refusing = Refusing(target, "llama_state_seq_get_data_ext", after=after, half=True)
        monkeypatch.setattr(lane._target, "_c", refusing)
        with pytest.raises(EngineError, match="exported 0 bytes"):
            lane.state_digests(KEY)
        assert rooms and not any(any(view) for view in rooms)


def _fill(view: memoryview, marker: bytes) -> None:
    np.frombuffer(view, dtype=f"V{len(marker)}")[:] = np.void(marker)  # without a temporary full of it


def test_digests_depend_on_the_key_and_cover_every_component(runtime: LlamaRuntime, source: LlamaLane) -> None:
    digests = source.state_digests(KEY)
    assert set(digests) == {
        "attention KV", "recurrent state", "convolution state", "MTP KV", "MTP hidden row",
    }  # fmt: skip
    other = source.state_digests(bytes(16))
    assert all(digests[label] != other[label] for label in digests)


def test_digests_do_not_depend_on_the_page_size(open_runtime: OpenRuntime) -> None:
    digests = []
    for page_tokens in (16, 64):
        runtime = open_runtime(FULL)
        lane = runtime.open_lane()
        prefill(lane, runtime.facts, prompt(runtime.facts, N))
        copy = runtime.open_lane()
        import_state(copy, export_state(lane, runtime.facts, N, page_tokens))
        digests.append(copy.state_digests(KEY))
    assert digests[0] == digests[1]


def test_a_lane_whose_import_failed_refuses_until_cleared(
    runtime: LlamaRuntime, source: LlamaLane, decoder: LlamaLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = export_state(source, runtime.facts, N)

    def fail(*_: object) -> None:
        raise EngineError("engine-import", "the engine took 0 bytes")

    with monkeypatch.context() as patch:
        patch.setattr(decoder._target, "import_range", fail)
        with pytest.raises(EngineError):
            decoder.import_page(*state.pages[0])
    with pytest.raises(EngineError) as error:
        decoder.import_page(*state.pages[0])
    assert reason(error) == "page-order"
    decoder.clear()
    import_state(decoder, state)
    assert decoder.state_digests(KEY) == source.state_digests(KEY)


def test_lanes_of_one_runtime_do_not_see_each_other(runtime: LlamaRuntime, source: LlamaLane) -> None:
    before = source.state_digests(KEY)
    other = runtime.open_lane()
    prefill(other, runtime.facts, prompt(runtime.facts, 200, seed=4))
    other.clear()
    assert source.state_digests(KEY) == before


def test_closing_twice_is_fine_and_a_closed_lane_refuses(runtime: LlamaRuntime) -> None:
    lane = runtime.open_lane()
    lane.prefill([1, 2], 0)
    lane.close()
    lane.close()
    with pytest.raises(TypeError):
        lane.evaluate(1, 2)
    with pytest.raises(TypeError):
        lane.clear()


def test_logits_are_the_engines_memory_not_a_copy(runtime: LlamaRuntime, decoder: LlamaLane) -> None:
    logits = decoder.evaluate(1, 0)
    assert logits.dtype == np.float32 and logits.shape == (runtime.facts.n_vocab,) and not logits.flags.owndata
