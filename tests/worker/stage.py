"""Both hosts of a handoff on one stage: two lanes, their rings and slabs, and the daemons' part played by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from native.ring import Ring
from native.slab import Slab
from zerocopy.handoff.components import HEADER_BYTES, Component, PageHeader, page_checksum
from zerocopy.runtime.base import EngineError, Pool
from zerocopy.runtime.llama.engine import LlamaRuntime
from zerocopy.runtime.pages import most_page_bytes
from zerocopy.worker import protocol as p
from zerocopy.worker.decode_job import DecodeJob
from zerocopy.worker.prefill_job import PrefillJob
from zerocopy.worker.sampling import Sampling

HANDOFF = bytes(range(16))
EPOCH = 7
SEED = 0xFEEDFACECAFEBEEF
KEY = b"a key of the test, 32 bytes long"

M = TypeVar("M")


def prompt(n: int) -> list[int]:
    return [(7 * i + i // 11) % 128 for i in range(n)]


@dataclass
class Outbox:
    """Everything a job told its daemon."""

    messages: list[p.ToDaemon] = field(default_factory=list)

    def __call__(self, message: p.ToDaemon) -> None:
        self.messages.append(p.decode_to_daemon(p.encode(message)[4:]))  # as it was when it was sent

    def all(self, kind: type[M]) -> list[M]:
        return [m for m in self.messages if isinstance(m, kind)]

    def one(self, kind: type[M]) -> M:
        (message,) = self.all(kind)
        return message

    @property
    def parts(self) -> list[p.SlabPart]:
        return [part for ready in self.all(p.SnapshotReady) for part in ready.parts]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.all(p.TextDelta))


@dataclass
class Page:
    """One exported page; `payload` is a copy that tests may damage."""

    header: PageHeader
    payload: bytearray

    def intact(self) -> bool:
        h = self.header
        return page_checksum(memoryview(self.payload), SEED, h.component, h.layers, h.tokens) == h.checksum


class Stage:
    def __init__(self, runtime: LlamaRuntime, ring_bytes: int = 1 << 20, landing_bytes: int = 1 << 20) -> None:
        self.runtime = runtime
        self.facts = runtime.facts
        self.source, self.sink = runtime.open_lane(), runtime.open_lane()
        self.export = Ring.create(ring_bytes, "test-export")
        self.landing = Ring.create(landing_bytes, "test-landing")
        self.slabs: dict[str, Slab] = {}
        if size := runtime.facts.schema.snapshot_bytes():
            for name in ("export", "landing"):
                self.slabs[name] = Slab.create(size, f"test-{name}")
                assert self.slabs[name].claim(EPOCH)
        self.outbox = Outbox()

    def close(self) -> None:
        self.source.close()
        self.sink.close()
        self.export.close()
        self.landing.close()
        for slab in self.slabs.values():
            slab.close()

    # -- the prefiller

    def prefill(self, tokens: list[int], **changes: Any) -> PrefillJob:
        slab = 0 if self.slabs else None
        message = p.Prefill(1, tokens, HANDOFF, EPOCH, SEED, ring=0, slab=slab, probe=True)
        facts = msgspec.structs.replace(self.facts, **changes.pop("facts", {}))
        message = msgspec.structs.replace(message, **changes)
        return PrefillJob(message, self.source, facts, self.export, self.slabs.get("export"), self.outbox)

    def read_ring(self) -> Iterator[Page]:
        """Take every record out of the export ring."""
        while (record := self.export.read()) is not None:
            header = PageHeader.unpack(record.view[:HEADER_BYTES])
            page = Page(header, bytearray(record.view[HEADER_BYTES:]))
            record.release()
            yield page

    def read_slab(self) -> list[Page]:
        pages = []
        for part in self.outbox.parts:
            payload = bytearray(self.slabs["export"].view(part.offset, part.nbytes))
            pages.append(Page(PageHeader.unpack(part.header), payload))
        return pages

    def exported(self, tokens: list[int], *, late: bool = False, **changes: Any) -> list[Page]:
        """A whole export, in page order. `late`: nothing leaves the ring before it is full, and pages are as long as
        it takes."""
        if late:
            changes["facts"] = {"page_bytes": most_page_bytes(self.export.capacity)}
        job = self.prefill(tokens, **changes)
        pages: list[Page] = []
        while not job.finished:
            (run if late else step)(job)
            pages += self.read_ring()
        if self.slabs:
            pages += self.read_slab()
        return sorted(pages, key=lambda page: page.header.sequence)

    # -- the decoder

    def generate(self, tokens: list[int], *, imported: bool, **changes: Any) -> DecodeJob:
        """A job that imports (`imported`) or evaluates its prompt itself."""
        slab = self.slabs.get("landing") if imported else None
        message = p.Generate(2, tokens, max_tokens=8, sampling=Sampling(), stop=(), proof_key=KEY, probe=imported)
        message = msgspec.structs.replace(message, **changes)
        ring = self.landing if imported else None
        pool = cast(Pool, self.sink.pool)  # a lane knows less of its pool than its pool can do
        return DecodeJob(message, self.runtime, pool, ring, slab, self.outbox)

    def land(self, page: Page) -> None:
        """What the daemon does with a verified page."""
        if page.header.component in (Component.CONVOLUTION, Component.RECURRENT):
            offset = self.facts.schema.slab_offset(page.header.component, page.header.layers[0])
            self.slabs["landing"].view(offset, len(page.payload))[:] = page.payload
            return
        slot = self.landing.claim(HEADER_BYTES + len(page.payload))
        assert slot is not None
        slot.view[:HEADER_BYTES] = page.header.pack()
        slot.view[HEADER_BYTES:] = page.payload
        slot.commit()


def step(job: PrefillJob | DecodeJob) -> bool:
    """The loop's part with one job alone: one piece of work, else its row; False when it waits or is finished."""
    if job.finished:
        return False
    if job.work():
        return True
    row = job.wanted()
    if row is None:
        return False
    (answer,) = row.lane.pool.evaluate([row])  # type: ignore[attr-defined]
    if isinstance(answer, EngineError):
        raise answer
    job.evaluated(len(row.tokens), answer, 0.0)
    return not job.finished


def run(job: PrefillJob | DecodeJob, until: Callable[[], bool] = lambda: False) -> None:
    """Step until the job waits or is finished."""
    while not until() and step(job):
        pass
