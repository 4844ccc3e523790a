"""iperf3's report with the real program: what is no measurement never becomes a figure."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from zerocopy.cli import iperf3
from zerocopy.cli.iperf3 import ATTEMPTS, Iperf3, Iperf3Failed, read_report

pytestmark = pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed")

RECEIVED = {"seconds": 2.0, "bytes": 2 << 30, "bits_per_second": 8.5e9}
USED = {"host_total": 50.0, "remote_total": 25.0}


def dead_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def killed_half_way() -> bytes:
    """The report of a client whose server died."""
    with iperf3.server() as (process, port):
        command = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", "5", "-J"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            time.sleep(0.3)  # it is under way
            process.kill()
            return client.stdout.read()


def test_a_run_gives_speed_and_processor_time() -> None:
    found = iperf3.on_loopback(64 << 20)
    assert found.gbps > 0.1 and 0.01 < found.cpu_s_per_gib < 100


def test_without_a_server_the_client_ends_with_status_0_and_its_reason_is_named() -> None:
    with pytest.raises(Iperf3Failed, match="reports: unable to connect to server: Connection refused"):
        iperf3.client(dead_port(), 1 << 20)


def test_a_server_that_is_killed_half_way_is_no_measurement() -> None:
    report = killed_half_way()
    assert json.loads(report)["end"] == {}  # what the test is about: the figures are not there
    with pytest.raises(Iperf3Failed, match=r"reports: (unable to|control socket) .+"):  # whichever it notices first
        read_report(report)


def test_a_report_that_is_cut_off_or_lacks_the_servers_figures_is_no_measurement() -> None:
    with pytest.raises(Iperf3Failed, match="gave no report"):
        read_report(killed_half_way()[:200])
    with pytest.raises(Iperf3Failed, match="it said: iperf3: error - out of luck"):
        read_report(b"half a report", b"iperf3: error - out of luck\n")
    for end in ({"sum_received": RECEIVED}, {"sum_received": RECEIVED | {"bytes": 0}, "cpu_utilization_percent": USED}):
        with pytest.raises(Iperf3Failed, match="not what its server received and used"):
            read_report(json.dumps({"end": end}).encode())


def test_the_figures_are_what_arrived_and_the_processor_time_of_both_ends() -> None:
    """Half a core and a quarter of one for two seconds: 1.5 s for 2 GiB."""
    report = json.dumps({"end": {"sum_received": RECEIVED, "cpu_utilization_percent": USED}})
    assert read_report(report.encode()) == Iperf3(gbps=8.5, cpu_s_per_gib=0.75)


def attempts(ports: list[int]) -> Iterator[Iperf3]:
    """A client against each port in turn; 0 is a server of its own."""
    for port in ports:
        yield iperf3.client(port, 1 << 20) if port else iperf3.on_loopback(1 << 20)


def test_a_failed_round_is_measured_again() -> None:
    ports = [dead_port()] * (ATTEMPTS - 1) + [0]
    assert iperf3.measured(lambda: next(attempts([ports.pop(0)]))).gbps > 0
    assert not ports


def test_after_a_few_failed_rounds_the_error_says_whose_it_is_and_what_to_try() -> None:
    tried = list[int]()

    def attempt() -> Iperf3:
        tried.append(1)
        return iperf3.client(dead_port(), 1 << 20)

    with pytest.raises(Iperf3Failed, match=r"Connection refused \(3 attempts.+between iperf3 and the network: try"):
        iperf3.measured(attempt)
    assert len(tried) == ATTEMPTS


def test_a_server_that_cannot_listen_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(socket, "create_server", lambda *_: nullcontext(taken))
        with pytest.raises(Iperf3Failed, match=r"does not listen; it said: .*in use"):
            iperf3.on_loopback(1 << 20)
