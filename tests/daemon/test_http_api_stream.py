"""Server-Sent Events and clients that leave, over real sockets, on uvloop and on asyncio's own loop (H7, U4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web

from tests.daemon.front_door import (
    CHAT,
    COMPLETION,
    FINISHED,
    HELLO,
    STARTED,
    USAGE,
    Door,
    ScriptedService,
    failure,
    open_door,
    run,
)
from zerocopy.config import DaemonConfig
from zerocopy.daemon import http_api
from zerocopy.daemon.requests import Delta, Event, Finished
from zerocopy.worker.sampling import TokenLogprob

STREAM = COMPLETION | {"stream": True}


async def never() -> None:
    await asyncio.Event().wait()


def test_a_completion_stream_has_text_chunks_a_reason_and_an_end_mark() -> None:
    async def check() -> None:
        async with open_door() as door:
            reply = await door.post(STREAM)
        assert reply.status == 200 and reply.headers["Content-Type"].startswith("text/event-stream")
        *chunks, done = reply.events
        assert done == "[DONE]"
        assert [c["choices"][0]["text"] for c in chunks] == ["Hel", "lo", ""]
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "stop"]
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        assert chunks[-1]["timings"] == {"prompt_n": 5}
        assert not any("usage" in c for c in chunks)

    run(check())


def test_a_chat_stream_begins_with_the_role_and_then_only_adds_content() -> None:
    async def check() -> None:
        async with open_door() as door:
            reply = await door.chat(CHAT | {"stream": True})
        *chunks, done = reply.events
        assert done == "[DONE]" and all(c["object"] == "chat.completion.chunk" for c in chunks)
        deltas = [c["choices"][0]["delta"] for c in chunks]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]

    run(check())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_comes_once_in_a_last_chunk_without_choices_when_asked_for(path: str) -> None:
    async def check() -> None:
        body = (COMPLETION if path.endswith("v1/completions") else CHAT) | {"stream": True}
        async with open_door() as door:
            reply = await door.post(body | {"stream_options": {"include_usage": True}}, path)
        *chunks, last, done = reply.events
        assert done == "[DONE]" and last["choices"] == []
        assert last["usage"] == USAGE
        assert all(c["usage"] is None for c in chunks)

    run(check())


def test_a_tokens_offset_is_where_it_begins_also_while_text_is_held_back() -> None:
    """A stop string may begin with it, so its text comes later: the offset is the one of an answer without stream."""
    tokens = [TokenLogprob(text, -0.5) for text in (b"ab", "n\u00e9".encode(), b"cd")]
    script = [STARTED, Delta("", 1, tokens[0]), Delta("abn\u00e9", 1, tokens[1]), Delta("cd", 1, tokens[2]), FINISHED]

    async def check() -> None:
        async with open_door(ScriptedService(script)) as door:
            streamed, whole = await door.post(STREAM | {"logprobs": 0}), await door.post(COMPLETION | {"logprobs": 0})
        told = [c["choices"][0]["logprobs"] for c in streamed.events[:-1]]
        offsets = [offset for logprobs in told if logprobs for offset in logprobs["text_offset"]]
        assert offsets == whole.json["choices"][0]["logprobs"]["text_offset"] == [0, 2, 4]

    run(check())


def test_text_with_newlines_quotes_and_every_kind_of_character_survives_framing() -> None:
    texts = ["a\n\nb\r\n", 'data: "x"\n\n', "😀", "漢字", "\u2028\u0085\u0000", "", "end"]

    async def check() -> None:
        async with open_door(ScriptedService([STARTED, *(Delta(t, 1) for t in texts), FINISHED])) as door:
            reply = await door.post(STREAM)
        assert "".join(c["choices"][0]["text"] for c in reply.events[:-1]) == "".join(texts)
        assert len(reply.events) == len(texts) + 1  # an empty delta makes no chunk; the closing one and the mark do

    run(check())


def test_each_token_leaves_at_once() -> None:
    async def check() -> None:
        gate = asyncio.Event()

        async def wait() -> None:
            await gate.wait()

        async with open_door(ScriptedService([STARTED, Delta("first", 1), wait, *HELLO[2:]])) as door:
            reader, writer = await door.send_raw(STREAM)
            await reader.readuntil(b"first")  # arrives although the generation has not gone on
            gate.set()
            await reader.readuntil(b"[DONE]")
            writer.close()

    run(check())


def test_no_header_is_sent_before_the_first_event() -> None:
    """They carry the placement, which is not known earlier; a refusal still gets its own status."""

    async def check() -> None:
        gate = asyncio.Event()

        async def wait() -> None:
            await gate.wait()

        async with open_door(ScriptedService([wait, *HELLO])) as door:
            reader, writer = await door.send_raw(STREAM)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.1)
            gate.set()
            assert b"x-zc-placement: local" in await reader.readuntil(b"\r\n\r\n")
            writer.close()

    run(check())


@pytest.mark.parametrize("script", [[STARTED, Delta("Hel", 1), failure()], [STARTED, failure()]])
def test_a_failure_after_the_stream_began_is_an_error_event_and_the_end(script: list[Event]) -> None:
    async def check() -> None:
        async with open_door(ScriptedService(script)) as door:
            reply = await door.post(STREAM)
        assert reply.status == 200
        last = reply.events[-1]
        assert last["error"]["code"] == "prefiller-lost" and last["error"]["type"] == "server_error"
        assert b"[DONE]" not in reply.body
        assert not any(c["choices"][0]["finish_reason"] for c in reply.events[:-1])

    run(check())


def test_a_stream_that_just_ends_is_an_error() -> None:
    async def check() -> None:
        async with open_door(ScriptedService([STARTED, Delta("Hel", 1)])) as door:
            reply = await door.post(STREAM)
        assert reply.events[-1]["error"]["code"] == "internal" and b"[DONE]" not in reply.body

    run(check())


def test_the_proof_comes_with_the_last_chunk() -> None:
    proven = Finished(reason="stop", prompt_tokens=1, completion_tokens=1, timings={}, proof={"logits": "00"})

    async def check() -> None:
        async with open_door(ScriptedService([STARTED, proven]), allow_proofs=True) as door:
            reply = await door.post(STREAM, x_zc_proof="ab" * 32)
        assert reply.events[-2]["zc_proof"] == {"logits": "00"}

    run(check())


# -- clients that leave

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [uvloop.new_event_loop, asyncio.new_event_loop]


@pytest.fixture(params=LOOPS, ids=["uvloop", "asyncio"])
def run_on(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def start(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(test, 100))

    return start


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [(), (STARTED,), (STARTED, Delta("Hel", 1))], ids=["queued", "started", "writing"])
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_a_client_that_leaves_cancels_its_request(
    run_on: Callable[[Coroutine[Any, Any, None]], None], stream: bool, before: tuple[Event, ...], reset: bool
) -> None:
    async def check() -> None:
        async with open_door(ScriptedService([*before, never])) as door:
            reader, writer = await door.send_raw(COMPLETION | {"stream": stream})
            if stream and before:
                await reader.readuntil(b"\r\n\r\n")
            else:
                while not door.service.requests:
                    await asyncio.sleep(0.005)
            writer.transport.abort() if reset else writer.close()
            await asyncio.wait_for(door.service.closed.wait(), 30)
            door.service.script = HELLO
            assert (await door.post(COMPLETION)).status == 200

    run_on(check())


FLOOD = [Delta("x" * 65536, 1)] * 2000  # 128 MiB: far beyond what sockets buffer


def test_a_client_that_stops_reading_is_cut_off(
    run_on: Callable[[Coroutine[Any, Any, None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds neither its request nor its connection for ever."""
    monkeypatch.setattr(http_api, "STALLED_S", 0.2)

    async def check() -> None:
        async with open_door(ScriptedService([STARTED, *FLOOD, never])) as door:
            reader, _ = await door.send_raw(STREAM)
            await asyncio.wait_for(door.service.closed.wait(), 30)
            with pytest.raises(ConnectionError):
                while await asyncio.wait_for(reader.read(1 << 20), 30):
                    pass
                raise ConnectionAbortedError  # an end is as good

    run_on(check())


