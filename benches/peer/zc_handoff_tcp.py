"""zc-handoff's own TCP link with the daemon's defaults: encrypted, both keys checked, pages of one block."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

import uvloop
from both_ends import MEMORY, Once, answer, memory, run, say

from transport.keys import KeyStore, trusting_pair
from transport.link import Landing, Link, PageSink
from transport.tcp import TcpEndpoint

IN_FLIGHT = 32 << 20  # what a ring of that size lets a sender have on its way


class Slot:
    def __init__(self, view: memoryview) -> None:
        self.view = view

    def publish(self) -> None: ...

    def discard(self) -> None: ...


class Owner:
    """Each page lands at the offset that its header says."""

    def __init__(self, landed: memoryview | None = None) -> None:
        self._landed = landed

    def link_opened(self, link: Link) -> PageSink:
        return self

    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        assert self._landed is not None
        start = int.from_bytes(header, "little")
        return Slot(self._landed[start : start + payload_bytes])

    def link_message(self, link: Link, message: bytes) -> None: ...

    def link_closed(self, link: Link, reason: str) -> None: ...


def receive(block: int) -> NoReturn:
    folder, landed = Path(tempfile.mkdtemp()), memory(fill=False)
    _, keys = trusting_pair(folder, "a", "b")

    async def serve() -> None:
        endpoint = TcpEndpoint(keys, Owner(landed))
        say({"address": await endpoint.listen("127.0.0.1:0"), "folder": str(folder)})
        await asyncio.Event().wait()

    threading.Thread(target=uvloop.run, args=(serve(),), daemon=True).start()
    answer(landed)


def prepare(setup: Any, source: memoryview, block: int) -> Once:
    loop = uvloop.new_event_loop()

    async def connect() -> Link:
        return await TcpEndpoint(KeyStore(Path(setup["folder"], "a")), Owner()).connect("b", setup["address"])

    link = loop.run_until_complete(connect())

    async def send() -> None:
        room, sending = asyncio.Semaphore(max(1, IN_FLIGHT // block)), []
        for start in range(0, MEMORY, block):
            await room.acquire()
            sending.append(link.send_page(start.to_bytes(8, "little"), source[start : start + block]))
            sending[-1].add_done_callback(lambda _: room.release())
        await asyncio.gather(*sending)

    return lambda: loop.run_until_complete(send())


if __name__ == "__main__":
    run(receive, prepare)
