"""Handoff ids are single-use."""

from __future__ import annotations

import pytest

from tests.handoff.scene import HANDOFF
from zerocopy.handoff.errors import RemoteProtocolError
from zerocopy.handoff.seen import SeenIds


def test_an_id_that_was_used_is_refused() -> None:
    """X7: a replay is refused while the handoff runs and after it."""
    seen = SeenIds()
    seen.use(HANDOFF)
    assert HANDOFF in seen
    with pytest.raises(RemoteProtocolError, match=HANDOFF.hex()) as caught:
        seen.use(HANDOFF)
    assert caught.value.reason == "handoff-replayed"


def test_memory_of_ids_is_bounded_and_drops_the_oldest() -> None:
    seen = SeenIds(limit=3)
    ids = [bytes([i]) * 16 for i in range(5)]
    for handoff_id in ids:
        seen.use(handoff_id)
    assert len(seen) == 3
    assert [i in seen for i in ids] == [False, False, True, True, True]


def test_a_replay_does_not_push_others_out() -> None:
    seen = SeenIds(limit=2)
    seen.use(bytes(16))
    seen.use(HANDOFF)
    for _ in range(5):
        with pytest.raises(RemoteProtocolError):
            seen.use(HANDOFF)
    assert bytes(16) in seen
