"""The worker's loop on a thread, with its daemon's end of the socket in the test's hand."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import pytest

from native.ring import Ring
from native.slab import Slab
from tests.worker.stage import EPOCH, HANDOFF, SEED, Stage, prompt
from zerocopy.handoff.components import HEADER_BYTES
from zerocopy.runtime.base import EngineError, Output, Row
from zerocopy.runtime.llama.engine import LlamaRuntime
from zerocopy.runtime.llama.pool import LlamaPool
from zerocopy.worker import protocol as p
from zerocopy.worker.loop import Worker
from zerocopy.worker.sampling import Sampling
from zerocopy.worker.scheduler import QUIET_COPY_S, Scheduler

EVERYTHING = "nemotron_h_moe+mtp"
BOTH = frozenset({"prefill", "decode"})
TIMEOUT_S = 20.0

M = TypeVar("M")


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop wakes for what happens and for nothing else: one that sleeps beside work never ends here."""
    monkeypatch.setattr("zerocopy.worker.loop.IDLE_WAIT_S", 3600.0)


class Daemon:
    """What the daemon would hold: rings, slabs, the socket, and all that was said."""

    def __init__(self, runtime: LlamaRuntime, roles: frozenset[str], rings: int, ring_bytes: int) -> None:
        self.runtime = runtime
        self.pools: list[LlamaPool] = []
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(TIMEOUT_S)
        self._theirs = theirs
        self.heard: list[p.ToDaemon] = []
        self.export = [Ring.create(ring_bytes, "test") for _ in range(rings)]
        self.landing = [Ring.create(ring_bytes, "test") for _ in range(rings)]
        size = runtime.facts.schema.snapshot_bytes()
        self.export_slabs, self.landing_slabs = ([Slab.create(size, "test")] if size else [] for _ in range(2))
        for slab in self.export_slabs + self.landing_slabs:
            assert slab.claim(EPOCH)
        self.worker = Worker(p.WorkerSocket(theirs), self._recording_runtime(), roles)
        self.ended: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._attach()

    def _recording_runtime(self) -> LlamaRuntime:
        """The session's runtime, whose lanes this test closes and may tamper with."""
        runtime = self.runtime

        class Recording:
            facts = runtime.facts
            tokenize = staticmethod(runtime.tokenize)
            piece = staticmethod(runtime.piece)
            is_end = staticmethod(runtime.is_end)

            @staticmethod
            def open_pool() -> LlamaPool:
                self.pools.append(runtime.open_pool())
                return self.pools[-1]

        return Recording()  # type: ignore[return-value]

    def _run(self) -> None:
        with contextlib.suppress(EOFError):
            self.worker.run()
            self.ended.append("shutdown")
        if not self.ended:
            self.ended.append("daemon gone")

    def _attach(self) -> None:
        rings = [ring.handle for ring in (*self.export, *self.landing)]
        fds = [
            *(fd for ring in self.export for fd in ring.handle.fds),
            *(slab.handle.memory_fd for slab in self.export_slabs),
            *(fd for ring in self.landing for fd in ring.handle.fds),
            *(slab.handle.memory_fd for slab in self.landing_slabs),
        ]
        ring_specs = tuple(p.RingSpec(ring.capacity) for ring in rings)
        half = len(self.export)
        slab_specs = tuple(p.SlabSpec(slab.capacity) for slab in self.export_slabs)
        socket.send_fds(
            self.sock, [p.encode(p.Attach(ring_specs[:half], slab_specs, ring_specs[half:], slab_specs))], fds
        )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.send(p.Shutdown())
        self.sock.close()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self._theirs.close()
        for pool in self.pools:
            pool.close()
        worker = self.worker  # its process would end here
        for ring in (*self.export, *self.landing, *worker._export_rings, *worker._landing_rings):
            ring.close()
        for slab in (*self.export_slabs, *self.landing_slabs, *worker._export_slabs, *worker._landing_slabs):
            slab.close()

    # -- talking

    def send(self, message: p.ToWorker) -> None:
        self.sock.sendall(p.encode(message))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            assert more, "the worker has ended"
            data += more
        return data

    def hear(self, kind: type[M], job: int | None) -> M:
        """The next message of that kind for that job; everything before it is kept in `heard`."""
        while True:
            message = p.decode_to_daemon(self._exactly(p.frame_length(self._exactly(4))))
            self.heard.append(message)
            if isinstance(message, kind) and getattr(message, "job", None) == job:
                return message

    def prefill(self, job: int, tokens: list[int], ring: int = 0, lane: int = 0) -> None:
        slab = 0 if self.export_slabs else None
        self.send(p.Prefill(job, tokens, HANDOFF, EPOCH, SEED, ring, slab, probe=True, lane=lane))

    def generate(self, job: int, tokens: list[int], **changes: Any) -> None:
        message = p.Generate(job, tokens, max_tokens=4, sampling=Sampling(), stop=(), proof_key=None)
        self.send(msgspec.structs.replace(message, **changes))

    def drain(self, ring: Ring) -> int:
        count = 0
        while (record := ring.read()) is not None:
            record.release()
            count += 1
        return count

    def carry(self) -> int:
        """What waits in the first export ring goes into the first landing ring; returns how many pages that was."""
        count = 0
        while (record := self.export[0].read()) is not None:
            slot = self.landing[0].claim(len(record.view))
            assert slot is not None
            slot.view[:] = record.view
            slot.commit()
            record.release()
            count += 1
        return count

    def release(self, job: int) -> None:
        self.send(p.Release(job))
        self.hear(p.Dropped, job)

    def order(self, *kinds: type) -> list[tuple[str, int]]:
        return [(type(m).__name__, getattr(m, "job", 0)) for m in self.heard if isinstance(m, kinds)]


