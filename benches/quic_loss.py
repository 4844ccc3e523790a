"""The QUIC link on paths that lose packets, beside TCP: python -m benches.quic_loss [LINK ...] [--json]

For each link (as `scripts/netlab` takes them) a lab is made. In it, round by round, pages go over our QUIC link with
BBR and iperf3 measures one TCP connection with CUBIC and one with BBR. Every page carries a number and a checksum that
the receiving process compares: a page that is wrong, missing or there twice makes the run fail. Medians over the
rounds; Gb/s of payload from the first page queued to the last one acknowledged, after a warm-up. Needs root, iperf3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import xxhash

from transport.keys import KeyStore, trusting_pair
from transport.link import Landing, Link, PageSink
from transport.quic import QuicEndpoint
from zerocopy.cli.ending import temporary_folder
from zerocopy.cli.iperf3 import TIMEOUT_S, Iperf3, Iperf3Failed, measured, read_report

ROOT: Final = Path(__file__).resolve().parents[1]
LINKS: Final = ("1gbit,rtt=2ms,loss=1%", "1gbit,rtt=50ms,loss=0.1%")
ADDRESS: Final = "10.78.0.2:7600"
PAGE: Final = 1 << 20
ROOMS: Final = 32  # 32 MiB: more than rate x round trip of every link here
WARM_UP_S: Final = 1.0
HEADER: Final = struct.Struct("<QQ")  # number, xxh3 of the payload


class Room:
    """Where a page lands, and whether it is the one that was sent."""

    def __init__(self, owner: Receiver, view: memoryview, header: bytes) -> None:
        self.view = view
        self._owner = owner
        self._number, self._digest = HEADER.unpack(header)

    def publish(self) -> None:
        right = xxhash.xxh3_64_intdigest(self.view) == self._digest
        self._owner.landed(self._number, right, self.view)

    def discard(self) -> None:
        self._owner.landed(self._number, False, self.view)


class Receiver:
    def __init__(self) -> None:
        self._free = [memoryview(mmap.mmap(-1, PAGE)) for _ in range(2 * ROOMS)]
        self._right: set[int] = set()
        self._wrong = 0

    def claim(self, header: bytes, payload_bytes: int) -> Landing:
        return Room(self, self._free.pop(), header)

    def landed(self, number: int, right: bool, view: memoryview) -> None:
        self._free.append(view)
        self._wrong += not right or number in self._right
        self._right.add(number)

    def link_opened(self, link: Link) -> PageSink:
        self._right, self._wrong = set(), 0
        return self

    def link_message(self, link: Link, message: bytes) -> None:
        """The number of pages sent; the answer says whether exactly these are here."""
        link.send(b"exact" if not self._wrong and self._right == set(range(int(message))) else b"wrong")

    def link_closed(self, link: Link, reason: str) -> None: ...


class Sender:
    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def claim(self, header: bytes, payload_bytes: int) -> None:
        return None

    def link_opened(self, link: Link) -> PageSink:
        return self

    def link_message(self, link: Link, message: bytes) -> None:
        self.answer.set_result(message)

    def link_closed(self, link: Link, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(RuntimeError(f"the link ended: {reason}"))


async def receive(folder: Path) -> None:
    endpoint = QuicEndpoint(KeyStore(folder / "b"), Receiver())
    await endpoint.listen(ADDRESS)
    print("listening", flush=True)
    await asyncio.Event().wait()


async def send(folder: Path, seconds: float) -> float:
    """Gb/s over one fresh link. Raises SystemExit if what arrived is not what was sent."""
    owner = Sender()
    endpoint = QuicEndpoint(KeyStore(folder / "a"), owner)
    link = await endpoint.connect("b", ADDRESS)
    pages = [memoryview(mmap.mmap(-1, PAGE)) for _ in range(ROOMS)]
    for page in pages:
        page[:] = os.urandom(PAGE)
    digests = [xxhash.xxh3_64_intdigest(page) for page in pages]
    count, counted = 0, 0
    began = time.monotonic()

    async def lane(index: int) -> None:
        nonlocal count, counted
        while time.monotonic() - began < WARM_UP_S + seconds:
            header, count = HEADER.pack(count, digests[index]), count + 1
            await link.send_page(header, pages[index])
            counted += time.monotonic() - began >= WARM_UP_S

    await asyncio.gather(*(lane(index) for index in range(ROOMS)))
    elapsed = time.monotonic() - began - WARM_UP_S
    link.send(b"%d" % count)
    if await owner.answer != b"exact":
        raise SystemExit("what arrived is not what was sent")
    await endpoint.close()
    return 8 * PAGE * counted / elapsed / 1e9


def iperf3(congestion: str, seconds: float) -> Iperf3:
    """Raises Iperf3Failed."""
    on = {host: ["ip", "netns", "exec", host, "iperf3"] for host in "AB"}
    with subprocess.Popen([*on["B"], "-s", "-1"], stdout=subprocess.DEVNULL) as server:
        time.sleep(0.3)
        timing = ["-t", str(max(1, round(seconds))), "-O", str(round(WARM_UP_S))]
        argv = [*on["A"], "-c", ADDRESS.partition(":")[0], "-C", congestion, *timing, "-J"]
        try:
            done = subprocess.run(argv, capture_output=True, timeout=TIMEOUT_S + seconds)
            return read_report(done.stdout, done.stderr)
        except subprocess.TimeoutExpired as error:
            raise Iperf3Failed(f"iperf3's client had no result within {error.timeout:g} s") from None
        finally:
            server.kill()


def inside(rounds: int, seconds: float) -> None:
    """On neither host of the lab: prints the samples."""
    samples: dict[str, list[float]] = {"quic_bbr": [], "tcp_cubic": [], "tcp_bbr": []}
    with temporary_folder("zc-loss-") as folder:
        trusting_pair(folder, "a", "b")
        words = [sys.executable, "-m", "benches.quic_loss", "--folder", str(folder), "--seconds", str(seconds)]
        on = {host: ["ip", "netns", "exec", host, *words] for host in "AB"}
        receiver = subprocess.Popen([*on["B"], "--receive"], stdout=subprocess.PIPE, text=True)
        try:
            assert receiver.stdout is not None and receiver.stdout.readline() == "listening\n"
            for _ in range(rounds):
                done = subprocess.run([*on["A"], "--send"], check=True, stdout=subprocess.PIPE, text=True)
                samples["quic_bbr"].append(float(done.stdout))
                for congestion in ("cubic", "bbr"):
                    samples[f"tcp_{congestion}"].append(measured(partial(iperf3, congestion, seconds)).gbps)
        finally:
            receiver.kill()
            receiver.wait()
    print(json.dumps(samples))


def measure(link: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Raises SystemExit with what the lab said."""
    command = [str(ROOT / "scripts" / "netlab"), link, "--", sys.executable, "-m", "benches.quic_loss", "--inside"]
    timing = ["--rounds", str(rounds), "--seconds", str(seconds)]
    done = subprocess.run([*command, *timing], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{link}: {done.stderr}")
    samples: dict[str, list[float]] = json.loads(done.stdout)
    medians = {name: round(statistics.median(many), 3) for name, many in samples.items()}
    ratio = round(medians["quic_bbr"] / medians["tcp_cubic"], 2)
    return {"link": link, "state": "exact", **medians, "ratio_tcp_cubic": ratio, "samples": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "links", nargs="*", default=LINKS, metavar="LINK", help=f"default: {' '.join(LINKS)}".replace("%", "%%")
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement, after a second of warm-up")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    for word in ("--inside", "--receive", "--send"):
        parser.add_argument(word, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.rounds, options.seconds)
    elif options.receive:
        asyncio.run(receive(options.folder))
    elif options.send:
        print(asyncio.run(send(options.folder, options.seconds)))
    else:
        rows = [measure(link, options.rounds, options.seconds) for link in options.links]
        if options.json:
            print(json.dumps({"rounds": options.rounds, "seconds": options.seconds, "rows": rows}))
            return
        print(f"{'link':28}{'QUIC BBR':>10}{'TCP CUBIC':>11}{'TCP BBR':>9}{'/ CUBIC':>9}  Gb/s")
        for row in rows:
            speeds = f"{row['quic_bbr']:10.3f}{row['tcp_cubic']:11.3f}{row['tcp_bbr']:9.3f}"
            print(f"{row['link']:28}{speeds}{row['ratio_tcp_cubic']:9.1f}")


if __name__ == "__main__":
    main()
