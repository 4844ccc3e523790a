"""`model`: tiny models are written, and the inventory's bytes are those that the engine's schema gives (S9)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerocopy.cli import main, model
from zerocopy.handoff.components import Component
from zerocopy.runtime.llama.lane import LlamaLane


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    assert main.run(["model", "make", "nemotron_h_moe+mtp", "-o", str(file)]) == 0
    return file


def shown(file: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main.run(["model", "show", str(file), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_hybrid_model_shows_every_component_with_exact_bytes(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(tiny, capsys)
    assert report["family"] == "nemotron_h_moe+mtp" and report["mtp"] == "tracked"
    parts = {part["name"]: part for part in report["components"]}
    needed = {c.label for c in Component}
    assert set(parts) == needed
    for name, part in parts.items():
        sizes = [part["bytes"][str(n)] for n in model.LENGTHS]
        assert sizes == sorted(sizes) and sizes[0] > 0, name
        assert (sizes[0] < sizes[-1]) == part["per_token"], name
    assert parts["token history"]["bytes"]["1024"] == 4096


def test_the_table_has_a_row_for_each_component_and_a_total(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert main.run(["model", "show", str(tiny)]) == 0
    text = capsys.readouterr().out
    for label in [c.label for c in Component] + ["all", "128K", "weights sha256"]:
        assert label in text


def test_the_engine_counts_what_a_handoff_moves(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: exact bytes measured from the engine at 1K to 128K tokens, beside what the layout says."""
    assert main.run(["model", "show", str(tiny), "--measure", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counted = {(row["component"], row["tokens"]): row["engine_bytes"] for row in report["measured"]}
    for part in report["components"]:
        for n in model.LENGTHS if part["name"] in ("attention KV", "MTP KV", "MTP hidden row") else ():
            assert counted[part["name"], n] == part["bytes"][str(n)]
    monkeypatch.setattr(model, "LENGTHS", (256, 512))
    monkeypatch.setenv("COLUMNS", "140")
    assert main.run(["model", "show", str(tiny), "--measure"]) == 0
    text = capsys.readouterr().out
    assert "counted by the engine" in text and f"{counted['MTP hidden row', 1024]:,}" in text


def test_a_count_that_differs_is_an_error(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "LENGTHS", (512,))
    monkeypatch.setattr(LlamaLane, "page_size", lambda *_: 12)  # of each of two pages
    assert main.run(["model", "show", str(tiny), "--measure", "--json"]) == 1
    assert "attention KV at 512 tokens: the engine counts 24 bytes" in capsys.readouterr().err


def test_what_has_no_engine_cannot_be_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "super.synthetic.json"
    assert main.run(["model", "make", "synthetic", "-o", str(file)]) == 0
    assert main.run(["model", "show", str(file), "--measure"]) == 2
    assert "leave out --measure" in capsys.readouterr().err


def test_make_does_not_overwrite_unless_told_and_is_deterministic(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.gguf"
    again.write_bytes(b"precious")
    argv = ["model", "make", "nemotron_h_moe+mtp", "-o", str(again)]
    assert main.run(argv) == 2
    assert again.read_bytes() == b"precious" and "--force" in capsys.readouterr().err
    assert main.run([*argv, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == again.stat().st_size
    assert again.read_bytes() == tiny.read_bytes()


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["make", "gpt9", "-o", "x.gguf"], 2, ["gpt9", "nemotron_h"]),
        (["make", "llama", "-o", "/absent/x.gguf"], 1, ["/absent/x.gguf"]),
        (["make", "llama", "-o", "x.gguf", "--scale", "0"], 2, ["--scale"]),
        (["show", "/absent.gguf"], 1, ["/absent.gguf"]),
        (["show", "/dev/null"], 1, ["/dev/null"]),
        (["show", "TINY", "--kv-type", "q9"], 1, ["q9", "f16"]),
    ],
)
def test_a_mistake_is_one_line(
    tiny: Path, tmp_path: Path, argv: list[str], code: int, words: list[str],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main.run(["model", *(str(tiny) if word == "TINY" else word for word in argv)]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_synthetic_model_is_written_under_a_name_that_says_so_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["model", "make", "synthetic", "-o", str(tmp_path / "super.gguf")]) == 2
    assert "must end in .synthetic.json" in capsys.readouterr().err
    file = tmp_path / "super.synthetic.json"
    assert main.run(["model", "make", "synthetic", "-o", str(file)]) == 0
    assert json.loads(file.read_text())["prefill_tokens_per_s"] == 768.84
    capsys.readouterr()
    report = shown(file, capsys)
    assert report["model"] == "synthetic nemotron-3-super" and report["identity"]["architecture"] == "synthetic"
    parts = {part["name"]: part["bytes"] for part in report["components"]}
    assert parts["attention KV"]["32768"] == 32768 * 8192 and parts["recurrent state"]["1024"] == 167_772_160
