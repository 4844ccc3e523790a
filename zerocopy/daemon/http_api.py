"""The HTTP front door: OpenAI's endpoints, health, metrics and status, over one `GenerationService`.

Owns HTTP only: bodies, headers, Server-Sent Events, the API key. It never answers 200 for a failed generation: the
status waits for the first token, and what fails later ends the stream with an error event. A client that goes away
cancels its request: the server cancels the task, the task closes the service's iterator.
Bounds: `MAX_BODY_BYTES` a request, `MAX_BODIES_BYTES` all that are not yet answered, `BODY_S` to send it, `STALLED_S`
for a client that stops reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError

from transport.address import from_socket, parse
from zerocopy.config import DaemonConfig
from zerocopy.daemon import openai_schema as schema
from zerocopy.daemon.admission import RETRY_S
from zerocopy.daemon.chat import render
from zerocopy.daemon.choices import generate_choices
from zerocopy.daemon.openai_answer import Answer, Choice, shown
from zerocopy.daemon.requests import (
    Delta,
    Event,
    Finished,
    GenerationRequest,
    GenerationService,
    PlacementMode,
    RequestError,
    Started,
)
from zerocopy.daemon.telemetry import log_event

MAX_BODY_BYTES: Final = 16 << 20  # a prompt of 1M token ids, as JSON, is below 8 MiB
MAX_BODIES_BYTES: Final = 4 * MAX_BODY_BYTES  # as Python objects up to eight times that
BODY_S: Final = 60.0  # 16 MiB at 2 Mb/s
STALLED_S: Final = 60.0  # then a client that reads nothing no longer holds engine memory
SHUTDOWN_S: Final = 5.0
MAX_FALLBACK_TEXT: Final = 1024  # of a header; some clients take 8 KiB of all of them

_PROOF_KEY: Final = re.compile(r"^(?:[0-9a-fA-F]{2}){16,32}$")
_OPEN_PATHS: Final = frozenset({"/health", "/ready", "/live"})  # load balancers ask without a key
_TENANT: Final = web.RequestKey("tenant", str)
_Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(service: GenerationService, config: DaemonConfig) -> web.Application:
    """All routes. Serve it with `start`, which sets what the application cannot set itself."""
    door = _FrontDoor(service, config)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[door.guard])
    app.router.add_post("/v1/completions", door.completions)
    app.router.add_post("/v1/chat/completions", door.chat_completions)
    app.router.add_get("/v1/models", door.models)
    app.router.add_get("/v1/models/{model:.+}", door.model)
    app.router.add_get("/v1/status", door.status)
    app.router.add_get("/metrics", door.metrics)
    app.router.add_get("/live", door.live)
    app.router.add_get("/health", door.health)
    app.router.add_get("/ready", door.ready)
    app.on_response_prepare.append(_name_server)
    return app


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    """Versions of Python and its libraries are nobody's business."""
    response.headers["Server"] = "zc-handoff"


