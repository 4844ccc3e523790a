"""What a daemon says about itself: Prometheus metrics and structured log lines (M1, M2), never content (X4).

One method per event, so that call sites cannot invent labels. Label values are bounded: reasons are slugs from our
own code or `other`, peers are configured names or `other`. Log lines are built from the known fields of `LogFields`
only; anything that reaches the logger another way is reduced to its template, without its arguments.
Owns its registry (never the global one) and no sockets. Bound: `MAX_REASONS` reasons per metric.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TextIO, TypedDict, Unpack

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from zerocopy import __version__
from zerocopy.handoff.components import Component

Role = Literal["prefiller", "decoder"]
Placement = Literal["local", "disaggregated", "none"]
Outcome = Literal["ok", "failed", "cancelled"]
Phase = Literal["queue", "export", "wire", "import", "commit"]
PromptSource = Literal["computed", "transferred", "cached"]

MAX_REASONS: Final = 64
OTHER: Final = "other"
_SLUG: Final = re.compile(r"^[a-z0-9][a-z0-9-]{0,47}$")

# A handoff's phases span 50 us (a page import on loopback) to minutes (a long prompt on a slow link): 1-2.5-5 steps
# keep the error of an interpolated quantile below a factor of 2.5 with 20 buckets.
PHASE_BUCKETS: Final = (*(m * 10.0**e for e in range(-4, 2) for m in (1, 2.5, 5)), 100.0, 250.0)
# Time to first token: from a cached short prompt on a small model to a 128K prompt that queued.
TTFT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160)
# Time per output token: 1 ms is 1,000 tokens/s, 1 s is a very large model on a slow host; usual SLOs are 25-100 ms.
TPOT_BUCKETS: Final = (0.001, 0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
RATIO_BUCKETS: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

# The library would add to every counter a second series with the time of its creation.
disable_created_metrics()  # type: ignore[no-untyped-call]


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one handoff cost on this host (M1). `reason` is `ok` when it committed; times in seconds."""

    role: Role
    outcome: Outcome
    reason: str
    component_bytes: Mapping[Component, int] = {}
    phase_s: Mapping[Phase, float] = {}
    overlap: float | None = None  # share of the KV bytes that left before prefill ended
    tail_s: float | None = None  # end of prefill to commit


class Telemetry:
    """Counters, gauges and histograms of one daemon."""

    def __init__(self, peers: Iterable[str] = ()) -> None:
        self._peers = frozenset(peers)
        self._reasons: dict[str, set[str]] = {}
        self.registry = registry = CollectorRegistry()
        Gauge("zc_build_info", "Constant 1, labelled with the version.", ["version"], registry=registry).labels(
            __version__
        ).set(1)
        self._serving = Gauge("zc_serving", "1 while this daemon can serve requests.", registry=registry)
        self._make_requests(registry)
        self._make_handoffs(registry)
        self._make_links(registry)

    def _make_requests(self, registry: CollectorRegistry) -> None:
        labels = ["outcome", "reason", "placement"]
        self._requests = Counter("zc_requests", "Requests that ended.", labels, registry=registry)
        self._active = Gauge("zc_requests_active", "Requests queued or running.", registry=registry)
        self._fallbacks = Counter("zc_fallbacks", "Requests prefilled here instead.", ["reason"], registry=registry)
        self._prompt_tokens = Counter(
            "zc_prompt_tokens", "Prompt tokens, by where they came from.", ["source"], registry=registry
        )
        self._output_tokens = Counter("zc_output_tokens", "Generated tokens.", registry=registry)
        self._ttft = Histogram(
            "zc_ttft_seconds", "Arrival to first token.", ["placement"], buckets=TTFT_BUCKETS, registry=registry
        )
        self._tpot = Histogram(
            "zc_tpot_seconds", "Mean time per output token after the first.", ["placement"],
            buckets=TPOT_BUCKETS, registry=registry,
        )  # fmt: skip

    def _make_handoffs(self, registry: CollectorRegistry) -> None:
        self._handoffs = Counter(
            "zc_handoffs", "Handoffs that ended.", ["role", "outcome", "reason"], registry=registry
        )
        self._bytes = Counter(
            "zc_handoff_bytes", "State bytes moved, page headers excluded.", ["role", "component"], registry=registry
        )
        self._phase = Histogram(
            "zc_handoff_phase_seconds", "Time per handoff and phase; phases overlap.", ["role", "phase"],
            buckets=PHASE_BUCKETS, registry=registry,
        )  # fmt: skip
        self._overlap = Histogram(
            "zc_handoff_overlap_ratio", "Share of KV bytes sent before prefill ended.", ["role"],
            buckets=RATIO_BUCKETS, registry=registry,
        )  # fmt: skip
        self._tail = Histogram(
            "zc_handoff_tail_seconds", "End of prefill to commit.", ["role"], buckets=PHASE_BUCKETS, registry=registry
        )
        self._reserved = Gauge("zc_reserved_bytes", "Bytes held for handoffs that have not ended.", registry=registry)
        self._late = Counter("zc_late_pages", "Pages of a dead epoch, dropped.", registry=registry)
        self._restarts = Counter("zc_worker_restarts", "Engine worker restarts.", ["reason"], registry=registry)

    def _make_links(self, registry: CollectorRegistry) -> None:
        self._up = Gauge("zc_link_up", "1 while the link to a peer is open.", ["peer"], registry=registry)
        self._rtt = Gauge("zc_link_rtt_seconds", "Latest round trip.", ["peer"], registry=registry)
        self._bandwidth = Gauge(
            "zc_link_bandwidth_bytes_per_second", "Latest measured bandwidth.", ["peer"], registry=registry
        )

    def serving(self, yes: bool) -> None:
        self._serving.set(yes)

    def request_started(self) -> None:
        self._active.inc()

    def request_ended(self, outcome: Outcome, reason: str, placement: Placement) -> None:
        """Once per `request_started`. `placement` is `none` when it ended before one was chosen."""
        self._active.dec()
        self._requests.labels(outcome, self._reason("requests", reason), placement).inc()

    def fell_back(self, reason: str) -> None:
        self._fallbacks.labels(self._reason("fallbacks", reason)).inc()

    def first_token(self, placement: Placement, seconds: float) -> None:
        self._ttft.labels(placement).observe(seconds)

    def generated(self, placement: Placement, tokens: int, seconds_after_first: float) -> None:
        """At the end of a request; one token has no time per token."""
        self._output_tokens.inc(tokens)
        if tokens > 1:
            self._tpot.labels(placement).observe(seconds_after_first / (tokens - 1))

    def prompt_tokens(self, source: PromptSource, tokens: int) -> None:
        self._prompt_tokens.labels(source).inc(tokens)

    def handoff_ended(self, record: HandoffRecord) -> None:
        role = record.role
        self._handoffs.labels(role, record.outcome, self._reason("handoffs", record.reason)).inc()
        for component, count in record.component_bytes.items():
            self._bytes.labels(role, component.name.lower()).inc(count)
        for phase, seconds in record.phase_s.items():
            self._phase.labels(role, phase).observe(seconds)
        if record.overlap is not None:
            self._overlap.labels(role).observe(record.overlap)
        if record.tail_s is not None:
            self._tail.labels(role).observe(record.tail_s)

    def reserved(self, total_bytes: int) -> None:
        self._reserved.set(total_bytes)

    def late_page(self, pages: int = 1) -> None:
        self._late.inc(pages)

    def worker_restarted(self, reason: str) -> None:
        self._restarts.labels(self._reason("restarts", reason)).inc()

    def link(self, peer: str, *, up: bool, rtt_s: float | None = None, bandwidth_bytes_s: float | None = None) -> None:
        label = peer if peer in self._peers else OTHER
        self._up.labels(label).set(up)
        if rtt_s is not None:
            self._rtt.labels(label).set(rtt_s)
        if bandwidth_bytes_s is not None:
            self._bandwidth.labels(label).set(bandwidth_bytes_s)

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    def _reason(self, metric: str, reason: str) -> str:
        """A reason may have come from a peer: only slugs, and only so many of them, become labels."""
        seen = self._reasons.setdefault(metric, set())
        if not _SLUG.match(reason) or (reason not in seen and len(seen) >= MAX_REASONS):
            return OTHER
        seen.add(reason)
        return reason


