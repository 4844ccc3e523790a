"""`benches.import_gap`: a worker that has ended has no gaps."""

from __future__ import annotations

import contextlib
import socket

import pytest

from benches.import_gap import Played, Watch
from native.ring import Ring


def test_a_worker_that_ends_meanwhile_ends_the_measurement() -> None:
    """Its silence was followed to the end, and what gaps there were until then were the figure."""
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(Ring.create(1 << 20, "test")) as ring:
        watch = Watch(Played(ours, ring), [0])
        theirs.close()
        with pytest.raises(SystemExit, match="the worker ended"):
            watch.follow(0.2)
