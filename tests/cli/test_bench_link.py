"""`bench link`: options, the shape of its report, both roles as real processes, and the picture."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from transport.address import Address
from transport.keys import KeyStore
from transport.tcp import DEFAULT_RECORD_BYTES, stream_count
from zerocopy.cli import bench_link, main
from zerocopy.cli.bench_link import Ceiling, Plan, Report, Row, Sample, Setting

ROW = {"transport", "streams", "record_bytes", "page_bytes", "codec", "rate_cap_bps", "gbps", "cpu_s_per_gib",
       "percent_of_ceiling"}  # fmt: skip
COUNT = stream_count().count
SHORT = ["--streams", f"{COUNT}", "--record-kib", "2048", "--page-kib", "8192", "--seconds", "0.1", "--rounds", "1"]


def sample(speed: float, **other: Any) -> Sample:
    values: dict[str, Any] = {
        "cpu_s_per_gib": 0.5, "page_s": [0.001, 0.002], "idle_rtt_s": 0.0001, "loaded_rtt_s": [0.0005],
        "segments_sent": 100, "segments_repeated": 1,
    }  # fmt: skip
    return Sample(gbps=speed, **(values | other))


# -- small pieces ------------------------------------------------------------------------------------------------------


def test_a_row_is_the_median_of_its_rounds_and_a_percentage_of_the_higher_ceiling() -> None:
    ceiling = Ceiling(plaintext_gbps=20.0, iperf3_gbps=10.0)
    row = bench_link._row(Setting(1, 4096, 8192), [sample(5.0), sample(15.0), sample(8.0)], ceiling)
    assert (row.gbps, row.percent_of_ceiling, row.rate_cap_bps) == (8.0, 40.0, None)
    assert row.loss == 0.01 and row.segments_repeated == 3
    assert row.page_ms is not None and (row.page_ms.p50, row.page_ms.p99) == (1.0, 2.0)


def test_what_the_kernel_does_not_tell_is_not_made_up() -> None:
    row = bench_link._row(
        Setting(1, 4096, 8192), [sample(5.0, segments_sent=0, segments_repeated=0)], Ceiling(None, None)
    )
    assert row.loss is None and row.segments_repeated is None and row.percent_of_ceiling is None


def test_the_plan_is_the_whole_product_and_its_default_has_the_links_own_default() -> None:
    assert (
        len(Plan(streams=(1, 2), record_bytes=(4096,), page_bytes=(1, 2, 3), rate_caps_bps=(0, 1e9)).settings()) == 12
    )
    assert Setting(stream_count().count, DEFAULT_RECORD_BYTES, bench_link.DEFAULT_PAGE_BYTES) in Plan().settings()


def test_a_listener_on_every_interface_names_those_another_host_can_dial() -> None:
    one = Address("192.0.2.7", 7700)
    assert bench_link.reachable_addresses(one) == [one]
    for found in bench_link.reachable_addresses(Address("0.0.0.0", 7700)):
        assert found.port == 7700 and not found.host.startswith("127.")


def test_the_command_for_the_other_side_survives_a_shell() -> None:
    command = bench_link.connect_command(Address("fe80::1%eth0", 7700), "a b")
    assert shlex.split(command)[-4:] == ["--connect", "[fe80::1%eth0]:7700", "--peer", "a b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--streams", "0"], "streams 0 are outside 1 to 16"),
        (["--streams", "x"], "`x` is no list of numbers"),
        (["--streams", "inf"], "`inf` is no list of numbers"),
        (["--record-kib", "1"], "record bytes 1024 are outside"),
        (["--page-kib", "999999"], "page bytes"),
        (["--codec", "zip"], "codec `zip` is none of"),
        (["--connect", "127.0.0.1:1"], "needs --peer NAME"),
        (["--connect", "127.0.0.1:1", "--listen", "127.0.0.1:0"], "not both"),
        (
            ["--listen", "127.0.0.1:0", "--streams", "4", "--json"],
            "--listen takes no --json, --streams: give that with",
        ),
        (["--peer", "one"], "a sweep on this machine takes no --peer: give that with --connect"),
        (["--datagram", "1452"], "--transport tcp takes no --datagram: give that with --transport quic"),
        (["--transport", "quic", "--streams", "2"], "--transport quic takes no --streams: give that without it"),
        (["--plot", "sweep.png"], "it draws SVG only: call the file sweep.svg"),
        (["--plot", "/absent/sweep.svg"], "there is no folder /absent"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "link", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_picture_has_a_line_for_each_series_and_the_ceilings() -> None:
    rows = [
        Row("tcp", streams, record, 1 << 20, "none", None, 9.0, 0.5, 90.0)
        for streams in (1, 2)
        for record in (1 << 18, 1 << 20)
    ]
    text = bench_link.draw(Report(rows, None, rows[0], Ceiling(10.0, None)))
    root = ElementTree.fromstring(text)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 4
    assert "plain TCP 10" in text and "iperf3" not in text


# -- real runs ---------------------------------------------------------------------------------------------------------


def test_both_ends_here_give_every_figure_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "sweep.svg"
    assert main.run(["bench", "link", *SHORT, "--codec", "none,lz4", "--plot", str(picture), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"rows", "default", "best", "ceiling", "streams_reason", "quic_engine"}
    assert report["quic_engine"] is None
    wire, codec = report["rows"]
    assert set(wire) >= ROW and set(codec) >= ROW
    assert (wire["transport"], wire["streams"], wire["record_bytes"], wire["page_bytes"]) == (
        "tcp",
        COUNT,
        2 << 20,
        8 << 20,
    )
    assert wire["gbps"] > 0 and wire["cpu_s_per_gib"] > 0 and wire["percent_of_ceiling"] > 0 and wire["rtt_ms"] > 0
    assert codec["transport"] == "memory" and codec["codec"] == "lz4" and codec["ratio"] > 0
    assert report["default"] == report["best"] == wire
    assert report["ceiling"]["plaintext_gbps"] > 0
    assert (report["ceiling"]["iperf3_gbps"] is not None) == (shutil.which("iperf3") is not None)
    ElementTree.parse(picture)


def test_the_printed_command_runs_on_the_other_side_paced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bench_link.other_end_here(tmp_path) as target:
        command = bench_link.connect_command(Address("127.0.0.1", int(target.address.rpartition(":")[2])), target.peer)
        words = [*shlex.split(command)[1:], "--keys", str(target.keys), "--rate-cap-gbps", "0.4", "--codec", "none"]
        assert main.run([*words, *SHORT]) == 0
        text = capsys.readouterr().out
        assert "0.4" in text and "none without a cap" in text
        assert main.run([*words, *SHORT, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["rate_cap_bps"] == 4e8
    assert row["gbps"] <= 0.4


def test_a_listener_whose_key_is_not_trusted_is_no_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bench_link.other_end_here(tmp_path) as target:
        stranger = KeyStore(tmp_path / "stranger")
        stranger.new("stranger")
        stranger.trust("there", KeyStore(tmp_path / "there").show()[0])
        arguments = ["--connect", target.address, "--peer", "there", "--keys", str(stranger.directory)]
        assert main.run(["bench", "link", *arguments, *SHORT]) == 1
    assert "trusted" in capsys.readouterr().err


def test_the_other_end_ends_with_whoever_started_it(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.new("there")
    child = subprocess.Popen(
        [sys.executable, "-m", "zerocopy", "bench", "link", "--listen", "127.0.0.1:0", "--keys", str(tmp_path),
         "--with-parent"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ},
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline().startswith("zc-handoff bench link --connect 127.0.0.1:")
    child.stdin.close()
    assert child.wait(20) == 0
    child.stdout.close()
