"""What both halves of a handoff do with their machine when the link does not do its part."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import cast

from tests.daemon.front_door import on_uvloop
from tests.handoff.scene import HANDOFF, IDENTITY, PROMPT, SCHEMA
from transport.link import Link, LinkError
from zerocopy.daemon.half import HandoffHalf, T
from zerocopy.daemon.trace import Trace
from zerocopy.handoff.machine import Send
from zerocopy.handoff.messages import Abort, Credit
from zerocopy.handoff.sink import SinkHandoff


class _Refusing:
    """Only what a half asks of a link."""

    def send(self, message: bytes) -> None:
        raise LinkError("queue-full", "4096 messages wait already: the peer does not read")


def half(queue_s: float, kind: type[HandoffHalf[SinkHandoff]] = HandoffHalf) -> HandoffHalf[SinkHandoff]:
    machine = SinkHandoff(
        HANDOFF, IDENTITY, SCHEMA, PROMPT, tenant="", probe=True, queue_deadline_s=queue_s, now=time.monotonic()
    )
    trace = Trace(HANDOFF.hex(), "decoder", "peer", "tcp", len(PROMPT))
    return kind(cast(Link, _Refusing()), machine, trace)


@on_uvloop
async def test_a_message_that_the_link_does_not_take_ends_the_handoff_with_the_links_reason() -> None:
    """Never a handoff that waits for an answer to what was not sent."""
    mine = half(queue_s=60.0)
    mine._do(mine.machine.offer())
    outcome = mine.machine.outcome
    assert outcome is not None and not outcome.committed
    assert outcome.reason == "link-lost" and "4096 messages" in outcome.message
    assert (mine.trace.outcome, mine.trace.reason) == ("aborted", "link-lost")
    assert mine._drained.is_set()
    assert mine.trace.marks["aborted"] <= time.monotonic()


@on_uvloop
async def test_a_message_that_this_host_should_not_have_built_ends_the_handoff_too() -> None:
    mine = half(queue_s=60.0)
    mine._do([Send(Abort(handoff_id=b"short", epoch=0, reason="cancelled", message=""))])
    outcome = mine.machine.outcome
    assert outcome is not None and outcome.reason == "message" and "out of bounds" in outcome.message


@on_uvloop
async def test_a_half_that_sleeps_wakes_at_its_machines_deadline() -> None:
    mine = half(queue_s=0.05)
    async with asyncio.timeout(30):
        while not mine.machine.over:
            await mine._sleep()
    assert mine.trace.reason == "queue-deadline"
    assert time.monotonic() >= mine.machine.deadline


class _Shared(HandoffHalf[SinkHandoff]):
    """Other threads use its machine too, as they do that of `Incoming`."""

    lock = threading.Lock()

    def _locked(self, work: Callable[[], T]) -> T:
        with self.lock:
            return work()


@on_uvloop
async def test_a_half_asks_nothing_of_its_machine_without_its_lock() -> None:
    asked: dict[str, bool] = {}
    mine = half(queue_s=0.05, kind=_Shared)

    def watched(name: str) -> Callable[..., object]:
        work = getattr(mine.machine, name)

        def ask(*args: object) -> object:
            asked[name] = asked.get(name, True) and _Shared.lock.locked()
            return work(*args)

        return ask

    for name in ("receive", "fail", "tick"):
        setattr(mine.machine, name, watched(name))
    mine.message(Credit(handoff_id=HANDOFF, epoch=0, limit=0))
    mine.fail("cancelled", "by the client")
    await mine._sleep()
    assert asked == {"receive": True, "fail": True, "tick": True}


@on_uvloop
async def test_only_the_first_reason_counts() -> None:
    mine = half(queue_s=60.0)
    mine.fail("cancelled", "first")
    mine.fail("link-lost", "second")
    assert mine.trace.reason == "cancelled"
