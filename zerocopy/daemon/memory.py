"""The shared memory of one host: export and landing rings and slabs, made once, lent to one handoff at a time.

Bound: everything here is allocated when the first worker reports its engine, and nothing grows after. A worker that is
started again gets the same memory. Owns the pools; what is lent must come back through `Lease.end`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from native.memory import NativeError
from native.ring import Ring
from native.slab import Slab
from zerocopy.handoff.components import StateSchema
from zerocopy.worker import protocol as p

# Engine work is serial per worker: one slab is read or written while the next one fills (architecture.md).
SLABS: Final = 2


class Lease:
    """One ring, and one slab where the model has recurrent state, for one handoff."""

    def __init__(self, side: _Side, ring: int, slab: int | None) -> None:
        self._side = side
        self.ring_index = ring
        self.slab_index = slab
        self.ring: Final = side.rings[ring]
        self.slab: Final = None if slab is None else side.slabs[slab]

    def end(self) -> None:
        """Wipe and give back. Neither the worker nor a link may use the memory any more."""
        self._side.take_back(self)

    @property
    def nbytes(self) -> int:
        return self.ring.capacity + (self.slab.capacity if self.slab else 0)


class _Side:
    """The rings and slabs of one direction. `writer` is who claims records: the side that may leave them open."""

    def __init__(self, label: str, rings: int, ring_bytes: int, slab_bytes: int) -> None:
        self.rings = [Ring.create(ring_bytes, f"zc-{label}-ring") for _ in range(rings)]
        self.slabs = [Slab.create(slab_bytes, f"zc-{label}-slab") for _ in range(SLABS if slab_bytes else 0)]
        self._free_rings = list(range(len(self.rings)))
        self._free_slabs = list(range(len(self.slabs)))
        self.lent: set[Lease] = set()

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
        if lease not in self.lent:
            return
        self.lent.remove(lease)
        lease.ring.recycle()
        self._free_rings.append(lease.ring_index)
        if lease.slab is not None and lease.slab_index is not None:
            lease.slab.release()
            self._free_slabs.append(lease.slab_index)


class SharedMemory:
    """Both sides of one host, as far as its roles need them."""

    def __init__(self, *, export: bool, landing: bool, rings: int, ring_bytes: int) -> None:
        self._wanted = {"export": export, "landing": landing}
        self._rings = rings
        self._ring_bytes = ring_bytes
        self._sides: dict[str, _Side] = {}
        self._slab_bytes: int | None = None

    def attach(self, schema: StateSchema) -> tuple[p.Attach, Sequence[int]]:
        """What a new worker is told, and the descriptors that go with it."""
        if self._slab_bytes is None:
            self._slab_bytes = schema.snapshot_bytes()
            for name, wanted in self._wanted.items():
                if wanted:
                    self._sides[name] = _Side(name, self._rings, self._ring_bytes, self._slab_bytes)
        fds: list[int] = []
        specs: dict[str, tuple[p.RingSpec, ...] | tuple[p.SlabSpec, ...]] = {}
        for name in self._wanted:
            side = self._sides.get(name)
            rings, slabs = (side.rings, side.slabs) if side else ([], [])
            fds += [fd for ring in rings for fd in ring.handle.fds]
            fds += [slab.handle.memory_fd for slab in slabs]
            specs[f"{name}_rings"] = tuple(p.RingSpec(ring.capacity) for ring in rings)
            specs[f"{name}_slabs"] = tuple(p.SlabSpec(slab.capacity) for slab in slabs)
        return p.Attach(**specs), fds  # type: ignore[arg-type]

    def lend(self, name: str, epoch: int) -> Lease | None:
        """Memory for one handoff ("export" or "landing"), or None while all of it is lent."""
        side = self._sides.get(name)
        return side.lend(epoch) if side else None

    def recover(self) -> None:
        """The worker died: end what it left open in memory that is still lent."""
        for name, dead in (("export", "producer"), ("landing", "consumer")):
            side = self._sides.get(name)
            for lease in side.lent if side else ():
                lease.ring.recover("producer" if dead == "producer" else "consumer")

    def ring_capacity(self) -> int:
        """Capacity of one ring; 0 before the engine is up."""
        return next((side.rings[0].capacity for side in self._sides.values()), 0)

    def reserved_bytes(self) -> int:
        """Lent now: zero when no handoff is running."""
        return sum(lease.nbytes for side in self._sides.values() for lease in side.lent)

    def close(self) -> None:
        for side in self._sides.values():
            for ring in side.rings:
                ring.close()
            for slab in side.slabs:
                slab.close()
        self._sides.clear()
