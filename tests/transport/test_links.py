"""What a link promises, over real sockets and both transports: messages, pages, order, drops, cancelling, closing
(T1, T2, T3, H5, H7)."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import tracemalloc
from pathlib import Path

import pytest

from transport.address import Address, SocketAddress, parse, resolve
from transport.link import MAX_LINKS_PER_PEER, MAX_MESSAGE, Link, LinkError, Timing
from transport.mailbox import Mailbox

from .conftest import Run
from .hosts import QUICK, endpoint, linked, mapped, needs_ipv6, pattern, small_steps, sockets, two_hosts, unmap

MIB = 1 << 20


class _Into:
    def __init__(self, view: memoryview) -> None:
        self.view = view

    def publish(self) -> None: ...

    def discard(self) -> None: ...


def complaints() -> list[type]:
    """What the running loop is told of from now on, instead of failing the test."""
    told: list[type] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(type(context["exception"])))
    return told


def test_messages_arrive_whole_and_in_order_both_ways(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport) as (a, b, link):
            sent = [bytes([i % 256]) * (i * 37 % 5000) for i in range(500)] + [b"x" * MAX_MESSAGE, b""]
            for message in sent:
                link.send(message)
                b.links[0].send(message)
            await b.until(lambda: len(b.messages) == len(sent))
            await a.until(lambda: len(a.messages) == len(sent))
            assert a.messages == b.messages == sent

    run(work())


def test_pages_of_every_size_around_the_powers_of_two_arrive_exactly(run: Run, tmp_path: Path, transport: str) -> None:
    sizes = sorted({max(1, (1 << p) + d) for p in range(0, 23) for d in (-1, 0, 1)})

    async def work() -> None:
        async with linked(tmp_path, transport, **small_steps(transport)) as (_, b, link):
            pages = {b"%d" % size: pattern(size, size) for size in sizes}
            await asyncio.gather(*(link.send_page(header, page) for header, page in pages.items()))
            await b.landed(len(pages))
            assert b.landings.claimed == list(pages)  # in sending order, each once
            for header, page in pages.items():
                assert b.landings.payload(header) == page
            assert link.stats.pages_sent == b.links[0].stats.pages_received == len(sizes)  # type: ignore[attr-defined]

    run(work())


def test_a_header_of_every_length_arrives_exactly(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport) as (_, b, link):
            headers = [bytes(range(256))[:size] for size in range(1, 257)]
            await asyncio.gather(*(link.send_page(header, pattern(10)) for header in headers))
            await b.landed(len(headers))
            assert b.landings.claimed == headers

    run(work())


def test_a_page_above_64_mib_arrives_with_flat_memory(run: Run, tmp_path: Path, transport: str) -> None:
    """H5: no cap on a page, and nothing beside its landing grows with it."""
    size = (80 << 20) + 12345

    async def work() -> None:
        async with linked(tmp_path, transport) as (_, b, link):
            page = pattern(size)
            await link.send_page(b"small", page[: 8 * MIB])
            landing = mapped(size)
            landing[::4096] = bytes(len(landing[::4096]))  # resident before the measurement
            b.landings.claim = lambda header, n: _Into(landing)  # type: ignore[method-assign, assignment]
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            await link.send_page(b"big", page)
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown_kib < (8 << 10 if transport == "tcp" else 16 << 10)
            assert landing == page

    run(work())


def test_pages_flow_both_ways_at_once(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport, **small_steps(transport)) as (a, b, link):
            pages = [(b"%d" % i, pattern(200_000 + i, i)) for i in range(60)]
            await asyncio.gather(*(end.send_page(*page) for page in pages for end in (link, b.links[0])))
            for host in (a, b):
                await host.landed(len(pages))
                assert host.landings.claimed == [header for header, _ in pages]
                assert all(host.landings.payload(header) == page for header, page in pages)

    run(work())


def test_declined_pages_are_dropped_and_counted_and_never_hold_up_the_next(
    run: Run, tmp_path: Path, transport: str
) -> None:
    """Over QUIC, what still arrives of a page after its refusal has to be given back to flow control each time."""

    async def work() -> None:
        async with linked(tmp_path, transport, **small_steps(transport)) as (_, b, link):
            b.landings.refuse = lambda header: header.startswith(b"dead")
            page = pattern(MIB)
            headers = [b"first", *(b"dead%d" % i for i in range(100)), b"last"]
            await asyncio.gather(*(link.send_page(header, page) for header in headers))
            await b.landed(2)
            assert [slot.header for slot in b.landings.published] == [b"first", b"last"]
            assert b.landings.payload(b"last") == page
            assert b.links[0].stats.pages_dropped == 100

    run(work())


@pytest.mark.parametrize("stage", ["claim", "publish"])
def test_a_sink_that_raises_ends_the_link_with_its_reason(run: Run, tmp_path: Path, transport: str, stage: str) -> None:
    def fail(*_: object) -> bool:
        raise LinkError("ledger-overlap", "tokens [0,16) came twice")

    async def work() -> None:
        async with linked(tmp_path, transport) as (a, b, link):
            if stage == "claim":
                b.landings.refuse = fail
            else:
                b.landings.on_publish = fail
            with pytest.raises(LinkError):
                while True:  # the first may have left before its end is known here
                    await link.send_page(b"page", pattern(1000))
            await b.until(lambda: b.closed == ["ledger-overlap"])
            await a.until(lambda: a.closed == ["peer-closed/ledger-overlap"])

    run(work())


def test_an_owner_that_raises_ends_the_link_that_asked_and_no_other(run: Run, tmp_path: Path, transport: str) -> None:
    """A bug of the host's: what came with that message for other links still reaches them."""

    async def work() -> None:
        told = complaints()
        async with two_hosts(tmp_path, transport) as (a, b, address):
            first, second = [await a.endpoint.connect("b", address) for _ in range(2)]
            await b.until(lambda: len(b.links) == 2)
            heard = b.link_message

            def raising(link: Link, message: bytes) -> None:
                heard(link, message)
                if message == b"bug":
                    raise ZeroDivisionError

            b.link_message = raising  # type: ignore[method-assign]
            first.send(b"bug")
            pages = [second.send_page(b"%d" % i, pattern(100)) for i in range(20)]
            for i in range(20):
                second.send(b"%d" % i)
            await asyncio.wait_for(asyncio.gather(*pages), 30)
            await b.until(lambda: len(b.messages) == 21 and len(b.closed) == 1)
            await a.until(lambda: len(a.closed) == 1)
            await second.send_page(b"last", pattern(100))
            assert told == [ZeroDivisionError]

    run(work())


