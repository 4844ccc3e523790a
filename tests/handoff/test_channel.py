"""The fault generators do what their names say: a fault that does nothing would prove nothing."""

from __future__ import annotations

import pytest

from tests.handoff.channel import Channel, Fault, Kind

FRAMES = [b"zero", b"one", b"two", b"three"]


def through(*faults: Fault) -> list[bytes]:
    channel = Channel(list(faults))
    for frame in FRAMES:
        channel.put(frame)
    assert channel.sent == 4
    return [channel.get() for _ in range(len(channel))]


def test_without_faults_everything_comes_in_order() -> None:
    assert through() == FRAMES


def test_a_dropped_frame_does_not_come() -> None:
    assert through(Fault(Kind.DROP, 1)) == [b"zero", b"two", b"three"]


def test_a_duplicated_frame_comes_twice() -> None:
    assert through(Fault(Kind.DUPLICATE, 2)) == [b"zero", b"one", b"two", b"two", b"three"]


def test_a_swapped_frame_comes_after_the_next() -> None:
    assert through(Fault(Kind.SWAP, 1)) == [b"zero", b"two", b"one", b"three"]
    assert through(Fault(Kind.SWAP, 3)) == FRAMES, "with nothing after it, it comes last"


def test_a_held_frame_comes_when_let_go() -> None:
    channel = Channel([Fault(Kind.HOLD, 0)])
    for frame in FRAMES:
        channel.put(frame)
    assert [channel.get() for _ in range(len(channel))] == FRAMES[1:]
    channel.let_go()
    assert channel.get() == b"zero"
    assert len(channel) == 0


@pytest.mark.parametrize("at", range(5))
def test_a_truncated_frame_is_a_proper_prefix(at: int) -> None:
    assert through(Fault(Kind.TRUNCATE, 3, at)) == [*FRAMES[:3], b"three"[:at]]


@pytest.mark.parametrize("at", range(40))
def test_a_flipped_frame_differs_in_one_bit(at: int) -> None:
    got = through(Fault(Kind.FLIP, 3, at))[3]
    different = int.from_bytes(got, "little") ^ int.from_bytes(b"three", "little")
    assert different.bit_count() == 1
    assert different.bit_length() // 8 == at % 5 or different.bit_length() % 8 == 0


def test_faults_are_independent() -> None:
    assert through(Fault(Kind.DROP, 0), Fault(Kind.SWAP, 1), Fault(Kind.DUPLICATE, 2)) == [
        b"two",
        b"two",
        b"one",
        b"three",
    ]
