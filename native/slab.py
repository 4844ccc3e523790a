"""Python's view of the slab in `slab.h`: one contiguous blob of shared memory with one owner at a time.

Bound: `capacity` bytes, given at creation. Owns the mapping and its descriptor; who writes when is the callers'.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final, NamedTuple

from native._ring import ffi, lib
from native.memory import Mapping, NativeError, create_memory, whole_pages


class SlabHandle(NamedTuple):
    """What another process needs to attach."""

    memory_fd: int
    capacity: int

    def duplicate(self) -> SlabHandle:
        """Own copy of the descriptor, for attaching twice in one process."""
        return SlabHandle(os.dup(self.memory_fd), self.capacity)


class Slab:
    """See the module. `Slab.create` on the side that owns the memory, `Slab.attach` on the other."""

    def __init__(self, handle: SlabHandle, *, fresh: bool) -> None:
        self.capacity: Final = handle.capacity
        self._lock: Final = threading.Lock()  # a view or release on one thread, close on another
        self._mapping: Final = Mapping(handle.memory_fd, lib.SLAB_DATA + handle.capacity)
        # The address outlives this buffer object: the mapping goes only after `_slab` is None.
        with ffi.from_buffer(self._mapping.writable) as address:
            if fresh:
                lib.slab_format(address, self.capacity)
            self._slab: Any = lib.slab_open(address, len(address), self.capacity)
        if self._slab == ffi.NULL:
            self._mapping.close()
            raise NativeError(
                "slab-corrupt", f"the memory is not a slab of {self.capacity} bytes; send the whole handle"
            )

    @classmethod
    def create(cls, capacity: int, label: str) -> Slab:
        """A new slab of at least `capacity` bytes, rounded up to whole pages."""
        capacity = whole_pages(capacity)
        return cls(SlabHandle(create_memory(label, lib.SLAB_DATA + capacity), capacity), fresh=True)

    @classmethod
    def attach(cls, handle: SlabHandle) -> Slab:
        """The other process's slab. Takes over the handle's descriptor, also when it raises."""
        return cls(handle, fresh=False)

    @property
    def handle(self) -> SlabHandle:
        """To send to the other process; the descriptor stays this slab's."""
        return SlabHandle(self._mapping.fd, self.capacity)

    @property
    def epoch(self) -> int:
        """The owner's epoch; 0 while free."""
        return self._owner() & 0xFFFFFFFF

    @property
    def owner_pid(self) -> int:
        """The owner's process id; 0 while free."""
        return self._owner() >> 32

    def claim(self, owner_epoch: int) -> bool:
        """Make this process the owner, for `owner_epoch`; False when the slab is taken."""
        if not 0 < owner_epoch < 1 << 32:
            raise NativeError("slab-epoch", f"epoch {owner_epoch} is not within 1 to 2^32 - 1")
        with self._lock:
            return bool(lib.slab_claim(self._open(), os.getpid() << 32 | owner_epoch))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable view of [offset, offset + nbytes) of the data, in any process while the slab is owned."""
        if not (offset >= 0 and 0 < nbytes <= self.capacity - offset):
            raise NativeError("slab-range", f"[{offset}, {offset + nbytes}) is outside a slab of {self.capacity} bytes")
        with self._lock:
            slab = self._open()
            if lib.slab_owner(slab) == 0:
                raise NativeError(
                    "slab-free", "claim the slab before using it: what is written while free is not wiped"
                )
            lib.slab_touch(slab, offset + nbytes)
            start = lib.SLAB_DATA + offset
            return self._mapping.writable[start : start + nbytes]

    def release(self) -> int:
        """Wipe what was touched and free the slab; returns bytes wiped. Only the owner may; a free slab stays free."""
        return self._release(os.getpid())

    def recover(self, dead_pid: int) -> int:
        """`release` in the name of an owner known to be dead; nothing if it does not own the slab."""
        return self._release(dead_pid) if self.owner_pid == dead_pid else 0

    def _release(self, pid: int) -> int:
        owner = self._owner()
        if owner == 0:
            return 0
        if owner >> 32 != pid:
            raise NativeError(
                "slab-busy", f"slab is owned by process {owner >> 32}, not {pid}: recover it if that died"
            )
        with self._lock:
            return int(lib.slab_release(self._open(), owner))

    def close(self) -> None:
        """Unmap, close the descriptor. Views that are still held stay readable; all else raises from here on."""
        with self._lock:
            self._slab = None
            self._mapping.close()

    def _owner(self) -> int:
        with self._lock:
            return int(lib.slab_owner(self._open()))

    def _open(self) -> Any:
        if self._slab is None:
            raise NativeError("slab-closed", "this slab was closed")
        return self._slab