def test_calls_from_threads_are_made_though_one_of_them_raises(run: Run) -> None:
    """A page's future, or a link's end, may be among the rest."""

    async def work() -> None:
        made, told = list[int](), complaints()
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.post(made.append, 1)
        mailbox.post(int, "no number")
        mailbox.post(made.append, 2)
        await asyncio.sleep(0.01)
        assert made == [1, 2]
        assert told == [ValueError]

    run(work())


def test_a_payload_is_no_longer_read_once_its_cancelled_future_resolves(
    run: Run, tmp_path: Path, transport: str
) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport, **small_steps(transport)) as (_, b, link):
            began, go = threading.Event(), threading.Event()
            b.landings.on_publish = lambda slot: (began.set(), go.wait(20))
            link.send_page(b"slow", pattern(10))
            view = pattern(64 * MIB)
            future = link.send_page(b"cancelled", view)
            last = link.send_page(b"last", pattern(100_000, 5))
            await b.until(began.is_set)  # the receiver hangs: what follows cannot be through
            assert future.cancel() and not future.done()
            if transport == "quic":
                go.set()  # what is in flight stays pinned until the receiver has it
            await asyncio.wait([future])
            assert future.cancelled()
            unmap(view)  # BufferError if anything still held it
            go.set()
            await last
            await b.landed(2)
            assert [slot.header for slot in b.landings.published] == [b"slow", b"last"]
            assert b.landings.payload(b"last") == pattern(100_000, 5)

    run(work())


