"""What one would write first: an asyncio stream over ssl, TLS 1.3 with both certificates checked, one connection."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

from both_ends import MEMORY, Once, answer, memory, run, say

from transport.keys import KeyStore

PIECE = 256 << 10


def context(folder: Path, name: str, other: str) -> ssl.SSLContext:
    made = KeyStore(folder / name)
    return made.server_context() if name == "b" else made.client_context(other)


def receive(block: int) -> NoReturn:
    folder, landed = Path(tempfile.mkdtemp()), memory(fill=False)
    stores = {name: KeyStore(folder / name) for name in "ab"}
    for name, store in stores.items():
        store.new(name)
    stores["a"].trust("b", stores["b"].show()[0])
    stores["b"].trust("a", stores["a"].show()[0])

    async def land(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = 0
        while piece := await reader.read(PIECE):
            first = min(len(piece), MEMORY - at)
            landed[at : at + first] = piece[:first]
            at += len(piece)
            if at >= MEMORY:
                writer.write(b"1")
                at = 0

    async def serve() -> None:
        tls = context(folder, "b", "a")
        server = await asyncio.start_server(land, "127.0.0.1", 0, ssl=tls, limit=PIECE)
        say({"port": server.sockets[0].getsockname()[1], "folder": str(folder)})
        await server.serve_forever()

    threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
    answer(landed)


def prepare(setup: Any, source: memoryview, block: int) -> Once:
    loop = asyncio.new_event_loop()
    tls = context(Path(setup["folder"]), "a", "b")
    connecting = asyncio.open_connection("127.0.0.1", setup["port"], ssl=tls, server_hostname="zc-handoff")
    reader, writer = loop.run_until_complete(connecting)

    async def send() -> None:
        for start in range(0, MEMORY, PIECE):
            writer.write(source[start : start + PIECE])
            await writer.drain()
        await reader.readexactly(1)

    return lambda: loop.run_until_complete(send())


if __name__ == "__main__":
    run(receive, prepare)
