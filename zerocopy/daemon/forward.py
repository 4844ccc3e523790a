"""A front door on a host that does not decode: the request travels to a peer that does, its events travel back.

Both ends are here. The serving end runs the request as if it had come to its own front door. Bounds: `MAX_FORWARDED`
requests of all peers, and `MAX_WAITING_BYTES` of an answer that its client has not taken; a cancelled or lost request
is cancelled at the other end too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from transport.link import Link, LinkError
from zerocopy.daemon.requests import Event, GenerationRequest, RequestError
from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError
from zerocopy.handoff.messages import MAX_PAYLOAD, CancelGenerate, Generate, GenerateEnd, GenerateEvent, encode

MAX_FORWARDED: Final = 256
MAX_WAITING_BYTES: Final = 16 << 20  # 56,000 tokens, or 25,000 with 20 alternatives each
_EVENT_BYTES: Final = 256  # what a message takes beside its payload
_TOGETHER: Final = 256  # events in a message of an answer that nobody reads before its end; far below MAX_PAYLOAD

_requests: Final = msgspec.msgpack.Decoder(GenerationRequest)
_events: Final = msgspec.msgpack.Decoder(list[Event])


class _Failure(msgspec.Struct, frozen=True):
    """Payload of an unsuccessful GENERATE-END: what the other front door would have answered."""

    status: Annotated[int, Meta(ge=400, le=599)]
    retry_after_s: Annotated[float, Meta(ge=0, le=86400)] | None


class _Inbox:
    """What has come of one answer and was not taken yet: a client may read more slowly than its peer generates."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._messages: asyncio.Queue[GenerateEvent | GenerateEnd] = asyncio.Queue()
        self._bytes = 0
        self._full = False

    def put(self, message: GenerateEvent | GenerateEnd) -> bool:
        """False when this is too much: the answer then ends with what came before, and nothing more is taken."""
        if self._full:
            return True
        self._bytes += _EVENT_BYTES + len(message.payload)
        self._full = self._bytes > MAX_WAITING_BYTES
        if self._full:
            sentence = f"{MAX_WAITING_BYTES >> 20} MiB of the answer wait for its client: read faster or ask for less"
            message = GenerateEnd(request_id=message.request_id, reason="overrun", message=sentence)
        self._messages.put_nowait(message)
        return not self._full

    async def get(self) -> GenerateEvent | GenerateEnd:
        message = await self._messages.get()
        self._bytes -= _EVENT_BYTES + len(message.payload)
        return message


