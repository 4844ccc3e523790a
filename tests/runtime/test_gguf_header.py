"""Model files come from anywhere: every length is checked before it is used."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.conftest import ModelFile
from zerocopy.runtime.base import EngineError
from zerocopy.runtime.gguf_header import read_header
from zerocopy.runtime.llama.family import family_of


def write(path: Path, *, tokens: list[str], template: str = "t", reverse: bool = False, scores: bool = True) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_string("general.name", "a name")
    writer.add_uint16("llama.nextn_predict_layers", 3)
    fields = [
        lambda: writer.add_string("tokenizer.ggml.model", "gpt2"),
        lambda: writer.add_array("tokenizer.ggml.tokens", tokens),
        lambda: writer.add_chat_template(template),
    ]
    if scores:
        fields.append(lambda: writer.add_array("tokenizer.ggml.scores", [0.5] * len(tokens)))
    for add in reversed(fields) if reverse else fields:
        add()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_a_file_says_is_read(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m.gguf", tokens=["a", "bc"], template="{{ x }}"))
    assert (header.architecture, header.name, header.mtp_layers) == ("llama", "a name", 3)
    assert header.chat_template == "{{ x }}" and len(header.tokenizer) == 64


def test_a_name_is_short_and_has_nothing_that_moves_a_terminal(tmp_path: Path) -> None:
    """It stands in every answer: a megabyte of it did, and escape sequences went to whoever looked."""
    path = tmp_path / "m.gguf"
    for architecture, name in ((2 * "mamba\x1b[2J", 300 * "n\n"), ("x" * 70_000, "a name")):
        writer = gguf.GGUFWriter(str(path), architecture)
        writer.add_string("general.name", name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        header = read_header(path)
        assert len(header.architecture) <= 128 and len(header.name) <= 128
        assert (header.architecture + header.name).isprintable()
        with pytest.raises(EngineError, match="not certified") as refused:
            family_of(header, mtp=True)
        assert str(refused.value).isprintable() and len(str(refused.value)) < 400


def test_the_tokenizer_digest_is_of_the_tokenizer_and_of_nothing_else(tmp_path: Path) -> None:
    one = read_header(write(tmp_path / "1.gguf", tokens=["a", "bc"])).tokenizer
    assert read_header(write(tmp_path / "2.gguf", tokens=["a", "bc"], template="other")).tokenizer == one
    assert read_header(write(tmp_path / "3.gguf", tokens=["a", "bc"], reverse=True)).tokenizer == one
    assert read_header(write(tmp_path / "4.gguf", tokens=["ab", "c"])).tokenizer != one
    assert read_header(write(tmp_path / "5.gguf", tokens=["a", "bc"], scores=False)).tokenizer != one


def test_a_file_without_names_or_template_is_fine(model_file: ModelFile, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "m.gguf")
    assert (header.name, header.chat_template, header.mtp_layers) == ("", None, 0)


def test_truncation_anywhere_in_the_metadata_is_noticed(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", tokens=["a", "bc"]).read_bytes()
    metadata_end = whole.rindex(b"tokenizer.ggml.scores") + 21 + 4 + 4 + 8 + 8
    for size in range(1, metadata_end):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(EngineError) as error:
            read_header(tmp_path / "cut.gguf")
        assert error.value.reason == "model-file"
    read_header(tmp_path / "m.gguf")


@pytest.mark.parametrize("length", [2**31, 2**32, 2**62, 2**63, 2**64 - 1])
def test_huge_lengths_are_refused_without_allocating(length: int, tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "m.gguf", tokens=["a", "bc"]).read_bytes())
    at = whole.index(b"tokenizer.ggml.tokens") + 21 + 4 + 4
    for offset in (24, at, at + 8, 16):  # first key, array length, first string, number of keys
        broken = bytearray(whole)
        broken[offset : offset + 8] = struct.pack("<Q", length)
        (tmp_path / "broken.gguf").write_bytes(broken)
        with pytest.raises(EngineError):
            read_header(tmp_path / "broken.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_but_never_crashes(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = bytearray((path if path.exists() else write(path, tokens=["a", "bc"])).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "damaged.gguf").write_bytes(whole)
    try:
        read_header(tmp_path / "damaged.gguf")
    except EngineError as error:
        assert error.reason == "model-file"


def test_nothing_and_a_folder_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for path in (tmp_path / "empty.gguf", tmp_path, tmp_path / "absent"):
        with pytest.raises(EngineError) as error:
            read_header(path)
        assert error.value.reason == "model-file"
