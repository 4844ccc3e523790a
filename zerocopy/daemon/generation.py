"""One request from prompt to last token on a host that decodes: tokenize, place, hand off or prefill here, generate.

A request waits for a lane of the decode pool and for all the cells it can need; that is queueing, bounded by count and
by `queue_s`. A handoff that fails falls back to local prefill where that is allowed, and the response says so; nothing
is generated from a state that was not committed (H3). A worker that dies before the client has anything of the answer
costs time only: once there is another, the request runs again, once. Owns the line of those who wait and the incoming
handoffs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Final

from planner.placement import Decision, choose
from transport.link import Link
from zerocopy.config import DaemonConfig
from zerocopy.daemon.admission import Admission, Refused, Ticket
from zerocopy.daemon.ending import to_the_end
from zerocopy.daemon.incoming import HandoffFailed, Incoming
from zerocopy.daemon.memory import SharedMemory
from zerocopy.daemon.peers import Peers
from zerocopy.daemon.requests import (
    Delta,
    Event,
    Finished,
    GenerationRequest,
    PlacementMode,
    RequestError,
    Started,
)
from zerocopy.daemon.telemetry import Telemetry, log_event
from zerocopy.daemon.trace import Trace, between, busy
from zerocopy.daemon.worker_process import Job, JobFailed, WorkerLost, WorkerProcess
from zerocopy.handoff.sink import SinkHandoff
from zerocopy.runtime.base import EngineFacts
from zerocopy.worker import protocol as p

# What an answer may grow to when the client names no limit: room for a full reply, not for a loop.
DEFAULT_MAX_TOKENS = 512
# A new worker is up within seconds for small models; a client that waits this long finds it, or is told again.
WORKER_RETRY_S = 2.0
_ANSWER: Final = (p.TextDelta, p.Generated)


class Generation:
    """The request path of one host."""

    def __init__(
        self,
        config: DaemonConfig,
        telemetry: Telemetry,
        worker: WorkerProcess,
        memory: SharedMemory,
        peers: Peers,
        on_trace: Callable[[Trace], None],
    ) -> None:
        self.config = config
        self.telemetry = telemetry
        self.worker = worker
        self.memory = memory
        self.peers = peers
        self.on_trace = on_trace
        self.incoming: dict[bytes, Incoming] = {}
        self.lanes = Admission(
            waiting=config.queue,
            wait_s=config.queue_s,
            tenant_requests=config.tenant_requests,
            # A prefiller that stands still leaves one lane for requests that do not need it.
            share=lambda sequences: sequences - 1,
        )
        self._epochs = itertools.count(1)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Implements `GenerationService.generate` for a host with a decode lane."""
        arrived = time.monotonic()
        try:
            self._check(request)  # what can never be served does not queue
            async with self._place(request) as ticket:
                tokens, decision = await self._turn(request, ticket)
                make = partial(_Session, self, request, tokens, decision, arrived, ticket)
                async with contextlib.aclosing(self._twice(make, whole=request.whole)) as events:
                    async for event in events:
                        yield event
        except WorkerLost as error:
            raise RequestError("worker-lost", str(error), 503, WORKER_RETRY_S) from None
        except JobFailed as error:
            raise RequestError(error.reason, str(error), 500) from None

    async def _twice(self, make: Callable[[], _Session], *, whole: bool) -> AsyncGenerator[Event, None]:
        """A session; another one when the worker dies before the client has anything of it. `whole`: it has nothing
        before the last event."""
        held = list[Event]()
        for last in (False, True):
            session, begun = make(), False
            held.clear()
            try:
                await session.begin()
                async with contextlib.aclosing(session.events()) as events:
                    async for event in events:
                        if whole:
                            held.append(event)
                        else:
                            begun = True
                            yield event
                break
            except WorkerLost:
                if begun or last:
                    raise
            finally:
                await to_the_end(session.close())
            await self._restarted(session.deadline)
        for event in held:
            yield event

    async def _restarted(self, deadline: float) -> None:
        """Wait for a new worker as long as requests may wait for an engine. Raises WorkerLost."""
        try:
            async with asyncio.timeout(min(self.config.queue_s, deadline - time.monotonic())):
                await self.worker.up()
        except TimeoutError:
            raise WorkerLost(self.worker.reason) from None
        log_event("worker died before the answer began: the request runs again", level=logging.WARNING)

    def next_epoch(self) -> int:
        return next(self._epochs)

    def uses(self, link: Link) -> bool:
        return any(handoff.link is link for handoff in self.incoming.values())

    def stop(self) -> None:
        """End the handoffs; the worker's end ends the rest."""
        for handoff in list(self.incoming.values()):
            handoff.fail("shutdown", "the decoder is shutting down")

    def link_lost(self, link: Link, reason: str) -> None:
        for handoff in list(self.incoming.values()):
            if handoff.link is link:
                handoff.fail("link-lost", f"the link to {link.peer} closed: {reason}")

    def facts(self) -> EngineFacts:
        if self.worker.facts is None:
            raise WorkerLost(self.worker.reason)
        return self.worker.facts

    def _check(self, request: GenerationRequest) -> None:
        if isinstance(request.prompt, list):
            _check_fit(request, request.prompt, self.facts())
        else:
            _check_text(request, request.prompt, self.facts())

    async def _tokens(self, request: GenerationRequest) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        tokenize = partial(
            self.worker.tokenize, request.prompt, parse_special=request.parse_special, literal=request.literal
        )
        try:
            tokens = await tokenize()
        except WorkerLost:
            await self.worker.up()  # within the time that a request may wait
            tokens = await tokenize()
        _check_fit(request, tokens, self.facts())
        return tokens

    def _decide(self, request: GenerationRequest, tokens: list[int], facts: EngineFacts) -> Decision:
        decision = choose(
            request.placement or self.config.placement,
            len(tokens),
            self.peers.prefillers(facts.identity),
            allow_fallback=self.fallback_allowed(request),
        )
        if decision.refused and decision.obstacle == "prompt-too-short":  # at any time and on any host
            raise RequestError(decision.obstacle, f"{decision.refused}: allow the fallback", 400)
        if decision.refused:
            raise RequestError(decision.obstacle or "no-prefiller", decision.refused, 503)
        if decision.obstacle:
            self.telemetry.fell_back(decision.obstacle)
        return decision

    def fallback_allowed(self, request: GenerationRequest) -> bool:
        return self.config.allow_fallback if request.allow_fallback is None else request.allow_fallback

    @contextlib.asynccontextmanager
    async def _place(self, request: GenerationRequest) -> AsyncGenerator[Ticket, None]:
        """A place in the line, then at a lane, for as long as the block runs. Taken before the prompt is tokenized,
        which is the engine's work too: who has to come back later hears it without waiting for the engine."""
        facts = self.facts()
        self.lanes.open(facts.sequences, facts.kv_tokens)
        with _refusals():
            ticket = self.lanes.ask(request.tenant, None)
        try:
            yield ticket
        finally:
            self.lanes.give_back(ticket)

    async def _turn(self, request: GenerationRequest, ticket: Ticket) -> tuple[list[int], Decision]:
        """Wait for a lane and all the cells that the request can need."""
        try:
            async with asyncio.timeout(self.config.queue_s):
                tokens = await self._tokens(request)
                decision = self._decide(request, tokens, self.facts())
                group = decision.prefiller if decision.placement == "disaggregated" else None
                with _refusals():
                    needed = len(tokens) + _most_tokens(request, len(tokens), self.facts())
                    self.lanes.measured(ticket, needed, group)
                await ticket.granted
        except TimeoutError:
            raise RequestError("queue-deadline", f"no turn within {self.config.queue_s:g} s", 503, 1.0) from None
        return tokens, decision


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """As a client is told of them."""
    try:
        yield
    except Refused as error:
        status = 429 if error.reason == "tenant-limit" else 503
        raise RequestError(error.reason, str(error), status, error.retry_after_s) from None


