"""The HTTP front door over real sockets on uvloop: bodies, headers, errors, limits, who may ask (issue 2, X1, U4)."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.daemon.front_door import (
    CHAT,
    COMPLETION,
    FINISHED,
    HELLO,
    STARTED,
    USAGE,
    ScriptedService,
    Step,
    failure,
    on_uvloop,
    open_door,
    run,
)
from zerocopy.config import DaemonConfig
from zerocopy.daemon import http_api
from zerocopy.daemon import openai_schema as schema
from zerocopy.daemon.requests import Delta, Event, Finished, GenerationRequest, Started
from zerocopy.worker.sampling import Sampling

# -- what comes back


@on_uvloop
async def test_a_completion_has_text_usage_timings_and_the_models_name() -> None:
    async with open_door() as door:
        reply = await door.post(COMPLETION)
    assert reply.status == 200
    body = reply.json
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["model"] == "tiny-model"
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == USAGE
    assert body["timings"] == {"prompt_n": 5}
    assert "zc_proof" not in body


@on_uvloop
async def test_of_several_choices_the_headers_tell_of_one_that_fell_back() -> None:
    """A fallback is never silent."""

    class SecondFallsBack(ScriptedService):
        def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
            began = Started("local", None, "link-lost", 5) if self.requests else Started("disaggregated", "p", None, 5)
            self.script = (began, *HELLO[1:])
            return super().generate(request)

    async with open_door(SecondFallsBack()) as door:
        reply = await door.post(COMPLETION | {"n": 3})
    assert len(reply.json["choices"]) == 3
    assert (reply.headers["x-zc-placement"], reply.headers["x-zc-fallback"]) == ("local", "link-lost")


@on_uvloop
async def test_a_chat_answer_is_a_message_of_the_assistant() -> None:
    async with open_door() as door:
        reply = await door.chat(CHAT)
    assert reply.status == 200 and reply.json["object"] == "chat.completion"
    choice = reply.json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello"}
    assert choice["finish_reason"] == "stop"


@on_uvloop
async def test_every_sampling_field_reaches_the_service() -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "stop": ["END", "\n\n"]}
    async with open_door() as door:
        assert (await door.post(COMPLETION | asked)).status == 200
        assert (await door.post({"prompt": "x", "stop": "END", "temperature": None})).status == 200
        first, second = door.service.requests
    assert first.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, seed=7)
    assert first.stop == ("END", "\n\n") and first.max_tokens == 8
    assert second.sampling == Sampling() and second.stop == ("END",) and second.max_tokens is None


@on_uvloop
async def test_a_prompt_is_text_or_one_text_or_token_ids() -> None:
    async with open_door() as door:
        for good in ("text", ["text"], [1, 2, 3]):
            assert (await door.post({"prompt": good})).status == 200
        assert [r.prompt for r in door.service.requests] == ["text", "text", [1, 2, 3]]
        assert not any(r.parse_special for r in door.service.requests)
        for bad in ("", [], [""], ["a", "b"], [1, "a"], [-1], [1 << 31], [1.5], None, {"a": 1}):
            reply = await door.post({"prompt": bad})
            assert reply.status == 400, bad
            assert reply.error["param"] is not None and reply.error["param"].startswith("prompt"), bad


@on_uvloop
async def test_a_chat_is_rendered_with_the_models_template_and_its_control_tokens_are_parsed() -> None:
    async with open_door() as door:
        await door.chat(CHAT | {"max_completion_tokens": 3})
    (request,) = door.service.requests
    assert isinstance(request.prompt, str)
    assert request.prompt.endswith("<|im_start|>user\nSay hello<|im_end|>\n<|im_start|>assistant\n")
    assert request.parse_special and request.max_tokens == 3 and request.literal == ()


@on_uvloop
async def test_control_tokens_in_a_chat_message_are_handed_on_as_text() -> None:
    async with open_door() as door:
        await door.chat({"messages": [{"role": "user", "content": "a<|im_end|>b"}]})
    (request,) = door.service.requests
    assert [request.prompt[start:end] for start, end in request.literal] == ["<|im_end|>"]


@on_uvloop
async def test_the_proof_is_returned_when_it_was_asked_for_and_allowed() -> None:
    key = "ab" * 16
    proven = Finished(reason="length", prompt_tokens=1, completion_tokens=1, timings={}, proof={"logits": "00"})
    async with open_door(ScriptedService([STARTED, proven]), allow_proofs=True) as door:
        reply = await door.post(COMPLETION, x_zc_proof=key)
        assert reply.json["zc_proof"] == {"logits": "00"}
        assert door.service.requests[0].proof_key == key
        for bad in ("ab", "zz" * 16, "a" * 33, "ab" * 33):
            assert (await door.post(COMPLETION, x_zc_proof=bad)).error["code"] == "bad-header"
    async with open_door() as door:
        reply = await door.post(COMPLETION, x_zc_proof=key)
        assert (reply.status, reply.error["code"]) == (403, "proofs-off")
        assert door.service.requests == []


# -- where it ran


@pytest.mark.parametrize("stream", [False, True])
def test_headers_say_where_a_request_ran_and_why_it_fell_back(stream: bool) -> None:
    fallen = Started(placement="local", prefiller="p1", fallback_reason="prefiller-lost", prompt_tokens=5)

    async def check() -> None:
        async with open_door(ScriptedService([fallen, *HELLO[1:]])) as door:
            reply = await door.post(COMPLETION | {"stream": stream})
        assert reply.headers["x-zc-placement"] == "local"
        assert reply.headers["x-zc-prefiller"] == "p1"
        assert reply.headers["x-zc-fallback"] == "prefiller-lost"

    run(check())


@on_uvloop
async def test_what_a_peer_says_of_itself_cannot_break_the_header_that_quotes_it() -> None:
    """It was a 500, or a header of its own, or more than clients read."""
    quoted = Started(
        placement="local",
        prefiller=None,
        fallback_reason="no-prefiller: \r\nx-evil: 1\x00ß" + "y" * 9000,
        prompt_tokens=5,
    )
    async with open_door(ScriptedService([quoted, *HELLO[1:]])) as door:
        reply = await door.post(COMPLETION)
    assert reply.status == 200 and "x-evil" not in reply.headers
    assert reply.headers["x-zc-fallback"].startswith("no-prefiller: ??x-evil: 1??yyy")
    assert len(reply.headers["x-zc-fallback"]) == 1024


@on_uvloop
async def test_a_request_may_choose_its_placement_and_forbid_fallback() -> None:
    async with open_door() as door:
        await door.post(COMPLETION)
        await door.post(COMPLETION, x_zc_placement="disaggregated", x_zc_fallback="deny")
        await door.post(COMPLETION, x_zc_placement="local", x_zc_fallback="allow")
        chosen = [(r.placement, r.allow_fallback) for r in door.service.requests]
        assert chosen == [(None, None), ("disaggregated", False), ("local", True)]
        for header in ("x_zc_placement", "x_zc_fallback"):
            reply = await door.post(COMPLETION, **{header: "maybe"})
            assert (reply.status, reply.error["code"]) == (400, "bad-header")


# -- failures


@on_uvloop
async def test_a_failed_generation_is_never_200() -> None:
    scripts: list[list[Step]] = [[failure()], [STARTED, Delta("a", 1), failure()], [STARTED], [], [FINISHED]]
    for script in scripts:
        async with open_door(ScriptedService(script)) as door:
            reply = await door.post(COMPLETION)
        assert reply.status >= 500, script
        assert reply.error["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_served_request_is_read_to_its_end_and_not_cancelled(stream: bool) -> None:
    """The service tells apart a client that left from one that has its answer."""

    async def check() -> None:
        async with open_door() as door:
            assert (await door.post(COMPLETION | {"stream": stream})).status == 200
            assert door.service.completed == 1

    run(check())


@on_uvloop
async def test_a_refusal_before_the_stream_begins_has_its_own_status() -> None:
    async with open_door(ScriptedService([failure("queue-full", 429, retry_after_s=2.2)])) as door:
        reply = await door.post(COMPLETION | {"stream": True})
    assert (reply.status, reply.error["code"], reply.error["type"]) == (429, "queue-full", "rate_limit_error")
    assert reply.headers["Retry-After"] == "2"
    assert reply.headers["Content-Type"].startswith("application/json")


@on_uvloop
async def test_a_bug_is_500_and_says_nothing_of_itself() -> None:
    for stream in (False, True):
        async with open_door(ScriptedService([STARTED, KeyError("secret prompt")])) as door:
            reply = await door.post(COMPLETION | {"stream": stream})
        assert b"secret" not in reply.body
        assert b'"code":"internal"' in reply.body
        assert reply.status == (200 if stream else 500)


@on_uvloop
async def test_malformed_bodies_are_400_in_openais_shape() -> None:
    bodies = [
        b"",
        b"{",
        b"[]",
        b"1",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b"[" * 200_000,
        b'{"prompt":' * 50_000,
        b"null",
    ]
    async with open_door() as door:
        for body in bodies:
            reply = await door.post(body)
            assert (reply.status, reply.error["code"]) == (400, "bad-json"), body[:20]
            assert reply.error["type"] == "invalid_request_error"
        assert door.service.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "8"), ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", 1 << 64),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("top_p", 1.1), ("top_k", -1),
        ("min_p", 2), ("seed", -1), ("seed", 1 << 63), ("stop", ""), ("stop", ["a"] * 17), ("stop", 1),
        ("stream", "yes"), ("stream_options", True), ("model", 1),
        ("n", 0), ("n", 9), ("n", "1"), ("n", True), ("logprobs", 21), ("logprobs", True), ("presence_penalty", 2.1),
        ("frequency_penalty", -3), ("repeat_penalty", 1e-40), ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}),
        ("stream_options", {"continuous_usage_stats": True}),
    ],
)  # fmt: skip
def test_a_field_with_a_bad_value_is_named(field: str, value: object) -> None:
    async def check() -> None:
        async with open_door() as door:
            reply = await door.post(COMPLETION | {field: value})
        assert reply.status == 400
        assert reply.error["param"].split(".")[0].split("[")[0] == field
        assert field in reply.error["message"]
        assert door.service.requests == []

    run(check())


@on_uvloop
async def test_a_number_out_of_bounds_is_answered_with_both_values() -> None:
    async with open_door() as door:
        reply = await door.post(COMPLETION | {"temperature": 9})
        typed = await door.post(COMPLETION | {"seed": 1.5})
    assert reply.error["message"] == "temperature: Expected `float` <= 2.0, not 9"
    assert typed.error["message"] == "seed: Expected `int | null`, got `float`"


@pytest.mark.parametrize(
    ("path", "name", "other"),
    [
        ("/v1/completions", "repeat_penalty", "repetition_penalty"),
        ("/v1/chat/completions", "max_completion_tokens", "max_tokens"),
    ],
)
def test_of_two_names_of_one_field_neither_is_ignored(path: str, name: str, other: str) -> None:
    async def check() -> None:
        body = {"prompt": "x"} if path == "/v1/completions" else CHAT
        async with open_door() as door:
            reply = await door.post(body | {name: 2, other: 3}, path)
            assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "bad-request", other)
            assert "2" in reply.error["message"] and "3" in reply.error["message"]
            for fine in ({name: 2}, {other: 2}, {name: 2, other: 2}):
                assert (await door.post(body | fine, path)).status == 200
            assert len({(r.max_tokens, r.sampling) for r in door.service.requests}) == 1

    run(check())


@pytest.mark.parametrize(
    ("field", "off", "on"),
    [
        ("best_of", 1, 3), ("echo", False, True), ("suffix", "", "tail"), ("tools", [], [{"type": "function"}]),
        ("tool_choice", "none", "required"), ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("ignore_eos", False, True), ("ignore_eos", None, 1),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name_unless_it_is_off(field: str, off: object, on: object) -> None:
    async def check() -> None:
        async with open_door() as door:
            assert (await door.post(COMPLETION | {field: off})).status == 200
            reply = await door.post(COMPLETION | {field: on})
            assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "unsupported", field)
            assert len(door.service.requests) == 1

    run(check())


@on_uvloop
async def test_harmless_fields_are_ignored_and_unknown_ones_refused_with_the_nearest_name() -> None:
    async with open_door() as door:
        assert (await door.post(COMPLETION | {"user": "u1", "metadata": {"a": "b"}, "store": False})).status == 200
        reply = await door.post({"prompt": "x", "max_token": 4})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "unknown-field", "max_token")
        assert "max_tokens" in reply.error["message"]
        assert (await door.post(COMPLETION | {"messages": []})).status == 400
        assert (await door.post({})).error["param"] is None


# -- who may ask, and how much


@on_uvloop
async def test_with_an_api_key_only_health_is_open() -> None:
    async with open_door(api_key="s3cret-key") as door:
        assert (await door.get("/health")).status == 200
        assert (await door.get("/ready")).status == 200
        for path in ("/v1/models", "/v1/status", "/metrics"):
            reply = await door.get(path)
            assert (reply.status, reply.error["code"]) == (401, "invalid-api-key")
            assert reply.headers["WWW-Authenticate"] == "Bearer"
        for wrong in ("", "Bearer", "Bearer s3cret-keY", "Bearer s3cret-key2", "Basic s3cret-key", "s3cret-key"):
            assert (await door.post(COMPLETION, Authorization=wrong)).status == 401, wrong
        assert door.service.requests == []
        assert (await door.post(COMPLETION, Authorization="Bearer s3cret-key")).status == 200


@on_uvloop
async def test_each_key_stands_for_its_tenant() -> None:
    async with open_door(api_key="plain", api_keys={"ann": "key-of-ann", "bob": "key-of-bob"}) as door:
        for key in ("key-of-bob", "plain", "key-of-ann"):
            assert (await door.post(COMPLETION, Authorization=f"Bearer {key}")).status == 200
        assert [request.tenant for request in door.service.requests] == ["bob", "", "ann"]
        assert (await door.post(COMPLETION, Authorization="Bearer ann")).status == 401


@on_uvloop
async def test_an_api_key_of_arbitrary_bytes_is_refused_not_a_crash() -> None:
    async with open_door(api_key="s3cret-key") as door:
        reader, writer = await door.connect()
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\xc3\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()


@on_uvloop
async def test_a_web_page_cannot_drive_a_daemon_on_loopback() -> None:
    async with open_door() as door:
        reply = await door.post(COMPLETION, Origin="https://evil.example")
        assert (reply.status, reply.error["code"]) == (403, "cross-origin")
        assert door.service.requests == []
        assert not any(name.lower().startswith("access-control") for name in reply.headers)


@on_uvloop
async def test_a_body_over_the_limit_is_refused() -> None:
    async with open_door() as door:
        reply = await door.post(json.dumps({"prompt": "x" * http_api.MAX_BODY_BYTES}).encode())
        assert (reply.status, reply.error["code"]) == (413, "body-too-large")
        assert (await door.post(COMPLETION)).status == 200


@on_uvloop
async def test_bodies_of_all_requests_together_are_bounded_and_the_rest_told_to_come_back() -> None:
    """Q2: before a byte is read, and until the request is answered."""
    async with open_door() as door:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {http_api.MAX_BODY_BYTES - 100}\r\n\r\n"
        writers = [(await door.connect())[1] for _ in range(4)]
        for writer in writers:
            writer.write(head.encode() + b"{")
        while (reply := await door.post({"prompt": "x" * 1000})).status == 200:
            await asyncio.sleep(0.01)
        assert (reply.status, reply.error["code"]) == (503, "queue-full")
        assert "Retry-After" in reply.headers
        for writer in writers:
            writer.close()
        while (await door.post(COMPLETION)).status != 200:
            await asyncio.sleep(0.01)
        assert (await door.post(COMPLETION)).status == 200


@on_uvloop
async def test_a_prompt_of_a_megabyte_and_unicode_passes_unchanged() -> None:
    prompt = "häßlich 😀 \u0000 漢字 " * 60_000
    async with open_door() as door:
        assert (await door.post({"prompt": prompt})).status == 200
        assert door.service.requests[0].prompt == prompt


@pytest.mark.parametrize("body", [b"not compressed", gzip.compress(b"{}")])
def test_a_compressed_body_is_refused_unread(caplog: pytest.LogCaptureFixture, body: bytes) -> None:
    """It could be a thousand times as large as it is counted, and one that cannot be read is not this host's fault."""

    async def check() -> None:
        async with open_door() as door:
            reply = await door.post(body, Content_Encoding="gzip")
            assert (reply.status, reply.error["code"]) == (415, "content-encoding")

    run(check())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x00\x01", b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -2\r\n\r\n"])
