"""A worker with a saboteur in its exporter: `python -m tests.e2e.planted_worker PLAN FD OPTIONS`.

Before every prompt it reads the JSON file PLAN: `fault` to `component` (its label), `facts` to claim of the engine
(read once, at start); before every chunk: `pace_s` to sleep. Without a fault it exports what a worker does, and keeps
the pages: they are what "taken from another request" is made of.

    omit              no page of the component is exported, and the page numbers do not show it
    cut               its last page is left out, the one before it says that it is the last
    truncate          its first page has half its bytes, and its header says so
    swap              pages carry each other's addresses (a single page: the next layer's)
    foreign-bytes     another request's bytes, with the checksum they had there
    foreign-page      another request's page, header and all

and, before the checksum is taken, so that no checksum can tell:

    zero              the numbers are zeroed, the engine's headers stay right
    exchange          layers' numbers are exchanged (in a single row: their order is turned round)
    foreign-early     another request's numbers
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

import zerocopy.worker.loop as loop
import zerocopy.worker.prefill_job as prefill_job
from tests.e2e.seams import replace
from zerocopy.handoff.components import (
    HEADER_BYTES,
    SNAPSHOT,
    Component,
    ComponentSpec,
    PageHeader,
)
from zerocopy.runtime.base import Row, Runtime
from zerocopy.runtime.llama.blob import Geometry
from zerocopy.worker.main import WorkerOptions, main, open_runtime
from zerocopy.worker.prefill_job import PrefillJob, Range
from zerocopy.worker.protocol import SlabPart

_ROW_HEADER: Final = 12  # in front of every layer's rows
_PAGED: Final = (Component.ATTENTION_KV, Component.MTP_KV)
_EARLY: Final = ("zero", "exchange", "foreign-early")

Address = tuple[Component, Range, Range]


class PlantedJob(PrefillJob):
    plan_file: ClassVar[Path]
    planned: ClassVar[dict[str, Any]] = {}
    kept: ClassVar[dict[Address, tuple[PageHeader, bytes]]] = {}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self).planned = json.loads(self.plan_file.read_text())
        self._fault: str | None = self.planned.get("fault")

    def _hits(self, component: Component) -> bool:
        return self._fault is not None and component.label == self.planned["component"]

    def wanted(self) -> Row | None:
        row = super().wanted()
        if row is not None:
            time.sleep(json.loads(self.plan_file.read_text()).get("pace_s", 0))
        return row

    def _record(self, spec: ComponentSpec, tokens: Range, write: Callable[[memoryview], None]) -> bool:
        if self._hits(spec.component):
            if self._fault == "omit" or (self._fault == "cut" and tokens[1] == len(self._history)):
                return True
            if self._fault == "truncate" and tokens[0] == 0:
                return self._half_record(spec, tokens, write)
        return super()._record(spec, tokens, write)

    def _half_record(self, spec: ComponentSpec, tokens: Range, write: Callable[[memoryview], None]) -> bool:
        layers = (0, spec.layers)
        whole = memoryview(bytearray(spec.page_bytes(layers, tokens)))
        half = whole[: len(whole) // 2]
        slot = self.ring.claim(HEADER_BYTES + len(half))
        if slot is None:
            return False
        write(whole)
        slot.view[HEADER_BYTES:] = half
        slot.view[:HEADER_BYTES] = self._header(spec, layers, tokens, half).pack()
        slot.commit()
        return True

    def _slab_part(self, blob: memoryview, spec: ComponentSpec, layers: Range) -> SlabPart:
        if self._hits(spec.component) and self._fault == "exchange" and layers[0] == 0:
            first, second = (self._layer_numbers(blob, spec, layer) for layer in (0, 1))
            first[:], second[:] = bytes(second), bytes(first)
        if self._hits(spec.component) and self._fault == "truncate" and layers[0] == 0:
            tokens, offset = (0, len(self._history)), self._facts.schema.slab_offset(spec.component, layers[0])
            half = spec.page_bytes(layers, tokens) // 2
            header = self._header(spec, layers, tokens, blob[offset : offset + half])
            return SlabPart(header.pack(), offset, half)
        return super()._slab_part(blob, spec, layers)

    def _header(self, spec: ComponentSpec, layers: Range, tokens: Range, payload: memoryview) -> PageHeader:
        address = (spec.component, layers, tokens)
        if not self._hits(spec.component):
            header = super()._header(spec, layers, tokens, payload)
            if self._fault is None:
                self.kept[address] = (header, bytes(payload))
            return header
        if self._fault in _EARLY:
            self._sabotage(spec, address, payload)
        header = super()._header(spec, layers, tokens, payload)
        return self._mislabel(spec, address, payload, header)

    def _mislabel(self, spec: ComponentSpec, address: Address, payload: memoryview, header: PageHeader) -> PageHeader:
        match self._fault:
            case "cut":
                page = self._facts.page_tokens
                last = spec.component in _PAGED and header.tokens[1] + page >= len(self._history)
                return msgspec.structs.replace(header, final=last)
            case "swap":
                return msgspec.structs.replace(header, **self._other_address(spec, header))
            case "foreign-bytes":
                kept, content = self.kept[address]
                payload[:] = content
                return msgspec.structs.replace(header, checksum=kept.checksum)
            case "foreign-page":
                kept, content = self.kept[address]
                payload[:] = content
                return kept
        return header

    def _other_address(self, spec: ComponentSpec, header: PageHeader) -> dict[str, Range]:
        (l0, l1), (t0, t1) = header.layers, header.tokens
        if spec.component in SNAPSHOT and spec.layers > 1:
            other = 1 if l0 == 0 else l0 - 1
            return {"layers": (other, other + 1)}
        if spec.component in _PAGED:
            page = self._facts.page_tokens
            return {"tokens": (t0 + page, t1 + page) if t0 == 0 else (t0 - page, t0)}
        return {"layers": (l0 + 1, l1 + 1)}

    def _layer_numbers(self, blob: memoryview, spec: ComponentSpec, layer: int) -> memoryview:
        start = self._facts.schema.slab_offset(spec.component, layer) + _ROW_HEADER
        return blob[start : start + spec.layer_bytes[layer]]

    def _sabotage(self, spec: ComponentSpec, address: Address, payload: memoryview) -> None:
        spans = list(_numbers(self._lane_geometry(spec.component), spec, address, len(payload)))
        turned = [bytes(payload[start:end]) for start, end in reversed(spans)]
        for (start, end), other in zip(spans, turned, strict=True):
            match self._fault:
                case "zero":
                    payload[start:end] = bytes(end - start)
                case "exchange" if spec.component not in SNAPSHOT:  # theirs are exchanged in `_slab_part`
                    payload[start:end] = other if len(spans) > 1 else other[::-1]
                case "foreign-early":
                    payload[start:end] = self.kept[address][1][start:end]

    def _lane_geometry(self, component: Component) -> Geometry | None:
        geometries: dict[Component, Geometry] = self.lane._m.geometries  # type: ignore[attr-defined]
        return geometries.get(component)


def _numbers(geometry: Geometry | None, spec: ComponentSpec, address: Address, nbytes: int) -> Iterator[Range]:
    """Where a page's rows of numbers lie, between the engine's headers (layout: `zerocopy.runtime.llama.blob`)."""
    component, layers, tokens = address
    if component in SNAPSHOT:
        at = 0
        for size in spec.layer_bytes[slice(*layers)]:
            yield at + _ROW_HEADER, at + _ROW_HEADER + size
            at += _ROW_HEADER + size
        return
    if component not in _PAGED:
        yield 0, nbytes
        return
    assert geometry is not None
    at, cells = 8, tokens[1] - tokens[0]
    for cache in geometry.caches:
        assert not cache.v_element, "these tests run with flash attention on"
        at += 8 + cells * geometry.cell.itemsize + 16
        for row in (*cache.k, *cache.v):
            yield at + _ROW_HEADER, at + _ROW_HEADER + cells * row.bytes
            at += _ROW_HEADER + cells * row.bytes


def _layer_groups(spec: ComponentSpec) -> Iterator[Range]:
    """Every layer of a snapshot a page of its own, so that layers can be told apart; none of what is left out."""
    fault, hit = PlantedJob.planned.get("fault"), spec.component.label == PlantedJob.planned.get("component")
    layers = 0 if hit and fault == "omit" else spec.layers - 1 if hit and fault == "cut" else spec.layers
    return ((layer, layer + 1) for layer in range(layers))


def _open(options: WorkerOptions) -> Runtime:
    runtime = open_runtime(options)
    odd = json.loads(PlantedJob.plan_file.read_text()).get("facts", {})
    identity = msgspec.structs.replace(runtime.facts.identity, **odd)
    runtime.facts = msgspec.structs.replace(runtime.facts, identity=identity)
    return runtime


if __name__ == "__main__":
    PlantedJob.plan_file = Path(sys.argv[1])
    replace(loop, "PrefillJob", PlantedJob)
    replace(prefill_job, "_layer_groups", _layer_groups)
    sys.exit(main([sys.argv[0], *sys.argv[2:]], _open))
