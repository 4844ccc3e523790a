"""The encrypted TCP plane on loopback, two processes: throughput and CPU of both ends, over streams x record size.

    python -m benches.tcp_plane [--rounds 3] [--gib 2] [--streams 1,2,3] [--records 256,1024,2048] [--page-mib 8]

Rounds are interleaved, medians reported, with `iperf3 -P1` of the same rounds as the yardstick when it is installed.
CPU-s/GiB counts user and system time of both processes while pages move. This is how the defaults of `transport.tcp`
were chosen; it measures the link alone: no ring, no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

from transport.keys import KeyStore, trusting_pair
from transport.link import Landing, Link, PageSink
from transport.tcp import TcpEndpoint
from zerocopy.cli import iperf3
from zerocopy.cli.ending import temporary_folder
from zerocopy.cli.measuring import cpu_s

LANDINGS = 32  # more than the sender ever has on its way
IN_FLIGHT_BYTES = 32 << 20  # what a ring of that size lets the sender have on its way


class Row(NamedTuple):
    gbps: float
    cpu_s_per_gib: float


def mapped(size: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, size))
    view[:] = b"\xa5" * size
    return view


class Slot:
    def __init__(self, size: int, free: list[Slot]) -> None:
        self.view = mapped(size)
        self._free = free

    def publish(self) -> None:
        self._free.append(self)

    def discard(self) -> None:
        self._free.append(self)


class Receiver:
    """Owner and sink: lands pages in a pool of slots and answers any message with its CPU time."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self.closed = asyncio.Event()

    def link_opened(self, link: Link) -> PageSink:
        return self

    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        if not self._slots or len(self._slots[0].view) != payload_bytes:
            self._slots.clear()
            self._slots += [Slot(payload_bytes, self._slots) for _ in range(LANDINGS)]
        return self._slots.pop(0)

    def link_message(self, link: Link, message: bytes) -> None:
        link.send(str(cpu_s()).encode())

    def link_closed(self, link: Link, reason: str) -> None:
        self.closed.set()


class Sender:
    def __init__(self) -> None:
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    def link_opened(self, link: Link) -> PageSink:
        return self

    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        return None

    def link_message(self, link: Link, message: bytes) -> None:
        self.answers.put_nowait(message)

    def link_closed(self, link: Link, reason: str) -> None:
        pass


async def serve(directory: str) -> None:
    receiver = Receiver()
    endpoint = TcpEndpoint(KeyStore(Path(directory, "b")), receiver)
    print(await endpoint.listen("127.0.0.1:0"), flush=True)
    await receiver.closed.wait()
    await endpoint.close()


async def move(link: Link, source: memoryview, total: int, page_bytes: int) -> int:
    """Whole pages of about so many bytes; returns how many arrived. Raises LinkError if one did not."""
    free: asyncio.Queue[int] = asyncio.Queue()
    count = min(len(source) // page_bytes, LANDINGS - 1)
    for slot in range(count):
        free.put_nowait(slot)
    pages = max(total // page_bytes, 1)
    sent = []
    for _ in range(pages):
        slot = await free.get()
        sent.append(link.send_page(b"page", source[slot * page_bytes : (slot + 1) * page_bytes]))
        sent[-1].add_done_callback(lambda _, slot=slot: free.put_nowait(slot))  # type: ignore[misc]
    await asyncio.gather(*sent)
    return pages * page_bytes


async def run_one(directory: str, streams: int, record_bytes: int, page_bytes: int, total: int) -> Row:
    """A fresh child process and link: no row inherits another's memory, threads or socket state."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benches.tcp_plane", "--serve", directory], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    sender = Sender()
    endpoint = TcpEndpoint(KeyStore(Path(directory, "a")), sender, streams=streams, record_bytes=record_bytes)
    link = await endpoint.connect("b", child.stdout.readline().strip())

    async def cpu_both() -> float:
        link.send(b"cpu")
        return cpu_s() + float(await sender.answers.get())

    source = mapped(max(IN_FLIGHT_BYTES, page_bytes))
    await move(link, source, total // 8, page_bytes)
    cpu, start = await cpu_both(), time.perf_counter()
    moved = await move(link, source, total, page_bytes)
    elapsed = time.perf_counter() - start
    cpu = await cpu_both() - cpu
    await endpoint.close()
    child.wait(10)
    return Row(moved * 8 / elapsed / 1e9, cpu / (moved / (1 << 30)))


def run_iperf3(total: int) -> Row | None:
    if shutil.which("iperf3") is None:
        return None
    found = iperf3.measured(lambda: iperf3.on_loopback(total))
    return Row(found.gbps, found.cpu_s_per_gib)


def main() -> None:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--streams", type=numbers, default=[1, 2, 3])
    parser.add_argument("--records", type=numbers, default=[256, 1024, 2048], help="KiB")
    parser.add_argument("--page-mib", type=float, default=8)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve))
        return
    total, page = int(options.gib * (1 << 30)), int(options.page_mib * (1 << 20))
    rows: dict[str, list[Row]] = {}
    with temporary_folder("zc-plane-") as directory:
        trusting_pair(directory, "a", "b")
        for _ in range(options.rounds):
            if (row := run_iperf3(total)) is not None:
                rows.setdefault("iperf3 -P1", []).append(row)
            for streams in options.streams:
                for record in options.records:
                    row = uvloop.run(run_one(str(directory), streams, record << 10, page, total))
                    rows.setdefault(f"{streams} streams {record:5} KiB", []).append(row)
    report(rows)


def report(rows: dict[str, list[Row]]) -> None:
    ceiling = statistics.median(row.gbps for row in rows.get("iperf3 -P1", [Row(float("nan"), 0)]))
    print(f"{'':22} {'Gb/s':>6} {'x iperf3':>9} {'CPU-s/GiB':>10}")
    for name, samples in rows.items():
        gbps = statistics.median(row.gbps for row in samples)
        cpu = statistics.median(row.cpu_s_per_gib for row in samples)
        print(f"{name:22} {gbps:6.1f} {gbps / ceiling:9.2f} {cpu:10.2f}")


if __name__ == "__main__":
    main()
