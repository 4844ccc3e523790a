"""What /v1/chat/completions takes and refuses, over HTTP."""

from __future__ import annotations

import pytest

from tests.daemon.front_door import CHAT, ScriptedService, on_uvloop, open_door, run
from zerocopy.daemon.requests import ChatTemplate


@on_uvloop
async def test_text_parts_names_and_all_roles_of_text_chats_are_taken() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}],
            "name": "ann",
        },
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "x"},
    ]
    async with open_door() as door:
        assert (await door.chat({"messages": messages})).status == 200
        prompt = door.service.requests[0].prompt
    assert isinstance(prompt, str) and "system\nBe brief." in prompt and "user\nSay hello<" in prompt


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "hi", [1], [{}], [{"role": "user"}], [{"role": "pope", "content": "x"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": []}], [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": ""}] * 8193,
    ],
)  # fmt: skip
def test_messages_that_cannot_be_read_are_400_with_the_field_named(messages: object) -> None:
    async def check() -> None:
        async with open_door() as door:
            reply = await door.chat({"messages": messages})
        assert reply.status == 400
        assert reply.error["param"].startswith("messages")
        assert door.service.requests == []

    run(check())


@on_uvloop
async def test_a_model_without_a_template_refuses_chats_and_serves_completions() -> None:
    service = ScriptedService()
    service.template = None
    async with open_door(service) as door:
        assert (await door.chat(CHAT)).error["code"] == "no-chat-template"
        assert (await door.post({"prompt": "x"})).status == 200


@on_uvloop
async def test_a_chat_that_the_template_refuses_is_400_with_its_words() -> None:
    service = ScriptedService()
    service.template = ChatTemplate("{{ raise_exception('no system role here') }}", "", "")
    async with open_door(service) as door:
        reply = await door.chat(CHAT)
    assert (reply.status, reply.error["code"]) == (400, "chat-template")
    assert "no system role here" in reply.error["message"]
