"""One prompt on a prefill lane: evaluate it chunk by chunk, export its state as it grows.

Compute never waits for the wire: with the export ring full, pages stay in the engine's cache and leave after a later
chunk (sliding-window models are the exception, `export_before_next_chunk`). The last prompt token is left to the
decoder; here it is only evaluated as the probe, on a copy, after everything else has been exported.

Owns the job's page order (`sequence`) and its cursor; memory belongs to the ring and slab it was lent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Final

import numpy as np

from native.ring import Ring
from native.slab import Slab
from zerocopy.handoff.components import HEADER_BYTES, Component, ComponentSpec, PageHeader, page_checksum
from zerocopy.runtime.base import EngineError, EngineFacts, Lane, Output, Row
from zerocopy.runtime.pages import fitted, longest, paged, span
from zerocopy.worker.protocol import ChunkDone, Prefill, Prefilled, SlabPart, SnapshotReady, Span, ToDaemon

# One part of a snapshot on the wire: large enough to run at full speed, small enough that other pages get a turn.
SLAB_PART_BYTES: Final = 16 << 20

Range = tuple[int, int]


class PrefillJob:
    """Two strands: the loop has `wanted()` evaluated whenever it composes a batch, and calls `work()` to export."""

    decoding = False
    starting = False

    def __init__(
        self,
        message: Prefill,
        lane: Lane,
        facts: EngineFacts,
        ring: Ring,
        slab: Slab | None,
        send: Callable[[ToDaemon], None],
    ) -> None:
        self.job = message.job
        self.lane = lane
        self.ring = ring
        self.shared = False  # the loop's to say: others were in the pool
        self.finished = False
        # What is exported before the next slice ends with a page.
        self.whole_slices = facts.export_before_next_chunk
        self._message = message
        self._facts = fitted(facts, message.largest_page)
        self._slab = slab
        self._send = send
        self._history = message.tokens[:-1]
        self._evaluated = 0
        self._exported = 0  # tokens whose pages have all left the engine
        self._sequence = 0
        self._marks = {"started": time.monotonic()}
        self._exports: list[Span] = []
        self._work = self._export_all()

    @property
    def remaining(self) -> int:
        """Prompt tokens still to evaluate."""
        return len(self._history) - self._evaluated

    @property
    def solo(self) -> bool:
        """Nothing but the prompt decided the last bit."""
        return not self.shared or self._facts.batch_invariant

    def wanted(self) -> Row | None:
        """The next chunk, unless the job is over or the engine would overwrite what has not been exported. The loop may
        have less of it evaluated."""
        behind = self._facts.export_before_next_chunk and self._exported < self._evaluated
        if self.finished or behind or not self.remaining:
            return None
        if not self._evaluated:
            self._marks["started"] = time.monotonic()
        end = min(self._evaluated + self._facts.chunk_tokens, len(self._history))
        return Row(self.lane, self._history[self._evaluated : end], self._evaluated)

    def evaluated(self, tokens: int, output: Output, began: float) -> None:
        """The row that `wanted` gave has been evaluated."""
        self._evaluated += tokens
        now = time.monotonic()
        self._send(ChunkDone(self.job, self._evaluated, began, now))
        if not self.remaining:
            self._marks["prefilled"] = now

    def work(self) -> bool:
        """One page; False when there is none, or no room for it."""
        advanced = next(self._work, None)
        if advanced is None:
            self.finished = True
            return False
        return advanced

    def close(self) -> None:
        """Let go of every view of ring and slab. The lane is the loop's to clear."""
        self._work.close()
        self.finished = True

    # The whole export as one generator: yields True after a piece of work, False to wait for chunks or ring space.
    def _export_all(self) -> Generator[bool, None, None]:
        yield from self._export_pages()
        while self.remaining:  # a model without pages
            yield False
        yield from self._final_components()
        yield from self._probe()
        self._finish()

    def _export_pages(self) -> Iterator[bool]:
        """Every page of a token range. A component's next page is due when it has its least number of tokens and takes
        along what has gathered since, up to the most that is one page. All follow the first component, so that a
        decoder's MTP state is never ahead of its target's."""
        n = len(self._history)
        kinds = [(spec, span(spec, self._facts), longest(spec, self._facts)) for spec in paged(self._facts.schema)]
        left = [0] * len(kinds)  # tokens of each that have left the engine
        while min(left, default=n) < n:
            for at, (spec, least, most) in enumerate(kinds):
                least, most = min(left[at] + least, n), min(left[at] + most, n)
                if left[at] == n or (at and left[0] < least):
                    continue
                while self._evaluated < least:
                    yield False
                tokens = (left[at], max(least, min(most, left[0] if at else self._evaluated)))
                while not self._export(spec, tokens):
                    yield False
                left[at] = tokens[1]
                self._exported = min(left)
                yield True

    def _export(self, spec: ComponentSpec, tokens: Range) -> bool:
        def write(view: memoryview) -> None:
            self.lane.export_page(spec.component, tokens, view)

        return self._record(spec, tokens, write)

    def _record(self, spec: ComponentSpec, tokens: Range, write: Callable[[memoryview], None]) -> bool:
        """Claim, write, checksum, publish one ring record; False when the ring is full."""
        layers = (0, spec.layers)
        nbytes = spec.page_bytes(layers, tokens)
        slot = self.ring.claim(HEADER_BYTES + nbytes)
        if slot is None:
            return False
        began = time.monotonic()
        try:
            payload = slot.view[HEADER_BYTES:]
            write(payload)
            slot.view[:HEADER_BYTES] = self._header(spec, layers, tokens, payload).pack()
        except BaseException:
            slot.abort()
            raise
        slot.commit()
        self._exports.append((began, time.monotonic(), nbytes))
        return True

    def _header(self, spec: ComponentSpec, layers: Range, tokens: Range, payload: memoryview) -> PageHeader:
        header = PageHeader(
            handoff_id=self._message.handoff_id,
            identity=self._facts.identity.digest(),
            epoch=self._message.epoch,
            sequence=self._sequence,
            component=spec.component,
            layers=layers,
            tokens=tokens,
            payload_bytes=len(payload),
            position_planes=self._facts.schema.position_planes,
            checksum=page_checksum(payload, self._message.seed, spec.component, layers, tokens),
            final=tokens[1] == len(self._history) and layers[1] == spec.layers,
        )
        self._sequence += 1
        return header

    def _final_components(self) -> Iterator[bool]:
        """What exists only after the last chunk: recurrent snapshot, MTP hidden row, token history."""
        schema, everything = self._facts.schema, (0, len(self._history))
        if self._slab is not None:
            yield from self._snapshot(self._slab)
        writers = {Component.MTP_HIDDEN: self.lane.export_hidden, Component.TOKENS: self._write_tokens}
        for component, write in writers.items():
            if spec := schema.spec(component):
                while not self._record(spec, everything, write):
                    yield False
        self._marks["state_exported"] = time.monotonic()

    def _write_tokens(self, view: memoryview) -> None:
        np.frombuffer(view, dtype="<u4")[:] = self._history

    def _snapshot(self, slab: Slab) -> Iterator[bool]:
        """The engine writes it in one call; each part may leave while the next one's checksum is made: this is tail."""
        schema = self._facts.schema
        began = time.monotonic()
        blob = slab.view(0, schema.snapshot_bytes())
        self.lane.export_snapshot(blob)
        self._exports.append((began, time.monotonic(), len(blob)))
        for component in (Component.CONVOLUTION, Component.RECURRENT):
            if spec := schema.spec(component):
                for layers in _layer_groups(spec):
                    self._send(SnapshotReady(self.job, (self._slab_part(blob, spec, layers),)))
                    yield True

    def _slab_part(self, blob: memoryview, spec: ComponentSpec, layers: Range) -> SlabPart:
        tokens = (0, len(self._history))
        offset = self._facts.schema.slab_offset(spec.component, layers[0])
        nbytes = spec.page_bytes(layers, tokens)
        header = self._header(spec, layers, tokens, blob[offset : offset + nbytes])
        return SlabPart(header.pack(), offset, nbytes)

    def _probe(self) -> Iterator[bool]:
        spec = self._facts.schema.spec(Component.PROBE)
        if not self._message.probe or spec is None:
            return
        self._marks["probe_started"] = time.monotonic()
        rows = [self.lane.probe(self._message.tokens[-1], len(self._history))]
        if (mtp := self.lane.mtp_logits()) is not None:
            rows.append(mtp)
        logits = np.concatenate(rows)  # a copy: others may be evaluated before the ring has room

        def write(view: memoryview) -> None:
            np.frombuffer(view, dtype=np.float32)[:] = logits

        self._marks["probe_ended"] = time.monotonic()
        while not self._record(spec, (0, len(self._history)), write):
            yield False

    def _finish(self) -> None:
        positions = self.lane.positions()
        expected = len(self._history) - 1
        if positions.target != expected or positions.mtp not in (None, expected):
            raise EngineError("position", f"prefill ended at {positions}, the prompt's state ends at {expected}")
        self._marks["exported"] = time.monotonic()
        self._send(
            Prefilled(
                job=self.job,
                target_position=positions.target,
                mtp_position=positions.mtp,
                pages=self._sequence,
                marks=self._marks,
                exports=tuple(self._exports),
                solo=self.solo,
            )
        )


def _layer_groups(spec: ComponentSpec) -> Iterator[Range]:
    """Consecutive layers, together at most SLAB_PART_BYTES (or one layer where that alone is more)."""
    start = 0
    for layer in range(1, spec.layers + 1):
        if layer == spec.layers or spec.page_bytes((start, layer + 1), (0, 1)) > SLAB_PART_BYTES:
            yield start, layer
            start = layer
