"""The prefiller's side over a real link. The decoder is a peer that says what the test tells it to say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.daemon.outgoing_stage import RING, SEED, staged
from tests.daemon.wires import Peer, joined, run, until
from tests.daemon.worker_double import FACTS, PROMPT, Page
from zerocopy.daemon import outgoing as module
from zerocopy.handoff.components import HEADER_BYTES, Component, record_bytes
from zerocopy.handoff.messages import (
    Abort,
    CommitAck,
    Credit,
    Grant,
    Manifest,
    Prefill,
    Reject,
    Reserve,
    decode,
    pack_tokens,
)
from zerocopy.worker import protocol as p

pytestmark = pytest.mark.usefixtures("transport")

# -- the whole way


def test_a_state_leaves_page_by_page_in_order_and_is_forgotten_once_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            reserve = await stage.reserved()
            assert (reserve.tokens, reserve.identity) == (69, FACTS.identity)
            task = await stage.streamed()
            assert stage.sink.landed == stage.pages
            assert (task.tokens, task.epoch, task.seed, task.probe) == (PROMPT, 7, SEED, True)
            assert stage.host.memory.reserved_bytes() > 0, "kept until the decoder has it (H4)"
            assert not stage.host.worker.all(p.Release)
            stage.decoder.say(CommitAck(handoff_id=stage.id, epoch=7))
            await until(stage.host.nothing_held)
            assert [m.job for m in stage.host.worker.all(p.Release)] == [task.job]
            (trace,) = stage.host.traces
            assert (trace.outcome, trace.reason) == ("committed", "committed")
            assert sum(trace.component_pages.values()) == len(stage.pages)
            assert not stage.aborts()

    run(scenario())


def test_the_manifest_counts_what_was_sent_and_brings_the_sources_figures(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            await stage.streamed()
            (manifest,) = stage.decoder.all(Manifest)
            assert sum(entry.pages for entry in manifest.components) == len(stage.pages)
            assert sum(entry.nbytes for entry in manifest.components) == sum(len(page.payload) for page in stage.pages)
            assert manifest.position == 68
            assert {"prefilled", "export_busy_s", "chunks"} <= manifest.timings.keys()
            stage.decoder.say(CommitAck(handoff_id=stage.id, epoch=7))

    run(scenario())


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)  # a sink that waits stops a whole QUIC endpoint
def test_a_commit_that_overtakes_the_acknowledgements_of_its_pages_waits_for_them(tmp_path: Path) -> None:
    """They are no pages to cancel: the decoder has them."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.sink.gate.clear()
            stage.ask()
            task = await stage.granted()
            stage.host.worker.export_all(task, stage.pages)
            await stage.decoder.hear(Manifest)
            stage.decoder.say(CommitAck(handoff_id=stage.id, epoch=7))
            (handoff,) = stage.host.service._handoffs.values()
            await until(lambda: handoff.machine.over)
            await asyncio.sleep(0.02)
            assert stage.host.memory.reserved_bytes() > 0
            stage.sink.gate.set()
            await until(stage.host.nothing_held)
            assert sum(stage.host.traces[0].component_pages.values()) == len(stage.pages)

    run(scenario())


def test_one_handoff_after_another_uses_the_same_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, rings=1) as stage:
            for _ in range(4):
                await stage.committed()

    run(scenario())


def test_ring_pages_wait_for_the_snapshot_whose_turn_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted()
            pages = stage.pages
            for page in pages:
                if not page.in_slab:
                    stage.host.worker.export(task, page)
            await stage.arrived(5)
            await asyncio.sleep(0.05)
            assert stage.sink.landed == pages[:5], "the KV pages; token history and probe come after the snapshot"
            stage.host.worker.snapshot(task, [page for page in pages if page.in_slab])
            stage.host.worker.prefilled(task, len(pages))
            assert await stage.arrived(len(pages)) == pages
            stage.decoder.say(CommitAck(handoff_id=stage.id, epoch=7))

    run(scenario())


