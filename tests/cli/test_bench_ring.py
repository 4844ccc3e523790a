"""`bench ring`: every figure is there, in order, and a doorbell that never rings is an error and no hang."""

from __future__ import annotations

import json

import pytest

from native.ring import Ring
from zerocopy.cli import bench_ring, main
from zerocopy.cli.measuring import Quantiles
from zerocopy.cli.screen import CliError

FIGURES = ("claim_commit_ns", "slot_ns", "record_ns", "wake_up_us")


def test_every_figure_is_there_and_in_order() -> None:
    report = bench_ring.measure(batches=10, wake_ups=20)
    for name in FIGURES:
        figures: Quantiles = getattr(report, name)
        assert 0 < figures.p50 <= figures.p90 <= figures.p99


def test_the_command_prints_one_object_or_one_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = bench_ring.measure(batches=10, wake_ups=20)
    monkeypatch.setattr(bench_ring, "measure", lambda: report)
    assert main.run(["bench", "ring", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"batch", "record_bytes", *FIGURES}
    assert set(shown["claim_commit_ns"]) == {"p50", "p90", "p99"}
    assert main.run(["bench", "ring"]) == 0
    assert "doorbell" in capsys.readouterr().out


def test_claims_that_a_full_ring_refuses_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal costs less than a claim: the figure was better."""
    monkeypatch.setattr(bench_ring, "RING_BYTES", 64 << 10)
    with pytest.raises(CliError, match=r"holds \d+ bytes of a batch, not 128000"):
        bench_ring.measure(batches=2, wake_ups=1)


def test_a_doorbell_that_does_not_ring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ring, "WAKE_UP_S", 0.2)

    def say_nothing(ring: Ring, count: int) -> None:
        pass

    monkeypatch.setattr(bench_ring, "_send_timestamps", say_nothing)
    with pytest.raises(CliError, match=r"silent for 0\.2 s after 0 of 20"):
        bench_ring.measure(batches=10, wake_ups=20)