def test_a_page_cancelled_half_way_is_wiped_and_discarded_by_the_receiver(
    run: Run, tmp_path: Path, transport: str
) -> None:
    """X6: what did land is overwritten before the room is free again."""

    async def work() -> None:
        async with linked(tmp_path, transport, **small_steps(transport)) as (_, b, link):
            began = threading.Event()
            b.landings.refuse = lambda header: bool(began.set())
            future = link.send_page(b"page", pattern(64 * MIB))
            await b.until(began.is_set)
            future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await future
            await link.send_page(b"next", pattern(1000))
            await b.until(lambda: bool(b.landings.discarded and b.landings.published))
            (lost,), (arrived,) = b.landings.discarded, b.landings.published
            assert lost.header == b"page" and not any(lost.view[::1024])
            assert arrived.header == b"next" and arrived.view == pattern(1000)

    run(work())


def test_cancelling_the_waiting_task_cancels_the_page(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport, **small_steps(transport)) as (_, b, link):

            async def send() -> None:
                await link.send_page(b"page", pattern(64 * MIB))

            task = asyncio.create_task(send())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await link.send_page(b"next", pattern(1000))
            await b.landed(1)
            assert [slot.header for slot in b.landings.published] == [b"next"]

    run(work())


def test_a_cancelled_task_is_cancelled_though_its_page_had_left(run: Run, tmp_path: Path, transport: str) -> None:
    """A future that then ended well would swallow the cancellation, and with it every time limit above."""

    async def work() -> None:
        async with linked(tmp_path, transport) as (_, b, link):
            began, go = threading.Event(), threading.Event()
            b.landings.on_publish = lambda slot: (began.set(), go.wait(20))

            async def send() -> None:
                await link.send_page(b"page", pattern(1000))

            task = asyncio.create_task(send())
            await b.until(began.is_set)  # all of it is there; it is not acknowledged
            task.cancel()
            await asyncio.sleep(0.05)
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            await link.send_page(b"next", pattern(1000))

    run(work())


def test_messages_sent_just_before_closing_still_arrive(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport) as (a, b, link):
            for i in range(200):
                link.send(b"%d" % i * 100)
            link.close("done")
            await b.until(lambda: bool(b.closed))
            assert len(b.messages) == 200 and b.closed == ["peer-closed/done"]
            await a.until(lambda: a.closed == ["done"])

    run(work())


def test_closing_while_pages_fly_fails_them_frees_them_and_says_why_once(
    run: Run, tmp_path: Path, transport: str
) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport, **small_steps(transport)) as (a, b, link):
            views = [pattern(16 * MIB, i) for i in range(4)]
            futures = [link.send_page(b"%d" % i, view) for i, view in enumerate(views)]
            await b.until(lambda: bool(b.landings.claimed))
            link.close("handoff-abort")
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert isinstance(results[-1], LinkError)
            assert all(isinstance(r, LinkError) and r.reason == "handoff-abort" for r in results if r is not None)
            for view in views:
                unmap(view)
            await b.until(lambda: b.closed == ["peer-closed/handoff-abort"])
            assert a.closed == ["handoff-abort"]
            assert len(b.landings.published) + len(b.landings.discarded) == len(b.landings.claimed)
            assert not any(any(slot.view[::1024]) for slot in b.landings.discarded), "what landed was not wiped"
            with pytest.raises(LinkError, match="handoff-abort"):
                link.send(b"late")
            with pytest.raises(LinkError, match="handoff-abort"):
                link.send_page(b"late", pattern(10))

    run(work())