def test_pages_leave_while_prefill_still_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted()
            for number, page in enumerate(stage.pages[:5], 1):
                stage.host.worker.export(task, page)
                await stage.arrived(number)
            stage.decoder.say(Abort(handoff_id=stage.id, epoch=7, reason="cancelled", message=""))

    run(scenario())


# -- credit and other bounds


def test_no_page_leaves_without_credit_and_each_leaves_as_soon_as_there_is(tmp_path: Path) -> None:
    """H5."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            await stage.reserved()
            cost = record_bytes(Component.ATTENTION_KV, 40 + 2 * (12 + 16 * 96))
            task = await stage.granted(credit=cost * 2)
            stage.host.worker.export_all(task, stage.pages)
            await stage.arrived(2)
            await asyncio.sleep(0.05)
            assert len(stage.sink.landed) == 2
            stage.decoder.say(Credit(handoff_id=stage.id, epoch=7, limit=cost * 3))
            await stage.arrived(3)
            await asyncio.sleep(0.05)
            assert len(stage.sink.landed) == 3
            stage.decoder.say(Credit(handoff_id=stage.id, epoch=7, limit=cost * 30))
            assert await stage.arrived(len(stage.pages)) == stage.pages
            stage.decoder.say(CommitAck(handoff_id=stage.id, epoch=7))

    run(scenario())


def test_a_page_that_no_credit_will_ever_cover_ends_the_handoff(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted(credit=1000)
            stage.host.worker.export(task, stage.pages[0])
            await stage.failed("page-too-large")
            await until(lambda: stage.aborts() == ["page-too-large"])
            await stage.committed()

    run(scenario())


def test_the_link_is_never_given_more_pages_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SENDING", 2)

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.sink.gate.clear()
            stage.ask()
            task = await stage.granted()
            stage.host.worker.export_all(task, stage.pages)
            (handoff,) = stage.host.service._handoffs.values()
            await until(lambda: len(handoff._sending) == 2)
            await asyncio.sleep(0.05)
            assert len(handoff._sending) == 2
            stage.sink.gate.set()
            assert await stage.arrived(len(stage.pages)) == stage.pages
            stage.decoder.say(CommitAck(handoff_id=stage.id, epoch=7))

    run(scenario())


def test_the_lane_serves_one_prompt_at_a_time_in_arrival_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            ids = [stage.ask() for _ in range(3)]
            for handoff_id in ids:
                await stage.reserved(handoff_id)
                await asyncio.sleep(0.02)
                assert [r.handoff_id for r in stage.decoder.all(Reserve)] == ids[: ids.index(handoff_id) + 1]
                stage.decoder.say(Reject(handoff_id=handoff_id, reason="no-memory", message="no ring"))
            await until(stage.host.nothing_held)

    run(scenario())


# -- an exporter that is wrong


def test_a_page_that_the_exporter_left_out_is_named(tmp_path: Path) -> None:
    """Invariant: every component the schema requires is present, or the handoff is refused naming it."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted()
            pages = [page for page in stage.pages if page.header.sequence != 3]
            stage.host.worker.export_all(task, pages)
            await stage.failed("page-missing")
            assert stage.decoder.all(Abort)[-1].message == "the exporter left out page 3 of 10"
            await stage.committed()

    run(scenario())


def test_a_last_page_that_never_came_is_noticed_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted()
            for page in stage.pages[:5]:
                stage.host.worker.export(task, page)
            await stage.arrived(5)
            stage.host.worker.prefilled(task, 6)
            await stage.failed("page-missing")
            assert stage.decoder.all(Abort)[-1].message == "the exporter left out page 5 of 6"

    run(scenario())


