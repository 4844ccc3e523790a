"""Who may use the engine now, who waits, and who is told to come back later (Q2, G3).

One `Admission` stands before each pool of lanes, and one before the landing memory. It owns the pool's sequence
numbers and cells: a request gets a lane and all the cells it can ever need, prompt and answer, or waits; so nothing
that was admitted can run out of memory. Strictly first come, first served: one that does not fit holds up those
behind it, so that a large request is never starved by small ones. Two let others pass: one of a group that has its
share already, so that a peer or link that stands still never holds everything, and one whose prompt is still text.

Waiting is bounded three ways: by a count, by a count per tenant, and by time: who might wait longer than allowed is
refused at once, not after the wait. Runs on the event loop; time comes in through `clock`.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

RETRY_S: Final = 1.0
_WEIGHT: Final = 0.02  # of the newest interval between two grants, once there have been as many as that
# Standard deviations of a wait that are allowed for. With turns of random length and ten times the load, of 11,200 who
# were told to wait 361 waited longer than allowed at 2, 47 at 3, 3 at 4.
_SPREAD: Final = 4.0
# Times what the latest turns took on average: what slows all turns at once (another program, another virtual machine:
# a third to a half within a minute was seen) is not in their spread, and those in line cannot be told any more.
_SLOWER: Final = 1.5


class Refused(Exception):
    """Not now, or never. `reason` is a stable slug; `retry_after_s` is None where trying again will not help."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None = RETRY_S) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Pace:
    """Intervals between two grants while somebody waits: the mean of the latest, and how far they spread."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._variance = 0.0

    def add(self, interval_s: float) -> None:
        self._count += 1
        if self._count == 1:  # of the spread nothing is known: as if turns had no memory
            self._mean, self._variance = interval_s, interval_s**2
            return
        weight = max(1 / self._count, _WEIGHT)
        off = interval_s - self._mean
        self._mean += weight * off
        self._variance = (1 - weight) * (self._variance + weight * off * off)

    def wait_s(self, turns: int) -> float:
        """What so many turns take on average."""
        return turns * self._mean

    def longest_wait_s(self, turns: int) -> float:
        """What so many turns hardly ever exceed, if the host becomes no slower than `_SLOWER` and each takes its time
        whatever the others took. The mean is not quite known either."""
        seen = min(max(self._count, 1), 2 / _WEIGHT - 1)
        return _SLOWER * self.wait_s(turns) + _SPREAD * math.sqrt(self._variance * (turns + turns**2 / seen))


class Ticket:
    """One request's place: first in the line, then at a lane. Always `give_back`."""

    def __init__(self, tenant: str, tokens: int | None, group: str | None, since: float) -> None:
        self.tenant = tenant
        self.tokens = tokens  # None while nobody knows: it keeps its place and lets others pass
        self.group = group
        self.since = since  # asked, then granted
        self.waited = False  # for a lane; not for its own tokens to be counted
        self.lane = -1
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Use(msgspec.Struct, frozen=True):
    """What is used of one pool; JSON-ready."""

    sequences: int
    held_sequences: int
    tokens: int
    held_tokens: int
    waiting: int
    held: list[dict[str, float]]


