"""The two ends of a link bench over a real link: what is asked is answered, and nothing is given to what was not."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from transport.keys import KeyStore, trusting_pair
from transport.link import LinkError
from transport.tcp import TcpEndpoint
from transport.tcp_link import TcpLink
from zerocopy.cli import bench_ends
from zerocopy.cli.bench_ends import (
    Ask,
    CeilingOpen,
    LandingEnd,
    OpenCeiling,
    Prepare,
    Ready,
    Received,
    SendingEnd,
    Usage,
    _say,
    arena,
    send_plain,
)
from zerocopy.cli.iperf3 import read_report

PAGE = 64 << 10
MEMORY = arena()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    trusting_pair(folder, "a", "b")
    return folder


@contextlib.asynccontextmanager
async def joined(keys: Path) -> AsyncIterator[tuple[SendingEnd, TcpLink]]:
    landing = TcpEndpoint(KeyStore(keys / "b"), LandingEnd("127.0.0.1"))
    end = SendingEnd(MEMORY)
    sending = TcpEndpoint(KeyStore(keys / "a"), end, streams=2, record_bytes=16 << 10)
    try:
        yield end, await sending.connect("b", await landing.listen("127.0.0.1:0"))
    finally:
        await sending.close()
        await landing.close()


def test_pages_arrive_until_the_time_is_up_and_are_all_counted(keys: Path) -> None:
    async def scenario() -> None:
        async with joined(keys) as (end, link):
            ready: Ready = await end.ask(link, Prepare(PAGE), Ready)
            assert ready.slots == bench_ends.MAX_SLOTS
            load = await end.load(link, PAGE, ready.slots, 0.1)
            assert load.nbytes == PAGE * len(load.page_s) > 0
            assert load.nbytes == link.stats.page_bytes_sent
            assert load.elapsed_s >= 0.1 and all(0 < s <= load.elapsed_s for s in load.page_s)

    uvloop.run(scenario())


def test_what_is_paced_is_never_said_to_be_faster(keys: Path) -> None:
    """Its last page arrives before its share of the time is over: with few pages that was a third too much."""

    async def scenario() -> None:
        async with joined(keys) as (end, link):
            ready: Ready = await end.ask(link, Prepare(PAGE), Ready)
            bps = 8 * PAGE / 0.05  # three pages or so
            load = await end.load(link, PAGE, ready.slots, 0.12, bps)
            assert 0 < 8 * load.nbytes / load.elapsed_s <= bps * (1 + 1e-9)

    uvloop.run(scenario())


def test_the_other_ends_processor_time_comes_with_the_round_trip(keys: Path) -> None:
    async def scenario() -> None:
        async with joined(keys) as (end, link):
            first, rtt = await end.usage(link)
            second, _ = await end.usage(link)
            assert 0 < first.cpu_s <= second.cpu_s and rtt > 0

    uvloop.run(scenario())


def test_a_page_that_was_not_prepared_ends_the_link(keys: Path) -> None:
    async def scenario() -> None:
        async with joined(keys) as (end, link):
            ready: Ready = await end.ask(link, Prepare(PAGE), Ready)
            with pytest.raises(LinkError):
                await end.load(link, PAGE // 2, ready.slots, 5.0)

    uvloop.run(scenario())


@pytest.mark.parametrize("size", [0, bench_ends.MAX_PAGE_BYTES + 1, "1"])
def test_a_request_out_of_bounds_ends_the_link(keys: Path, size: Any) -> None:
    async def scenario() -> None:
        async with joined(keys) as (end, link):
            with pytest.raises(LinkError, match="gave no Ready"):
                await end.ask(link, Prepare(size), Ready)

    uvloop.run(scenario())


def test_a_plain_connection_counts_what_came_after_the_token(keys: Path) -> None:
    async def scenario() -> None:
        async with joined(keys) as (end, link):
            opened: CeilingOpen = await end.ask(link, OpenCeiling("plaintext", 0.05), CeilingOpen)
            assert opened.port is not None
            await asyncio.to_thread(send_plain, "127.0.0.1", opened.port, opened.token, MEMORY, 0.05)
            received: Received = await end.answer(Received)
            assert received.nbytes > 0 and received.nbytes % bench_ends.PLAIN_BLOCK == 0

    uvloop.run(scenario())


def test_a_plain_connection_without_the_token_is_not_read(keys: Path) -> None:
    async def scenario() -> None:
        async with joined(keys) as (end, link):
            opened: CeilingOpen = await end.ask(link, OpenCeiling("plaintext", 0.05), CeilingOpen)
            with socket.create_connection(("127.0.0.1", opened.port or 0)) as sock:
                sock.sendall(bytes(bench_ends.TOKEN_BYTES) + b"state?")
            received: Received = await end.answer(Received)
            assert received.nbytes == 0

    uvloop.run(scenario())


def test_a_link_that_ends_takes_no_other_links_ceiling_with_it(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last measurement's link may end here after the next one's has asked."""
    monkeypatch.setattr(bench_ends, "ANSWER_S", 5.0)

    async def scenario() -> None:
        landing = TcpEndpoint(KeyStore(keys / "b"), LandingEnd("127.0.0.1"))
        ends = SendingEnd(MEMORY), SendingEnd(MEMORY)
        sending = [TcpEndpoint(KeyStore(keys / "a"), end, streams=1) for end in ends]
        try:
            address = await landing.listen("127.0.0.1:0")
            first, second = [await endpoint.connect("b", address) for endpoint in sending]
            opened: CeilingOpen = await ends[1].ask(second, OpenCeiling("plaintext", 0.05), CeilingOpen)
            first.close("measured")
            await first.ended.wait()
            await ends[1].usage(second)  # the other end has heard of both by now, or will
            await asyncio.sleep(0.2)
            await asyncio.to_thread(send_plain, "127.0.0.1", opened.port or 0, opened.token, MEMORY, 0.05)
            assert (await ends[1].answer(Received)).nbytes > 0
        finally:
            for endpoint in (*sending, landing):
                await endpoint.close()

    uvloop.run(scenario())


