"""How fast pages really left: a bandwidth estimate from busy periods of transfers (T5). Pure; time is an argument.

A busy period is time during which at least one page is on its way. Waiting for credit or for the engine is not in it,
so an idle link keeps its last estimate. Small periods measure latency, not bandwidth, and are not counted.
"""

from __future__ import annotations

from typing import Final

MIN_SAMPLE_BYTES: Final = 4 << 20
MIN_SAMPLE_S: Final = 0.01  # acknowledgements come in steps of about a millisecond
MAX_SAMPLE_S: Final = 1.0  # a long busy period gives one sample a second
WEIGHT: Final = 0.3  # of the newest sample


class BandwidthEstimate:
    """Bits per second, None before the first sample."""

    def __init__(self) -> None:
        self.bps: float | None = None
        self._since: float | None = None
        self._bytes = 0

    def busy(self, now: float) -> None:
        """A page starts; harmless if others are on their way already."""
        if self._since is None:
            self._since = now
            self._bytes = 0

    def delivered(self, payload_bytes: int, now: float, *, idle: bool) -> None:
        """The peer acknowledged a page; `idle` when it was the last one on its way."""
        if self._since is None:
            return
        self._bytes += payload_bytes
        elapsed = now - self._since
        enough = self._bytes >= MIN_SAMPLE_BYTES and elapsed >= MIN_SAMPLE_S
        if enough and (idle or elapsed >= MAX_SAMPLE_S):
            sample = 8 * self._bytes / elapsed
            self.bps = sample if self.bps is None else self.bps + WEIGHT * (sample - self.bps)
            self._since, self._bytes = now, 0
        if idle:
            self._since = None
