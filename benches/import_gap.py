"""Gaps between tokens while a long state is imported (issue 5, acceptance 6): `python -m benches.import_gap`, JSON.

One real worker process with SmolLM2 generates on some sequences. In turn it is left alone, and a state of 8,192 tokens
lands in its ring as fast as it is taken, to be imported, evaluated, continued for a second and dropped again. Gaps are
between the tokens of one of the other sequences, in five times:

- `without`: nothing else there.
- `importing`: from the import's start until the state is in the engine. This is what the acceptance is about.
- `first_logits`: the gap that holds the first evaluation behind it. Its row attends to 8,192 tokens.
- `continued`: while the imported sequence generates as well. Each of its tokens attends to as many, so this is what a
  sequence of that length costs its neighbours for as long as it is served, however its state got there.
- `after`: the half second after it was dropped, when the pool closes up.

This process plays the daemon: pages are made beforehand, so neither a prefill nor a wire competes for the cores, and
they hold zeros, which cost the engine what any numbers do. `met`: p99 while importing is at most twice what it is
without. `first_over_continued` says what is left of the import's cost when its evaluation is compared with any later
one. Owns the worker process, one ring and the pages.
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
TIMES: Final = ("without", "importing", "first_logits", "continued", "after")
COMMIT_S: Final = 0.3  # until the imported sequence generates as well
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
            if not (data := self.sock.recv(1 << 16)):
                raise SystemExit("the worker ended")
            self.buffer += data
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
    """Gaps of the sequences that generate, by what else happened."""

    def __init__(self, played: Played, jobs: Sequence[int]) -> None:
        self._played = played
        self._last: dict[int, float | None] = dict.fromkeys(jobs)
        self.gaps: dict[str, list[float]] = {time: [] for time in TIMES}
        self.import_s = list[float]()

    def follow(self, seconds: float, into: str | None = None) -> None:
        """Note the gaps that end from now on, for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _, gap in self._ended(self._hear()):
                if into is not None:
                    self.gaps[into].append(gap)

    def follow_import(self, job: int) -> None:
        """Until it has its first logits."""
        began, ended = time.monotonic(), list[tuple[float, float]]()
        while time.monotonic() < began + TIMEOUT_S:
            messages = self._hear()
            ended += self._ended(messages)
            for message in messages:
                if isinstance(message, p.Imported) and message.job == job:
                    self.import_s.append(time.monotonic() - began)
                    for moment, gap in ended:
                        imported = moment > message.marks["imported"]
                        self.gaps["first_logits" if imported else "importing"].append(gap)
                    return
        raise SystemExit(f"nothing was imported within {TIMEOUT_S:.0f} s")

    def _hear(self) -> list[p.ToDaemon]:
        messages = self._played.hear(0.1)
        for message in messages:
            if isinstance(message, p.Failed):
                raise SystemExit(f"the worker failed: {message.message}")
        return messages

    def _ended(self, messages: Sequence[p.ToDaemon]) -> list[tuple[float, float]]:
        """(moment, gap) of each token among them that has one before it."""
        found = []
        for message in messages:
            if isinstance(message, p.TextDelta) and message.job in self._last:
                now = time.monotonic()
                last, self._last[message.job] = self._last[message.job], now
                if last is not None:
                    found.append((now, now - last))
        return found


def run(generating: int, imported: int, imports: int, pause_s: float) -> dict[str, Any]:
    engine = options(generating, imported)
    records = pages_of(engine, imported)
    with worker(engine) as played:
        jobs = [played.generate([7 + n] * PROMPT, n) for n in range(generating)]
        watch = Watch(played, jobs)
        watch.follow(2)  # prompts and warm-up
        for _ in range(imports):
            watch.follow(pause_s, into="without")
            job = played.generate([0] * (imported + 1), generating, ring=0)
            wire = threading.Thread(target=played.land, args=(records, job))
            wire.start()
            watch.follow_import(job)
            wire.join()
            played.send(p.Commit(job))
            watch.follow(COMMIT_S)
            watch.follow(pause_s, into="continued")
            played.send(p.Release(job))
            watch.follow(CLOSING_S, into="after")
        for job in jobs:
            played.send(p.Release(job))
    return {
        "generating": generating,
        "imported_tokens": imported,
        "imported_bytes": sum(map(len, records)),
        "imports": imports,
        "import_s": msgspec.to_builtins(quantiles(watch.import_s, 4)),
        **report(watch.gaps),
        "load": os.getloadavg()[0],
    }


def report(gaps: dict[str, list[float]]) -> dict[str, Any]:
    found = {time: quantiles(many, 5) for time, many in gaps.items()}
    p99 = {time: one.p99 for time, one in found.items() if one is not None}
    ratios = {time: round(p99[time] / p99["without"], 3) for time in TIMES if time != "without"}
    return {
        "gaps": {time: len(many) for time, many in gaps.items()},
        "gap_s": msgspec.to_builtins(found),
        "ratio_p99": ratios,
        "first_over_continued": round(p99["first_logits"] / p99["continued"], 3),
        "met": ratios["importing"] <= LIMIT,
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
