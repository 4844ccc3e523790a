"""The two ends of `bench link`: one sends pages for a while, one lands them in pre-faulted memory and counts.

They are joined by a real link of `transport`, and everything one asks of the other is a small message on it: so only a
trusted peer gets a byte of memory, a port or a process. Owns the memory pages leave from and land in (`ARENA_BYTES` at
each end) and, for the ceilings, one plain TCP connection or one iperf3 server at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import mmap
import secrets
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from transport.link import Landing, Link, LinkError, PageSink
from zerocopy.cli.measuring import Pacer, cpu_s

ARENA_BYTES: Final = 32 << 20
MAX_PAGE_BYTES: Final = ARENA_BYTES // 4
MAX_SLOTS: Final = 64
PLAIN_BLOCK: Final = 1 << 20
TOKEN_BYTES: Final = 16
MAX_S: Final = 600.0  # of one measurement
ACCEPT_S: Final = 5.0  # for a ceiling's connection to come
ANSWER_S: Final = 30.0
_HEADER: Final = b"bench page"


# -- what they say to each other ---------------------------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, tag=True):
    page_bytes: Annotated[int, Meta(ge=1, le=MAX_PAGE_BYTES)]


class Ready(msgspec.Struct, frozen=True, tag=True):
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Answered at once, so it also measures the round trip of a control message."""

    number: int


class Usage(msgspec.Struct, frozen=True, tag=True):
    number: int
    cpu_s: float


class OpenCeiling(msgspec.Struct, frozen=True, tag=True):
    kind: Literal["plaintext", "iperf3"]
    seconds: Annotated[float, Meta(ge=0, le=MAX_S)]


class CeilingOpen(msgspec.Struct, frozen=True, tag=True):
    """`port` is None where it cannot be had; `token` goes first on the plain connection."""

    port: int | None
    token: bytes = b""


class Received(msgspec.Struct, frozen=True, tag=True):
    nbytes: int


Message = Prepare | Ready | Ask | Usage | OpenCeiling | CeilingOpen | Received
_decoder: Final = msgspec.msgpack.Decoder(Message)


def _say(link: Link, message: Message) -> None:
    link.send(msgspec.msgpack.encode(message))


def _heard(link: Link, message: bytes) -> Message:
    try:
        return _decoder.decode(message)
    except msgspec.DecodeError as error:
        raise LinkError("bench", f"{link.peer} sent {error}: run the same version on both") from None


def arena() -> memoryview:
    """Pre-faulted memory of random bytes: nothing on the way can have an easy time with them."""
    view = memoryview(mmap.mmap(-1, ARENA_BYTES))
    block = secrets.token_bytes(1 << 20)
    for start in range(0, ARENA_BYTES, len(block)):
        view[start : start + len(block)] = block
    return view


# -- the landing end ---------------------------------------------------------------------------------------------------


class _Slot:
    def __init__(self, view: memoryview, free: list[memoryview]) -> None:
        self.view = view
        self._free = free

    def publish(self) -> None:
        self._free.append(self.view)

    discard = publish