class _Session:
    """One request while it has a lane of the decode pool."""

    def __init__(
        self,
        service: Generation,
        request: GenerationRequest,
        tokens: list[int],
        decision: Decision,
        arrived: float,
        ticket: Ticket,
    ) -> None:
        self._service = service
        self._request = request
        self._tokens = tokens
        self._decision = decision
        self._arrived = arrived
        self._ticket = ticket
        self._placement: PlacementMode = decision.placement
        self._prefiller: str | None = None
        self._fallback = f"{decision.obstacle}: {decision.fallback_reason}" if decision.fallback_reason else None
        self._trace: Trace | None = None
        self._job: Job | None = None
        self.deadline = arrived + service.config.request_s
        self._first_token: float | None = None

    async def begin(self) -> None:
        """Returns when the worker has all it needs."""
        if self._placement == "disaggregated" and self._decision.prefiller is not None:
            self._ticket.group = self._decision.prefiller  # again, if this is a second session
            try:
                async with asyncio.timeout(self.deadline - time.monotonic()):
                    await self._hand_off(self._decision.prefiller)
            except TimeoutError:
                raise self._late() from None
            self._service.lanes.leave_group(self._ticket)
        if self._placement == "local":
            self._job = self._service.worker.open_job()
            self._service.worker.send(self._worker_request(self._job))

    async def close(self) -> None:
        """Free whatever is held, at any stage."""
        if self._job is not None:
            await self._job.release()

    def _late(self) -> RequestError:
        limit = f"{self._service.config.request_s:g} s (--request-s)"
        return RequestError("request-deadline", f"the answer did not end within {limit}", 504)

    # -- the state -----------------------------------------------------------------------------------------

    async def _hand_off(self, prefiller: str) -> None:
        """Bring the state from a peer; on failure fall back, or raise."""
        try:
            await self._receive(prefiller)
            self._prefiller = prefiller
        except HandoffFailed as error:
            if self._job is not None and self._job.lost:
                raise WorkerLost("the worker process ended during the handoff; it is being restarted") from None
            log_event("handoff failed", reason=error.reason, detail=str(error), peer=prefiller)
            if not self._service.fallback_allowed(self._request):
                raise RequestError(error.reason, f"the handoff from {prefiller} failed: {error}", 503) from None
            self._placement, self._fallback, self._job = "local", error.reason, None
            self._service.telemetry.fell_back(error.reason)

    async def _receive(self, prefiller: str) -> None:
        service, config = self._service, self._service.config
        link, facts = service.peers.link_to(prefiller), service.worker.facts
        if facts is None:
            raise WorkerLost(service.worker.reason)
        if link is None:
            raise HandoffFailed("link-lost", f"the link to {prefiller} closed before the handoff began")
        handoff_id = secrets.token_bytes(16)
        machine = SinkHandoff(
            handoff_id, facts.identity, facts.schema, self._tokens,
            tenant=self._request.tenant, probe=config.probe, queue_deadline_s=config.queue_s, now=time.monotonic(),
            page_room=service.memory.page_room(),
        )  # fmt: skip
        handoff = Incoming(link, machine, service.worker, service.memory, self._tokens)
        self._job, self._trace = service.worker.open_job(), handoff.trace
        service.incoming[handoff_id] = handoff
        request, epoch = self._worker_request(self._job, probe=config.probe), service.next_epoch()
        try:
            await handoff.receive(self._job, request, epoch=epoch, transfer_s=config.transfer_s)
        finally:
            service.incoming.pop(handoff_id, None)
            service.on_trace(handoff.trace)

    def _worker_request(self, job: Job, *, probe: bool = False) -> p.Generate:
        request = self._request
        return p.Generate(
            job=job.number,
            tokens=self._tokens,
            max_tokens=_most_tokens(request, len(self._tokens), self._service.facts()),
            sampling=request.sampling,
            stop=request.stop,
            proof_key=bytes.fromhex(request.proof_key) if request.proof_key else None,
            probe=probe,
            lane=self._ticket.lane,
            return_tokens=request.return_tokens,
        )

    # -- the tokens ----------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[Event, None]:
        assert self._job is not None
        # One timer for all tokens: one for each would cost as much as passing it on.
        timer = asyncio.get_running_loop().call_later(self.deadline - time.monotonic(), self._job.expire)
        try:
            while True:
                message = await self._job.next()
                if not isinstance(message, _ANSWER):
                    continue
                if self._first_token is None:
                    self._first_token = time.monotonic()
                    self._count_prompt(self._first_token - self._arrived)
                    yield Started(self._placement, self._prefiller, self._fallback, len(self._tokens))
                if isinstance(message, p.Generated):
                    yield self._finished(message)
                    return
                yield Delta(message.text, message.tokens, message.logprob)
        except TimeoutError:
            raise self._late() from None
        finally:
            timer.cancel()

    def _count_prompt(self, ttft_s: float) -> None:
        telemetry, n = self._service.telemetry, len(self._tokens)
        telemetry.first_token(self._placement, ttft_s)
        transferred = n - 1 if self._prefiller else 0
        telemetry.prompt_tokens("transferred", transferred)
        telemetry.prompt_tokens("computed", n - transferred)

    def _finished(self, done: p.Generated) -> Finished:
        assert self._first_token is not None
        after_first = max(0.0, done.marks["generated"] - done.marks["first_token"])
        self._service.telemetry.generated(self._placement, done.completion_tokens, after_first)
        return Finished(
            reason=done.reason,
            prompt_tokens=len(self._tokens),
            completion_tokens=done.completion_tokens,
            timings=self._timings(done, after_first),
            proof=done.proof,
            tokens=done.tokens,
        )

    def _timings(self, done: p.Generated, after_first: float) -> dict[str, object]:
        """llama-server's names where it has them, ours beside them."""
        assert self._first_token is not None
        prompt_s = done.marks["evaluated"] - done.marks["started"]
        more = done.completion_tokens - 1
        timings: dict[str, object] = {
            "prompt_n": len(self._tokens),
            "prompt_ms": 1e3 * prompt_s,
            "predicted_n": done.completion_tokens,
            "predicted_ms": 1e3 * after_first,
            "predicted_per_second": more / after_first if more and after_first else None,
            "ttft_ms": 1e3 * (self._first_token - self._arrived),
            "prompt_tokens_evaluated_here": done.prompt_tokens_evaluated,
        }
        if self._trace is not None and self._prefiller is not None:
            timings["handoff"] = handoff_figures(self._trace)
        else:
            timings["prompt_tokens_evaluated_here"] = len(self._tokens)
        return timings


