"""`zc-handoff bench serve`: open-loop load on any OpenAI endpoint, and what its clients saw.

Requests start when the workload says so, whether or not earlier ones have been answered: a server that falls behind is
seen to fall behind. Owns one HTTP session and a task per request in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta

from zerocopy.cli.measuring import Quantiles, quantiles
from zerocopy.cli.plot import Panel, svg
from zerocopy.cli.workload import Arrival, prompt_of

_DIGITS: Final = 5  # of seconds
_MAX_ERROR_BYTES: Final = 1 << 16


class Target(msgspec.Struct, frozen=True):
    """Where requests go and with what. `words`: token ids of prompts are below it, and below the model's vocabulary."""

    url: str
    api_key: str | None = None
    headers: dict[str, str] = {}
    words: int = 100
    timeout_s: float = 120.0


class Slo(msgspec.Struct, frozen=True):
    ttft_s: float
    tpot_s: float


class Seen(msgspec.Struct):
    """What one client saw. Moments are monotonic; `pieces` is one for every chunk with text."""

    sent: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    pieces: list[float] = []
    ended: float = 0.0
    failure: str | None = None
    status: int = 0  # HTTP's; 0 where no answer came

    @property
    def refused(self) -> bool:
        """Told to come back later, before anything was generated."""
        return self.status in (429, 503)

    @property
    def ttft_s(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def tpot_s(self) -> float:
        """Between the first token and the last, per token; of a single token, nothing."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.output_tokens - 1)


class _Choice(msgspec.Struct):
    text: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Annotated[int, Meta(ge=0)]


class _Chunk(msgspec.Struct):
    """One event of a stream, as far as it counts here. A server may say more, or none of it."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_chunks: Final = msgspec.json.Decoder(_Chunk)


class ServeReport(msgspec.Struct, frozen=True):
    """Times are of completed requests; goodput counts those within the SLO. `seconds`: first sent to last ended."""

    requests: int
    completed: int
    failed: dict[str, int]
    ttft_s: Quantiles | None
    tpot_s: Quantiles | None
    gap_s: Quantiles | None
    output_tokens_per_s: float
    goodput_rps: float
    prompt_tokens_per_s: float
    seconds: float


async def open_loop(target: Target, arrivals: Sequence[Arrival], began: Callable[[str], None]) -> list[Seen]:
    """Send every request at its moment; returns when the last has ended."""
    async with _session(target) as session, asyncio.TaskGroup() as group:
        start, tasks = time.monotonic(), list[asyncio.Task[Seen]]()
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(max(0.0, start + arrival.at_s - time.monotonic()))
            began(f"{arrival.prompt_tokens} in, {arrival.output_tokens} out")
            tasks.append(group.create_task(ask(session, target, arrival, number)))
    return [task.result() for task in tasks]


async def closed_loop(target: Target, arrivals: Iterable[Arrival], at_once: int) -> list[Seen]:
    """So many at once, each followed by the next until there is none: for comparing servers at one concurrency."""
    queue, seen = enumerate(arrivals), list[Seen]()

    async def worker(session: aiohttp.ClientSession) -> None:
        for number, arrival in queue:
            seen.append(await ask(session, target, arrival, number))

    async with _session(target) as session, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker(session))
    return seen


def _session(target: Target) -> aiohttp.ClientSession:
    headers = dict(target.headers) | ({"Authorization": f"Bearer {target.api_key}"} if target.api_key else {})
    return aiohttp.ClientSession(
        headers=headers,
        # One connection a request, as of clients that know nothing of each other: llama.cpp's server closes a
        # connection after a streamed answer without saying so, and the next request on it fails.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=10),
    )


async def ask(session: aiohttp.ClientSession, target: Target, arrival: Arrival, number: int) -> Seen:
    """One streamed completion. Never raises for what a server can do."""
    body = {
        "prompt": prompt_of(arrival, number, target.words),
        "max_tokens": arrival.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,  # llama-server's: a prompt that is measured is evaluated
    }
    seen = Seen(time.monotonic(), prompt_tokens=arrival.prompt_tokens)
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as response:
            seen.status = response.status
            if response.status == 200:
                await _follow(response, seen)
            else:
                said = await response.content.read(_MAX_ERROR_BYTES)
                seen.failure = _reason(said, f"http-{response.status}")
    except TimeoutError:
        seen.failure = "timeout"
    except (aiohttp.ClientError, OSError):
        seen.failure = "connection"
    except (msgspec.DecodeError, ValueError, HttpProcessingError):  # the latter two also of a line that is too long
        seen.failure = "malformed"
    seen.ended = time.monotonic()
    if seen.failure is None:
        _complete(seen)
    return seen


