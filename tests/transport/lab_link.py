"""Pages between the two hosts of a netlab, through the real endpoint, compared byte by byte where they land.

    scripts/netlab LINK -- python -m tests.transport.lab_link FOLDER tcp|quic CONGESTION MIB ipv4|ipv6|link-local

Prints one line of JSON. The command itself runs on neither host; it starts the receiver on B, then the sender on A.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from tests.transport.hosts import Host, Slot, pattern
from transport.keys import KeyStore
from transport.link import Link

PAGE = 1 << 20
PORT = 7600
IN_FLIGHT = 16


def address_of_b(kind: str) -> str:
    if kind != "link-local":
        return {"ipv4": f"10.78.0.2:{PORT}", "ipv6": f"[fd78:0::2]:{PORT}"}[kind]
    shown = subprocess.run(["ip", "-n", "B", "-j", "addr", "show", "wire0"], capture_output=True, check=True).stdout
    (local,) = [a["local"] for a in json.loads(shown)[0]["addr_info"] if a["local"].startswith("fe80")]
    return f"[{local}%wire0]:{PORT}"


def main(folder: Path, transport: str, congestion: str, mib: str, kind: str) -> None:
    a, b = Host(folder, "a"), Host(folder, "b")
    a.trust(b)
    b.trust(a)
    address = address_of_b(kind)
    how = [str(folder), transport, congestion, address]
    roles = [["B", "receive", *how], ["A", "send", *how, mib]]
    words = [["ip", "netns", "exec", host, sys.executable, "-m", __spec__.name, *role] for host, *role in roles]
    receiver = subprocess.Popen(words[0], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None and receiver.stdout.readline() == "listening\n"
    subprocess.run(words[1], check=True)
    assert receiver.wait() == 0


class LabHost(Host):
    """Its key was made by `main`, before both hosts could trust each other."""

    def __init__(self, folder: Path, name: str, transport: str, congestion: str) -> None:
        super().__init__(folder / "unused", name, transport)
        self.keys = KeyStore(folder / name)
        self.open(congestion=congestion, **({"streams": 2} if transport == "tcp" else {}))


async def receive(folder: Path, transport: str, congestion: str, address: str) -> None:
    host = LabHost(folder, "b", transport, congestion)
    payloads = [pattern(PAGE, seed) for seed in range(IN_FLIGHT)]
    right: list[bool] = []

    def compare(slot: Slot) -> None:
        """On a receiver thread, and on several at the same time."""
        right.append(slot.view == payloads[int(slot.header)])
        host.landings.published.clear()

    host.landings.on_publish = compare
    await host.endpoint.listen(address)
    print("listening", flush=True)
    await host.until(lambda: bool(host.messages), timeout_s=60)
    host.links[0].send(str(sum(right)).encode())
    await host.until(lambda: bool(host.closed))
    await host.endpoint.close()


async def send(folder: Path, transport: str, congestion: str, address: str, mib: str) -> None:
    host = LabHost(folder, "a", transport, congestion)
    link = await host.endpoint.connect("b", address)
    await host.until(lambda: link.stats.rtt_s is not None)
    rtt_s, pages = link.stats.rtt_s, (int(mib) << 20) // PAGE
    payloads = [pattern(PAGE, seed) for seed in range(IN_FLIGHT)]
    began = time.monotonic()
    await transfer(link, payloads, pages)
    elapsed = time.monotonic() - began
    link.send(b"how many were right?")
    await host.until(lambda: bool(host.messages))
    figures = {"pages": pages, "right": int(host.messages[0]), "rtt_s": rtt_s, "gbps": 8e-9 * pages * PAGE / elapsed}
    print(json.dumps(figures))
    await host.endpoint.close()


async def transfer(link: Link, payloads: list[memoryview], pages: int) -> None:
    free = asyncio.Semaphore(len(payloads))
    sending = []
    for number in range(pages):
        await free.acquire()
        seed = number % len(payloads)
        sending.append(link.send_page(b"%d" % seed, payloads[seed][:]))
        sending[-1].add_done_callback(lambda _: free.release())
    await asyncio.gather(*sending)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", folder, transport, congestion, address]:
            asyncio.run(receive(Path(folder), transport, congestion, address))
        case ["send", folder, transport, congestion, address, mib]:
            asyncio.run(send(Path(folder), transport, congestion, address, mib))
        case [folder, transport, congestion, mib, kind]:
            main(Path(folder), transport, congestion, mib, kind)
