"""Looks for bytes in this process's own memory: what was to be wiped is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

readable = pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc to read this process's memory")


def occurrences(needle: bytes) -> int:
    """In all writable memory of this process, at steps of the needle's length."""
    found = 0
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for line in maps:
            span, access = line.split()[:2]
            start, end = (int(x, 16) for x in span.split("-"))
            if access.startswith("rw") and "[v" not in line:
                memory.seek(start)
                found += (memory.read(end - start) or b"").count(needle)
    return found
