"""What the worker needs from an engine, and nothing more.

A `Runtime` is one loaded model. A `Pool` is one engine context of it (plus its MTP context, when the model has an
MTP head) with a fixed number of lanes; a `Lane` holds at most one live sequence. Everything runs on the worker's one
engine thread. State is read from and written to memoryviews over shared memory, in one engine call per page: no
`bytes` object ever holds state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from zerocopy.handoff.components import Component, Identity, StateSchema

Logits = NDArray[np.float32]


class EngineError(Exception):
    """The engine refused, or a state it was given is not what it claims. `reason` is a stable slug."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineFacts(msgspec.Struct, frozen=True):
    """What a host must know of its engine; crosses the worker socket once, at start."""

    identity: Identity
    schema: StateSchema
    model_name: str
    n_ctx: int  # tokens one sequence may hold
    sequences: int  # lanes of one pool
    kv_tokens: int  # tokens all sequences of one pool may hold together
    exporting_lanes: int  # lanes of one pool that may be in use while pages are exported from any of them
    n_vocab: int
    chunk_tokens: int  # prompt tokens per engine call; equal on both hosts for bit-equality
    page_tokens: int  # tokens that make a page; divides chunk_tokens
    page_bytes: int  # the most of a page of what has gathered; 0: no page has more than `page_tokens`
    export_before_next_chunk: bool  # sliding-window models overwrite old cells: export may not lag behind
    chat_template: str | None
    bos_token: str
    eos_token: str
    batch_invariant: bool  # every bit of a sequence is what it would be if it were alone
    mtp: str  # "off", or "tracked" when the MTP context follows the target
    longest_token: int = 256  # bytes of text that one token stands for, at most
    control_tokens: tuple[str, ...] = ()  # texts that are one token where control tokens are parsed, and only there


class EngineCounters(msgspec.Struct):
    """From the engine's own performance counters since `reset_counters`."""

    prompt_tokens: int  # tokens evaluated in batches of more than one
    single_tokens: int  # tokens evaluated one at a time


class Positions(msgspec.Struct):
    """Last filled position per context (-1 when empty or, for hybrids, before the snapshot has landed)."""

    target: int
    mtp: int | None


class Row(msgspec.Struct, frozen=True):
    """What one lane has evaluated as its part of a batch: tokens at start, start+1, ... (several tokens are a slice of
    a prompt, or later a draft to verify)."""

    lane: Lane
    tokens: Sequence[int]
    start: int


class Output(msgspec.Struct, frozen=True):
    """F32[n_vocab] each, of a row's last token; valid until the pool's next call. Nobody reads those of a slice of a
    prompt, whose last token is always a row of its own: an engine need not make them."""

    logits: Logits
    mtp_logits: Logits | None


class Lane(Protocol):
    """One live sequence. `clear` before a new one."""

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        """Evaluate one chunk of at most `chunk_tokens` tokens at positions start, start+1, ... ; MTP follows."""

    def evaluate(self, token: int, position: int) -> Logits:
        """Evaluate one token; returns F32[n_vocab], valid until the next call on this lane."""

    def mtp_logits(self) -> Logits | None:
        """MTP head's logits of the last `evaluate` or `probe`; None without MTP."""

    def probe(self, token: int, position: int) -> Logits:
        """`evaluate` on a copy of the sequence: live state stays byte for byte what it was."""

    def export_page(self, component: Component, tokens: tuple[int, int], into: memoryview) -> None:
        """Write one page of ATTENTION_KV or MTP_KV, all layers; `into` has exactly the schema's size."""

    def export_snapshot(self, into: memoryview) -> None:
        """Write the recurrent snapshot (prefix, convolution rows, recurrent rows) of the live sequence."""

    def export_hidden(self, into: memoryview) -> None:
        """Write the pending MTP hidden row, F32[n_embd]."""

    def import_page(self, component: Component, tokens: tuple[int, int], payload: memoryview) -> None:
        """Validate every engine header in `payload`, then import. Pages of a component come in token order."""

    def import_snapshot(self, blob: memoryview, n_tokens: int) -> None:
        """Write the prefix for `n_tokens` tokens into `blob`, validate the rest, import. After all pages."""

    def import_hidden(self, row: memoryview) -> None:
        """Take over the pending MTP hidden row."""

    def positions(self) -> Positions: ...

    def state_digests(self, key: bytes) -> dict[str, str]:
        """Keyed BLAKE2b of the re-exported state per component label: equal iff the bytes are. For proofs on
        request only; `key` is fresh per request, so digests never link two requests (X4)."""

    def clear(self) -> None:
        """Drop the sequence and free its cells; they are overwritten when no lane of the pool holds any state."""


class Pool(Protocol):
    """One engine context. Lanes are numbered 0 to `EngineFacts.sequences` - 1."""

    def lane(self, number: int) -> Lane: ...

    def evaluate(self, rows: Sequence[Row]) -> list[Output | EngineError]:
        """One engine call for all rows, at most one row a lane, at most `chunk_tokens` tokens beside one for every
        lane. A row whose lane does not stand at its start is not in it: it has its error in place of its output.
        Raises EngineError when the engine fails: then every lane of the batch must be cleared."""

    def reset_counters(self) -> None: ...

    def counters(self) -> EngineCounters: ...


class Runtime(Protocol):
    facts: EngineFacts

    def open_pool(self) -> Pool: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def piece(self, token: int) -> bytes:
        """The token's bytes as text output; may be part of a UTF-8 sequence, empty for control tokens."""

    def is_end(self, token: int) -> bool:
        """End of generation."""

    def close(self) -> None: ...
