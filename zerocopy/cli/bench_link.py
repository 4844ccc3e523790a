"""`zc-handoff bench link`: how fast this machine and path move pages, over streams x record size x page size.

Both roles are here. The listening one serves whoever is trusted until it is stopped; the connecting one sweeps, in
rounds, with the ceilings (one plain TCP stream of ours, iperf3 where both ends have it) measured between the same rows:
a ratio is of one run or it is nothing. Without either role, the other end is a process of its own on this machine with
keys made for the run. What a figure means is in docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil
import uvloop

from transport.address import Address, parse
from transport.frames import MAX_RECORD, MIN_RECORD
from transport.keys import KeyStore, trusting_pair
from transport.link import Endpoint, Link, LinkError, LinkOwner
from transport.quic_choice import INSTALL, BothEndpoints, built
from transport.tcp import DEFAULT_RECORD_BYTES, TcpEndpoint, stream_count
from transport.tcp_link import MAX_STREAMS, TcpLink
from zerocopy.cli.bench_codec import CODECS, codec_rows
from zerocopy.cli.bench_ends import (
    MAX_PAGE_BYTES,
    CeilingOpen,
    LandingEnd,
    OpenCeiling,
    Prepare,
    Ready,
    Received,
    SendingEnd,
    arena,
    send_plain,
)
from zerocopy.cli.bench_quic import AIOQUIC, References, bare_engine
from zerocopy.cli.iperf3 import ATTEMPTS, Iperf3Failed, given_up, read_report
from zerocopy.cli.measuring import GIB, Quantiles, cpu_s, gbps, median, quantiles
from zerocopy.cli.plot import Panel, svg
from zerocopy.cli.screen import CliError, ExitCode, bytes_text
from zerocopy.runtime.pages import PAGE_BYTES

DEFAULT_PAGE_BYTES: Final = PAGE_BYTES  # as large as a host makes them
RECORDS: Final = (256 << 10, 1 << 20, DEFAULT_RECORD_BYTES)
PAGES: Final = (1 << 20, DEFAULT_PAGE_BYTES)
WARM_UP: Final = 0.25  # of a row's time, before it counts
ASK_EVERY_S: Final = 0.05  # control round trips while pages flow
CHILD_START_S: Final = 20.0
DEFAULT_DATAGRAM_BYTES: Final = 1452  # the QUIC link's own default
MIN_DATAGRAM, MAX_DATAGRAM = 1200, 9216  # what QUIC demands of a path; what the engine takes
PLAINTEXT: Final = "plaintext"
IPERF3: Final = "iperf3"


class Setting(msgspec.Struct, frozen=True):
    streams: int
    record_bytes: int
    page_bytes: int
    rate_cap_bps: float = 0
    datagram_bytes: int = 0  # over QUIC, which has one connection and no records; 0 is TCP


PLAIN: Final = Setting(1, DEFAULT_RECORD_BYTES, DEFAULT_PAGE_BYTES)  # the link that ceilings are arranged over


class Sample(msgspec.Struct, frozen=True):
    """One measurement of one setting."""

    gbps: float
    cpu_s_per_gib: float
    page_s: list[float]
    idle_rtt_s: float
    loaded_rtt_s: list[float]
    segments_sent: int
    segments_repeated: int


class Row(msgspec.Struct, frozen=True):
    """Medians over the rounds; page and round-trip times over all their samples. `transport` is "memory" where a codec
    is measured by itself: nothing is sent then, and `gbps` is what one core encodes."""

    transport: str
    streams: int
    record_bytes: int
    page_bytes: int
    codec: str
    rate_cap_bps: float | None
    gbps: float
    cpu_s_per_gib: float
    percent_of_ceiling: float | None
    page_ms: Quantiles | None = None  # from queueing a page to its acknowledgement
    rtt_ms: float | None = None  # of a control message, idle
    loaded_rtt_ms: Quantiles | None = None  # of a control message while pages flow
    segments_repeated: int | None = None
    loss: float | None = None
    ratio: float | None = None  # of a codec: raw bytes to encoded
    pays_below_gbps: float | None = None  # a codec: on links slower than this it would save time
    datagram_bytes: int | None = None  # over QUIC
    ratios: dict[str, float] | None = None  # over QUIC: to what else was measured, medians of those of one round


class Ceiling(msgspec.Struct, frozen=True):
    plaintext_gbps: float | None
    iperf3_gbps: float | None
    quic_gbps: dict[str, float] | None = None  # the bare engine by datagram size, and aioquic
    absent: dict[str, str] | None = None  # what else of these could not be measured, and why

    @property
    def gbps(self) -> float | None:
        return max((value for value in (self.plaintext_gbps, self.iperf3_gbps) if value), default=None)


class Report(msgspec.Struct, frozen=True):
    rows: list[Row]
    default: Row | None
    best: Row | None
    ceiling: Ceiling
    streams_reason: str = ""  # why a link from here has the default's number of streams
    quic_engine: str | None = None  # of this end: libraries, and which protects packets


class Plan(msgspec.Struct, frozen=True):
    """What to sweep. `rate_caps_bps` 0 is no cap."""

    streams: Sequence[int] = msgspec.field(default_factory=lambda: sorted({1, 2, 3, stream_count().count}))
    record_bytes: Sequence[int] = RECORDS
    page_bytes: Sequence[int] = PAGES
    codecs: Sequence[str] = CODECS
    rate_caps_bps: Sequence[float] = (0,)
    seconds: float = 0.8
    rounds: int = 3
    ceilings: bool = True
    datagram_bytes: Sequence[int] = ()  # over QUIC if there are any

    def settings(self) -> list[Setting]:
        shapes = itertools.product(self.page_bytes, self.rate_caps_bps)
        if self.datagram_bytes:
            return [Setting(1, 0, *shape, datagram) for shape in shapes for datagram in self.datagram_bytes]
        product = itertools.product(self.streams, self.record_bytes, self.page_bytes, self.rate_caps_bps)
        return [Setting(*values) for values in product]

    @property
    def steps(self) -> int:
        return self.rounds * (len(self.settings()) + 2 + bool(self.datagram_bytes))


class Target(msgspec.Struct, frozen=True):
    """The other end: its name among the trusted keys, its address, this end's keys."""

    keys: Path
    peer: str
    address: str

    @property
    def host(self) -> str:
        return parse(self.address).host


