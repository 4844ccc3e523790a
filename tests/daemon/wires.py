"""Hosts joined by real links on loopback, for tests of what the daemon does with links: over `transport`, which the
fixture of that name sets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from tests.transport import hosts
from transport.keys import KeyStore
from transport.link import Link, LinkOwner, PageSink, Timing
from zerocopy.handoff.messages import AnyMessage, decode, encode

QUICK = Timing(ping_s=0.1, greet_s=2.0)
TIMEOUT_S = 30.0
SCENARIO_S = 100.0

transport = "tcp"


def keys(folder: Path, *names: str) -> dict[str, KeyStore]:
    """Keys of hosts that all trust each other."""
    stores = {name: KeyStore(folder / name) for name in names}
    for name, store in stores.items():
        store.new(name)
    for name, store in stores.items():
        for other in names:
            if other != name:
                store.trust(other, stores[other].show()[0])
    return stores


def endpoint(store: KeyStore, owner: LinkOwner) -> Any:
    return hosts.endpoint(transport, store, owner, timing=QUICK)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """On the daemon's own loop. A scenario that hangs fails: pytest's alarm does not interrupt uvloop."""
    uvloop.run(asyncio.wait_for(scenario, SCENARIO_S))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


class Refuses:
    """A sink for links that carry no pages."""

    def claim(self, header: bytes, payload_bytes: int) -> None:
        return None


class Peer:
    """The other end: remembers messages and answers nothing by itself."""

    def __init__(self, sink: PageSink | None = None) -> None:
        self.sink = sink or Refuses()
        self.links: list[Link] = []
        self.heard: list[AnyMessage] = []
        self.closed: list[str] = []
        self.on_message: Callable[[AnyMessage], None] = lambda message: None

    @property
    def link(self) -> Link:
        return self.links[-1]

    def say(self, message: AnyMessage) -> None:
        self.link.send(encode(message))

    def all(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def hear(self, kind: type, count: int = 1) -> Any:
        """The `count`-th message of that kind."""
        await until(lambda: len(self.all(kind)) >= count)
        return self.all(kind)[count - 1]

    def link_opened(self, link: Link) -> PageSink:
        self.links.append(link)
        return self.sink

    def link_message(self, link: Link, message: bytes) -> None:
        self.heard.append(decode(message))
        self.on_message(self.heard[-1])

    def link_closed(self, link: Link, reason: str) -> None:
        self.closed.append(reason)


@contextlib.asynccontextmanager
async def joined(folder: Path, a: LinkOwner, b: LinkOwner) -> AsyncIterator[Link]:
    """Two hosts "a" and "b" with one link, as "a" sees it; "a" has dialled."""
    stores = keys(folder, "a", "b")
    one, other = endpoint(stores["a"], a), endpoint(stores["b"], b)
    try:
        yield await one.connect("b", await other.listen("127.0.0.1:0"))
    finally:
        await one.close()
        await other.close()
