"""What one run of `iperf3 -c ... -J` found, or why it is no measurement.

With `-J` iperf3 ends with status 0 even if nobody listened or the other end died half-way: the reason stands in its
report beside empty or partial figures. Such a round is measured again a few times, and then its error is named: a
comparison with a figure that is not there would be made up. Owns client and server where both are on this machine.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from zerocopy.cli.measuring import GIB

TIMEOUT_S: Final = 300
ATTEMPTS: Final = 3  # a port that another program took in between, a server that was not up: chance, not twice in a row


class Iperf3Failed(Exception):
    """The run is no measurement; the message says what iperf3 said, and what to do."""


class Iperf3(msgspec.Struct, frozen=True):
    """What arrived, and the processor time of both ends."""

    gbps: float
    cpu_s_per_gib: float


class _Received(msgspec.Struct):
    seconds: float
    bytes: int
    bits_per_second: float


class _Percent(msgspec.Struct):
    host_total: float
    remote_total: float


class _End(msgspec.Struct):
    sum_received: _Received | None = None
    cpu_utilization_percent: _Percent | None = None


class _Report(msgspec.Struct):
    end: _End = msgspec.field(default_factory=_End)
    error: str | None = None


def read_report(output: bytes, stderr: bytes = b"") -> Iperf3:
    """Of the client's standard output. Raises Iperf3Failed."""
    try:
        report = msgspec.json.decode(output, type=_Report)
    except msgspec.DecodeError as error:
        said = (stderr or output).decode(errors="replace").strip().splitlines() or ["nothing"]
        raise Iperf3Failed(f"iperf3's client gave no report ({error}); it said: {said[-1]}") from None
    received, usage = report.end.sum_received, report.end.cpu_utilization_percent
    if report.error is not None:
        raise Iperf3Failed(f"iperf3's client reports: {report.error}")
    if received is None or usage is None or not received.bytes:
        raise Iperf3Failed("iperf3's client reports no error, but not what its server received and used")
    cpu_s = (usage.host_total + usage.remote_total) / 100 * received.seconds
    return Iperf3(received.bits_per_second / 1e9, cpu_s / (received.bytes / GIB))


def measured(attempt: Callable[[], Iperf3]) -> Iperf3:
    """The first of a few attempts that is a measurement. Raises Iperf3Failed with the last one's reason."""
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except Iperf3Failed:
            continue
    try:
        return attempt()
    except Iperf3Failed as error:
        raise given_up(error) from None


def given_up(error: Iperf3Failed) -> Iperf3Failed:
    advice = "this is between iperf3 and the network: try `iperf3 -s -1` and `iperf3 -c ADDRESS -J` by hand"
    return Iperf3Failed(f"{error} ({ATTEMPTS} attempts, each with a new server; {advice})")


def on_loopback(nbytes: int) -> Iperf3:
    """One TCP stream between two processes here, once. Raises Iperf3Failed."""
    with server() as (_, port):
        return client(port, nbytes)


@contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """One that listens, for one test. Raises Iperf3Failed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", str(port), "--forceflush"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = [process.stdout.readline(), process.stdout.readline()]  # a rule, then what it does
        if "listening" not in said[1]:
            raise Iperf3Failed(f"iperf3's server does not listen; it said: {' '.join(said).strip() or 'nothing'}")
        yield process, port
    finally:
        process.kill()
        process.communicate()


def client(port: int, nbytes: int) -> Iperf3:
    """Raises Iperf3Failed."""
    command = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-n", str(nbytes), "-J"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Iperf3Failed(f"iperf3's client had no result within {TIMEOUT_S} s") from None
    return read_report(done.stdout, done.stderr)
