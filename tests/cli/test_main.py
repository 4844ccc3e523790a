"""The command as a whole: help, version, exit codes, one-line errors, and that flags reach the daemon (U2, U3)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from transport.keys import KeyStore
from zerocopy import __version__, config
from zerocopy.cli import main
from zerocopy.config import DaemonConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wide plain terminal and an empty home."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_the_module_and_the_command_are_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "zerocopy", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"zc-handoff {__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["daemon"],
        ["status"],
        ["doctor"],
        ["keys"],
        ["keys", "new"],
        ["keys", "trust"],
        ["model", "make"],
        ["model", "show"],
    ],
)
def test_every_command_explains_itself(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*argv, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage: zc-handoff" in text and len(text) > 300


def test_the_help_of_daemon_has_a_flag_a_default_and_an_example_for_everything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run(["daemon", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for setting in config.settings():
        assert f"{setting.flag} " in text, setting.flag
        assert setting.text.split(". ")[0].rstrip(".")[:40] in text, setting.name
        assert config.default_text(setting) in text, setting.name
    assert "zc-handoff daemon --role decode" in text


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["nope"], 2, ["no such command", "zc-handoff --help"]),
        (["daemon", "--roel", "x"], 2, ["--roel", "zc-handoff daemon --help"]),
        (["daemon", "--model"], 2, ["--model"]),
        (["daemon"], 2, ["--model FILE"]),
        (["daemon", "--model", "/absent.gguf"], 2, ["/absent.gguf", "does not exist"]),
        (["daemon", "--role", "boss"], 2, ["--role", "prefill+decode", "'boss'"]),
        (["daemon", "--config", "/absent.toml"], 2, ["/absent.toml"]),
        (["daemon", "--probe", "--no-probe"], 2, ["--probe or --no-probe, not both"]),
        (["keys", "trust", "x"], 2, ["certificate"]),
        (["model", "make", "llama"], 2, ["--output"]),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    argv: list[str], code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("zc-handoff: ") and captured.err.count("\n") == 1, captured.err
    assert all(word in captured.err for word in words), captured.err


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["keys"]) == 2
    captured = capsys.readouterr()
    assert "forget" in captured.out + captured.err and "zc-handoff: " not in captured.err


def test_flags_and_environment_become_the_daemons_config_and_its_code_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[DaemonConfig] = []

    def run(settled: DaemonConfig, *, lifeline: object) -> int:
        assert lifeline is None  # of a daemon that a person starts, standard input means nothing
        seen.append(settled)
        return 1

    import zerocopy.daemon.main

    monkeypatch.setattr(zerocopy.daemon.main, "run", run)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    toml = tmp_path / "zc.toml"
    toml.write_text("rings = 9\nn_ctx = 99\n")
    monkeypatch.setenv("ZC_STREAMS", "7")
    argv = ["daemon", "--config", str(toml), "--model", str(model), "--role", "decode", "--n-ctx", "256"]
    argv += [
        "--peer",
        "a=10.0.0.1:1",
        "--peer",
        "b=10.0.0.2:2",
        "--no-allow-fallback",
        "--allow-proofs",
        "--queue-s",
        "2",
    ]
    assert main.run(argv) == 1
    (settled,) = seen
    assert settled.peers == {"a": ("10.0.0.1:1",), "b": ("10.0.0.2:2",)}
    assert (settled.role, settled.n_ctx, settled.rings, settled.streams) == ("decode", 256, 9, 7)
    assert (settled.allow_fallback, settled.allow_proofs, settled.probe, settled.queue_s) == (False, True, True, 2.0)


def test_a_reader_that_leaves_is_not_an_error() -> None:
    command = f"{sys.executable} -m zerocopy daemon --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr


@pytest.mark.parametrize("command", ["doctor", "doctor --json", "--help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_a_full_disk_does_not_take_is_one_line_and_a_failure(command: str, unbuffered: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m zerocopy {command} > /dev/full"],
        capture_output=True, text=True, env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "the output cannot be written: No space left on device" in done.stderr


def test_colour_follows_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["nope"]) == 2
    assert main.run(["doctor", "--keys", "/absent"]) in (0, 1)
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err


@pytest.mark.parametrize("door", ["--listen", "--http"])
def test_a_port_in_use_is_named_with_what_to_do_and_nothing_is_left(door: str, tmp_path: Path) -> None:
    keys, model = tmp_path / "keys", tmp_path / "m.gguf"
    assert main.run(["keys", "new", "one", "--keys", str(keys)]) == 0
    model.touch()  # no engine is started before both doors are open
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        flags = {"--listen": "127.0.0.1:0", "--http": "127.0.0.1:0", door: taken}
        words = [word for pair in flags.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-m", "zerocopy", "daemon", "--model", str(model), "--keys", str(keys), *words],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert f"{taken}: Address already in use: is a daemon running there already? Else choose another" in done.stderr


@pytest.mark.parametrize(
    "words",
    [["keys", "new", "one", "--keys"], ["model", "make", "llama", "-o"], ["keys", "trust", "x", "x.pem", "--keys"]],
)
def test_a_disk_that_takes_no_more_is_one_line_and_nothing_half_written_is_left(
    words: list[str], tmp_path: Path
) -> None:
    """`keys` ended with a traceback; `model make` said `None`, and its next try that the file exists."""
    KeyStore(tmp_path / "other").new("x")
    (tmp_path / "x.pem").write_text(KeyStore(tmp_path / "other").show()[0])
    target = tmp_path / "target"
    command = f"ulimit -f 0; exec {sys.executable} -m zerocopy {' '.join(words)} {target}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert f"cannot write {target}" in done.stderr and "None" not in done.stderr
    assert not [path for path in target.rglob("*") if path.is_file()] and not target.is_file()


def test_a_model_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    """With --force, too: what is to be replaced goes only for what is whole."""
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"mine")
    command = f"ulimit -f 0; exec {sys.executable} -m zerocopy model make llama --force -o {mine}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1 and f"cannot write {mine}" in done.stderr, done.stderr
    assert mine.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [mine]


def test_at_80_columns_no_flag_and_no_word_of_the_daemons_help_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said `--no-allow-fall…` and `multi-token-pred…`."""
    monkeypatch.setenv("COLUMNS", "80")
    main.run(["daemon", "--help"])
    shown = capsys.readouterr().out
    assert "…" not in shown and "--no-allow-fallback for false" in " ".join(shown.replace("│", " ").split())


@pytest.mark.parametrize(
    ("http", "keys", "warned"),
    [
        ("0.0.0.0:8080", {}, True),
        ("[::]:8080", {}, True),
        ("10.0.0.1:8080", {}, True),
        ("0.0.0.0:8080", {"ann": "k"}, False),
        ("127.0.0.1:8080", {}, False),
        ("[::1]:8080", {}, False),
        ("localhost:8080", {}, False),
    ],
)
def test_an_api_that_whoever_reaches_it_can_use_is_warned_of(
    http: str, keys: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from zerocopy.daemon.main import _warn_of_an_open_door

    _warn_of_an_open_door(DaemonConfig(http=http, api_keys=keys))
    assert ("no API key" in caplog.text) == warned
