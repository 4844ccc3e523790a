"""Which of a peer's addresses to use, and why (T5, T6): measurements with their age, and a choice that does not flap.

Paths are compared by the time a ring's worth of state takes over them, so that bandwidth and round trip count in one
figure. Pure: measuring is the daemon's, time is an argument in seconds of any one clock.
Bound: `MAX_PATHS` addresses of one peer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

MAX_PATHS: Final = 6  # two more links than this may stand during a measurement, and an endpoint allows a peer 8
REFERENCE_BYTES: Final = 64 << 20  # one default ring
REFERENCE_ROUND_TRIPS: Final = 2  # what a handoff's tail waits for (acceptance 5 of the bulk plane)
# A path has to beat the current one by this factor, twice in a row: two probes of one path on a busy host were seen to
# differ by 1.3, two pairs of probes in a row hardly ever do in the same direction.
BETTER_BY: Final = 1.25
FRESH_S: Final = 150.0  # older measurements decide nothing; more than two rounds of the daemon's
DEGRADED: Final = 0.5  # transfers below this share of what the probe reached: measure again now

Source = Literal["probe", "transfer"]


@dataclass(frozen=True)
class Measurement:
    """What one path did at the moment `at`."""

    at: float
    rtt_s: float
    bandwidth_bps: float
    source: Source = "probe"

    @property
    def seconds(self) -> float:
        """What `REFERENCE_BYTES` take."""
        return 8 * REFERENCE_BYTES / self.bandwidth_bps + REFERENCE_ROUND_TRIPS * self.rtt_s

    def __str__(self) -> str:
        return f"{self.bandwidth_bps / 1e9:.3g} Gb/s, RTT {1e3 * self.rtt_s:.2g} ms"


@dataclass
class Path:
    """One address. `error` says why the last attempt to use it failed; None after it worked."""

    address: str
    measured: Measurement | None = None
    probed_bps: float | None = None
    error: str | None = None

    def fresh(self, now: float) -> Measurement | None:
        usable = self.error is None and self.measured is not None and now - self.measured.at <= FRESH_S
        return self.measured if usable else None


@dataclass(frozen=True)
class Choice:
    """`address` is to be used from now on. `open` when a faster path has won once and should be measured again soon."""

    address: str | None
    explanation: str
    open: bool = False


class PathTable:
    """All paths to one peer, in the order they were given, and which of them is in use."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._paths: dict[str, Path] = {}
        self.current: str | None = None
        self.reason = "not measured yet"
        self._settled = False  # the current path was chosen by measurement, not by being the first to answer
        self._challenger: str | None = None
        self.offer(addresses)

    def offer(self, addresses: Iterable[str]) -> None:
        """These are the peer's addresses now, the preferred first; the current one stays whatever it is."""
        wanted = list(dict.fromkeys(addresses))
        if self.current is not None and self.current not in wanted[:MAX_PATHS]:
            wanted.insert(0, self.current)
        self._paths = {address: self._paths.get(address, Path(address)) for address in wanted[:MAX_PATHS]}

    def all(self) -> list[Path]:
        return list(self._paths.values())

    def by_speed(self, now: float) -> list[str]:
        """Addresses in the order to try when none is connected: fastest, then unmeasured, then those that failed."""

        def rank(path: Path) -> tuple[bool, float]:
            measured = path.fresh(now)
            return path.error is not None, measured.seconds if measured else float("inf")

        return [path.address for path in sorted(self.all(), key=rank)]

    # -- what was seen -------------------------------------------------------------------------------------

    def use(self, address: str, *, chosen: bool = False) -> None:
        """A link over this address carries new handoffs from now on; `chosen` if by measurement."""
        self.current, self._settled, self._challenger = address, chosen, None
        self._paths.setdefault(address, Path(address)).error = None  # it may have been withdrawn while it was dialled

    def probed(self, address: str, measurement: Measurement) -> None:
        if (path := self._paths.get(address)) is not None:
            path.measured, path.probed_bps, path.error = measurement, measurement.bandwidth_bps, None

    def failed(self, address: str, error: str) -> None:
        if (path := self._paths.get(address)) is not None:
            path.error = error

    def lost(self, error: str) -> None:
        """No link stands over the current path any more."""
        if self.current is not None:
            self.failed(self.current, error)
        self.current, self._settled = None, False

    def transferred(self, bandwidth_bps: float, rtt_s: float | None, now: float) -> bool:
        """A handoff went over the current path. True when it was so slow that the paths should be measured again."""
        path = self._paths.get(self.current or "")
        if path is None or (rtt_s is None and path.measured is None):
            return False
        last = rtt_s if rtt_s is not None else path.measured.rtt_s if path.measured else 0.0
        path.measured = Measurement(now, last, bandwidth_bps, "transfer")
        return path.probed_bps is not None and bandwidth_bps < DEGRADED * path.probed_bps

    # -- the choice ----------------------------------------------------------------------------------------

    def choose(self, now: float) -> Choice:
        """Which path to use, asked after all were probed; `use` has to follow when it is another one."""
        choice = self._pick({path.address: m for path in self.all() if (m := path.fresh(now)) is not None})
        self.reason = choice.explanation
        return choice

    def _pick(self, known: dict[str, Measurement]) -> Choice:
        challenger, self._challenger = self._challenger, None
        if not known:
            return Choice(self.current, "no path could be measured")
        best = min(known, key=lambda address: known[address].seconds)
        mine = known.get(self.current or "")
        if mine is None or best == self.current:
            self._settled = best == self.current
            return Choice(best, self._comparison(best, known))
        kept = self._comparison(self.current, known)
        if mine.seconds <= BETTER_BY * known[best].seconds:
            self._settled = True
            return Choice(self.current, f"{kept}; kept, because no other is {BETTER_BY:g} times faster")
        if self._settled and challenger != best:
            self._challenger = best
            return Choice(self.current, f"{kept}; kept until {best} is faster a second time", open=True)
        return Choice(best, self._comparison(best, known))

    def _comparison(self, address: str | None, known: dict[str, Measurement]) -> str:
        """Every path with what it would take, this one first."""
        order = sorted(known, key=lambda other: (other != address, known[other].seconds))
        size = f"{REFERENCE_BYTES >> 20} MiB"
        parts = [f"{one}: {size} in {known[one].seconds:.3g} s ({known[one]})" for one in order]
        parts += [f"{path.address} cannot be used now" for path in self.all() if path.error is not None]
        return "; ".join(parts)
