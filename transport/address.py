"""Host and port as people write them: `host:port`, `[2001:db8::1]:port`, `[fe80::1%eth0]:port`.

Parses, formats, resolves, and says which addresses no other machine can use. Owns no socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any, Final

from transport.link import LinkError

SocketAddress = tuple[Any, ...]
_MAX_SCOPE: Final = (1 << 32) - 1  # u32 of a struct sockaddr_in6


@dataclass(frozen=True)
class Address:
    host: str  # name, IPv4, or IPv6 with an optional %zone; no brackets
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """Raises LinkError("bad-address") for anything that is not exactly one host and one port."""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]:")
        ok = bracket == "]:" and ":" in host
    else:
        host, colon, port = text.rpartition(":")
        ok = colon == ":" and ":" not in host
    if ok and ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            ok = False
    if not (ok and host and _number(port, 65535)):
        raise LinkError("bad-address", f"{text!r} is no address: write host:port or [ipv6]:port")
    return Address(host, int(port))


def _number(text: str, most: int) -> bool:
    """Plain digits of a number up to `most`; no more digits than `most` has, which Python would take its time for."""
    return text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most


def from_socket(name: SocketAddress) -> Address:
    """From `getsockname` or `getpeername`; the zone of a link-local address is kept by name."""
    host = str(name[0])
    if len(name) == 4 and name[3] and "%" not in host:
        host = f"{host}%{socket.if_indextoname(name[3])}"
    return Address(host, int(name[1]))


async def resolve(address: Address, *, passive: bool = False) -> list[tuple[int, SocketAddress]]:
    """(family, socket address) to try in order. A link-local zone becomes the scope id (uvloop's resolver drops it)."""
    with contextlib.suppress(ValueError):
        ip = ipaddress.ip_address(address.host)
        if isinstance(ip, ipaddress.IPv4Address):
            return [(socket.AF_INET, (address.host, address.port))]
        host = address.host.partition("%")[0]
        return [(socket.AF_INET6, (host, address.port, 0, _scope(ip.scope_id)))]
    flags = socket.AI_PASSIVE if passive else 0
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except (socket.gaierror, UnicodeError) as error:
        raise LinkError("unknown-host", f"{address.host} does not resolve ({error}): check the address") from error
    return [(int(family), sockaddr) for family, _, _, _, sockaddr in found]


def _scope(zone: str | None) -> int:
    if zone is None:
        return 0
    try:
        return int(zone) if _number(zone, _MAX_SCOPE) else socket.if_nametoindex(zone)
    except (OSError, ValueError):  # the latter of a zero byte
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise LinkError("unknown-host", f"there is no interface {zone}, only {names}: correct the zone") from None


def refuse_advertising(address: Address) -> str | None:
    """Why another machine could never use this address, or None. Names are believed, except localhost."""
    if address.port == 0:
        return f"{address} has no port: advertise the one that is listened on"
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        local = address.host.rstrip(".").lower()
        if local == "localhost" or local.endswith(".localhost"):
            return f"{address} is this machine for whoever reads it: advertise an address that peers can reach"
        return None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return f"{address} is loopback: advertise an address that peers can reach"
    if ip.is_unspecified:
        return f"{address} means every interface: advertise one that peers can reach"
    if ip.is_multicast:
        return f"{address} is a multicast address: advertise one host's"
    return None
