"""Handoff ids are single-use (X7): the most recent ones, whatever became of them.

Bound: `limit` ids of 16 bytes. An id pushed out could be used again by the authenticated peer that minted it, and
would only get a new handoff with an epoch and seed of its own; pages of the old one would still be refused.
"""

from __future__ import annotations

from typing import Final

from zerocopy.handoff.errors import RemoteProtocolError

REMEMBERED: Final = 1 << 16  # hours of handoffs at ten a second, 8 MiB


class SeenIds:
    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._ids: dict[bytes, None] = {}

    def __contains__(self, handoff_id: bytes) -> bool:
        return handoff_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def use(self, handoff_id: bytes) -> None:
        """Raises RemoteProtocolError for an id that was used before."""
        if handoff_id in self._ids:
            raise RemoteProtocolError("handoff-replayed", f"handoff {handoff_id.hex()} was used before: mint a new id")
        self._ids[handoff_id] = None
        if len(self._ids) > self._limit:
            del self._ids[next(iter(self._ids))]