def test_what_is_not_http_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture, sent: bytes) -> None:
    """Which anybody who reaches the port could fill."""

    async def check() -> None:
        async with open_door() as door:
            reader, writer = await door.connect()
            writer.write(sent)
            assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.0 400 ")
            writer.close()

    run(check())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_that_never_arrives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "BODY_S", 0.05)

    async def check() -> None:
        async with open_door() as door:
            reader, writer = await door.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            writer.close()

    run(check())


# -- the other paths


@on_uvloop
async def test_live_health_and_ready_tell_daemon_engine_and_service_apart() -> None:
    """Alive and able are two things: a host that drains is well and takes no request."""
    paths = ("/live", "/health", "/ready")
    async with open_door() as door:
        for engine, not_serving, codes in [
            (None, None, [200, 200, 200]),
            (None, "draining", [200, 200, 503]),
            ("it restarts", "it restarts", [200, 503, 503]),
        ]:
            door.service.engine, door.service.not_serving = engine, not_serving
            replies = [await door.get(path) for path in paths]
            assert [reply.status for reply in replies] == codes
            assert [reply.json["status"] for reply in replies] == ["ok" if c == 200 else "unavailable" for c in codes]
            health = {"engine": engine or "ready", "ready": not_serving is None, "reason": not_serving}
            assert health.items() <= replies[1].json.items()
            assert replies[2].json.get("reason") == not_serving


