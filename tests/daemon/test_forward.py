"""A front door without a decoder behind it, over a real link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.daemon.wires import Refuses, joined, run, until
from transport.link import MAX_QUEUED_MESSAGES, Link, LinkError, PageSink
from zerocopy.daemon import forward as module
from zerocopy.daemon.forward import Forwarding
from zerocopy.daemon.requests import Delta, Event, Finished, GenerationRequest, RequestError, Started
from zerocopy.handoff.messages import MAX_PAYLOAD, CancelGenerate, Generate, GenerateEnd, GenerateEvent, decode, encode
from zerocopy.worker.sampling import Sampling

pytestmark = pytest.mark.usefixtures("transport")

STARTED = Started(placement="disaggregated", prefiller="p", fallback_reason=None, prompt_tokens=5)
FINISHED = Finished(reason="stop", prompt_tokens=5, completion_tokens=2, timings={"prompt_n": 5}, proof={"tokens": "x"})
ANSWER = (STARTED, Delta("Grüße ", 1), Delta("🙂", 1), FINISHED)
REQUEST = GenerationRequest(
    prompt="hello", max_tokens=8, sampling=Sampling(temperature=0.5, seed=7), stop=("x",), proof_key="ab" * 16
)

Step = Event | Exception | Callable[[], Awaitable[Any]]


class Door:
    """One host's `Forwarding` and the service behind it."""

    def __init__(self, *script: Step) -> None:
        self.script = script
        self.requests: list[GenerationRequest] = []
        self.closed = 0
        self.links: list[Link] = []
        self.heard: list[object] = []
        self.forwarding = Forwarding(self.generate)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if callable(step):
                    await step()
                else:
                    yield step
        finally:
            self.closed += 1

    def link_opened(self, link: Link) -> PageSink:
        self.links.append(link)
        return Refuses()

    def link_message(self, link: Link, message: bytes) -> None:
        decoded = decode(message)
        self.heard.append(decoded)
        assert isinstance(decoded, Generate | GenerateEvent | GenerateEnd | CancelGenerate)
        self.forwarding.message(link, decoded)

    def link_closed(self, link: Link, reason: str) -> None:
        self.forwarding.link_lost(link)


@contextlib.asynccontextmanager
async def doors(folder: Path, *script: Step) -> AsyncIterator[tuple[Door, Door, Link]]:
    """(the host that was asked, the decode host, the link between them)"""
    asked, decoder = Door(), Door(*script)
    async with joined(folder, asked, decoder) as link:
        yield asked, decoder, link
        await asked.forwarding.stop()
        await decoder.forwarding.stop()
        assert not decoder.forwarding._serving
        assert not asked.forwarding._asked


async def gather(events: AsyncGenerator[Event, None]) -> list[Event]:
    async with contextlib.aclosing(events) as all_events:
        return [event async for event in all_events]


async def forever() -> None:
    await asyncio.Event().wait()


async def refused(events: AsyncGenerator[Event, None]) -> RequestError:
    with pytest.raises(RequestError) as error:
        await gather(events)
    return error.value


def test_the_request_arrives_and_the_events_come_back_as_they_were(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, *ANSWER) as (asked, decoder, link):
            assert await gather(asked.forwarding.forward(link, REQUEST)) == list(ANSWER)
            assert decoder.requests == [REQUEST]

    run(scenario())


def test_many_requests_share_one_link(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, STARTED, lambda: asyncio.sleep(0.01), FINISHED) as (asked, decoder, link):
            answers = await asyncio.gather(*(gather(asked.forwarding.forward(link, REQUEST)) for _ in range(20)))
            assert answers == [[STARTED, FINISHED]] * 20
            assert decoder.closed == 20

    run(scenario())


def test_a_whole_answer_may_have_more_tokens_than_a_link_lets_messages_wait(tmp_path: Path) -> None:
    """It comes all at once, when its last token is there."""
    whole = msgspec.structs.replace(REQUEST, whole=True)
    answer = [STARTED, *[Delta("a", 1)] * (MAX_QUEUED_MESSAGES + 1000), FINISHED]

    async def scenario() -> None:
        async with doors(tmp_path, *answer) as (asked, _decoder, link):
            assert await gather(asked.forwarding.forward(link, whole)) == answer

    run(scenario())


@pytest.mark.parametrize("before", [(), (STARTED, Delta("a", 1))])
def test_an_error_keeps_its_status_reason_and_time_to_retry(tmp_path: Path, before: tuple[Event, ...]) -> None:
    async def scenario() -> None:
        error = RequestError("queue-deadline", "no turn within 30 s", 503, 1.5)
        async with doors(tmp_path, *before, error) as (asked, _decoder, link):
            heard: list[Event] = []
            with pytest.raises(RequestError) as raised:
                async for event in asked.forwarding.forward(link, REQUEST):
                    heard.append(event)
            assert heard == list(before)
            assert (raised.value.reason, raised.value.status, raised.value.retry_after_s) == (
                "queue-deadline", 503, 1.5,
            )  # fmt: skip
            assert str(raised.value) == "b: no turn within 30 s"

    run(scenario())


