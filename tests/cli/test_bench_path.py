"""`bench path`: the arithmetic of its figures, a small whole run, and what it rests on: state is never on the heap and
is copied by nobody between engine, ring and wire (T4, H5)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.memory_watch import MemoryWatch
from zerocopy.cli import bench_path, main
from zerocopy.cli.bench_path import PathPlan, _hand_off, _pair, _passed, _processes, measure, tail_figures
from zerocopy.cli.hosts import Hosts
from zerocopy.cli.measuring import GIB
from zerocopy.cli.screen import CliError
from zerocopy.handoff.components import Component
from zerocopy.runtime.synthetic import SUFFIX, Descriptor

KV, RECURRENT = Component.ATTENTION_KV.label, Component.RECURRENT.label
SMALL = [
    "--geometry", "small", "--gib", "0.01", "--prompt-tokens", "1024", "--overlap-tokens", "1024",
    "--chunk-tokens", "128", "--page-tokens", "64", "--prefill-speed", "4096", "--ring-mib", "4",
    "--link-seconds", "0.1",
]  # fmt: skip

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_enough_handoffs_pass_the_bytes_that_were_asked_for() -> None:
    plan = PathPlan(gib=8.0, prompt_tokens=131_072)
    one = 131_072 * (8192 + 1024 + 4) + 172_687_360 + 16_384 + 2 * 4 * 131_072
    assert plan.handoffs * one >= 8 * GIB > (plan.handoffs - 1) * one
    assert PathPlan(gib=0.001).handoffs == 1


def test_throughput_counts_each_handoff_from_its_first_page_to_its_last() -> None:
    traces = [{"wire": [(1.0, 2.0, 10, KV), (1.5, 4.0, 20, KV)]}, {"wire": [(10.0, 11.0, 5, KV)]}]
    assert _passed(traces) == (35, 4.0)


def test_pages_that_a_host_has_forgotten_are_said(tmp_path: Path) -> None:
    """The run ended in a ValueError, after minutes."""
    with pytest.raises(CliError, match=r"2 handoffs in pages so small .* raise --page-tokens"):
        _passed([{"wire": []}, {"wire": [(10.0, 11.0, 5, KV)]}])
    with pytest.raises(CliError, match="1 handoffs in pages so small"):
        tail_figures({"marks": {"prefilled": 1.0}, "wire": []}, {}, 1.0, 0.0)
    with pytest.raises(CliError, match="7 handoffs in pages so small"):
        measure(PathPlan(page_tokens=32), tmp_path, lambda _: pytest.fail("nothing is to start"))


def test_the_tails_model_is_what_was_left_over_bandwidth_and_two_round_trips_and_the_import_of_it() -> None:
    there: dict[str, Any] = {
        "marks": {"prefilled": 10.0},
        "wire": [(0.0, 9.0, 900, KV), (9.5, 10.5, 100, KV), (10.5, 11.0, 1_000_000_000, RECURRENT)],
    }
    here = {"marks": {"committed": 12.0}, "imports": [(8.0, 9.0, 1), (9.5, 10.25, 1), (11.0, 11.5, 1)]}
    figures = tail_figures(there, here, path_gbps=8.0, rtt_s=0.1)
    assert figures["kv_overlap_fraction"] == 0.9
    assert figures["tail_s"] == 2.0
    assert figures["tail_model_s"] == pytest.approx(1.0 + 0.2 + 0.75, abs=1e-3)
    assert figures["tail"]["import_s"] == 0.75


# -- real runs ---------------------------------------------------------------------------------------------------------


@linux
def test_a_small_run_gives_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "path", *SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gbps"] > 0 and report["ratio_to_link"] > 0 and report["link_gbps"] > 0
    names = {f"{host} {part}" for host in ("prefiller", "decoder") for part in ("daemon", "worker")}
    assert set(report["memory_over_rings_mib"]) == set(report["processes"]) == names
    assert all(0 <= value < 1024 for value in report["memory_over_rings_mib"].values())
    assert 0 < report["kv_overlap_fraction"] <= 1
    assert report["tail_s"] > 0 and report["tail_model_s"] > 0
    assert report["gib"] >= 0.01 and report["handoffs"] == PathPlan(0.01, 1024, geometry="small").handoffs


def test_more_handoffs_than_a_host_remembers_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run(["bench", "path", "--gib", "1000"]) == 1
    assert "more than a host remembers, 32: raise --prompt-tokens" in capsys.readouterr().err


def test_a_handoff_that_fails_is_told(tmp_path: Path) -> None:
    plan = PathPlan(geometry="small", chunk_tokens=128, page_tokens=64, ring_mib=4)
    with Hosts(tmp_path) as hosts:
        source, sink = _pair(hosts, tmp_path / f"m{SUFFIX}", Descriptor("small"), plan, 256)
        source.stop()
        with pytest.raises(bench_path.CliError, match="a handoff of 256 tokens failed with 503"):
            _hand_off(sink, 256)


@linux
def test_a_gib_of_state_passes_and_none_of_it_is_ever_on_a_heap_or_copied_between_the_hops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 3, acceptance 6. In all four processes, while more than 1 GiB of state passes: no allocation larger than
    one record, so no bytes or bytearray either; memcpy moves next to nothing, so each hop's own pass (export into the
    ring, AEAD out of it, AEAD into the landing ring, import) is the only one; and each of those counts every byte
    exactly once."""
    tokens = 98_304
    plan = PathPlan(prompt_tokens=tokens)
    watch = MemoryWatch(tmp_path, (1 << 20) + 4096)
    watch.arm(monkeypatch)
    with Hosts(tmp_path / "hosts") as hosts:
        source, sink = _pair(hosts, tmp_path / f"m{SUFFIX}", Descriptor(), plan, tokens)
        _hand_off(sink, 64)  # touches everything that is made once
        pids = {name: process.pid for name, process in _processes(source, sink).items()}
        for pid in pids.values():
            watch.reset(pid)
        handoff = _hand_off(sink, tokens)
        counts = {name: watch.read(pid) for name, pid in pids.items()}
        there, here = (host.trace(handoff) for host in (source, sink))

    state = sum(
        spec.page_bytes((0, spec.layers), (0, tokens - 1 if spec.per_token else 1)) for spec in plan.schema.components
    )
    assert state > GIB and here["outcome"] == there["outcome"] == "committed"
    for name, count in counts.items():
        assert count.large_allocations == 0, f"{name}: {count}"
        assert count.copied_bytes < state // 16, f"{name}: {count}"
    for trace in (there, here):
        assert sum(trace["component_bytes"].values()) == state
    assert sum(span[2] for span in there["exports"]) == state
    probe = here["component_bytes"][Component.PROBE.label]
    assert sum(span[2] for span in here["imports"]) in (state, state - probe)  # the probe may come after the state
