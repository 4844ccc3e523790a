"""The relay does to datagrams what it says, as often as it says."""

from __future__ import annotations

import pytest

from .udp_relay import Chances, Relay


def _all(relay: Relay, count: int = 4000) -> list[bytes]:
    return [out for i in range(count) for out in relay.fate("up", i.to_bytes(8, "big"))]


def test_without_chances_everything_passes_unchanged() -> None:
    assert _all(Relay(("", 0))) == [i.to_bytes(8, "big") for i in range(4000)]


@pytest.mark.parametrize(
    ("chances", "count"),
    [(Chances(lose=0.25), 3000), (Chances(repeat=0.25), 5000), (Chances(swap=0.25), 4000), (Chances(cut=0.25), 4000)],
)
def test_each_chance_does_what_it_says(chances: Chances, count: int) -> None:
    out = _all(Relay(("", 0), chances))
    assert abs(len(out) - count) < 150
    whole = [i.to_bytes(8, "big") for i in range(4000)]
    assert out != whole
    if chances.swap:
        assert sorted(out) == whole
    if chances.cut:
        assert 100 < sum(len(one) < 8 for one in out) < 1100


def test_a_flip_changes_exactly_one_bit() -> None:
    relay = Relay(("", 0), Chances(flip=1.0))
    for out in _all(relay, 50):
        assert len(out) == 8
    (changed,) = relay.fate("up", bytes(100))
    assert sum(bin(byte).count("1") for byte in changed) == 1


def test_a_rate_delays_each_datagram_by_those_before_it_and_loses_what_would_wait_too_long() -> None:
    relay = Relay(("", 0), bits_per_s=80_000)  # 0.1 s for 1,000 bytes
    waits = [relay.wait_s("up", 1000, 5.0) for _ in range(5)]
    assert waits == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.3])
    assert relay.wait_s("down", 1000, 5.0) == 0.0
    assert relay.wait_s("up", 1000, 5.25) == pytest.approx(0.05)
