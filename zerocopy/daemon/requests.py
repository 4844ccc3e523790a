"""What the HTTP front door asks of the daemon, and what it gets back. No HTTP here and no engine.

`GenerationService` is implemented by the daemon core; the front door only ever talks to it. Errors are
`RequestError`: a stable `reason`, the HTTP status that fits, and a sentence for the client.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from zerocopy.worker.sampling import Sampling, TokenLogprob

PlacementMode = Literal["local", "disaggregated"]


class RequestError(Exception):
    """A request that got no (full) answer, and why."""

    def __init__(self, reason: str, message: str, status: int = 503, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status
        self.retry_after_s = retry_after_s


class GenerationRequest(msgspec.Struct, frozen=True):
    """One prompt, already rendered. `prompt` is text, or token ids when the client sent ids. Every bound is checked
    again where a request comes from a peer."""

    prompt: str | list[Annotated[int, Meta(ge=0, lt=1 << 31)]]
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None  # None: as many as a full reply needs, and fit
    sampling: Sampling = Sampling()
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=16)] = ()
    parse_special: bool = False  # chat templates write control tokens as text; user text may not
    # Parts of `prompt`, in order, that a client wrote and that read like control tokens: they stay text.
    literal: tuple[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]], ...] = ()
    placement: PlacementMode | None = None  # None: the daemon's default
    allow_fallback: bool | None = None  # None: the daemon's default
    # 16 to 32 bytes in hex; only where the daemon was started with --allow-proofs
    proof_key: Annotated[str, Meta(pattern=r"^([0-9a-fA-F]{2}){16,32}$")] | None = None
    return_tokens: bool = False  # also the ids
    whole: bool = False  # nothing reaches the client before the last event: until then it can be made again
    # From the API key: what one tenant may use is bounded, and its state moves for nobody else.
    tenant: Annotated[str, Meta(max_length=64)] = ""


class ChatTemplate(msgspec.Struct, frozen=True):
    """What came with the model. `control_tokens` are the texts that nobody but the template may write."""

    source: str
    bos: str
    eos: str
    control_tokens: tuple[str, ...] = ()


class Started(msgspec.Struct, frozen=True, tag="started"):
    """First event: the first token exists. `placement` is where it really ran."""

    placement: PlacementMode
    prefiller: str | None
    fallback_reason: str | None
    prompt_tokens: int


class Delta(msgspec.Struct, frozen=True, tag="delta"):
    """Text to append (complete UTF-8, stop strings already held back) after `tokens` more tokens."""

    text: str
    tokens: int
    logprob: TokenLogprob | None = None


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Last event. `timings` is JSON-ready: engine counters, phases of the handoff, rates; `proof` on request."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    timings: dict[str, object]
    proof: dict[str, object] | None = None
    tokens: tuple[int, ...] = ()


Event = Started | Delta | Finished


class ServiceStatus(msgspec.Struct, frozen=True):
    """For /health, /ready and /v1/status: `reason` says why not when `serving` is False, `engine` why there is none."""

    serving: bool
    reason: str | None
    detail: dict[str, object]
    engine: str | None = None


class GenerationService(Protocol):
    """Implemented by `zerocopy.daemon.core`."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Started, Delta..., Finished. Raises RequestError, also after Started. Closing the iterator cancels."""

    def status(self) -> ServiceStatus: ...

    def model_name(self) -> str | None:
        """None until the engine is up."""

    def chat_template(self) -> ChatTemplate | None:
        """None when the model has none or is not up."""

    def metrics_text(self) -> bytes:
        """Prometheus exposition."""
