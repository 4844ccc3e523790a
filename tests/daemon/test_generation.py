"""The request path on a host that decodes. Its worker is a double; peers are not connected unless a test says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.placement import Prefiller
from tests.daemon.wires import Peer, Refuses, joined, run, until
from tests.daemon.worker_double import PROMPT, WorkerDouble
from transport.link import Link, PageSink
from zerocopy.config import DaemonConfig
from zerocopy.daemon.generation import Generation, handoff_figures
from zerocopy.daemon.memory import SharedMemory
from zerocopy.daemon.requests import Delta, Event, Finished, GenerationRequest, RequestError, Started
from zerocopy.daemon.telemetry import Telemetry
from zerocopy.daemon.trace import Trace
from zerocopy.handoff.components import Identity
from zerocopy.handoff.messages import Abort, Prefill, decode
from zerocopy.worker import protocol as p
from zerocopy.worker.sampling import Sampling

REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=4)
MARKS = {"started": 1.0, "evaluated": 2.0, "first_token": 2.0, "generated": 5.0}


class Known:
    """What `Peers` says: at most one prefiller, over `link`."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.obstacle = "not connected yet"

    def prefillers(self, mine: Identity) -> list[Prefiller]:
        return [Prefiller("p", None if self.link else self.obstacle)]

    def link_to(self, name: str) -> Link | None:
        return self.link


class Host:
    def __init__(self, **settings: Any) -> None:
        config = DaemonConfig(name="d", role="decode", model=Path("m.gguf"), **settings)
        self.memory = SharedMemory(export=False, landing=True, rings=1, ring_bytes=1 << 16)
        self.worker = WorkerDouble(self.memory)
        self.telemetry = Telemetry()
        self.peers = Known()
        self.traces: list[Trace] = []
        self.generation = Generation(
            config, self.telemetry, self.worker, self.memory, self.peers, self.traces.append,  # type: ignore[arg-type]
        )  # fmt: skip

    def generate(self, request: GenerationRequest = REQUEST) -> AsyncGenerator[Event, None]:
        return self.generation.generate(request)

    def answer(self, task: p.Generate, *texts: str) -> None:
        """The worker generates `texts`, a token each."""
        for text in texts:
            self.worker.say(p.TextDelta(task.job, text, 1))
        done = p.Generated(task.job, "length", len(texts), 1, MARKS, None)
        self.worker.say(done)

    def nothing_held(self) -> bool:
        lanes = self.generation.lanes.use()
        return not (self.worker.jobs or self.memory.reserved_bytes() or lanes.held_sequences or lanes.waiting)

    def metric(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(name, labels) or 0.0

    # -- LinkOwner

    def link_opened(self, link: Link) -> PageSink:
        self.peers.link = link
        return Refuses()

    def link_message(self, link: Link, message: bytes) -> None:
        decoded: Any = decode(message)
        self.generation.incoming[decoded.handoff_id].message(decoded)

    def link_closed(self, link: Link, reason: str) -> None:
        self.peers.link = None
        self.generation.link_lost(link, reason)


@contextlib.asynccontextmanager
async def host(**settings: Any) -> AsyncIterator[Host]:
    one = Host(**settings)
    yield one
    assert one.nothing_held()
    one.worker.close()
    one.memory.close()


@contextlib.asynccontextmanager
async def connected(folder: Path, **settings: Any) -> AsyncIterator[tuple[Host, Peer]]:
    async with host(**settings) as one:
        prefiller = Peer()
        async with joined(folder, prefiller, one):
            await until(lambda: one.peers.link)
            yield one, prefiller


async def gather(events: AsyncGenerator[Event, None]) -> list[Event]:
    async with contextlib.aclosing(events) as some:
        return [event async for event in some]


def background(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(work)


async def refusal(task: asyncio.Task[Any]) -> RequestError:
    with pytest.raises(RequestError) as error:
        await asyncio.wait_for(task, 30)
    return error.value


# -- local


def test_a_local_request_is_one_job_and_its_events() -> None:
    async def scenario() -> None:
        async with host() as one:
            task = background(gather(one.generate()))
            job = await one.worker.got(p.Generate)
            assert (job.tokens, job.max_tokens, job.ring, job.probe) == (PROMPT, 4, None, False)
            one.answer(job, "Hel", "lo")
            started, *deltas, finished = await task
            assert started == Started("local", None, None, 70)
            assert deltas == [Delta("Hel", 1), Delta("lo", 1)]
            assert isinstance(finished, Finished)
            assert (finished.reason, finished.completion_tokens, finished.prompt_tokens) == ("length", 2, 70)
            assert finished.timings["prompt_ms"] == 1000.0
            assert finished.timings["predicted_ms"] == 3000.0
            assert finished.timings["prompt_tokens_evaluated_here"] == 70
            assert "handoff" not in finished.timings
            assert [m.job for m in one.worker.all(p.Release)] == [job.job]
            assert one.metric("zc_prompt_tokens_total", source="computed") == 70

    run(scenario())


def test_text_is_tokenized_by_the_worker() -> None:
    async def scenario() -> None:
        async with host() as one:
            task = background(gather(one.generate(GenerationRequest(prompt="hello", max_tokens=1, parse_special=True))))
            asked = await one.worker.got(p.Tokenize)
            assert (asked.text, asked.parse_special, asked.add_special) == ("hello", True, False)
            one.worker.say(p.Tokenized(asked.job, [3, 4]))
            job = await one.worker.got(p.Generate)
            assert job.tokens == [3, 4]
            one.answer(job, "x")
            await task

    run(scenario())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (GenerationRequest(prompt=[], max_tokens=1), "empty-prompt"),
        (GenerationRequest(prompt=[1, 128], max_tokens=1), "token-id"),
        (GenerationRequest(prompt=[1] * 500, max_tokens=13), "context-length"),
        (GenerationRequest(prompt=[1] * 512), "context-length"),
        (GenerationRequest(prompt=[1], max_tokens=1, sampling=Sampling(logit_bias=((128, 1.0),))), "token-id"),
    ],
)
def test_a_request_that_cannot_fit_is_the_clients_fault(request_: GenerationRequest, reason: str) -> None:
    async def scenario() -> None:
        async with host() as one:
            error = await refusal(background(gather(one.generate(request_))))
            assert (error.reason, error.status) == (reason, 400)
            assert not one.worker.sent

    run(scenario())


