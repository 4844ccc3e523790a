"""The worker's one engine thread: takes messages, gives each lane's job a step in turn, sleeps when all wait.

One job per lane at a time; further jobs queue in order. The prefill lane and the decode lane belong to different
engine contexts, so a host with both roles never deadlocks with another (a prefill never waits for this host's decode).
A job's failure ends that job; the lane is wiped and the next one starts.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable
from typing import Final

from native.memory import NativeError
from native.ring import Ring, RingHandle
from native.slab import Slab, SlabHandle
from zerocopy.handoff.errors import HandoffError
from zerocopy.runtime.base import EngineError, Lane, Runtime
from zerocopy.worker import protocol as p
from zerocopy.worker.decode_job import DecodeJob
from zerocopy.worker.prefill_job import PrefillJob

# A doorbell wakes the loop; this bound only limits how long a lost peer process could go unnoticed.
IDLE_WAIT_S: Final = 1.0

Job = PrefillJob | DecodeJob


class _Station:
    """One lane with its queue. Owns the lane's sequence: it is wiped between jobs."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.queue: deque[Job] = deque()
        self.current: Job | None = None


class Worker:
    """Serves one daemon until it says Shutdown or its socket closes."""

    def __init__(self, sock: p.WorkerSocket, runtime: Runtime, roles: frozenset[str]) -> None:
        self._sock = sock
        self._runtime = runtime
        self._stations = {role: _Station(runtime.open_lane()) for role in sorted(roles)}
        self._export_rings: list[Ring] = []
        self._export_slabs: list[Slab] = []
        self._landing_rings: list[Ring] = []
        self._landing_slabs: list[Slab] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, None)
        self._running = True

    def run(self) -> None:
        while self._running:
            busy = [self._advance(station) for station in self._stations.values()]
            self._wait(0.0 if any(busy) else IDLE_WAIT_S)

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
                self._tokenize(message)
            case p.Prefill():
                self._queue_prefill(message)
            case p.Generate():
                self._queue_generate(message)
            case p.Release():
                self._release(message.job)
            case p.StateComplete() | p.Commit():
                self._decoding(message)
            case p.Shutdown():
                self._running = False

    def _tokenize(self, message: p.Tokenize) -> None:
        try:
            tokens = self._runtime.tokenize(
                message.text, add_special=message.add_special, parse_special=message.parse_special
            )
        except EngineError as error:
            self._sock.send(p.Failed(message.job, error.reason, str(error)))
        else:
            self._sock.send(p.Tokenized(message.job, tokens))

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
        """Also for a job that has not begun: a short prompt's pages can all be here before its first step."""
        station = self._stations["decode"]
        for job in (station.current, *station.queue):
            if not isinstance(job, DecodeJob) or job.job != message.job:
                continue  # if it is none of them it failed a moment ago; the daemon will hear of it
            if isinstance(message, p.Commit):
                job.committed = True
            else:
                job.state_complete = True

    def _release(self, job: int) -> None:
        for station in self._stations.values():
            if station.current is not None and station.current.job == job:
                self._clear(station)
            station.queue = deque(queued for queued in station.queue if queued.job != job)
        self._sock.send(p.Dropped(job))

    # -- jobs ----------------------------------------------------------------------------------------------

    def _queue_prefill(self, message: p.Prefill) -> None:
        station = self._stations["prefill"]
        slab = None if message.slab is None else self._export_slabs[message.slab]
        ring = self._export_rings[message.ring]
        station.queue.append(PrefillJob(message, station.lane, self._runtime.facts, ring, slab, self._sock.send))

    def _queue_generate(self, message: p.Generate) -> None:
        station = self._stations["decode"]
        ring = None if message.ring is None else self._landing_rings[message.ring]
        slab = None if message.slab is None else self._landing_slabs[message.slab]
        station.queue.append(DecodeJob(message, self._runtime, station.lane, ring, slab, self._sock.send))

    def _advance(self, station: _Station) -> bool:
        """One step of the lane's job; True while there is more to do without waiting."""
        if station.current is None:
            if not station.queue:
                return False
            station.current = station.queue.popleft()
        job = station.current
        return not job.finished and self._guard(job.job, station, job.step)

    def _guard(self, job: int, station: _Station, work: Callable[[], bool]) -> bool:
        try:
            return work()
        except (EngineError, HandoffError, NativeError) as error:
            self._clear(station)
            self._sock.send(p.Failed(job, error.reason, str(error)))
            return True

    def _clear(self, station: _Station) -> None:
        if station.current is not None:
            station.current.close()
        station.current = None
        station.lane.clear()
