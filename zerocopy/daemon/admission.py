"""Who may use the engine now, who waits, and who is told to come back later (Q2, G3).

One `Admission` stands before each pool of lanes, and one before the landing memory. It owns the pool's sequence
numbers and cells: a request gets a lane and all the cells it can ever need, prompt and answer, or waits; so nothing
that was admitted can run out of memory. Strictly first come, first served: one that does not fit holds up those
behind it, so that a large request is never starved by small ones. The exception is a group that has its share
already: it lets others pass, so that a peer or link that stands still never holds everything.

Waiting is bounded three ways: by a count, by a count per tenant, and by time: who would very likely wait longer than
allowed is refused at once, not after the wait. Runs on the event loop; time comes in through `clock`.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

RETRY_S: Final = 1.0
_WEIGHT: Final = 0.2  # of the newest interval between two grants
# Of the allowed wait: an expectation above it is too often exceeded. At ten times what two hosts could serve, 66 of 578
# admitted requests ran into the deadline without this margin.
_LIKELY: Final = 0.7


class Refused(Exception):
    """Not now, or never. `reason` is a stable slug; `retry_after_s` is None where trying again will not help."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None = RETRY_S) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Ticket:
    """One request's place: first in the line, then at a lane. Always `give_back`."""

    def __init__(self, tenant: str, tokens: int, group: str | None, since: float) -> None:
        self.tenant = tenant
        self.tokens = tokens
        self.group = group
        self.since = since  # asked, then granted
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
        self._interval_s: float | None = None  # between two grants while somebody waits
        self._last_grant = 0.0

    def open(self, sequences: int, tokens: int) -> None:
        """The engine is up with so many lanes and cells; again after every restart, with the same figures."""
        if not self._sequences:
            self._sequences, self._tokens = sequences, tokens
            self._free = list(range(sequences))

    def ask(self, tenant: str, tokens: int, group: str | None = None) -> Ticket:
        """Stand in line; `Ticket.granted` is done once there is a lane. Raises Refused."""
        now = self._clock()
        if tokens > self._tokens:
            raise Refused(
                "too-large", f"the request needs {tokens} tokens of context, this host has {self._tokens}", None
            )
        if self._tenant_requests is not None and self._tenants[tenant] >= self._tenant_requests:
            raise Refused("tenant-limit", f"this API key has {self._tenant_requests} requests here, the most allowed")
        if (expected := self._expected_wait_s()) > _LIKELY * self._wait_s:
            raise Refused(
                "queue-full", f"the wait would be about {expected:.0f} s, allowed are {self._wait_s:g}", expected / 2
            )
        ticket = Ticket(tenant, tokens, group, now)
        self._tenants[tenant] += 1
        self._line.append(ticket)
        self._serve()
        if ticket in self._line and len(self._line) > self._most_waiting:
            self.give_back(ticket)
            raise Refused("queue-full", f"{self._most_waiting} requests are waiting, the most allowed")
        return ticket

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
            held_tokens=sum(ticket.tokens for ticket in held),
            waiting=len(self._line),
            held=[{"lane": t.lane, "tokens": t.tokens, "seconds": round(now - t.since, 3)} for t in held],
        )

    def _serve(self) -> None:
        passed = list[Ticket]()
        while self._line and self._free:
            ticket = self._line.pop(0)
            if self._has_its_share(ticket.group):
                passed.append(ticket)
            elif ticket.tokens <= self._tokens - sum(held.tokens for held in self._held):
                self._grant(ticket)
            else:
                passed.append(ticket)
                break
        self._line[:0] = passed

    def _grant(self, ticket: Ticket) -> None:
        now = self._clock()
        if self._line or now > ticket.since:  # somebody waits, so the pace of grants is that of the engine
            interval = now - max(self._last_grant, ticket.since)
            old = self._interval_s
            self._interval_s = interval if old is None else old + _WEIGHT * (interval - old)
        self._last_grant = ticket.since = now
        ticket.lane = self._free.pop(0)
        self._held.add(ticket)
        if not ticket.granted.done():
            ticket.granted.set_result(None)

    def _has_its_share(self, group: str | None) -> bool:
        if group is None:
            return False
        return sum(held.group == group for held in self._held) >= max(1, self._share(self._sequences))

    def _expected_wait_s(self) -> float:
        """Only with as many in line as there are lanes: before that, a single slow request says too little."""
        if self._interval_s is None or len(self._line) < self._sequences:
            return 0.0
        return len(self._line) * self._interval_s
