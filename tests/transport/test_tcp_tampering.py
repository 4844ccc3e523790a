"""Someone on the path flips, cuts, repeats, drops and reorders bytes: nothing wrong is ever published (X1, X2, V2)."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import uvloop

from transport.frames import OPENING, PREAMBLE, RECORD_HEADER, TAG
from transport.link import LinkError, Timing
from transport.tcp_bulk import BulkStream

from .conftest import Run
from .hosts import Host, pattern, two_hosts
from .meddler import Fault, drop, duplicate, flip, meddled, swap, truncate, truncate_pieces

PAGE = 20
PAGE_RECORD = RECORD_HEADER + 12 + len(b"head") + TAG
DATA_RECORD = RECORD_HEADER + PAGE + TAG
ONE_PAGE = PREAMBLE + OPENING + PAGE_RECORD + DATA_RECORD
REFUSED = {"record-tampered", "frame-malformed"}
# which one depends on who gives up first, whether the proxy resets the connection before the farewell, and on a busy
# machine
STARVED = {"streams-lost", "peer-closed/streams-lost", "connection-lost", "peer-unresponsive"}
BRISK = Timing(ping_s=0.03, dead_s=0.3, greet_s=2.0)


async def send_through(
    a: Host, b: Host, address: str, fault: Fault, page: memoryview, *, again: bool, late: bool = False
) -> str:
    """As `once`. A fault that comes `late` cannot disturb the connect, but a busy machine can: then try again."""
    for _ in range(3):
        end = await once(a, b, address, fault, page, again=again)
        if end != "connect" or not late:
            break
    return end


async def once(a: Host, b: Host, address: str, fault: Fault, page: memoryview, *, again: bool) -> str:
    """How it ended: "connect" refused, "delivered", or the reason the receiver's link closed with."""
    async with meddled(address, fault, then_refuse=not again) as (_, proxy):
        ended = len(b.closed)
        try:
            link = await a.endpoint.connect("b", proxy)
        except (LinkError, OSError):
            return "connect"
        try:
            await link.send_page(b"head", page)
            return "delivered"
        except LinkError:
            await b.until(lambda: len(b.closed) > ended)
            return b.closed[-1]
        finally:
            link.close("done")
            await link.ended.wait()


def test_every_byte_of_preamble_proof_page_and_data_is_protected(tmp_path: Path) -> None:
    """A flipped bit anywhere closes the link, or (a length that grew) starves the stream; never a wrong page. On one
    loop only, for its length."""

    async def work() -> None:
        async with two_hosts(tmp_path, streams=1, timing=BRISK) as (a, b, address):
            page = pattern(PAGE)
            for position in range(ONE_PAGE):
                late = position >= PREAMBLE + OPENING
                end = await send_through(a, b, address, flip(position), page, again=False, late=late)
                assert not b.landings.published, f"byte {position} was not protected"
                if position < PREAMBLE + OPENING:
                    assert end == "connect", position
                    assert not b.landings.claimed, "claimed for a stream that had not proved its key"
                else:
                    assert end in REFUSED | STARVED, (position, end)
            for slot in b.landings.discarded:
                assert not any(slot.view), "unauthenticated bytes were left in the landing"

    uvloop.run(work())


@pytest.mark.parametrize("bit", [0x01, 0x80])
@pytest.mark.parametrize("place", [RECORD_HEADER, RECORD_HEADER + PAGE // 2, DATA_RECORD - 1])
def test_tampered_data_ends_the_link_by_name_on_both_sides(run: Run, tmp_path: Path, place: int, bit: int) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, streams=1) as (a, b, address):
            position = ONE_PAGE - DATA_RECORD + place
            end = await send_through(a, b, address, flip(position, bit), pattern(PAGE), again=True)
            assert end == "record-tampered"
            assert a.closed == ["peer-closed/record-tampered"]
            assert len(b.landings.claimed) == len(b.landings.discarded) == 1

    run(work())


RECORDS = 5
RECORD = 4096


@pytest.mark.parametrize("fault", [duplicate, drop, swap])
@pytest.mark.parametrize("index", range(2, 2 + RECORDS))
def test_a_record_repeated_lost_or_reordered_is_refused(run: Run, tmp_path: Path, fault: object, index: int) -> None:
    """X7, H8: pieces 0 and 1 are preamble and OPEN, 2 is PAGE, then DATA."""

    async def work() -> None:
        async with two_hosts(tmp_path, streams=1, record_bytes=RECORD) as (a, b, address):
            page = pattern(RECORDS * RECORD)
            end = await send_through(a, b, address, fault(index), page, again=True)  # type: ignore[operator]
            assert end in REFUSED
            assert not b.landings.published

    run(work())


def test_the_link_ends_before_its_page_can_come_over_another_stream(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the stream takes long to end here: the other side sees its end at once, and replaces it."""
    send = BulkStream._send

    def slow_to_end(stream: BulkStream) -> None:
        send(stream)
        time.sleep(0.3 * (threading.current_thread().name == "zc-send a"))

    monkeypatch.setattr(BulkStream, "_send", slow_to_end)

    async def work() -> None:
        async with two_hosts(tmp_path, streams=1, record_bytes=RECORD) as (a, b, address):
            end = await send_through(a, b, address, duplicate(3), pattern(RECORDS * RECORD), again=True)
            assert end in REFUSED
            assert not b.landings.published

    run(work())


def test_a_page_cut_off_after_any_record_is_never_published(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, streams=1, record_bytes=RECORD, timing=BRISK) as (a, b, address):
            page = pattern(RECORDS * RECORD)
            for pieces in range(1, 3 + RECORDS):
                end = await send_through(a, b, address, truncate_pieces(pieces), page, again=False, late=pieces > 2)
                assert end == "connect" if pieces < 3 else end in STARVED, (pieces, end)
                assert not b.landings.published
            assert len(b.landings.claimed) == len(b.landings.discarded) > 0

    run(work())


def test_a_page_cut_off_inside_a_record_is_never_published(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, streams=1, timing=BRISK) as (a, b, address):
            for cut in range(PREAMBLE + OPENING + 1, ONE_PAGE, 13):
                end = await send_through(a, b, address, truncate(cut), pattern(PAGE), again=False, late=True)
                assert end in STARVED, (cut, end)
                assert not b.landings.published

    run(work())


def test_a_cut_stream_is_replaced_and_the_page_arrives_once(run: Run, tmp_path: Path) -> None:
    """H6 at the level of one link: the same cuts, but the path heals."""

    async def work() -> None:
        async with two_hosts(tmp_path, streams=1, record_bytes=RECORD) as (a, b, address):
            page = pattern(RECORDS * RECORD)
            for pieces in range(3, 3 + RECORDS):
                assert await send_through(a, b, address, truncate_pieces(pieces), page, again=True) == "delivered"
                assert len(b.landings.claimed) == len(b.landings.published) == pieces - 2
                assert b.landings.published[-1].view == page

    run(work())


def test_a_recorded_bulk_connection_played_again_gets_nothing(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            two_hosts(tmp_path, streams=1) as (a, b, address),
            meddled(address) as (meddler, proxy),
        ):
            link = await a.endpoint.connect("b", proxy)
            await link.send_page(b"head", pattern(PAGE))
            reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
            writer.write(b"".join(meddler.sent))
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()
            await link.send_page(b"next", pattern(PAGE))
            assert b.landings.claimed == [b"head", b"next"]
            assert b.endpoint.strangers.refused == 1

    run(work())