def handoff_figures(trace: Trace) -> dict[str, object]:
    """What a response tells of its handoff (M1)."""
    source = trace.source  # the peer's: any of it may be missing
    sent = int(source.get("kv_bytes_sent_before_prefill_end", 0))
    components = [
        {"name": name, "bytes": nbytes, "pages": trace.component_pages[name]}
        for name, nbytes in trace.component_bytes.items()
    ]

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else 1e3 * seconds

    return {
        "id": trace.handoff,
        "prefiller": trace.peer,
        "transport": trace.transport,
        "components": components,
        "kv_bytes": trace.kv_bytes,
        "kv_bytes_sent_before_prefill_end": sent,
        "overlap_fraction": sent / trace.kv_bytes if trace.kv_bytes else None,
        "tail_ms": ms(trace.seconds("prefilled", "committed")),
        "queue_ms": ms(trace.seconds("asked", "granted")),
        "prefill_ms": ms(between(source, "started", "prefilled")),
        "export_ms": ms(source.get("export_busy_s")),
        "wire_ms": ms(busy(trace.wire)),
        "import_ms": ms(busy(trace.imports)),
        "commit_ms": ms(trace.seconds("imported", "committed")),
        "probe": trace.probe,
        "probe_wait_ms": ms(trace.seconds("evaluated", "verified")),
        "probe_ms": ms(between(source, "probe_started", "probe_ended")),
    }


