"""Renders a chat with the model's own template, the way the templates were written to be rendered.

The environment is that of Hugging Face's `apply_chat_template`, which GGUF files quote: sandboxed and immutable,
block whitespace trimmed, loop controls, `raise_exception`, `strftime_now`, an unescaped `tojson`, `{% generation %}` as
a plain block. Owns a small cache of compiled templates. The template is the operator's (it came with the model);
messages are the client's and only ever data.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NoReturn

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zerocopy.daemon.requests import RequestError


class TextPart(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """The one kind of content part a text model can read."""

    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`developer` is what OpenAI renamed `system` to; templates know only the old word."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def as_template_value(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        value = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return value if self.name is None else value | {"name": self.name}


def render(template: tuple[str, str, str] | None, messages: Sequence[ChatMessage]) -> str:
    """Prompt text up to where the assistant's answer begins. `template` is (source, bos text, eos text)."""
    if template is None:
        raise RequestError("no-chat-template", "this model has no chat template: use /v1/completions", 400)
    source, bos, eos = template
    try:
        return _compiled(source).render(
            messages=[m.as_template_value() for m in messages], bos_token=bos, eos_token=eos, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        # Typically the template's own `raise_exception`: roles in an order it does not take.
        raise RequestError(
            "chat-template", f"the model's chat template refused these messages: {error}", 400
        ) from error


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
