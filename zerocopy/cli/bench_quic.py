"""What `bench link --transport quic` is measured against, on this machine only: the bare engine and aioquic.

The bare engine (benches/quic_ceiling.c) is the least program that moves bytes with the same library: no pages, no
Python. aioquic runs in an environment of its own that benches/peers.py makes. Both live in a checkout; without it, or
without a compiler, they are absent and the reason is said, never estimated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from native.build_quic import compiler_arguments, find_backend
from zerocopy.cli.screen import CliError

ROOT: Final = Path(__file__).resolve().parents[2]
AIOQUIC: Final = "aioquic"
SAMPLE_S: Final = 300  # a first measurement of aioquic also installs it


def bare_engine(datagram_bytes: int) -> str:
    return f"bare engine {datagram_bytes}"


class References:
    """`folder` keeps the compiled program, `identity` is a key's PEM. `absent` says who could not be measured, why."""

    def __init__(self, folder: Path, identity: Path, datagrams: Sequence[int]) -> None:
        self._program = folder / "quic_ceiling"
        self._identity = identity
        self._datagrams = datagrams
        self._environment = os.environ | {"TMPDIR": str(folder)}  # a compiler or pip that is ended leaves its files
        self.absent: dict[str, str] = {}
        if failed := self._build():
            self.absent |= {bare_engine(datagram): failed for datagram in datagrams}

    def measure(self, seconds: float) -> dict[str, float]:
        """Gb/s of each that is there, once."""
        rates = {}
        for datagram in self._datagrams:
            if bare_engine(datagram) not in self.absent and (rate := self._bare(datagram, seconds)) is not None:
                rates[bare_engine(datagram)] = rate
        if AIOQUIC not in self.absent and (rate := self._aioquic()) is not None:
            rates[AIOQUIC] = rate
        return rates

    def _build(self) -> str:
        """Why it could not be had, or nothing."""
        source = ROOT / "benches" / "quic_ceiling.c"
        if not source.exists():
            return "benches/ is not part of this installation: run from a checkout"
        from transport.quic_engine import engine_name

        backend = find_backend("gnutls" if "GnuTLS" in engine_name() else "openssl")  # what the link itself runs on
        assert backend is not None
        command = [os.environ.get("CC", "cc"), "-std=c11", "-O2", "-o", str(self._program), str(source)]
        command += compiler_arguments(backend)
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=self._environment)
        except OSError as error:
            return f"{command[0]}: {error.strerror or error}"
        return f"{command[0]} failed: {_last_line(done.stderr)}" if done.returncode else ""

    def _bare(self, datagram: int, seconds: float) -> float | None:
        command = [str(self._program), str(self._identity), str(seconds), str(datagram), "bbr"]
        done = self._run(command, bare_engine(datagram), seconds + SAMPLE_S)
        if done is None:
            return None
        if done.returncode:
            self.absent[bare_engine(datagram)] = f"status {done.returncode}: {_last_line(done.stderr)}"
            return None
        return float(done.stdout.split()[0])

    def _aioquic(self) -> float | None:
        command = [sys.executable, "-m", "benches.peers", "--only", AIOQUIC, "--rounds", "1", "--mib", "256", "--json"]
        done = self._run(command, AIOQUIC, SAMPLE_S)
        if done is None:
            return None
        try:
            report = json.loads(done.stdout)
            if report["rows"]:
                return float(report["rows"][0]["gbps"])
            self.absent[AIOQUIC] = report["absent"][0]["why"]
        except (ValueError, LookupError):
            self.absent[AIOQUIC] = _last_line(done.stderr)
        return None

    def _run(self, command: Sequence[str], name: str, timeout_s: float) -> subprocess.CompletedProcess[str] | None:
        """None, and the reason in `absent`, if it had no end in time. Raises CliError if it was told to end: so is this
        bench, and what comes next would have to be told as well."""
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, env=self._environment
            )
        except subprocess.TimeoutExpired:
            self.absent[name] = f"no result within {timeout_s:g} s"
            return None
        if done.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM):
            raise CliError(f"{name} was told to end")
        return done


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