class Admission:
    def __init__(
        self,
        *,
        waiting: int,
        wait_s: float,
        tenant_requests: int | None = None,
        share: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`waiting` requests may wait, each up to `wait_s`; a tenant may have `tenant_requests` waiting and running.
        `share` says how many of so many sequences one group may hold."""
        self._most_waiting = waiting
        self._wait_s = wait_s
        self._tenant_requests = tenant_requests
        self._share = share or (lambda sequences: sequences)
        self._clock = clock
        self._sequences = self._tokens = 0
        self._free: list[int] = []  # ascending: a request that is alone is always on the first lane
        self._line: list[Ticket] = []
        self._held: set[Ticket] = set()
        self._tenants: Counter[str] = Counter()
        self._pace = Pace()
        self._last_grant = 0.0

    def open(self, sequences: int, tokens: int) -> None:
        """The engine is up with so many lanes and cells; again after every restart, with the same figures."""
        if not self._sequences:
            self._sequences, self._tokens = sequences, tokens
            self._free = list(range(sequences))

    def ask(self, tenant: str, tokens: int | None, group: str | None = None) -> Ticket:
        """Stand in line; `Ticket.granted` is done once there is a lane. Who does not know yet how many tokens it needs
        says so with `measured` later. Raises Refused."""
        self._check_size(tokens)
        if self._tenant_requests is not None and self._tenants[tenant] >= self._tenant_requests:
            whose = "of this API key" if tenant else "without a tenant's API key"
            sentence = f"{self._tenant_requests} requests {whose} are here, the most allowed (--tenant-requests)"
            raise Refused("tenant-limit", sentence)
        self._check_wait()
        ticket = Ticket(tenant, tokens, group, self._clock())
        self._tenants[tenant] += 1
        self._line.append(ticket)
        self._serve()
        # A free lane is for one whose tokens are not known yet: that one does not wait.
        if ticket in self._line and len(self._line) > self._most_waiting + len(self._free):
            self.give_back(ticket)
            raise Refused("queue-full", f"{self._most_waiting} requests are waiting, the most allowed")
        return ticket

    def measured(self, ticket: Ticket, tokens: int, group: str | None) -> None:
        """It is known now what the request needs. Raises Refused, and the place must be given back all the same."""
        self._check_size(tokens)
        ticket.tokens, ticket.group = tokens, group
        self._serve()

    def _check_size(self, tokens: int | None) -> None:
        if tokens is not None and tokens > self._tokens:
            raise Refused(
                "too-large", f"the request needs {tokens} tokens of context, this host has {self._tokens}", None
            )

    def _check_wait(self) -> None:
        """Only with as many in line as there are lanes: before that, a single slow request says too little."""
        turns = len(self._line) + 1
        if turns <= self._sequences or (longest := self._pace.longest_wait_s(turns)) <= self._wait_s:
            return
        mean = self._pace.wait_s(turns)
        sentence = f"the wait would be about {mean:.0f} s and up to {longest:.0f} s, allowed are {self._wait_s:g}"
        raise Refused("queue-full", sentence, mean / 2)

    def give_back(self, ticket: Ticket) -> None:
        """The request is over: at a lane, or still in the line. Harmless when repeated."""
        if ticket in self._held:
            self._held.remove(ticket)
            bisect.insort(self._free, ticket.lane)
        elif ticket in self._line:
            self._line.remove(ticket)
            ticket.granted.cancel()
        else:
            return
        self._tenants[ticket.tenant] -= 1
        self._tenants += Counter()  # drops those at zero
        self._serve()

    def leave_group(self, ticket: Ticket) -> None:
        """It no longer depends on what its group shares."""
        ticket.group = None
        self._serve()

    def use(self) -> Use:
        now = self._clock()
        held = sorted(self._held, key=lambda ticket: ticket.lane)
        return Use(
            sequences=self._sequences,
            held_sequences=len(held),
            tokens=self._tokens,
            held_tokens=self._held_tokens,
            waiting=len(self._line),
            held=[{"lane": t.lane, "tokens": t.tokens or 0, "seconds": round(now - t.since, 3)} for t in held],
        )

    @property
    def _held_tokens(self) -> int:
        return sum(ticket.tokens or 0 for ticket in self._held)

    def _serve(self) -> None:
        passed = list[Ticket]()
        while self._line and self._free:
            ticket = self._line.pop(0)
            if ticket.tokens is None or self._has_its_share(ticket.group):
                passed.append(ticket)
            elif ticket.tokens <= self._tokens - self._held_tokens:
                self._grant(ticket)
            else:
                passed.append(ticket)
                break
        self._line[:0] = passed
        for ticket in self._line:
            ticket.waited = ticket.waited or ticket.tokens is not None

    def _grant(self, ticket: Ticket) -> None:
        now = self._clock()
        if ticket.waited:  # so the pace of grants is that of the engine
            self._pace.add(now - max(self._last_grant, ticket.since))
        self._last_grant = ticket.since = now
        ticket.lane = self._free.pop(0)
        self._held.add(ticket)
        if not ticket.granted.done():
            ticket.granted.set_result(None)

    def _has_its_share(self, group: str | None) -> bool:
        if group is None:
            return False
        return sum(held.group == group for held in self._held) >= max(1, self._share(self._sequences))
