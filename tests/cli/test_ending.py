from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from transport.quic_choice import built
from zerocopy.cli.ending import held_back, temporary_folder, told_once


@pytest.fixture(autouse=True)
def _signals_as_in_a_new_process() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_whenever_and_however_often_a_command_is_told_to_end_nothing_of_it_is_left(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.cli.told_to_end", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    found = json.loads(told.stdout)
    assert found["left"] == {}
    assert found["lines"] > 400  # it was told at all


@pytest.mark.parametrize("words", [["demo"], ["bench", "path"], ["bench", "link"]])
def test_a_command_told_to_end_while_it_starts_leaves_no_folder(tmp_path: Path, words: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "zerocopy", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        while not list(tmp_path.glob("zc-*")):
            assert process.poll() is None
            time.sleep(0.001)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert list(tmp_path.iterdir()) == []


INTERRUPTED = """
import runpy, signal, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "transport.link":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder)
runpy.run_module("zerocopy", run_name="__main__")
"""


def test_ctrl_c_while_a_command_is_imported_is_one_like_any_other() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, "keys", "list"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


COMPILER = """#!/bin/sh
touch $TMPDIR/file.o
[ $WAITING = compiler ] && touch $BEGUN && exec sleep 60
while [ $1 != -o ]; do shift; done
printf '#!/bin/sh\ntouch $BEGUN\nexec sleep 60\n' > $2
chmod +x $2
"""


@pytest.mark.skipif(not built(), reason="ngtcp2 is not installed")
@pytest.mark.parametrize("waiting", ["compiler", "program"])
def test_what_a_measurement_waits_for_ends_with_it(tmp_path: Path, waiting: str) -> None:
    """Also when a thread waits, and also a compiler's own files."""
    folder, begun, compiler = (tmp_path / name for name in ("tmp", "begun", "cc"))
    folder.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    words = [sys.executable, "-m", "zerocopy", "bench", "link", "--transport", "quic", "--seconds", "0.05"]
    environment = {"TMPDIR": str(folder), "CC": str(compiler), "WAITING": waiting, "BEGUN": str(begun)}
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=os.environ | environment)
    try:
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert list(folder.iterdir()) == []


TESTS = """
import time
from pathlib import Path
from zerocopy.cli.hosts import Hosts

def test_with_a_host(tmp_path):
    with Hosts(tmp_path, ("sh", "-c", "exec sleep 60")) as hosts:
        host = hosts.add("a", [])
        host.start()
        Path("pid").write_text(str(host.process.pid))
        time.sleep(60)

def test_another():
    Path("another").touch()
"""


def test_a_test_run_told_to_end_ends_its_hosts_and_runs_no_other_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    try:
        while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.wait(30) == pytest.ExitCode.INTERRUPTED
    finally:
        process.kill()
    assert not psutil.pid_exists(int(pid))
    assert not (tmp_path / "another").exists()


def test_a_signal_is_heard_once_and_not_again_after_the_block() -> None:
    said = list[str]()
    with pytest.raises(SystemExit) as ending, told_once(lambda: said.append("outer")):
        try:
            with told_once(lambda: said.append("inner")):
                signal.raise_signal(signal.SIGTERM)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            said.append("ended")
    assert ending.value.code == 128 + signal.SIGTERM
    assert said == ["inner", "outer", "ended"]
    signal.raise_signal(signal.SIGTERM)


def test_a_block_that_was_not_told_to_end_leaves_signals_as_they_were() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with told_once(), told_once():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interruption_is_heard_when_what_must_be_whole_is() -> None:
    whole = False
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        whole = True
    assert whole


def test_a_temporary_folder_is_for_this_user_and_goes_with_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder("zc-a-") as first, temporary_folder("zc-a-") as second:
        assert first != second and first.name.startswith("zc-a-")
        assert first.stat().st_mode & 0o777 == 0o700
        (first / "keys").mkdir()
        (first / "keys" / "key").write_text("x")
    assert list(tmp_path.iterdir()) == []