def test_a_component_that_the_exporter_forgot_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted()
            for page in stage.pages[:5]:
                stage.host.worker.export(task, page)
            stage.host.worker.prefilled(task, 5)
            await stage.failed("state-incomplete")
            assert "recurrent state" in stage.decoder.all(Abort)[-1].message

    run(scenario())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epoch": 8}, "page-foreign"),
        ({"tokens": (0, 8)}, "page-size"),
        ({"tokens": (1000, 1016)}, "page-range"),
        ({"layers": (0, 1)}, "page-size"),
    ],
)
def test_a_page_that_the_decoder_would_refuse_is_refused_here(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted()
            first = stage.pages[0]
            stage.host.worker.export(task, Page(msgspec.structs.replace(first.header, **change), first.payload))
            await stage.failed(reason)
            await stage.committed()

    run(scenario())


def test_a_record_that_is_no_page_ends_the_handoff_and_gives_the_ring_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted()
            slot = stage.host.worker.claim(task, stage.pages[0])
            slot.view[:HEADER_BYTES] = bytes(HEADER_BYTES)
            slot.commit()
            await stage.failed("page-header")
            await stage.committed()

    run(scenario())


def test_a_snapshot_part_outside_the_slab_ends_the_handoff(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            task = await stage.granted()
            for page in stage.pages[:5]:
                stage.host.worker.export(task, page)
            part = stage.pages[5]
            bad = p.SlabPart(part.header.pack(), 1 << 30, len(part.payload))
            stage.host.worker.say(p.SnapshotReady(task.job, (bad,)))
            await stage.failed("slab-range")
            await stage.committed()

    run(scenario())


# -- what is not even queued


def test_a_replayed_id_is_the_peers_fault_for_ever(tmp_path: Path) -> None:
    """X7: ids are single-use for the life of a boot."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            await stage.committed()
            replayed = Prefill(
                handoff_id=stage.id, identity=FACTS.identity, prompt=pack_tokens(PROMPT), tenant="", queue_deadline_s=1
            )
            stage.decoder.say(replayed)
            await until(lambda: stage.host.errors)
            assert stage.host.service.running == 0

    run(scenario())


def test_a_prompt_that_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask(prompt=pack_tokens([1] * 513))
            await until(lambda: stage.aborts() == ["context-length"])
            stage.ask(prompt=pack_tokens([1]))
            await until(lambda: stage.aborts() == ["prompt-too-short"])
            stage.ask(identity=msgspec.structs.replace(FACTS.identity, model="another"))
            await until(lambda: stage.aborts() == ["identity-mismatch"])
            stage.host.worker.facts = None
            stage.ask()
            await until(lambda: stage.aborts() == ["engine-down"])
            stage.host.worker.facts = FACTS
            monkeypatch.setattr(module, "MAX_QUEUED", 0)
            stage.ask()
            await until(lambda: stage.aborts() == ["queue-full"])
            await until(stage.host.nothing_held)

    run(scenario())


class Another:
    """A link of a second decoder that only hears."""

    peer, transport = "another", "tcp"

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: bytes) -> None:
        self.heard.append(decode(message))


def test_one_peer_does_not_fill_the_queue_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q2, H5: it had every place, and others' prompts were refused until its own were done."""
    monkeypatch.setattr(module, "MAX_QUEUED", 6)

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            first = [stage.ask() for _ in range(3)]
            await until(lambda: stage.host.service.running == 3)
            stage.ask()
            await until(lambda: stage.aborts() == ["queue-full"])
            assert "3 prompts" in stage.decoder.all(Abort)[-1].message

            another, outcomes = Another(), list[int]()
            for number in range(3):
                request = Prefill(
                    handoff_id=bytes([number]) * 16,
                    identity=FACTS.identity,
                    prompt=pack_tokens(PROMPT),
                    tenant="",
                    queue_deadline_s=20.0,
                )
                stage.host.service.prefill(another, request)  # type: ignore[arg-type]
                outcomes.append(stage.host.service.running)
            assert outcomes == [4, 5, 5], "two of the three places that were left: the last is for a third peer"
            assert [m.reason for m in another.heard if isinstance(m, Abort)] == ["queue-full"]

            stage.host.service.link_lost(another, "gone")  # type: ignore[arg-type]
            for each in first:
                stage.decoder.say(Abort(handoff_id=each, epoch=0, reason="cancelled", message=""))
            await until(stage.host.nothing_held)
            stage.ask()
            await stage.reserved()
            assert stage.aborts() == []

    run(scenario())


def test_a_page_larger_than_this_hosts_own_ring_takes_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            facts = msgspec.structs.replace(FACTS, chunk_tokens=256, page_tokens=256)
            stage.host.worker.facts = facts
            stage.ask(prompt=pack_tokens([1] * 300))
            await stage.reserved()
            stage.decoder.say(Grant(handoff_id=stage.id, epoch=7, credit=RING, seed=SEED, deadline_s=20.0))
            await stage.failed("page-too-large")
            assert "--ring-mib" in stage.decoder.all(Abort)[-1].message

    run(scenario())


@pytest.mark.parametrize(("page_bytes", "tokens"), [(0, 16), (10_000, 51), (1 << 20, 300)])
def test_a_reservation_names_the_longest_page_of_what_may_gather(tmp_path: Path, page_bytes: int, tokens: int) -> None:
    """The decoder's window leaves room for one of them at its ring's end."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.host.worker.facts = msgspec.structs.replace(FACTS, page_bytes=page_bytes)
            stage.ask(prompt=pack_tokens([1] * 300))
            kv = FACTS.schema.components[0]
            assert (await stage.reserved()).largest_page == kv.page_bytes((0, 2), (0, tokens))

    run(scenario())


def test_pages_are_as_long_as_the_decoders_ring_takes(tmp_path: Path) -> None:
    """Which may be smaller than this host's. The worker that makes them is told too."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.host.worker.facts = msgspec.structs.replace(FACTS, page_bytes=1 << 20)
            stage.ask(prompt=pack_tokens([1] * 300), largest_page=10_000)
            task = await stage.granted()
            kv = FACTS.schema.components[0]
            assert (await stage.reserved()).largest_page == kv.page_bytes((0, 2), (0, 51))
            assert task.largest_page == 10_000

    run(scenario())


def test_a_decoder_whose_ring_takes_no_page_at_all_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask(largest_page=100)
            await until(lambda: stage.aborts() == ["page-too-large"])
            message = stage.decoder.all(Abort)[-1].message
            assert "the decoder's rings" in message and "a ring takes 100" in message and "--ring-mib" in message
            await until(stage.host.nothing_held)

    run(scenario())


def test_with_no_ring_left_the_handoff_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, rings=1) as stage:
            taken = stage.host.memory.lend("export", 99)
            assert taken is not None
            stage.ask()
            await stage.reserved()
            stage.decoder.say(Grant(handoff_id=stage.id, epoch=7, credit=RING, seed=SEED, deadline_s=20.0))
            await until(lambda: stage.aborts() == ["no-memory"])
            taken.end()
            await stage.committed()

    run(scenario())


def test_messages_of_a_handoff_of_another_link_are_not_taken(tmp_path: Path) -> None:
    """X7."""

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            await stage.reserved()
            other = Peer()
            async with joined(tmp_path / "other", other, Peer()) as link:
                abort = Abort(handoff_id=stage.id, epoch=0, reason="stolen", message="")
                assert stage.host.service.message(link, abort) is False
                stage.host.service.link_lost(link, "test")
            assert stage.host.service.running == 1
            stage.decoder.say(Reject(handoff_id=stage.id, reason="no-memory", message=""))
            await stage.failed("no-memory")

    run(scenario())


def test_a_message_out_of_order_ends_the_handoff(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.ask()
            await stage.granted()
            stage.decoder.say(CommitAck(handoff_id=stage.id, epoch=7))
            await stage.failed("out-of-order")
            await stage.committed()  # over the same link

    run(scenario())
