"""What benches measure with: quantiles are measured values, a pacer never exceeds its rate and never catches up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocopy.cli.measuring import GIB, Pacer, Quantiles, cpu_s, gbps, median, quantiles


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantiles(range(1, 101)) == Quantiles(50, 90, 99)
    assert quantiles([7.0]) == Quantiles(7.0, 7.0, 7.0)
    assert quantiles([3.0, 1.0, 2.0]) == Quantiles(2.0, 3.0, 3.0)
    assert quantiles([]) is None


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=50))
def test_quantiles_never_fall(samples: list[float]) -> None:
    found = quantiles(samples, digits=12)
    assert found is not None and min(samples) - 1e-6 <= found.p50 <= found.p90 <= found.p99 <= max(samples) + 1e-6


def test_the_median_is_a_value_that_was_measured() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0]) == 1.0


def test_gigabits_are_decimal_and_no_time_gives_none() -> None:
    assert gbps(125_000_000, 1.0) == 1.0
    assert gbps(GIB, 0.0) == 0.0


def test_processor_time_grows_with_work() -> None:
    before = cpu_s()
    sum(range(2_000_000))
    assert cpu_s() > before


@settings(max_examples=50)
@given(
    st.floats(1e6, 1e11),
    st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(0, 2)), min_size=2, max_size=40),
)
def test_a_pacer_never_lets_more_leave_than_its_rate_allows(bps: float, pieces: list[tuple[int, float]]) -> None:
    """Each piece is offered some time after the one before it had left."""
    pacer, now, left = Pacer(bps, 0.0), 0.0, 0.0
    leaves: list[float] = []
    for nbytes, idle in pieces:
        now = max(now, left) + idle
        left = now + pacer.wait_s(nbytes, now)
        leaves.append(left)
    for (nbytes, _), a, b in zip(pieces, leaves, leaves[1:], strict=False):
        assert b - a >= 8 * nbytes / bps - 1e-6


def test_a_pacer_does_not_make_up_for_what_was_missed() -> None:
    pacer = Pacer(8e6, 0.0)
    assert pacer.wait_s(1_000_000, 0.0) == 0.0
    assert pacer.wait_s(1_000_000, 10.0) == 0.0
    assert pacer.wait_s(1_000_000, 10.0) == 1.0


def test_no_rate_is_no_wait() -> None:
    pacer = Pacer(0, 0.0)
    assert [pacer.wait_s(1 << 30, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


ROOT = Path(__file__).parents[2]
BENCHES = sorted({path.stem for path in (ROOT / "benches").glob("*.py") if "argparse" in path.read_text()})


@pytest.mark.parametrize("bench", BENCHES)
def test_every_bench_says_how_it_is_used(bench: str) -> None:
    """The help of one with a % in a default was a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", f"benches.{bench}", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")


def test_every_bench_that_the_document_names_is_there() -> None:
    document = (ROOT / "docs" / "benchmarks.md").read_text()
    named = set(re.findall(r"python -m benches\.(\w+)", document))
    assert named and named <= set(BENCHES)
