from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import psutil
import pytest

from native.memory import NativeError
from native.slab import Slab
from tests.daemon.wires import run
from zerocopy.daemon import worker_process
from zerocopy.daemon.memory import SharedMemory
from zerocopy.daemon.worker_process import WORKER_COMMAND, Job, JobFailed, WorkerLost, WorkerProcess
from zerocopy.runtime import models
from zerocopy.runtime.base import EngineFacts
from zerocopy.runtime.llama.engine import LlamaOptions
from zerocopy.worker import protocol as p
from zerocopy.worker.main import WorkerOptions
from zerocopy.worker.sampling import Sampling

BOTH = ("decode", "prefill")
TINY = LlamaOptions(n_ctx=512, chunk_tokens=32, page_tokens=16, threads=1)
TIMEOUT_S = 30.0
PROMPT = [(7 * i) % 128 for i in range(100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make("mamba2", tmp_path_factory.mktemp("models") / "mamba2.gguf")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "FIRST_RESTART_DELAY_S", 0.01)


class Supervised:
    """A worker process with this host's memory and a record of what its owner was told."""

    def __init__(self, command: Sequence[str], model: str = "", **more: float) -> None:
        self.memory = SharedMemory(export=True, landing=True, rings=2, ring_bytes=1 << 18)
        self.attached: list[list[int]] = []
        self.changes: list[str] = []
        self.lost = 0
        options = WorkerOptions(model, BOTH, TINY)
        self.worker = WorkerProcess(options, self._attach, self._changed, self._lost, command, **more)
        self.pids: set[int] = set()
        self._task = asyncio.create_task(self.worker.run())

    def _attach(self, facts: EngineFacts) -> tuple[p.Attach, Sequence[int]]:
        attach, fds = self.memory.attach(facts.schema)
        self.attached.append(list(fds))
        return attach, fds

    def _changed(self) -> None:
        self.changes.append("up" if self.worker.facts else self.worker.reason)
        if self.worker.pid is not None:
            self.pids.add(self.worker.pid)

    def _lost(self) -> None:
        self.lost += 1
        self.memory.recover()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def up(self, lives: int = 1) -> None:
        await self.until(lambda: self.changes.count("up") >= lives)

    async def ended(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._task

    async def close(self) -> None:
        await self.worker.stop()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.memory.close()
        for pid in self.pids:
            assert not psutil.pid_exists(pid), "a worker process was left behind"


@contextlib.asynccontextmanager
async def supervised(command: Sequence[str], model: str = "", **more: float) -> AsyncIterator[Supervised]:
    host = Supervised(command, model, **more)
    try:
        yield host
    finally:
        await host.close()


def scripted(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.daemon.scripted_worker", name)


def prefill(host: Supervised, job: Job) -> None:
    lease = host.memory.lend("export", 1)
    assert lease is not None
    message = p.Prefill(job.number, PROMPT, b"h" * 16, 1, 1, lease.ring_index, lease.slab_index, probe=False)
    host.worker.send(message)


async def next_of(job: Job, kind: type) -> p.ToDaemon:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            message = await job.next()
            if isinstance(message, kind):
                return message


# -- with a real worker


def test_a_worker_that_is_killed_loses_its_jobs_and_another_takes_over_the_same_memory(model: Path) -> None:
    """Architecture: an engine abort kills a worker, never the daemon."""

    async def scenario() -> None:
        async with supervised(WORKER_COMMAND, str(model)) as host:
            await host.up()
            first = host.worker.pid
            assert first is not None
            exporting, waiting = host.worker.open_job(), host.worker.open_job()
            prefill(host, exporting)
            await next_of(exporting, p.ChunkDone)
            os.kill(first, signal.SIGKILL)
            for job in (exporting, waiting):
                with pytest.raises(WorkerLost):
                    await next_of(job, p.Generated)  # which a prefill never says; the export may well be finished
                with pytest.raises(WorkerLost):
                    await job.next()
                await job.release()
                assert job.lost
            assert host.lost == 1
            await host.up(lives=2)
            assert host.worker.pid != first
            assert host.attached[0] == host.attached[1]
            again = host.worker.open_job()
            prefill(host, again)
            done = await next_of(again, p.Prefilled)
            assert isinstance(done, p.Prefilled)
            assert done.target_position == 98
            await again.release()

    run(scenario())


def test_a_slab_that_a_dead_worker_was_writing_is_wiped_when_it_comes_back(model: Path) -> None:
    """X6."""

    async def scenario() -> None:
        async with supervised(WORKER_COMMAND, str(model)) as host:
            await host.up()
            lease = host.memory.lend("export", 1)
            assert lease is not None
            assert lease.slab is not None
            job = host.worker.open_job()
            message = p.Prefill(job.number, PROMPT, b"h" * 16, 1, 1, lease.ring_index, lease.slab_index, False)
            host.worker.send(message)
            await next_of(job, p.SnapshotReady)
            assert any(read(lease.slab))
            assert host.worker.pid is not None
            os.kill(host.worker.pid, signal.SIGKILL)
            with pytest.raises(WorkerLost):
                await next_of(job, p.Dropped)
            slab = lease.slab
            lease.end()
            assert not any(read(slab))

    run(scenario())


def read(slab: Slab) -> bytes:
    fd = slab.handle.memory_fd
    return os.pread(fd, slab.capacity, os.fstat(fd).st_size - slab.capacity)


def test_a_worker_that_hangs_is_killed_and_its_jobs_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then nobody may use memory that a stopped process could still write."""
    monkeypatch.setattr(worker_process, "PING_S", 0.1)

    async def scenario() -> None:
        async with supervised(WORKER_COMMAND, str(model), silence_s=0.3) as host:
            await host.up()
            first = host.worker.pid
            assert first is not None
            job = host.worker.open_job()
            os.kill(first, signal.SIGSTOP)
            async with asyncio.timeout(TIMEOUT_S):
                await job.release()
            assert job.lost
            assert not psutil.pid_exists(first)
            await host.up(lives=2)

    run(scenario())


def test_a_worker_that_is_only_slow_is_left_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "PING_S", 0.05)

    async def scenario() -> None:
        async with supervised(WORKER_COMMAND, str(model), silence_s=5.0) as host:
            await host.up()
            job = host.worker.open_job()
            assert host.worker.pid is not None
            os.kill(host.worker.pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            os.kill(host.worker.pid, signal.SIGCONT)
            await asyncio.sleep(0.3)
            assert not job.lost and host.worker.restarts == 0
            await job.release()

    run(scenario())


def test_a_model_that_cannot_be_served_is_final_and_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(WORKER_COMMAND, str(tmp_path / "absent.gguf")) as host:
            await host.ended()
            assert host.worker.start_failed is not None
            assert host.worker.start_failed.reason == "model-file"
            assert host.worker.reason == host.worker.start_failed.message
            assert "absent.gguf" in host.worker.reason
            assert host.worker.restarts == 0
            with pytest.raises(WorkerLost, match=r"absent\.gguf"):
                host.worker.open_job()

    run(scenario())


def test_stopping_a_busy_worker_leaves_no_process(model: Path) -> None:
    async def scenario() -> None:
        async with supervised(WORKER_COMMAND, str(model)) as host:
            await host.up()
            pid = host.worker.pid
            assert pid is not None
            job = host.worker.open_job()
            generate = p.Generate(job.number, PROMPT, 400, Sampling(), (), None)
            host.worker.send(generate)
            await next_of(job, p.TextDelta)
            await host.worker.stop()
            assert not psutil.pid_exists(pid)
            await host.ended()
            assert host.worker.restarts == 0
            with pytest.raises(WorkerLost):
                await next_of(job, p.Generated)

    run(scenario())


def test_ctrl_c_in_the_terminal_does_not_reach_the_worker(model: Path) -> None:
    """The daemon ends its requests first and then the worker."""

    async def scenario() -> None:
        async with supervised(WORKER_COMMAND, str(model)) as host:
            await host.up()
            assert host.worker.pid is not None
            assert os.getpgid(host.worker.pid) != os.getpgid(0)
            os.kill(host.worker.pid, signal.SIGINT)
            assert await host.worker.tokenize("hello", parse_special=False)
            assert host.worker.restarts == 0

    run(scenario())


# -- with a scripted one


def test_what_a_worker_says_reaches_the_job_it_is_about() -> None:
    async def scenario() -> None:
        async with supervised(scripted("serve")) as host:
            await host.up()
            assert await host.worker.tokenize("echo", parse_special=False) == list(b"echo")
            with pytest.raises(JobFailed) as failed:
                await host.worker.tokenize("refuse", parse_special=False)
            assert (failed.value.reason, str(failed.value)) == ("tokenize", "this text has no tokens")
            assert not host.worker._jobs

    run(scenario())


def test_a_released_job_is_forgotten_and_its_late_messages_are_dropped() -> None:
    async def scenario() -> None:
        async with supervised(scripted("serve")) as host:
            await host.up()
            job = host.worker.open_job()
            await job.release()
            host.worker.send(p.Release(job.number))
            await job.release()
            assert not host.worker._jobs
            assert not job.lost
            assert await host.worker.tokenize("echo", parse_special=False)

    run(scenario())


def test_a_job_gives_what_came_before_its_end_and_then_only_its_end() -> None:
    async def scenario() -> None:
        async with supervised(scripted("serve")) as host:
            await host.up()
            job = host.worker.open_job()
            first, second = (p.TextDelta(job.number, text, 1) for text in ("a", "b"))
            job.deliver(first)
            job.deliver(second)
            job.expire()
            job.deliver(p.TextDelta(job.number, "too late", 1))
            assert [await job.next(), await job.next()] == [first, second]
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await job.next()
            job.end(lost=True)
            with pytest.raises(WorkerLost):
                await job.next()
            host.worker.forget(job)

    run(scenario())


def test_who_gives_up_waiting_for_a_message_costs_the_next_one_nothing() -> None:
    async def scenario() -> None:
        async with supervised(scripted("serve")) as host:
            await host.up()
            job = host.worker.open_job()
            impatient = asyncio.create_task(job.next())
            await asyncio.sleep(0)
            impatient.cancel()
            for text in ("a", "b"):  # the first while the one who waited has not run
                job.deliver(p.TextDelta(job.number, text, 1))
                assert await asyncio.wait_for(job.next(), 10) == p.TextDelta(job.number, text, 1)
            with pytest.raises(asyncio.CancelledError):
                await impatient
            await job.release()

    run(scenario())


def test_a_worker_that_says_start_failed_is_not_started_again() -> None:
    async def scenario() -> None:
        async with supervised(scripted("start_failed")) as host:
            await host.ended()
            assert host.worker.reason == "the engine cannot load it: give another file"
            assert host.changes == [host.worker.reason]

    run(scenario())


def test_a_worker_that_keeps_dying_is_started_ever_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    really_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await really_sleep(0)

    monkeypatch.setattr("zerocopy.daemon.worker_process.asyncio.sleep", sleep)
    monkeypatch.setattr(worker_process, "MAX_RESTART_DELAY_S", 0.05)

    async def scenario() -> None:
        async with supervised(scripted("dies_at_once")) as host:
            async with asyncio.timeout(TIMEOUT_S):
                while host.worker.restarts < 4:
                    await really_sleep(0.005)
            assert host.worker.facts is None

    run(scenario())
    assert slept[:4] == [0.02, 0.04, 0.05, 0.05]


@pytest.mark.parametrize("script", ["garbage", "oversized"])
def test_a_worker_that_breaks_the_protocol_is_killed_and_replaced(script: str) -> None:
    async def scenario() -> None:
        async with supervised(scripted(script)) as host:
            await host.until(lambda: host.worker.restarts >= 1)

    run(scenario())


def test_a_worker_that_closes_its_socket_and_lives_on_is_killed_before_its_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "STOP_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with supervised(scripted("serve")) as host:
            await host.up()
            pid = host.worker.pid
            assert pid is not None
            with pytest.raises(WorkerLost):
                await host.worker.tokenize("close and linger", parse_special=False)
            assert not psutil.pid_exists(pid)
            assert host.lost == 1
            await host.up(lives=2)

    run(scenario())


def test_a_worker_that_is_deaf_to_shutdown_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "STOP_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with supervised(scripted("deaf_to_shutdown")) as host:
            await host.up()
            pid = host.worker.pid
            assert pid is not None
            await host.worker.stop()
            assert not psutil.pid_exists(pid)

    run(scenario())


def test_no_job_can_be_opened_while_no_worker_is_ready() -> None:
    async def scenario() -> None:
        async with supervised(scripted("serve")) as host:
            with pytest.raises(WorkerLost, match="the engine is starting"):
                host.worker.open_job()
            await host.up()
            assert host.worker.open_job().number == 1

    run(scenario())


def test_more_rings_than_one_system_call_passes_reach_the_worker() -> None:
    async def scenario() -> None:
        async with supervised(scripted("counts_descriptors")) as host:
            host.memory.close()
            host.memory = SharedMemory(export=True, landing=True, rings=60, ring_bytes=4096)
            await host.up()
            assert await host.worker.tokenize("", parse_special=False) == [2 * 60 * 3]

    run(scenario())


def test_memory_that_cannot_be_had_ends_the_worker_for_good() -> None:
    async def scenario() -> None:
        async with supervised(scripted("serve")) as host:

            def full(facts: EngineFacts) -> tuple[p.Attach, Sequence[int]]:
                raise NativeError("shared-memory", "no shared memory for 4 rings: lower --rings")

            host.worker._attach = full
            await host.ended()
            assert host.worker.start_failed == p.StartFailed(
                "shared-memory", "no shared memory for 4 rings: lower --rings"
            )

    run(scenario())


def test_a_process_that_cannot_be_started_leaves_no_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        before = sockets()
        async with supervised((str(tmp_path / "no-such-program"),)) as host:
            with pytest.raises(FileNotFoundError):
                await host.ended()
            assert sockets() <= before  # less when garbage of an earlier test goes meanwhile

    run(scenario())


def sockets() -> int:
    kinds = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd))
    return sum(kind.startswith("socket:") for kind in kinds)


def is_open(fd: str) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(int(fd))
        return True
    return False


def test_a_message_to_a_worker_that_is_gone_is_dropped() -> None:
    async def scenario() -> None:
        async with supervised(scripted("start_failed")) as host:
            await host.ended()
            host.worker.send(p.Release(1))
            await host.worker.stop()

    run(scenario())


def test_stop_before_the_process_exists_starts_none() -> None:
    async def scenario() -> None:
        async with supervised(scripted("serve")) as host:
            await host.worker.stop()
            await host.ended()
            assert not host.pids

    run(scenario())
