"""The decoder's side: one prompt's state coming in from a prefiller, up to its commit.

Owns the lease of landing memory and the meeting of three parties around one `SinkHandoff`: the link's receiver threads
(claim, publish), the worker (imported, verified) and the event loop (messages, deadlines). The machine is only touched
under `_lock`; checksums run outside it. What it decides is carried out on the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from native.memory import NativeError
from native.ring import Slot
from transport.link import Landing, Link
from zerocopy.daemon.admission import Refused, Ticket
from zerocopy.daemon.ending import to_the_end
from zerocopy.daemon.half import HandoffHalf, T
from zerocopy.daemon.memory import Lease, SharedMemory
from zerocopy.daemon.trace import Trace
from zerocopy.daemon.worker_process import Job, WorkerProcess
from zerocopy.handoff.components import HEADER_BYTES, SNAPSHOT, PageHeader
from zerocopy.handoff.errors import HandoffError, LocalProtocolError, RemoteProtocolError
from zerocopy.handoff.machine import Action
from zerocopy.handoff.messages import HandoffMessage, Manifest
from zerocopy.handoff.sink import SinkHandoff
from zerocopy.handoff.states import State
from zerocopy.worker import protocol as p

# Relative rms of the logits' difference that is forgiven where bits need not be equal. Measured: at most 1.0e-2 (on
# SmolLM2, Q4; 2.5e-4 on the tiny models) for an import into a pool that others used, or a prompt evaluated beside
# other sequences; 9e-3 between an H200 and a CPU (gpu.md). A state with one component zeroed: at least 7.5e-2, for
# each component of each family we certify.
PROBE_TOLERANCE: Final = 0.03


class HandoffFailed(Exception):
    """The state did not come. Everything of it is freed on this host by the time this is raised."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Room:
    """Where one accepted page lands: a ring record, or its place in the slab. Implements `transport.link.Landing`.
    What a discarded page wrote is wiped with the lease."""

    def __init__(self, handoff: Incoming, header: PageHeader, view: memoryview, slot: Slot | None) -> None:
        self._handoff = handoff
        self._header = header
        self._slot = slot
        self._began = time.monotonic()
        self.view = view

    def publish(self) -> None:
        fault = self._handoff.machine.inspect_page(self._header, self.view)
        self.view.release()
        self._handoff.page_arrived(self._header, fault, self._slot, self._began)

    def discard(self) -> None:
        self.view.release()
        self._handoff.page_lost(self._header, self._slot)


