"""The bodies of one answer in OpenAI's shapes, whole or in chunks, of one or several choices. No HTTP here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from zerocopy.daemon.requests import Finished
from zerocopy.worker.sampling import TokenLogprob


class Choice(msgspec.Struct):
    """One choice as it grows."""

    text: str = ""
    logprobs: list[TokenLogprob] = []
    finished: Finished | None = None


class Answer:
    """`chat` picks the endpoint's shape; `return_tokens` adds each choice's token ids."""

    def __init__(self, model: str, *, chat: bool, with_usage: bool = False, return_tokens: bool = False) -> None:
        self._chat = chat
        self._with_usage = with_usage
        self._return_tokens = return_tokens
        self._fixed: dict[str, Any] = {"created": int(time.time()), "model": model}
        self._fixed["id"] = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Of finished choices. Timings and proof are the first's."""
        kind = "chat.completion" if self._chat else "text_completion"
        body = self._body(kind, [self._whole_choice(index, choice) for index, choice in enumerate(choices)])
        done = [choice.finished for choice in choices if choice.finished is not None]
        return body | {"usage": usage(done)} | _extras(done[0])

    def opening(self, index: int) -> dict[str, Any] | None:
        """Chat streams begin with the role; completion streams with text."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) if self._chat else None

    def piece(self, index: int, text: str, logprob: TokenLogprob | None, offset: int) -> dict[str, Any]:
        """`offset`: characters of this choice's tokens before the piece."""
        content: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._chunk(index, content, logprobs=self._logprobs([logprob] if logprob else [], offset))

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in the JSON of a piece without logprobs: the same for all of a choice,
        and most of what a token would cost to encode."""
        key = b'"content":' if self._chat else b'"text":'  # no value can hold it: quotes in values are escaped
        before, after = msgspec.json.encode(self.piece(index, "", None, 0)).split(key + b'""')
        return before + key, after

    def closing(self, index: int, finished: Finished) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._chunk(index, content | self._tokens(finished), finished.reason) | _extras(finished)

    def usage(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """The extra last chunk of `stream_options.include_usage`."""
        return self._body(self._chunk_kind(), []) | {"usage": usage(finished)}

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.finished is not None
        text = choice.text
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(choice.logprobs, 0),
            "finish_reason": choice.finished.reason,
            **self._tokens(choice.finished),
        }

    def _chunk(
        self, index: int, content: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return self._body(self._chunk_kind(), [choice]) | ({"usage": None} if self._with_usage else {})

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._fixed, "object": kind, "choices": choices}

    def _tokens(self, finished: Finished) -> dict[str, Any]:
        return {"tokens": list(finished.tokens)} if self._return_tokens else {}

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not tokens:
            return None
        if self._chat:
            return {"content": [_chat_logprob(token) for token in tokens], "refusal": None}
        texts = [shown(token.text) for token in tokens]
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset))
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{shown(text): value for text, value in token.top} for token in tokens],
            "text_offset": offsets,
        }


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [{"token": shown(text), "logprob": value, "bytes": list(text)} for text, value in token.top]
    return {"token": shown(token.text), "logprob": token.logprob, "bytes": list(token.text), "top_logprobs": top}


def shown(text: bytes) -> str:
    """A token by itself: what is not a whole character is told by marks of replacement."""
    return text.decode("utf-8", "replace")


def usage(finished: Sequence[Finished]) -> dict[str, Any]:
    """Of all choices together; their prompt is one. Nothing of a prompt is cached between requests."""
    prompt, completion = finished[0].prompt_tokens, sum(one.completion_tokens for one in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _extras(finished: Finished) -> dict[str, Any]:
    proof = {} if finished.proof is None else {"zc_proof": finished.proof}
    return {"timings": finished.timings} | proof
