"""The prefiller's side: serves PREFILLs of peers on the lanes of the worker's prefill pool, in order of arrival.

Owns each handoff's queueing, its lease of export memory, the pump from ring and slab to the link, and its ending: the
worker lets go first, then the memory is wiped and lent again. All on the event loop's thread; a page costs a few
Python calls, its bytes are moved by the link's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from native.ring import Record
from transport.link import Link, LinkError
from zerocopy.daemon.admission import Admission, Refused, Ticket
from zerocopy.daemon.ending import to_the_end
from zerocopy.daemon.half import HandoffHalf
from zerocopy.daemon.memory import Lease, SharedMemory
from zerocopy.daemon.trace import Trace, busy
from zerocopy.daemon.worker_process import Job, WorkerProcess
from zerocopy.handoff.components import HEADER_BYTES, SNAPSHOT, ComponentSpec, PageHeader
from zerocopy.handoff.errors import HandoffError
from zerocopy.handoff.messages import Abort, HandoffMessage, Prefill, encode, unpack_tokens
from zerocopy.handoff.seen import SeenIds
from zerocopy.handoff.source import SourceHandoff
from zerocopy.runtime.base import EngineError, EngineFacts
from zerocopy.runtime.pages import fitted, longest, paged
from zerocopy.worker import protocol as p

# Prompts that may be here: the queue deadline bounds time, this bounds memory. A peer may have as many as there are
# places left, so half of them alone (a decoder's own queue by default) and a third beside another: never all of them.
MAX_QUEUED: Final = 512
# Pages given to the link and not yet with the peer: more would only lengthen the link's queue, which has a bound.
MAX_SENDING: Final = 1024
# The link sends pages in the order they come, so what one handoff has given it is what another's next page waits for:
# at most so many seconds of its bandwidth, within these bytes. The most is 2 ms of acknowledging at 130 Gb/s.
SENDING_S: Final = 0.1
SENDING_BYTES: Final = (1 << 20, 32 << 20)


class _Page:
    """One page on its way: where it lies and what frees it."""

    def __init__(self, header: PageHeader, packed: bytes, payload: memoryview, record: Record | None) -> None:
        self.header = header
        self.packed = packed
        self.payload = payload
        self.record = record

    def free(self) -> None:
        self.payload.release()
        if self.record is not None:
            self.record.release()


class Outgoing(HandoffHalf[SourceHandoff]):
    """One handoff leaving this host."""

    def __init__(self, service: OutgoingService, link: Link, prefill: Prefill, facts: EngineFacts) -> None:
        """`facts` are fitted to the decoder's ring."""
        self._service = service
        self._tokens = unpack_tokens(prefill.prompt)
        self._schema = facts.schema
        self._page_room = prefill.largest_page
        sizes = (_largest_page(spec, facts, len(self._tokens)) for spec in facts.schema.components)
        self._largest_page = max(sizes)
        now = time.monotonic()
        machine = SourceHandoff(prefill, facts.identity, facts.schema, largest_page=self._largest_page, now=now)
        trace = Trace(prefill.handoff_id.hex(), "prefiller", link.peer, link.transport, len(self._tokens))
        super().__init__(link, machine, trace)
        self.trace.marks["asked"] = now
        self._lease: Lease | None = None
        self._ticket: Ticket | None = None
        self._job: Job | None = None
        self._head: _Page | None = None  # read from the ring, waiting for credit or its turn
        self._parts: deque[p.SlabPart] = deque()
        self._sending: dict[asyncio.Future[None], None] = {}  # in order
        self._sending_bytes = 0
        self._prefilled: p.Prefilled | None = None

    async def run(self, ticket: Ticket) -> None:
        """From the queue to the end; never raises for what can go wrong with a handoff."""
        try:
            async with self._lane(ticket):
                if not self.machine.over:
                    await self._serve()
        finally:
            self._shut_down()  # cancelled while it waited for the lane
            self._service.ended(self)

    # -- stages --------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            with self._failing():
                self._do(self.machine.reserve())
                while self.machine.grant is None and not self.machine.over:
                    await self._sleep()
                if not self.machine.over:
                    self.trace.marks["granted"] = time.monotonic()
                    await self._transfer()
        finally:
            self._shut_down()
            await to_the_end(self._end())

    def _shut_down(self) -> None:
        """Whatever is not over here was cancelled, and only a daemon that stops does that."""
        self.fail("shutdown", "the prefiller is shutting down")

    async def _transfer(self) -> None:
        grant = self.machine.grant
        assert grant is not None and self._ticket is not None
        lease = self._lease = self._service.memory.lend("export", grant.epoch)
        if lease is None:
            self.fail("no-memory", "the prefiller has no free export ring: raise --rings")
            return
        if HEADER_BYTES + self._largest_page > lease.ring.max_record:
            size, most = self._largest_page, lease.ring.max_record - HEADER_BYTES
            fix = "raise its --ring-mib or lower its --page-tokens"
            self.fail("page-too-large", f"the prefiller's pages have {size} bytes, its ring takes {most}: {fix}")
            return
        self._job = self._service.worker.open_job()
        async with self._hearing(self._job, lease.ring.data_fd, self._data_bell):
            self._service.worker.send(
                p.Prefill(
                    job=self._job.number,
                    tokens=self._tokens,
                    handoff_id=self.machine.handoff_id,
                    epoch=grant.epoch,
                    seed=grant.seed,
                    ring=lease.ring_index,
                    slab=lease.slab_index,
                    probe=self.machine.probe,
                    lane=self._ticket.lane,
                    largest_page=self._page_room,
                )
            )
            while not self.machine.over:
                self._pump(lease)
                await self._sleep()

    async def _listen(self, job: Job) -> None:
        with self._failing():
            while True:
                match await job.next():
                    case p.ChunkDone() as chunk:
                        self.trace.chunks.append((chunk.started, chunk.ended, chunk.tokens))
                    case p.SnapshotReady() as snapshot:
                        self._parts.extend(snapshot.parts)
                    case p.Prefilled() as prefilled:
                        self._prefilled = prefilled
                        self.trace.marks.update(prefilled.marks)
                        self.trace.exports.extend(prefilled.exports)
                self._wake.set()

    async def _end(self) -> None:
        """Free everything: links first, then the worker, then memory. Also runs while the daemon stops."""
        if self.machine.outcome is None or not self.machine.outcome.committed:
            for future in reversed(self._sending):  # the last first, so that no page ever overtakes a cancelled one
                future.cancel()
        await self._drained.wait()
        if self._head is not None:
            self._free(self._head)
            self._head = None
        if self._job is not None:
            await self._job.release()
        if self._lease is not None:
            self._lease.end()

    # -- the pump ------------------------------------------------------------------------------------------

    def _data_bell(self) -> None:
        if self._lease is not None:
            self._lease.ring.clear_data_bell()
        self._wake.set()

    def _pump(self, lease: Lease) -> None:
        """Hand every page that is there, next in order and within credit, to the link; then the manifest."""
        while (
            not self._link_has_enough()
            and (page := self._next_page(lease)) is not None
            and self.machine.may_send(page.header)
        ):
            self.machine.page_sent(page.header)  # or it raises, and the page is freed at the end
            if page is self._head:
                self._head = None
            self._send(page)
        done = self._prefilled
        if done is not None and self.machine.next_sequence == done.pages and "manifest" not in self.trace.marks:
            self.trace.marks["manifest"] = time.monotonic()
            timings = self._timings()
            self._do(self.machine.manifest(done.target_position, done.mtp_position, timings, solo=done.solo))

    def _link_has_enough(self) -> bool:
        """One page may always be on its way, however large."""
        least, most = SENDING_BYTES
        bandwidth = self.link.stats.bandwidth_bps
        allowed = most if bandwidth is None else min(most, max(least, bandwidth / 8 * SENDING_S))
        return len(self._sending) >= MAX_SENDING or self._sending_bytes >= allowed

    def _next_page(self, lease: Lease) -> _Page | None:
        """The page whose turn it is, from the ring or from the slab; None while it is not there."""
        if self._head is None and (record := lease.ring.read()) is not None:
            self._head = _page_of(record)
        turn = self.machine.next_sequence
        if self._head is not None and self._head.header.sequence == turn:
            return self._head
        if self._parts and lease.slab is not None:
            part = self._parts[0]
            header = PageHeader.unpack(part.header)
            if header.sequence == turn:
                self._parts.popleft()
                return _Page(header, part.header, lease.slab.view(part.offset, part.nbytes), None)
        if self._prefilled is not None and turn < self._prefilled.pages:
            # Everything is exported and still the page whose turn it is does not exist: an exporter left one out.
            raise HandoffError("page-missing", f"the exporter left out page {turn} of {self._prefilled.pages}")
        return None

    def _send(self, page: _Page) -> None:
        began = time.monotonic()
        try:
            future = self.link.send_page(page.packed, page.payload)
        except LinkError as error:
            self._free(page)
            self.fail("link-lost", str(error))
            self._do(self.machine.page_done())
            return
        self._sending[future] = None
        self._sending_bytes += page.header.payload_bytes
        future.add_done_callback(lambda done: self._sent(done, page, began))

    def _sent(self, future: asyncio.Future[None], page: _Page, began: float) -> None:
        full = self._link_has_enough()
        self._sending.pop(future, None)
        self._sending_bytes -= page.header.payload_bytes
        last = self.trace.wire[-1][1] if self.trace.wire else began
        self._free(page)
        if not future.cancelled() and (error := future.exception()) is not None:
            self.fail("link-lost", str(error))
        elif not future.cancelled():
            span = (max(began, last), time.monotonic(), page.header.payload_bytes)
            self.trace.page(page.header.component, span)
        actions = self.machine.page_done()
        if actions or full:  # otherwise the pump waits for credit or a page, and this is neither
            self._do(actions)

    def _free(self, page: _Page) -> None:
        """A ring that does not take it back ends the handoff; what comes after is not to be left out for that."""
        with self._failing():
            page.free()

    def _timings(self) -> dict[str, float]:
        """Figures for the decoder, in seconds after GRANT reached this host, and plain sizes."""
        trace, granted = self.trace, self.trace.marks["granted"]
        moments = {name: at - granted for name, at in trace.marks.items()}
        wire_bytes, wire_busy_s = trace.moved()
        return {
            **moments,
            "export_busy_s": busy(trace.exports),
            "wire_bytes": wire_bytes,
            "wire_busy_s": wire_busy_s,
            "chunks": float(len(trace.chunks)),
            "kv_bytes_sent_before_prefill_end": float(trace.kv_bytes_by(trace.marks["prefilled"])),
        }

    @contextlib.asynccontextmanager
    async def _lane(self, ticket: Ticket) -> AsyncIterator[None]:
        """A lane of the prefill pool, once it is this handoff's turn; without it if the handoff ended first."""
        self._ticket = ticket
        try:
            await self._turn(ticket)
            yield
        finally:
            self._service.lanes.give_back(ticket)


