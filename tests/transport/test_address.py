"""Addresses as people write them, and which of them are of use to another machine (P of issue 3's Paths)."""

from __future__ import annotations

import asyncio
import socket

import pytest

from transport.address import Address, from_socket, parse, refuse_advertising, resolve
from transport.link import LinkError

from .conftest import Run

GOOD = {
    "127.0.0.1:80": ("127.0.0.1", 80),
    "host.example:0": ("host.example", 0),
    "[::1]:65535": ("::1", 65535),
    "[fe80::1%eth0]:7000": ("fe80::1%eth0", 7000),
    "[2001:db8::1]:1": ("2001:db8::1", 1),
}


@pytest.mark.parametrize("text", GOOD)
def test_good_addresses_parse_and_print_as_written(text: str) -> None:
    assert parse(text) == Address(*GOOD[text])
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", ":", "host", "host:", ":80", "host:-1", "host:65536", "host:8o", "::1:80", "[::1]", "[::1]80", "[host]:80",
     "[1.2.3.4]:80", "[::1]:80:80", "a:b:80", "host:٣", "[::1:80", "[fe80::%]:1",
     "host:" + "9" * 5000],
)  # fmt: skip
def test_what_is_no_address_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(LinkError, match="is no address") as caught:
        parse(text)
    assert caught.value.reason == "bad-address"


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:80", "127.9.9.9:80", "localhost:80", "LOCALHOST.:80", "a.localhost:80", "[::1]:80",
     "[::ffff:127.0.0.1]:80", "0.0.0.0:80", "[::]:80", "224.0.0.1:80", "[ff02::1]:80", "192.0.2.1:0"],
)  # fmt: skip
def test_addresses_no_other_machine_can_use_are_not_advertised(text: str) -> None:
    why = refuse_advertising(parse(text))
    assert why is not None and "advertise" in why


@pytest.mark.parametrize("zone", ["4294967296", "9" * 5000, "²", "no-such-interface", "a\0b", "-1"])
def test_a_zone_that_no_interface_has_is_refused_by_name(zone: str, run: Run) -> None:
    """One of more than 32 bits, in a peer's HELLO, was no LinkError over QUIC and ended the dialling of that peer."""

    async def work() -> None:
        with pytest.raises(LinkError, match="there is no interface") as caught:
            await resolve(parse(f"[2001:db8::1%{zone}]:5"))
        assert caught.value.reason == "unknown-host"

    run(work())


@pytest.mark.parametrize("text", ["192.0.2.1:80", "[2001:db8::1]:80", "[fe80::1%eth0]:80", "host.example:80"])
def test_other_addresses_are(text: str) -> None:
    assert refuse_advertising(parse(text)) is None


def test_names_and_zones_resolve_and_bad_ones_say_so(run: Run) -> None:
    async def work() -> None:
        assert (socket.AF_INET, ("127.0.0.1", 5)) in await resolve(parse("127.0.0.1:5"))
        (family, sockaddr), *_ = await resolve(parse("[::1]:5"))
        assert family == socket.AF_INET6 and sockaddr[:2] == ("::1", 5)
        index, name = socket.if_nameindex()[0]
        (_, sockaddr), *_ = await resolve(parse(f"[fe80::1%{name}]:5"))
        assert sockaddr[3] == index
        assert str(from_socket(("fe80::1", 5, 0, index))) == f"[fe80::1%{name}]:5"
        for host in ("name.invalid", "x" * 300, "fe80::1%no-such-interface"):
            with pytest.raises(LinkError) as caught:
                await asyncio.wait_for(resolve(Address(host, 1)), 20)
            assert caught.value.reason == "unknown-host"

    run(work())