class LandingEnd:
    """`LinkOwner` and sink of the listening side. `host` is where it listens, for the ceilings' ports."""

    def __init__(self, host: str, opened: Callable[[str], None] = lambda peer: None) -> None:
        self._host = host
        self._opened = opened
        self._arena = arena()
        self._free: list[memoryview] = []
        self._page_bytes = 0
        self._tasks: dict[asyncio.Task[None], Link] = {}  # ceilings, and for whom

    def link_opened(self, link: Link) -> PageSink:
        self._opened(link.peer)
        return self

    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        if payload_bytes != self._page_bytes or not self._free:
            raise LinkError("bench", f"a page of {payload_bytes} bytes came, prepared is {self._page_bytes}")
        return _Slot(self._free.pop(0), self._free)

    def link_message(self, link: Link, message: bytes) -> None:
        match _heard(link, message):
            case Prepare(page_bytes):
                self._prepare(page_bytes)
                _say(link, Ready(len(self._free)))
            case Ask(number):
                _say(link, Usage(number, cpu_s()))
            case OpenCeiling(kind, seconds):
                work = self._plaintext(link) if kind == "plaintext" else self._iperf3(link, seconds)
                task = asyncio.get_running_loop().create_task(work)
                self._tasks[task] = link
                task.add_done_callback(self._tasks.pop)

    def link_closed(self, link: Link, reason: str) -> None:
        """Its own ceiling ends; the next measurement's link may have one already."""
        for task, asker in self._tasks.items():
            if asker is link:
                task.cancel()

    def _prepare(self, page_bytes: int) -> None:
        slots = min(MAX_SLOTS, ARENA_BYTES // page_bytes)
        self._page_bytes = page_bytes
        self._free = [self._arena[n * page_bytes : (n + 1) * page_bytes] for n in range(slots)]

    async def _plaintext(self, link: Link) -> None:
        """One plain connection that shows the token: read it to its end as fast as this host can."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with socket.create_server((self._host, 0), family=_family(self._host), backlog=1) as server:
            server.settimeout(ACCEPT_S)
            _say(link, CeilingOpen(server.getsockname()[1], token))
            nbytes = await asyncio.to_thread(_receive_plain, server, token, self._arena)
        with contextlib.suppress(LinkError):
            _say(link, Received(nbytes))

    async def _iperf3(self, link: Link, seconds: float) -> None:
        if shutil.which("iperf3") is None:
            _say(link, CeilingOpen(None))
            return
        with socket.create_server((self._host, 0), family=_family(self._host)) as probe:
            port = probe.getsockname()[1]
        server = await asyncio.create_subprocess_exec(
            "iperf3", "-s", "-1", "-B", self._host, "-p", str(port),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            await _listening(server, self._host, port)
            _say(link, CeilingOpen(port))
            await asyncio.wait_for(server.wait(), seconds + ANSWER_S)
        except (TimeoutError, LinkError):
            return
        finally:
            if server.returncode is None:
                server.kill()
                await server.wait()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def _listening(server: asyncio.subprocess.Process, host: str, port: int) -> None:
    """iperf3 does not say when it listens, and a trial connection would use up its one test."""
    deadline = time.monotonic() + ACCEPT_S
    while server.returncode is None and time.monotonic() < deadline:
        with socket.socket(_family(host)) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, port))
            except OSError:
                return  # taken: by it
        await asyncio.sleep(0.02)


def _receive_plain(server: socket.socket, token: bytes, memory: memoryview) -> int:
    """Bytes after the token; 0 if nobody came, or somebody without it."""
    try:
        sock, _ = server.accept()
    except OSError:
        return 0
    with sock:
        sock.settimeout(ANSWER_S)
        first = bytearray(TOKEN_BYTES)
        try:
            if sock.recv_into(first, 0, socket.MSG_WAITALL) != TOKEN_BYTES or not hmac.compare_digest(first, token):
                return 0
            total, at = 0, 0
            while count := sock.recv_into(memory[at : at + PLAIN_BLOCK], 0, socket.MSG_WAITALL):
                total += count
                at = (at + PLAIN_BLOCK) % ARENA_BYTES
            return total
        except OSError:
            return 0


# -- the sending end ---------------------------------------------------------------------------------------------------


class SendingEnd:
    """`LinkOwner` of the connecting side: asks, and hands pages to the link."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._answers: asyncio.Queue[Message | None] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[Usage]] = {}
        self._numbers = itertools.count()
        self._closed = ""

    def link_opened(self, link: Link) -> PageSink:
        return self

    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        return None

    def link_message(self, link: Link, message: bytes) -> None:
        decoded = _heard(link, message)
        if isinstance(decoded, Usage):
            waiting = self._asked.pop(decoded.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(decoded)
        else:
            self._answers.put_nowait(decoded)

    def link_closed(self, link: Link, reason: str) -> None:
        self._closed = reason
        self._answers.put_nowait(None)
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(
                    LinkError("bench", f"the link to {link.peer} ended during a measurement: {reason}")
                )

    async def ask(self, link: Link, message: Message, kind: type[Any]) -> Any:
        """Send and await the answer of that kind. Raises LinkError if the link closes, or nothing comes."""
        _say(link, message)
        return await self.answer(kind)

    async def answer(self, kind: type[Any]) -> Any:
        try:
            answer = await asyncio.wait_for(self._answers.get(), ANSWER_S)
        except TimeoutError:
            raise LinkError("bench", f"the other end sent no answer within {ANSWER_S:g} s") from None
        if not isinstance(answer, kind):
            raise LinkError("bench", f"the other end gave no {kind.__name__} ({self._closed or 'another answer'})")
        return answer

    async def usage(self, link: Link) -> tuple[Usage, float]:
        """The other end's processor time, and the round trip in seconds. Raises LinkError if the link ends."""
        number, began = next(self._numbers), time.monotonic()
        waiting = asyncio.get_running_loop().create_future()
        _say(link, Ask(number))
        self._asked[number] = waiting
        usage = await waiting
        return usage, time.monotonic() - began

    async def load(self, link: Link, page_bytes: int, slots: int, seconds: float, bps: float = 0) -> Load:
        """Keep pages on their way for so long, then until all have arrived."""
        load = Load(link, self._memory, page_bytes, min(slots, ARENA_BYTES // page_bytes))
        await load.run(seconds, bps)
        return load


class Load:
    """Pages sent for a while: how many bytes, how long, and how long each page took from queueing to arrival."""

    def __init__(self, link: Link, memory: memoryview, page_bytes: int, slots: int) -> None:
        self._link = link
        self._views = deque(memory[n * page_bytes : (n + 1) * page_bytes] for n in range(slots))
        self._room = asyncio.Semaphore(slots)
        self._slots = slots
        self._error: BaseException | None = None
        self.page_s: list[float] = []
        self.nbytes = 0
        self.elapsed_s = 0.0

    async def run(self, seconds: float, bps: float) -> None:
        began = time.monotonic()
        pacer = Pacer(bps, began)
        while time.monotonic() - began < seconds and self._error is None:
            await self._room.acquire()
            if (wait := pacer.wait_s(len(self._views[-1]), time.monotonic())) > 0:
                await asyncio.sleep(wait)
            self._send()
        for _ in range(self._slots):
            await self._room.acquire()
        # A last page that is there before its time is over is not faster than the rate: 1.3 Gb/s of a cap of 1.
        self.elapsed_s = max(time.monotonic(), pacer.free_at) - began
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        view, began = self._views.popleft(), time.monotonic()  # round and round, as in a ring
        try:
            future = self._link.send_page(_HEADER, view)
        except LinkError as error:
            self._error = error
            self._room.release()
            return
        future.add_done_callback(lambda done: self._arrived(done, view, began))

    def _arrived(self, future: asyncio.Future[None], view: memoryview, began: float) -> None:
        if future.cancelled() or (error := future.exception()) is not None:
            self._error = self._error or (LinkError("bench", "cancelled") if future.cancelled() else error)
        else:
            self.page_s.append(time.monotonic() - began)
            self.nbytes += len(view)
        self._views.append(view)
        self._room.release()


def send_plain(host: str, port: int, token: bytes, memory: memoryview, seconds: float) -> float:
    """Send for so long; returns when it began. The receiver says how much came, and its answer when it ended."""
    with socket.create_connection((host, port), ACCEPT_S) as sock:
        sock.settimeout(ANSWER_S)
        sock.sendall(token)
        began, at = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            sock.sendall(memory[at : at + PLAIN_BLOCK])
            at = (at + PLAIN_BLOCK) % ARENA_BYTES
        sock.shutdown(socket.SHUT_WR)
    return began