class OutgoingService:
    """All handoffs leaving this host, in arrival order."""

    def __init__(
        self,
        worker: WorkerProcess,
        memory: SharedMemory,
        on_end: Callable[[Trace], None],
        share: Callable[[int], int] | None = None,
    ) -> None:
        """`share`: how many of so many lanes one peer may hold."""
        self.worker = worker
        self.memory = memory
        # The time a prompt may wait is its decoder's to say, in PREFILL.
        self.lanes = Admission(waiting=MAX_QUEUED, wait_s=math.inf, share=share)
        self._on_end = on_end
        self._handoffs: dict[bytes, Outgoing] = {}
        self._seen = SeenIds()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return len(self._handoffs)

    def prefill(self, link: Link, prefill: Prefill) -> None:
        """A peer asks for a prompt's state. A replayed id closes the link: no answer to it could not also end the
        handoff that it imitates."""
        self._seen.use(prefill.handoff_id)
        if self.worker.facts is None:
            self.refuse(link, prefill, "engine-down", f"the prefiller cannot serve now: {self.worker.reason}")
        elif self._has_its_places(link.peer):
            sentence = f"the prefiller has {self.running} prompts queued and keeps as many places free as one peer has"
            self.refuse(link, prefill, "queue-full", sentence)
        elif prefill.tokens > self.worker.facts.n_ctx:
            have, want = self.worker.facts.n_ctx, prefill.tokens
            sentence = f"the prefiller holds {have} tokens, the prompt has {want}: start it with a larger --n-ctx"
            self.refuse(link, prefill, "context-length", sentence)
        else:
            try:
                facts = fitted(self.worker.facts, prefill.largest_page)
            except EngineError as error:
                self.refuse(link, prefill, error.reason, f"the decoder's rings are too small: {error}")
            else:
                self._queue(link, prefill, facts)

    def _has_its_places(self, peer: str) -> bool:
        mine = sum(handoff.link.peer == peer for handoff in self._handoffs.values())
        return mine >= MAX_QUEUED - self.running

    def _queue(self, link: Link, prefill: Prefill, facts: EngineFacts) -> None:
        self.lanes.open(min(facts.exporting_lanes, self.memory.leases("export")), facts.kv_tokens)
        try:
            ticket = self.lanes.ask(prefill.tenant, prefill.tokens, group=link.peer)
        except Refused as error:
            self.refuse(link, prefill, error.reason, str(error))
            return
        handoff = self._handoffs[prefill.handoff_id] = Outgoing(self, link, prefill, facts)
        task = asyncio.create_task(handoff.run(ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def refuse(self, link: Link, prefill: Prefill, reason: str, message: str) -> None:
        """Answer a PREFILL that will not be queued."""
        with contextlib.suppress(LinkError):
            link.send(encode(Abort(handoff_id=prefill.handoff_id, epoch=0, reason=reason, message=message)))

    def message(self, link: Link, message: HandoffMessage) -> bool:
        """False when the message belongs to no handoff that leaves through this link."""
        handoff = self._handoffs.get(message.handoff_id)
        if handoff is None or handoff.link is not link:
            return False
        handoff.message(message)
        return True

    def uses(self, link: Link) -> bool:
        return any(handoff.link is link for handoff in self._handoffs.values())

    def link_lost(self, link: Link, reason: str) -> None:
        for handoff in list(self._handoffs.values()):
            if handoff.link is link:
                handoff.fail("link-lost", f"the link to {link.peer} closed: {reason}")

    def ended(self, handoff: Outgoing) -> None:
        self._handoffs.pop(handoff.machine.handoff_id, None)
        self._on_end(handoff.trace)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _page_of(record: Record) -> _Page:
    """Raises HandoffError for a record that is no page; it is released then."""
    try:
        packed = bytes(record.view[:HEADER_BYTES])
        return _Page(PageHeader.unpack(packed), packed, record.view[HEADER_BYTES:], record)
    except HandoffError:
        record.release()
        raise


def _largest_page(spec: ComponentSpec, facts: EngineFacts, prompt_tokens: int) -> int:
    """Biggest ring payload of one component; the snapshot's parts do not ride in the ring, and the token history is
    one page."""
    if spec.component in SNAPSHOT:
        return 0
    most = longest(spec, facts) if spec in paged(facts.schema) else prompt_tokens
    return spec.page_bytes((0, spec.layers), (0, min(most, prompt_tokens)))
