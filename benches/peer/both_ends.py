"""What every script of this folder shares: two processes, the same memory, the same question, one line of JSON.

A script is started as `SCRIPT MIB BLOCK_KIB`, starts its own receiving process, moves MIB from `MEMORY` bytes here to
as many there in blocks, and prints Gb/s and CPU-seconds per GiB of both processes. Standard library only: it runs in
the peers' own environments. What the receiver has is compared once by checksum; a wrong one is no result. Every block
is another one each time it is moved, or the warm-up's bytes would stand for those of a measurement that moved none.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any, Final, NoReturn

MEMORY: Final = 256 << 20  # each side: more than any cache holds, as a KV cache is
GIB: Final = 1 << 30
STAMP: Final = 8  # bytes at the beginning of a block
Once = Callable[[], None]  # moves MEMORY bytes and returns when the other side has them


def memory(fill: bool, size: int = MEMORY) -> memoryview:
    """Pre-faulted, page-aligned; random bytes on the sending side."""
    view = memoryview(mmap.mmap(-1, size))
    step = 1 << 20
    for start in range(0, size, step):
        view[start : start + step] = os.urandom(step) if fill else bytes(step)
    return view


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def answer(landed: memoryview, between: Callable[[], object] = lambda: None) -> NoReturn:
    """The receiving process from now on: answers the sender's questions until it is gone. `between` is called every
    20 ms, for libraries that want to be polled."""
    while True:
        between()
        if select.select([sys.stdin], [], [], 0.02)[0]:
            question = sys.stdin.readline().strip()
            if not question:
                os._exit(0)  # some libraries' threads do not end
            say(cpu_s() if question == "cpu" else zlib.crc32(landed))


class Receiver:
    """The receiving process, as the sender sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *sys.argv, "receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.setup = self._heard()  # the first thing it says: where to send to

    def ask(self, question: str) -> Any:
        assert self._process.stdin is not None
        print(question, file=self._process.stdin, flush=True)
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line[0] in "{[0123456789":  # libraries print there too
                return json.loads(line)
        raise SystemExit("the receiving process ended")


def run(
    receive: Callable[[int], NoReturn], prepare: Callable[[Any, memoryview, int], Once], size: int = MEMORY
) -> NoReturn:
    """`receive(block)` lands, says its setup, answers; `prepare(setup, memory, block)` gives what moves all of it.
    Who is too slow for it moves `size` bytes for each `MEMORY`."""
    total, block = int(sys.argv[1]) << 20, int(sys.argv[2]) << 10
    if sys.argv[3:] == ["receive"]:
        receive(block)
    source = memory(True, size)
    receiver = Receiver()
    once = prepare(receiver.setup, source, block)
    once()  # warm-up: connections, page tables, windows
    times = max(1, total // MEMORY)
    stamps = [source[start : start + STAMP] for start in range(0, len(source), block)]
    cpu, began = cpu_s() + receiver.ask("cpu"), time.perf_counter()
    for turn in range(times):
        for stamp in stamps:
            stamp[:] = turn.to_bytes(STAMP, "little")
        once()
    elapsed, cpu = time.perf_counter() - began, cpu_s() + receiver.ask("cpu") - cpu
    if receiver.ask("checksum") != zlib.crc32(source):
        raise SystemExit("what arrived is not what was sent")
    moved = times * size
    say({"gbps": 8e-9 * moved / elapsed, "cpu_s_per_gib": cpu / (moved / GIB)})
    sys.stdout.flush()
    os._exit(0)