def check(plan: Plan) -> None:
    """Raises CliError (usage) for what no link takes."""
    for name, values, low, high in (
        ("streams", plan.streams, 1, MAX_STREAMS),
        ("record bytes", plan.record_bytes, MIN_RECORD, MAX_RECORD),
        ("page bytes", plan.page_bytes, 1, MAX_PAGE_BYTES),
        ("datagram bytes", plan.datagram_bytes, MIN_DATAGRAM, MAX_DATAGRAM),
    ):
        for value in values:
            if not low <= value <= high:
                raise CliError(f"{name} {value} are outside {low} to {high}", ExitCode.USAGE)
    if plan.datagram_bytes and not built():
        raise CliError(f"this installation has no QUIC: {INSTALL}")


# -- the connecting end ------------------------------------------------------------------------------------------------


def sweep(plan: Plan, target: Target, step: Callable[[str], None], references: References | None = None) -> Report:
    """Measure everything. `step` is told of each measurement as it begins; `references` are for QUIC."""
    absent: dict[str, str] = {}
    samples, rounds = uvloop.run(_sweep(plan, target, step, references, absent))
    ceiling = _ceiling(rounds, absent | (references.absent if references is not None else {}))
    rows = [_row(setting, many, ceiling, rounds) for setting, many in samples.items()]
    chosen = stream_count()
    ours = Setting(chosen.count, DEFAULT_RECORD_BYTES, DEFAULT_PAGE_BYTES)
    if plan.datagram_bytes:
        ours = Setting(1, 0, DEFAULT_PAGE_BYTES, datagram_bytes=DEFAULT_DATAGRAM_BYTES)
    default = next((row for setting, row in zip(samples, rows, strict=True) if setting == ours), None)
    best = max((row for row in rows if not row.rate_cap_bps), key=lambda row: row.gbps, default=None)
    return Report([*rows, *_codec_rows(plan, ceiling, step)], default, best, ceiling, chosen.reason, _quic_engine(plan))


def _quic_engine(plan: Plan) -> str | None:
    if not plan.datagram_bytes:
        return None
    from transport.quic_engine import engine_name

    return engine_name()


def references(plan: Plan, target: Target, folder: Path) -> References | None:
    """What QUIC is measured against where both ends are on this machine; `folder` outlives it."""
    if not plan.datagram_bytes or not plan.ceilings:
        return None
    return References(folder, target.keys / "identity.pem", plan.datagram_bytes)


