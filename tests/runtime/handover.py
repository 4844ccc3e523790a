"""A whole state taken out of one lane and put into another, the way a handoff does it but in one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerocopy.handoff.components import Component
from zerocopy.runtime.base import EngineFacts, Lane

Range = tuple[int, int]
PAGED = (Component.ATTENTION_KV, Component.MTP_KV)
KEY = b"one key per comparison, never two"[:32]


def prompt(facts: EngineFacts, length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, facts.n_vocab, length)]


def prefill(lane: Lane, facts: EngineFacts, history: list[int]) -> None:
    for start in range(0, len(history), facts.chunk_tokens):
        lane.prefill(history[start : start + facts.chunk_tokens], start)


@dataclass
class State:
    n_tokens: int
    pages: list[tuple[Component, Range, memoryview]] = field(default_factory=list)
    snapshot: memoryview | None = None
    hidden: memoryview | None = None


def room(size: int) -> memoryview:
    return memoryview(bytearray(size))


def page_room(facts: EngineFacts, component: Component, tokens: Range) -> memoryview:
    spec = facts.schema.spec(component)
    assert spec is not None
    return room(spec.page_bytes((0, spec.layers), tokens))


def export_state(lane: Lane, facts: EngineFacts, n_tokens: int, page_tokens: int | None = None) -> State:
    state, step = State(n_tokens), page_tokens or facts.page_tokens
    for start in range(0, n_tokens, step):
        tokens = (start, min(start + step, n_tokens))
        for component in PAGED:
            if facts.schema.spec(component):
                page = page_room(facts, component, tokens)
                lane.export_page(component, tokens, page)
                state.pages.append((component, tokens, page))
    if size := facts.schema.snapshot_bytes():
        state.snapshot = room(size)
        lane.export_snapshot(state.snapshot)
        state.snapshot[: facts.schema.snapshot_prefix] = bytes(facts.schema.snapshot_prefix)  # it never travels
    if spec := facts.schema.spec(Component.MTP_HIDDEN):
        state.hidden = room(spec.layer_bytes[0])
        lane.export_hidden(state.hidden)
    return state


def import_state(lane: Lane, state: State) -> None:
    for component, tokens, page in state.pages:
        lane.import_page(component, tokens, page)
    if state.hidden is not None:
        lane.import_hidden(state.hidden)
    if state.snapshot is not None:
        lane.import_snapshot(state.snapshot, state.n_tokens)


Rows = list[NDArray[np.uint32]]


def bits(lane: Lane, logits: NDArray[np.float32]) -> Rows:
    """Logits of target and MTP head as the integers their bits are: NaN equals itself, -0 does not equal 0."""
    mtp = lane.mtp_logits()
    return [row.view(np.uint32).copy() for row in ([logits] if mtp is None else [logits, mtp])]


def greedy(lane: Lane, last: int, position: int, steps: int) -> tuple[list[int], list[Rows]]:
    """Evaluate `last` at `position`, then what it leads to; (tokens, bits of every step's logits)."""
    tokens, rows = [], []
    for step in range(steps):
        rows.append(bits(lane, lane.evaluate(last, position + step)))
        last = int(rows[-1][0].view(np.float32).argmax())
        tokens.append(last)
    return tokens, rows


def same(a: list[Rows], b: list[Rows]) -> bool:
    return len(a) == len(b) and all(
        len(x) == len(y) and all(np.array_equal(p, q) for p, q in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


class Refusing:
    """The engine's library, but for one function whose call after so many is answered with `value`: what it says of a
    failure. `half`: it does its work all the same."""

    def __init__(self, library: Any, name: str, *, after: int = 0, value: object = 0, half: bool = False) -> None:
        self._library = library
        self._name = name
        self._after = after
        self._value = value
        self._half = half
        self.calls = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._library, name)

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            fails = name == self._name and self.calls[name] == self._after + 1
            done = real(*args) if self._half or not fails else None
            return self._value if fails else done

        return call
