"""Both transports behind one `Endpoint`: TCP and, where it was built, QUIC on the same port number.

A peer's address says which: `quic://host:port`, or `host:port` for TCP. Light to import: the engine is loaded when an
endpoint is made. Owns both endpoints.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Final

from transport.link import Endpoint, Link, LinkError

SCHEME: Final = "quic://"
INSTALL: Final = (
    "apt-get install libngtcp2-dev libngtcp2-crypto-gnutls-dev libgnutls28-dev, or brew install libngtcp2, "
    "then scripts/setup"
)
INSTALL_AEAD: Final = "apt-get install libipsec-mb-dev, then scripts/setup"


def built() -> bool:
    return importlib.util.find_spec("native._quic") is not None


def split_scheme(address: str) -> tuple[str, str]:
    """("quic" or "tcp", the rest). An unknown scheme stays in the rest, which then is no address."""
    return ("quic", address.removeprefix(SCHEME)) if address.startswith(SCHEME) else ("tcp", address)


def over_same(told: Sequence[str], configured: Iterable[str]) -> list[str]:
    """Addresses that a peer told, over every transport that the configured ones use: whoever wrote `quic://` meant it,
    and TCP may be blocked or lossy there."""
    schemes = sorted({split_scheme(address)[0] for address in configured}) or ["tcp"]
    return [f"{SCHEME if scheme == 'quic' else ''}{address}" for scheme in schemes for address in told]


class BothEndpoints:
    def __init__(self, tcp: Endpoint, quic: Endpoint | None) -> None:
        self._tcp = tcp
        self._quic = quic

    @property
    def transports(self) -> tuple[str, ...]:
        return ("tcp", "quic") if self._quic is not None else ("tcp",)

    async def listen(self, address: str) -> str:
        """The bound address; a port that was left open is the same for both."""
        bound = await self._tcp.listen(address)
        if self._quic is not None:
            await self._quic.listen(bound)
        return bound

    async def connect(self, peer: str, address: str) -> Link:
        scheme, where = split_scheme(address)
        if scheme == "tcp":
            return await self._tcp.connect(peer, where)
        if self._quic is None:
            raise LinkError("no-quic", f"{address} needs QUIC, which this host was built without: {INSTALL}")
        return await self._quic.connect(peer, where)

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in (self._tcp, self._quic) if one is not None))
