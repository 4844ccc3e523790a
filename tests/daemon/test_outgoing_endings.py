"""However and whenever a handoff that leaves here ends, everything of it is given back and the next one works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.daemon.outgoing_stage import Stage, staged
from tests.daemon.wires import run, until
from tests.daemon.worker_double import FACTS
from zerocopy.handoff.messages import (
    Abort,
    Reject,
    Reserve,
)
from zerocopy.worker import protocol as p

pytestmark = pytest.mark.usefixtures("transport")

End = Callable[[Stage], Awaitable[None]]


async def _queued(stage: Stage) -> None:
    stage.first = stage.ask()
    await stage.reserved()
    stage.ask()
    await until(lambda: stage.host.service.running == 2)


async def _reserved(stage: Stage) -> None:
    stage.ask()
    await stage.reserved()


async def _granted(stage: Stage) -> None:
    stage.ask()
    await stage.granted()


async def _sending(stage: Stage) -> None:
    """Pages are with the link, which still reads them."""
    stage.sink.gate.clear()
    stage.ask()
    task = await stage.granted()
    stage.host.worker.export_all(task, stage.pages)
    (handoff,) = stage.host.service._handoffs.values()
    await until(lambda: len(handoff._sending) > 2)


async def _starved(stage: Stage) -> None:
    """A page waits for credit."""
    stage.ask()
    task = await stage.granted(credit=4000)
    stage.host.worker.export_all(task, stage.pages)
    await stage.arrived(1)


async def _sealed(stage: Stage) -> None:
    stage.ask()
    await stage.streamed()


STAGES = pytest.mark.parametrize(
    "reach", [_queued, _reserved, _granted, _sending, _starved, _sealed], ids=lambda f: f.__name__.strip("_")
)
ONCE_GRANTED = pytest.mark.parametrize(
    "reach", [_granted, _sending, _starved, _sealed], ids=lambda f: f.__name__.strip("_")
)


@STAGES
def test_an_abort_of_the_decoder_frees_everything(tmp_path: Path, reach: End) -> None:
    """H7."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await reach(stage)
            epoch = 7 if stage.grant else 0
            stage.decoder.say(Abort(handoff_id=stage.id, epoch=epoch, reason="cancelled", message="client is gone"))
            if stage.first is not None:
                await until(lambda: stage.host.service.running == 1)
                stage.decoder.say(Reject(handoff_id=stage.first, reason="no-memory", message="no ring"))
            await asyncio.sleep(0.02)
            stage.sink.gate.set()
            await stage.failed("cancelled")
            assert not stage.aborts(), "an abort is not answered by one"
            await stage.committed()

    run(scenario())


def test_a_prompt_that_leaves_the_queue_does_not_give_away_the_lane_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await _queued(stage)
            stage.decoder.say(Abort(handoff_id=stage.id, epoch=0, reason="cancelled", message=""))
            await until(lambda: stage.host.service.running == 1)
            third = stage.ask()
            await asyncio.sleep(0.05)
            assert [r.handoff_id for r in stage.decoder.all(Reserve)] == [stage.first]
            assert stage.first is not None
            stage.decoder.say(Reject(handoff_id=stage.first, reason="no-memory", message="no ring"))
            await stage.reserved(third)
            stage.decoder.say(Reject(handoff_id=third, reason="no-memory", message="no ring"))
            await until(stage.host.nothing_held)

    run(scenario())


@STAGES
def test_a_lost_link_frees_everything(tmp_path: Path, reach: End) -> None:
    """G8. The peer closes it, which gives a reason that is no slug."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await reach(stage)
            stage.decoder.link.close("test")
            await asyncio.sleep(0.02)
            stage.sink.gate.set()
            await stage.failed("link-lost")

    run(scenario())


@STAGES
def test_stopping_the_daemon_tells_the_decoder_and_frees_everything(tmp_path: Path, reach: End) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await reach(stage)
            stopping = asyncio.create_task(stage.host.service.stop())
            await asyncio.sleep(0.02)
            stage.sink.gate.set()
            await stopping
            await stage.failed("shutdown")
            await until(lambda: stage.aborts() == ["shutdown"])

    run(scenario())


@ONCE_GRANTED
def test_an_ending_that_is_itself_cancelled_still_frees_everything(tmp_path: Path, reach: End) -> None:
    """The daemon stops while a handoff is giving its memory back."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await reach(stage)
            stage.host.worker.drops = False
            stage.decoder.say(Abort(handoff_id=stage.id, epoch=7, reason="cancelled", message=""))
            stage.sink.gate.set()
            release = await stage.host.worker.got(p.Release)
            stopping = asyncio.create_task(stage.host.service.stop())
            await asyncio.sleep(0.02)
            assert stage.host.memory.reserved_bytes() > 0, "the worker may still write"
            stage.host.worker.say(p.Dropped(release.job))
            await stopping
            await stage.failed("cancelled")

    run(scenario())


