"""Watches the heap and the copies of running processes, from outside: `tests/native/watch_memory.c` preloaded."""

from __future__ import annotations

import mmap
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "native" / "watch_memory.c"
_COUNTERS = struct.Struct("=QQQ")


class Counts(NamedTuple):
    copied_bytes: int
    large_allocations: int
    largest: int


class MemoryWatch:
    """Processes started while it is `armed` are watched. `limit`: what counts as a large allocation."""

    def __init__(self, folder: Path, limit: int) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or compiler is None:
            pytest.skip("needs Linux with glibc and a C compiler to watch a process's heap")
        self._library = folder / "watch_memory.so"
        self._folder = folder
        self._limit = limit
        subprocess.run(
            [compiler, "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True
        )

    def arm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LD_PRELOAD", str(self._library))
        monkeypatch.setenv("MEMORY_WATCH", str(self._folder))
        monkeypatch.setenv("MEMORY_WATCH_LIMIT", str(self._limit))

    def reset(self, pid: int) -> None:
        with (self._folder / str(pid)).open("r+b") as file, mmap.mmap(file.fileno(), _COUNTERS.size) as view:
            view[:] = bytes(_COUNTERS.size)

    def read(self, pid: int) -> Counts:
        return Counts(*_COUNTERS.unpack((self._folder / str(pid)).read_bytes()))
