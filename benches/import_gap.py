"""Gaps between tokens while a long state is imported (issue 5, acceptance 6): `python -m benches.import_gap`, JSON.

One real worker process with SmolLM2 generates on some sequences. In turn it is left alone, and a state of 8,192 tokens
lands in its ring as fast as it is taken, to be imported, evaluated and dropped again. Gaps are between the tokens of
one sequence; those that end while an import runs, from its start to the moment its first logits exist, are compared
with those of quiet times. The half second after an import was dropped, when the pool closes up, is told apart.
Of the gaps during an import, those that hold the first evaluation behind it are also told apart (`first_logits`): it
attends to all 8,192 tokens, as every later token of that sequence would.

This process plays the daemon: pages are made beforehand, so neither a prefill nor a wire competes for the cores, and
they hold zeros, which cost the engine what any numbers do. `met`: p99 at most twice what it is without. Owns the worker
process, one ring and the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import msgspec

from native.ring import Ring
from zerocopy.cli.hosts import smollm2
from zerocopy.cli.measuring import quantiles
from zerocopy.handoff.components import HEADER_BYTES, Component, PageHeader
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime
from zerocopy.worker import protocol as p
from zerocopy.worker.main import WorkerOptions
from zerocopy.worker.sampling import Sampling

PROMPT: Final = 100  # tokens, of the sequences that generate
NO_END: Final = Sampling(logit_bias=((0, -100.0), (2, -100.0)))  # SmolLM2's ends of text: all generate to the end
RING_MIB: Final = 64  # a daemon's default
CLOSING_S: Final = 0.5
LIMIT: Final = 2.0
TIMEOUT_S: Final = 60.0


def options(generating: int, imported: int) -> LlamaOptions:
    return LlamaOptions(
        n_ctx=imported + 256, sequences=generating + 1, kv_tokens=imported + 256 + generating * 2048, threads=2
    )


def pages_of(engine: LlamaOptions, tokens: int) -> list[memoryview]:
    """Ring records of a state of so many tokens."""
    runtime = LlamaRuntime(smollm2(), engine)
    lane, spec, step = runtime.open_lane(), runtime.facts.schema.spec(Component.ATTENTION_KV), runtime.facts.page_tokens
    assert spec is not None
    records = []
    for number, start in enumerate(range(0, tokens, step)):
        span = (start, min(start + step, tokens))
        lane.fill(Component.ATTENTION_KV, span)
        size = spec.page_bytes((0, spec.layers), span)
        record = memoryview(bytearray(HEADER_BYTES + size))
        header = PageHeader(
            handoff_id=bytes(16), identity=runtime.facts.identity.digest(), epoch=0, sequence=number,
            component=Component.ATTENTION_KV, layers=(0, spec.layers), tokens=span, payload_bytes=size,
            position_planes=1, checksum=0, final=span[1] == tokens,
        )  # fmt: skip
        record[:HEADER_BYTES] = header.pack()
        lane.export_page(Component.ATTENTION_KV, span, record[HEADER_BYTES:])
        records.append(record)
    runtime.close()
    return records


@dataclass
class Played:
    """The daemon's side of one worker."""

    sock: socket.socket
    ring: Ring
    jobs: Iterator[int] = field(default_factory=count)
    buffer: bytearray = field(default_factory=bytearray)

    def send(self, message: p.ToWorker) -> None:
        self.sock.sendall(p.encode(message))

    def hear(self, timeout_s: float) -> list[p.ToDaemon]:
        """What has come, after at most so long."""
        if select.select([self.sock], [], [], timeout_s)[0]:
            self.buffer += self.sock.recv(1 << 16)
        messages = []
        while len(self.buffer) >= 4 and len(self.buffer) >= (end := 4 + p.frame_length(self.buffer)):
            messages.append(p.decode_to_daemon(bytes(self.buffer[4:end])))
            del self.buffer[:end]
        return messages

    def generate(self, tokens: list[int], lane: int, ring: int | None = None) -> int:
        job = next(self.jobs)
        self.send(p.Generate(job, tokens, 1 << 20, NO_END, (), None, ring=ring, lane=lane))
        return job

    def land(self, records: Sequence[memoryview], job: int) -> None:
        """As a wire thread does: copy into the ring whenever there is room."""
        for record in records:
            while (slot := self.ring.claim(len(record))) is None:
                time.sleep(0.0005)
            slot.view[:] = record
            slot.commit()
        self.send(p.StateComplete(job))