async def start(app: web.Application, address: str) -> tuple[web.AppRunner, str]:
    """Bind `host:port` (port 0 picks one); returns the runner, whose `cleanup()` ends it, and the bound address."""
    at = parse(address)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S, auto_decompress=False
    )
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    await runner.setup()
    try:
        await web.TCPSite(runner, at.host, at.port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, str(from_socket(runner.addresses[0]))


def _is_ours(record: logging.LogRecord) -> bool:
    """What somebody sends that is not HTTP is answered, and nothing to do here."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


class _FrontDoor:
    """The routes of one daemon. Keeps count of the bodies that it holds."""

    def __init__(self, service: GenerationService, config: DaemonConfig) -> None:
        self._service = service
        self._keys = config.tenant_keys()
        self._allow_proofs = config.allow_proofs
        self._held_bytes = 0

    @web.middleware
    async def guard(self, request: web.Request, handler: _Respond) -> web.StreamResponse:
        """Checks who asks; turns every failure before the first byte into OpenAI's error shape."""
        try:
            self._check_origin(request)
            self._check_key(request)
            return await handler(request)
        except RequestError as error:
            return _error_response(error)
        except web.HTTPException as error:
            return _error_response(_http_error(error), error.headers)
        except Exception:
            logging.getLogger(__name__).exception("request failed by a bug")
            return _error_response(_bug())

    def _check_origin(self, request: web.Request) -> None:
        """No web page is served here, so a browser that names one was sent by somebody else's page."""
        if "Origin" in request.headers:
            raise RequestError("cross-origin", "requests from web pages are not allowed: call from a server", 403)

    def _check_key(self, request: web.Request) -> None:
        """Leaves the key's tenant in the request. Every key is compared, so that time tells nothing."""
        request[_TENANT] = ""
        if not self._keys or request.path in _OPEN_PATHS:
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = key.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
        found = [tenant for key, tenant in self._keys.items() if hmac.compare_digest(given, key)]
        if found:
            request[_TENANT] = found[0]
        else:
            raise RequestError("invalid-api-key", "send the API key as `Authorization: Bearer KEY`", 401)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        with self._room(request):
            body = schema.parse(await _read(request), schema.CompletionBody)
            wanted = self._request(request, body, body.single_prompt())
            return await self._answer(request, body, wanted, chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        with self._room(request):
            body = schema.parse(await _read(request), schema.ChatBody)
            if self._service.model_name() is None:
                raise self._not_serving()
            text, literal = render(self._service.chat_template(), body.messages)
            prompt = self._request(request, body, text)
            wanted = msgspec.structs.replace(prompt, parse_special=True, literal=literal)
            return await self._answer(request, body, wanted, chat=True)

    @contextlib.contextmanager
    def _room(self, request: web.Request) -> Iterator[None]:
        """For one body, from before its first byte is read until its request is answered: who waits holds memory too.
        One of unknown size is as large as it may be."""
        announced = request.content_length
        nbytes = MAX_BODY_BYTES if announced is None else min(announced, MAX_BODY_BYTES)
        if self._held_bytes + nbytes > MAX_BODIES_BYTES:
            held = f"{self._held_bytes} bytes of requests are not answered yet, {MAX_BODIES_BYTES} is the most"
            raise RequestError("queue-full", f"{held}: this one has {nbytes}", 503, RETRY_S)
        self._held_bytes += nbytes
        try:
            yield
        finally:
            self._held_bytes -= nbytes

    async def models(self, request: web.Request) -> web.Response:
        name = self._service.model_name()
        return _json({"object": "list", "data": [] if name is None else [_model(name)]})

    async def model(self, request: web.Request) -> web.Response:
        name, asked = self._service.model_name(), request.match_info["model"]
        if name is None or asked != name:
            raise RequestError("unknown-model", f"no model `{asked}` here: this daemon serves `{name}`", 404)
        return _json(_model(name))

    async def live(self, request: web.Request) -> web.Response:
        """The daemon runs, whatever its engine does."""
        return _json({"status": "ok"})

    async def health(self, request: web.Request) -> web.Response:
        """Daemon and engine live: to start this host again would not help. Whether it takes requests is in the body."""
        status = self._service.status()
        body = {"engine": status.engine or "ready", "ready": status.serving, "reason": status.reason}
        if status.engine is None:
            return _json({"status": "ok", **body})
        return _json({"status": "unavailable", **body}, status=503)

    async def ready(self, request: web.Request) -> web.Response:
        """Able to serve a request that comes now."""
        status = self._service.status()
        if status.serving:
            return _json({"status": "ok"})
        return _json({"status": "unavailable", "reason": status.reason}, status=503)

    async def status(self, request: web.Request) -> web.Response:
        status = self._service.status()
        return _json({"serving": status.serving, "reason": status.reason, **status.detail})

    async def metrics(self, request: web.Request) -> web.Response:
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._service.metrics_text(), headers={"Content-Type": content_type})

    def _request(
        self, request: web.Request, body: schema.CompletionBody | schema.ChatBody, prompt: str | list[int]
    ) -> GenerationRequest:
        fallback = _header(request, "x-zc-fallback", ("allow", "deny"))
        return GenerationRequest(
            prompt=prompt,
            max_tokens=body.most_tokens(),
            sampling=body.sampling(),
            stop=body.stops(),
            placement=cast(PlacementMode | None, _header(request, "x-zc-placement", ("local", "disaggregated"))),
            allow_fallback=None if fallback is None else fallback == "allow",
            proof_key=self._proof_key(request),
            return_tokens=bool(body.return_tokens),
            whole=not body.stream,
            tenant=request[_TENANT],
        )

    def _proof_key(self, request: web.Request) -> str | None:
        key = request.headers.get("x-zc-proof")
        if key is not None and not self._allow_proofs:
            raise RequestError("proofs-off", "x-zc-proof needs a daemon started with --allow-proofs", 403)
        if key is not None and not _PROOF_KEY.match(key):
            raise RequestError("bad-header", "x-zc-proof is not a key of 16 to 32 bytes in hex", 400)
        return key

    def _not_serving(self) -> RequestError:
        why = self._service.status().reason or "the engine is not up"
        return RequestError("not-serving", f"this daemon cannot serve now: {why}; wait until /ready answers 200", 503)

    async def _answer(
        self,
        request: web.Request,
        body: schema.CompletionBody | schema.ChatBody,
        wanted: GenerationRequest,
        *,
        chat: bool,
    ) -> web.StreamResponse:
        choices = [Choice() for _ in range(body.n or 1)]
        async with contextlib.aclosing(generate_choices(self._service.generate, wanted, len(choices))) as events:
            _, started = await anext(events, (0, None))
            if not isinstance(started, Started):
                raise RequestError("internal", "the generation began without saying where it runs", 500)
            answer = Answer(
                self._service.model_name() or "",
                chat=chat,
                with_usage=body.wants_usage(),
                return_tokens=wanted.return_tokens,
            )
            if body.stream:
                return await _stream(request, answer, started, events, choices, body.wants_usage())
            async for index, event in events:
                if isinstance(event, Started) and event.fallback_reason and not started.fallback_reason:
                    started = event  # of several choices, one that fell back is the one to tell of
                _take(choices[index], event)
        if any(choice.finished is None for choice in choices):
            raise _unfinished()
        return _json(answer.whole(choices), headers=_placement_headers(started))


async def _read(request: web.Request) -> bytes:
    if "Content-Encoding" in request.headers:  # it could be a thousand times as large as it is counted
        raise RequestError("content-encoding", "compressed bodies are not taken: leave out Content-Encoding", 415)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise RequestError("slow-body", f"the body did not arrive within {BODY_S:g} s", 408) from None


def _header(request: web.Request, name: str, allowed: tuple[str, ...]) -> str | None:
    value = request.headers.get(name)
    if value is not None and value not in allowed:
        raise RequestError("bad-header", f"{name} is {value!r}, not one of: {', '.join(allowed)}", 400)
    return value


def _placement_headers(started: Started) -> dict[str, str]:
    """Where it really ran, so that a fallback is never silent."""
    headers: dict[str, str] = {"x-zc-placement": started.placement}
    if started.prefiller is not None:
        headers["x-zc-prefiller"] = started.prefiller
    if started.fallback_reason is not None:
        # It may quote what a peer says of itself: no byte of that ends the line, and it stays short enough for clients.
        text = "".join(c if " " <= c <= "~" else "?" for c in started.fallback_reason)
        headers["x-zc-fallback"] = text[:MAX_FALLBACK_TEXT]
    return headers


def _take(choice: Choice, event: Event) -> None:
    if isinstance(event, Delta):
        choice.text += event.text
        choice.logprobs += [event.logprob] if event.logprob else []
    elif isinstance(event, Finished):
        choice.finished = event


async def _stream(
    request: web.Request,
    answer: Answer,
    started: Started,
    events: AsyncIterator[tuple[int, Event]],
    choices: Sequence[Choice],
    with_usage: bool,
) -> web.StreamResponse:
    """Server-Sent Events. From here on the status is 200: a failure becomes an event, and no `[DONE]` follows it."""
    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",
    }
    response = web.StreamResponse(headers=headers | _placement_headers(started))
    try:
        writer = await response.prepare(request)
    except ConnectionError:
        return response  # the client is gone: as below
    assert writer is not None  # which it is of a response that has ended
    with _EventStream(request, writer) as stream:
        try:
            await _relay(stream, answer, events, choices, with_usage)
        except RequestError as error:
            await stream.send_last(error)
        except ConnectionError:
            pass  # the client is gone: nobody is left to tell, and leaving closes the iterator
        except Exception:
            logging.getLogger(__name__).exception("stream failed by a bug")
            await stream.send_last(_bug())
    return response