def test_after_link_closed_no_landing_is_written_published_or_discarded(
    run: Run, tmp_path: Path, transport: str
) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport, **small_steps(transport)) as (_, b, link):
            for i in range(8):
                link.send_page(b"%d" % i, pattern(4 * MIB, i))
            await b.until(lambda: len(b.landings.claimed) > 1)
            b.links[0].close("over")
            await b.until(lambda: b.closed == ["over"])
            ends = len(b.landings.published), len(b.landings.discarded)
            images = [bytes(slot.view) for slot in b.landings.discarded]
            await asyncio.sleep(0.1)
            assert ends == (len(b.landings.published), len(b.landings.discarded))
            assert images == [bytes(slot.view) for slot in b.landings.discarded]
            assert not any(any(image) for image in images)

    run(work())


@pytest.mark.parametrize(("header", "size"), [(b"", 10), (b"h" * 257, 10), (b"h", 0)])
def test_a_page_out_of_bounds_is_refused_before_it_is_queued(
    run: Run, tmp_path: Path, transport: str, header: bytes, size: int
) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport) as (_, _, link):
            with pytest.raises(LinkError) as caught:
                link.send_page(header, memoryview(bytearray(size)))
            assert caught.value.reason == "page-bounds"

    run(work())


def test_a_message_too_large_is_refused_and_messages_that_cannot_leave_are_bounded(
    run: Run, tmp_path: Path, transport: str
) -> None:
    async def work() -> None:
        async with linked(tmp_path, transport) as (_, b, link):
            with pytest.raises(LinkError, match="split it"):
                link.send(b"x" * (MAX_MESSAGE + 1))
            with pytest.raises(LinkError) as caught:
                for _ in range(10_000):  # without giving the loop a chance to send
                    link.send(b"x" * 100_000)
            assert caught.value.reason == "queue-full"
            await b.until(lambda: len(b.messages) > 600)
            link.send(b"room again")

    run(work())


def test_thirty_links_leave_no_thread_no_descriptor_and_no_task(run: Run, tmp_path: Path, transport: str) -> None:
    def held() -> tuple[int, int, int]:
        return sockets(), threading.active_count(), len(asyncio.all_tasks())

    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, b, address):
            counts = []
            for i in range(31):  # the first is the warm-up
                link = await a.endpoint.connect("b", address)
                await link.send_page(b"page", pattern(5000))
                (link if i % 2 else b.links[-1]).close("done")
                await a.until(lambda i=i: len(a.closed) == i + 1)  # type: ignore[misc]
                await b.until(lambda i=i: len(b.closed) == i + 1)  # type: ignore[misc]
                if not counts:
                    await asyncio.sleep(0.1)
                    counts.append(held())
            await a.until(lambda: all(now <= then for now, then in zip(held(), counts[0], strict=True)))

    run(work())


def test_a_connect_that_is_cancelled_at_any_moment_leaves_no_link(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, b, address):
            for after_s in (0.0, 0.0, 1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3):
                connecting = asyncio.create_task(a.endpoint.connect("b", address))
                await asyncio.sleep(after_s)
                connecting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    (await connecting).close("done")
                await a.until(lambda: not a.endpoint._links, 5)
            await b.until(lambda: not b.endpoint._links, 5)

    run(work())


def test_one_peer_cannot_hold_more_than_its_share_of_links(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, b, address):
            twin = endpoint(transport, a.keys, a)  # the same key from elsewhere: only b can count them all
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


def test_round_trip_and_bandwidth_are_measured_on_the_way(run: Run, tmp_path: Path, transport: str) -> None:
    """T5."""

    async def work() -> None:
        async with linked(tmp_path, transport, timing=QUICK) as (a, _, link):
            await asyncio.gather(*(link.send_page(b"page", pattern(24 * MIB)) for _ in range(4)))
            await a.until(lambda: link.stats.rtt_s is not None)
            assert link.stats.rtt_s is not None and 0 < link.stats.rtt_s < 5
            assert link.stats.bandwidth_bps is not None and link.stats.bandwidth_bps > 1e6

    run(work())


