"""One handoff after another arriving at a host under test, driven from the prefiller's side of a real link."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.wires import Peer, joined, until
from tests.daemon.worker_double import FACTS, PROMPT, SCHEMA, Page, WorkerDouble, state_pages
from transport.link import Landing, Link, PageSink
from zerocopy.daemon.incoming import HandoffFailed, Incoming
from zerocopy.daemon.memory import SharedMemory
from zerocopy.daemon.worker_process import Job
from zerocopy.handoff.components import PageHeader
from zerocopy.handoff.machine import Send
from zerocopy.handoff.messages import (
    Abort,
    CommitAck,
    Grant,
    Prefill,
    decode,
)
from zerocopy.handoff.sink import SinkHandoff
from zerocopy.handoff.source import SourceHandoff
from zerocopy.worker import protocol as p
from zerocopy.worker.sampling import Sampling

RING = 1 << 16
SMALL = 1 << 14  # takes records of 4032 bytes and gives credit for three KV pages
LARGEST = 40 + 2 * (12 + 16 * 96)


class Decoder:
    """The host under test: one `Incoming` at a time, its worker's double and its memory."""

    def __init__(self, rings: int = 2, ring_bytes: int = RING) -> None:
        self.memory = SharedMemory(export=False, landing=True, rings=rings, ring_bytes=ring_bytes)
        self.worker = WorkerDouble(self.memory)
        self.link: Link | None = None
        self.incoming: Incoming | None = None
        self.dropped = 0

    def claim(self, header: bytes, payload_bytes: int) -> Landing | None:
        page = PageHeader.unpack(header)
        if self.incoming is not None and self.incoming.machine.handoff_id == page.handoff_id:
            return self.incoming.claim(page, payload_bytes)
        self.dropped += 1
        return None

    def link_opened(self, link: Link) -> PageSink:
        self.link = link
        return self

    def link_message(self, link: Link, message: bytes) -> None:
        if self.incoming is not None:
            self.incoming.message(decode(message))  # type: ignore[arg-type]

    def link_closed(self, link: Link, reason: str) -> None:
        if self.incoming is not None:
            self.incoming.fail("link-lost", f"the link closed: {reason}")


class Stage:
    """One handoff after the other, driven from the prefiller's side."""

    def __init__(self, host: Decoder, prefiller: Peer, sending: Link) -> None:
        self.host = host
        self.prefiller = prefiller
        self.sending = sending
        self.task: asyncio.Task[None]
        self.job: Job
        self.machine: SourceHandoff
        self._epoch = 0

    # -- the decoder's own part

    def begin(self, **options: Any) -> None:
        assert self.host.link is not None
        settings = {"probe": True, "queue_s": 20.0, "transfer_s": 20.0} | options
        self._epoch += 1
        machine = SinkHandoff(
            secrets.token_bytes(16), FACTS.identity, SCHEMA, PROMPT,
            tenant="", probe=settings["probe"], queue_deadline_s=settings["queue_s"], now=time.monotonic(),
        )  # fmt: skip
        handoff = Incoming(self.host.link, machine, self.host.worker, self.host.memory, PROMPT)  # type: ignore[arg-type]
        self.host.incoming = handoff
        self.host.worker.sent.clear()
        self.prefiller.heard.clear()
        self.job = self.host.worker.open_job()
        request = p.Generate(self.job.number, PROMPT, 8, Sampling(), (), None, probe=settings["probe"])
        self.task = asyncio.create_task(
            handoff.receive(self.job, request, epoch=self._epoch, transfer_s=settings["transfer_s"])
        )

    def expire(self) -> None:
        """Its time is over now, however long it took to get here."""
        assert self.host.incoming is not None
        self.host.incoming.machine.deadline = time.monotonic()
        self.host.incoming._wake.set()

    @property
    def id(self) -> bytes:
        assert self.host.incoming is not None
        return self.host.incoming.machine.handoff_id

    @property
    def trace(self) -> Any:
        assert self.host.incoming is not None
        return self.host.incoming.trace

    # -- the prefiller's part

    async def asked(self) -> None:
        """PREFILL has come; RESERVE goes back."""
        await until(lambda: self.id in [prefill.handoff_id for prefill in self.prefiller.all(Prefill)])
        prefill = self.prefiller.all(Prefill)[-1]  # one of an earlier handoff may have come late
        self.machine = SourceHandoff(prefill, FACTS.identity, SCHEMA, largest_page=LARGEST, now=time.monotonic())

    def say(self, *actions: Any) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.prefiller.say(action.message)

    async def granted(self) -> p.Generate:
        """Up to the worker's import task."""
        await self.asked()
        self.say(*self.machine.reserve())
        self.machine.receive(await self.prefiller.hear(Grant), time.monotonic())
        return await self.host.worker.got(p.Generate)

    @property
    def pages(self) -> list[Page]:
        assert self.machine.grant is not None
        return state_pages(self.id, self.machine.grant)

    def send(self, *pages: Page) -> None:
        for page in pages:
            self.machine.page_sent(page.header)
            self.send_raw(page)

    def send_raw(self, page: Page) -> None:
        self.sending.send_page(page.header.pack(), memoryview(bytearray(page.payload)))

    def seal(self) -> None:
        self.say(*self.machine.manifest(68, None, {"prefilled": 1.5}))

    async def landed(self, count: int) -> None:
        await until(lambda: sum(self.trace.component_pages.values()) >= count)

    async def complete(self) -> p.Generate:
        """All pages are here and imported, the probe too."""
        task = await self.granted()
        self.send(*self.pages)
        await self.landed(len(self.pages))
        await self.host.worker.got(p.StateComplete)
        assert len(self.host.worker.take(task)) == 7
        return task

    async def committed(self) -> None:
        """A handoff like any other works."""
        self.begin()
        task = await self.complete()
        self.seal()
        self.host.worker.imported(task)
        self.host.worker.verified(task)
        await self.task
        assert await self.host.worker.got(p.Commit) == p.Commit(task.job)
        await self.prefiller.hear(CommitAck)
        await self.job.release()
        assert self.nothing_held()

    async def failed(self, reason: str) -> str:
        """It ends, everything is given back and nothing was committed; returns the sentence."""
        with pytest.raises(HandoffFailed) as error:
            await asyncio.wait_for(self.task, 30)
        assert error.value.reason == reason
        assert (self.trace.outcome, self.trace.reason) == ("aborted", reason)
        assert self.nothing_held()
        return str(error.value)

    def nothing_held(self) -> bool:
        assert not self.host.worker.all(p.Commit) or self.trace.outcome == "committed", "H3"
        return self.host.memory.reserved_bytes() == 0 and not self.host.worker.jobs

    async def aborts(self) -> list[str]:
        await self.prefiller.hear(Abort)
        return [abort.reason for abort in self.prefiller.all(Abort)]


@contextlib.asynccontextmanager
async def staged(folder: Path, **options: int) -> AsyncIterator[Stage]:
    host, prefiller = Decoder(**options), Peer()
    async with joined(folder, prefiller, host) as link:
        await until(lambda: host.link is not None)
        yield Stage(host, prefiller, link)
    assert host.memory.reserved_bytes() == 0
    host.worker.close()
    host.memory.close()
