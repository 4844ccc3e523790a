"""Whatever dies, stops or leaves in the middle of a transfer: the client has a right answer or a typed error in time,
nothing stays reserved on either host, and the next handoff works (acceptance 4; V2, G2, G8, H7)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.conftest import ModelFile, StartPair
from tests.e2e.pair import (
    CHUNK,
    Pair,
    ask,
    assert_disaggregated,
    assert_nothing_held,
    assert_still_exact,
    error_of,
    headers,
    new_key,
    prompt_of,
    proof_of,
    send_only,
    text_of,
    wait_until,
)
from zerocopy.cli.hosts import Answer, Host

CHUNKS: Final = 10
PROMPT: Final = prompt_of(CHUNKS * CHUNK + 5)
PACE_S: Final = 0.25  # before each chunk: the transfer takes three seconds, unless it is told to go on
SLOW_PACE_S: Final = 0.8  # nine seconds: what is free much sooner was freed because somebody left
FREE_S: Final = 4.0
TRANSFER_S: Final = 3.0  # of `hasty`
DEAD_S: Final = 11.0  # until a silent peer is given up (transport: dead_s + ping_s)
SOON_S: Final = 9.0  # what needs no timeout to be noticed; and as slow as a busy machine may be

DENY_AND_ALLOW: Final = pytest.mark.parametrize("fallback", ["deny", "allow"])


@pytest.fixture(scope="module")
def slow(start_pair: StartPair, transport: str) -> Iterator[Pair]:
    """Its prefiller takes its time, and no deadline is near. Tests restart what they kill."""
    with start_pair(planted=["careful"], transport=transport) as pair:
        yield pair


@pytest.fixture(scope="module")
def hasty(start_pair: StartPair, transport: str) -> Iterator[Pair]:
    """The same with a transfer's deadline that is."""
    with start_pair(planted=["careful"], transport=transport, decode_flags=["--transfer-s", str(TRANSFER_S)]) as pair:
        yield pair


@pytest.fixture(autouse=True)
def _both_up(request: pytest.FixtureRequest) -> None:
    """One test's failure is not the next one's."""
    for name in {"slow", "hasty"}.intersection(request.fixturenames):
        pair: Pair = request.getfixturevalue(name)
        for host in (pair.prefiller, pair.decoder):
            if host.process is None or host.process.poll() is not None:
                host.start()
        pair.wait_ready()


@contextmanager
def _in_transfer(
    pair: Pair, *, fallback: str = "deny", key: str | None = None, by: Host | None = None, pace_s: float = PACE_S
) -> Iterator[Future[Answer]]:
    """A disaggregated request that has got as far as the first pages."""
    pair.scheme(pace_s=pace_s)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, by or pair.decoder, PROMPT, "disaggregated", fallback=fallback, key=key)
        try:
            _wait_for_transfer(pair)
            yield answer
        finally:
            pair.scheme()


def _wait_for_transfer(pair: Pair) -> None:
    held = "memory lent on both hosts"
    wait_until(lambda: all(host.status()["reserved_bytes"] for host in (pair.prefiller, pair.decoder)), held)
    time.sleep(2 * PACE_S)


def _check_answer(pair: Pair, answer: Future[Answer], reason: str, key: str, within_s: float = SOON_S) -> None:
    """A typed error where fallback was denied, the local run's answer where it was allowed."""
    got = answer.result(within_s)
    if got.status == 200:
        assert (got.headers["x-zc-placement"], got.headers["x-zc-fallback"]) == ("local", reason)
        local = ask(pair.decoder, PROMPT, "local", key=key)
        assert proof_of(got) == proof_of(local) and text_of(got) == text_of(local)
    else:
        assert got.status == 503 and error_of(got)[0] == reason


def _worker_pid(host: Host) -> int:
    pid: int = host.status()["worker"]["pid"]
    return pid


def _wait_for_end(pid: int) -> None:
    wait_until(lambda: not _alive(pid), f"process {pid} to end", SOON_S)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- SIGKILL ---------------------------------------------------------------------------------------------------


@DENY_AND_ALLOW
def test_the_prefill_daemon_is_killed(slow: Pair, fallback: str) -> None:
    key, worker = new_key(), _worker_pid(slow.prefiller)
    with _in_transfer(slow, fallback=fallback, key=key) as answer:
        slow.prefiller.stop(signal.SIGKILL)
        _check_answer(slow, answer, "link-lost", key)
    assert_nothing_held(slow.decoder)
    _wait_for_end(worker)  # no orphan
    refused = ask(slow.decoder, PROMPT, "disaggregated")
    assert error_of(refused)[0] == "no-prefiller"
    slow.prefiller.start()
    slow.wait_ready()
    assert_still_exact(slow)


