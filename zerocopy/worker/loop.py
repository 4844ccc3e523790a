"""The worker's one engine thread: takes messages, runs the scheduler's iterations, sleeps when all wait.

Each role has a pool of lanes, an engine context of its own: a host with both roles never deadlocks with another (a
prefill never waits for this host's decode). Which lane a job gets is decided by the daemon, which also knows that all
tokens fit. A job's failure ends that job and clears its lane; a failed engine call ends the jobs of its batch.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from typing import Final

from native.memory import NativeError
from native.ring import Ring, RingHandle
from native.slab import Slab, SlabHandle
from zerocopy.handoff.errors import HandoffError
from zerocopy.runtime.base import EngineError, Pool, Row, Runtime
from zerocopy.worker import protocol as p
from zerocopy.worker.decode_job import DecodeJob
from zerocopy.worker.prefill_job import PrefillJob
from zerocopy.worker.scheduler import Scheduler, Waiting, copy_seconds
from zerocopy.worker.tokenizing import Tokenizing

# A doorbell wakes the loop; this bound only limits how long a lost peer process could go unnoticed.
IDLE_WAIT_S: Final = 1.0

Job = PrefillJob | DecodeJob
_FAILURES: Final = (EngineError, HandoffError, NativeError)  # they end a job, and no other


class _Station:
    """One pool and the jobs on its lanes, in order of arrival."""

    def __init__(self, pool: Pool, budget_tokens: int) -> None:
        self.pool = pool
        self.jobs: dict[int, Job] = {}
        self.scheduler = Scheduler(budget_tokens)

    def add(self, job: Job) -> None:
        """From now on none of those here is alone."""
        self.jobs[job.job] = job
        if len(self.jobs) > 1:
            for each in self.jobs.values():
                each.shared = True

    def drop(self, job: Job) -> None:
        job.close()
        del self.jobs[job.job]
        job.lane.clear()

    def batch(self) -> list[tuple[Job, Row]]:
        """What the next engine call evaluates: a token of every generation, then slices of prompts. None of those while
        a sequence waits for its first token: a chunk of another's prompt takes many times as long as that."""
        generating: list[tuple[Job, Row]] = []
        prompts: list[tuple[Job, Row]] = []
        for job in self.jobs.values():
            row = job.wanted()
            if row is not None:
                (generating if job.decoding else prompts).append((job, row))
        if not prompts or any(job.starting for job, _ in generating):
            return generating
        waiting = [
            Waiting(at, at, row.start, len(row.tokens), job.remaining, job.whole_slices)
            for at, (job, row) in enumerate(prompts)
        ]
        for at, tokens in self.scheduler.slices(waiting, len(generating)):
            job, row = prompts[at]
            generating.append((job, Row(row.lane, row.tokens[:tokens], row.start)))
        return generating

    @property
    def generating(self) -> bool:
        return any(job.decoding and not job.finished for job in self.jobs.values())