class LogFields(TypedDict, total=False):
    """Everything a log line may carry. Nothing derived from prompts, answers or state belongs here (X4)."""

    peer: str
    transport: str
    address: str
    handoff: str  # id in hex
    request: str
    role: str
    state: str
    reason: str
    detail: str  # the sentence of one of our own errors
    placement: str
    model: str
    pid: int
    exit_code: int
    tokens: int
    bytes: int
    pages: int
    seconds: float
    attempt: int


_INTEGERS: Final = frozenset({"pid", "exit_code", "tokens", "bytes", "pages", "attempt"})
_NUMBERS: Final = frozenset({"seconds"})
_TEXTS: Final = frozenset(LogFields.__annotations__) - _INTEGERS - _NUMBERS
_MAX_TEXT: Final = 500  # a log line stays readable, whoever wrote the value
_LOGGER: Final = logging.getLogger("zc")


def log_event(event: str, *, level: int = logging.INFO, **fields: Unpack[LogFields]) -> None:
    """One event: a fixed phrase and typed fields. An unknown field, or one of another type, is a bug and raises."""
    for name, value in fields.items():
        known = (
            (name in _TEXTS and isinstance(value, str))
            or (name in _INTEGERS and isinstance(value, int))
            or (name in _NUMBERS and isinstance(value, int | float))
        )
        if not known:
            raise TypeError(f"log field {name!r} is unknown or of the wrong type")
    _LOGGER.log(level, event, extra={"zc_fields": fields})


def configure_logging(level: str, style: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Route all logging of this process to `stream` (stderr) through the redacting formatter. Call once, at start."""
    output = logging.StreamHandler(stream or sys.stderr)
    output.setFormatter(_JsonLines() if style == "json" else _TextLines())
    logging.basicConfig(level=level.upper(), handlers=[output], force=True)


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        fields = " ".join(f"{name}={_text(value)}" for name, value in _safe_fields(record).items())
        return f"{stamp} {record.levelname.lower():<7} {_event(record)} {fields}".rstrip()


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "event": _event(record)}
        return json.dumps(line | _safe_fields(record), ensure_ascii=False)


def _event(record: logging.LogRecord) -> str:
    """The template, not the message: arguments of foreign log calls may be content."""
    name = "" if record.name == _LOGGER.name else f"{record.name}: "
    return _clean(f"{name}{record.msg if isinstance(record.msg, str) else type(record.msg).__name__}")


def _safe_fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = dict(getattr(record, "zc_fields", {}))
    if record.exc_info and record.exc_info[0] is not None:
        fields["error"] = record.exc_info[0].__name__  # the type and where, not the text: it may quote content
        frames = traceback.extract_tb(record.exc_info[2])
        fields["where"] = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames[-6:]))
    return {name: _clean(value) if isinstance(value, str) else value for name, value in fields.items()}


def _clean(text: str) -> str:
    """One line, printable, bounded: a peer's text cannot forge a log line."""
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_TEXT])


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=') else text
