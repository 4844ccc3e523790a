"""A bounded set of rings or slabs, all made at start: the upper bound of shared memory on this host.

Owns its items. An item is wiped on its way back, before anybody can acquire it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from native.memory import NativeError
from native.ring import Ring
from native.slab import Slab


class Buffer(Protocol):
    @property
    def capacity(self) -> int: ...

    def close(self) -> None: ...


T = TypeVar("T", bound=Buffer)


class Pool(Generic[T]):
    """`wipe` makes an item as new and returns the bytes it wiped; it raises while the item is still in use."""

    def __init__(self, items: Iterable[T], wipe: Callable[[T], int]) -> None:
        self.items = tuple(items)
        self._free = list(reversed(self.items))  # last in, first out: recently used memory is warm
        self._wipe = wipe
        self._lock = threading.Lock()

    def acquire(self) -> T | None:
        """An item nobody uses, or None when all are in use."""
        with self._lock:
            return self._free.pop() if self._free else None

    def release(self, item: T) -> int:
        """Wipe `item` and take it back; returns bytes wiped. When the wipe raises, the item stays in use."""
        with self._lock:
            if item in self._free or item not in self.items:
                raise NativeError("pool-release", "this item is not in use from this pool")
        wiped = self._wipe(item)
        with self._lock:
            self._free.append(item)
        return wiped

    @property
    def in_use(self) -> int:
        return len(self.items) - len(self._free)

    @property
    def reserved_bytes(self) -> int:
        """Capacity of the items in use."""
        with self._lock:
            return sum(item.capacity for item in self.items) - sum(item.capacity for item in self._free)

    def close(self) -> None:
        """Close every item, in use or not."""
        for item in self.items:
            item.close()


def ring_pool(count: int, capacity: int, label: str) -> Pool[Ring]:
    """`count` rings of `capacity` bytes."""
    return Pool((Ring.create(capacity, f"{label}-{n}") for n in range(count)), Ring.recycle)


def slab_pool(count: int, capacity: int, label: str) -> Pool[Slab]:
    """`count` slabs of `capacity` bytes; acquire, then claim for an epoch."""
    return Pool((Slab.create(capacity, f"{label}-{n}") for n in range(count)), Slab.release)
