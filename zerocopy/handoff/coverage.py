"""Which part of a layers x tokens rectangle has been covered, exactly once.

The rectangle is kept as bands of layers that were always covered alike, each with its sorted, merged token spans:
one band and one span for pages of all layers in order, never more than the pages that were added.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

Range = tuple[int, int]


class Rectangle(NamedTuple):
    layers: Range
    tokens: Range


class _Band:
    __slots__ = ("layers", "spans")

    def __init__(self, layers: Range, spans: list[Range]) -> None:
        self.layers = layers
        self.spans = spans

    def overlap(self, tokens: Range) -> Range | None:
        """The first part of `tokens` that is covered already."""
        after = bisect_right(self.spans, tokens[0], key=lambda span: span[0])
        for span in self.spans[max(after - 1, 0) : after + 1]:
            low, high = max(span[0], tokens[0]), min(span[1], tokens[1])
            if low < high:
                return low, high
        return None

    def insert(self, tokens: Range) -> None:
        """Add a span that overlaps none, joined with the neighbours that it touches."""
        start, end = tokens
        at = bisect_right(self.spans, start, key=lambda span: span[0])
        first, last = at, at
        if at > 0 and self.spans[at - 1][1] == start:
            first, start = at - 1, self.spans[at - 1][0]
        if at < len(self.spans) and self.spans[at][0] == end:
            last, end = at + 1, self.spans[at][1]
        self.spans[first:last] = [(start, end)]

    def gaps(self, tokens: int) -> list[Range]:
        edges = [(0, 0), *self.spans, (tokens, tokens)]
        return [(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]]


class Coverage:
    """Of [0, layers) x [0, tokens). Callers check that a rectangle lies inside before adding it."""

    def __init__(self, layers: int, tokens: int) -> None:
        self._tokens = tokens
        self._missing = layers * tokens
        self._bands = [_Band((0, layers), [])]

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def overlap(self, layers: Range, tokens: Range) -> Rectangle | None:
        """A part of the rectangle that is covered already, or None."""
        for band in self._bands:
            low, high = max(band.layers[0], layers[0]), min(band.layers[1], layers[1])
            if low < high and (tokens_hit := band.overlap(tokens)):
                return Rectangle((low, high), tokens_hit)
        return None

    def add(self, layers: Range, tokens: Range) -> None:
        """Cover a rectangle that overlaps nothing covered before."""
        self._split(layers[0])
        self._split(layers[1])
        for band in self._bands:
            if layers[0] <= band.layers[0] and band.layers[1] <= layers[1]:
                band.insert(tokens)
        self._missing -= (layers[1] - layers[0]) * (tokens[1] - tokens[0])

    def gaps(self) -> list[Rectangle]:
        """What is not covered, by layers then tokens."""
        return [Rectangle(band.layers, gap) for band in self._bands for gap in band.gaps(self._tokens)]

    def _split(self, layer: int) -> None:
        for index, band in enumerate(self._bands):
            if band.layers[0] < layer < band.layers[1]:
                low, high = (band.layers[0], layer), (layer, band.layers[1])
                self._bands[index : index + 1] = [_Band(low, band.spans), _Band(high, list(band.spans))]
                return