def test_a_bug_at_the_other_end_is_an_answer_and_tells_nothing_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, STARTED, ValueError("the prompt was: hello")) as (asked, _decoder, link):
            error = await refused(asked.forwarding.forward(link, REQUEST))
            assert (error.reason, error.status) == ("internal", 500)
            assert "hello" not in str(error)

    run(scenario())


# -- cancelling


def test_closing_the_iterator_cancels_the_request_at_the_other_end(tmp_path: Path) -> None:
    """H7."""

    async def scenario() -> None:
        async with doors(tmp_path, STARTED, forever) as (asked, decoder, link):
            events = asked.forwarding.forward(link, REQUEST)
            assert await anext(events) == STARTED
            await events.aclose()
            await until(lambda: decoder.closed == 1)

    run(scenario())


def test_cancelling_a_request_that_has_no_answer_yet_cancels_it_at_the_other_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, forever) as (asked, decoder, link):
            task = asyncio.create_task(gather(asked.forwarding.forward(link, REQUEST)))
            await until(lambda: decoder.requests)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: decoder.closed == 1)

    run(scenario())


def test_a_request_that_has_ended_is_not_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, *ANSWER) as (asked, decoder, link):
            await gather(asked.forwarding.forward(link, REQUEST))
            await gather(asked.forwarding.forward(link, REQUEST))
            assert [type(m) for m in decoder.heard] == [Generate, Generate]

    run(scenario())


def test_a_cancel_for_an_unknown_request_is_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, *ANSWER) as (asked, _decoder, link):
            link.send(encode(CancelGenerate(request_id=b"x" * 16)))
            assert await gather(asked.forwarding.forward(link, REQUEST)) == list(ANSWER)

    run(scenario())


# -- losing the link


def test_a_lost_link_ends_the_request_on_both_sides(tmp_path: Path) -> None:
    """G8."""

    async def scenario() -> None:
        async with doors(tmp_path, STARTED, forever) as (asked, decoder, link):
            events = asked.forwarding.forward(link, REQUEST)
            assert await anext(events) == STARTED
            decoder.links[0].close("test")
            with pytest.raises(RequestError) as lost:
                await anext(events)
            assert (lost.value.reason, lost.value.status) == ("link-lost", 503)
            await until(lambda: decoder.closed == 1)

    run(scenario())


def test_a_link_that_is_gone_already_is_an_answer_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path) as (asked, _decoder, link):
            link.close("test")
            error = await refused(asked.forwarding.forward(link, REQUEST))
            assert (error.reason, error.status) == ("link-lost", 503)

    run(scenario())


def test_an_answer_that_the_link_has_no_room_for_ends_the_request(tmp_path: Path) -> None:
    """The other end stood still for a while: it must not wait for the rest of an answer that nobody sends."""

    async def scenario() -> None:
        async def fill() -> None:
            (link,) = serving.links
            for size in (MAX_PAYLOAD, 1 << 16, 1 << 10, 0):  # without a pause in which any could leave
                with contextlib.suppress(LinkError):
                    while True:
                        link.send(encode(GenerateEvent(request_id=b"?" * 16, payload=bytes(size))))

        async with doors(tmp_path, STARTED, fill, *ANSWER[1:]) as (asking, serving, link):
            failure = await asyncio.wait_for(refused(asking.forwarding.forward(link, REQUEST)), 30)
            assert failure.reason == "link-lost"
            await until(lambda: serving.closed == 1)

    run(scenario())


def test_events_of_another_link_are_not_taken(tmp_path: Path) -> None:
    """X7: an id overheard elsewhere is worth nothing."""

    async def scenario() -> None:
        async with doors(tmp_path, STARTED, forever) as (asked, _decoder, link):
            events = asked.forwarding.forward(link, REQUEST)
            await anext(events)
            (request_id,) = asked.forwarding._asked
            async with joined(tmp_path / "other", Door(), Door()) as other:
                end = GenerateEnd(request_id=request_id, reason="stolen", message="")
                asked.forwarding.message(other, end)
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    run(scenario())


# -- bounds


def test_more_requests_than_the_bound_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FORWARDED", 2)

    async def scenario() -> None:
        async with doors(tmp_path, STARTED, forever) as (asked, _decoder, link):
            running = [asked.forwarding.forward(link, REQUEST) for _ in range(2)]
            for events in running:
                await anext(events)
            assert (await refused(asked.forwarding.forward(link, REQUEST))).reason == "queue-full"
            for events in running:
                await events.aclose()

    run(scenario())


