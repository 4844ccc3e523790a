from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.transport.conftest import Run
from tests.transport.hosts import QUICK, Host, linked, pattern, two_hosts
from transport import probe
from transport.link import Landing, Link, LinkError
from transport.outgoing import PageFuture
from transport.probe import HEADER, MAX_BYTES, MAX_PAGE, ProbeSink, measure


class Probed(Host):
    """A host whose links answer probes."""

    def link_opened(self, link: Link) -> Any:
        super().link_opened(link)
        return ProbeSink(self.landings)


@pytest.fixture(autouse=True)
def _hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.transport.hosts.Host", Probed)


def test_a_probe_gives_round_trip_and_bandwidth_and_leaves_nothing(tmp_path: Path, run: Run, transport: str) -> None:
    """T5."""

    async def scenario() -> None:
        async with linked(tmp_path, transport) as (_a, b, link):
            reading = await measure(link)
            assert reading is not None
            assert 0 < reading.rtt_s < 5
            assert reading.bandwidth_bps > 1e6
            assert link.stats.page_bytes_sent <= MAX_BYTES
            assert b.landings.claimed == b.landings.published == []

    run(scenario())


def test_a_slow_link_is_measured_within_the_bound_of_time(
    tmp_path: Path, run: Run, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's receiver is held up: what is still on its way then is called back, and the link stays usable."""
    monkeypatch.setattr(probe, "MAX_S", 0.3)
    claim = ProbeSink.claim

    def slowly(self: ProbeSink, header: bytes, payload_bytes: int) -> Landing | None:
        if header == HEADER:
            time.sleep(0.05)
        return claim(self, header, payload_bytes)

    monkeypatch.setattr(ProbeSink, "claim", slowly)

    async def scenario() -> None:
        async with linked(tmp_path, transport) as (_a, b, link):
            reading = await measure(link)
            assert reading is not None
            assert reading.bandwidth_bps < 2 * 8 * MAX_PAGE / 0.05
            assert link.stats.page_bytes_sent < MAX_BYTES
            payload = pattern(300_000)
            await link.send_page(b"a real page", payload)
            assert await b.page(b"a real page") == pattern(300_000)

    run(scenario())


def test_what_a_probe_left_on_its_way_is_called_back_before_it_returns(
    tmp_path: Path, run: Run, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's receiver hangs: by itself none of it would end. Over QUIC what is in flight is not let go before the
    receiver has it, so that goes on once the first page is called back."""
    for bound in ("MAX_S", "DRAIN_S"):
        monkeypatch.setattr(probe, bound, 0.1)
    go, claim, cancel = threading.Event(), ProbeSink.claim, PageFuture.cancel

    def hang(self: ProbeSink, header: bytes, payload_bytes: int) -> Landing | None:
        go.wait(60)
        return claim(self, header, payload_bytes)

    def called_back(self: PageFuture, msg: Any = None) -> bool:
        go.set()
        return cancel(self, msg)

    monkeypatch.setattr(ProbeSink, "claim", hang)
    monkeypatch.setattr(PageFuture, "cancel", called_back)

    async def scenario() -> None:
        async with linked(tmp_path, transport) as (_a, _b, link):
            sent, send_page = list[PageFuture](), link.send_page
            link.send_page = lambda *page: sent.append(send_page(*page)) or sent[-1]  # type: ignore[func-returns-value]
            try:
                async with asyncio.timeout(20):
                    await measure(link)
                assert sent and all(future.done() for future in sent)
            finally:
                go.set()

    run(scenario())


def test_a_probe_ends_when_the_link_is_wanted(tmp_path: Path, run: Run, transport: str) -> None:
    """Never while a handoff runs over it."""

    async def scenario() -> None:
        async with linked(tmp_path, transport) as (_a, _b, link):
            looks = 0

            def wanted() -> bool:
                nonlocal looks
                looks += 1
                return looks > 3

            assert await measure(link, wanted) is None
            assert link.stats.page_bytes_sent < MAX_BYTES
            assert await measure(link, lambda: True) is None

    run(scenario())


def test_real_pages_go_to_their_own_sink_beside_a_probe(tmp_path: Path, run: Run, transport: str) -> None:
    async def scenario() -> None:
        async with linked(tmp_path, transport) as (_a, b, link):
            probing = asyncio.create_task(measure(link))
            for number in range(8):
                await link.send_page(b"page %d" % number, pattern(200_000, number))
            assert await probing is not None
            for number in range(8):
                assert b.landings.payload(b"page %d" % number) == pattern(200_000, number)

    run(scenario())


def test_a_probe_page_above_its_bound_closes_the_link(tmp_path: Path, run: Run, transport: str) -> None:
    """The scratch page is all the memory that probes may have."""

    async def scenario() -> None:
        async with linked(tmp_path, transport) as (a, _b, link):
            with contextlib.suppress(LinkError):  # over QUIC all of it may have left before its end is known here
                await link.send_page(HEADER, pattern(MAX_PAGE + 1))
            await a.until(lambda: a.closed == ["peer-closed/probe-bounds"])

    run(scenario())


def test_a_link_that_falls_fails_the_probe(
    tmp_path: Path, run: Run, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MAX_BYTES", 1 << 40)
    monkeypatch.setattr(probe, "MAX_S", 10.0)

    async def scenario() -> None:
        async with two_hosts(tmp_path, transport, timing=QUICK) as (a, b, address):
            link = await a.endpoint.connect("b", address)
            probing = asyncio.create_task(measure(link))
            await a.until(lambda: link.stats.page_bytes_sent > 0)
            b.links[0].close("test")
            with pytest.raises(LinkError, match="test"):
                await probing

    run(scenario())


def test_a_peer_that_answers_no_ping_fails_the_probe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ROUND_TRIP_WAIT_S", 0.05)

    class Silent:
        peer = "b"

        class stats:
            rtt_s = None

    async def scenario() -> None:
        with pytest.raises(LinkError, match="answered no ping"):
            await measure(Silent())  # type: ignore[arg-type]

    run(scenario())


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        ([], 8 * probe.FIRST_PAGE / probe.MAX_S),
        ([(2.0, 100)], 8 * 100 / 2.0),
        ([(1.0, 100), (1.0, 100)], 8 * 200 / 1.0),
        ([(1.0, 100), (2.0, 300)], 8 * 300 / 1.0),
        ([(1.0, 100), (1.1, 300)], 8 * 400 / 1.1),
        ([(1.0, 10), (2.0, 390), (3.0, 800), (4.0, 800)], 8 * 1600 / 2.0),
    ],
)
def test_the_rate_is_that_after_the_warm_up(arrived: list[tuple[float, int]], expected: float) -> None:
    burst = probe._Burst(None, lambda: False)  # type: ignore[arg-type]
    burst.began = 0.0
    burst.arrived = arrived
    assert burst.bandwidth_bps() == pytest.approx(expected)