@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed here")
def test_an_iperf3_test_may_last_as_long_as_it_was_said_to(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server was killed after 30 s, so that with --seconds 60 there was never a figure, and iperf3 was blamed."""
    monkeypatch.setattr(bench_ends, "ANSWER_S", 0.5)

    async def scenario() -> None:
        async with joined(keys) as (end, link):
            _say(link, OpenCeiling("iperf3", 1.0))
            opened = await asyncio.wait_for(end._answers.get(), 30)
            assert isinstance(opened, CeilingOpen)
            command = ["iperf3", "-c", "127.0.0.1", "-p", str(opened.port), "-P1", "-t", "1", "-J"]
            client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert read_report((await client.communicate())[0]).gbps > 0

    uvloop.run(scenario())


def test_a_question_ends_with_its_link_and_says_so(keys: Path) -> None:
    """It was a cancellation, which nobody had asked for and no command shows as an error."""

    async def scenario() -> None:
        async with joined(keys) as (end, link):
            asking = asyncio.ensure_future(end.usage(link))
            await asyncio.sleep(0)
            link.close("cut")
            with pytest.raises(LinkError, match="ended during a measurement: cut"):
                await asking

    uvloop.run(scenario())


def test_without_iperf3_there_is_no_port_for_it(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert shutil.which("iperf3") is None

    async def scenario() -> None:
        async with joined(keys) as (end, link):
            opened: CeilingOpen = await end.ask(link, OpenCeiling("iperf3", 1.0), CeilingOpen)
            assert opened.port is None

    uvloop.run(scenario())


def test_an_answer_that_fits_nothing_is_an_error_and_a_late_one_is_ignored(keys: Path) -> None:
    async def scenario() -> None:
        async with joined(keys) as (end, link):
            end.link_message(link, msgspec.msgpack.encode(Usage(7, 1.0)))
            with pytest.raises(LinkError, match="same version"):
                end.link_message(link, b"\xc1")
            end.link_message(link, msgspec.msgpack.encode(Ask(1)))
            with pytest.raises(LinkError, match="gave no Ready"):
                await end.answer(Ready)

    uvloop.run(scenario())


def test_the_arena_is_not_zeros() -> None:
    assert len(set(MEMORY[: 1 << 12])) > 100 and any(MEMORY[-64:])
