"""What the two halves of a handoff, `Incoming` and `Outgoing`, have in common: they carry out on the event loop what
their machine decides, and sleep until something happens or its deadline has come.

Owns no memory and no queue. A half whose machine is also used by other threads overrides `_locked`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Generic, TypeVar

from native.memory import NativeError
from transport.link import Link, LinkError
from zerocopy.daemon.admission import Ticket
from zerocopy.daemon.trace import Trace
from zerocopy.daemon.worker_process import Job, JobFailed, WorkerLost
from zerocopy.handoff.errors import HandoffError
from zerocopy.handoff.machine import Action, Ended, Machine, Release, Send
from zerocopy.handoff.messages import HandoffMessage, encode

M = TypeVar("M", bound=Machine)
T = TypeVar("T")


class HandoffHalf(Generic[M]):
    def __init__(self, link: Link, machine: M, trace: Trace) -> None:
        self.link = link
        self.machine = machine
        self.trace = trace
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()  # the machine gave back all memory that pages lie in

    def message(self, message: HandoffMessage) -> None:
        self._do(self._locked(lambda: self.machine.receive(message, time.monotonic())))

    def fail(self, reason: str, message: str) -> None:
        """Nothing, once it is over."""
        self._do(self._locked(lambda: self.machine.fail(reason, message)))

    def _locked(self, work: Callable[[], T]) -> T:
        """Use the machine."""
        return work()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self._say(message)
                case Ended(outcome):
                    self.trace.outcome = "committed" if outcome.committed else "aborted"
                    self.trace.reason = outcome.reason
                    self.trace.marks[self.trace.outcome] = time.monotonic()
                case Release():
                    self._drained.set()
        self._wake.set()

    def _say(self, message: HandoffMessage) -> None:
        """What cannot be said ends the handoff, unless it is over."""
        try:
            self.link.send(encode(message))
        except LinkError as error:
            self.fail("link-lost", str(error))
        except HandoffError as error:
            self.fail(error.reason, str(error))

    async def _listen(self, job: Job) -> None:
        """The worker's reports on this job; cancelled when the transfer is over."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What goes wrong in here ends the handoff."""
        try:
            yield
        except (HandoffError, NativeError, JobFailed, WorkerLost) as error:
            self.fail(error.reason, str(error))

    @contextlib.asynccontextmanager
    async def _hearing(self, job: Job, bell: int, ring: Callable[[], None]) -> AsyncIterator[None]:
        """While this runs the worker's reports are heard, and `ring` is called when the descriptor `bell` is rung."""
        loop = asyncio.get_running_loop()
        listener = loop.create_task(self._listen(job))
        loop.add_reader(bell, ring)
        try:
            yield
        finally:
            loop.remove_reader(bell)
            listener.cancel()
            await asyncio.wait({listener})  # whose cancellation is not this task's

    async def _turn(self, ticket: Ticket) -> None:
        """Returns once the ticket is granted or the handoff over."""
        ticket.granted.add_done_callback(lambda _: self._wake.set())
        while not (ticket.granted.done() or self.machine.over):
            await self._sleep()

    async def _sleep(self) -> None:
        """Until something happened or the machine's deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.machine.deadline - time.monotonic()):
                await self._wake.wait()
        self._wake.clear()
        if expired := self._locked(lambda: self.machine.tick(time.monotonic())):
            self._do(expired)  # only then: `_do` wakes this very loop
