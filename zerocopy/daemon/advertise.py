"""Which addresses this host tells its peers, and which of theirs it believes.

An address that only its own machine can use is neither told nor believed, with one exception: hosts on one machine,
who know each other by loopback. Owns nothing. Bound: `MAX_ADVERTISED` addresses.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import Final

import psutil

from transport.address import Address, parse, refuse_advertising
from transport.link import LinkError

MAX_ADVERTISED: Final = 8

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def advertised(bound: str, setting: str | None) -> tuple[str, ...]:
    """What HELLO says: the setting; else the bound address, or every interface's when bound to all of them. Raises
    LinkError for a setting that no peer could use."""
    listening = _ip(parse(bound))
    if setting is not None:
        why = refuse_advertising(parse(setting))
        if why is not None and not (listening and listening.is_loopback):
            raise LinkError("bad-advertise", f"cannot advertise this: {why}, with --advertise")
        return (setting,)
    if listening is None or not listening.is_unspecified:
        return (bound,)
    port = parse(bound).port
    addresses = (str(Address(str(ip), port)) for ip in _interfaces() if listening.version == 6 or ip.version == 4)
    return tuple(dict.fromkeys(addresses))[:MAX_ADVERTISED]


def believed(told: Sequence[str], configured: Iterable[str]) -> tuple[list[str], list[str]]:
    """(addresses worth trying, why not the others). Names are not resolved on a peer's word."""
    same_machine = all(is_loopback(address) for address in configured)
    good, refused = [], []
    for text in told:
        try:
            why = refuse_advertising(parse(text))
        except LinkError as error:
            why = str(error)
        if same_machine and is_loopback(text):
            why = None
        if why is not None:
            refused.append(f"{why}; start it with --listen or --advertise")
        elif _usable(_ip(parse(text))):
            good.append(text)
    return good, refused


def is_loopback(text: str) -> bool:
    """Whether an address, with its scheme or without, is this machine's own; False for what is no address."""
    try:
        address = parse(text.rpartition("://")[2])
    except LinkError:
        return False
    ip = _ip(address)
    return address.host == "localhost" if ip is None else ip.is_loopback


def _usable(ip: _Ip | None) -> bool:
    """A link-local address has a meaning only together with an interface of this host, which the peer cannot know."""
    return ip is not None and not ip.is_link_local


def _ip(address: Address) -> _Ip | None:
    try:
        return ipaddress.ip_address(address.host)
    except ValueError:
        return None


def _interfaces() -> Iterable[_Ip]:
    """Addresses of interfaces that are up, IPv4 first; none that only this machine or one wire could use."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    wanted = (socket.AF_INET, socket.AF_INET6)
    found = [
        ipaddress.ip_address(entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in wanted
    ]
    return sorted((ip for ip in found if not (ip.is_loopback or ip.is_link_local)), key=lambda ip: ip.version)
