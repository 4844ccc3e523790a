"""The shared memory of one host: export and landing rings and slabs, made once, lent to one handoff at a time.

Bound: everything here is allocated when the first worker reports its engine, and nothing grows after. A worker that is
started again gets the same memory. Owns the pools; what is lent must come back through `Lease.end`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final, Literal

from native.memory import NativeError, available_bytes
from native.ring import Ring, Side
from native.slab import Slab
from zerocopy.daemon.admission import Admission
from zerocopy.daemon.telemetry import log_event
from zerocopy.handoff.components import HEADER_BYTES, MAX_PAGE_BYTES, StateSchema
from zerocopy.worker import protocol as p

# One slab a ring, so that as many handoffs of a recurrent model run at once, while a side's slabs stay within this;
# but one is read or written by the engine while another fills, whatever a snapshot's size.
SLAB_BYTES: Final = 1 << 30
FEWEST_SLABS: Final = 2
MAX_WAITING: Final = 256


class Lease:
    """One ring, and one slab where the model has recurrent state, for one handoff."""

    def __init__(self, side: _Side, ring: int, slab: int | None) -> None:
        self._side = side
        self.ring_index = ring
        self.slab_index = slab
        self.ring: Final = side.rings[ring]
        self.slab: Final = None if slab is None else side.slabs[slab]

    def end(self) -> None:
        """Wipe and give back. Neither the worker nor a link may use the memory any more: where one still does, the
        memory stays lent and is never used again."""
        try:
            self._side.take_back(self)
        except NativeError as error:
            log_event("memory cannot be wiped, it is lent no more", level=logging.ERROR, detail=str(error))

    @property
    def nbytes(self) -> int:
        return self.ring.capacity + (self.slab.capacity if self.slab else 0)


class _Side:
    """The rings and slabs of one direction. `worker_is` says which side of the rings the worker is."""

    def __init__(self, label: str, worker_is: Side, rings: int, ring_bytes: int, slab_bytes: int) -> None:
        self._worker_is: Final = worker_is
        self.rings = [Ring.create(ring_bytes, f"zc-{label}-ring") for _ in range(rings)]
        self.slabs = [Slab.create(slab_bytes, f"zc-{label}-slab") for _ in range(_slabs(rings, slab_bytes))]
        self._free_rings = list(range(len(self.rings)))
        self._free_slabs = list(range(len(self.slabs)))
        self.lent: set[Lease] = set()
        self.ring_specs: Final = tuple(p.RingSpec(ring.capacity) for ring in self.rings)
        self.slab_specs: Final = tuple(p.SlabSpec(slab.capacity) for slab in self.slabs)

    @property
    def fds(self) -> list[int]:
        """Every descriptor, in the order in which a worker takes them."""
        of_rings = [fd for ring in self.rings for fd in ring.handle.fds]
        return of_rings + [slab.handle.memory_fd for slab in self.slabs]

    def lend(self, epoch: int) -> Lease | None:
        if not self._free_rings or (self.slabs and not self._free_slabs):
            return None
        slab = self._free_slabs.pop() if self.slabs else None
        lease = Lease(self, self._free_rings.pop(), slab)
        if lease.slab is not None and not lease.slab.claim(epoch):
            raise NativeError("slab-taken", "a slab of the free list has an owner")
        self.lent.add(lease)
        return lease

    def take_back(self, lease: Lease) -> None:
        """Wipe first, so that nothing is free that could not be wiped."""
        if lease not in self.lent:
            return
        if lease.slab is not None:
            lease.slab.release()
        lease.ring.recycle()
        self.lent.remove(lease)
        self._free_rings.append(lease.ring_index)
        if lease.slab_index is not None:
            self._free_slabs.append(lease.slab_index)

    def recover(self) -> None:
        """The worker is dead: end what it left open in memory that is lent."""
        for lease in self.lent:
            lease.ring.recover(self._worker_is)

    def close(self) -> None:
        for ring in self.rings:
            ring.close()
        for slab in self.slabs:
            slab.close()


def _slabs(rings: int, slab_bytes: int) -> int:
    return min(rings, max(FEWEST_SLABS, SLAB_BYTES // slab_bytes)) if slab_bytes else 0


class SharedMemory:
    """Both sides of one host; a side that its roles do not need has no memory."""

    def __init__(
        self,
        *,
        export: bool,
        landing: bool,
        rings: int,
        ring_bytes: int,
        share: Callable[[int], int] | None = None,
    ) -> None:
        """`share`: how many of so many landing leases one peer may hold."""
        self._export_rings = rings if export else 0
        self._landing_rings = rings if landing else 0
        self._ring_bytes = ring_bytes
        self._sides: dict[str, _Side] = {}
        self._slab_bytes = 0
        # Who waits for landing memory holds a lane, so those are few; how long, the handoff's own deadline says.
        self.landing_line = Admission(waiting=MAX_WAITING, wait_s=math.inf, share=share)

    def attach(self, schema: StateSchema) -> tuple[p.Attach, Sequence[int]]:
        """What a new worker is told, and the descriptors that go with it. Raises NativeError where there is no memory
        for this model."""
        size = schema.snapshot_bytes()
        if not self._sides:
            self._create(size)
            self.landing_line.open(self.leases("landing"), 0)
        elif size != self._slab_bytes:
            raise NativeError(
                "model-changed",
                f"the model's snapshot has {size} bytes, it had {self._slab_bytes} when this daemon started: the file "
                "was replaced, restart the daemon",
            )
        export, landing = self._sides["export"], self._sides["landing"]
        attach = p.Attach(export.ring_specs, export.slab_specs, landing.ring_specs, landing.slab_specs)
        return attach, [*export.fds, *landing.fds]

    def _create(self, slab_bytes: int) -> None:
        self._check_room(slab_bytes)
        try:
            self._sides = {
                "export": _Side("export", "producer", self._export_rings, self._ring_bytes, slab_bytes),
                "landing": _Side("landing", "consumer", self._landing_rings, self._ring_bytes, slab_bytes),
            }
        except OSError as error:
            wanted = f"{self._export_rings + self._landing_rings} rings of {self._ring_bytes} bytes"
            raise NativeError(
                "shared-memory", f"no shared memory for {wanted} ({error}): lower --rings or --ring-mib"
            ) from None
        self._slab_bytes = slab_bytes

    def _check_room(self, slab_bytes: int) -> None:
        """All of it is mapped at once: what the machine lacks would be taken from whoever else runs on it, and what a
        container lacks ends a process in it."""
        sides = (self._export_rings, self._landing_rings)
        wanted = sum(rings * self._ring_bytes + _slabs(rings, slab_bytes) * slab_bytes for rings in sides)
        available = available_bytes()
        if wanted > available:
            raise NativeError(
                "shared-memory",
                f"{sum(sides)} rings of {self._ring_bytes >> 20} MiB and their slabs need {wanted >> 20} MiB, "
                f"{available >> 20} MiB are available: lower --rings or --ring-mib",
            )

    def lend(self, name: Literal["export", "landing"], epoch: int) -> Lease | None:
        """Memory for one handoff, or None while all of it is lent."""
        side = self._sides.get(name)
        return side.lend(epoch) if side else None

    def leases(self, name: Literal["export", "landing"]) -> int:
        """How many handoffs can have memory of that side at once; 0 before the engine is up."""
        side = self._sides.get(name)
        return 0 if side is None else min(len(side.rings), len(side.slabs) or len(side.rings))

    def page_room(self) -> int:
        """Bytes of the largest payload that a landing ring takes as one page; there is one once the engine is up."""
        return min(self._sides["landing"].rings[0].max_record - HEADER_BYTES, MAX_PAGE_BYTES)

    def recover(self) -> None:
        """The worker died: end what it left open in memory that is still lent."""
        for side in self._sides.values():
            side.recover()

    def reserved_bytes(self) -> int:
        """Lent now: zero when no handoff is running."""
        return sum(lease.nbytes for side in self._sides.values() for lease in side.lent)

    def close(self) -> None:
        for side in self._sides.values():
            side.close()
        self._sides.clear()
