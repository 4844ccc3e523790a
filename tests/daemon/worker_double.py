"""A worker without an engine, for tests of its callers: real jobs, rings and slabs, and a test that says what happens.

States are made-up bytes in a real geometry with every kind of component; pages carry true headers and checksums.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from dataclasses import dataclass
from typing import Any, TypeVar

from native.ring import Ring, RingHandle, Slot
from native.slab import Slab, SlabHandle
from tests.daemon.wires import until
from zerocopy.daemon.memory import SharedMemory
from zerocopy.daemon.worker_process import Job, WorkerLost, WorkerProcess
from zerocopy.handoff.components import (
    HEADER_BYTES,
    SNAPSHOT,
    Component,
    ComponentSpec,
    Identity,
    PageHeader,
    StateSchema,
    page_checksum,
)
from zerocopy.handoff.messages import Grant, pack_tokens
from zerocopy.runtime.base import EngineFacts
from zerocopy.worker import protocol as p

PAGE_TOKENS = 16
SCHEMA = StateSchema(
    "nemotron_h",
    (
        ComponentSpec(Component.ATTENTION_KV, True, (96, 96), layer_overhead=12, page_overhead=40),
        ComponentSpec(Component.RECURRENT, False, (3000, 3000)),
        ComponentSpec(Component.CONVOLUTION, False, (500, 500)),
        ComponentSpec(Component.TOKENS, True, (4,)),
        ComponentSpec(Component.PROBE, False, (512,)),
    ),
    snapshot_prefix=24,
)
FACTS = EngineFacts(
    identity=Identity("m", "t", "nemotron_h", "f16/f16", "on", "double", "s", "one class"),
    schema=SCHEMA,
    model_name="double",
    n_ctx=512,
    sequences=1,
    kv_tokens=512,
    exporting_lanes=1,
    n_vocab=128,
    chunk_tokens=32,
    page_tokens=PAGE_TOKENS,
    page_bytes=0,
    export_before_next_chunk=False,
    chat_template=None,
    bos_token="",
    eos_token="",
    batch_invariant=False,
    mtp="off",
)
PROMPT = [(5 * i) % 128 for i in range(70)]
HISTORY = PROMPT[:-1]

M = TypeVar("M")


@dataclass(frozen=True)
class Page:
    header: PageHeader
    payload: bytes

    @property
    def in_slab(self) -> bool:
        return self.header.component in SNAPSHOT


def state_pages(handoff_id: bytes, grant: Grant) -> list[Page]:
    """The whole state of `PROMPT` in page order: KV pages, two snapshot parts a component, token history, probe."""
    n, pages = len(HISTORY), list[Page]()
    addresses = [(Component.ATTENTION_KV, (0, 2), (at, min(at + PAGE_TOKENS, n))) for at in range(0, n, PAGE_TOKENS)]
    addresses += [(c, (layer, layer + 1), (0, n)) for c in SNAPSHOT for layer in range(2)]
    addresses += [(c, (0, 1), (0, n)) for c in (Component.TOKENS, Component.PROBE)]
    for sequence, (component, layers, tokens) in enumerate(addresses):
        spec = SCHEMA.spec(component)
        assert spec is not None
        size = spec.page_bytes(layers, tokens)
        payload = pack_tokens(HISTORY) if component is Component.TOKENS else bytes([sequence + 1]) * size
        header = PageHeader(
            handoff_id=handoff_id,
            identity=FACTS.identity.digest(),
            epoch=grant.epoch,
            sequence=sequence,
            component=component,
            layers=layers,
            tokens=tokens,
            payload_bytes=size,
            checksum=page_checksum(memoryview(payload), grant.seed, component, layers, tokens),
            final=tokens[1] == n and layers[1] == spec.layers,
        )
        pages.append(Page(header, payload))
    return pages


class WorkerDouble:
    """Stands where `WorkerProcess` stands. What a real worker would do, the test does."""

    def __init__(self, memory: SharedMemory) -> None:
        self.facts: EngineFacts | None = FACTS
        self.reason = ""
        self.sent: list[p.ToWorker] = []
        self.jobs: dict[int, Job] = {}
        self.killed: list[str] = []
        self.drops = True  # answers Release
        self._numbers = itertools.count(1)
        attach, fds = memory.attach(SCHEMA)
        copies = iter([os.dup(fd) for fd in fds])

        def rings(specs: tuple[p.RingSpec, ...]) -> list[Ring]:
            return [Ring.attach(RingHandle(next(copies), next(copies), next(copies), s.capacity)) for s in specs]

        def slabs(specs: tuple[p.SlabSpec, ...]) -> list[Slab]:
            return [Slab.attach(SlabHandle(next(copies), s.capacity)) for s in specs]

        self.export_rings, self.export_slabs = rings(attach.export_rings), slabs(attach.export_slabs)
        self.landing_rings, self.landing_slabs = rings(attach.landing_rings), slabs(attach.landing_slabs)

    def close(self) -> None:
        for ring in self.export_rings + self.landing_rings:
            ring.close()
        for slab in self.export_slabs + self.landing_slabs:
            slab.close()

    # -- as WorkerProcess

    tokenize = WorkerProcess.tokenize  # its own code, over the jobs here

    def open_job(self) -> Job:
        if self.facts is None:
            raise WorkerLost(self.reason)
        job = Job(self, next(self._numbers))  # type: ignore[arg-type]
        self.jobs[job.number] = job
        return job

    async def up(self) -> None:
        await until(lambda: self.facts is not None)

    def forget(self, job: Job) -> None:
        self.jobs.pop(job.number, None)

    def kill(self, why: str) -> None:
        self.killed.append(why)
        self.lose()

    def send(self, message: p.ToWorker) -> None:
        self.sent.append(message)
        if isinstance(message, p.Release) and self.drops:
            asyncio.get_running_loop().call_soon(self.say, p.Dropped(message.job))

    # -- as the test wants it

    def say(self, message: p.ToDaemon) -> None:
        job = self.jobs.get(getattr(message, "job", 0))
        if job is not None:
            job.deliver(message)

    def lose(self) -> None:
        """The process dies."""
        self.facts, self.reason = None, "the engine is restarting"
        for job in list(self.jobs.values()):
            job.end(lost=True)

    def revive(self) -> None:
        """Another process is ready."""
        self.facts, self.reason = FACTS, ""

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.sent if isinstance(message, kind)]

    async def got(self, kind: type[M], count: int = 1) -> M:
        await until(lambda: len(self.all(kind)) >= count)
        return self.all(kind)[count - 1]

    # -- exporting

    def export(self, task: p.Prefill, page: Page) -> None:
        slot = self.claim(task, page)
        slot.view[:HEADER_BYTES] = page.header.pack()
        slot.view[HEADER_BYTES:] = page.payload
        slot.commit()

    def claim(self, task: p.Prefill, page: Page) -> Slot:
        slot = self.export_rings[task.ring].claim(HEADER_BYTES + len(page.payload))
        assert slot is not None, "the export ring is full"
        return slot

    def snapshot(self, task: p.Prefill, pages: list[Page]) -> None:
        assert task.slab is not None
        parts = []
        for page in pages:
            offset = SCHEMA.slab_offset(page.header.component, page.header.layers[0])
            self.export_slabs[task.slab].view(offset, len(page.payload))[:] = page.payload
            parts.append(p.SlabPart(page.header.pack(), offset, len(page.payload)))
        self.say(p.SnapshotReady(task.job, tuple(parts)))

    def prefilled(self, task: p.Prefill, pages: int, **changes: Any) -> None:
        marks = {"started": 1.0, "prefilled": 2.0, "exported": 3.0}
        done = {"target_position": len(HISTORY) - 1, "mtp_position": None, "marks": marks, "exports": (), "solo": True}
        self.say(p.Prefilled(job=task.job, pages=pages, **(done | changes)))

    def export_all(self, task: p.Prefill, pages: list[Page]) -> None:
        for page in pages:
            if not page.in_slab:
                self.export(task, page)
        self.snapshot(task, [page for page in pages if page.in_slab])
        self.prefilled(task, len(pages))

    # -- importing

    def take(self, task: p.Generate) -> list[Page]:
        """Import every record that is there."""
        assert task.ring is not None
        pages = []
        while (record := self.landing_rings[task.ring].read()) is not None:
            header = PageHeader.unpack(record.view[:HEADER_BYTES])
            pages.append(Page(header, bytes(record.view[HEADER_BYTES:])))
            record.release()
        return pages

    def imported(self, task: p.Generate) -> None:
        self.say(p.Imported(task.job, {"imported": 5.0, "evaluated": 6.0}, (), solo=True))

    def verified(self, task: p.Generate, ok: bool = True) -> None:
        self.say(p.Verified(task.job, exact=ok, error=0.0 if ok else 1.0))
