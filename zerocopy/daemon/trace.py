"""What happened in one handoff, as seen from one host: when, how many bytes, how it ended (M1).

Times are this host's monotonic clock. Owns no content: counts, sizes and times only (X4). Bound: a host keeps the last
`KEPT` traces for `/v1/status`, and `KEPT_SPANS` spans of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from zerocopy.daemon.telemetry import HandoffRecord, Phase, Role
from zerocopy.handoff.components import Component
from zerocopy.worker.protocol import Span

KEPT: Final = 32
KEPT_SPANS: Final = 50_000  # of all of them, the newest first: 3 MB of `/v1/status`, of which its readers take 8
KV: Final = (Component.ATTENTION_KV.label, Component.MTP_KV.label)


class Trace(msgspec.Struct):
    """Filled in as the handoff goes on. `marks` are named moments, spans are (began, ended, bytes)."""

    handoff: str
    role: Role
    peer: str
    transport: str
    prompt_tokens: int
    outcome: str = "running"
    reason: str = ""
    marks: dict[str, float] = {}
    chunks: list[Span] = []
    exports: list[Span] = []
    wire: list[tuple[float, float, int, str]] = []  # with the component's label
    imports: list[Span] = []
    component_bytes: dict[str, int] = {}
    component_pages: dict[str, int] = {}
    probe: str = "off"  # what the comparison with the source's probe gave
    source: dict[str, float] = {}  # a decoder's copy of the prefiller's own figures, seconds after GRANT reached it

    def page(self, component: Component, span: Span) -> None:
        """One page went over the wire, or arrived from it."""
        label = component.label
        self.component_bytes[label] = self.component_bytes.get(label, 0) + span[2]
        self.component_pages[label] = self.component_pages.get(label, 0) + 1
        self.wire.append((*span, label))

    @property
    def spans(self) -> int:
        return len(self.chunks) + len(self.exports) + len(self.wire) + len(self.imports)

    def without_spans(self) -> Trace:
        """A copy: whoever made the handoff may still want them."""
        return msgspec.structs.replace(self, chunks=[], exports=[], wire=[], imports=[])

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_by(float("inf"))

    def kv_bytes_by(self, moment: float) -> int:
        """KV bytes whose transfer had ended at `moment`."""
        return sum(nbytes for _began, ended, nbytes, label in self.wire if ended <= moment and label in KV)

    def moved(self) -> tuple[float, float]:
        """(bytes, busy seconds) on the wire as the sender saw them, up to the acknowledgements: what a receiver sees
        of a page begins when its first record is already there. A decoder has the sender's word for it."""
        if self.role == "decoder":
            return self.source.get("wire_bytes", 0.0), self.source.get("wire_busy_s", 0.0)
        return float(sum(self.component_bytes.values())), busy(self.wire)

    def seconds(self, begin: str, end: str) -> float | None:
        """Between two marks; None unless both were reached."""
        return between(self.marks, begin, end)

    def record(self) -> HandoffRecord:
        """For the metrics."""
        phases: dict[Phase, float] = {}
        if self.exports:
            phases["export"] = busy(self.exports)
        if self.wire:
            phases["wire"] = busy(self.wire)
        if self.imports:
            phases["import"] = busy(self.imports)
        if (queued := self.seconds("asked", "granted")) is not None:
            phases["queue"] = queued
        if (commit := self.seconds("imported", "committed")) is not None:
            phases["commit"] = commit
        sizes: dict[Component, int] = defaultdict(int)
        for component in Component:
            if nbytes := self.component_bytes.get(component.label):
                sizes[component] = nbytes
        prefilled = self.marks.get("prefilled")
        return HandoffRecord(
            role=self.role,
            outcome="ok" if self.outcome == "committed" else "failed",
            reason="ok" if self.outcome == "committed" else self.reason,
            component_bytes=sizes,
            phase_s=phases,
            overlap=self.kv_bytes_by(prefilled) / self.kv_bytes if prefilled and self.kv_bytes else None,
            tail_s=self.seconds("prefilled", "committed"),
        )


def between(marks: Mapping[str, float], begin: str, end: str) -> float | None:
    """Seconds from one mark to another; None unless both were reached."""
    return marks[end] - marks[begin] if begin in marks and end in marks else None


def busy(spans: Iterable[tuple[float, float, *tuple[object, ...]]]) -> float:
    """Seconds in which at least one span was running."""
    total, until = 0.0, float("-inf")
    for began, ended, *_ in sorted(spans, key=lambda span: span[0]):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total
