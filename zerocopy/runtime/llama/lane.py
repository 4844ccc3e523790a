"""One live sequence: evaluate it, export its state, import another host's. Implements `Lane`.

For each part of the state the lane knows after how many tokens it is valid. Evaluation demands that all parts agree,
and that the engine's own positions do: a sequence with a part missing cannot be continued, here, whatever the
protocol above does. After an error the lane is unusable until `clear`. The engine context is the pool's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from zerocopy.handoff.components import Component, ComponentSpec, StateSchema
from zerocopy.runtime.base import EngineCounters, EngineError, Logits, Output, Positions, Row
from zerocopy.runtime.llama import blob
from zerocopy.runtime.llama.abi import Library
from zerocopy.runtime.llama.blob import Geometry
from zerocopy.runtime.llama.context import PROBE_SEQUENCE, Context, ContextOptions, Run
from zerocopy.runtime.llama.mtp import MtpFollower

_STATE: Final = (Component.ATTENTION_KV, Component.RECURRENT, Component.MTP_KV, Component.MTP_HIDDEN)
_DIGEST_TOKENS: Final = 64  # per re-exported page; equal on all hosts whatever their page size, so digests compare
_UNKNOWN: Final = -1  # an engine call on the part began and did not end well


class LaneModel(msgspec.Struct, frozen=True):
    """What a pool and its lanes need of their runtime."""

    library: Library
    handle: Any
    options: ContextOptions
    schema: StateSchema
    geometries: dict[Component, Geometry]  # of the context each paged component lives in; RECURRENT for snapshots
    n_vocab: int


class OwningPool(Protocol):
    """A lane's side of `LlamaPool`."""

    model: LaneModel
    target: Context
    mtp: MtpFollower | None

    def evaluate(self, rows: Sequence[Row]) -> list[Output | EngineError]: ...

    def take_cells(self, count: int) -> None:
        """The engine is about to place so many tokens."""

    def dropped(self, lane: LlamaLane) -> None:
        """This lane's sequence is over."""

    def reset_counters(self) -> None: ...

    def counters(self) -> EngineCounters: ...

    def close(self) -> None: ...


class Saved(msgspec.Struct):
    """What the engine holds of one lane, in memory of ours. Whoever made it wipes it, however putting it back ends."""

    valid: dict[Component, int] = {}
    pages: list[tuple[Component, memoryview]] = []  # in token order
    snapshot: memoryview | None = None

    def wipe(self) -> None:
        for view in (*(page for _, page in self.pages), *([] if self.snapshot is None else [self.snapshot])):
            _wipe(view)


