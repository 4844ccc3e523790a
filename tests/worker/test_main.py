from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from zerocopy.runtime import models
from zerocopy.runtime.base import EngineError, Runtime
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime
from zerocopy.worker import protocol as p
from zerocopy.worker.main import WorkerOptions, main

TINY = LlamaOptions(n_ctx=512, chunk_tokens=32, page_tokens=16, threads=1)


class Closable:
    """The session's runtime; closing it is only remembered."""

    def __init__(self, runtime: LlamaRuntime) -> None:
        self.facts = runtime.facts
        self.open_pool = runtime.open_pool
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def options(model: str, *roles: str) -> str:
    return msgspec.json.encode(WorkerOptions(model, roles, TINY)).decode()


def hear(sock: socket.socket) -> p.ToDaemon:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = sock.recv(size - len(data))
            assert more
            data += more
        return data

    return p.decode_to_daemon(exactly(p.frame_length(exactly(4))))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, int]]:
    """The daemon's end, and the worker's as the number that its command line would have."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    yield ours, theirs.detach()
    ours.close()


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` runs on a thread here, which may not set signal handlers."""
    monkeypatch.setattr("signal.signal", lambda number, action: None)


def start(argv: list[str], engine: Callable[[WorkerOptions], Runtime]) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(argv, engine)))
    thread.start()
    return thread, codes


@pytest.mark.parametrize("end", ["shutdown", "daemon gone"])
def test_a_worker_says_that_it_is_ready_and_ends_with_its_daemon(
    sockets: tuple[socket.socket, int], runtime_of: Callable[[str], LlamaRuntime], end: str
) -> None:
    ours, theirs = sockets
    engine = Closable(runtime_of("llama"))
    argv = ["worker", str(theirs), options("m.gguf", "decode")]
    thread, codes = start(argv, lambda wanted: engine)  # type: ignore[arg-type, return-value]
    ready = hear(ours)
    assert isinstance(ready, p.Ready)
    assert ready.facts == engine.facts
    if end == "shutdown":
        ours.sendall(p.encode(p.Shutdown()))
    else:
        ours.close()
    thread.join(30)
    assert (codes, engine.closed) == ([0], 1)


def test_a_worker_whose_engine_refuses_says_why_and_ends(sockets: tuple[socket.socket, int]) -> None:
    ours, theirs = sockets

    def refuse(wanted: WorkerOptions) -> Runtime:
        raise EngineError("model-family", f"{wanted.model} is of a family that is not certified")

    thread, codes = start(["worker", str(theirs), options("m.gguf", "decode")], refuse)
    assert hear(ours) == p.StartFailed("model-family", "m.gguf is of a family that is not certified")
    thread.join(30)
    assert codes == [1]
    assert ours.recv(1) == b""


def test_a_worker_process_ends_when_its_daemon_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else may use what it holds."""
    monkeypatch.setenv("ZC_CACHE", str(tmp_path / "cache"))
    model = models.make("llama", tmp_path / "m.gguf")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "zerocopy.worker.main", str(theirs.fileno()), options(str(model), "prefill")],
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        ours.settimeout(30)
        assert isinstance(hear(ours), p.Ready)
        ours.close()
        assert process.wait(30) == 0
