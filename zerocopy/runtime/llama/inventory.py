"""A model's state by size: what the schema's formula says beside what the engine counts (S9).

The engine is filled with pages of zeros, not evaluated, so that 128K tokens take ten seconds and not an hour: sizes
do not depend on what the rows hold. Needs a runtime whose context is as long as the longest length asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zerocopy.handoff.components import SNAPSHOT, Component
from zerocopy.runtime.base import EngineError
from zerocopy.runtime.llama.engine import LlamaRuntime
from zerocopy.runtime.llama.lane import LlamaLane
from zerocopy.runtime.pages import span, state_bytes


class StateSize(msgspec.Struct, frozen=True):
    component: str  # label; both parts of a snapshot are one row, as the engine counts them together
    tokens: int
    formula_bytes: int  # in the pages a handoff uses
    engine_bytes: int


def take_inventory(runtime: LlamaRuntime, lengths: Sequence[int]) -> list[StateSize]:
    """Sizes of every engine-held component at each length. Raises EngineError `context-full` beyond n_ctx."""
    facts = runtime.facts
    if not lengths or min(lengths) < 1 or max(lengths) > facts.n_ctx:
        raise EngineError(
            "context-full", f"lengths {list(lengths)} do not fit 1 to {facts.n_ctx} tokens: open with a larger n_ctx"
        )
    lane = runtime.open_lane()
    try:
        snapshot = _snapshot(lane, runtime)
        rows = []
        for component in (Component.ATTENTION_KV, Component.MTP_KV):
            if facts.schema.spec(component):
                rows += _paged(lane, runtime, component, sorted(lengths))
        return rows + [StateSize(name, n, size, counted) for name, size, counted in snapshot for n in sorted(lengths)]
    finally:
        lane.close()


def _snapshot(lane: LlamaLane, runtime: LlamaRuntime) -> list[tuple[str, int, int]]:
    """(label, formula, engine's count) of the snapshot and the hidden row, which have one size at any length."""
    schema = runtime.facts.schema
    lane.prefill([0], 0)
    rows = []
    if size := schema.snapshot_bytes():
        label = " and ".join(component.label for component in SNAPSHOT)
        rows.append((label, size - schema.snapshot_prefix, lane.snapshot_size() - schema.snapshot_prefix))
    if hidden := schema.spec(Component.MTP_HIDDEN):
        row = memoryview(bytearray(hidden.layer_bytes[0]))
        lane.export_hidden(row)
        rows.append((Component.MTP_HIDDEN.label, hidden.page_bytes((0, 1), (0, 1)), len(row)))
    lane.clear()
    return rows


def _paged(lane: LlamaLane, runtime: LlamaRuntime, component: Component, lengths: list[int]) -> list[StateSize]:
    spec = runtime.facts.schema.spec(component)
    assert spec is not None
    step, longest = min(span(spec, runtime.facts), spec.max_page_tokens), max(lengths)
    pages = [(start, min(start + step, longest)) for start in range(0, longest, step)]
    for page in pages:
        lane.fill(component, page)
    counted = [lane.page_size(component, page) for page in pages]
    rows = []
    for length in lengths:
        whole, rest = divmod(length, step)
        last = [(whole * step, length)] if rest else []
        engine = sum(counted[:whole]) + sum(lane.page_size(component, page) for page in last)
        rows.append(StateSize(component.label, length, state_bytes(spec, length, step), engine))
    return rows
