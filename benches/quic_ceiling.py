"""How near the QUIC link comes to its engine, in one run: link, bare ngtcp2, iperf3 and, where installed, aioquic.

    python -m benches.quic_ceiling [--rounds 5] [--seconds 3] [--datagram 1452 8900] [--congestion bbr]

Loopback, two processes each, interleaved rounds, medians. Gb/s is of payload; CPU is of both ends in seconds per GiB.
The bare engine is benches/quic_ceiling.c. Prints one JSON object. A loaded machine shows in the rates, hardly in the
CPU; the ratios are of medians of this run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import uvloop

from transport.keys import KeyStore
from transport.link import Landing, Link, PageSink
from transport.quic import QuicEndpoint
from transport.quic_engine import Congestion, engine_name

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = 4 << 20
PAGES: Final = 8  # 32 MiB, beyond the caches: state to send is not in them either
IN_FLIGHT: Final = 8
GIB: Final = 1 << 30


class Room:
    def __init__(self, view: memoryview) -> None:
        self.view = view

    def publish(self) -> None: ...

    def discard(self) -> None: ...


class Owner:
    """Lands every page in the next of a few rooms."""

    def __init__(self) -> None:
        self._rooms = [memoryview(mmap.mmap(-1, PAGE, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)) for _ in range(PAGES)]
        self._turn = 0
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()

    def claim(self, header: bytes, payload_bytes: int) -> Landing:
        self._turn += 1
        return Room(self._rooms[self._turn % PAGES][:payload_bytes])

    def link_opened(self, link: Link) -> PageSink:
        self.opened.set()
        return self

    def link_message(self, link: Link, message: bytes) -> None: ...

    def link_closed(self, link: Link, reason: str) -> None:
        self.closed.set()


async def receive(folder: Path, congestion: Congestion, datagram: int) -> None:
    """The child: says where it listens, then how much CPU the transfer took it."""
    keys, owner = KeyStore(folder / "b"), Owner()
    endpoint = QuicEndpoint(keys, owner, congestion=congestion, datagram_bytes=datagram)
    print(await endpoint.listen("127.0.0.1:0"), flush=True)
    await owner.opened.wait()
    before = time.process_time()
    await owner.closed.wait()
    print(time.process_time() - before, flush=True)
    await endpoint.close()


async def send(folder: Path, congestion: Congestion, datagram: int, seconds: float) -> tuple[float, float]:
    """(Gb/s, CPU seconds per GiB of both ends)."""
    argv = [sys.executable, "-m", "benches.quic_ceiling", "--receive", str(folder)]
    argv += ["--congestion", congestion, "--datagram", str(datagram)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        endpoint = QuicEndpoint(KeyStore(folder / "a"), Owner(), congestion=congestion, datagram_bytes=datagram)
        link = await endpoint.connect("b", address)
        pages = [memoryview(mmap.mmap(-1, PAGE)) for _ in range(PAGES)]
        for page in pages:
            page[:] = os.urandom(1 << 20) * (PAGE >> 20)
        began, before = time.monotonic(), time.process_time()

        async def lane(page: memoryview) -> int:
            count = 0
            while time.monotonic() - began < seconds:
                await link.send_page(b"bench", page)
                count += 1
            return count

        moved = PAGE * sum(await asyncio.gather(*(lane(pages[i % PAGES]) for i in range(IN_FLIGHT))))
        elapsed, cpu = time.monotonic() - began, time.process_time() - before
        link.close("done")
        cpu += float(await asyncio.to_thread(child.stdout.readline))
        await endpoint.close()
    return 8 * moved / elapsed / 1e9, cpu / (moved / GIB)


def link_row(folder: Path, congestion: Congestion, datagram: int, seconds: float) -> tuple[float, float]:
    return uvloop.run(send(folder, congestion, datagram, seconds))


def bare_row(program: Path, folder: Path, congestion: str, datagram: int, seconds: float) -> tuple[float, float]:
    argv = [str(program), str(folder / "a" / "identity.pem"), str(seconds), str(datagram), congestion]
    rate, cpu = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    return float(rate), float(cpu)


def iperf_row(seconds: float) -> tuple[float, float] | None:
    if shutil.which("iperf3") is None:
        return None
    with subprocess.Popen(["iperf3", "-s", "-1", "-p", "5987"], stdout=subprocess.DEVNULL) as server:
        time.sleep(0.3)
        argv = ["iperf3", "-c", "127.0.0.1", "-p", "5987", "-P", "1", "-t", str(max(1, round(seconds))), "-J"]
        end = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)["end"]
        server.wait()
    busy = end["cpu_utilization_percent"]
    moved = end["sum_received"]["bytes"]
    cpu = (busy["host_total"] + busy["remote_total"]) / 100 * end["sum_received"]["seconds"]
    return end["sum_received"]["bits_per_second"] / 1e9, cpu / (moved / GIB)


async def aioquic_serve(folder: Path) -> None:
    """The child: says its port, then the rate at which bytes came, in Gb/s."""
    asyncio_part, configuration = _aioquic()
    moments: list[tuple[float, int]] = []
    ended = asyncio.Event()

    def count(reader: asyncio.StreamReader, writer: object) -> None:
        async def drain() -> None:
            while data := await reader.read(1 << 20):
                moments.append((time.monotonic(), len(data)))
            ended.set()

        tasks.append(asyncio.ensure_future(drain()))

    tasks: list[asyncio.Future[None]] = []
    theirs = configuration(is_client=False, alpn_protocols=["bench"])
    theirs.load_cert_chain(folder / "certificate.pem", folder / "a" / "identity.pem")
    server = await asyncio_part.serve("127.0.0.1", 0, configuration=theirs, stream_handler=count)
    print(server._transport.get_extra_info("sockname")[1], flush=True)
    await ended.wait()
    print(8 * sum(size for _, size in moments[1:]) / (moments[-1][0] - moments[0][0]) / 1e9, flush=True)
    server.close()


async def aioquic_send(folder: Path, seconds: float) -> float:
    """Gb/s of one stream between two aioquic processes, with its own defaults."""
    asyncio_part, configuration = _aioquic()
    argv = [sys.executable, "-m", "benches.quic_ceiling", "--aioquic-serve", str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        mine = configuration(is_client=True, alpn_protocols=["bench"], verify_mode=0)
        async with asyncio_part.connect("127.0.0.1", port, configuration=mine) as client:
            _, writer = await client.create_stream()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                writer.write(bytes(1 << 18))
                while len(client._quic._streams[0].sender._buffer) > 1 << 18:
                    await asyncio.sleep(0)
            writer.write_eof()
            return float(await asyncio.to_thread(child.stdout.readline))


def _aioquic() -> tuple[Any, Any]:
    """Optional, so unknown to the type checker."""
    configuration = importlib.import_module("aioquic.quic.configuration")
    return importlib.import_module("aioquic.asyncio"), configuration.QuicConfiguration


def aioquic_row(folder: Path, seconds: float) -> float | None:
    if importlib.util.find_spec("aioquic") is None:
        return None
    return asyncio.run(aioquic_send(folder, seconds))


def build(folder: Path) -> Path:
    program = folder / "quic_ceiling"
    source = [str(ROOT / "benches" / "quic_ceiling.c"), "-I", str(ROOT / "native"), "-o", str(program)]
    libraries = ["-lngtcp2", "-lngtcp2_crypto_gnutls", "-lgnutls"]
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O2", *source, *libraries], check=True)
    return program


def make_keys(folder: Path) -> None:
    a, b = KeyStore(folder / "a"), KeyStore(folder / "b")
    a.new("a")
    b.new("b")
    a.trust("b", b.show()[0])
    (folder / "certificate.pem").write_text(a.show()[0])  # aioquic wants it apart from the key
    b.trust("a", a.show()[0])


def middle(rows: list[tuple[float, float]]) -> dict[str, float]:
    rates, cpus = zip(*rows, strict=True)
    return {
        "gbps": round(statistics.median(rates), 3),
        "gbps_min": round(min(rates), 3),
        "gbps_max": round(max(rates), 3),
        "cpu_s_per_gib": round(statistics.median(cpus), 3),
    }


def measure(folder: Path, rounds: int, seconds: float, datagrams: list[int], congestion: Congestion) -> dict[str, Any]:
    make_keys(folder)
    program = build(folder)
    rows: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        row = iperf_row(seconds)
        if row is not None:
            rows.setdefault("iperf3", []).append(row)
        for datagram in datagrams:
            rows.setdefault(f"link {datagram}", []).append(link_row(folder, congestion, datagram, seconds))
            rows.setdefault(f"bare {datagram}", []).append(bare_row(program, folder, congestion, datagram, seconds))
        rate = aioquic_row(folder, seconds)
        if rate is not None:
            rows.setdefault("aioquic", []).append((rate, 0.0))
    result: dict[str, Any] = {name: middle(many) for name, many in rows.items()}
    result["ratios"] = {
        f"link {datagram} / {other}": round(result[f"link {datagram}"]["gbps"] / result[name]["gbps"], 3)
        for datagram in datagrams
        for other, name in (("bare", f"bare {datagram}"), ("iperf3", "iperf3"), ("aioquic", "aioquic"))
        if name in result
    }
    return {"engine": engine_name(), "congestion": congestion, "rounds": rounds, "seconds": seconds, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--datagram", type=int, nargs="+", default=[1452, 8900])
    parser.add_argument("--congestion", choices=["bbr", "cubic"], default="bbr")
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--aioquic-serve", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.receive is not None:
        uvloop.run(receive(asked.receive, asked.congestion, asked.datagram[0]))
        return
    if asked.aioquic_serve is not None:
        asyncio.run(aioquic_serve(asked.aioquic_serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), asked.rounds, asked.seconds, asked.datagram, asked.congestion)
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
