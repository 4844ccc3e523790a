"""Two hosts on loopback, over QUIC: what `hosts` has for TCP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from transport.quic import QuicEndpoint
from transport.quic_link import QuicLink

from .hosts import Host


class QuicHost(Host):
    endpoint: QuicEndpoint  # type: ignore[assignment]

    def open(self, **options: Any) -> QuicEndpoint:  # type: ignore[override]
        self.endpoint = QuicEndpoint(self.keys, self, **options)
        return self.endpoint


@contextlib.asynccontextmanager
async def two_hosts(directory: Path, **options: Any) -> AsyncIterator[tuple[QuicHost, QuicHost, str]]:
    """(a, b, b's address): each trusts the other, b listens. Checks that closing leaves no thread behind."""
    a, b = QuicHost(directory, "a"), QuicHost(directory, "b")
    a.trust(b)
    b.trust(a)
    try:
        a.open(**options)
        address = await b.open(**options).listen("127.0.0.1:0")
        yield a, b, address
    finally:
        await a.endpoint.close()
        await b.endpoint.close()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("zc-")]
    assert not names, names


@contextlib.asynccontextmanager
async def linked(directory: Path, **options: Any) -> AsyncIterator[tuple[QuicHost, QuicHost, QuicLink]]:
    async with two_hosts(directory, **options) as (a, b, address):
        link = await a.endpoint.connect("b", address)
        await b.until(lambda: bool(b.links))
        yield a, b, link
