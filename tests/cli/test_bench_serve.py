"""The load's client against a served front door: what it saw is what happened."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.daemon.front_door import STARTED, ScriptedService, failure, on_uvloop, open_door
from zerocopy.cli import main
from zerocopy.cli.bench_serve import Seen, Slo, Target, closed_loop, draw, open_loop, report
from zerocopy.cli.workload import Arrival
from zerocopy.daemon.requests import Delta, Finished

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
FINISHED = Finished(reason="length", prompt_tokens=5, completion_tokens=3, timings={})


def pause(seconds: float) -> object:
    return lambda: asyncio.sleep(seconds)


def quiet(what: str) -> None:
    pass


@on_uvloop
async def test_first_token_gaps_and_counts_are_what_the_server_did() -> None:
    script = [pause(0.05), STARTED, Delta("a", 1), pause(0.5), Delta("b", 1), Delta("", 1), FINISHED]
    async with open_door(ScriptedService(script)) as door:  # type: ignore[arg-type]
        seen = await open_loop(Target(f"http://{door.address}"), [Arrival(0.0, 5, 3)] * 2, quiet)
        assert [len(request.prompt) for request in door.service.requests] == [5, 5]
    for one in seen:
        assert one.failure is None and one.output_tokens == 3 and len(one.pieces) == 2
        assert 0.04 < one.ttft_s < 10 and one.tpot_s == (one.pieces[1] - one.pieces[0]) / 2
    result = report(seen, SLO)
    assert (result.requests, result.completed, result.failed) == (2, 2, {})
    assert result.gap_s is not None and 0.25 < result.gap_s.p50 < 10  # the first piece may be read late


@on_uvloop
async def test_requests_start_when_the_load_says_whether_or_not_others_have_ended() -> None:
    """Open loop: a server that is slow does not slow the load."""
    script = [STARTED, pause(1.5), Delta("a", 1), FINISHED]
    async with open_door(ScriptedService(script)) as door:  # type: ignore[arg-type]
        load = [Arrival(0.05 * n, 5, 3) for n in range(6)]
        seen = await open_loop(Target(f"http://{door.address}"), load, quiet)
    assert max(one.sent for one in seen) < min(one.ended for one in seen)


@on_uvloop
async def test_a_closed_loop_has_so_many_at_once() -> None:
    async with open_door(ScriptedService([STARTED, pause(0.05), Delta("a", 1), FINISHED])) as door:  # type: ignore[arg-type]
        seen = await closed_loop(Target(f"http://{door.address}"), [Arrival(0.0, 5, 3)] * 6, 2)
    assert len(seen) == 6
    assert max(sum(b.sent <= a.sent < b.ended for b in seen) for a in seen) == 2


@on_uvloop
async def test_failures_are_counted_by_their_reason() -> None:
    broken = ScriptedService([STARTED, Delta("a", 1), failure("link-lost")])
    async with open_door(ScriptedService([failure("queue-full")])) as refuses, open_door(broken) as breaks:
        seen = [
            *await open_loop(Target(f"http://{refuses.address}"), [Arrival(0.0, 5, 3)] * 2, quiet),
            *await open_loop(Target(f"http://{breaks.address}"), [Arrival(0.0, 5, 3)], quiet),
            *await open_loop(Target("http://127.0.0.1:9"), [Arrival(0.0, 5, 3)], quiet),
        ]
    result = report(seen, SLO)
    assert result.failed == {"connection": 1, "link-lost": 1, "queue-full": 2}
    assert (result.completed, result.goodput_rps, result.ttft_s) == (0, 0.0, None)


@on_uvloop
async def test_a_server_that_is_too_slow_for_the_client_is_a_timeout() -> None:
    async with open_door(ScriptedService([STARTED, pause(5)])) as door:  # type: ignore[arg-type]
        seen = await open_loop(Target(f"http://{door.address}", timeout_s=0.2), [Arrival(0.0, 5, 3)], quiet)
    assert seen[0].failure == "timeout"


@contextlib.asynccontextmanager
async def foreign_server(body: bytes) -> AsyncIterator[Target]:
    """Answers every request with status 200 and this event stream, whatever that is."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield Target("http://{}:{}".format(*server.sockets[0].getsockname()))


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "event",
    [b"no json", b"[]", b'{"choices": 1}', b'{"choices": [{"text": 1}]}', b'{"usage": {"completion_tokens": -1}}',
     b'{"usage": {}}', b'{"choices": [{"text": "' + b"a" * (1 << 20) + b'"}]}', b'{"choices": [{"text": "\xff"}]}'],
)  # fmt: skip
@on_uvloop
async def test_an_answer_of_another_shape_is_a_failure_of_that_request_alone(event: bytes) -> None:
    """It ended the whole run."""
    async with foreign_server(b"data: " + event + b"\n\n" + DONE) as target:
        seen = await open_loop(target, [Arrival(0.0, 5, 3)] * 2, quiet)
    assert [one.failure for one in seen] == ["malformed", "malformed"]