class LlamaLane:
    def __init__(self, pool: OwningPool, sequence: int) -> None:
        self.pool = pool
        self.sequence = sequence
        self._m = pool.model
        self._target = pool.target
        self._mtp = pool.mtp
        self._mtp_logits: Logits | None = None
        self._valid = {c: 0 for c in _STATE if pool.model.schema.spec(c)}

    @property
    def used(self) -> bool:
        """Holds any state, or may."""
        return any(self._valid.values())

    # -- evaluation ------------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        self._evaluate(tokens, start)
        self._mtp_logits = None

    def evaluate(self, token: int, position: int) -> Logits:
        output = self._evaluate([token], position)
        self._mtp_logits = output.mtp_logits
        return output.logits

    def mtp_logits(self) -> Logits | None:
        return self._mtp_logits

    def probe(self, token: int, position: int) -> Logits:
        if error := self.refusal([token], position):
            raise error
        self.pool.take_cells(1)
        self._target.copy(self.sequence, PROBE_SEQUENCE)
        try:
            self._target.decode([Run(PROBE_SEQUENCE, [token], position)])
            logits = self._target.logits()
        finally:
            self._target.drop(PROBE_SEQUENCE)
        self._mtp_logits = self._mtp.probe(self.sequence, token, position) if self._mtp else None
        return logits

    def _evaluate(self, tokens: Sequence[int], start: int) -> Output:
        self._mtp_logits = None
        (answer,) = self.pool.evaluate([Row(self, tokens, start)])
        if isinstance(answer, EngineError):
            raise answer
        return answer

    def suspend(self) -> None:
        """The pool works on the state: until it is done, nothing is known."""
        self._valid = dict.fromkeys(self._valid, _UNKNOWN)

    def end_evaluation(self, tokens: int) -> None:
        self._valid = dict.fromkeys(self._valid, tokens)

    def refusal(self, tokens: Sequence[int], start: int) -> EngineError | None:
        """None if the whole state stands at `start`, by our books and by the engine's, and the tokens may follow."""
        options = self._m.options
        if not 0 < len(tokens) <= options.chunk_tokens:
            return EngineError(
                "chunk-size", f"a chunk has {len(tokens)} tokens, this lane takes 1 to {options.chunk_tokens}"
            )
        for component, valid in self._valid.items():
            if valid != start:
                return EngineError(
                    "state-incomplete",
                    f"{component.label} is valid after {max(valid, 0)} tokens, position {start} needs {start}: "
                    "import or evaluate what is missing, or clear the lane",
                )
        found = self.positions()
        if found.target != start - 1 or found.mtp not in (None, start - 1):
            return EngineError("position", f"the engine stands at {found}, evaluation at {start} needs {start - 1}")
        if start + len(tokens) > options.n_ctx:
            return EngineError("context-full", f"{start + len(tokens)} tokens do not fit a context of {options.n_ctx}")
        if not 0 <= min(tokens) <= max(tokens) < self._m.n_vocab:
            return EngineError("token-range", f"a token is outside the vocabulary of {self._m.n_vocab}")
        return None

    # -- export ----------------------------------------------------------------------------------------------------

    def export_page(self, component: Component, tokens: tuple[int, int], into: memoryview) -> None:
        self._check_page_size(component, tokens, into)
        if tokens[1] > self._valid[component]:
            raise EngineError(
                "page-range", f"{component.label} of tokens {tokens} asked, the lane holds {self._valid[component]}"
            )
        self._context(component).export_range(self.sequence, tokens, into)
        # an export that a peer's check would refuse is better refused here
        blob.check_page(into, self._m.geometries[component], tokens, self._m.n_vocab)

    def export_snapshot(self, into: memoryview) -> None:
        self._check_snapshot_size(into)
        self._target.export_recurrent(self.sequence, into)
        geometry, valid = self._m.geometries[Component.RECURRENT], self._valid[Component.RECURRENT]
        blob.check_snapshot(into, geometry, self.sequence, valid)

    def export_hidden(self, into: memoryview) -> None:
        if self._valid.get(Component.MTP_HIDDEN, 1) < 1:
            raise EngineError("engine-export", "no token has been evaluated, so there is no MTP hidden row to export")
        np.copyto(self._hidden_view(into), self._follower().pending(self.sequence))

    # -- import ----------------------------------------------------------------------------------------------------

    def import_page(self, component: Component, tokens: tuple[int, int], payload: memoryview) -> None:
        self._check_page_size(component, tokens, payload)
        if tokens[0] != self._valid[component]:
            raise EngineError(
                "page-order",
                f"{component.label} page starts at token {tokens[0]}, the lane holds {self._valid[component]}: "
                "pages come in token order",
            )
        if component == Component.ATTENTION_KV and self._valid.get(Component.RECURRENT):
            raise EngineError(
                "snapshot-last", "an attention KV page would drop the recurrent state that is here: import pages first"
            )
        blob.check_page(payload, self._m.geometries[component], tokens, self._m.n_vocab)
        if component == Component.ATTENTION_KV:  # the MTP head's cells fill no faster
            self.pool.take_cells(tokens[1] - tokens[0])
        with self._changing(component, then=tokens[1]):
            self._context(component).import_range(self.sequence, payload)

    def import_snapshot(self, blob_: memoryview, n_tokens: int) -> None:
        self._check_snapshot_size(blob_)
        attention = self._valid.get(Component.ATTENTION_KV, n_tokens)
        if n_tokens < 1 or attention != n_tokens:
            raise EngineError(
                "snapshot-last",
                f"the snapshot is of {n_tokens} tokens, attention KV holds {attention}: "
                "imported before the pages it would be lost",
            )
        geometry = self._m.geometries[Component.RECURRENT]
        blob.write_snapshot_prefix(blob_, geometry, self.sequence, n_tokens)
        blob.check_snapshot(blob_, geometry, self.sequence, n_tokens)
        with self._changing(Component.RECURRENT, then=n_tokens):
            self._target.import_recurrent(self.sequence, blob_)

    def import_hidden(self, row: memoryview) -> None:
        """Of the last position the MTP pages reach; so it comes after them."""
        np.copyto(self._follower().pending(self.sequence), self._hidden_view(row))
        self._valid[Component.MTP_HIDDEN] = self._valid[Component.MTP_KV]

    # -- state -----------------------------------------------------------------------------------------------------

    def positions(self) -> Positions:
        mtp = self._mtp.context.last_position(self.sequence) if self._mtp else None
        return Positions(self._target.last_position(self.sequence), mtp)

    def state_digests(self, key: bytes) -> dict[str, str]:
        digests = {}
        for component, valid in self._valid.items():
            spec = self._spec(component)
            if spec.per_token:
                digests[component.label] = self._paged_digest(spec, valid, key)
        if self._valid.get(Component.RECURRENT):
            digests |= self._snapshot_digests(key)
        if self._mtp:
            digests[Component.MTP_HIDDEN.label] = _digest(key, self._mtp.pending(self.sequence).data)
        return digests

    def save(self, into: Saved) -> None:
        """What is valid of the lane's state, for `restore` once the engine's memory has been cleared. Needs as much
        memory as that. The pending hidden row is not the engine's and stays where it is."""
        into.valid = self._valid
        for component in (Component.ATTENTION_KV, Component.MTP_KV):
            spec, valid = self._m.schema.spec(component), self._valid.get(component, 0)
            step = min(self._m.options.chunk_tokens, spec.max_page_tokens) if spec else 1
            for start in range(0, valid, step):
                assert spec is not None
                tokens = (start, min(start + step, valid))
                page = _room(spec.page_bytes((0, spec.layers), tokens))
                into.pages.append((component, page))
                self._context(component).export_range(self.sequence, tokens, page)
        if self._valid.get(Component.RECURRENT, 0) > 0:
            into.snapshot = _room(self._m.schema.snapshot_bytes())
            self._target.export_recurrent(self.sequence, into.snapshot)

    def restore(self, saved: Saved) -> None:
        """Put it back."""
        for component, page in saved.pages:
            self._context(component).import_range(self.sequence, page)
        if saved.snapshot is not None:
            self._target.import_recurrent(self.sequence, saved.snapshot)
        self._valid = saved.valid

    @property
    def cells(self) -> int:
        return max(0, self._valid.get(Component.ATTENTION_KV, 0))

    def reset_counters(self) -> None:
        self.pool.reset_counters()

    def counters(self) -> EngineCounters:
        return self.pool.counters()

    def clear(self) -> None:
        self._mtp_logits = None
        if self.used:
            self._valid = dict.fromkeys(self._valid, 0)
            self.pool.dropped(self)

    def close(self) -> None:
        """End the whole pool: for one that `open_lane` gave."""
        self._mtp_logits = None
        self.pool.close()

    def fill(self, component: Component, tokens: tuple[int, int]) -> None:
        """Append a page of zeros: for measuring, not for serving."""
        spec = self._spec(component)
        page = memoryview(bytearray(spec.page_bytes((0, spec.layers), tokens)))
        blob.write_blank_page(page, self._m.geometries[component], tokens)
        self.import_page(component, tokens, page)

    def page_size(self, component: Component, tokens: tuple[int, int]) -> int:
        """By the engine's own count."""
        return self._context(component).range_size(self.sequence, tokens)

    def snapshot_size(self) -> int:
        """By the engine's own count."""
        return self._target.recurrent_size(self.sequence)

    # -- details ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self, *components: Component, then: int) -> Iterator[None]:
        """The parts are of unknown validity while the engine works on them, and stay so if it fails."""
        for component in components:
            self._valid[component] = _UNKNOWN
        yield
        for component in components:
            self._valid[component] = then

    def _paged_digest(self, spec: ComponentSpec, n_tokens: int, key: bytes) -> str:
        digest = hashlib.blake2b(key=key, digest_size=16)
        step = min(_DIGEST_TOKENS, spec.max_page_tokens)
        with _wiped(spec.page_bytes((0, spec.layers), (0, step))) as scratch:
            for start in range(0, n_tokens, step):
                tokens = (start, min(start + step, n_tokens))
                page = scratch[: spec.page_bytes((0, spec.layers), tokens)]
                self.export_page(spec.component, tokens, page)
                digest.update(page)
        return digest.hexdigest()

    def _snapshot_digests(self, key: bytes) -> dict[str, str]:
        schema, digests = self._m.schema, {}
        with _wiped(schema.snapshot_bytes()) as scratch:
            self.export_snapshot(scratch)
            for component in (Component.CONVOLUTION, Component.RECURRENT):
                spec, start = self._spec(component), schema.slab_offset(component, 0)
                size = spec.page_bytes((0, spec.layers), (0, 1))
                digests[component.label] = _digest(key, scratch[start : start + size])
        return digests

    def _context(self, component: Component) -> Context:
        return self._follower().context if component == Component.MTP_KV else self._target

    def _follower(self) -> MtpFollower:
        if self._mtp is None:
            raise EngineError("component", "this model's MTP head is not tracked: it has no MTP state")
        return self._mtp

    def _spec(self, component: Component) -> ComponentSpec:
        spec = self._m.schema.spec(component)
        if spec is None:
            raise EngineError("component", f"{component.label} is no part of {self._m.schema.family}'s state")
        return spec

    def _check_page_size(self, component: Component, tokens: tuple[int, int], page: memoryview) -> None:
        spec = self._spec(component)
        if component not in (Component.ATTENTION_KV, Component.MTP_KV):
            raise EngineError("component", f"{component.label} does not travel in pages of tokens")
        if not 0 <= tokens[0] < tokens[1] <= min(self._m.options.n_ctx, tokens[0] + spec.max_page_tokens):
            raise EngineError(
                "page-range",
                f"tokens {tokens} are no page here: at most {spec.max_page_tokens} tokens of {self._m.options.n_ctx}",
            )
        expected = spec.page_bytes((0, spec.layers), tokens)
        if len(page) != expected:
            raise EngineError("page-size", f"{component.label} of tokens {tokens} is {expected} bytes, not {len(page)}")

    def _check_snapshot_size(self, view: memoryview) -> None:
        self._spec(Component.RECURRENT)
        expected = self._m.schema.snapshot_bytes()
        if len(view) != expected:
            raise EngineError("page-size", f"a recurrent snapshot is {expected} bytes, not {len(view)}")

    def _hidden_view(self, row: memoryview) -> Logits:
        expected = self._spec(Component.MTP_HIDDEN).layer_bytes[0]
        if len(row) != expected:
            raise EngineError("page-size", f"an MTP hidden row is {expected} bytes, not {len(row)}")
        return np.frombuffer(row, dtype=np.float32)


def _room(size: int) -> memoryview:
    """Memory that is filled at once: numpy's comes in large pages, a bytearray's is touched twice in small ones."""
    return np.empty(size, np.uint8).data


def _wipe(view: memoryview) -> None:
    np.frombuffer(view, np.uint8).fill(0)


@contextmanager
def _wiped(size: int) -> Iterator[memoryview]:
    """Room for state that is overwritten however its use ends."""
    view = _room(size)
    try:
        yield view
    finally:
        _wipe(view)


def _digest(key: bytes, data: memoryview) -> str:
    return hashlib.blake2b(data, key=key, digest_size=16).hexdigest()