class Forwarding:
    """Sends requests to decode peers and serves those of others through `generate`."""

    def __init__(self, generate: Callable[[GenerationRequest], AsyncGenerator[Event, None]]) -> None:
        self._generate = generate
        self._asked: dict[bytes, _Inbox] = {}
        self._serving: dict[tuple[Link, bytes], asyncio.Task[None]] = {}

    async def forward(self, link: Link, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Implements `GenerationService.generate` through a peer."""
        request_id = secrets.token_bytes(16)
        inbox = self._asked[request_id] = _Inbox(link)
        ended = True
        try:
            link.send(_ask(request_id, request))
            ended = False
            while not ended:
                message = await inbox.get()
                ended = isinstance(message, GenerateEnd)
                if isinstance(message, GenerateEvent):
                    for event in _read(message):
                        yield event
                else:
                    _raise_failure(message, link.peer)
        except LinkError as error:
            raise RequestError("link-lost", f"the decode peer {link.peer} cannot be reached: {error}") from None
        finally:
            del self._asked[request_id]
            if not ended:
                _send(link, CancelGenerate(request_id=request_id))

    def message(self, link: Link, message: Generate | GenerateEvent | GenerateEnd | CancelGenerate) -> None:
        match message:
            case Generate():
                self._serve(link, message)
            case CancelGenerate():
                if task := self._serving.get((link, message.request_id)):
                    task.cancel()
            case _:
                inbox = self._asked.get(message.request_id)
                if inbox is not None and inbox.link is link and not inbox.put(message):
                    _send(link, CancelGenerate(request_id=message.request_id))

    def uses(self, link: Link) -> bool:
        links = [inbox.link for inbox in self._asked.values()] + [over for over, _ in self._serving]
        return any(over is link for over in links)

    def link_lost(self, link: Link) -> None:
        for (over, _request_id), task in list(self._serving.items()):
            if over is link:
                task.cancel()
        for request_id, inbox in self._asked.items():
            if inbox.link is link:
                sentence = f"the link to the decode peer {link.peer} closed"
                inbox.put(GenerateEnd(request_id=request_id, reason="link-lost", message=sentence))

    async def stop(self) -> None:
        """Both the requests sent to peers and those served for them end, and whoever waits hears it."""
        for request_id, inbox in self._asked.items():
            inbox.put(GenerateEnd(request_id=request_id, reason="shutdown", message="this host shuts down"))
        for task in list(self._serving.values()):
            task.cancel()
        await asyncio.gather(*self._serving.values(), return_exceptions=True)

    def _serve(self, link: Link, message: Generate) -> None:
        key = (link, message.request_id)
        if key in self._serving:
            raise RemoteProtocolError("duplicate-request", "GENERATE with a request id that is in use")
        if len(self._serving) >= MAX_FORWARDED:
            _send(link, _failed(message.request_id, RequestError("queue-full", "the decode host's queue is full")))
            return
        task = asyncio.create_task(self._run(link, message))
        self._serving[key] = task
        task.add_done_callback(lambda _: self._serving.pop(key, None))

    async def _run(self, link: Link, message: Generate) -> None:
        """Whatever happens, the peer hears of the end: nothing else would end its wait."""
        try:
            await self._relay(link, message)
        except RequestError as error:
            _send(link, _failed(message.request_id, error))
        except asyncio.CancelledError:  # the peer wants no more of it, or this host stops
            _send(link, _failed(message.request_id, RequestError("cancelled", "the decode host gave the request up")))
            raise
        except LinkError as error:
            link.close(error.reason)  # see `_send`
        except Exception:
            logging.getLogger(__name__).exception("forwarded request failed by a bug")
            bug = RequestError("internal", "internal error: see the decode host's log", 500)
            _send(link, _failed(message.request_id, bug))

    async def _relay(self, link: Link, message: Generate) -> None:
        try:
            request = _requests.decode(message.payload)
        except msgspec.DecodeError:
            raise RequestError("message", "it cannot read the request: install the same version on both") from None
        # The events of a whole answer come all at once: one by one they were more messages than a link lets wait.
        together, ready = _TOGETHER if request.whole else 1, list[Event]()
        async with contextlib.aclosing(self._generate(request)) as events:
            async for event in events:
                ready.append(event)
                if len(ready) == together:
                    link.send(_tell(message.request_id, ready))
                    ready.clear()
        if ready:
            link.send(_tell(message.request_id, ready))
        link.send(encode(GenerateEnd(request_id=message.request_id)))


def _ask(request_id: bytes, request: GenerationRequest) -> bytes:
    try:
        return encode(Generate(request_id=request_id, payload=msgspec.msgpack.encode(request)))
    except LocalProtocolError:
        sentence = f"the request is larger than the {MAX_PAYLOAD >> 20} MiB that a prefill host forwards"
        raise RequestError("too-large", f"{sentence}: send it to the decode host", 413) from None


def _tell(request_id: bytes, events: list[Event]) -> bytes:
    return encode(GenerateEvent(request_id=request_id, payload=msgspec.msgpack.encode(events)))


def _read(message: GenerateEvent) -> list[Event]:
    try:
        return _events.decode(message.payload)
    except msgspec.DecodeError:
        raise RequestError("message", "the decode host's answer cannot be read: install the same version") from None


def _raise_failure(end: GenerateEnd, peer: str) -> None:
    if end.reason is None:
        return
    try:
        failure = msgspec.msgpack.decode(end.payload, type=_Failure) if end.payload else _Failure(503, None)
    except msgspec.DecodeError:
        failure = _Failure(502, None)
    raise RequestError(end.reason, f"{peer}: {end.message}", failure.status, failure.retry_after_s)


def _failed(request_id: bytes, error: RequestError) -> GenerateEnd:
    payload = msgspec.msgpack.encode(_Failure(error.status, error.retry_after_s))
    return GenerateEnd(request_id=request_id, payload=payload, reason=error.reason, message=str(error)[:1024])


def _send(link: Link, message: GenerateEnd | CancelGenerate) -> None:
    """Or the link ends, if it had not: where it has no room for more the other end would wait, or work, for ever."""
    try:
        link.send(encode(message))
    except LinkError as error:
        link.close(error.reason)
