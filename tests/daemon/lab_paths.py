"""Two hosts of a netlab with two links between them: which one do they end up on, knowing only one address?

    scripts/netlab 100mbit 1gbit -- python -m tests.daemon.lab_paths FOLDER

B listens on every interface and advertises them; A is told the address on link 0. Prints A's /v1/status entry of B
as one line of JSON once both links are measured, and again after link 1 was taken down.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.daemon.test_peers import Node
from tests.daemon.wires import keys, until
from transport.keys import KeyStore
from zerocopy.daemon import paths
from zerocopy.daemon.advertise import advertised


def main(folder: str) -> None:
    keys(Path(folder), "a", "b")
    words = [["ip", "netns", "exec", name.upper(), sys.executable, "-m", __spec__.name, name, folder] for name in "ba"]
    listening = subprocess.Popen(words[0], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert listening.stdout is not None and listening.stdout.readline() == "listening\n"
    subprocess.run(words[1], check=True)
    listening.communicate("")


async def listen(folder: Path) -> None:
    node = Node("b", KeyStore(folder / "b"))
    bound = await node.endpoint.listen("[::]:7600")
    node.hello = msgspec.structs.replace(node.hello, addresses=advertised(bound, None))
    print("listening", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await node.close()


async def dial(folder: Path) -> None:
    paths.MEASURE_EVERY_S = 1.0  # type: ignore[misc]
    paths.CONFIRM_AFTER_S = 0.2  # type: ignore[misc]
    node = Node("a", KeyStore(folder / "a"), {"b": ("10.78.0.2:7600",)})
    node.dial()
    (peer,) = node.peers.all()
    assert peer.paths is not None
    table = peer.paths.table
    for end in ("1", "0"):
        await until(lambda end=end: table.current is not None and link_of(table.current) == end)  # type: ignore[misc]
        print(json.dumps(node.peers.describe(peer)), flush=True)
        subprocess.run(["ip", "link", "set", "wire1", "down"], check=True)
    await node.close()


def link_of(address: str) -> str:
    """The N of 10.78.N.2 and of fd78:N::2, where 0 is left out."""
    return address.split(".")[2] if address.startswith("10.") else address.split(":")[1] or "0"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["a", folder]:
            asyncio.run(dial(Path(folder)))
        case ["b", folder]:
            asyncio.run(listen(Path(folder)))
        case [folder]:
            main(folder)