def test_a_client_that_reads_slowly_or_has_nothing_to_read_is_not_cut_off(
    run_on: Callable[[Coroutine[Any, Any, None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_api, "STALLED_S", 0.4)

    async def nothing_comes() -> None:
        await asyncio.sleep(1)

    async def check() -> None:
        script = [STARTED, Delta("Hel", 1), nothing_comes, *FLOOD[:200], FINISHED]
        async with open_door(ScriptedService(script)) as door:
            reader, writer = await door.send_raw(STREAM)
            last = b""
            while not last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                data = await reader.read(1 << 20)
                assert data, "cut off"
                last = (last + data)[-64:]
                await asyncio.sleep(0.02)
            writer.close()

    run_on(check())


@pytest.mark.parametrize("when", ["its stream begins", "its stream fails"])
def test_a_client_that_is_gone_when_its_stream_begins_or_fails_is_no_bug(
    caplog: pytest.LogCaptureFixture, when: str
) -> None:
    async def check() -> None:
        transports = list[asyncio.Transport]()

        async def remember(request: web.Request, response: web.StreamResponse) -> None:
            assert request.transport is not None
            transports.append(request.transport)
            if when == "its stream begins":
                await leave()

        async def leave() -> None:
            transports[0].abort()  # in the tick in which the stream fails, before its task is cancelled

        service = ScriptedService([STARTED, Delta("Hel", 1), leave, failure()])
        app = http_api.make_app(service, DaemonConfig(model=Path("tiny.gguf")))
        app.on_response_prepare.append(remember)
        runner, address = await http_api.start(app, "127.0.0.1:0")
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                await Door(service, address, client).post(STREAM)
        await runner.cleanup()

    run(check())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_server_that_stops_ends_its_streams() -> None:
    async def check() -> None:
        service = ScriptedService([STARTED, never])
        async with open_door(service) as door:
            reader, writer = await door.send_raw(STREAM)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
        assert service.closed.is_set()

    run(check())
