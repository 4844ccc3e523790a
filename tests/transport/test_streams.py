"""How many streams a link has: chosen from cores, grown by what the path turned out to need, or as configured."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from transport import tcp
from transport.streams import MAX_BY_CORES, MAX_CHOSEN, StreamCount

from .conftest import Run
from .hosts import QUICK, pattern, two_hosts

WINDOW = 4 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell its round trips")
RTT_S, BPS = 0.010, 10e9  # 12 MiB on their way


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 4), (192, MAX_BY_CORES)])
def test_half_the_cores_get_a_stream_each(cores: int, count: int) -> None:
    streams = StreamCount(0, cores, WINDOW)
    assert streams.count == count and f"of {cores} cores" in streams.reason


def test_a_path_that_fills_its_streams_windows_gets_more_until_it_does_not() -> None:
    streams = StreamCount(0, 2, WINDOW)
    while streams.observe(RTT_S, BPS):
        assert "10.0 Gb/s x 10.0 ms" in streams.reason
    assert streams.count == 6  # 6 x 4 MiB is at least twice 12 MiB


def test_a_short_path_and_an_idle_one_keep_what_they_have() -> None:
    streams = StreamCount(0, 2, WINDOW)
    assert not streams.observe(0.0001, 100e9)
    assert not streams.observe(RTT_S, 0.0)
    assert streams.count == 1


def test_no_path_makes_it_grow_without_end() -> None:
    streams = StreamCount(0, 2, WINDOW)
    while streams.observe(10.0, 400e9):
        pass
    assert streams.count == MAX_CHOSEN


def test_a_configured_number_stays() -> None:
    streams = StreamCount(3, 64, WINDOW)
    assert not streams.observe(RTT_S, BPS)
    assert (streams.count, streams.reason) == (3, "configured")


def test_a_link_adds_a_stream_while_it_runs_and_says_why(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of one byte: whatever moves fills them. Pages come from the side that did not connect, as in service."""
    monkeypatch.setattr(tcp, "SOCKET_BUFFER", 1)

    async def work() -> None:
        async with two_hosts(tmp_path, timing=QUICK) as (a, b, address):
            link = await a.endpoint.connect("b", address)
            began = link.stats.streams
            await b.until(lambda: bool(b.links))
            back, payload = b.links[0], pattern(1 << 20)
            async with asyncio.timeout(20):
                while link.stats.streams == began:
                    await back.send_page(b"page", payload)
            assert "Gb/s" in link.stats.streams_reason and back.stats.streams_reason == "the other host's choice"

    run(work())


@linux
def test_a_slow_event_loop_is_no_long_path(run: Run, tmp_path: Path) -> None:
    """Each ping waits 20 ms and more for the loop: with the bandwidth of a loopback that is more than one window."""

    async def work() -> None:
        loop, measured = asyncio.get_running_loop(), 0.0

        def be_slow() -> None:
            time.sleep(0.02)
            loop.call_soon(be_slow)

        be_slow()
        async with two_hosts(tmp_path, timing=QUICK) as (a, _, address):
            link = await a.endpoint.connect("b", address)
            began, payload = link.stats.streams, pattern(32 << 20)
            ends = time.monotonic() + 3
            while time.monotonic() < ends and link.stats.streams == began:
                await link.send_page(b"page", payload)
                bandwidth_bps, rtt_s = link.stats.bandwidth_bps, link.stats.rtt_s
                if bandwidth_bps is not None and rtt_s is not None:
                    measured = max(measured, rtt_s * bandwidth_bps / 8)
            assert measured > WINDOW / 2, "the loop was not slow enough to mislead anyone"
            assert link.stats.streams == began

    run(work())