class Worker:
    """Serves one daemon until it says Shutdown or its socket closes."""

    def __init__(self, sock: p.WorkerSocket, runtime: Runtime, roles: frozenset[str]) -> None:
        self._sock = sock
        self._runtime = runtime
        budget = runtime.facts.chunk_tokens
        self._stations = {role: _Station(runtime.open_pool(), budget) for role in sorted(roles)}
        self._export_rings: list[Ring] = []
        self._export_slabs: list[Slab] = []
        self._landing_rings: list[Ring] = []
        self._landing_slabs: list[Slab] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, None)
        self._turn = 0
        self._running = True
        self._tokenizing = Tokenizing(runtime, sock.send_at_once)

    def run(self) -> None:
        try:
            while self._running:
                busy = self._iterate()
                self._wait(0.0 if busy else IDLE_WAIT_S)
        finally:
            self._tokenizing.close()

    # -- iterations ----------------------------------------------------------------------------------------

    def _iterate(self) -> bool:
        """False when there is nothing to do until something arrives."""
        began = time.monotonic()
        evaluated = [self._evaluate(station) for station in self._stations.values()]
        worked = self._copy(time.monotonic() - began)
        return worked or True in evaluated

    def _evaluate(self, station: _Station) -> bool:
        batch = station.batch()
        if not batch:
            return False
        began = time.monotonic()
        try:
            answers = station.pool.evaluate([row for _, row in batch])
        except EngineError as error:
            for job, _ in batch:
                self._fail(station, job, error)
            return True
        took = time.monotonic() - began
        evaluated = [pair for pair, answer in zip(batch, answers, strict=True) if not isinstance(answer, EngineError)]
        prompts = [row for job, row in evaluated if not job.decoding]
        if prompts:
            station.scheduler.took(
                took,
                sum(len(row.tokens) for row in prompts),
                beside=len(evaluated) - len(prompts),
                beginning=[row.start for row in prompts] == [0],
            )
        with self._sock.together():
            for (job, row), answer in zip(batch, answers, strict=True):
                try:
                    if isinstance(answer, EngineError):
                        raise answer
                    job.evaluated(len(row.tokens), answer, began)
                except _FAILURES as error:
                    self._fail(station, job, error)
        for job, _ in batch:
            if job.finished and isinstance(job, DecodeJob):
                job.lane.clear()  # its cells are in the next call's way; that the daemon lets go of it takes longer
        return True

    def _copy(self, engine_s: float) -> bool:
        """Pages in and out, one of each job in turn, until nothing is left or the time is over, after engine calls that
        took `engine_s`. False only when every job waits."""
        ready = deque(
            (station, job) for station in self._stations.values() for job in station.jobs.values() if not job.decoding
        )
        if not ready:
            return False
        ready.rotate(-self._turn)  # with time for few of them, each comes first now and then
        self._turn += 1
        generating = any(station.generating for station in self._stations.values())
        until, worked = time.monotonic() + copy_seconds(engine_s, generating=generating), False
        while ready and time.monotonic() < until:
            station, job = ready.popleft()
            try:
                if job.work():
                    worked = True
                    ready.append((station, job))
            except _FAILURES as error:
                self._fail(station, job, error)
        return worked or bool(ready)

    def _fail(self, station: _Station, job: Job, error: EngineError | HandoffError | NativeError) -> None:
        station.drop(job)
        self._sock.send(p.Failed(job.job, error.reason, str(error)))

    # -- messages ------------------------------------------------------------------------------------------

    def _wait(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is not None:
                key.data()  # clear that doorbell
                continue
            for message in self._sock.receive():
                self._handle(message)

    def _handle(self, message: p.ToWorker) -> None:
        match message:
            case p.Attach():
                self._attach(message)
            case p.Tokenize():
                self._tokenizing.ask(message)
            case p.Prefill() | p.Generate():
                self._open(message)
            case p.Release():
                self._release(message.job)
            case p.StateComplete() | p.Commit():
                self._decoding(message)
            case p.Ping():
                self._sock.send(p.Pong())
            case p.Shutdown():
                self._running = False

    def _attach(self, message: p.Attach) -> None:
        take = self._sock.take_fd

        def rings(specs: tuple[p.RingSpec, ...]) -> list[Ring]:
            return [Ring.attach(RingHandle(take(), take(), take(), spec.capacity)) for spec in specs]

        def slabs(specs: tuple[p.SlabSpec, ...]) -> list[Slab]:
            return [Slab.attach(SlabHandle(take(), spec.capacity)) for spec in specs]

        self._export_rings, self._export_slabs = rings(message.export_rings), slabs(message.export_slabs)
        self._landing_rings, self._landing_slabs = rings(message.landing_rings), slabs(message.landing_slabs)
        for ring in self._export_rings:
            self._selector.register(ring.space_fd, selectors.EVENT_READ, ring.clear_space_bell)
        for ring in self._landing_rings:
            self._selector.register(ring.data_fd, selectors.EVENT_READ, ring.clear_data_bell)

    def _decoding(self, message: p.StateComplete | p.Commit) -> None:
        job = self._stations["decode"].jobs.get(message.job)
        if not isinstance(job, DecodeJob):
            return  # it failed a moment ago; the daemon will hear of it
        if isinstance(message, p.Commit):
            job.committed = True
        else:
            job.state_complete = True

    def _release(self, number: int) -> None:
        for station in self._stations.values():
            if job := station.jobs.get(number):
                station.drop(job)
        self._sock.send(p.Dropped(number))

    def _open(self, message: p.Prefill | p.Generate) -> None:
        station = self._stations["prefill" if isinstance(message, p.Prefill) else "decode"]
        lane = station.pool.lane(message.lane)
        if any(job.lane is lane for job in station.jobs.values()):
            self._sock.send(p.Failed(message.job, "lane-taken", f"lane {message.lane} has a job already"))
        else:
            job = self._job(message, station.pool)
            station.add(job)
            try:
                job.work()  # so that its first row is in the next engine call, not in the one after
            except _FAILURES as error:
                self._fail(station, job, error)

    def _job(self, message: p.Prefill | p.Generate, pool: Pool) -> Job:
        exporting = isinstance(message, p.Prefill)
        slabs, rings = (
            (self._export_slabs, self._export_rings) if exporting else (self._landing_slabs, self._landing_rings)
        )
        slab = None if message.slab is None else slabs[message.slab]
        if isinstance(message, p.Prefill):
            lane = pool.lane(message.lane)
            return PrefillJob(message, lane, self._runtime.facts, rings[message.ring], slab, self._sock.send)
        ring = None if message.ring is None else rings[message.ring]
        return DecodeJob(message, self._runtime, pool, ring, slab, self._sock.send)