@DENY_AND_ALLOW
def test_the_prefill_worker_is_killed(slow: Pair, fallback: str) -> None:
    key = new_key()
    with _in_transfer(slow, fallback=fallback, key=key) as answer:
        os.kill(_worker_pid(slow.prefiller), signal.SIGKILL)
        _check_answer(slow, answer, "worker-lost", key)
    assert_nothing_held(slow.prefiller, slow.decoder)
    slow.wait_ready()
    assert_still_exact(slow)


def test_the_decode_worker_is_killed_in_mid_transfer(slow: Pair) -> None:
    """The lane that a local answer needs died too: the prompt is handed over again, to the next worker."""
    _check_handed_over_again(slow, signal.SIGKILL)


def test_a_worker_that_hangs_in_mid_transfer_is_killed(start_pair: StartPair, transport: str) -> None:
    """It has been silent for longer than an engine call takes: from then on it is as if it had died."""
    flags, key = ["--engine-call-s", "2"], new_key()
    with start_pair(planted=["careful"], transport=transport, prefill_flags=flags, decode_flags=flags) as pair:
        _check_handed_over_again(pair, signal.SIGSTOP)
        with _in_transfer(pair, fallback="allow", key=key) as answer:
            os.kill(_worker_pid(pair.prefiller), signal.SIGSTOP)
            _check_answer(pair, answer, "worker-lost", key)
        assert_nothing_held(pair.prefiller, pair.decoder)


def _check_handed_over_again(pair: Pair, number: int) -> None:
    key = new_key()
    with _in_transfer(pair, key=key) as answer:
        os.kill(_worker_pid(pair.decoder), number)
        pair.scheme()
        got = answer.result(2 * SOON_S)
    assert_disaggregated(got)
    assert proof_of(got) == proof_of(ask(pair.decoder, PROMPT, "local", key=key))
    assert pair.decoder.call("GET", "/ready").status == 200
    assert pair.decoder.status()["worker"]["restarts"]
    assert_nothing_held(pair.prefiller, pair.decoder)
    assert_still_exact(pair)


