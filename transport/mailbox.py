"""The loop's side of threads: calls from any of them, made on the event loop with one wake-up for many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


class Mailbox:
    """Calls from any thread, made on the loop in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def post(self, call: Callable[..., object], *args: Any) -> None:
        with self._lock:
            self._calls.append((call, args))
            wake = len(self._calls) == 1
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # the loop is closed: nobody is left to tell

    def _deliver(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call, args in calls:
            try:
                call(*args)
            except Exception as error:  # a bug; somebody may wait for what the others do
                self._loop.call_exception_handler({"message": "a call from a thread failed", "exception": error})
