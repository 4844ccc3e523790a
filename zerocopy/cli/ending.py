"""A command that is told to end does so whole: it ends its daemons and removes its folders.

SIGTERM becomes an exception, as SIGINT does, so that `with` blocks run. Such an exception may come anywhere, in the
first line of an `__exit__` too. So only the first signal becomes one, and what that cut short `atexit` makes up for.
Whoever relies on this must not wait for ever where a second signal used to help.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def told_once(at_once: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The first SIGTERM or SIGINT that comes inside calls `at_once` and becomes SystemExit or KeyboardInterrupt; the
    process hears no further one, inside or after. Blocks nest. In the main thread only. A signal that was ignored
    stays ignored."""
    before: dict[int, Any] = {
        number: handler
        for number in _SIGNALS
        if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN, _unheard)
    }

    def heard(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, _unheard)
        at_once()
        outer = before[number]
        if callable(outer):
            outer(number, frame)
        sys.exit(128 + number)

    for each in before:
        signal.signal(each, heard)
    try:
        yield
    finally:
        for each, handler in before.items():
            if signal.getsignal(each) is heard:
                signal.signal(each, handler)


def _unheard(number: int, frame: FrameType | None) -> None:
    """In place of SIG_IGN, which would complain of one that came just before."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A signal that comes inside is heard at the end: for what must not be left half done."""
    if threading.current_thread() is not threading.main_thread():  # Python hears signals on that one only
        yield
        return
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, frame: came.append(number)) for n in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for heard in came:
            signal.raise_signal(heard)


@functools.cache
def lifeline() -> int:
    """The descriptor of a pipe that ends when this process does, also by SIGKILL or `os._exit`: standard input of what
    must not outlive it."""
    reading, _ = os.pipe()  # the other end stays open, and no program started from here has it
    return reading


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for this user only, gone afterwards, also when a signal ends the block."""
    with told_once():
        folder = Path(tempfile.gettempdir(), prefix + secrets.token_hex(8))
        remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
        atexit.register(remove)  # before there is one: a signal may come between any two steps
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            remove()
            atexit.unregister(remove)