def _complete(seen: Seen) -> None:
    """An answer without a token is none: it would be the fastest of all."""
    if not seen.pieces and not seen.output_tokens:
        seen.failure = "empty"
    seen.pieces = seen.pieces or [seen.ended]  # of a token that has no text, such as the end of its text
    seen.output_tokens = seen.output_tokens or len(seen.pieces)  # a server that does not count sends them one by one


async def _follow(response: aiohttp.ClientResponse, seen: Seen) -> None:
    seen.failure = "cut"  # until the end mark has come
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            seen.failure = None
            return
        chunk = _chunks.decode(data)
        if chunk.error is not None:
            seen.failure = _reason(data, "error")
            return
        if any(choice.text for choice in chunk.choices):
            seen.pieces.append(time.monotonic())
        if chunk.usage is not None:
            seen.output_tokens = chunk.usage.completion_tokens


def _reason(body: bytes, otherwise: str) -> str:
    """The error's code where there is one, as a word."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return otherwise
    return code if isinstance(code, str) else otherwise


def report(seen: Sequence[Seen], slo: Slo) -> ServeReport:
    done = [one for one in seen if one.failure is None]
    failed = Counter(one.failure for one in seen if one.failure is not None)
    seconds = max((one.ended for one in seen), default=0.0) - min((one.sent for one in seen), default=0.0)
    good = [one for one in done if one.ttft_s <= slo.ttft_s and one.tpot_s <= slo.tpot_s]
    rate = 1 / seconds if seconds > 0 else 0.0
    return ServeReport(
        requests=len(seen),
        completed=len(done),
        failed=dict(sorted(failed.items())),
        ttft_s=quantiles([one.ttft_s for one in done], _DIGITS),
        tpot_s=quantiles([one.tpot_s for one in done if one.output_tokens > 1], _DIGITS),
        gap_s=quantiles([b - a for one in done for a, b in pairwise(one.pieces)], _DIGITS),
        output_tokens_per_s=round(rate * sum(one.output_tokens for one in done), 3),
        goodput_rps=round(rate * len(good), 4),
        prompt_tokens_per_s=round(rate * sum(one.prompt_tokens for one in done), 3),
        seconds=round(seconds, 3),
    )


def draw(seen: Sequence[Seen], slo: Slo) -> str:
    """Waiting for the first token and the time per token, over the run, as SVG."""
    start = min((one.sent for one in seen), default=0.0)
    buckets = 12
    length = (max((one.sent for one in seen), default=0.0) - start) / buckets or 1.0
    parts: list[list[Seen]] = [[] for _ in range(buckets)]
    for one in seen:
        parts[min(buckets - 1, int((one.sent - start) / length))].append(one)

    def series(value: Callable[[Seen], float]) -> dict[str, list[float | None]]:
        found = [quantiles([value(one) for one in part if one.failure is None], _DIGITS) for part in parts]
        return {name: [getattr(q, name) if q else None for q in found] for name in ("p50", "p90", "p99")}

    ticks = [f"{n * length:.3g} s" for n in range(buckets)]
    failed: dict[str, list[float | None]] = {"failed": [float(sum(o.failure is not None for o in p)) for p in parts]}
    panels = [
        Panel("first token, s after sending", ticks, series(lambda one: one.ttft_s), {"SLO": slo.ttft_s}),
        Panel("time per token, s", ticks, series(lambda one: one.tpot_s), {"SLO": slo.tpot_s}),
        Panel("requests that failed", ticks, failed),
    ]
    return svg("requests by the second they were sent", panels)


def table_rows(result: ServeReport) -> dict[str, Any]:
    """For people."""

    def three(q: Quantiles | None) -> str:
        return "none" if q is None else f"{1e3 * q.p50:.1f} / {1e3 * q.p90:.1f} / {1e3 * q.p99:.1f} ms"

    failures = ", ".join(f"{count} {reason}" for reason, count in result.failed.items())
    return {
        "requests": f"{result.requests} in {result.seconds:.1f} s, {result.completed} completed",
        "failed": failures or "none",
        "first token p50/p90/p99": three(result.ttft_s),
        "per token p50/p90/p99": three(result.tpot_s),
        "gap p50/p90/p99": three(result.gap_s),
        "throughput": f"{result.prompt_tokens_per_s:.1f} tokens/s in, {result.output_tokens_per_s:.1f} out",
        "goodput": f"{result.goodput_rps:.2f} requests/s within the SLO",
    }
