from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from zerocopy.cli import demo as module
from zerocopy.cli.demo import Part
from zerocopy.cli.hosts import Answer
from zerocopy.cli.main import app
from zerocopy.cli.screen import CliError

HANDOFF = {
    "id": "ab" * 16,
    "transport": "tcp",
    "components": [{"name": "attention KV", "bytes": 4096, "pages": 2}],
    "kv_bytes": 4096,
    "kv_bytes_sent_before_prefill_end": 2048,
    "overlap_fraction": 0.5,
    "tail_ms": 12.5,
    "probe": "bit-equal",
    **{f"{name}_ms": 1.0 for name in ("queue", "prefill", "export", "wire", "import", "commit", "probe_wait")},
    "probe_ms": None,
}
PROOF = {
    "state": {"attention KV": "s"},
    "logits": ["a", "b"],
    "mtp_logits": None,
    "tokens": "t",
    "final_state": {"attention KV": "f"},
}
BODY: dict[str, Any] = {
    "model": "tiny",
    "usage": {"completion_tokens": 2, "prompt_tokens": 9},
    "choices": [{"text": "hello"}],
    "timings": {"ttft_ms": 5.0, "prompt_tokens_evaluated_here": 1, "handoff": HANDOFF},
    "zc_proof": PROOF,
}
THERE = {
    "marks": {"started": 10.0, "probe_started": 11.0, "probe_ended": 11.5},
    "chunks": [[10.0, 10.5, 32], [10.5, 11.0, 32]],
    "exports": [[10.5, 10.6, 2048]],
}
HERE = {
    "marks": {"state_complete": 11.5, "committed": 12.0},
    "wire": [[10.6, 10.7, 2048, "attention KV"]],
    "imports": [[10.7, 10.8, 2048]],
}


def answer(**changes: Any) -> Answer:
    """An answer whose proof or text differs in `changes`."""
    body = copy.deepcopy(BODY)
    if "text" in changes:
        body["choices"][0]["text"] = changes.pop("text")
    body["zc_proof"] |= changes
    return Answer(200, {}, body)


def compared(local: Answer, control: Answer, moved: Answer) -> Part:
    return module._compare(local, control, moved, "llama", THERE, HERE)


def test_three_equal_answers_are_exact() -> None:
    part = compared(answer(), answer(), answer())
    assert part.exact
    assert (part.family, part.tail_ms, part.overlap_fraction) == ("llama", 12.5, 0.5)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"logits": ["a", "c"]}, "logits_exact"),
        ({"mtp_logits": "m"}, "logits_exact"),
        ({"tokens": "u"}, "tokens_exact"),
        ({"text": "hullo"}, "tokens_exact"),
        ({"state": {"attention KV": "x"}}, "state_bytes_exact"),
        ({"final_state": {"attention KV": "x"}}, "state_bytes_exact"),
    ],
)
def test_whatever_differs_after_the_handoff_is_not_exact(changes: dict[str, Any], wrong: str) -> None:
    """V1."""
    part = compared(answer(), answer(), answer(**changes))
    assert not part.exact
    assert [name for name in ("logits_exact", "tokens_exact", "state_bytes_exact") if not getattr(part, name)] == [
        wrong
    ]
    assert part.control_exact


def test_a_local_run_that_differs_from_itself_proves_nothing() -> None:
    part = compared(answer(), answer(logits=["a", "x"]), answer())
    assert part.logits_exact
    assert not part.control_exact
    assert not part.exact


@pytest.mark.parametrize("empty", [{"logits": []}, {"logits": ["a"]}, {"state": {}}])
def test_an_empty_proof_proves_nothing(empty: dict[str, Any]) -> None:
    assert not compared(answer(**empty), answer(**empty), answer(**empty)).exact


def test_times_of_both_hosts_begin_with_the_prefill() -> None:
    spans = compared(answer(), answer(), answer()).timeline
    assert spans == {
        "prefill": [[0.0, 0.5], [0.5, 1.0]],
        "export": [[0.5, 0.6]],
        "wire": [[0.6, 0.7]],
        "import": [[0.7, 0.8]],
        "probe": [[1.0, 1.5]],
        "commit": [[1.5, 2.0]],
    }


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """What the two parts will give; exact unless a test replaces one."""
    both = [compared(answer(), answer(), answer()) for _ in range(2)]
    monkeypatch.setattr(module, "_real_text", lambda folder, transport: both[0])
    monkeypatch.setattr(module, "_every_component", lambda folder, transport: both[1])
    return both


def test_an_exact_demo_shows_both_parts_and_succeeds(parts: list[Part]) -> None:
    shown = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    assert shown.output.count("equal to the local run, bit for bit") == 6
    assert "Part 1: tiny (llama) over tcp" in shown.output
    assert "12.5 ms from the end of prefill to the commit" in shown.output
    assert "Exact to the bit." in shown.output


def test_a_demo_that_is_not_exact_says_where_and_fails(parts: list[Part]) -> None:
    parts[1] = compared(answer(), answer(), answer(tokens="u"))
    shown = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "120"})
    assert shown.exit_code == 1
    assert shown.output.count("DIFFERENT") == 1
    assert "NOT EXACT" in shown.output


def test_a_script_gets_one_json_object(parts: list[Part]) -> None:
    parts[0] = compared(answer(), answer(), answer(state={"attention KV": "x"}))
    shown = CliRunner().invoke(app, ["demo", "--json"])
    assert shown.exit_code == 1
    result = json.loads(shown.stdout)
    assert result["exact"] is False
    assert [part["state_bytes_exact"] for part in result["parts"]] == [False, True]
    assert result["parts"][1]["timeline"]["wire"] == [[0.6, 0.7]]


def test_its_folder_is_gone_afterwards(parts: list[Part], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(folder: Path, transport: str) -> Part:
        assert folder.is_dir()
        (folder / "keys").mkdir()
        raise CliError("the disaggregated request failed with 503")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_every_component", fails)
    assert CliRunner().invoke(app, ["demo"]).exit_code != 0
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_fails_is_an_error_with_the_daemons_words() -> None:
    class Refuses:
        def complete(self, body: object, headers: object) -> Answer:
            return Answer(503, {}, {"error": {"message": "no usable prefiller"}})

    with pytest.raises(CliError, match=r"disaggregated request failed with 503: .*no usable prefiller"):
        module._ask(Refuses(), [1, 2], "disaggregated", "key")  # type: ignore[arg-type]


def test_two_real_hosts_move_every_kind_of_state_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V1, S1-S7: part two as a person runs it, two daemons and two engines."""
    monkeypatch.setenv("ZC_CACHE", str(tmp_path / "cache"))
    part = module._every_component(tmp_path, "tcp")
    assert part.exact, msgspec.to_builtins(part)
    assert part.family == module.TINY_FAMILY
    assert {item["name"] for item in part.components} == {
        "attention KV", "recurrent state", "convolution state", "MTP KV", "MTP hidden row", "token history",
        "continuation probe",
    }  # fmt: skip
    assert part.probe == "bit-equal"
    assert part.prompt_tokens_evaluated_by_decoder == 1
    assert part.kv_bytes_sent_before_prefill_end > 0
    assert part.text is not None
