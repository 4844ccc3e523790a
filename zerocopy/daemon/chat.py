"""Renders a chat with the model's own template, the way the templates were written to be rendered.

The environment is that of Hugging Face's `apply_chat_template`, which GGUF files quote: sandboxed and immutable,
block whitespace trimmed, loop controls, `raise_exception`, `strftime_now`, an unescaped `tojson`, `{% generation %}` as
a plain block. Owns a small cache of compiled templates. The template is the operator's (it came with the model);
messages are the client's and only ever data: they are rendered with a mark inside everything in them that reads like a
control token, and where a mark comes out the text stays text. Templates may cut, trim and compare messages as they do.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, Literal, NoReturn

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zerocopy.daemon.requests import ChatTemplate, RequestError

# Unicode's noncharacters: no text is made of them, so one of them is free to be the mark.
_MARKS: Final = tuple(map(chr, range(0xFDD0, 0xFDF0)))

Span = tuple[int, int]  # of characters


class TextPart(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """The one kind of content part a text model can read."""

    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`developer` is what OpenAI renamed `system` to; templates know only the old word."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def written(self) -> dict[str, str]:
        """What the client was free to write."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"content": text} if self.name is None else {"content": text, "name": self.name}


def render(template: ChatTemplate | None, messages: Sequence[ChatMessage]) -> tuple[str, tuple[Span, ...]]:
    """Prompt text up to where the assistant's answer begins, and the parts of it that read like control tokens and are
    the client's."""
    if template is None:
        raise RequestError("no-chat-template", "this model has no chat template: use /v1/completions", 400)
    written = [message.written() for message in messages]
    mark = _unused([template.source, *(text for fields in written for text in fields.values())])
    control = _Control(template.control_tokens, mark)
    values = [
        {"role": "system" if message.role == "developer" else message.role}
        | {name: control.marked(text) for name, text in fields.items()}
        for message, fields in zip(messages, written, strict=True)
    ]
    try:
        rendered = _compiled(template.source).render(
            messages=values, bos_token=template.bos, eos_token=template.eos, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        # Typically the template's own `raise_exception`: roles in an order it does not take.
        raise RequestError(
            "chat-template", f"the model's chat template refused these messages: {error}", 400
        ) from error
    return control.unmarked(rendered)


def _unused(texts: Sequence[str]) -> str:
    """A character that stands in none of them."""
    for mark in _MARKS:
        if not any(mark in text for text in texts):
            return mark
    raise RequestError("chat-template", "the messages contain every noncharacter of Unicode: leave one out", 400)


class _Control:
    """Marks control tokens in what clients wrote: behind the first character, so that nobody parses them."""

    def __init__(self, tokens: tuple[str, ...], mark: str) -> None:
        self._mark = mark
        self._whole, self._whole_or_begun = _patterns(tokens)

    def marked(self, text: str) -> str:
        return self._whole_or_begun.sub(lambda found: found[0][0] + self._mark + found[0][1:], text)

    def unmarked(self, rendered: str) -> tuple[str, tuple[Span, ...]]:
        """The text without marks, and where whole control tokens were marked; neighbours count as one."""
        parts = rendered.split(self._mark)
        text, spans = "".join(parts), list[Span]()
        for behind_first in accumulate(map(len, parts[:-1])):
            if found := self._whole.match(text, behind_first - 1):
                start = spans.pop()[0] if spans and spans[-1][1] >= found.start() else found.start()
                spans.append((start, found.end()))
        return text, tuple(spans)


@lru_cache(maxsize=4)
def _patterns(tokens: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Any of them, the longest that fits; and that, or the beginning of one at the very end of a text: the next message
    may go on with the rest."""
    begun = {token[:n] for token in tokens for n in range(1, len(token))}
    whole, part = ("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) for texts in (tokens, begun))
    nothing = "(?!)"
    return re.compile(whole or nothing), re.compile(f"{whole or nothing}|(?:{part or nothing})\\Z")


@lru_cache(maxsize=4)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


class _GenerationBlock(Extension):
    """Training code marks the assistant's tokens with it; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