def test_an_answer_that_its_client_does_not_take_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had come is still given, and the other end is told to stop."""
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 1 << 20)
    piece = Delta("x" * 10_000, 1)

    async def scenario() -> None:
        async with doors(tmp_path, STARTED, *[piece] * 200, forever) as (asked, decoder, link):
            events = asked.forwarding.forward(link, REQUEST)
            assert await anext(events) == STARTED
            await until(lambda: decoder.closed == 1)
            taken = 0
            with pytest.raises(RequestError, match="b: 1 MiB of the answer wait for its client: read faster") as ended:
                async for event in events:
                    assert event == piece
                    taken += 1
            assert ended.value.reason == "overrun"
            assert 90 < taken <= 105

    run(scenario())


def test_an_answer_of_any_length_is_given_to_a_client_that_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 1 << 20)

    async def scenario() -> None:
        pieces = [step for _ in range(40) for step in (Delta("x" * 100_000, 1), lambda: asyncio.sleep(0.001))]
        async with doors(tmp_path, STARTED, *pieces, FINISHED) as (asked, _decoder, link):
            assert len(await gather(asked.forwarding.forward(link, REQUEST))) == 42

    run(scenario())


def test_a_request_id_in_use_closes_the_link(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, forever) as (_asked, decoder, link):
            generate = Generate(request_id=b"r" * 16, payload=msgspec.msgpack.encode(REQUEST))
            link.send(encode(generate))
            await until(lambda: decoder.requests)
            with pytest.raises(Exception, match="request id that is in use"):
                decoder.forwarding.message(decoder.links[0], generate)

    run(scenario())


def test_a_request_too_large_to_forward_is_refused_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path) as (asked, decoder, link):
            huge = msgspec.structs.replace(REQUEST, prompt="x" * (5 << 20))
            error = await refused(asked.forwarding.forward(link, huge))
            assert (error.reason, error.status) == ("too-large", 413)
            assert "4 MiB" in str(error)
            assert not decoder.requests

    run(scenario())


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": -1},
        {"max_tokens": 1 << 40},
        {"prompt": [-1]},
        {"prompt": [1 << 40]},
        {"prompt": None},
        {"stop": [""]},
        {"stop": ["x" * 257]},
        {"stop": ["x"] * 17},
        {"proof_key": "not hex"},
        {"proof_key": "ab" * 65},
        {"sampling": {"seed": -1}},
        {"sampling": {"temperature": float("nan")}},
        {"sampling": {"top_p": 2.0}},
        {"sampling": {"top_k": -3}},
        {"placement": "elsewhere"},
    ],
)
def test_a_request_out_of_bounds_is_refused_before_anything_is_done(tmp_path: Path, change: dict[str, object]) -> None:
    """A worker would die of some of these: every field of a peer is checked before it is used."""

    async def scenario() -> None:
        async with doors(tmp_path, *ANSWER) as (asked, decoder, link):
            body = msgspec.to_builtins(REQUEST) | change
            inbox = asked.forwarding._asked[b"r" * 16] = module._Inbox(link)
            link.send(encode(Generate(request_id=b"r" * 16, payload=msgspec.msgpack.encode(body))))
            end = await asyncio.wait_for(inbox.get(), 30)
            assert isinstance(end, GenerateEnd)
            assert end.reason == "message"
            assert not decoder.requests
            del asked.forwarding._asked[b"r" * 16]

    run(scenario())


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        (b"", 503),
        (b"\xc1", 502),
        (msgspec.msgpack.encode({"status": 200, "retry_after_s": None}), 502),
        (msgspec.msgpack.encode({"status": 429, "retry_after_s": -1.0}), 502),
        (msgspec.msgpack.encode({"status": 429, "retry_after_s": 2.0}), 429),
    ],
)
def test_what_the_peer_says_of_its_failure_is_checked(tmp_path: Path, payload: bytes, status: int) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, forever) as (asked, decoder, link):
            task = asyncio.create_task(refused(asked.forwarding.forward(link, REQUEST)))
            await until(lambda: decoder.requests)
            ((_, request_id),) = decoder.forwarding._serving
            end = GenerateEnd(request_id=request_id, payload=payload, reason="some-reason", message="why")
            decoder.links[0].send(encode(end))
            assert (await task).status == status

    run(scenario())


def test_an_event_that_cannot_be_read_ends_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, forever) as (asked, decoder, link):
            task = asyncio.create_task(refused(asked.forwarding.forward(link, REQUEST)))
            await until(lambda: decoder.requests)
            ((_, request_id),) = decoder.forwarding._serving
            decoder.links[0].send(encode(GenerateEvent(request_id=request_id, payload=b"\xc1")))
            assert (await task).reason == "message"
            await until(lambda: decoder.closed == 1)

    run(scenario())


def test_stopping_ends_what_is_served_and_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with doors(tmp_path, STARTED, forever) as (asked, decoder, link):
            events = asked.forwarding.forward(link, REQUEST)
            await anext(events)
            await decoder.forwarding.stop()
            assert decoder.closed == 1
            with pytest.raises(RequestError) as ended:
                await anext(events)
            assert (ended.value.reason, ended.value.status) == ("cancelled", 503)

    run(scenario())