@contextlib.contextmanager
def worker(engine: LlamaOptions) -> Iterator[Played]:
    ours, theirs = socket.socketpair()
    said = msgspec.json.encode(WorkerOptions(str(smollm2()), ("decode",), engine)).decode()
    with ours, theirs, contextlib.closing(Ring.create(RING_MIB << 20, "import-gap")) as ring:
        command = [sys.executable, "-m", "zerocopy.worker.main", str(theirs.fileno()), said]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        played = Played(ours, ring)
        try:
            until = time.monotonic() + TIMEOUT_S
            while not any(isinstance(message, p.Ready) for message in played.hear(1)):
                if time.monotonic() > until or process.poll() is not None:
                    raise SystemExit("the worker did not come up")
            attach = p.encode(p.Attach((), (), (p.RingSpec(ring.handle.capacity),), ()))
            socket.send_fds(ours, [attach], ring.handle.fds)
            yield played
            played.send(p.Shutdown())
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
            process.wait()


class Watch:
    """Gaps of the sequences that generate, apart by whether an import ran when they ended."""

    def __init__(self, played: Played, jobs: Sequence[int]) -> None:
        self._played = played
        self._last: dict[int, float | None] = dict.fromkeys(jobs)
        self.alone, self.beside, self.after = list[float](), list[float](), list[float]()
        self.import_s = list[float]()
        self.during_import, self.first_logits = list[float](), list[float]()  # of `beside`

    def follow(self, gaps: list[float], until: float, importing: int | None = None) -> None:
        """Note gaps until that moment, or until `importing` has its first logits."""
        began, ends = time.monotonic(), list[float]()
        while (now := time.monotonic()) < until:
            for message in self._played.hear(0.1):
                if isinstance(message, p.Failed):
                    raise SystemExit(f"the worker failed: {message.message}")
                if isinstance(message, p.Imported) and message.job == importing:
                    self.import_s.append(time.monotonic() - began)
                    for ended, gap in zip(ends, gaps[-len(ends) :], strict=True):
                        (self.first_logits if ended > message.marks["imported"] else self.during_import).append(gap)
                    return
                if isinstance(message, p.TextDelta) and message.job in self._last:
                    ends += self._note(message.job, time.monotonic(), gaps)
        if importing is not None:
            raise SystemExit(f"nothing was imported within {now - began:.0f} s")

    def _note(self, job: int, now: float, gaps: list[float]) -> list[float]:
        """The moment, if a gap ended."""
        last, self._last[job] = self._last[job], now
        if last is None:
            return []
        gaps.append(now - last)
        return [now]


def run(generating: int, imported: int, imports: int, pause_s: float) -> dict[str, Any]:
    engine = options(generating, imported)
    records = pages_of(engine, imported)
    with worker(engine) as played:
        jobs = [played.generate([7 + n] * PROMPT, n) for n in range(generating)]
        watch = Watch(played, jobs)
        watch.follow([], time.monotonic() + 2)  # prompts and warm-up
        for _ in range(imports):
            watch.follow(watch.alone, time.monotonic() + pause_s)
            job = played.generate([0] * (imported + 1), generating, ring=0)
            wire = threading.Thread(target=played.land, args=(records, job))
            wire.start()
            watch.follow(watch.beside, time.monotonic() + TIMEOUT_S, importing=job)
            wire.join()
            played.send(p.Release(job))
            watch.follow(watch.after, time.monotonic() + CLOSING_S)
        for job in jobs:
            played.send(p.Release(job))
    alone, beside, after = (quantiles(gaps, 5) for gaps in (watch.alone, watch.beside, watch.after))
    copying, first = quantiles(watch.during_import, 5), quantiles(watch.first_logits, 5)
    taken = quantiles(watch.import_s, 4)
    assert alone and beside and after and taken and copying and first
    ratio = round(beside.p99 / alone.p99, 3)
    return {
        "generating": generating,
        "imported_tokens": imported,
        "imported_bytes": sum(map(len, records)),
        "imports": imports,
        "import_s": msgspec.to_builtins(taken),
        "gaps": {"without": len(watch.alone), "during": len(watch.beside), "after": len(watch.after)},
        "gap_without_s": msgspec.to_builtins(alone),
        "gap_during_s": msgspec.to_builtins(beside),
        "gap_during_copying_s": msgspec.to_builtins(copying),
        "gap_first_logits_s": msgspec.to_builtins(first),
        "gap_after_s": msgspec.to_builtins(after),
        "ratio_p99": ratio,
        "ratio_p99_copying": round(copying.p99 / alone.p99, 3),
        "load": os.getloadavg()[0],
        "met": ratio <= LIMIT,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generating", type=int, default=3, help="sequences")
    parser.add_argument("--tokens", type=int, default=8192, help="of the imported state")
    parser.add_argument("--imports", type=int, default=20)
    parser.add_argument("--pause-s", type=float, default=1.0, help="between imports")
    args = parser.parse_args()
    found = run(args.generating, args.tokens, args.imports, args.pause_s)
    print(json.dumps(found, indent=2))
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