@needs_ipv6
def test_ipv6_works_as_ipv4_does(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, b, _):
            address = await b.endpoint.listen("[::1]:0")
            assert address.startswith("[::1]:")
            link = await a.endpoint.connect("b", address)
            await link.send_page(b"page", pattern(100_000))
            await b.landed(1)
            assert b.landings.payload(b"page") == pattern(100_000)

    run(work())


@needs_ipv6
def test_a_host_that_listens_on_every_interface_is_reached_over_ipv4_and_ipv6(
    run: Run, tmp_path: Path, transport: str
) -> None:
    """Both kinds of its addresses are what it then advertises."""

    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, b, _):
            address = await b.endpoint.listen("[::]:0")
            port = address.rpartition(":")[2]
            for host in ("127.0.0.1", "[::1]"):
                link = await a.endpoint.connect("b", f"{host}:{port}")
                await link.send_page(host.encode(), pattern(100_000))
                await b.page(host.encode())

    run(work())


def test_a_name_is_tried_at_each_of_its_addresses(
    run: Run, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many a name has an IPv6 address first that leads nowhere."""

    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, b, address):
            family, real = (await resolve(parse(address)))[0]
            with socket.socket(family, socket.SOCK_DGRAM) as unused:
                unused.bind(("127.0.0.1", 0))
                dead = unused.getsockname()

            async def of_a_name(_: Address) -> list[tuple[int, SocketAddress]]:
                return [(family, dead), (family, real)]

            monkeypatch.setattr(f"transport.{transport}.resolve", of_a_name)
            link = await a.endpoint.connect("b", "b.example:7600")
            await link.send_page(b"page", pattern(100))
            await b.landed(1)

    run(work())


@needs_ipv6
def test_a_link_local_address_works(run: Run, tmp_path: Path, transport: str) -> None:
    found = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    local = next(((f[0], f[5]) for f in found if f[0].startswith("fe80") and f[4] == "80"), None)
    if local is None:
        pytest.skip("no interface of this machine has a link-local IPv6 address")
    host = ":".join(local[0][i : i + 4] for i in range(0, 32, 4))

    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, b, _):
            address = await b.endpoint.listen(f"[{host}%{local[1]}]:0")
            assert f"%{local[1]}]:" in address
            link = await a.endpoint.connect("b", address)
            await link.send_page(b"page", pattern(1000))
            await b.landed(1)
            assert b.landings.payload(b"page") == pattern(1000)

    run(work())


def test_an_address_in_use_is_refused_naming_it(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, transport) as (a, _, address):
            with pytest.raises(LinkError, match=address.replace(".", r"\.")) as caught:
                await a.endpoint.listen(address)
            assert caught.value.reason == "cannot-listen"

    run(work())


def test_a_peer_that_is_not_there_is_unreachable_in_words(run: Run, tmp_path: Path, transport: str) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, transport, timing=Timing(greet_s=0.5)) as (a, b, address):
            await b.endpoint.close()
            with pytest.raises(LinkError, match="is its daemon running") as caught:
                await a.endpoint.connect("b", address)
            assert caught.value.reason == "unreachable"

    run(work())


def test_no_bytes_object_larger_than_a_record_is_made_while_data_moves(
    run: Run, tmp_path: Path, transport: str
) -> None:
    """T4, and issue 3's acceptance 6: state crosses Python as memoryviews only. 1 GiB over TCP, 256 MiB over QUIC."""

    async def work() -> None:
        async with linked(tmp_path, transport) as (_, b, link):
            page, rooms = pattern(16 * MIB), [mapped(16 * MIB) for _ in range(4)]
            await link.send_page(b"warm", page[:100])
            turn = iter(range(1 << 30))
            b.landings.claim = lambda header, n: _Into(rooms[next(turn) % 4])  # type: ignore[method-assign, assignment]
            tracemalloc.start()
            for _ in range(16 if transport == "tcp" else 4):
                await asyncio.gather(*(link.send_page(b"page", page) for _ in range(4)))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < MIB, "all moved with less than one record of Python memory"
            assert all(room == page for room in rooms)

    run(work())
