"""A stranger to a TCP port gets nothing and costs nothing (issue 2, acceptance 6; X1). Keys are in `test_strangers`."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from transport.frames import (
    APPLICATION,
    INTERNAL,
    VERSION,
    Announce,
    Bye,
    Cancel,
    Done,
    Hello,
    OpenStream,
    PageShape,
    Ping,
    StreamReady,
    decode,
    encode,
    frame,
)
from transport.keys import KeyStore
from transport.link import LinkError
from transport.tcp_door import StrangerLimits, origin
from transport.tcp_link import MAX_STREAMS, Timing

from .conftest import Run
from .hosts import Host, pattern, sockets, two_hosts

BRISK = Timing(greet_s=0.4)
HELLO = frame(INTERNAL, encode(Hello(VERSION)))


async def answer(address: str, data: bytes, *, finish: bool = False) -> bytes:
    """Everything the port says to `data`, until it closes the connection."""
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    try:
        writer.write(data)
        if finish:
            writer.write_eof()
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


STRANGE = {
    "nothing": b"",
    "zeros": bytes(5000),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "preamble of no stream": b"ZCB1" + b"\0" * 16,
    "preamble and more": b"ZCB1" + os.urandom(4096),
    "half a preamble": b"ZCB1" + b"\0" * 5,
    "first letter only": b"Z",
    "broken TLS": b"\x16\x03\x01\x40\x00" + os.urandom(4096),
    "TLS record header only": b"\x16\x03\x01",
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE.keys())
def test_random_bytes_and_other_protocols_get_no_answer_and_are_gone_by_the_deadline(
    run: Run, tmp_path: Path, data: bytes
) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path, timing=BRISK) as (_, b, address):
            before, threads = sockets(), threading.active_count()
            said = await answer(address, data)
            # TLS itself may answer a TLS record with an alert; nothing else says a word
            assert said == b"" or (data[:1] == b"\x16" and said[0] == 0x15 and len(said) < 16)
            assert b.links == [] and threading.active_count() == threads
            await b.until(lambda: b.endpoint.strangers.refused == 1)
            await b.until(lambda: sockets() == before)

    run(work())


def test_a_port_scanner_that_closes_at_once_leaves_nothing(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            before = sockets()
            for _ in range(50):
                _, writer = await asyncio.open_connection(*address.rsplit(":", 1))
                writer.transport.abort()
            await b.until(lambda: b.endpoint.strangers.refused == 50)
            await b.until(lambda: sockets() == before)
            await a.endpoint.connect("b", address)

    run(work())


def test_a_crowd_of_strangers_is_bounded_and_a_peer_still_gets_in(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        limits = StrangerLimits(total=16, each=8)
        async with two_hosts(tmp_path, limits=limits, timing=Timing(greet_s=60)) as (a, b, address):
            crowd = [await asyncio.open_connection(*address.rsplit(":", 1)) for _ in range(60)]
            for i, (_, writer) in enumerate(crowd):
                writer.write(b"Z" if i % 2 else b"\x16\x03")
            await b.until(lambda: b.endpoint.strangers.accepted == 60)
            link = await a.endpoint.connect("b", address)
            await link.send_page(b"page", pattern(1000))
            assert b.endpoint.strangers.refused >= 60 - limits.each, "and not at a deadline: that is a minute away"
            for _, writer in crowd:
                writer.transport.abort()

    run(work())


def test_a_slow_stranger_is_cut_off_at_the_deadline_however_it_dribbles(run: Run, tmp_path: Path) -> None:
    async def dribble(writer: asyncio.StreamWriter, first: bytes) -> None:
        for byte in itertools.chain(first, itertools.repeat(0)):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    async def work() -> None:
        async with two_hosts(tmp_path, timing=BRISK) as (_, b, address):
            for first in (b"ZCB1", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
                _, writer = await asyncio.open_connection(*address.rsplit(":", 1))
                with pytest.raises((ConnectionError, RuntimeError)):  # uvloop's word for a closed transport
                    await asyncio.wait_for(dribble(writer, first), 30)
                writer.close()
            await b.until(lambda: b.endpoint.strangers.refused == 2)

    run(work())


def test_a_client_without_a_certificate_is_refused(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (_, b, address):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            host, port = address.rsplit(":", 1)
            with pytest.raises((OSError, EOFError)):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="x")
                writer.write(frame(INTERNAL, encode(Hello(VERSION))))
                if not await reader.read(100):
                    raise EOFError
            await b.until(lambda: b.endpoint.strangers.refused == 1)
            assert b.links == [] and b.messages == []

    run(work())


def test_older_tls_is_refused(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            context = a.keys.client_context("b")
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
            host, port = address.rsplit(":", 1)
            with pytest.raises(OSError):
                await asyncio.open_connection(host, int(port), ssl=context, server_hostname="x")
            assert b.links == []

    run(work())


class _Credulous(KeyStore):
    """Its TLS accepts any certificate of `also`, as a mistake in the use of TLS would."""

    also = ""

    def server_context(self) -> ssl.SSLContext:
        context = super().server_context()
        context.load_verify_locations(cadata=self.also)
        return context

    def client_context(self, peer: str) -> ssl.SSLContext:
        context = super().client_context(peer)
        context.load_verify_locations(cadata=self.also)
        return context


@pytest.mark.parametrize("fooled", ["server", "client"])
def test_a_key_outside_the_table_is_refused_even_if_tls_let_it_in(run: Run, tmp_path: Path, fooled: str) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            c = Host(tmp_path, "c")
            (b if fooled == "server" else a).keys.__class__ = _Credulous
            _Credulous.also = c.keys.show()[0]
            if fooled == "server":
                c.trust(b)
                caller, wanted = c, "b"
                c.open()
            else:
                c.trust(a)
                address = await c.open().listen("127.0.0.1:0")
                caller, wanted = a, "b"
            with pytest.raises(LinkError) as caught:
                await caller.endpoint.connect(wanted, address)
            assert caught.value.reason in ("refused", "wrong-key")
            assert a.links == b.links == c.links == []
            await c.endpoint.close()

    run(work())


def test_the_servers_certificate_tells_a_stranger_nothing(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            host, port = address.rsplit(":", 1)
            pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=20)
            assert pem == b.keys.show()[0]
            shown, other = (x509.load_pem_x509_certificate(each.encode()) for each in (pem, a.keys.show()[0]))
            # Field by field: a host's short name may well lie in the random bytes of a key.
            (name,) = shown.subject
            assert shown.issuer == shown.subject != other.subject
            assert isinstance(name.value, str) and re.fullmatch("[0-9a-f]{32}", name.value)
            assert shown.serial_number != other.serial_number
            assert (shown.not_valid_before_utc, shown.not_valid_after_utc) == (
                other.not_valid_before_utc,
                other.not_valid_after_utc,
            ), "nor when it was made"
            assert {type(each.value) for each in shown.extensions} == {
                x509.BasicConstraints, x509.KeyUsage, x509.ExtendedKeyUsage, x509.SubjectKeyIdentifier,
            }  # fmt: skip

    run(work())


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (encode(Hello(VERSION + 1)), "version-mismatch"),
        (b"\x01\x01", "frame-malformed"),
        (b"\xff" * 9, "frame-malformed"),
    ],
)
def test_an_authenticated_peer_of_another_version_is_told_so(
    run: Run, tmp_path: Path, first: bytes, reason: str
) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            host, port = address.rsplit(":", 1)
            context = a.keys.client_context("b")
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="x")
            writer.write(frame(INTERNAL, first))
            said = await reader.read()
            while reader._buffer or not reader.at_eof():  # type: ignore[attr-defined]
                said += await reader.read()
            hello = frame(INTERNAL, encode(Hello(VERSION)))
            assert said.startswith(hello)
            assert decode(said[len(hello) + 5 :]) == Bye(reason)
            assert b.links == []
            writer.close()

    run(work())


ID, PAGE = bytes(16), PageShape(10, 4096, b"h").packed


@pytest.mark.parametrize(
    "frames",
    [
        [frame(APPLICATION, b"before the hello")],
        [frame(INTERNAL, encode(Ping(1)))],
        [HELLO, HELLO],
        [HELLO, frame(INTERNAL, encode(OpenStream(ID, bytes(32)))) * 2],
        [HELLO, frame(INTERNAL, encode(StreamReady(ID)))],
        [HELLO, frame(INTERNAL, encode(Done((0,))))],
        [HELLO, frame(INTERNAL, encode(Announce(2**63, PAGE)))],
        [HELLO, frame(INTERNAL, encode(Announce(0, PAGE[:11])))],
        [HELLO, frame(INTERNAL, encode(Cancel(2**64 - 1)))],
        [HELLO, b"\xff" * 5],
        [HELLO, frame(7, b"")],
    ],
)
def test_an_authenticated_peer_that_breaks_the_protocol_is_closed_by_name(
    run: Run, tmp_path: Path, frames: list[bytes]
) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            host, port = address.rsplit(":", 1)
            context = a.keys.client_context("b")
            _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="x")
            for data in frames:
                writer.write(data)
            await b.until(lambda: b.endpoint.strangers.refused == 1 or b.closed == ["frame-malformed"])
            assert not b.messages and not b.landings.claimed
            writer.close()

    run(work())


def test_streams_announced_and_never_opened_do_not_add_up(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            host, port = address.rsplit(":", 1)
            context = a.keys.client_context("b")
            _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="x")
            opened = [frame(INTERNAL, encode(OpenStream(os.urandom(16), bytes(32)))) for _ in range(500)]
            writer.write(HELLO + b"".join(opened))
            await b.until(lambda: len(b.endpoint.expected) == MAX_STREAMS)
            writer.close()
            await b.until(lambda: len(b.closed) == 1)
            assert not b.endpoint.expected

    run(work())


def test_addresses_count_by_host_and_ipv6_by_network() -> None:
    assert origin(("192.0.2.7", 1)) == "192.0.2.7" == origin(("::ffff:192.0.2.7", 1, 0, 0))
    assert origin(("2001:db8::1", 1, 0, 0)) == origin(("2001:db8::ffff:2", 2, 0, 0)) == "2001:db8::/64"
    assert origin(("fe80::1%eth0", 1, 0, 2)) == "fe80::/64"


@pytest.mark.parametrize("whose", ["another-peer", "nobody"])
def test_a_certificate_that_tls_let_through_is_still_compared(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """TLS already takes no other key. Were that ever loosened, the link's own look is what is left, on either side."""
    context = KeyStore._context

    def lax(self: KeyStore, protocol: Any, authorities: str) -> ssl.SSLContext:
        everybody = authorities + "".join(host.keys.show()[0] for host in hosts)
        return context(self, protocol, everybody)

    hosts = list[Host]()
    monkeypatch.setattr(KeyStore, "_context", lax)

    async def work() -> None:
        async with two_hosts(tmp_path) as (a, b, address):
            c = Host(tmp_path, "c")
            hosts.extend((a, b, c))
            where = await c.open().listen("127.0.0.1:0")
            if whose == "another-peer":
                c.trust(a)
                a.trust(c)
                dialling = a.endpoint.connect("b", where)
            else:
                c.trust(b)
                dialling = c.endpoint.connect("b", address)
            with pytest.raises(LinkError):
                await dialling
            assert a.links == b.links == c.links == []
            await c.endpoint.close()

    run(work())
