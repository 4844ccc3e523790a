"""What the benches measure with: processor time, quantiles, a pace to keep. Pure, but for this process's usage."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

GIB: Final = 1 << 30


class Quantiles(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float


def quantiles(samples: Iterable[float], digits: int = 3) -> Quantiles | None:
    """Nearest rank: each is a value that was measured. None of no samples."""
    ordered = sorted(samples)
    if not ordered:
        return None
    ranks = (min(len(ordered) - 1, -(-len(ordered) * percent // 100) - 1) for percent in (50, 90, 99))
    return Quantiles(*(round(ordered[rank], digits) for rank in ranks))


def median(samples: Sequence[float]) -> float:
    """The lower one of two in the middle: a value that was measured."""
    return sorted(samples)[(len(samples) - 1) // 2]


def cpu_s() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def gbps(nbytes: int, seconds: float) -> float:
    return 8 * nbytes / seconds / 1e9 if seconds > 0 else 0.0


class Pacer:
    """Says when each piece may leave so that the rate is never above `bps` over any time since `start`, and what was
    missed is not made up for later. 0 is no limit."""

    def __init__(self, bps: float, now: float) -> None:
        self._bps = bps
        self.free_at = now  # when the next piece may leave: until then the last one has the line to itself

    def wait_s(self, nbytes: int, now: float) -> float:
        """Seconds until a piece of `nbytes` may leave; it counts as sent then."""
        if not self._bps:
            return 0.0
        leaves = max(self.free_at, now)
        self.free_at = leaves + 8 * nbytes / self._bps
        return leaves - now