@pytest.mark.parametrize(("prompt_tokens", "answer_tokens"), [(1, 511), (500, 12), (511, 1)])
def test_a_request_without_a_limit_may_have_what_the_context_leaves(prompt_tokens: int, answer_tokens: int) -> None:
    """A client that named none was told to lower it."""

    async def scenario() -> None:
        async with host() as one:
            task = background(gather(one.generate(GenerationRequest(prompt=[1] * prompt_tokens))))
            job = await one.worker.got(p.Generate)
            assert job.max_tokens == answer_tokens
            one.answer(job, "x")
            await task

    run(scenario())


def test_text_that_cannot_fit_is_refused_before_the_engine_spends_time_on_it() -> None:
    """15 MB took the tokenizer 24 s, in which nobody else had a token; at 30 s the worker counts as hung."""

    async def scenario() -> None:
        async with host(queue=0) as one:
            facts = one.worker.facts
            assert facts is not None
            most = facts.n_ctx * facts.longest_token
            error = await refusal(background(gather(one.generate(GenerationRequest(prompt="é" * (most // 2 + 1))))))
            assert (error.reason, error.status) == ("context-length", 400)
            assert f"{most + 2} bytes is {facts.n_ctx + 1} tokens or more" in str(error)
            assert not one.worker.sent
            task = background(gather(one.generate(GenerationRequest(prompt="é" * (most // 2)))))
            asked = await one.worker.got(p.Tokenize)
            one.worker.say(p.Tokenized(asked.job, [3]))
            one.answer(await one.worker.got(p.Generate), "x")
            await task

    run(scenario())


@pytest.mark.parametrize("literal", [((0, 4),), ((2, 1),), ((0, 2), (1, 3)), ((2, 3), (0, 1))])
def test_literal_parts_that_are_none_of_the_prompt_are_refused(literal: tuple[tuple[int, int], ...]) -> None:
    """They come from a peer: many that overlap would have the tokenizer read the text as often."""

    async def scenario() -> None:
        async with host() as one:
            request = GenerationRequest(prompt="abc", max_tokens=1, parse_special=True, literal=literal)
            error = await refusal(background(gather(one.generate(request))))
            assert (error.reason, error.status) == ("bad-request", 400)
            assert not one.worker.sent

    run(scenario())


def test_text_that_reads_like_more_control_tokens_than_fit_is_the_clients_fault() -> None:
    """Each costs a call of the tokenizer."""

    async def scenario() -> None:
        async with host() as one:
            many = tuple((2 * n, 2 * n + 1) for n in range(512))
            request = GenerationRequest(prompt="<>" * 512, max_tokens=1, parse_special=True, literal=many)
            error = await refusal(background(gather(one.generate(request))))
            assert (error.reason, error.status) == ("context-length", 400)
            assert not one.worker.sent

    run(scenario())


def test_requests_take_turns_and_wait_no_longer_than_the_queue_allows() -> None:
    """G3, Q2."""

    async def scenario() -> None:
        async with host(queue_s=0.1) as one:
            first = background(gather(one.generate()))
            job = await one.worker.got(p.Generate)
            error = await refusal(background(gather(one.generate())))
            assert (error.reason, error.status, error.retry_after_s) == ("queue-deadline", 503, 1.0)
            one.answer(job, "x")
            await first
            second = background(gather(one.generate()))
            one.answer(await one.worker.got(p.Generate, 2), "y")
            await second

    run(scenario())


def test_who_is_refused_hears_it_before_the_engine_has_seen_the_prompt() -> None:
    """Q2, acceptance 3: tokenizing waits for an engine call, which may take longer than a refusal may."""

    async def scenario() -> None:
        async with host(queue=0) as one:
            task = background(gather(one.generate()))
            await one.worker.got(p.Generate)
            error = await refusal(background(gather(one.generate(GenerationRequest(prompt="some text", max_tokens=4)))))
            assert (error.reason, error.status) == ("queue-full", 503)
            assert not one.worker.all(p.Tokenize)
            one.answer(one.worker.all(p.Generate)[0], "a")
            await task
            assert one.nothing_held()

    run(scenario())


def test_a_client_that_goes_while_it_queues_leaves_the_queue() -> None:
    async def scenario() -> None:
        async with host() as one:
            first = background(gather(one.generate()))
            job = await one.worker.got(p.Generate)
            queued = background(gather(one.generate()))
            third = background(gather(one.generate()))
            await asyncio.sleep(0.02)
            queued.cancel()
            one.answer(job, "x")
            await first
            one.answer(await one.worker.got(p.Generate, 2), "y")
            await third
            with pytest.raises(asyncio.CancelledError):
                await queued
            assert len(one.worker.all(p.Generate)) == 2

    run(scenario())


@pytest.mark.parametrize("said", [0, 1, 2])
def test_closing_the_iterator_releases_the_job_before_it_returns(said: int) -> None:
    """H7."""

    async def scenario() -> None:
        async with host() as one:
            events = one.generate()
            first = background(anext(events))
            job = await one.worker.got(p.Generate)
            if said == 0:
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
            else:
                one.worker.say(p.TextDelta(job.job, "a", 1))
                assert isinstance(await first, Started)
            if said == 2:
                assert isinstance(await anext(events), Delta)
            await events.aclose()
            assert one.nothing_held()

    run(scenario())


def test_a_request_ends_at_its_deadline() -> None:
    async def scenario() -> None:
        async with host(request_s=0.1) as one:
            error = await refusal(background(gather(one.generate())))
            assert (error.reason, error.status) == ("request-deadline", 504)

    run(scenario())


def test_a_job_that_fails_is_an_error_with_the_engines_reason() -> None:
    async def scenario() -> None:
        async with host() as one:
            task = background(gather(one.generate()))
            job = await one.worker.got(p.Generate)
            one.worker.say(p.Failed(job.job, "decode", "the engine gave up"))
            error = await refusal(task)
            assert (error.reason, error.status, str(error)) == ("decode", 500, "the engine gave up")

    run(scenario())


def assert_to_retry(error: RequestError) -> None:
    assert (error.reason, error.status) == ("worker-lost", 503)
    assert error.retry_after_s is not None


def test_without_a_worker_a_request_is_told_to_come_back() -> None:
    async def scenario() -> None:
        async with host() as one:
            one.worker.lose()
            assert_to_retry(await refusal(background(gather(one.generate()))))

    run(scenario())


@pytest.mark.parametrize("when", ["tokenizing", "reading the prompt", "generating what is sent whole"])
def test_a_worker_that_dies_before_the_client_has_anything_costs_time_only(when: str) -> None:
    """G8: the request keeps its place and runs again on the next worker."""
    prompt = "text" if when == "tokenizing" else PROMPT
    request = msgspec.structs.replace(REQUEST, prompt=prompt, whole=when.startswith("generating"))

    async def scenario() -> None:
        async with host() as one:
            task = background(gather(one.generate(request)))
            first = await one.worker.got(p.Tokenize if when == "tokenizing" else p.Generate)
            if request.whole:
                one.worker.say(p.TextDelta(first.job, "lost", 1))
                await asyncio.sleep(0.01)
            one.worker.lose()
            await asyncio.sleep(0.01)
            assert not task.done()
            one.worker.revive()
            if when == "tokenizing":
                again = await one.worker.got(p.Tokenize, 2)
                one.worker.say(p.Tokenized(again.job, PROMPT))
            one.answer(await one.worker.got(p.Generate, 1 if when == "tokenizing" else 2), "good")
            events = await task
            assert [event.text for event in events if isinstance(event, Delta)] == ["good"]
            assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
            assert one.nothing_held()

    run(scenario())


def test_a_worker_that_dies_when_the_answer_has_begun_is_an_error_to_retry() -> None:
    """What was sent cannot be taken back, and a second answer might differ."""

    async def scenario() -> None:
        async with host() as one:
            events = one.generate()
            began = background(anext(events))
            one.worker.say(p.TextDelta((await one.worker.got(p.Generate)).job, "a", 1))
            await began
            one.worker.lose()
            one.worker.revive()
            assert_to_retry(await refusal(background(gather(events))))
            assert len(one.worker.all(p.Generate)) == 1 and one.nothing_held()

    run(scenario())


@pytest.mark.parametrize("dies", ["twice", "for good"])
def test_a_worker_that_does_not_come_back_or_dies_again_is_an_error_to_retry(dies: str) -> None:
    async def scenario() -> None:
        async with host(queue_s=0.5) as one:
            task = background(gather(one.generate()))
            await one.worker.got(p.Generate)
            one.worker.lose()
            if dies == "twice":
                one.worker.revive()
                await one.worker.got(p.Generate, 2)
                one.worker.lose()
            assert_to_retry(await refusal(task))
            assert one.nothing_held()

    run(scenario())


# -- disaggregated

MOVED = msgspec.structs.replace(REQUEST, placement="disaggregated")
DENIED = msgspec.structs.replace(MOVED, allow_fallback=False)


def test_without_a_prefiller_a_request_runs_here_and_says_why() -> None:
    async def scenario() -> None:
        async with host() as one:
            task = background(gather(one.generate(MOVED)))
            one.answer(await one.worker.got(p.Generate), "x")
            started = (await task)[0]
            why = "no-prefiller: no usable prefiller (p: not connected yet)"
            assert started == Started("local", None, why, 70)
            assert one.metric("zc_fallbacks_total", reason="no-prefiller") == 1

    run(scenario())


def test_without_a_prefiller_a_request_that_may_not_fall_back_is_refused() -> None:
    async def scenario() -> None:
        async with host() as one:
            error = await refusal(background(gather(one.generate(DENIED))))
            assert (error.reason, error.status) == ("no-prefiller", 503)
            short = msgspec.structs.replace(DENIED, prompt=[5])
            error = await refusal(background(gather(one.generate(short))))
            assert (error.reason, error.status) == ("prompt-too-short", 400)  # to ask again would not help
            assert one.metric("zc_fallbacks_total", reason="no-prefiller") == 0

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_handoff_that_fails_falls_back_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    """G8."""

    async def scenario() -> None:
        async with connected(tmp_path) as (one, prefiller):
            task = background(gather(one.generate(MOVED)))
            asked = await prefiller.hear(Prefill)
            prefiller.say(Abort(handoff_id=asked.handoff_id, epoch=0, reason="queue-full", message="256 prompts"))
            job = await one.worker.got(p.Generate)
            assert (job.ring, job.slab, job.probe) == (None, None, False)
            one.answer(job, "x")
            started, *_, finished = await task
            assert started == Started("local", None, "queue-full", 70)
            assert "handoff" not in finished.timings
            assert one.metric("zc_fallbacks_total", reason="queue-full") == 1
            (trace,) = one.traces
            assert (trace.outcome, trace.reason) == ("aborted", "queue-full")
            assert len(one.worker.all(p.Release)) == 2

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_handoff_that_fails_is_an_error_where_fallback_is_denied(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (one, prefiller):
            task = background(gather(one.generate(DENIED)))
            await prefiller.hear(Prefill)
            prefiller.link.close("test")
            error = await refusal(task)
            assert (error.reason, error.status) == ("link-lost", 503)
            assert "the handoff from p failed" in str(error)
            assert not one.generation.incoming

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_client_that_goes_during_a_handoff_ends_it_on_both_hosts(tmp_path: Path) -> None:
    """H7."""

    async def scenario() -> None:
        async with connected(tmp_path) as (one, prefiller):
            task = background(gather(one.generate(MOVED)))
            await prefiller.hear(Prefill)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await prefiller.hear(Abort)).reason == "cancelled"
            assert one.nothing_held()
            assert not one.generation.incoming
            assert [trace.reason for trace in one.traces] == ["cancelled"]

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_a_handoff_ends_with_the_request_it_is_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, request_s=0.5) as (one, prefiller):
            error = await refusal(background(gather(one.generate(MOVED))))
            assert (error.reason, error.status) == ("request-deadline", 504)
            assert (await prefiller.hear(Abort)).reason == "cancelled"

    run(scenario())


@pytest.mark.usefixtures("transport")
def test_two_handoffs_have_two_ids_and_growing_epochs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (one, prefiller):
            ids = set()
            for count in (1, 2):
                task = background(gather(one.generate(DENIED)))
                asked = await prefiller.hear(Prefill, count)
                ids.add(asked.handoff_id)
                abort = Abort(handoff_id=asked.handoff_id, epoch=0, reason="no", message="")
                prefiller.say(abort)
                await refusal(task)
            assert len(ids) == 2
            assert one.generation.next_epoch() == 3

    run(scenario())


# -- figures


def test_figures_of_a_handoff_are_there_as_far_as_the_peer_gave_them() -> None:
    """M1: a peer of another build may leave any of them out; that must not cost the answer."""
    trace = Trace("ab", "decoder", "p", "tcp", 70)
    bare = handoff_figures(trace)
    assert (bare["prefill_ms"], bare["export_ms"], bare["probe_ms"], bare["overlap_fraction"]) == (None,) * 4
    trace.source = {"started": 1.0, "prefilled": 3.5, "export_busy_s": 0.25, "probe_started": 4.0, "probe_ended": 4.5}
    full = handoff_figures(trace)
    assert (full["prefill_ms"], full["export_ms"], full["probe_ms"]) == (2500.0, 250.0, 500.0)