Open = Callable[..., Daemon]


@pytest.fixture
def daemon(runtime_of: Callable[[str], LlamaRuntime]) -> Iterator[Open]:
    opened: list[Daemon] = []

    def build(family: str = "llama", roles: frozenset[str] = BOTH, rings: int = 2, ring_bytes: int = 1 << 20) -> Daemon:
        opened.append(Daemon(runtime_of(family), roles, rings, ring_bytes))
        return opened[-1]

    yield build
    for one in opened:
        one.close()


def test_one_worker_prefills_and_another_prompt_is_continued_at_once(daemon: Open) -> None:
    """Q1: the two pools take turns on the one engine thread."""
    host = daemon(EVERYTHING)
    host.prefill(1, prompt(200))
    host.generate(2, prompt(100), max_tokens=30)
    host.hear(p.Generated, 2)
    if not any(isinstance(m, p.Prefilled) for m in host.heard):
        host.hear(p.Prefilled, 1)
    turns = [job for _, job in host.order(p.ChunkDone, p.TextDelta)]
    first, last = turns.index(2), max(n for n, job in enumerate(turns) if job == 1)
    assert first < last, "the decode pool waited for the whole prefill"


def test_requests_on_several_lanes_take_their_tokens_in_turn(daemon: Open) -> None:
    """Q1: continuous batching: one that comes while another generates does not wait for its end."""
    host = daemon()
    host.generate(1, prompt(40), max_tokens=200)
    host.hear(p.TextDelta, 1)
    host.generate(2, prompt(60), max_tokens=5, lane=1)
    host.generate(3, prompt(30), max_tokens=5, lane=2)
    for job in (2, 3, 1):
        host.hear(p.Generated, job)
    order = [job for _, job in host.order(p.TextDelta)]
    assert order[-1] == 1
    last = max(n for n, job in enumerate(order) if job == 2)
    assert order[order.index(2) : last].count(1) >= 3, "the two did not go on together"


def recorded(host: Daemon, number: int, then: Callable[[], None]) -> list[list[int]]:
    """Fills with the tokens of each row, call by call; `then` comes during that call of the engine."""
    calls = list[list[int]]()
    (pool,) = host.pools[:1]
    evaluate = pool.evaluate

    def recording(rows: Sequence[Row]) -> list[Output | EngineError]:
        calls.append([len(row.tokens) for row in rows])
        if len(calls) == number:
            then()
        outputs: list[Output | EngineError] = evaluate(rows)
        return outputs

    pool.evaluate = recording
    return calls


