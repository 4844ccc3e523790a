"""A served front door over a scripted service, for the HTTP tests. The service is the only thing that is not real."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from zerocopy.config import DaemonConfig
from zerocopy.daemon import http_api
from zerocopy.daemon.requests import (
    ChatTemplate,
    Delta,
    Event,
    Finished,
    GenerationRequest,
    RequestError,
    ServiceStatus,
    Started,
)

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # SmolLM2's, from its GGUF

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

STARTED = Started(placement="local", prefiller=None, fallback_reason=None, prompt_tokens=5)
FINISHED = Finished(reason="stop", prompt_tokens=5, completion_tokens=2, timings={"prompt_n": 5})
USAGE = {
    "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
HELLO = (STARTED, Delta("Hel", 1), Delta("lo", 1), FINISHED)
COMPLETION = {"prompt": "Say hello", "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "Say hello"}]}

Step = Event | Exception | Callable[[], Awaitable[None]]


class ScriptedService:
    """Plays `script`: events are yielded, exceptions raised, callables awaited. Remembers requests and closings."""

    def __init__(self, script: Iterable[Step] = HELLO) -> None:
        self.script = tuple(script)
        self.requests: list[GenerationRequest] = []
        self.closed = asyncio.Event()
        self.completed = 0
        self.not_serving: str | None = None
        self.engine: str | None = None
        self.name: str | None = "tiny-model"
        self.template: ChatTemplate | None = ChatTemplate(CHATML, "<|im_start|>", "<|im_end|>", CONTROL)

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
            self.completed += 1
        finally:
            self.closed.set()

    def status(self) -> ServiceStatus:
        return ServiceStatus(self.not_serving is None, self.not_serving, {"requests": {"active": 1}}, self.engine)

    def model_name(self) -> str | None:
        return self.name

    def chat_template(self) -> ChatTemplate | None:
        return self.template

    def metrics_text(self) -> bytes:
        return b"zc_serving 1.0\n"


class Door:
    """One running server and a client for it."""

    def __init__(self, service: ScriptedService, address: str, client: aiohttp.ClientSession) -> None:
        self.service, self.address, self._client = service, address, client

    async def post(self, body: object, path: str = "/v1/completions", **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._client.post(f"http://{self.address}{path}", data=data, headers=names) as response:
            return Reply(response.status, dict(response.headers), await response.read())

    async def chat(self, body: object, **headers: str) -> Reply:
        return await self.post(body, "/v1/chat/completions", **headers)

    async def get(self, path: str, **headers: str) -> Reply:
        async with self._client.get(f"http://{self.address}{path}", headers=headers) as response:
            return Reply(response.status, dict(response.headers), await response.read())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def send_raw(
        self, body: object, path: str = "/v1/completions"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A POST on a socket of its own that the test can cut."""
        reader, writer = await self.connect()
        data = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return reader, writer


class Reply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        assert set(self.json) == {"error"}, self.body
        assert set(self.json["error"]) == {"message", "type", "code", "param"}
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Parsed as an SSE client would; the end mark stays text."""
        *lines, last = self.body.decode().split("\n\n")
        assert last == ""
        assert all(line.startswith("data: ") and "\n" not in line for line in lines), lines
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


@contextlib.asynccontextmanager
async def open_door(service: ScriptedService | None = None, **settings: Any) -> AsyncIterator[Door]:
    service = service or ScriptedService()
    config = DaemonConfig(model=Path("tiny.gguf"), **settings)
    runner, address = await http_api.start(http_api.make_app(service, config), "127.0.0.1:0")
    try:
        async with aiohttp.ClientSession() as client:
            yield Door(service, address, client)
    finally:
        await runner.cleanup()


def run(test: Coroutine[Any, Any, None]) -> None:
    """On uvloop, as in the daemon."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 100))


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes an ordinary test of a coroutine."""

    @wraps(test)
    def inner(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return inner


def failure(reason: str = "prefiller-lost", status: int = 503, retry_after_s: float | None = None) -> RequestError:
    return RequestError(reason, f"something happened: {reason}", status, retry_after_s)
