"""The OpenAI request bodies that this server speaks, and what it refuses. No HTTP here.

A field of a request is either served, harmless and ignored (`HARMLESS`), accepted only at the value that means "off"
(`NEUTRAL`), or refused by name: nothing that would change the answer is ever ignored silently. Bounds are in the types.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec

from zerocopy.daemon.chat import ChatMessage
from zerocopy.daemon.requests import RequestError
from zerocopy.worker.sampling import MAX_LOGPROBS, Penalty, RepeatPenalty, Sampling

# They do not change the answer: bookkeeping of the client, or hints to a service with more than one model.
HARMLESS: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_prompt", "verbosity"}
)

# Accepted at these values only, where they mean "off".
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to call
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "grammar": ("",),
    "json_schema": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "ignore_eos": (False,),
    "typical_p": (1,),
    "mirostat": (0,),
}

MAX_CHOICES: Final = 8
MAX_MESSAGES: Final = 8192  # rendered in 30 ms, on the event loop; 16 MiB of empty ones took 2 s

Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Alternatives = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
BiasValue = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
StopList = Annotated[list[StopText], msgspec.Meta(max_length=16)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """Served by both endpoints. `model` is not checked: a daemon serves one, and every answer names it."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: StopText | StopList | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: RepeatPenalty | None = None
    repetition_penalty: RepeatPenalty | None = None  # its other name
    logit_bias: Annotated[dict[TokenId, BiasValue], msgspec.Meta(max_length=1024)] | None = None
    return_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def sampling(self) -> Sampling:
        """Greedy unless a temperature is given: the same prompt then has the same answer on every host."""
        neutral = Sampling()
        return Sampling(
            temperature=neutral.temperature if self.temperature is None else self.temperature,
            top_k=neutral.top_k if self.top_k is None else self.top_k,
            top_p=neutral.top_p if self.top_p is None else self.top_p,
            min_p=neutral.min_p if self.min_p is None else self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repeat_penalty=self._only_one("repeat_penalty", "repetition_penalty") or 1.0,
            logit_bias=tuple((self.logit_bias or {}).items()),
            logprobs=self.alternatives(),
        )

    def alternatives(self) -> int | None:
        """Likely tokens told beside each token; None: no probabilities at all."""
        raise NotImplementedError

    def most_tokens(self) -> int | None:
        """Of the answer; None where the client names no limit."""
        return self.max_tokens

    def _only_one(self, name: str, other: str) -> Any:
        """The value of a field that has two names. Neither is ignored: with both, they must agree."""
        first, second = getattr(self, name), getattr(self, other)
        if first is not None and second is not None and first != second:
            raise bad_field(other, f"{other} is {second}, {name} is {first}: give one of them")
        return second if first is None else first

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(_Body, frozen=True, kw_only=True):
    """POST /v1/completions. One prompt: text, a list of one text, or a list of token ids."""

    prompt: str | list[TokenId | str]
    logprobs: Alternatives | bool | None = None

    def alternatives(self) -> int | None:
        if self.logprobs is True:
            raise bad_field("logprobs", "logprobs is true: completions take the number of alternatives")
        return None if self.logprobs is False else self.logprobs

    def single_prompt(self) -> str | list[int]:
        if isinstance(self.prompt, str):
            prompt: str | list[int] = self.prompt
        elif len(self.prompt) == 1 and isinstance(self.prompt[0], str):
            prompt = self.prompt[0]
        else:
            prompt = [token for token in self.prompt if isinstance(token, int)]
            if len(prompt) != len(self.prompt):
                raise bad_field("prompt", "several prompts in one request are not supported: send one request for each")
        if not prompt:
            raise bad_field("prompt", "prompt is empty: it needs at least one token")
        return prompt


class ChatBody(_Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    def most_tokens(self) -> int | None:
        most: int | None = self._only_one("max_completion_tokens", "max_tokens")
        return most

    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None


class FieldError(RequestError):
    """400 with the field named."""

    def __init__(self, reason: str, message: str, field: str | None) -> None:
        super().__init__(reason, message, 400)
        self.field = field


def bad_field(field: str, message: str) -> FieldError:
    return FieldError("bad-request", message, field)


Body = TypeVar("Body", bound=_Body)


def parse(data: bytes, kind: type[Body]) -> Body:
    """A request body, checked. Raises FieldError."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise FieldError("bad-json", f"the body is not a JSON object: {error}", None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FieldError("bad-json", f"the body is not JSON: {error}", None) from error
    except RecursionError as error:
        raise FieldError("bad-json", "the body is nested too deeply", None) from error
    served = {name: value for name, value in fields.items() if _is_served(name, value, kind)}
    try:
        return msgspec.convert(served, kind, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).replace(" - at `key` in `$", " - at `$").partition(" - at `$")
        field = path.strip(".`") or None
        value = served.get(field) if field else None
        # Numbers out of range only: other values may be long, and of a wrong type the message says which.
        given = f", not {value}" if isinstance(value, int | float) and "got" not in message else ""
        raise bad_field(field or "", f"{field}: {message}{given}" if field else message) from error


def _is_served(name: str, value: Any, kind: type[_Body]) -> bool:
    """False for what may be dropped; raises for what may not."""
    if name in kind.__struct_fields__:
        return True
    if name in HARMLESS:
        return False
    if name not in NEUTRAL:
        match = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
        hint = f": did you mean `{match[0]}`?" if match else ""
        raise FieldError("unknown-field", f"unknown field `{name}`{hint}", name)
    # Type and value: True equals 1 in Python, but `"n": true` is a mistake.
    neutral = (v for v in NEUTRAL[name] if isinstance(value, bool) == isinstance(v, bool))
    if value is not None and value not in neutral:
        raise FieldError("unsupported", f"`{name}` is not supported here: leave it out", name)
    return False


_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error shape; `code` is the stable reason."""
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    field = error.field if isinstance(error, FieldError) else None
    return {"error": {"message": str(error), "type": kind, "code": error.reason, "param": field or None}}
