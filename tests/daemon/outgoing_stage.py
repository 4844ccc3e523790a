"""One handoff after another leaving a host under test, driven from the decoder's side of a real link."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from tests.daemon.wires import Peer, Refuses, joined, until
from tests.daemon.worker_double import FACTS, PROMPT, Page, WorkerDouble, state_pages
from transport.link import Link, PageSink
from zerocopy.daemon.memory import SharedMemory
from zerocopy.daemon.outgoing import OutgoingService
from zerocopy.daemon.trace import Trace
from zerocopy.handoff.components import PageHeader
from zerocopy.handoff.errors import HandoffError
from zerocopy.handoff.messages import (
    Abort,
    CommitAck,
    Grant,
    Manifest,
    Prefill,
    Reserve,
    decode,
    pack_tokens,
)
from zerocopy.worker import protocol as p

SEED = 12345
RING = 1 << 16


class Landed:
    def __init__(self, sink: Pages, header: bytes, size: int) -> None:
        self._sink = sink
        self._header = header
        self.view = memoryview(bytearray(size))

    def publish(self) -> None:
        self._sink.gate.wait(60)
        self._sink.landed.append(Page(PageHeader.unpack(self._header), bytes(self.view)))

    def discard(self) -> None:
        self._sink.discarded += 1


class Pages:
    """Takes every page; with the gate closed none is ever acknowledged."""

    def __init__(self) -> None:
        self.landed: list[Page] = []
        self.discarded = 0
        self.gate = threading.Event()
        self.gate.set()

    def claim(self, header: bytes, payload_bytes: int) -> Landed:
        return Landed(self, header, payload_bytes)


class Prefiller:
    """The host under test: the service, its worker's double and its memory."""

    def __init__(self, rings: int = 2) -> None:
        self.memory = SharedMemory(export=True, landing=False, rings=rings, ring_bytes=RING)
        self.worker = WorkerDouble(self.memory)
        self.traces: list[Trace] = []
        self.errors: list[str] = []
        self.service = OutgoingService(self.worker, self.memory, self.traces.append)  # type: ignore[arg-type]

    def link_opened(self, link: Link) -> PageSink:
        return Refuses()

    def link_message(self, link: Link, message: bytes) -> None:
        decoded = decode(message)
        try:
            if isinstance(decoded, Prefill):
                self.service.prefill(link, decoded)
            else:
                self.service.message(link, decoded)  # type: ignore[arg-type]
        except HandoffError as error:
            self.errors.append(error.reason)

    def link_closed(self, link: Link, reason: str) -> None:
        self.service.link_lost(link, reason)

    def nothing_held(self) -> bool:
        return self.service.running == 0 and self.memory.reserved_bytes() == 0 and not self.worker.jobs


class Stage:
    """One handoff after the other, driven from the decoder's side."""

    def __init__(self, host: Prefiller, decoder: Peer, sink: Pages) -> None:
        self.host = host
        self.decoder = decoder
        self.sink = sink
        self.id = b""
        self.first: bytes | None = None  # one that has the lane while `id` waits for it
        self.grant: Grant | None = None
        self.count = 0

    def ask(self, **changes: Any) -> bytes:
        self.id = secrets.token_bytes(16)
        prefill = Prefill(
            handoff_id=self.id,
            identity=FACTS.identity,
            prompt=pack_tokens(PROMPT),
            tenant="",
            queue_deadline_s=20.0,
            probe=True,
        )
        self.decoder.say(msgspec.structs.replace(prefill, **changes))
        return self.id

    async def reserved(self, handoff_id: bytes | None = None) -> Reserve:
        wanted = handoff_id or self.id
        await until(lambda: any(r.handoff_id == wanted for r in self.decoder.all(Reserve)))
        reserves: list[Reserve] = self.decoder.all(Reserve)
        return next(r for r in reserves if r.handoff_id == wanted)

    async def granted(self, **changes: Any) -> p.Prefill:
        """Up to the worker's task."""
        await self.reserved()
        grant = Grant(handoff_id=self.id, epoch=7, credit=RING // 2, seed=SEED, deadline_s=20.0)
        self.grant = msgspec.structs.replace(grant, **changes)
        self.decoder.say(self.grant)
        self.count += 1
        return await self.host.worker.got(p.Prefill, self.count)

    def expire(self) -> None:
        """Its time is over now, however long it took to get here."""
        (handoff,) = self.host.service._handoffs.values()
        handoff.machine.deadline = time.monotonic()
        handoff._wake.set()

    @property
    def pages(self) -> list[Page]:
        assert self.grant is not None
        return state_pages(self.id, self.grant)

    async def arrived(self, count: int) -> list[Page]:
        await until(lambda: len(self.sink.landed) >= count)
        return self.sink.landed

    async def streamed(self) -> p.Prefill:
        """Up to the manifest."""
        task = await self.granted()
        self.host.worker.export_all(task, self.pages)
        await self.arrived(len(self.pages))
        await until(lambda: any(m.handoff_id == self.id for m in self.decoder.all(Manifest)))
        return task

    async def committed(self) -> None:
        """The whole way."""
        self.ask()
        self.sink.landed.clear()
        await self.streamed()
        self.decoder.say(CommitAck(handoff_id=self.id, epoch=7))
        await until(self.host.nothing_held)
        assert self.host.traces[-1].outcome == "committed"

    async def failed(self, reason: str) -> Trace:
        """It ends, with everything given back; and the next one works."""
        await until(self.host.nothing_held)
        trace = next(t for t in self.host.traces if t.handoff == self.id.hex())
        assert (trace.outcome, trace.reason) == ("aborted", reason)
        return trace

    def aborts(self) -> list[str]:
        return [abort.reason for abort in self.decoder.all(Abort) if abort.handoff_id == self.id]


@contextlib.asynccontextmanager
async def staged(folder: Path, **options: int) -> AsyncIterator[Stage]:
    host, sink = Prefiller(**options), Pages()
    decoder = Peer(sink)
    async with joined(folder, decoder, host):
        stage = Stage(host, decoder, sink)
        try:
            yield stage
        finally:
            sink.gate.set()  # or the link's receiver would wait for it
        await host.service.stop()
        assert host.nothing_held()
        assert not host.worker.killed
    host.worker.close()
    host.memory.close()
