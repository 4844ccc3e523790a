from __future__ import annotations

import pytest

from transport.rate import MIN_SAMPLE_BYTES, MIN_SAMPLE_S, BandwidthEstimate

MIB = 1 << 20


def test_a_busy_period_is_measured_from_its_first_page_to_its_last_acknowledgement() -> None:
    rate = BandwidthEstimate()
    rate.busy(10.0)
    rate.busy(10.4)
    rate.delivered(4 * MIB, 10.5, idle=False)
    rate.delivered(4 * MIB, 11.0, idle=True)
    assert rate.bps == pytest.approx(8 * 8 * MIB / 1.0)


def test_waiting_between_busy_periods_does_not_count() -> None:
    rate = BandwidthEstimate()
    for start in (0.0, 1000.0):
        rate.busy(start)
        rate.delivered(8 * MIB, start + 0.5, idle=True)
    assert rate.bps == pytest.approx(8 * 16 * MIB)


def test_small_transfers_say_nothing_about_bandwidth() -> None:
    rate = BandwidthEstimate()
    rate.busy(0)
    rate.delivered(MIN_SAMPLE_BYTES - 1, 1, idle=True)
    rate.delivered(MIN_SAMPLE_BYTES, 2, idle=True)  # nothing was on its way
    assert rate.bps is None


def test_a_long_busy_period_keeps_the_estimate_fresh_and_it_follows_a_change() -> None:
    rate, now = BandwidthEstimate(), 0.0
    rate.busy(now)
    for speed in (100 * MIB, 10 * MIB):
        for _ in range(20):
            now += 1
            rate.delivered(speed, now, idle=False)
        assert rate.bps == pytest.approx(8 * speed, rel=0.05)


@pytest.mark.parametrize("elapsed", [0, 0.5 * MIN_SAMPLE_S])
def test_a_time_too_short_to_measure_measures_nothing(elapsed: float) -> None:
    rate = BandwidthEstimate()
    rate.busy(5)
    rate.delivered(64 * MIB, 5 + elapsed, idle=True)
    assert rate.bps is None
