"""Cells in a row for sequences that grow one token at a time.

The engine gives a batch the first free cells, so sequences that generate together would lie in each other's gaps:
attention then jumps from cell to cell through memory that no prefetcher follows. So each gets a stretch of cells ahead:
blank tokens of the sequence of those that ended hold it, at positions no sequence reaches, and one of them is dropped
just before the engine looks for the cell that it held. Stretches are set aside in rising order, as cells are given out.
Owns one blank page. How many cells there are is the pool's to know.
"""

from __future__ import annotations

from typing import Final

from zerocopy.handoff.components import Component
from zerocopy.runtime.llama import blob
from zerocopy.runtime.llama.context import Context
from zerocopy.runtime.llama.lane import LaneModel

AHEAD: Final = 32
_FIRST_BLANK: Final = 1 << 30  # far above the longest context
END: Final = 1 << 31  # no engine position reaches it


class CellsAhead:
    def __init__(self, model: LaneModel, context: Context) -> None:
        geometry, spec = model.geometries.get(Component.ATTENTION_KV), model.schema.spec(Component.ATTENTION_KV)
        self._context = context
        self._geometry = geometry
        # A sliding window's cache gives cells behind the window to anyone: it has no order to keep.
        self.possible = spec is not None and geometry is not None and len(geometry.caches) == 1
        size = spec.page_bytes((0, spec.layers), (0, AHEAD)) if spec and self.possible else 0
        self._page = memoryview(bytearray(size))
        self._next = _FIRST_BLANK
        self._left: dict[int, list[int]] = {}  # of each sequence, the last one first

    def set_aside(self, sequence: int) -> None:
        """The next `AHEAD` cells are this sequence's."""
        assert self.possible and self._geometry is not None and sequence not in self._left
        first, self._next = self._next, self._next + AHEAD
        blob.write_blank_page(self._page, self._geometry, (first, first + AHEAD))
        self._context.block(self._page)
        self._left[sequence] = list(range(first + AHEAD - 1, first - 1, -1))

    @property
    def reserved(self) -> int:
        """Cells that sequences are still to fill."""
        return sum(len(left) for left in self._left.values())

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._left

    def open(self, sequence: int) -> int:
        """Free its next cell: the engine call that follows fills it. Returns where that lies among all that were set
        aside, smaller than `END`."""
        left = self._left[sequence]
        place = left.pop()
        self._context.unblock(place)
        if not left:
            del self._left[sequence]
        return place

    def forget(self, sequence: int) -> None:
        """What is left of its stretch stays taken until all cells are wiped."""
        self._left.pop(sequence, None)

    def wipe(self, count: int) -> None:
        """Overwrite the first free cells, so many and some more up to a whole stretch. None are taken but by live
        sequences."""
        assert self.possible and self._geometry is not None
        blob.write_blank_page(self._page, self._geometry, (_FIRST_BLANK, _FIRST_BLANK + AHEAD))
        self._context.overwrite(self._page, -(-count // AHEAD))

    def clear(self) -> None:
        """All cells have been wiped."""
        self._left.clear()
        self._next = _FIRST_BLANK
