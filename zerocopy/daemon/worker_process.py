"""The daemon's view of its worker: start it, talk to it, notice its death, start it again.

Owns the child process, its socket, and the table of open jobs. A job is a queue of the worker's messages; when the
worker dies every open job ends with `WorkerLost`, shared memory is recovered by the caller through `on_lost`, and a
new worker starts after a delay that grows up to `MAX_RESTART_DELAY_S`. A worker that says `StartFailed` is not
started again: the same model file would fail the same way. While jobs are open the worker is asked for a sign of life:
one that gives none for `silence_s` hangs, and is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from native.memory import NativeError
from zerocopy.daemon.telemetry import log_event
from zerocopy.runtime.base import EngineFacts
from zerocopy.worker import protocol as p
from zerocopy.worker.main import WorkerOptions

WORKER_COMMAND: Final = (sys.executable, "-m", "zerocopy.worker.main")
FIRST_RESTART_DELAY_S: Final = 0.2
MAX_RESTART_DELAY_S: Final = 10.0
PING_S: Final = 1.0
STOP_TIMEOUT_S: Final = 5.0


class WorkerLost(Exception):
    """The worker process ended while a job was open."""

    reason: Final = "worker-lost"


class JobFailed(Exception):
    """The worker refused or failed one job; the worker itself lives."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Job:
    """One unit of the worker's work. Iterate with `next`, in one task at a time; always end with `release`."""

    def __init__(self, worker: WorkerProcess, number: int) -> None:
        self.number = number
        self._worker = worker
        self._inbox = deque[p.ToDaemon | None]()  # None: nothing comes any more
        self._waiter: asyncio.Future[None] | None = None  # done when something is in the inbox
        self._dropped = asyncio.get_running_loop().create_future()
        self.lost = False

    async def next(self) -> p.ToDaemon:
        """The next message of this job. Raises JobFailed, WorkerLost, or TimeoutError once it has expired."""
        while not self._inbox:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._inbox[0]
        if message is None:
            if not self.lost:
                raise TimeoutError
            raise WorkerLost("the worker process ended; it is being restarted")
        self._inbox.popleft()
        if isinstance(message, p.Failed):
            raise JobFailed(message.reason, message.message)
        return message

    async def release(self) -> None:
        """Give up everything the worker holds of this job; returns when it holds nothing, or is dead: nobody may use
        memory that a process which hangs could still write."""
        if not self._dropped.done():
            self._worker.send(p.Release(self.number))
            await asyncio.wait({self._dropped})
        self._worker.forget(self)

    def deliver(self, message: p.ToDaemon) -> None:
        if isinstance(message, p.Dropped):
            self.end(lost=False)
        else:
            self._put(message)

    def expire(self) -> None:
        """Nobody waits for more than what is here."""
        self._put(None)

    def end(self, *, lost: bool) -> None:
        if not self._dropped.done():
            self._dropped.set_result(None)
        self.lost = self.lost or lost
        if lost:
            self._put(None)

    def _put(self, message: p.ToDaemon | None) -> None:
        self._inbox.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Line(asyncio.Protocol):
    """The daemon's end of the worker's socket. `closed` is done when the worker has closed it, with a ProtocolError
    when it broke the framing, or with what receiving raised: nothing is received after that."""

    def __init__(self, receive: Callable[[p.ToDaemon], None]) -> None:
        self._receive = receive
        self._frames = p.Frames()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        try:
            for body in [] if self.closed.done() else self._frames.feed(data):
                self._receive(p.decode_to_daemon(body))
        except Exception as error:
            self.closed.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class WorkerProcess:
    """Supervises one worker. `facts` is None while no worker is ready; `reason` then says why."""

    def __init__(
        self,
        options: WorkerOptions,
        attach: Callable[[EngineFacts], tuple[p.Attach, Sequence[int]]],
        on_change: Callable[[], None],
        on_lost: Callable[[], None],
        command: Sequence[str] = WORKER_COMMAND,
        silence_s: float = 30.0,
    ) -> None:
        """`silence_s`: longer than any engine call takes."""
        self._options = options
        self._attach = attach
        self._on_change = on_change
        self._on_lost = on_lost
        self._command = command
        self._silence_s = silence_s
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._line: asyncio.Transport | None = None
        self.facts: EngineFacts | None = None
        self._decided = asyncio.Event()  # the engine is up, or will never be again
        self._alive = asyncio.Event()  # since the last Ping
        self._watching: asyncio.Task[None] | None = None
        self.reason: str = "the engine is starting"
        self.start_failed: p.StartFailed | None = None
        self.restarts = 0
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Keep a worker alive until cancelled, or until it says that it can never start."""
        delay = FIRST_RESTART_DELAY_S
        while self.start_failed is None and not self._stopping:
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                await self._one_life()
            finally:
                self._lost()
            if self.start_failed is not None:
                self.reason = self.start_failed.message
                self._decided.set()
            elif not self._stopping:
                delay = FIRST_RESTART_DELAY_S if loop.time() - began > 60 else min(2 * delay, MAX_RESTART_DELAY_S)
                self.restarts += 1
                log_event("worker ended, starting another", level=logging.WARNING, seconds=delay, attempt=self.restarts)
            self._on_change()
            if self.start_failed is None and not self._stopping:
                await asyncio.sleep(delay)

    async def stop(self) -> None:
        """Ask the worker to end, then make sure."""
        self._stopping = True
        self._decided.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        self.send(p.Shutdown())
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.kill("it did not stop in time")
            await process.wait()

    def kill(self, why: str) -> None:
        log_event("killing the worker", level=logging.ERROR, detail=why)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def up(self) -> None:
        """Wait for an engine. Raises WorkerLost when there will be none any more."""
        await self._decided.wait()
        if self.facts is None:
            raise WorkerLost(self.reason)

    # -- jobs ----------------------------------------------------------------------------------------------

    def open_job(self) -> Job:
        if self.facts is None:
            raise WorkerLost(self.reason)
        job = Job(self, next(self._numbers))
        self._jobs[job.number] = job
        return job

    def forget(self, job: Job) -> None:
        self._jobs.pop(job.number, None)

    def send(self, message: p.ToWorker) -> None:
        if self._line is not None and not self._line.is_closing():
            self._line.write(p.encode(message))

    async def tokenize(self, text: str, *, parse_special: bool, literal: tuple[tuple[int, int], ...] = ()) -> list[int]:
        job = self.open_job()
        try:
            # A chat template writes its own beginning of text; two would be a different prompt.
            special = {"add_special": not parse_special, "parse_special": parse_special}
            self.send(p.Tokenize(job.number, text, **special, literal=literal))
            answer = await job.next()
            assert isinstance(answer, p.Tokenized)
            return answer.tokens
        finally:
            self.forget(job)

    # -- one process ---------------------------------------------------------------------------------------

    async def _one_life(self) -> None:
        ours, process = await self._spawn()
        self._process = process
        with ours.dup() as side:
            line = _Line(partial(self._receive, side))
            self._line, _ = await asyncio.get_running_loop().create_connection(lambda: line, sock=ours)
            try:
                await line.closed
            except p.ProtocolError as error:
                self.kill(str(error))
            finally:
                if self._watching is not None:
                    self._watching.cancel()
                self._line.close()
                self._line = None
                await self._reap(process)

    async def _watch(self) -> None:
        """Kill a worker that has jobs and does not come round its loop any more."""
        while True:
            await asyncio.sleep(PING_S)
            if not self._jobs:
                continue
            self._alive.clear()
            self.send(p.Ping())
            try:
                async with asyncio.timeout(self._silence_s):
                    await self._alive.wait()
            except TimeoutError:
                self.kill(f"it hangs: no sign of life for {self._silence_s:g} s")
                return

    async def _spawn(self) -> tuple[socket.socket, asyncio.subprocess.Process]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    msgspec.json.encode(self._options).decode(),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    # Ctrl-C in a terminal reaches every process of the group: the daemon alone decides.
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return ours, process

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        """Its socket has closed: it is ending or has ended. Returns when it has: until then it may still write to
        shared memory."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            self.kill("its socket closed but it still runs")
            await process.wait()
        except asyncio.CancelledError:
            self.kill("the daemon ends")
            raise
        log_event("worker process ended", pid=process.pid, exit_code=process.returncode or 0)

    def _receive(self, side: socket.socket, message: p.ToDaemon) -> None:
        match message:
            case p.Ready():
                self._ready(message, side)
            case p.StartFailed():
                self.start_failed = message
            case p.Pong():
                self._alive.set()
            case _:
                if job := self._jobs.get(message.job):
                    job.deliver(message)

    def _ready(self, ready: p.Ready, side: socket.socket) -> None:
        try:
            attach, fds = self._attach(ready.facts)
        except NativeError as error:
            self.start_failed = p.StartFailed(error.reason, str(error))
            self.kill(str(error))
            return
        _send_with(side, p.encode(attach), fds)
        self.facts, self.reason = ready.facts, ""
        self._decided.set()
        self._watching = asyncio.create_task(self._watch())  # not before: a worker that loads a model is silent
        self._on_change()

    def _lost(self) -> None:
        self.facts, self.reason = None, "the engine is restarting"
        if not self._stopping:
            self._decided.clear()
        for job in list(self._jobs.values()):
            job.end(lost=True)
        self._on_lost()


def _send_with(side: socket.socket, frame: bytes, fds: Sequence[int]) -> None:
    """Send `frame` and descriptors with it. The kernel takes only so many a call, and each call needs a byte."""
    batches = [fds[at : at + p.MAX_FDS] for at in range(0, len(fds), p.MAX_FDS)] or [()]
    for number, batch in enumerate(batches, 1):
        rest = len(frame) if number == len(batches) else 1
        socket.send_fds(side, [frame[:rest]], batch)
        frame = frame[rest:]