@pytest.mark.parametrize("stream", [False, True])
def test_the_decode_worker_is_killed_while_it_generates(slow: Pair, stream: bool) -> None:
    """What the client has cannot be taken back; what it has not is made again."""
    slow.scheme()
    body = {"prompt": prompt_of(50), "max_tokens": 900, "temperature": 0, "stream": stream}
    with send_only(slow.decoder, body, {**headers("disaggregated"), "connection": "close"}) as sock:
        wait_until(lambda: _generating(slow), "the commit")
        os.kill(_worker_pid(slow.decoder), signal.SIGKILL)
        got = _read_to_the_end(sock)
    assert got.startswith(b"HTTP/1.1 200")
    if stream:
        assert b'"code":"worker-lost"' in got and b"[DONE]" not in got
    else:
        assert json.loads(got.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 900
    assert_nothing_held(slow.prefiller, slow.decoder)
    slow.wait_ready()
    assert_still_exact(slow)


def _read_to_the_end(sock: socket.socket) -> bytes:
    got = b""
    while piece := sock.recv(1 << 16):
        got += piece
    return got


def _generating(pair: Pair) -> bool:
    traces = pair.decoder.status()["recent_handoffs"]
    return bool(traces) and traces[-1]["prompt_tokens"] == 50 and traces[-1]["outcome"] == "committed"


def test_a_daemon_says_that_it_cannot_serve_while_its_worker_is_down(slow: Pair) -> None:
    os.kill(_worker_pid(slow.decoder), signal.SIGKILL)
    wait_until(lambda: slow.decoder.call("GET", "/ready").status == 503, "readiness to go false", SOON_S)
    refused = ask(slow.decoder, prompt_of(9), "local")
    assert (refused.status, error_of(refused)[0]) == (503, "worker-lost")
    assert "retry-after" in refused.headers
    slow.wait_ready()
    assert_still_exact(slow)


def test_the_decode_daemon_is_killed(slow: Pair) -> None:
    worker = _worker_pid(slow.decoder)
    with _in_transfer(slow) as answer:
        slow.decoder.stop(signal.SIGKILL)
        with pytest.raises(OSError):
            answer.result(SOON_S)
    assert_nothing_held(slow.prefiller)
    _wait_for_end(worker)
    assert slow.prefiller.call("GET", "/ready").status == 503  # nobody is left who decodes for its clients
    assert slow.prefiller.call("GET", "/health").status == 200  # not its fault: to start it again would not help
    refused = ask(slow.prefiller, PROMPT, "local")
    assert (refused.status, error_of(refused)[0]) == (503, "no-decoder")
    slow.decoder.start()
    slow.wait_ready()
    assert slow.prefiller.call("GET", "/ready").status == 200
    assert_still_exact(slow)


def test_the_decode_daemon_is_killed_while_the_source_waits_for_its_word(slow: Pair) -> None:
    """All is sent, so nothing that the prefiller does next would show it that the link is gone."""
    worker = _worker_pid(slow.decoder)
    os.kill(worker, signal.SIGSTOP)
    try:
        with send_only(slow.decoder, {"prompt": PROMPT, "max_tokens": 8}, headers("disaggregated")):
            wait_until(lambda: slow.prefiller.status()["handoffs_out"] == 1, "the handoff")
            time.sleep(0.5)
            slow.decoder.stop(signal.SIGKILL)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert_nothing_held(slow.prefiller, within_s=FREE_S)
    _wait_for_end(worker)
    slow.decoder.start()
    slow.wait_ready()
    assert_still_exact(slow)


def test_a_decode_worker_that_hangs_is_never_committed(hasty: Pair) -> None:
    """Field report: expired lease. The source is free at the deadline; the decoder's memory only once its worker has
    let go of it, or is dead."""
    worker = _worker_pid(hasty.decoder)
    with ThreadPoolExecutor(1) as pool:
        os.kill(worker, signal.SIGSTOP)
        answer = pool.submit(ask, hasty.decoder, PROMPT, "disaggregated")
        try:
            wait_until(lambda: _aborted(hasty), "the deadline", TRANSFER_S + SOON_S)
            assert_nothing_held(hasty.prefiller)
            assert hasty.decoder.status()["reserved_bytes"]
        finally:
            os.kill(worker, signal.SIGCONT)
        assert error_of(answer.result(SOON_S))[0] == "transfer-deadline"
    assert_nothing_held(hasty.decoder)
    assert_still_exact(hasty)


def _aborted(pair: Pair) -> bool:
    traces = pair.prefiller.status()["recent_handoffs"]
    return bool(traces) and traces[-1]["reason"] == "transfer-deadline"


def test_the_decode_daemon_is_killed_behind_a_front_door(slow: Pair) -> None:
    """The client asked the prefill host: it hears what happened."""
    with _in_transfer(slow, by=slow.prefiller) as answer:
        slow.decoder.stop(signal.SIGKILL)
        got = answer.result(SOON_S)
        assert (got.status, error_of(got)[0]) == (503, "link-lost")
    assert_nothing_held(slow.prefiller)
    slow.decoder.start()
    slow.wait_ready()
    assert_still_exact(slow)


# -- SIGSTOP: the cable is pulled ------------------------------------------------------------------------------


@contextmanager
def _stopped(host: Host) -> Iterator[None]:
    assert host.process is not None
    host.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if host.process is not None:
            host.process.send_signal(signal.SIGCONT)


@DENY_AND_ALLOW
def test_the_prefiller_falls_silent(hasty: Pair, fallback: str) -> None:
    """The transfer's deadline holds, and a handoff that is only queued ends when the peer is given up."""
    key = new_key()
    with _in_transfer(hasty, fallback=fallback, key=key) as answer, _stopped(hasty.prefiller):
        _check_answer(hasty, answer, "transfer-deadline", key, TRANSFER_S + SOON_S)
        assert_nothing_held(hasty.decoder)
        if fallback == "allow":
            began = time.monotonic()
            late = ask(hasty.decoder, PROMPT, "disaggregated", fallback="allow")
            assert late.headers["x-zc-fallback"] == "link-lost"
            assert time.monotonic() - began < DEAD_S + SOON_S
    hasty.wait_ready()
    assert_nothing_held(hasty.prefiller)
    assert_still_exact(hasty)


def test_sigterm_works_while_the_prefiller_is_silent(hasty: Pair) -> None:
    with _in_transfer(hasty) as answer, _stopped(hasty.prefiller):
        began = time.monotonic()
        assert hasty.decoder.stop() == 0
        assert time.monotonic() - began < TRANSFER_S + SOON_S
        assert error_of(answer.result(SOON_S))[0] == "transfer-deadline"
    hasty.decoder.start()
    hasty.wait_ready()
    assert_still_exact(hasty)


# -- SIGTERM ---------------------------------------------------------------------------------------------------


def test_sigterm_ends_idle_daemons(slow: Pair) -> None:
    for host in (slow.prefiller, slow.decoder):
        worker, began = _worker_pid(host), time.monotonic()
        assert host.stop() == 0
        assert time.monotonic() - began < SOON_S
        _wait_for_end(worker)


@pytest.mark.parametrize("which", ["decoder", "prefiller"])
def test_sigterm_drains(slow: Pair, which: str) -> None:
    """Q2: what has begun ends as if nothing were; what is new is refused at once, and told when to come back."""
    host: Host = getattr(slow, which)
    with _in_transfer(slow) as answer:
        assert host.process is not None
        host.process.send_signal(signal.SIGTERM)
        wait_until(lambda: host.call("GET", "/ready").status == 503, "readiness to go false", SOON_S)
        assert host.call("GET", "/ready").body["reason"].startswith("draining")
        assert host.call("GET", "/health").status == 200
        refused = ask(host, prompt_of(9), "local")
        assert (refused.status, error_of(refused)[0]) == (503, "shutdown")
        assert int(refused.headers["retry-after"]) >= 1
        slow.scheme()
        assert_disaggregated(answer.result(2 * SOON_S))
        assert host.process.wait(SOON_S) == 0
    _check_starts_again(slow, host)


@pytest.mark.parametrize("which", ["decoder", "prefiller"])
def test_a_second_sigterm_ends_at_once(slow: Pair, which: str) -> None:
    """Whose request it was hears why: from the host that ends, or by falling back."""
    host: Host = getattr(slow, which)
    key = new_key()
    with _in_transfer(slow, fallback="allow", key=key, pace_s=SLOW_PACE_S) as answer:
        assert host.process is not None
        host.process.send_signal(signal.SIGINT)
        wait_until(lambda: host.call("GET", "/ready").status == 503, "readiness to go false", SOON_S)
        began = time.monotonic()
        assert host.stop() == 0
        assert time.monotonic() - began < SOON_S
        if host is slow.decoder:
            assert error_of(answer.result(SOON_S)) == ("shutdown", "this host is shutting down: ask again or another")
        else:
            _check_answer(slow, answer, "shutdown", key)
    _check_starts_again(slow, host)


def _check_starts_again(pair: Pair, host: Host) -> None:
    for other in (pair.prefiller, pair.decoder):
        if other is not host:
            assert_nothing_held(other)
    host.start()
    pair.wait_ready()
    assert_still_exact(pair)


# -- whoever started it is gone --------------------------------------------------------------------------------


def test_daemons_of_a_command_that_is_gone_end_by_themselves(tmp_path: Path, model_file: ModelFile) -> None:
    """Such as a test run that hangs and breaks itself off: it has told them nothing."""
    script = (
        "import os, sys; from pathlib import Path; from zerocopy.cli.hosts import Hosts\n"
        "with Hosts(Path(sys.argv[1])) as hosts:\n"
        "    host = hosts.add('a', sys.argv[2:])\n"
        "    host.start(); host.wait_ready()\n"
        "    print(host.process.pid, host.status()['worker']['pid'], flush=True)\n"
        "    os._exit(1)"
    )
    words = [sys.executable, "-c", script, str(tmp_path), "--model", str(model_file("llama")), "--threads", "1"]
    gone = subprocess.run(words, stdout=subprocess.PIPE, timeout=60)
    daemon, worker = map(int, gone.stdout.split())
    _wait_for_end(daemon)
    _wait_for_end(worker)


# -- the client leaves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["decoder", "prefiller"])
def test_the_client_leaves_in_mid_transfer(slow: Pair, which: str) -> None:
    slow.scheme(pace_s=SLOW_PACE_S)
    host: Host = getattr(slow, which)
    with send_only(host, {"prompt": PROMPT, "max_tokens": 8}, headers("disaggregated")):
        _wait_for_transfer(slow)
    _check_free_soon(slow)


def test_the_client_leaves_while_it_generates(slow: Pair) -> None:
    slow.scheme()
    with send_only(slow.decoder, {"prompt": prompt_of(50), "max_tokens": 900}, headers("disaggregated")):
        wait_until(lambda: _generating(slow), "the commit")
    _check_free_soon(slow)


def test_the_client_leaves_while_it_queues(slow: Pair) -> None:
    with _in_transfer(slow) as answer:
        with send_only(slow.decoder, {"prompt": PROMPT, "max_tokens": 8}, headers("disaggregated")):
            time.sleep(PACE_S)
        slow.scheme()
        assert answer.result(2 * SOON_S).status == 200
        _check_free_soon(slow)


def _check_free_soon(pair: Pair) -> None:
    """Freed in about a second, not at a deadline; the lane is not computing for nobody."""
    assert_nothing_held(pair.prefiller, pair.decoder, within_s=FREE_S)
    pair.scheme()
    began = time.monotonic()
    assert_still_exact(pair)
    assert time.monotonic() - began < FREE_S
