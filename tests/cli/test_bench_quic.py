"""`bench link --transport quic`: its rows, what it is measured against, and what is said of whom it cannot have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("native._quic")

from transport.address import Address
from transport.keys import KeyStore
from zerocopy.cli import bench_link, main
from zerocopy.cli.bench_link import Ceiling, Plan, Sample, Setting
from zerocopy.cli.bench_quic import AIOQUIC, References, bare_engine


def sample(speed: float) -> Sample:
    return Sample(speed, 1.0, [0.001], 0.0001, [], 0, 0)


def test_a_ratio_is_the_median_of_those_of_one_round() -> None:
    setting = Setting(1, 0, 4 << 20, datagram_bytes=1452)
    rounds = [{"iperf3": 10.0, bare_engine(1452): 4.0}, {"iperf3": 20.0}, {"iperf3": 5.0, bare_engine(8900): 1.0}]
    row = bench_link._row(setting, [sample(4.0), sample(4.0), sample(4.0)], Ceiling(None, 10.0), rounds)
    assert (row.transport, row.datagram_bytes) == ("quic", 1452)
    assert row.ratios == {"iperf3": 0.4, bare_engine(1452): 1.0}  # neither aioquic nor another datagram size


def test_the_plan_over_quic_has_datagrams_instead_of_streams_and_records() -> None:
    plan = Plan(page_bytes=(1 << 20, 4 << 20), datagram_bytes=(1452, 8900))
    assert {(s.streams, s.record_bytes) for s in plan.settings()} == {(1, 0)}
    assert [s.datagram_bytes for s in plan.settings()] == [1452, 8900, 1452, 8900]


def test_datagrams_that_no_path_or_engine_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "link", "--transport", "quic", "--datagram", "1199"]) == 2
    assert "datagram bytes 1199 are outside 1200 to 9216" in capsys.readouterr().err


def test_a_listener_takes_whichever_transport_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--page-kib", "1024", "--codec", "none", "--seconds", "0.1", "--rounds", "1", "--json"]
    with bench_link.other_end_here(tmp_path) as target:
        there = ["--connect", str(Address("127.0.0.1", int(target.address.rpartition(":")[2]))), "--peer", "there"]
        common = ["bench", "link", *there, "--keys", str(target.keys), *short]
        assert main.run([*common, "--transport", "quic", "--datagram", "1452,8900"]) == 0
        over_quic = json.loads(capsys.readouterr().out)
        assert main.run([*common, "--streams", "1", "--record-kib", "1024"]) == 0
        over_tcp = json.loads(capsys.readouterr().out)
    assert set(over_quic) == set(over_tcp)  # one shape
    assert [(row["transport"], row["datagram_bytes"]) for row in over_quic["rows"]] == [("quic", 1452), ("quic", 8900)]
    for row in over_quic["rows"]:
        assert row["gbps"] > 0 and row["cpu_s_per_gib"] > 0 and row["rtt_ms"] > 0 and row["page_ms"]["p50"] > 0
        assert row["loss"] is None  # of TCP; not made up
    (row,) = over_tcp["rows"]
    assert row["transport"] == "tcp" and row["datagram_bytes"] is None and row["ratios"] is None


def test_the_bare_engine_is_built_and_measured_here(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "here")
    store.new("here")
    references = References(tmp_path, store.directory / "identity.pem", [1452])
    references.absent[AIOQUIC] = "not wanted in a test: it would be installed"
    assert references.measure(0.2)[bare_engine(1452)] > 0


def test_what_fails_is_absent_with_the_reason(tmp_path: Path) -> None:
    """Its traceback ended the whole bench."""
    references = References(tmp_path, tmp_path / "no-identity.pem", [1452])
    references.absent[AIOQUIC] = "not wanted in a test: it would be installed"
    assert references.measure(0.2) == {}
    assert references.absent[bare_engine(1452)].startswith("status ")


def test_what_cannot_be_built_is_absent_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    references = References(tmp_path, tmp_path / "identity.pem", [1452])
    references.absent[AIOQUIC] = "not wanted in a test: it would be installed"
    assert "no-such-compiler: No such file" in references.absent[bare_engine(1452)]
    assert references.measure(0.2) == {}