async def _sweep(
    plan: Plan,
    target: Target,
    step: Callable[[str], None],
    references: References | None,
    absent: dict[str, str],
) -> tuple[dict[Setting, list[Sample]], list[dict[str, float]]]:
    """Samples of each setting, one a round; what else was measured, round by round; into `absent`, what was not."""
    memory = arena()
    samples: dict[Setting, list[Sample]] = {setting: [] for setting in plan.settings()}
    rounds: list[dict[str, float]] = []
    for number in range(plan.rounds):
        others: dict[str, float] = {}
        if plan.ceilings:
            step(PLAINTEXT)
            others |= await _plaintext(target, memory, plan.seconds)
            if IPERF3 not in absent:
                step(IPERF3)
                try:
                    others |= await _iperf3(target, memory, plan.seconds)
                except Iperf3Failed as error:
                    absent[IPERF3] = str(error)
        if references is not None:
            step("bare engine, aioquic")
            others |= await asyncio.to_thread(references.measure, (1 + WARM_UP) * plan.seconds)
        rounds.append(others)
        # Every other round backwards: what drifts over a round does not favour the same rows.
        for setting in list(samples)[:: -1 if number % 2 else 1]:
            step(_named(setting))
            samples[setting].append(await _sample(target, memory, setting, plan.seconds))
    return samples, rounds


def _named(setting: Setting) -> str:
    cut = f"{setting.datagram_bytes} B" if setting.datagram_bytes else f"{setting.record_bytes >> 10} KiB"
    return f"{setting.streams} stream{'s' if setting.streams > 1 else ''}, {cut}, {setting.page_bytes >> 10} KiB"


@contextlib.asynccontextmanager
async def _connected(
    target: Target, memory: memoryview, setting: Setting = PLAIN
) -> AsyncIterator[tuple[SendingEnd, Link]]:
    """A fresh link: no measurement inherits another's threads or congestion window."""
    end = SendingEnd(memory)
    endpoint = _endpoint(KeyStore(target.keys), end, setting)
    try:
        yield end, await endpoint.connect(target.peer, target.address)
    finally:
        await endpoint.close()


def _endpoint(keys: KeyStore, owner: LinkOwner, setting: Setting) -> Endpoint:
    if setting.datagram_bytes:
        from transport.quic import QuicEndpoint

        return QuicEndpoint(keys, owner, datagram_bytes=setting.datagram_bytes)
    return TcpEndpoint(keys, owner, streams=setting.streams, record_bytes=setting.record_bytes)


async def _sample(target: Target, memory: memoryview, setting: Setting, seconds: float) -> Sample:
    async with _connected(target, memory, setting) as (end, link):
        ready: Ready = await end.ask(link, Prepare(setting.page_bytes), Ready)
        idle = [(await end.usage(link))[1] for _ in range(5)]
        load, bps = setting.page_bytes, setting.rate_cap_bps
        await end.load(link, load, ready.slots, WARM_UP * seconds, bps)
        before = cpu_s() + (await end.usage(link))[0].cpu_s
        loaded: list[float] = []
        async with _asking(end, link, loaded):
            done = await end.load(link, load, ready.slots, seconds, bps)
        after = cpu_s() + (await end.usage(link))[0].cpu_s
        infos = link.tcp_info() if isinstance(link, TcpLink) else []
        return Sample(
            gbps=gbps(done.nbytes, done.elapsed_s),
            cpu_s_per_gib=(after - before) / (done.nbytes / GIB),
            page_s=done.page_s,
            idle_rtt_s=median(idle),
            loaded_rtt_s=loaded,
            segments_sent=sum(info.segments_sent for info in infos),
            segments_repeated=sum(info.segments_repeated for info in infos),
        )