def test_a_prompt_that_comes_during_an_engine_call_is_in_the_next_one(daemon: Open) -> None:
    """Q1: one call later would be a first token later, and beside a prompt's end a call half empty."""
    host = daemon()
    calls = recorded(host, 3, lambda: host.generate(2, prompt(20), lane=1))
    host.generate(1, prompt(10), max_tokens=8)
    host.hear(p.Generated, 1)
    assert [len(rows) for rows in calls[:4]] == [1, 1, 1, 2]


def test_a_first_token_comes_before_more_of_another_prompt_is_read(daemon: Open) -> None:
    """Q1: in one call with a chunk it would come a chunk later. The tokens after it share calls with chunks."""
    host = daemon()
    calls = recorded(host, 1, lambda: host.generate(2, prompt(200), lane=1))
    host.generate(1, prompt(10), max_tokens=4)
    host.hear(p.Generated, 1)
    assert calls[0] == [9]
    assert calls[1] == [1], "its first token waited for a chunk of the other prompt"
    assert [rows[0] for rows in calls[2:4]] == [1, 1] and all(len(rows) == 2 for rows in calls[2:4])


def test_prompts_beside_those_who_generate_are_cut_to_what_takes_a_lone_chunks_time(daemon: Open) -> None:
    """Q1: the engine here takes a hundred times as long for calls beside a generation."""
    host = daemon()
    calls = list[list[int]]()
    (pool,) = host.pools[:1]
    evaluate = pool.evaluate

    def slow(rows: Sequence[Row]) -> list[Output | EngineError]:
        calls.append([len(row.tokens) for row in rows])
        if len(calls) == 2:
            host.generate(2, prompt(400), lane=1)
        began = time.monotonic()
        outputs: list[Output | EngineError] = evaluate(rows)
        if len(rows) > 1:
            time.sleep(100 * (time.monotonic() - began))
        return outputs

    pool.evaluate = slow
    chunk = host.runtime.facts.chunk_tokens
    host.generate(1, prompt(chunk + 1), max_tokens=20)
    host.hear(p.Generated, 1)
    assert calls[0] == [chunk]
    both = [rows for rows in calls if len(rows) > 1]
    assert both[0] == [1, chunk - 1] and both[1] == [1, chunk // 4 - 1], both


def test_a_chunk_that_its_lane_refused_says_nothing_of_the_engines_speed(
    daemon: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that took no time it would cut everybody's prompts to the least there is."""
    told, host = list[int](), daemon()
    monkeypatch.setattr(Scheduler, "took", lambda self, seconds, tokens, **_: told.append(tokens))
    chunk = host.runtime.facts.chunk_tokens
    host.generate(1, [99_999] * (chunk + 1))
    host.hear(p.Failed, 1)
    host.generate(2, prompt(chunk + 1), max_tokens=1, lane=1)
    host.hear(p.Generated, 2)
    assert told == [chunk]


def test_a_sequence_that_ended_leaves_the_engine_before_the_daemon_lets_go_of_it(daemon: Open) -> None:
    """Its cells would be in the way of the next call, which the daemon's answer does not reach in time."""
    host = daemon()
    host.generate(1, prompt(10), max_tokens=3)
    host.hear(p.Generated, 1)
    host.send(p.Ping())
    host.hear(p.Pong, None)  # a turn of the loop later
    assert not host.pools[0].lane(0).used
    host.release(1)


def test_generations_in_one_batch_give_the_tokens_they_give_alone(daemon: Open) -> None:
    host = daemon(EVERYTHING)
    texts: dict[tuple[int, bool], str] = {}

    def text(job: int) -> str:
        return "".join(m.text for m in host.heard if isinstance(m, p.TextDelta) and m.job == job)

    for n in (1, 2, 3):
        host.generate(n, prompt(30 * n), max_tokens=6)
        host.hear(p.Generated, n)
        texts[n, True] = text(n)
        host.release(n)
    for n in (1, 2, 3):
        host.generate(10 + n, prompt(30 * n), max_tokens=6, lane=n - 1)
    for n in (1, 2, 3):
        if not any(isinstance(m, p.Generated) and m.job == 10 + n for m in host.heard):
            host.hear(p.Generated, 10 + n)
        texts[n, False] = text(10 + n)
    assert all(texts[n, True] == texts[n, False] for n in (1, 2, 3))


def test_a_lane_keeps_its_job_until_it_is_released(daemon: Open) -> None:
    """H4: the source's state stays until commit or abort, and nobody else gets on the lane."""
    host = daemon()
    host.prefill(1, prompt(40))
    host.hear(p.Prefilled, 1)
    host.prefill(2, prompt(40), ring=1)
    assert host.hear(p.Failed, 2).reason == "lane-taken"
    host.prefill(3, prompt(40), ring=1, lane=1)
    host.hear(p.Prefilled, 3)
    host.release(1)
    host.export[0].recycle()
    host.prefill(4, prompt(40))
    host.hear(p.Prefilled, 4)


def test_a_job_says_whether_it_was_alone(daemon: Open) -> None:
    """Only then must its bits be those of another host."""
    host = daemon()
    host.prefill(1, prompt(40))
    assert host.hear(p.Prefilled, 1).solo
    host.prefill(2, prompt(40), ring=1, lane=1)
    assert not host.hear(p.Prefilled, 2).solo
    for job in (1, 2):
        host.release(job)
        host.export[job - 1].recycle()
    host.prefill(3, prompt(300))
    host.hear(p.ChunkDone, 3)
    host.prefill(4, prompt(40), ring=1, lane=1)
    host.drain(host.export[0])
    assert not host.hear(p.Prefilled, 3).solo, "another came while it was being evaluated"


def test_a_page_that_took_too_long_leaves_nobody_behind(daemon: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for copying was over before the second job was looked at: it has its turn at once, not when something
    happens."""
    host = daemon(ring_bytes=64 << 10)
    host.prefill(1, prompt(60))
    host.hear(p.Prefilled, 1)
    claim, full = Ring.claim, threading.Event()

    def slowly(ring: Ring, nbytes: int) -> Any:
        slot = claim(ring, nbytes)
        if slot is None:
            full.set()
            time.sleep(2 * QUIET_COPY_S)
        return slot

    monkeypatch.setattr(Ring, "claim", slowly)
    host.prefill(2, prompt(300), ring=1, lane=1)  # more than its ring takes
    assert full.wait(TIMEOUT_S)
    host.generate(3, prompt(60), ring=0)
    host.carry()
    host.send(p.StateComplete(3))
    host.hear(p.Imported, 3)


def test_an_import_that_is_stuck_holds_up_nobody(daemon: Open) -> None:
    """H5: a stopped source of one handoff."""
    host = daemon()
    host.generate(1, prompt(40), ring=0, lane=0)
    host.generate(2, prompt(40), lane=1)
    host.hear(p.Generated, 2)


def test_a_full_export_ring_is_exported_further_as_it_empties(daemon: Open) -> None:
    """The space bell wakes the loop: nothing polls."""
    host = daemon(rings=1, ring_bytes=64 << 10)
    host.prefill(1, prompt(300))
    host.hear(p.ChunkDone, 1)
    count, stop = 0, threading.Event()

    def pump() -> None:
        nonlocal count
        while not stop.is_set():
            count += host.drain(host.export[0])
            stop.wait(0.001)

    thread = threading.Thread(target=pump)
    thread.start()
    done = host.hear(p.Prefilled, 1)
    stop.set()
    thread.join()
    assert count + host.drain(host.export[0]) == done.pages


def test_a_landing_page_wakes_a_waiting_import(daemon: Open) -> None:
    """The whole state, page by page, through two workers' rings, to an exact probe."""
    host = daemon(EVERYTHING)
    host.prefill(1, prompt(60))
    done = host.hear(p.Prefilled, 1)
    host.generate(2, prompt(60), ring=0, slab=0, probe=True)
    moved = host.carry()
    parts = [part for m in host.heard if isinstance(m, p.SnapshotReady) for part in m.parts]
    for part in parts:
        source = host.export_slabs[0].view(part.offset, part.nbytes)
        host.landing_slabs[0].view(part.offset, part.nbytes)[:] = source
    assert moved + len(parts) == done.pages
    host.send(p.StateComplete(2))
    assert host.hear(p.Verified, 2).exact
    assert not host.order(p.TextDelta)
    host.send(p.Commit(2))
    assert host.hear(p.Generated, 2).completion_tokens == 4


def test_a_state_that_is_complete_before_its_job_has_taken_a_step_is_imported_all_the_same(daemon: Open) -> None:
    """A short prompt's pages can all be here by then."""
    host = daemon()
    host.prefill(2, prompt(40))
    host.hear(p.Prefilled, 2)
    host.carry()
    generate = p.Generate(3, prompt(40), max_tokens=4, sampling=Sampling(), stop=(), proof_key=None, ring=0)
    host.sock.sendall(b"".join(p.encode(message) for message in (generate, p.StateComplete(3), p.Commit(3))))
    assert host.hear(p.Generated, 3).completion_tokens == 4


# -- release


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_a_prefill_can_be_released_in_the_middle_and_the_next_is_unharmed(daemon: Open, chunks: int) -> None:
    """H7: its lane is wiped, its ring is free, and another prompt's state is what it would have been."""
    host = daemon(EVERYTHING)
    host.prefill(1, prompt(200))
    for _ in range(chunks):
        host.hear(p.ChunkDone, 1)
    host.release(1)
    host.export[0].recycle()
    host.prefill(2, prompt(60))
    host.hear(p.Prefilled, 2)
    after = [bytes(r.view[HEADER_BYTES:]) for r in iter(host.export[0].read, None)]
    fresh = Stage(host.runtime)
    assert after == [bytes(page.payload) for page in fresh.exported(prompt(60)) if page.header.component not in (2, 3)]
    fresh.close()


def test_an_import_that_waits_for_pages_can_be_released(daemon: Open) -> None:
    host = daemon()
    host.generate(1, prompt(40), ring=0)
    host.release(1)
    host.landing[0].recycle()
    host.generate(2, prompt(40))
    host.hear(p.Generated, 2)


def test_an_import_that_waits_for_its_commit_can_be_released(daemon: Open) -> None:
    """H3: and has generated nothing."""
    host = daemon()
    host.prefill(1, prompt(40))
    host.hear(p.Prefilled, 1)
    host.generate(2, prompt(40), ring=0, probe=False)
    while (record := host.export[0].read()) is not None:
        slot = host.landing[0].claim(len(record.view))
        assert slot is not None
        slot.view[:] = record.view
        slot.commit()
        record.release()
    host.send(p.StateComplete(2))
    host.hear(p.Imported, 2)
    host.release(2)
    assert not host.order(p.TextDelta)


def test_a_generation_can_be_released_between_two_tokens(daemon: Open) -> None:
    host = daemon()
    host.generate(1, prompt(40), max_tokens=400)
    host.hear(p.TextDelta, 1)
    host.release(1)
    assert not host.order(p.Generated)


def test_a_release_is_answered_also_for_a_job_nobody_knows(daemon: Open) -> None:
    daemon().release(77)


def test_what_is_meant_for_a_job_that_is_over_is_dropped(daemon: Open) -> None:
    host = daemon()
    host.generate(1, prompt(40), ring=0)
    host.release(1)
    host.send(p.StateComplete(1))
    host.send(p.Commit(1))
    host.generate(2, prompt(40))
    host.hear(p.Generated, 2)


# -- failure


def test_a_job_that_fails_ends_alone_and_its_lane_serves_the_next(daemon: Open) -> None:
    host = daemon()
    host.generate(7, prompt(40), max_tokens=400)
    host.hear(p.TextDelta, 7)
    host.generate(8, [1, 2, 99_999, 4], lane=1)
    assert host.hear(p.Failed, 8).reason == "token-range"
    assert host.hear(p.Generated, 7).completion_tokens == 400
    host.prefill(1, [1, 2, 99_999, 4])
    failed = host.hear(p.Failed, 1)
    assert failed.reason == "token-range"
    host.release(1)
    host.prefill(2, prompt(40), ring=1)
    host.hear(p.Prefilled, 2)


def test_a_failure_wipes_the_lane_before_anybody_hears_of_it(daemon: Open) -> None:
    """X6: not only when the daemon gets around to Release."""
    host = daemon()
    lane = host.pools[1].lane(0)  # pools are opened in the order of their roles' names: decode, prefill

    def refuse(*args: object) -> None:
        raise EngineError("export", "no page today")

    lane.export_page = refuse  # type: ignore[method-assign,assignment]
    host.prefill(1, prompt(100))
    host.hear(p.Failed, 1)
    assert lane.positions().target == -1
    host.export[0].recycle()


def test_a_page_too_large_for_the_ring_fails_its_job_and_not_the_worker(daemon: Open) -> None:
    """Q2: a small --ring-mib must not cost the other lane its request."""
    host = daemon(rings=1, ring_bytes=4096)
    host.generate(2, prompt(40), max_tokens=300)
    host.prefill(1, prompt(40))
    assert host.hear(p.Failed, 1).reason == "record-size"
    assert host.hear(p.Generated, 2).completion_tokens == 300


def test_a_long_text_holds_up_no_token_and_its_answer_no_engine_call(
    daemon: Open, runtime_of: Callable[[str], LlamaRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q1: texts are turned into tokens beside the engine."""
    runtime, begun, go, told = runtime_of("llama"), threading.Event(), threading.Event(), threading.Event()
    tokenize = runtime.tokenize

    def slow(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        begun.set()
        assert go.wait(TIMEOUT_S)
        return tokenize(text, add_special=add_special, parse_special=parse_special)

    monkeypatch.setattr(runtime, "tokenize", slow)
    host = daemon()
    host.send(p.Tokenize(1, "abc", add_special=True, parse_special=False))
    assert begun.wait(TIMEOUT_S)
    host.generate(2, prompt(40))
    host.hear(p.Generated, 2)
    assert not host.order(p.Tokenized)

    def during_a_call() -> None:
        go.set()
        assert told.wait(TIMEOUT_S), "the answer waits for the engine"

    recorded(host, 1, during_a_call)
    host.generate(3, prompt(40), lane=1)
    assert host.hear(p.Tokenized, 1).tokens == tokenize("abc", add_special=True, parse_special=False)
    told.set()
    host.hear(p.Generated, 3)


def test_a_worker_gives_a_sign_of_life_between_engine_calls(daemon: Open) -> None:
    """G8: also while it works."""
    host = daemon()
    host.generate(1, prompt(40))
    host.send(p.Ping())
    host.hear(p.Pong, None)
    host.hear(p.Generated, 1)


def test_shutdown_ends_the_loop(daemon: Open) -> None:
    host = daemon()
    host.send(p.Shutdown())
    host._thread.join(TIMEOUT_S)
    assert host.ended == ["shutdown"]


def test_a_daemon_that_is_gone_ends_a_worker_that_waits(daemon: Open) -> None:
    host = daemon()
    host.generate(1, prompt(40), ring=0)
    host.sock.shutdown(socket.SHUT_RDWR)
    host._thread.join(TIMEOUT_S)
    assert host.ended == ["daemon gone"]


def test_a_role_that_was_not_asked_for_opens_no_pool(daemon: Open) -> None:
    host = daemon(roles=frozenset({"decode"}))
    assert len(host.pools) == 1
    host.generate(1, prompt(40))
    host.hear(p.Generated, 1)