class _EventStream:
    """Server-Sent Events to one client, which is cut off when one of them waits for it for `STALLED_S`. One timer
    watches all: one for each was a fifth of what a token cost the daemon."""

    def __init__(self, request: web.Request, writer: AbstractStreamWriter) -> None:
        self._request = request
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # the event that waits was given to the client, by the loop's clock

    def __enter__(self) -> _EventStream:
        self._timer = self._loop.call_later(STALLED_S, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def send(self, data: bytes) -> None:
        self._since = self._loop.time()
        await self._writer.write(b"data: " + data + b"\n\n")
        self._since = None

    async def send_last(self, error: RequestError) -> None:
        """Why the stream ends, unless the client is gone."""
        with contextlib.suppress(ConnectionError):
            await self.send(msgspec.json.encode(schema.error_body(error)))

    def _look(self) -> None:
        now = self._loop.time()
        cut_at = STALLED_S + (now if self._since is None else self._since)
        if cut_at > now:
            self._timer = self._loop.call_at(cut_at, self._look)
            return
        log_event("client stopped reading: request cancelled", level=logging.WARNING, seconds=STALLED_S)
        if self._request.transport is not None:
            self._request.transport.abort()  # which cancels the request, as when a client leaves


async def _relay(
    stream: _EventStream,
    answer: Answer,
    events: AsyncIterator[tuple[int, Event]],
    choices: Sequence[Choice],
    with_usage: bool,
) -> None:
    """To the end of the iterator, not only to the last `Finished`: leaving early would be cancelling."""
    for index in range(len(choices)):
        if (opening := answer.opening(index)) is not None:
            await stream.send(msgspec.json.encode(opening))
    finished, offsets = dict[int, Finished](), [0] * len(choices)  # tokens' characters: text may be held back
    around = [answer.around_text(index) for index in range(len(choices))]
    async for index, event in events:
        if isinstance(event, Delta) and event.logprob:
            await stream.send(msgspec.json.encode(answer.piece(index, event.text, event.logprob, offsets[index])))
            offsets[index] += len(shown(event.logprob.text))
        elif isinstance(event, Delta) and event.text:
            before, after = around[index]
            await stream.send(before + msgspec.json.encode(event.text) + after)
        elif isinstance(event, Finished):
            finished[index] = event
            await stream.send(msgspec.json.encode(answer.closing(index, event)))
    if len(finished) < len(choices):
        raise _unfinished()
    if with_usage:
        await stream.send(msgspec.json.encode(answer.usage(list(finished.values()))))
    await stream.send(b"[DONE]")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "zc-handoff"}


def _json(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


def _unfinished() -> RequestError:
    return RequestError("internal", "the generation ended without a result", 500)


def _bug() -> RequestError:
    return RequestError("internal", "internal error: see the daemon's log", 500)


def _error_response(error: RequestError, extra: Mapping[str, str] | None = None) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if extra and "Allow" in extra:
        headers["Allow"] = extra["Allow"]
    return _json(schema.error_body(error), status=error.status, headers=headers)


def _http_error(error: web.HTTPException) -> RequestError:
    """What aiohttp itself refuses."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return RequestError("body-too-large", f"the body is larger than {MAX_BODY_BYTES} bytes", 413)
    if isinstance(error, web.HTTPMethodNotAllowed):
        return RequestError(
            "method-not-allowed",
            f"{error.method} is not allowed here: use {' or '.join(sorted(error.allowed_methods))}",
            405,
        )
    if isinstance(error, web.HTTPNotFound):
        return RequestError("unknown-path", "no such path: see /v1/completions, /v1/chat/completions, /v1/status", 404)
    return RequestError("http", error.reason, error.status)
