"""What is QUIC's own: a stream for each page, and datagrams of many sizes (T1)."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("native._quic", reason="ngtcp2 is not installed")

from tests.process_memory import occurrences, readable
from transport.link import LinkError
from transport.quic_engine import MAX_PAGES, Engine

from .conftest import Run
from .hosts import QUICK, linked, pattern

MIB = 1 << 20


def test_more_pages_than_streams_are_allowed_at_once_all_arrive_in_order(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path, "quic") as (_, b, link):
            headers = [b"%d" % i for i in range(5 * MAX_PAGES)]
            page = pattern(1000)
            await asyncio.gather(*(link.send_page(header, page[:500]) for header in headers))
            await b.until(lambda: len(b.landings.published) == len(headers))
            assert b.landings.claimed == headers

    run(work())


@readable
def test_pages_that_never_had_their_turn_are_wiped(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X6, by looking: what had come of them stayed in the heap of a host whose link ended, or whose page grew."""
    marker = secrets.token_bytes(32)

    async def work() -> None:
        monkeypatch.setattr(Engine, "accept_pages", lambda engine, link: None)
        async with linked(tmp_path, "quic") as (_, b, link):
            page = pattern(MIB)
            for start in range(0, len(page), len(marker)):
                page[start : start + len(marker)] = marker
            sent = [link.send_page(b"%d" % i, page[: (i + 1) << 16]) for i in range(8)]
            bytes_sent = sum((i + 1) << 16 for i in range(8)) + len(page)
            while occurrences(marker * 2) < 0.9 * bytes_sent // 64:
                await asyncio.sleep(0.05)
            link.close("enough")
            await asyncio.wait(sent)
            await b.until(lambda: bool(b.closed))
            page[:] = bytes(len(page))
            # Some are in the TLS library's hands; it was 0.4 of them before.
            assert occurrences(marker * 2) < 0.01 * bytes_sent // 64

    run(work())


def test_an_endpoint_that_was_closed_answers_instead_of_waiting_for_ever(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path, "quic") as (a, _, _):
            engine, obeyed = a.endpoint.engine, list[int]()
            sent = [engine.post(partial(obeyed.append, i)) for i in range(100)]
            await a.endpoint.close()
            assert all(sent) and obeyed == list(range(100)), "what was posted in time was not done"
            with pytest.raises(LinkError, match="has been closed") as error:
                await asyncio.wait_for(a.endpoint.listen("127.0.0.1:0"), 10)
            assert error.value.reason == "closed"
            with pytest.raises(LinkError, match="has been closed"):
                await asyncio.wait_for(a.endpoint.connect("b", "127.0.0.1:9"), 10)

    run(work())


def test_a_command_that_fails_by_a_bug_is_logged_and_the_links_live_on(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with linked(tmp_path, "quic") as (a, b, link):
            a.endpoint.engine.post(lambda: 1 // 0)
            await asyncio.wait_for(link.send_page(b"page", pattern(1000)), 10)
            assert b.landings.payload(b"page") == pattern(1000)

    run(work())
    assert "ZeroDivisionError" in caplog.text


def test_a_page_cancelled_before_it_began_never_appears(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path, "quic") as (_, b, link):
            futures = [link.send_page(b"%d" % i, pattern(1000)) for i in range(3 * MAX_PAGES)]
            futures[-1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await futures[-1]
            await asyncio.gather(*futures[:-1])
            await b.until(lambda: len(b.landings.published) == 3 * MAX_PAGES - 1)
            assert b"%d" % (3 * MAX_PAGES - 1) not in b.landings.claimed

    run(work())


@pytest.mark.parametrize("congestion", ["bbr", "cubic"])
@pytest.mark.parametrize("datagram_bytes", [1200, 1452, 8900])
def test_every_datagram_size_and_congestion_control_moves_pages(
    run: Run, tmp_path: Path, congestion: str, datagram_bytes: int
) -> None:
    async def work() -> None:
        async with linked(tmp_path, "quic", congestion=congestion, datagram_bytes=datagram_bytes) as (_, b, link):
            page = pattern(8 * MIB)
            await link.send_page(b"page", page)
            assert b.landings.payload(b"page") == page

    run(work())


def test_the_largest_datagram_of_the_path_is_found(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path, "quic", timing=QUICK) as (a, _, link):
            assert link.stats.datagram_bytes <= 1452
            await a.until(lambda: link.stats.datagram_bytes > 1400)

    run(work())


def test_nothing_is_kept_of_a_link_that_ended(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path, "quic") as (a, b, link):
            await link.send_page(b"page", pattern(10))
            link.close("done")
            await b.until(lambda: bool(a.closed and b.closed))
            for host in (a, b):
                end = host.endpoint
                await host.until(lambda end=end: end.engine.counts()["links"] == 0)  # type: ignore[misc]
                assert not (end._links or end._connections or end._peers or end._receiving)

    run(work())