@on_uvloop
async def test_an_answer_of_nothing_is_not_an_answer() -> None:
    """It was completed, and the fastest of all: goodput was highest where nothing was generated."""
    async with foreign_server(b'data: {"choices": [{"text": ""}]}\n\n' + DONE) as target:
        result = report(await open_loop(target, [Arrival(0.0, 5, 3)], quiet), SLO)
    assert (result.failed, result.completed, result.goodput_rps) == ({"empty": 1}, 0, 0.0)


@on_uvloop
async def test_tokens_that_a_server_does_not_count_are_those_that_came() -> None:
    """Without a usage the time per token was that of the whole answer, and no token was generated."""
    body = b"".join(b'data: {"choices": [{"text": "%c"}]}\n\n' % letter for letter in b"abc")
    async with foreign_server(b'data: {"id": 1}\n\n' + body + DONE) as target:
        (one,) = await open_loop(target, [Arrival(0.0, 5, 3)], quiet)
    assert one.failure is None and one.output_tokens == 3
    assert one.tpot_s == (one.pieces[-1] - one.pieces[0]) / 2


def seen_at(sent: float, ttft: float, tpot: float) -> Seen:
    pieces = [sent + ttft + n * tpot for n in range(11)]
    return Seen(sent, prompt_tokens=100, output_tokens=11, pieces=pieces, ended=pieces[-1])


def test_goodput_counts_only_what_kept_both_promises() -> None:
    seen = [seen_at(0.0, 0.5, 0.05), seen_at(1.0, 1.5, 0.05), seen_at(2.0, 0.5, 0.2), seen_at(8.0, 1.0, 0.1)]
    result = report(seen, SLO)
    assert result.seconds == pytest.approx(10.0)
    assert result.goodput_rps == pytest.approx(0.2)
    assert result.output_tokens_per_s == pytest.approx(4.4)
    assert result.prompt_tokens_per_s == pytest.approx(40.0)


def test_the_picture_shows_the_run_and_its_failures() -> None:
    text = draw([seen_at(n, 0.5, 0.05) for n in range(20)] + [Seen(3.0, ended=4.0, failure="timeout")], SLO)
    assert text.startswith("<svg") and "SLO" in text and "requests that failed" in text


def test_nothing_seen_is_a_report_too() -> None:
    assert report([], SLO).requests == 0
    assert draw([], SLO).startswith("<svg")


def command(url: str, *more: str) -> int:
    return main.run(["bench", "serve", "--url", url, "--rate", "50", "--requests", "2", *more])


@on_uvloop
async def test_the_url_may_be_what_openais_clients_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    async with open_door(ScriptedService([STARTED, Delta("a", 1), FINISHED])) as door:
        assert await asyncio.to_thread(command, f"http://{door.address}/v1/") == 0
    assert "2 completed" in capsys.readouterr().out


@on_uvloop
async def test_a_run_in_which_nothing_was_answered_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """It was code 0, also where no server was."""
    async with open_door(ScriptedService([failure("queue-full")])) as door:
        assert await asyncio.to_thread(command, f"http://{door.address}", "--json") == 1
        captured = capsys.readouterr()
        assert '"queue-full": 2' in captured.out and captured.err.count("\n") == 1
    assert await asyncio.to_thread(command, f"http://{door.address}") == 3
    assert "is a server there?" in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("http://127.0.0.1:9", "--trace", "/absent.csv") == 2
    assert "/absent.csv is no file: give a trace" in capsys.readouterr().err
