"""Two QUIC endpoints over real sockets: messages, pages, order, drops, cancelling, closing (T1, T2, T3, H5, H7)."""

from __future__ import annotations

import asyncio
import resource
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("native._quic", reason="ngtcp2 is not installed")

from transport.link import MAX_MESSAGE, LinkError
from transport.quic import MAX_LINKS_PER_PEER, QuicEndpoint
from transport.quic_engine import MAX_PAGES, EngineOptions
from transport.tcp_link import Timing

from .conftest import Run
from .hosts import QUICK, mapped, pattern, sockets
from .quic_hosts import linked, two_hosts

MIB = 1 << 20


class _Into:
    def __init__(self, view: memoryview) -> None:
        self.view = view

    def publish(self) -> None: ...

    def discard(self) -> None: ...


def test_messages_arrive_whole_and_in_order_both_ways(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (a, b, link):
            sent = [bytes([i % 256]) * (i * 37 % 5000) for i in range(500)] + [b"x" * MAX_MESSAGE, b""]
            for message in sent:
                link.send(message)
                b.links[0].send(message)
            await b.until(lambda: len(b.messages) == len(sent))
            await a.until(lambda: len(a.messages) == len(sent))
            assert a.messages == b.messages == sent

    run(work())


def test_pages_of_every_size_around_the_powers_of_two_arrive_exactly(run: Run, tmp_path: Path) -> None:
    sizes = sorted({max(1, (1 << p) + d) for p in range(0, 23) for d in (-1, 0, 1)})

    async def work() -> None:
        async with linked(tmp_path) as (_, b, link):
            pages = {b"%d" % size: pattern(size, size) for size in sizes}
            await asyncio.gather(*(link.send_page(header, page) for header, page in pages.items()))
            await b.until(lambda: len(b.landings.published) == len(pages))
            assert b.landings.claimed == list(pages)  # in sending order, each once
            for header, page in pages.items():
                assert b.landings.payload(header) == page
            assert link.stats.pages_sent == b.links[0].stats.pages_received == len(sizes)  # type: ignore[attr-defined]

    run(work())


def test_more_pages_than_streams_are_allowed_at_once_all_arrive_in_order(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (_, b, link):
            headers = [b"%d" % i for i in range(5 * MAX_PAGES)]
            page = pattern(1000)
            await asyncio.gather(*(link.send_page(header, page[:500]) for header in headers))
            await b.until(lambda: len(b.landings.published) == len(headers))
            assert b.landings.claimed == headers

    run(work())


def test_a_header_of_every_length_arrives_exactly(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (_, b, link):
            headers = [bytes(range(256))[:size] for size in range(1, 257)]
            await asyncio.gather(*(link.send_page(header, pattern(10)) for header in headers))
            await b.until(lambda: len(b.landings.published) == len(headers))
            assert b.landings.claimed == headers

    run(work())


def test_a_page_above_64_mib_arrives_with_flat_memory(run: Run, tmp_path: Path) -> None:
    """H5: no cap on a page, and nothing beside its landing grows with it."""
    size = (80 << 20) + 12345

    async def work() -> None:
        async with linked(tmp_path) as (_, b, link):
            page = pattern(size)
            await link.send_page(b"small", page[: 8 * MIB])
            landing = mapped(size)
            landing[::4096] = bytes(len(landing[::4096]))  # resident before the measurement
            b.landings.claim = lambda header, n: _Into(landing)  # type: ignore[method-assign, assignment]
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            await link.send_page(b"big", page)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB
            assert landing == page

    run(work())


def test_pages_flow_both_ways_at_once(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (a, b, link):
            pages = [(b"%d" % i, pattern(200_000 + i, i)) for i in range(60)]
            await asyncio.gather(*(end.send_page(*page) for page in pages for end in (link, b.links[0])))
            for host in (a, b):
                await host.until(lambda host=host: len(host.landings.published) == 60)  # type: ignore[misc]
                assert host.landings.claimed == [header for header, _ in pages]
                assert all(host.landings.payload(header) == page for header, page in pages)

    run(work())


def test_a_page_the_sink_declines_is_dropped_and_counted_and_the_next_arrives(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (_, b, link):
            b.landings.refuse = lambda header: header == b"dead"
            await asyncio.gather(*(link.send_page(header, pattern(MIB)) for header in (b"one", b"dead", b"two")))
            await b.until(lambda: len(b.landings.published) == 2)
            assert [slot.header for slot in b.landings.published] == [b"one", b"two"]
            assert b.links[0].stats.pages_dropped == 1

    run(work())


def test_declined_pages_leave_no_trace_in_flow_control(run: Run, tmp_path: Path) -> None:
    """What arrives of a page between its refusal and the end of its datagram is a little, but a hundred times."""

    async def work() -> None:
        options = EngineOptions(window_bytes=64 << 10)
        async with linked(tmp_path, options=options) as (_, b, link):
            b.landings.refuse = lambda header: header.startswith(b"dead")
            page = pattern(MIB)
            for i in range(100):
                await link.send_page(b"dead%d" % i, page)
            await link.send_page(b"live", page)
            assert b.landings.payload(b"live") == page
            assert b.links[0].stats.pages_dropped == 100

    run(work())


def test_a_sink_that_raises_ends_the_link_on_both_sides(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (a, b, link):

            def claim(header: bytes, size: int) -> Any:
                raise LinkError("page-nonsense", "no such page")

            b.landings.claim = claim  # type: ignore[method-assign]
            with pytest.raises(LinkError):
                # The page itself may be dropped before the link ends: the next cannot be.
                for _ in range(100):
                    await link.send_page(b"page", pattern(MIB))
            await a.until(lambda: bool(a.closed))
            await b.until(lambda: bool(b.closed))
            assert a.closed == ["peer-closed/page-nonsense"]
            assert b.closed == ["page-nonsense"]

    run(work())


def test_a_cancelled_page_resolves_only_when_its_memory_is_free_and_the_next_arrives(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path, options=EngineOptions(window_bytes=MIB)) as (_, b, link):
            page = pattern(64 * MIB)
            future = link.send_page(b"long", page)
            await b.until(lambda: bool(b.landings.claimed))
            assert future.cancel() and not future.done()
            with pytest.raises(asyncio.CancelledError):
                await future
            page.release()  # BufferError if anything still held it
            await link.send_page(b"next", pattern(1000))
            await b.until(lambda: len(b.landings.published) == 1 and len(b.landings.discarded) == 1)
            (lost,) = b.landings.discarded
            assert lost.header == b"long" and not any(lost.view[:: 1 << 12]), "a page that did not complete is wiped"

    run(work())


def test_a_page_cancelled_before_it_began_never_appears(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (_, b, link):
            futures = [link.send_page(b"%d" % i, pattern(1000)) for i in range(3 * MAX_PAGES)]
            futures[-1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await futures[-1]
            await asyncio.gather(*futures[:-1])
            await b.until(lambda: len(b.landings.published) == 3 * MAX_PAGES - 1)
            assert b"%d" % (3 * MAX_PAGES - 1) not in b.landings.claimed

    run(work())


def test_messages_sent_just_before_closing_still_arrive(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (a, b, link):
            for i in range(200):
                link.send(b"%d" % i * 100)
            link.close("done")
            await b.until(lambda: bool(b.closed))
            assert len(b.messages) == 200 and b.closed == ["peer-closed/done"]
            await a.until(lambda: a.closed == ["done"])
            with pytest.raises(LinkError):
                link.send(b"more")

    run(work())


def test_closing_fails_pages_on_their_way_and_wipes_what_landed_of_them(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path, options=EngineOptions(window_bytes=MIB)) as (_, b, link):
            futures = [link.send_page(b"%d" % i, pattern(16 * MIB, i)) for i in range(12)]
            await b.until(lambda: bool(b.landings.claimed))
            link.close("enough")
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert all(isinstance(r, LinkError) and r.reason == "enough" for r in results if r is not None)
            assert isinstance(results[-1], LinkError)
            await b.until(lambda: bool(b.closed))
            assert all(not any(slot.view[:: 1 << 12]) for slot in b.landings.discarded)
            assert len(b.landings.discarded) + len(b.landings.published) == len(b.landings.claimed)

    run(work())


@pytest.mark.parametrize(("header", "size"), [(b"", 10), (b"h" * 257, 10), (b"h", 0)])
def test_a_page_out_of_bounds_is_refused_before_it_is_queued(
    run: Run, tmp_path: Path, header: bytes, size: int
) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (_, _, link):
            with pytest.raises(LinkError) as caught:
                link.send_page(header, memoryview(bytearray(size)))
            assert caught.value.reason == "page-bounds"

    run(work())


def test_a_message_too_large_is_refused_and_messages_that_cannot_leave_are_bounded(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with linked(tmp_path) as (_, b, link):
            with pytest.raises(LinkError, match="split it"):
                link.send(b"x" * (MAX_MESSAGE + 1))
            with pytest.raises(LinkError) as caught:
                for _ in range(10_000):  # without giving the loop a chance to hear of acknowledgements
                    link.send(b"x" * 100_000)
            assert caught.value.reason == "queue-full"
            await b.until(lambda: len(b.messages) > 600)
            link.send(b"room again")

    run(work())


def test_thirty_links_leave_no_thread_no_descriptor_and_no_task(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            await (await a.endpoint.connect("b", address)).send_page(b"warm", pattern(10))
            a.links[0].close("done")
            await b.until(lambda: len(b.closed) == 1)
            before = sockets(), threading.active_count(), len(asyncio.all_tasks())
            for i in range(30):
                link = await a.endpoint.connect("b", address)
                await link.send_page(b"page", pattern(5000))
                (link if i % 2 else b.links[-1]).close("done")
                await a.until(lambda i=i: len(a.closed) == i + 2)  # type: ignore[misc]
                await b.until(lambda i=i: len(b.closed) == i + 2)  # type: ignore[misc]
            assert (sockets(), threading.active_count(), len(asyncio.all_tasks())) == before
            assert not a.endpoint._receiving and not b.endpoint._receiving and not b.endpoint._peers

    run(work())


def test_one_peer_cannot_hold_more_than_its_share_of_links(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            twin = QuicEndpoint(a.keys, a)  # the same key from elsewhere: only b can count them all
            for _ in range(MAX_LINKS_PER_PEER):
                await twin.connect("b", address)
            with pytest.raises(LinkError) as caught:
                await a.endpoint.connect("b", address)
            assert caught.value.reason == "peer-closed/too-many-links"
            a.links[0].close("done")
            await b.until(lambda: "peer-closed/done" in b.closed)
            await a.endpoint.connect("b", address)
            await twin.close()

    run(work())


def test_round_trip_bandwidth_and_datagram_size_are_measured_on_the_way(run: Run, tmp_path: Path) -> None:
    """T5."""

    async def work() -> None:
        async with linked(tmp_path, timing=QUICK) as (a, _, link):
            await asyncio.gather(*(link.send_page(b"page", pattern(8 << 20)) for _ in range(4)))
            await a.until(lambda: link.stats.rtt_s is not None and link.stats.datagram_bytes > 1400)
            assert link.stats.rtt_s is not None and 0 < link.stats.rtt_s < 5
            assert link.stats.bandwidth_bps is not None and link.stats.bandwidth_bps > 1e6

    run(work())


@pytest.mark.parametrize("congestion", ["bbr", "cubic"])
@pytest.mark.parametrize("datagram_bytes", [1200, 1452, 8900])
def test_every_datagram_size_and_congestion_control_moves_pages(
    run: Run, tmp_path: Path, congestion: str, datagram_bytes: int
) -> None:
    async def work() -> None:
        async with linked(tmp_path, congestion=congestion, datagram_bytes=datagram_bytes) as (_, b, link):
            page = pattern(8 * MIB)
            await link.send_page(b"page", page)
            assert b.landings.payload(b"page") == page

    run(work())


def test_ipv6_works_as_ipv4_does(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, _):
            address = await b.endpoint.listen("[::1]:0")
            assert address.startswith("[::1]:")
            link = await a.endpoint.connect("b", address)
            await link.send_page(b"page", pattern(100_000))
            assert b.landings.payload(b"page") == pattern(100_000)

    run(work())


def test_an_address_in_use_is_refused_naming_it(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, _, address):
            with pytest.raises(LinkError, match=address.replace(".", r"\.")) as caught:
                await a.endpoint.listen(address)
            assert caught.value.reason == "cannot-listen"

    run(work())


def test_a_peer_that_is_not_there_is_unreachable_in_words(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, timing=Timing(greet_s=0.5)) as (a, b, address):
            await b.endpoint.close()
            with pytest.raises(LinkError, match="is its daemon running") as caught:
                await a.endpoint.connect("b", address)
            assert caught.value.reason == "unreachable"

    run(work())


def test_no_bytes_object_as_large_as_a_page_is_made_while_data_moves(run: Run, tmp_path: Path) -> None:
    """T4: state crosses Python as memoryviews only."""

    async def work() -> None:
        async with linked(tmp_path) as (_, b, link):
            page, rooms = pattern(16 << 20), [mapped(16 << 20) for _ in range(4)]
            await link.send_page(b"warm", page[:100])
            turn = iter(range(1 << 30))
            b.landings.claim = lambda header, n: _Into(rooms[next(turn) % 4])  # type: ignore[method-assign, assignment]
            tracemalloc.start()
            for _ in range(4):
                await asyncio.gather(*(link.send_page(b"page", page) for _ in range(4)))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 1 << 20, "256 MiB moved with less than 1 MiB of Python memory"
            assert all(room == page for room in rooms)

    run(work())