@ONCE_GRANTED
def test_a_job_that_fails_ends_the_handoff_with_the_engines_reason(tmp_path: Path, reach: End) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await reach(stage)
            job = stage.host.worker.all(p.Prefill)[-1].job
            stage.host.worker.say(p.Failed(job, "token-range", "a token is outside the vocabulary"))
            await asyncio.sleep(0.02)
            stage.sink.gate.set()
            await stage.failed("token-range")
            await until(lambda: stage.aborts() == ["token-range"])
            await stage.committed()

    run(scenario())


@ONCE_GRANTED
def test_a_worker_that_dies_ends_the_handoff(tmp_path: Path, reach: End) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await reach(stage)
            stage.host.worker.lose()
            stage.host.memory.recover()
            await asyncio.sleep(0.02)
            stage.sink.gate.set()
            await stage.failed("worker-lost")
            await until(lambda: stage.aborts() == ["worker-lost"])
            stage.host.worker.facts = FACTS
            await stage.committed()

    run(scenario())


def test_memory_is_not_given_back_while_the_link_still_reads_it(tmp_path: Path) -> None:
    """A page of another prompt must never go out under this one's name."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await _sending(stage)
            (handoff,) = stage.host.service._handoffs.values()
            handoff.machine._page_begins()  # one more page that no link has let go of
            stage.decoder.say(Abort(handoff_id=stage.id, epoch=7, reason="cancelled", message=""))
            stage.sink.gate.set()
            await until(lambda: not handoff._sending)
            await asyncio.sleep(0.05)
            assert stage.host.memory.reserved_bytes() > 0
            assert not stage.host.worker.all(p.Release)
            handoff._do(handoff.machine.page_done())
            await stage.failed("cancelled")

    run(scenario())


def test_a_decoder_that_does_not_answer_is_given_up_at_its_own_deadline(tmp_path: Path) -> None:
    """And the lane goes to the next prompt."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask(queue_deadline_s=0.5)
            await stage.reserved()
            await stage.failed("queue-deadline")
            await until(lambda: stage.aborts() == ["queue-deadline"])
            await stage.committed()

    run(scenario())


def test_a_prompt_waits_no_longer_than_its_deadline_for_the_lane(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            first = stage.ask()
            await stage.reserved(first)
            stage.ask(queue_deadline_s=0.5)
            await until(lambda: stage.aborts() == ["queue-deadline"])
            assert [r.handoff_id for r in stage.decoder.all(Reserve)] == [first]
            stage.decoder.say(Reject(handoff_id=first, reason="no-memory", message="no ring"))
            await stage.failed("queue-deadline")
            await stage.committed()

    run(scenario())


def test_the_deadline_of_a_transfer_is_the_one_that_was_granted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            await stage.granted(deadline_s=0.15)
            await stage.failed("transfer-deadline")

    run(scenario())


@pytest.mark.parametrize("exported", [0, 1, 5, 11])
def test_a_transfer_ends_at_its_deadline(tmp_path: Path, exported: int) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted()
            if exported == 11:
                stage.host.worker.export_all(task, stage.pages)
            else:
                for page in stage.pages[:exported]:
                    stage.host.worker.export(task, page)
            stage.expire()
            await stage.failed("transfer-deadline")
            await until(lambda: stage.aborts() == ["transfer-deadline"])
            await stage.committed()

    run(scenario())


@pytest.mark.parametrize(
    ("reach", "reason"), [(_sending, "ring-stale"), (_starved, "cancelled")], ids=["sending", "starved"]
)
def test_a_ring_that_does_not_take_a_page_back_keeps_nothing_waiting(tmp_path: Path, reach: End, reason: str) -> None:
    """One that forgets what is read of it, as if somebody had written it who may not: the link's answer was then never
    counted, or the ending ended there, and the lane was never given back."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await reach(stage)
            (handoff,) = stage.host.service._handoffs.values()
            await until(lambda: handoff._lease is not None)
            assert handoff._lease is not None
            handoff._lease.ring.recover("consumer")
            stage.sink.gate.set()
            if reason == "cancelled":
                stage.decoder.say(Abort(handoff_id=stage.id, epoch=7, reason=reason, message=""))
            await stage.failed(reason)
            await stage.committed()

    run(scenario())
