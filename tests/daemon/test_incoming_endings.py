"""However and whenever a handoff that arrives here ends, everything of it is given back and the next one works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.daemon.incoming_stage import Stage, staged
from tests.daemon.wires import run, until
from tests.daemon.worker_double import FACTS
from zerocopy.daemon.worker_process import WorkerLost
from zerocopy.handoff.messages import (
    Abort,
)
from zerocopy.worker import protocol as p

pytestmark = pytest.mark.usefixtures("transport")

# A ring that forgets its claims, as one would whose memory somebody has written who may not.
FINISH = {"publish": "ring-stale", "discard": "page-lost"}

Reach = Callable[[Stage], Awaitable[None]]


async def _queued(stage: Stage) -> None:
    await stage.asked()


async def _granted(stage: Stage) -> None:
    await stage.granted()


async def _streaming(stage: Stage) -> None:
    await stage.granted()
    stage.send(*stage.pages[:6])
    await stage.landed(6)


async def _complete(stage: Stage) -> None:
    await stage.complete()


async def _imported(stage: Stage) -> None:
    stage.host.worker.imported(await stage.complete())
    await until(lambda: stage.host.incoming and stage.host.incoming.machine._imported)


async def _sealed(stage: Stage) -> None:
    """Only the engine's word is lacking."""
    await stage.complete()
    stage.seal()
    await until(lambda: "manifest" in stage.trace.marks)


STAGES = pytest.mark.parametrize(
    "reach",
    [_queued, _granted, _streaming, _complete, _imported, _sealed],
    ids=lambda f: f.__name__.strip("_"),
)
ONCE_GRANTED = pytest.mark.parametrize(
    "reach", [_granted, _streaming, _complete, _imported, _sealed], ids=lambda f: f.__name__.strip("_")
)


@STAGES
def test_a_client_that_goes_cancels_the_handoff_and_frees_everything(tmp_path: Path, reach: Reach) -> None:
    """H7."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await reach(stage)
            stage.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(stage.task, 30)
            assert stage.nothing_held()
            assert await stage.aborts() == ["cancelled"]
            await stage.committed()

    run(scenario())


def test_a_client_that_goes_before_anything_was_sent_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await asyncio.sleep(0)
            stage.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stage.task
            assert stage.nothing_held()
            await stage.committed()

    run(scenario())


@ONCE_GRANTED
def test_a_cancellation_of_the_ending_does_not_cut_it_short(tmp_path: Path, reach: Reach) -> None:
    """Memory is wiped when the worker has let go, however often the caller is cancelled."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await reach(stage)
            stage.host.worker.drops = False
            for _ in range(3):
                stage.task.cancel()
                await asyncio.sleep(0.01)
            release = await stage.host.worker.got(p.Release)
            assert stage.host.memory.reserved_bytes() > 0
            assert not stage.task.done()
            stage.host.worker.say(p.Dropped(release.job))
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(stage.task, 30)
            assert stage.nothing_held()
            stage.host.worker.drops = True
            await stage.committed()

    run(scenario())


@STAGES
def test_an_abort_of_the_prefiller_frees_everything(tmp_path: Path, reach: Reach) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await reach(stage)
            epoch = stage.machine.epoch
            stage.prefiller.say(Abort(handoff_id=stage.id, epoch=epoch, reason="worker-lost", message="it died"))
            assert await stage.failed("worker-lost") == "it died"
            assert not stage.prefiller.all(Abort), "an abort is not answered by one"
            await stage.committed()

    run(scenario())


@STAGES
def test_a_lost_link_frees_everything(tmp_path: Path, reach: Reach) -> None:
    """G8."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await reach(stage)
            stage.prefiller.link.close("test")
            await stage.failed("link-lost")

    run(scenario())


@ONCE_GRANTED
def test_a_transfer_ends_at_its_deadline(tmp_path: Path, reach: Reach) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await reach(stage)
            stage.expire()
            await stage.failed("transfer-deadline")
            assert await stage.aborts() == ["transfer-deadline"]
            await stage.committed()

    run(scenario())


def test_the_deadline_of_a_transfer_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin(transfer_s=0.2)
            await stage.granted()
            assert "within 0.2 s" in await stage.failed("transfer-deadline")

    run(scenario())


def test_a_prefiller_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin(queue_s=0.1)
            await stage.failed("queue-deadline")
            assert await stage.aborts() == ["queue-deadline"]
            await stage.committed()

    run(scenario())


@ONCE_GRANTED
def test_an_import_that_fails_ends_the_handoff_with_the_engines_reason(tmp_path: Path, reach: Reach) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await reach(stage)
            stage.host.worker.say(p.Failed(stage.job.number, "blob", "state blob has another layer count"))
            assert "layer count" in await stage.failed("blob")
            assert await stage.aborts() == ["blob"]
            await stage.committed()

    run(scenario())


@ONCE_GRANTED
def test_a_worker_that_dies_ends_the_handoff(tmp_path: Path, reach: Reach) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await reach(stage)
            stage.host.worker.lose()
            stage.host.memory.recover()
            await stage.failed("worker-lost")
            assert stage.job.lost
            stage.host.worker.facts = FACTS
            await stage.committed()

    run(scenario())


def test_a_worker_that_dies_after_the_commit_ends_the_generation_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            task = await stage.complete()
            stage.seal()
            stage.host.worker.imported(task)
            stage.host.worker.verified(task)
            await stage.task
            stage.host.worker.lose()
            with pytest.raises(WorkerLost):
                await stage.job.next()
            await stage.job.release()

    run(scenario())


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_goes_while_the_handoff_fails_is_not_forgotten(tmp_path: Path, turns: int) -> None:
    """H7: or the prompt would be prefilled here, for nobody. The failure is so many turns of the loop older."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.complete()
            stage.host.worker.drops = False
            assert stage.host.incoming is not None
            stage.host.incoming.fail("link-lost", "the test's")
            for _ in range(turns):
                await asyncio.sleep(0)
            stage.task.cancel()
            release = await stage.host.worker.got(p.Release)
            stage.host.worker.say(p.Dropped(release.job))
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(stage.task, 30)
            assert stage.nothing_held()

    run(scenario())


@pytest.mark.parametrize("finish", FINISH)
def test_a_ring_that_does_not_take_a_page_back_ends_the_handoff_and_not_the_receiver(
    tmp_path: Path, finish: str
) -> None:
    """What the machine had decided was lost with the exception: memory was waited for that nobody would release."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.granted()
            handoff, page = stage.host.incoming, stage.pages[0]
            assert handoff is not None and handoff._lease is not None
            landing = handoff.claim(page.header, len(page.payload))
            assert landing is not None
            landing.view[:] = page.payload
            handoff._lease.ring.recover("producer")
            await asyncio.to_thread(getattr(landing, finish))
            await stage.failed(FINISH[finish])
            await stage.committed()

    run(scenario())
