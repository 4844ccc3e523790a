"""Turns token bytes into text a client may see: whole UTF-8 characters, nothing of a stop string.

Owns at most one incomplete character and one possible beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Feed token bytes, get text; `stopped` once a stop string has appeared (it and all after it is dropped)."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [s for s in stop if s]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def feed(self, piece: bytes) -> str:
        if self.stopped:
            return ""
        if not self._stop:
            return self._decoder.decode(piece)
        self._held += self._decoder.decode(piece)
        if found := self._first_stop():
            self.stopped = True
            text, self._held = self._held[: found[1]], ""
            return text
        keep = self._possible_stop()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def finish(self) -> str:
        """What was held back, when generation ends without a stop string."""
        if self.stopped:
            return ""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return text

    def _first_stop(self) -> tuple[int, int] | None:
        """(end, begin) of the stop string that is complete first; of two that end together, the longer. Whichever
        begins first would depend on where tokens end."""
        found = ((at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0)
        return min(found, default=None)

    def _possible_stop(self) -> int:
        """Length of the longest tail that may still grow into a stop string."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if stop.startswith(self._held[-n:]):
                    longest = n
                    break
        return longest
