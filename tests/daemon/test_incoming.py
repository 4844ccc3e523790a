"""The decoder's side over a real link. The prefiller is a peer that says what the test tells it to say."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.daemon.incoming_stage import LARGEST, SMALL, staged
from tests.daemon.wires import run, until
from tests.daemon.worker_double import SCHEMA, Page, state_pages
from transport.link import Landing
from zerocopy.daemon.incoming import HandoffFailed
from zerocopy.handoff.components import Component, page_checksum
from zerocopy.handoff.machine import Send
from zerocopy.handoff.messages import (
    Abort,
    CommitAck,
    Credit,
    Manifest,
    Reject,
    Reserve,
)
from zerocopy.worker import protocol as p

pytestmark = pytest.mark.usefixtures("transport")

# -- the whole way


def test_a_state_is_committed_once_it_is_whole_imported_and_proven(tmp_path: Path) -> None:
    """H2."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            task = await stage.granted()
            assert stage.host.incoming is not None and stage.host.incoming.machine.same_class
            stage.send(*stage.pages)
            await stage.landed(len(stage.pages))
            await stage.host.worker.got(p.StateComplete)
            in_ring = [page for page in stage.pages if not page.in_slab]
            assert stage.host.worker.take(task) == in_ring
            for page in stage.pages:
                if page.in_slab:
                    offset = SCHEMA.slab_offset(page.header.component, page.header.layers[0])
                    assert task.slab is not None
                    view = stage.host.worker.landing_slabs[task.slab].view(offset, len(page.payload))
                    assert view == page.payload
            stage.seal()
            stage.host.worker.imported(task)
            stage.host.worker.verified(task)
            await stage.task
            assert [type(m) for m in stage.host.worker.sent] == [p.Generate, p.StateComplete, p.Commit]
            await stage.prefiller.hear(CommitAck)
            assert stage.host.memory.reserved_bytes() == 0, "landing memory is free while tokens are generated"
            assert not stage.prefiller.all(Abort)
            assert stage.trace.probe == "bit-equal"
            assert stage.trace.marks["prefilled"] >= stage.trace.marks["granted"] + 1.5
            await stage.job.release()

    run(scenario())


def test_one_handoff_after_another_uses_the_same_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, rings=1) as stage:
            for _ in range(4):
                await stage.committed()

    run(scenario())