@on_uvloop
async def test_models_status_and_metrics() -> None:
    async with open_door() as door:
        assert [m["id"] for m in (await door.get("/v1/models")).json["data"]] == ["tiny-model"]
        assert (await door.get("/v1/models/tiny-model")).json["id"] == "tiny-model"
        assert (await door.get("/v1/models/other")).error["code"] == "unknown-model"
        status = (await door.get("/v1/status")).json
        assert status == {"serving": True, "reason": None, "requests": {"active": 1}}
        metrics = await door.get("/metrics")
        assert metrics.headers["Server"] == "zc-handoff"
        assert metrics.body == b"zc_serving 1.0\n"
        assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")


@on_uvloop
async def test_before_the_engine_is_up_a_chat_is_503_and_no_model_is_listed() -> None:
    service = ScriptedService()
    service.name = service.template = None
    service.not_serving = "worker-starting"
    async with open_door(service) as door:
        reply = await door.chat(CHAT)
        assert (reply.status, reply.error["code"]) == (503, "not-serving")
        assert "worker-starting" in reply.error["message"]
        assert (await door.get("/v1/models")).json["data"] == []


@on_uvloop
async def test_unknown_paths_and_methods_answer_in_openais_shape() -> None:
    async with open_door() as door:
        assert ((await door.get("/")).status, (await door.get("/")).error["code"]) == (404, "unknown-path")
        reply = await door.get("/v1/completions")
        assert (reply.status, reply.error["code"], reply.headers["Allow"]) == (405, "method-not-allowed", "POST")
        assert "use POST" in reply.error["message"]


@on_uvloop
async def test_many_requests_at_once_get_their_own_answers() -> None:
    async with open_door() as door:
        replies = await asyncio.gather(*(door.post(COMPLETION | {"stream": i % 2 == 0}) for i in range(20)))
        assert all(reply.status == 200 for reply in replies)
        assert len({json.loads(r.body)["id"] if i % 2 else r.events[0]["id"] for i, r in enumerate(replies)}) == 20


@on_uvloop
async def test_the_server_binds_what_it_was_told_and_says_where() -> None:
    async with open_door() as door:
        assert door.address.startswith("127.0.0.1:") and not door.address.endswith(":0")
        with pytest.raises(OSError):
            await http_api.start(http_api.make_app(door.service, DaemonConfig()), door.address)


def test_the_documentation_lists_every_field_that_is_served_ignored_or_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    served = {*schema.CompletionBody.__struct_fields__, *schema.ChatBody.__struct_fields__}
    listed = set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", text))
    assert served | schema.HARMLESS | set(schema.NEUTRAL) <= listed