def _check_text(request: GenerationRequest, text: str, facts: EngineFacts) -> None:
    """What cannot fit, however it is cut into tokens, is not worth the tokenizer's time: 15 MB took the engine 24 s, in
    which nobody else had a token. Each literal is a token at least, and a call. A peer's may be wrong."""
    if (size := len(text.encode())) > facts.n_ctx * facts.longest_token:
        least = -(-size // facts.longest_token)
        sentence = f"the prompt of {size} bytes is {least} tokens or more, this host has context for {facts.n_ctx}"
        raise RequestError("context-length", f"{sentence}: shorten the prompt", 400)
    edges = [0, *itertools.chain.from_iterable(request.literal), len(text)]
    if edges != sorted(edges):
        raise RequestError("bad-request", "the literal parts of the prompt are not in order, or not in it", 400)
    if len(request.literal) >= facts.n_ctx:
        sentence = f"the prompt holds {len(request.literal)} control tokens written as text, this host has context for"
        raise RequestError("context-length", f"{sentence} {facts.n_ctx} tokens: shorten the prompt", 400)


def _check_fit(request: GenerationRequest, tokens: list[int], facts: EngineFacts) -> None:
    if not tokens:
        raise RequestError("empty-prompt", "the prompt has no tokens", 400)
    most = _most_tokens(request, len(tokens), facts)
    needed = len(tokens) + most
    if needed > facts.n_ctx:
        answer, lower = f"max_tokens {most}", ", lower max_tokens"
        if request.max_tokens is None:
            answer, lower = "one of the answer", ""
        raise RequestError(
            "context-length",
            f"prompt of {len(tokens)} tokens and {answer} need {needed} tokens of context, this host has "
            f"{facts.n_ctx}: shorten the prompt{lower} or start with a larger --n-ctx",
            400,
        )
    if any(not 0 <= token < facts.n_vocab for token in tokens):
        raise RequestError("token-id", f"prompt has a token id outside 0 to {facts.n_vocab - 1}", 400)
    if any(token >= facts.n_vocab for token, _ in request.sampling.logit_bias):
        raise RequestError("token-id", f"logit_bias has a token id outside 0 to {facts.n_vocab - 1}", 400)


def _most_tokens(request: GenerationRequest, prompt_tokens: int, facts: EngineFacts) -> int:
    """Of the answer: what the client says; else what fits, at least one."""
    if request.max_tokens is not None:
        return request.max_tokens
    return max(1, min(DEFAULT_MAX_TOKENS, facts.n_ctx - prompt_tokens))