@pytest.mark.parametrize(
    "order",
    [
        ("manifest", "imported", "verified"),
        ("imported", "manifest", "verified"),
        ("imported", "verified", "manifest"),
    ],
)
def test_it_commits_whatever_comes_last(tmp_path: Path, order: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            task = await stage.complete()
            acts: dict[str, Callable[[], None]] = {
                "manifest": stage.seal,
                "imported": lambda: stage.host.worker.imported(task),
                "verified": lambda: stage.host.worker.verified(task),
            }
            for number, act in enumerate(order, 1):
                assert not stage.prefiller.all(CommitAck)
                acts[act]()
                if number < len(order):
                    await asyncio.sleep(0.03)
            await asyncio.wait_for(stage.task, 30)
            await stage.job.release()

    run(scenario())


def test_without_a_probe_the_positions_are_enough(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin(probe=False)
            task = await stage.granted()
            stage.send(*stage.pages[:-1])
            await stage.host.worker.got(p.StateComplete)
            stage.host.worker.take(task)
            stage.seal()
            stage.host.worker.imported(task)
            await asyncio.wait_for(stage.task, 30)
            await stage.job.release()

    run(scenario())


def test_the_import_is_not_finished_before_the_last_part_of_the_state_is_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            task = await stage.granted()
            for number, page in enumerate(stage.pages[:-1], 1):
                assert not stage.host.worker.all(p.StateComplete)
                stage.send(page)
                await stage.landed(number)
            await stage.host.worker.got(p.StateComplete)
            stage.host.worker.take(task)
            stage.task.cancel()
            await asyncio.gather(stage.task, return_exceptions=True)

    run(scenario())


def test_credit_comes_back_as_the_worker_imports(tmp_path: Path) -> None:
    """H5: a state many times the landing ring goes through it."""

    async def scenario() -> None:
        async with staged(tmp_path, ring_bytes=SMALL) as stage:
            stage.begin()
            task = await stage.granted()
            got = []
            credits = 0
            for sent, page in enumerate(stage.pages):
                while not stage.machine.may_send(page.header):
                    await stage.landed(sent)
                    got += stage.host.worker.take(task)
                    credits += 1
                    stage.machine.receive(await stage.prefiller.hear(Credit, credits), time.monotonic())
                stage.send(page)
            await stage.landed(len(stage.pages))
            got += stage.host.worker.take(task)
            assert stage.prefiller.all(Credit)
            assert got == [page for page in stage.pages if not page.in_slab]
            stage.seal()
            stage.host.worker.imported(task)
            stage.host.worker.verified(task)
            await asyncio.wait_for(stage.task, 30)
            await stage.job.release()

    run(scenario())


# -- a state that is wrong


def test_a_probe_that_disagrees_is_never_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            task = await stage.complete()
            stage.seal()
            stage.host.worker.imported(task)
            stage.host.worker.verified(task, ok=False)
            assert "relative rms error 1.00e+00" in await stage.failed("probe-mismatch")
            assert stage.trace.probe == "relative rms error 1.00e+00, tolerance 0.03"
            await stage.committed()

    run(scenario())


@pytest.mark.parametrize(
    ("number", "change", "reason"),
    [
        (0, {"sequence": 1}, "page-sequence"),
        (0, {"epoch": 0x7FFFFFFF}, "page-foreign"),
        (0, {"identity": b"x" * 16}, "page-foreign"),
        (0, {"layers": (0, 3)}, "page-range"),
        (0, {"tokens": (0, 15)}, "page-size"),
        (0, {"checksum": 1}, "page-checksum"),
        (0, {"component": Component.MTP_KV}, "page-unexpected"),
    ],
)
def test_a_page_that_is_not_what_it_should_be_ends_the_handoff_and_not_the_link(
    tmp_path: Path, number: int, change: dict[str, Any], reason: str
) -> None:
    """V2, H8."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.granted()
            page = stage.pages[number]
            stage.send_raw(Page(msgspec.structs.replace(page.header, **change), page.payload))
            await stage.failed(reason)
            assert await stage.aborts() == [reason]
            await stage.committed()

    run(scenario())


def test_a_page_that_comes_twice_ends_the_handoff(tmp_path: Path) -> None:
    """V2."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.granted()
            stage.send(stage.pages[0])
            stage.send_raw(stage.pages[0])
            await stage.failed("page-sequence")
            await stage.committed()

    run(scenario())


def test_a_payload_that_was_changed_is_not_seen_by_the_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            task = await stage.granted()
            page = stage.pages[0]
            stage.send_raw(Page(page.header, page.payload[:-1] + b"\xff"))
            await stage.failed("page-checksum")
            assert stage.host.worker.take(task) == []
            await stage.committed()

    run(scenario())


def test_a_token_history_of_another_prompt_ends_the_handoff(tmp_path: Path) -> None:
    """S7."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.granted()
            assert stage.machine.grant is not None
            stage.send(*stage.pages[:9])
            history = stage.pages[9]
            payload = bytearray(history.payload)
            payload[0] ^= 1
            forged = state_pages(stage.id, stage.machine.grant)[9].header
            checksum = page_checksum(
                memoryview(payload), stage.machine.grant.seed, forged.component, forged.layers, forged.tokens
            )
            stage.send_raw(Page(msgspec.structs.replace(forged, checksum=checksum), bytes(payload)))
            await stage.failed("token-history")
            await stage.committed()

    run(scenario())


def test_more_than_the_credit_ends_the_handoff(tmp_path: Path) -> None:
    """H5: a peer cannot make this host hold more than it granted."""

    async def scenario() -> None:
        async with staged(tmp_path, ring_bytes=SMALL) as stage:
            stage.begin()
            await stage.granted()
            for page in stage.pages[:5]:
                stage.send_raw(page)
            await stage.failed("credit")

    run(scenario())


def test_pages_larger_than_the_ring_takes_are_refused_before_any_is_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.asked()
            stage.machine._largest_page = 1 << 20
            stage.say(*stage.machine.reserve())
            assert "--ring-mib" in await stage.failed("page-too-large")
            reject = await stage.prefiller.hear(Reject)
            assert (reject.reason, reject.want) == ("page-too-large", str(1 << 20))
            await stage.committed()

    run(scenario())


def test_a_page_larger_than_was_announced_and_than_the_ring_takes_ends_the_handoff(tmp_path: Path) -> None:
    """It is within its credit and the schema."""

    async def scenario() -> None:
        async with staged(tmp_path, ring_bytes=SMALL) as stage:
            stage.begin()
            await stage.granted()
            spec = SCHEMA.spec(Component.ATTENTION_KV)
            assert spec is not None
            size = spec.page_bytes((0, 2), (0, 32))
            header = msgspec.structs.replace(stage.pages[0].header, tokens=(0, 32), payload_bytes=size)
            stage.send_raw(Page(header, bytes(size)))
            assert f"{size} bytes, RESERVE announced at most {LARGEST}" in await stage.failed("page-size")

    run(scenario())


def test_a_host_without_a_free_ring_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, rings=1) as stage:
            taken = stage.host.memory.lend("landing", 99)
            assert taken is not None
            stage.begin()
            await stage.asked()
            stage.say(*stage.machine.reserve())
            with pytest.raises(HandoffFailed) as error:
                await stage.task
            assert error.value.reason == "no-memory"
            assert (await stage.prefiller.hear(Reject)).reason == "no-memory"
            taken.end()
            await stage.committed()

    run(scenario())


def test_a_reserve_for_another_state_is_rejected_naming_both(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.asked()
            (reserve,) = [a.message for a in stage.machine.reserve() if isinstance(a, Send)]
            assert isinstance(reserve, Reserve)
            stage.prefiller.say(msgspec.structs.replace(reserve, tokens=99))
            assert "69" in await stage.failed("token-mismatch")
            assert (await stage.prefiller.hear(Reject)).want == "99 tokens"
            await stage.committed()

    run(scenario())


def test_a_manifest_that_does_not_agree_with_the_pages_ends_the_handoff(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.complete()
            (manifest,) = [a.message for a in stage.machine.manifest(68, None) if isinstance(a, Send)]
            assert isinstance(manifest, Manifest)
            stage.prefiller.say(msgspec.structs.replace(manifest, position=67))
            await stage.failed("position-mismatch")
            await stage.committed()

    run(scenario())


# -- late and slow pages


def test_pages_that_come_after_the_end_are_dropped_and_the_link_lives(tmp_path: Path) -> None:
    """H8, invariant: late frames of a dead epoch are dropped."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.granted()
            stage.send(stage.pages[0])
            await stage.landed(1)
            stage.task.cancel()
            await asyncio.gather(stage.task, return_exceptions=True)
            handoff = stage.host.incoming
            assert handoff is not None
            for page in stage.pages[1:4]:
                stage.send_raw(page)
            await until(lambda: stage.sending.stats.page_bytes_sent > 0 and handoff.machine.late >= 3)
            await stage.committed()

    run(scenario())


@pytest.mark.parametrize("ending", ["publish", "discard"])
@pytest.mark.parametrize("number", [0, 5], ids=["ring", "slab"])
def test_memory_is_not_given_back_while_a_receiver_thread_still_writes_it(
    tmp_path: Path, ending: str, number: int
) -> None:
    """X6: a late write would land in the next tenant's state."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.granted()
            stage.send(*stage.pages[:number])
            await stage.landed(number)
            handoff = stage.host.incoming
            assert handoff is not None
            page, landing = stage.pages[number], list[Landing]()

            def receive() -> None:
                claimed = handoff.claim(page.header, len(page.payload))
                assert claimed is not None
                landing.append(claimed)

            await asyncio.to_thread(receive)
            stage.task.cancel()
            await asyncio.sleep(0.05)
            assert stage.host.memory.reserved_bytes() > 0
            assert not stage.task.done()
            landing[0].view[:] = page.payload
            await asyncio.to_thread(getattr(landing[0], ending))
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(stage.task, 30)
            assert stage.nothing_held()
            await stage.committed()

    run(scenario())


def test_a_page_that_the_link_gives_up_ends_the_handoff(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            await stage.granted()
            handoff, page = stage.host.incoming, stage.pages[0]
            assert handoff is not None
            landing = await asyncio.to_thread(handoff.claim, page.header, len(page.payload))
            assert landing is not None
            await asyncio.to_thread(landing.discard)
            await stage.failed("page-lost")
            await stage.committed()

    run(scenario())


def test_pages_of_many_threads_all_land(tmp_path: Path) -> None:
    """Claims in order, arrivals in any: the worker sees the claimed order, and nothing before it is whole."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            task = await stage.granted()
            handoff = stage.host.incoming
            assert handoff is not None
            landings = []
            for page in stage.pages:
                landing = handoff.claim(page.header, len(page.payload))
                assert landing is not None
                landings.append((page, landing))
            threads = [threading.Thread(target=_fill, args=(page, landing)) for page, landing in reversed(landings)]
            for thread in threads:
                assert stage.host.worker.take(task) == [] or thread is not threads[0]
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            for page in stage.pages:
                stage.machine.page_sent(page.header)
            assert stage.host.worker.take(task) == [page for page in stage.pages if not page.in_slab]
            stage.seal()
            stage.host.worker.imported(task)
            stage.host.worker.verified(task)
            await asyncio.wait_for(stage.task, 30)
            await stage.job.release()

    run(scenario())


def _fill(page: Page, landing: Landing) -> None:
    landing.view[:] = page.payload
    landing.publish()


def test_the_worker_never_sees_a_page_whose_handoff_has_just_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            task = await stage.granted()
            handoff, page = stage.host.incoming, stage.pages[0]
            assert handoff is not None
            landing = handoff.claim(page.header, len(page.payload))
            assert landing is not None
            landing.view[:] = page.payload
            handoff.fail("cancelled", "the client is gone")
            landing.publish()
            assert stage.host.worker.take(task) == []
            await stage.failed("cancelled")
            await stage.committed()

    run(scenario())


def test_a_link_that_is_gone_before_the_offer_is_a_failed_handoff(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.begin()
            assert stage.host.link is not None
            stage.host.link.close("test")
            await stage.failed("link-lost")

    run(scenario())
