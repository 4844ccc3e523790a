"""One engine context with a fixed number of lanes in it: evaluates tokens of several sequences in one engine call.

All lanes share the context's cells, which are given out in rising order only, so that every sequence lies in token
order: pages are exported, and attention adds up, in the order of cells. Sequences that generate together get stretches
of them (`ahead`). Cells of a sequence that ended stay taken until no lane holds any state, until moving what the lanes
hold costs less than they do, or until the end is reached: then what the lanes hold is put back from cell 0 on, and all
others that were given out are overwritten with zeros. Who may use which lane, and that the tokens of all lanes fit the
cells, is the caller's to know. Owns the context, that of the MTP head, and the lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zerocopy.handoff.components import Component
from zerocopy.runtime.base import EngineCounters, EngineError, Output, Row
from zerocopy.runtime.llama.ahead import AHEAD, END, CellsAhead
from zerocopy.runtime.llama.context import FIRST_LIVE_SEQUENCE, Context, Run
from zerocopy.runtime.llama.lane import LaneModel, LlamaLane, Saved
from zerocopy.runtime.llama.mtp import MtpFollower

# Attention looks at every cell that was given out; fewer than these of ended sequences are not worth an engine call.
_FEW_CELLS: Final = 256
# Overwriting all of a large cache takes longer than an engine call (12 ms for 188 MB), overwriting some of it three
# times as long a cell.
_FEW_GIVEN: Final = 0.25
# Moving a cell takes as long as so many tokens' looking past one: SmolLM2 on two cores 22 us and 0.27 us.
_MOVING: Final = 80


class LlamaPool:
    def __init__(self, model: LaneModel) -> None:
        self.model = model
        self.target = Context(model.library, model.handle, model.options)
        self.mtp: MtpFollower | None = None
        if model.schema.spec(Component.MTP_KV):
            try:
                self.mtp = MtpFollower(model.library, model.handle, model.options, self.target)
            except EngineError:
                self.target.close()
                raise
        self._taken = 0  # cells given out since the last wipe
        self._ahead = CellsAhead(model, self.target)
        kv = [spec for c in (Component.ATTENTION_KV, Component.MTP_KV) if (spec := model.schema.spec(c))]
        self._cell_bytes = sum(sum(spec.layer_bytes) for spec in kv)
        # Recurrent cells are not given out in order, and a head's are in a context of its own.
        self._only_attention = self._ahead.possible and not self.mtp and not model.schema.spec(Component.RECURRENT)
        self._lanes = [LlamaLane(self, FIRST_LIVE_SEQUENCE + i) for i in range(model.options.sequences)]

    def lane(self, number: int) -> LlamaLane:
        return self._lanes[number]

    def evaluate(self, rows: Sequence[Row]) -> list[Output | EngineError]:
        lanes = [self._own(row) for row in rows]
        refused = [lane.refusal(row.tokens, row.start) for lane, row in zip(lanes, rows, strict=True)]
        good = [n for n, error in enumerate(refused) if error is None]
        outputs = iter(self._evaluate([lanes[n] for n in good], [rows[n] for n in good]) if good else [])
        return [next(outputs) if error is None else error for error in refused]

    def _evaluate(self, lanes: Sequence[LlamaLane], rows: Sequence[Row]) -> list[Output]:
        """What the lanes have not refused. All of it was checked before the engine sees any."""
        given = [Run(lane.sequence, row.tokens, row.start) for lane, row in zip(lanes, rows, strict=True)]
        order = self._place(given)
        for lane in lanes:
            lane.suspend()
        runs = [given[n] for n in order]
        try:
            self.target.decode(runs)
        except EngineError:
            self._ahead.clear()
            self._taken = self.model.options.cells  # nobody knows which are free: the next call wipes all
            raise
        if self.mtp:
            self.mtp.follow(runs)
        outputs: dict[int, Output] = {}
        at = 0
        for n, run in zip(order, runs, strict=True):
            at += len(run.tokens)
            lanes[n].end_evaluation(run.start + len(run.tokens))
            mtp = self.mtp.context.logits(at - 1) if self.mtp else None
            outputs[n] = Output(self.target.logits(at - 1), mtp)
        return [outputs[n] for n in range(len(rows))]

    def _place(self, runs: Sequence[Run]) -> list[int]:
        """Have a free cell for each token; returns in which order the engine must see the runs, because it gives the
        first free cell to the first token, and so on."""
        ahead, cells = self._ahead, self.model.options.cells
        for run in runs:
            if len(run.tokens) > 1:
                ahead.forget(run.sequence)
        growing = [run.sequence for run in runs if len(run.tokens) == 1]
        needed = sum(len(run.tokens) for run in runs if run.sequence not in ahead)
        if self._taken + needed > cells or self._hinder(sum(len(run.tokens) for run in runs)):
            self._close_up(self._used())
            needed = sum(len(run.tokens) for run in runs)
        lacking = [each for each in growing if each not in ahead] if ahead.possible and len(growing) > 1 else []
        if self._taken + needed + (AHEAD - 1) * len(lacking) <= cells:
            needed += (AHEAD - 1) * len(lacking)
            for each in lacking:
                ahead.set_aside(each)
        self._taken += needed
        opened = {each: ahead.open(each) for each in growing if each in ahead}
        return sorted(range(len(runs)), key=lambda n: opened.get(runs[n].sequence, END))

    def dropped(self, lane: LlamaLane) -> None:
        self._ahead.forget(lane.sequence)
        self.target.bury(lane.sequence)
        if self.mtp:
            self.mtp.bury(lane.sequence)
        if not self._used() or self._hinder(_MOVING):
            self._close_up(self._used())

    def _hinder(self, tokens: int) -> bool:
        """Whether looking past the cells of ended sequences costs these tokens more than moving what the lanes hold."""
        if self._taken <= _FEW_CELLS:
            return False
        held = sum([lane.cells for lane in self._lanes])
        ended = self._taken - held - self._ahead.reserved
        if ended <= _FEW_CELLS:
            return False
        moved = held * self._cell_bytes + len(self._used()) * self.model.schema.snapshot_bytes()
        return ended * self._cell_bytes * tokens > moved * _MOVING

    def take_cells(self, count: int) -> None:
        if self._taken + count > self.model.options.cells:
            self._close_up(self._used())
        self._taken += count

    def _used(self) -> list[LlamaLane]:
        return [lane for lane in self._lanes if lane.used]

    def _close_up(self, lanes: Sequence[LlamaLane]) -> None:
        """Put what these lanes hold into the first cells and wipe all others; nothing is known of lanes for which that
        fails."""
        saved = [Saved() for _ in lanes]
        few = self._only_attention and self._taken <= _FEW_GIVEN * self.model.options.cells
        given = self._taken if few else None
        try:
            for lane, state in zip(lanes, saved, strict=True):
                lane.save(state)
            for lane in lanes:
                lane.suspend()
            self.target.clear(cells=given is None)
            if self.mtp:
                self.mtp.clear()
            self._ahead.clear()
            self._taken = self.model.options.cells  # if putting back or wiping fails, the next call wipes all
            for lane, state in zip(lanes, saved, strict=True):
                lane.restore(state)
            held = sum(lane.cells for lane in lanes)
            if given is not None:
                self._ahead.wipe(given - held)
            self._taken = held
        finally:
            for state in saved:
                state.wipe()

    def reset_counters(self) -> None:
        self.target.reset_counters()

    def counters(self) -> EngineCounters:
        return EngineCounters(*self.target.counters())

    def close(self) -> None:
        if self.mtp:
            self.mtp.close()
        self.target.close()

    def _own(self, row: Row) -> LlamaLane:
        for lane in self._lanes:
            if lane is row.lane:
                return lane
        raise EngineError("lane", "the lane belongs to another context")
