"""Keeps one peer connected over the fastest of its addresses, and says why it is that one (T5, T6).

Dials, measures every path while no handoff runs, moves to a better one: new handoffs take it, running ones end where
they are. What is better is `planner.links`'. A link that was opened to be measured carries nothing else: HELLO, which
makes a link usable, is said on the chosen one only. When both hosts have dialled, the one with the lower boot id leads:
only it measures and moves. Bound: one measurement at a time, over at most one link that is not in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final, Protocol

from planner.links import Choice, Measurement, PathTable
from transport.link import Endpoint, Link, LinkError
from transport.probe import measure
from transport.quic_choice import over_same
from zerocopy.daemon.advertise import believed
from zerocopy.daemon.telemetry import log_event

FIRST_REDIAL_S: Final = 0.2
MAX_REDIAL_S: Final = 5.0
MEASURE_EVERY_S: Final = 60.0
CONFIRM_AFTER_S: Final = 3.0  # a path that was faster once is measured again after this
BUSY_RETRY_S: Final = 0.5  # a handoff runs: look again after this
BY_PEER: Final = "the peer has dialled, the choice is its own"


class PathUser(Protocol):
    """Who uses the links to the peer. `Peers`, for one of them."""

    def standing(self) -> Link | None:
        """The link that carries new handoffs, whoever dialled it."""

    def leads(self) -> bool:
        """Whether this host, not the peer, chooses the path."""

    def idle(self) -> bool:
        """Whether no handoff and no request runs over any link with the peer."""

    def use(self, link: Link) -> None:
        """New handoffs go over `link` as soon as the peer has answered our HELLO. Raises LinkError."""

    def unreachable(self, why: str) -> None: ...


class PeerPaths:
    def __init__(self, peer: str, configured: Sequence[str], user: PathUser) -> None:
        self.table = PathTable(configured)
        self._peer = peer
        self._configured = tuple(configured)
        self._user = user
        self._link: Link | None = None  # over `table.current`, if this host dialled it
        self._wake = asyncio.Event()
        self._due = 0.0
        self._warned: set[str] = set()

    # -- told by `Peers` -----------------------------------------------------------------------------------

    def heard(self, told: Sequence[str]) -> None:
        """The peer's HELLO says where else it can be reached."""
        good, refused = believed(told, self._configured)
        for why in set(refused) - self._warned:
            log_event("useless address advertised", level=logging.WARNING, peer=self._peer, detail=why)
        self._warned = set(refused)  # of the latest HELLO only: a peer may say another each time
        good = over_same(good, self._configured)
        known = {path.address for path in self.table.all()}
        self.table.offer([*self._configured, *good])
        if known != {path.address for path in self.table.all()}:
            self._due = 0.0
        self._wake.set()

    def lost(self, link: Link, reason: str) -> None:
        """A link that was in use has closed."""
        if link is self._link or self._user.standing() is None:
            self._link = None
            self.table.lost(f"link closed: {reason}")
            self._hurry()

    def transferred(self, bandwidth_bps: float, rtt_s: float | None) -> None:
        """A handoff over the standing link reached this."""
        if self.table.transferred(bandwidth_bps, rtt_s, time.monotonic()):
            self._hurry()

    def describe(self) -> dict[str, object]:
        """For /v1/status: the path in use, why it is that one, and all of them."""
        now = time.monotonic()
        return {
            "path": self.table.current,
            "path_reason": self.table.reason if self._user.leads() else BY_PEER,
            "paths": [
                {
                    "address": path.address,
                    "rtt_ms": 1e3 * path.measured.rtt_s if path.measured else None,
                    "gbps": path.measured.bandwidth_bps / 1e9 if path.measured else None,
                    "measured_by": path.measured.source if path.measured else None,
                    "age_s": now - path.measured.at if path.measured else None,
                    "error": path.error,
                }
                for path in self.table.all()
            ],
        }

    def _hurry(self) -> None:
        self._due = 0.0
        self._wake.set()

    # -- the loop ------------------------------------------------------------------------------------------

    async def keep(self, endpoint: Endpoint) -> None:
        """Until cancelled."""
        pause = FIRST_REDIAL_S
        while True:
            self._wake.clear()
            if self._link is None and self._user.standing() is None:
                connected = await self._connect(endpoint)
                await self._sleep(0 if connected else pause)
                pause = FIRST_REDIAL_S if connected else min(2 * pause, MAX_REDIAL_S)
            elif not self._user.leads():
                await self._sleep(MEASURE_EVERY_S)
            elif (left := self._until_due()) > 0:
                await self._sleep(left)
            elif self._user.standing() is None:
                await self._sleep(BUSY_RETRY_S)  # HELLO is on its way
            else:
                self._due = float("inf")
                pause_s = await self._round(endpoint)
                self._due = min(self._due, time.monotonic() + pause_s)  # unless something made it urgent meanwhile

    def _until_due(self) -> float:
        """A lone path that handoffs have measured lately needs no probe."""
        paths, now = self.table.all(), time.monotonic()
        measured = paths[0].measured if len(paths) == 1 else None
        fresh_for = measured.at + MEASURE_EVERY_S - now if measured and measured.source == "transfer" else 0.0
        return max(self._due - now, fresh_for if self._due > 0 else 0.0)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _connect(self, endpoint: Endpoint) -> bool:
        """Over the first address that answers; compared with the others afterwards."""
        failures = []
        for address in self.table.by_speed(time.monotonic()):
            try:
                await self._move(endpoint, address, chosen=False)
                self._due = 0.0
                return True
            except (LinkError, OSError) as error:
                self.table.failed(address, str(error))
                failures.append(str(error))
            if self._user.standing() is not None:
                return True  # the peer has dialled meanwhile
        self._user.unreachable("; ".join(failures))
        return False

    async def _move(self, endpoint: Endpoint, address: str, *, chosen: bool) -> None:
        link = await endpoint.connect(self._peer, address)
        self._user.use(link)
        self._link = link
        self.table.use(address, chosen=chosen)

    # -- measuring -----------------------------------------------------------------------------------------

    async def _round(self, endpoint: Endpoint) -> float:
        """Measure every path, move if another is better; returns after how many seconds to measure again."""
        for path in self.table.all():
            if not await self._probe(endpoint, path.address):
                return BUSY_RETRY_S
        choice = self.table.choose(time.monotonic())
        await self._follow(endpoint, choice)
        return CONFIRM_AFTER_S if choice.open else MEASURE_EVERY_S

    async def _follow(self, endpoint: Endpoint, choice: Choice) -> None:
        if choice.address is None or choice.address == self.table.current:
            return
        if len(self.table.all()) == 1:
            self.table.use(choice.address, chosen=True)  # the link that the peer has dialled is the only path
            return
        try:
            await self._move(endpoint, choice.address, chosen=True)
            log_event("path chosen", peer=self._peer, address=choice.address, detail=choice.explanation)
        except (LinkError, OSError) as error:  # it answered a moment ago
            self.table.failed(choice.address, str(error))

    async def _probe(self, endpoint: Endpoint, address: str) -> bool:
        """False if a handoff runs, or came in between."""
        if not self._user.idle():
            return False
        standing = self._link if address == self.table.current else None
        standing = self._user.standing() if len(self.table.all()) == 1 else standing
        try:
            link = standing or await endpoint.connect(self._peer, address)
            try:
                reading = await measure(link, interrupted=lambda: not self._user.idle())
            finally:
                if link is not standing:
                    link.close("path-measured")
        except (LinkError, OSError) as error:
            self.table.failed(address, str(error))
            return True
        if reading is not None:
            self.table.probed(address, Measurement(time.monotonic(), reading.rtt_s, reading.bandwidth_bps))
        return reading is not None