@contextlib.asynccontextmanager
async def _asking(end: SendingEnd, link: Link, into: list[float]) -> AsyncIterator[None]:
    """Round trips of control messages all the while; that the link ended is the block's to say."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            into.append((await end.usage(link))[1])

    task = asyncio.create_task(keep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        with contextlib.suppress(asyncio.CancelledError, LinkError):
            task.result()


async def _plaintext(target: Target, memory: memoryview, seconds: float) -> dict[str, float]:
    """One plain TCP stream; nothing if its port cannot be reached."""
    async with _connected(target, memory) as (end, link):
        opened: CeilingOpen = await end.ask(link, OpenCeiling("plaintext", seconds), CeilingOpen)
        if opened.port is None:
            return {}
        try:
            began = await asyncio.to_thread(send_plain, target.host, opened.port, opened.token, memory, seconds)
        except OSError:
            return {}
        received: Received = await end.answer(Received)
        if not received.nbytes:  # what came to that port was not ours
            return {}
        return {PLAINTEXT: gbps(received.nbytes, time.monotonic() - began)}


async def _iperf3(target: Target, memory: memoryview, seconds: float) -> dict[str, float]:
    """`iperf3 -P1`, where both ends have it. It takes whole seconds. Raises Iperf3Failed when it does not answer."""
    if shutil.which("iperf3") is None:
        return {}
    for attempt in range(1, ATTEMPTS + 1):
        async with _connected(target, memory) as (end, link):
            opened: CeilingOpen = await end.ask(link, OpenCeiling("iperf3", seconds), CeilingOpen)
            if opened.port is None:
                return {}
            command = ["iperf3", "-c", target.host, "-p", str(opened.port), "-P1", "-t", str(max(1, round(seconds)))]
            process = await asyncio.create_subprocess_exec(
                *command, "-J", stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            said = await process.communicate()
        try:
            return {IPERF3: read_report(*said).gbps}
        except Iperf3Failed as error:
            if attempt == ATTEMPTS:
                raise given_up(error) from None
    raise AssertionError("unreachable")


# -- rows --------------------------------------------------------------------------------------------------------------


def _ceiling(rounds: Sequence[dict[str, float]], absent: dict[str, str]) -> Ceiling:
    names = {name for others in rounds for name in others}
    speeds = {name: round(median([others[name] for others in rounds if name in others]), 3) for name in names}
    plain, iperf3 = speeds.pop(PLAINTEXT, None), speeds.pop(IPERF3, None)
    return Ceiling(plain, iperf3, speeds or None, absent or None)


def _ratios(setting: Setting, samples: Sequence[Sample], rounds: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """To iperf3, the bare engine with the same datagrams, and aioquic: medians of the ratios in one round, because a
    machine drifts more from round to round than within one."""
    if not setting.datagram_bytes:
        return None
    ratios = {}
    for name in (IPERF3, bare_engine(setting.datagram_bytes), AIOQUIC):
        pairs = zip(samples, rounds, strict=True)
        if found := [sample.gbps / others[name] for sample, others in pairs if others.get(name)]:
            ratios[name] = round(median(found), 3)
    return ratios


def _row(setting: Setting, samples: Sequence[Sample], ceiling: Ceiling, rounds: Sequence[dict[str, float]] = ()) -> Row:
    speed = median([sample.gbps for sample in samples])
    sent, repeated = (sum(getattr(s, name) for s in samples) for name in ("segments_sent", "segments_repeated"))
    pages = quantiles(1e3 * value for sample in samples for value in sample.page_s)
    return Row(
        transport="quic" if setting.datagram_bytes else "tcp",
        streams=setting.streams,
        record_bytes=setting.record_bytes,
        page_bytes=setting.page_bytes,
        codec="none",
        rate_cap_bps=setting.rate_cap_bps or None,
        gbps=round(speed, 3),
        cpu_s_per_gib=round(median([sample.cpu_s_per_gib for sample in samples]), 4),
        percent_of_ceiling=_percent(speed, ceiling),
        page_ms=pages,
        rtt_ms=round(1e3 * median([sample.idle_rtt_s for sample in samples]), 3),
        loaded_rtt_ms=quantiles(1e3 * value for sample in samples for value in sample.loaded_rtt_s),
        segments_repeated=repeated if sent else None,
        loss=round(repeated / sent, 6) if sent else None,
        datagram_bytes=setting.datagram_bytes or None,
        ratios=_ratios(setting, samples, rounds),
    )


def _codec_rows(plan: Plan, ceiling: Ceiling, step: Callable[[str], None]) -> list[Row]:
    rows = []
    for codec in codec_rows([name for name in plan.codecs if name != "none"], step):
        rows.append(
            Row(
                transport="memory",
                streams=0,
                record_bytes=0,
                page_bytes=codec.page_bytes,
                codec=codec.name,
                rate_cap_bps=None,
                gbps=round(codec.encode_gbps, 3),
                cpu_s_per_gib=round(codec.cpu_s_per_gib, 4),
                percent_of_ceiling=_percent(codec.encode_gbps, ceiling),
                ratio=round(codec.ratio, 3),
                pays_below_gbps=round(codec.pays_below_gbps, 3),
            )
        )
    return rows


def _percent(speed: float, ceiling: Ceiling) -> float | None:
    return round(100 * speed / ceiling.gbps, 1) if ceiling.gbps else None


def draw(report: Report) -> str:
    """Throughput and processor time over record or datagram size, a line for each number of streams, page size and
    cap."""
    rows = [row for row in report.rows if row.transport != "memory"]
    quic = any(row.transport == "quic" for row in rows)
    cuts = sorted({row.datagram_bytes or row.record_bytes for row in rows})
    lines: dict[str, dict[int, Row]] = {}
    for row in rows:
        cap = f", {row.rate_cap_bps / 1e9:g} Gb/s cap" if row.rate_cap_bps else ""
        streams = "" if quic else f"{row.streams} stream{'s' if row.streams > 1 else ''}, "
        name = f"{streams}{bytes_text(row.page_bytes)} pages{cap}"
        lines.setdefault(name, {})[row.datagram_bytes or row.record_bytes] = row
    ticks = [bytes_text(size) for size in cuts]

    def series(field: str) -> dict[str, list[float | None]]:
        return {name: [getattr(line.get(size), field, None) for size in cuts] for name, line in lines.items()}

    named = {"plain TCP": report.ceiling.plaintext_gbps, "iperf3 -P1": report.ceiling.iperf3_gbps}
    levels = {name: value for name, value in named.items() if value is not None}
    return svg(
        "Encrypted pages over QUIC, by datagram size" if quic else "Encrypted pages over TCP, by record size",
        [
            Panel("Gb/s", ticks, series("gbps"), levels),
            Panel("CPU-seconds per GiB, both ends", ticks, series("cpu_s_per_gib")),
        ],
    )


# -- the listening end -------------------------------------------------------------------------------------------------


def listen(keys: Path, address: str, announce: Callable[[list[str]], None], *, with_parent: bool) -> None:
    """Land pages until SIGINT or SIGTERM (or, with a parent, until that is gone). `announce` gets the commands, one for
    each address, that the other side may run."""
    uvloop.run(_listen(keys, address, announce, with_parent))


async def _listen(keys: Path, address: str, announce: Callable[[list[str]], None], with_parent: bool) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if with_parent:
        watch = threading.Thread(target=_wait_for_end_of_stdin, args=(loop, stop), daemon=True)
        watch.start()
    store = KeyStore(keys)
    endpoint = _both(store, LandingEnd(parse(address).host))
    try:
        bound = parse(await endpoint.listen(address))
    except OSError as error:
        raise CliError(f"cannot listen on {address}: {error.strerror or error}") from None
    announce([connect_command(reachable, store.name()) for reachable in reachable_addresses(bound)])
    await stop.wait()
    await endpoint.close()


def _both(keys: KeyStore, owner: LinkOwner) -> Endpoint:
    """Whoever connects chooses the transport."""
    tcp = TcpEndpoint(keys, owner)
    if not built():
        return tcp
    from transport.quic import QuicEndpoint

    return BothEndpoints(tcp, QuicEndpoint(keys, owner))


def _wait_for_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    sys.stdin.buffer.read()
    with contextlib.suppress(RuntimeError):  # the loop ended first
        loop.call_soon_threadsafe(stop.set)


def connect_command(address: Address, name: str) -> str:
    return shlex.join(["zc-handoff", "bench", "link", "--connect", str(address), "--peer", name])


def reachable_addresses(bound: Address) -> list[Address]:
    """What the other side may dial: for a wildcard, every address of this machine but loopback."""
    if bound.host not in ("0.0.0.0", "::"):
        return [bound]
    families = {socket.AF_INET} if bound.host == "0.0.0.0" else {socket.AF_INET, socket.AF_INET6}
    found = [
        Address(nic.address, bound.port)
        for nics in psutil.net_if_addrs().values()
        for nic in nics
        if nic.family in families and not nic.address.startswith(("127.", "::1"))
    ]
    return found or [bound]


# -- both on this machine ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def other_end_here(folder: Path) -> Iterator[Target]:
    """A listening process with keys of its own in `folder`; ended with the block."""
    trusting_pair(folder, "here", "there")
    command = [sys.executable, "-m", "zerocopy", "bench", "link", "--listen", "127.0.0.1:0", "--keys"]
    child = subprocess.Popen(
        [*command, str(folder / "there"), "--with-parent"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    try:
        said = shlex.split(child.stdout.readline())
        if "--connect" not in said:
            raise CliError("the other end did not start; see above", ExitCode.FAILED)
        yield Target(folder / "here", "there", said[said.index("--connect") + 1])
    finally:
        child.stdin.close()
        try:
            child.wait(CHILD_START_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