class Incoming(HandoffHalf[SinkHandoff]):
    """One handoff arriving at this host. `receive` runs it, and cancelling that cancels the handoff; the other methods
    are called while it runs."""

    def __init__(
        self, link: Link, machine: SinkHandoff, worker: WorkerProcess, memory: SharedMemory, tokens: Sequence[int]
    ) -> None:
        facts = worker.facts
        assert facts is not None
        trace = Trace(machine.handoff_id.hex(), "decoder", link.peer, link.transport, len(tokens))
        super().__init__(link, machine, trace)
        self._worker = worker
        self._memory = memory
        self._schema = facts.schema
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._ticket: Ticket | None = None
        self._lease: Lease | None = None
        self._in_ring: deque[tuple[PageHeader, int]] = deque()  # claimed records and where each ends in freed bytes
        self._claimed = 0
        self._job: Job | None = None
        self._told_complete = False
        self._solo = False  # nobody else's tokens were in this host's engine context
        self._compared: p.Verified | None = None

    async def receive(self, job: Job, request: p.Generate, *, epoch: int, transfer_s: float) -> None:
        """Bring `request`'s state into the decode lane as `job` and commit it. Raises HandoffFailed, after which the
        job is released; on return the job generates."""
        self._job = job
        try:
            await self._negotiate(job, request, epoch, transfer_s)
        finally:
            self.fail("cancelled", "the request ended before its state had come")  # nothing, once it is over
            await to_the_end(self._end(job))
        outcome = self.machine.outcome
        if outcome is None or not outcome.committed:
            raise HandoffFailed(outcome.reason if outcome else "unknown", outcome.message if outcome else "")

    async def _negotiate(self, job: Job, request: p.Generate, epoch: int, transfer_s: float) -> None:
        if self.machine.over:
            return  # the link fell between the choice of the peer and now
        self.trace.marks["asked"] = time.monotonic()
        self._do(self._locked(self.machine.offer))
        while self.machine.state is State.QUEUED:
            await self._sleep()
        if self.machine.state is State.RESERVED:
            await self._landing_turn()
        if self.machine.state is State.RESERVED:
            await self._transfer(job, request, epoch, transfer_s)

    async def _landing_turn(self) -> None:
        """Wait for landing memory: still queueing, so the transfer's clock has not begun."""
        try:
            ticket = self._ticket = self._memory.landing_line.ask("", 0, self.link.peer)
        except Refused as error:
            sentence = str(error)
            self._do(self._locked(lambda: self.machine.reject("no-memory", sentence)))
            return
        await self._turn(ticket)

    async def _transfer(self, job: Job, request: p.Generate, epoch: int, transfer_s: float) -> None:
        lease = self._lease = self._memory.lend("landing", epoch)
        if lease is None:
            self._do(self._locked(lambda: self.machine.reject("no-memory", "the decoder has no free landing ring")))
            return
        if HEADER_BYTES + self.machine.largest_page > lease.ring.max_record:
            most, size = lease.ring.max_record - HEADER_BYTES, self.machine.largest_page
            sentence = f"the prefiller's pages have {size} bytes, the decoder's ring takes {most}: raise its --ring-mib"
            self._do(
                self._locked(lambda: self.machine.reject("page-too-large", sentence, have=str(most), want=str(size)))
            )
            return
        async with self._hearing(job, lease.ring.space_fd, self._space_bell):
            self._worker.send(msgspec.structs.replace(request, ring=lease.ring_index, slab=lease.slab_index))
            # Padding at the wrap is always less than the largest record.
            window = lease.ring.capacity - lease.ring.record_bytes(HEADER_BYTES + self.machine.largest_page)
            seed = secrets.randbits(64)
            grant = self._locked(
                lambda: self.machine.grant(
                    epoch=epoch, seed=seed, window=window, deadline_s=transfer_s, now=time.monotonic()
                )
            )
            self.trace.marks["granted"] = time.monotonic()
            self._do(grant)
            while not self.machine.over:
                await self._sleep()
        if self.machine.outcome is not None and self.machine.outcome.committed:
            self._worker.send(p.Commit(job.number))

    async def _end(self, job: Job) -> None:
        """Links let go first, then (unless it is committed) the worker, then the memory is wiped."""
        await self._drained.wait()
        if self.machine.outcome is None or not self.machine.outcome.committed:
            await job.release()
        if self._lease is not None:
            self._lease.end()
        if self._ticket is not None:
            self._memory.landing_line.give_back(self._ticket)

    # -- event loop ----------------------------------------------------------------------------------------

    def message(self, message: HandoffMessage) -> None:
        actions = self._locked(lambda: self.machine.receive(message, time.monotonic()))
        if isinstance(message, Manifest) and self.machine.manifest is message:
            self._manifest(message)
        self._do(actions)
        self._step()  # the manifest may be the last thing that was lacking

    async def _listen(self, job: Job) -> None:
        with self._failing():
            while not self.machine.over:
                match await job.next():
                    case p.Imported() as imported:
                        self.trace.marks.update(imported.marks)
                        self.trace.imports.extend(imported.imports)
                        self._solo = imported.solo
                        self._locked(self.machine.imported)
                    case p.Verified() as verified:
                        self.trace.marks["verified"] = time.monotonic()
                        self._compared = verified
                self._step()

    def _step(self) -> None:
        """Whatever the machine is ready for now: finish the import, commit."""
        with self._lock:
            complete = self.machine.state_complete and not self.machine.over
        if complete and not self._told_complete and self._job is not None:
            self._told_complete = True
            self.trace.marks["state_complete"] = time.monotonic()
            self._worker.send(p.StateComplete(self._job.number))
        if self._compared is not None and self.machine.manifest is not None and not self.machine.over:
            self._judge(self._compared, self.machine.manifest)
        if self.machine.committable:
            self._do(self._locked(lambda: self.machine.commit(time.monotonic())))

    def _judge(self, compared: p.Verified, manifest: Manifest) -> None:
        """Bits must be equal where nothing can have changed them: one exactness class, and both hosts evaluated this
        prompt without others beside it."""
        self._compared = None
        must_be_equal = self.machine.same_class and self._solo and manifest.solo
        ok, detail = verdict(compared.exact, compared.error, must_be_equal=must_be_equal)
        self.trace.probe = detail
        self._do(self._locked(partial(self.machine.verified, ok, detail)))

    def _manifest(self, manifest: Manifest) -> None:
        """The source's own figures, on this host's clock: GRANT took half a round trip to reach it."""
        self.trace.marks["manifest"] = time.monotonic()
        self.trace.source = dict(manifest.timings)
        if "prefilled" in manifest.timings:
            one_way = (self.link.stats.rtt_s or 0.0) / 2
            self.trace.marks["prefilled"] = self.trace.marks["granted"] + one_way + manifest.timings["prefilled"]

    def _space_bell(self) -> None:
        """The worker has freed landing records: that is credit."""
        if self._lease is None:
            return
        self._lease.ring.clear_space_bell()
        freed, actions = self._lease.ring.freed_bytes, list[Action]()
        with self._lock:
            while self._in_ring and self._in_ring[0][1] <= freed:
                actions += self.machine.released(self._in_ring.popleft()[0])
        if actions:  # most releases make no CREDIT, and `_do` wakes the whole handoff
            self._do(actions)

    def _locked(self, work: Callable[[], T]) -> T:
        with self._lock:
            return work()

    # -- receiver threads ----------------------------------------------------------------------------------

    def claim(self, header: PageHeader, nbytes: int) -> Landing | None:
        """Room for one page, or None to drop it: it is late, or it has just ended this handoff."""
        with self._lock:
            accepted, actions = self.machine.accept_page(header, nbytes)
            room = None
            try:
                if accepted:
                    room = self._room(header, nbytes)
            except (HandoffError, NativeError) as error:  # accepted, so it must also end: nobody else will end it
                actions += [*self.machine.fail(error.reason, str(error)), *self.machine.page_discarded(header)]
        if actions:
            self._loop.call_soon_threadsafe(self._do, actions)
        return room

    def _room(self, header: PageHeader, nbytes: int) -> _Room:
        lease = self._lease
        assert lease is not None  # a page is only accepted after GRANT
        if header.component in SNAPSHOT:
            if lease.slab is None:
                raise RemoteProtocolError("component", f"{header.address}: this model has no recurrent state")
            offset = self._schema.slab_offset(header.component, header.layers[0])
            return _Room(self, header, lease.slab.view(offset, nbytes), None)
        slot = lease.ring.claim(HEADER_BYTES + nbytes)
        if slot is None:  # credit was checked: the two sides' arithmetic disagrees, which is a bug of ours
            raise LocalProtocolError("ring-full", f"{header.address} was within credit but the landing ring is full")
        self._claimed += lease.ring.record_bytes(HEADER_BYTES + nbytes)
        self._in_ring.append((header, self._claimed))
        slot.view[:HEADER_BYTES] = header.pack()
        return _Room(self, header, slot.view[HEADER_BYTES:], slot)

    def page_arrived(
        self, header: PageHeader, fault: RemoteProtocolError | None, slot: Slot | None, began: float
    ) -> None:
        """Publish to the worker in the same breath as the ledger takes it: no one sees one without the other."""
        with self._lock:
            good, actions = self.machine.page_landed(header, fault)
            actions += self._finish(slot, good)
            if good:
                self.trace.page(header.component, (began, time.monotonic(), header.payload_bytes))
            news = bool(actions) or self.machine.state_complete
        if news:  # waking the loop for every page costs as much as the rest of the page's Python
            self._loop.call_soon_threadsafe(self._after_page, actions)

    def page_lost(self, header: PageHeader, slot: Slot | None) -> None:
        with self._lock:
            actions = self.machine.page_discarded(header) + self._finish(slot, False)
        self._loop.call_soon_threadsafe(self._after_page, actions)

    def _finish(self, slot: Slot | None, good: bool) -> list[Action]:
        """Where that fails somebody wrote the ring who may not: the handoff ends, and must not wait for this page."""
        try:
            if slot is not None:
                slot.commit() if good else slot.abort()
        except NativeError as error:
            return self.machine.fail(error.reason, str(error))
        return []

    def _after_page(self, actions: list[Action]) -> None:
        self._do(actions)
        self._step()


def verdict(exact: bool, error: float, *, must_be_equal: bool) -> tuple[bool, str]:
    """Whether a comparison of logits passes, and the sentence about it."""
    tolerance = 0.0 if must_be_equal else PROBE_TOLERANCE
    detail = "bit-equal" if exact else f"relative rms error {error:.2e}, tolerance {tolerance:g}"
    return exact or error <= tolerance, detail
