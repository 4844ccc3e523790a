"""Python's view of the ring in `ring.h`, where layout, order and recovery are explained: records as memoryviews.

One process is the producer (`claim`), one the consumer (`read`); the object is the same on both sides. Neither call
waits: None means FULL or nothing there, and a bell tells when to look again:

    loop.add_reader(ring.data_fd, on_data)

    def on_data():
        ring.clear_data_bell()                    # first
        while (record := ring.read()) is not None:    # then until there is nothing
            ...

Bound: `capacity` bytes of shared memory, given at creation; nothing here grows. Owns the mapping, its descriptors and
a lock that lets threads of one process take turns; knows nothing of what records mean.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from typing import Any, Final, Literal, NamedTuple

from native._ring import ffi, lib
from native.memory import Mapping, NativeError, closed_if_raises, create_bell, create_memory, whole_pages

Side = Literal["producer", "consumer"]
_SIDES: Final[dict[str, int]] = {"producer": lib.RING_PRODUCER, "consumer": lib.RING_CONSUMER}


class RingHandle(NamedTuple):
    """What another process needs to attach: three descriptors, to be inherited or sent by SCM_RIGHTS."""

    memory_fd: int
    data_fd: int
    space_fd: int
    capacity: int

    @property
    def fds(self) -> tuple[int, int, int]:
        return self[:3]

    def duplicate(self) -> RingHandle:
        """Own copies of the descriptors, for attaching twice in one process."""
        memory_fd, data_fd, space_fd = map(os.dup, self.fds)
        return RingHandle(memory_fd, data_fd, space_fd, self.capacity)


class Slot:
    """A claimed record: write `view`, then `commit` or `abort` exactly once, from any thread."""

    __slots__ = ("_ring", "epoch", "position", "view")

    def __init__(self, ring: Ring, position: int, epoch: int, view: memoryview) -> None:
        self._ring: Ring | None = ring
        self.position = position
        self.epoch = epoch
        self.view = view

    def commit(self) -> None:
        """Show the record to the consumer. Raises NativeError("ring-stale") once the ring has moved on."""
        self._take()._finish_slot(self, lib.ring_commit)

    def abort(self) -> None:
        """Give the room back unread."""
        self._take()._finish_slot(self, lib.ring_abort)

    def _take(self) -> Ring:
        ring, self._ring = self._ring, None
        if ring is None:
            raise NativeError("slot-finished", "this slot was already committed or aborted")
        return ring


class Record:
    """A committed record: read `view`, then `release` exactly once, in any order among records."""

    __slots__ = ("_ring", "epoch", "position", "view")

    def __init__(self, ring: Ring, position: int, epoch: int, view: memoryview) -> None:
        self._ring: Ring | None = ring
        self.position = position
        self.epoch = epoch
        self.view = view

    def release(self) -> None:
        """The producer may write there again; no view of it may be used from here on."""
        ring, self._ring = self._ring, None
        if ring is None:
            raise NativeError("record-released", "this record was already released")
        ring._finish_record(self)


class Ring:
    """See the module. `Ring.create` on the side that owns the memory, `Ring.attach` on the other."""

    def __init__(self, handle: RingHandle, *, fresh: bool) -> None:
        self.capacity: Final = handle.capacity
        self.data_fd: Final = handle.data_fd
        self.space_fd: Final = handle.space_fd
        self._lock: Final = threading.Lock()
        try:
            self._mapping: Final = Mapping(handle.memory_fd, lib.RING_DATA + handle.capacity)
        except BaseException:
            self._close_bells()
            raise
        self._ring: Any = ffi.new("struct ring *")
        self._span: Final = ffi.new("struct ring_span *")
        self._slots = 0
        self._records = 0
        # The address outlives this buffer object: the mapping goes only after `_ring` is None.
        with ffi.from_buffer(self._mapping.writable) as address:
            if fresh:
                lib.ring_format(address, self.capacity)
            code = lib.ring_open(self._ring, address, len(address), self.capacity, self.data_fd, self.space_fd)
        if code != lib.RING_OK:
            self.close()
            raise NativeError(
                "ring-corrupt", f"the memory is not a ring of {self.capacity} bytes; send the whole handle"
            )
        self.max_record: Final[int] = lib.ring_max_record(self._ring)

    @classmethod
    def create(cls, capacity: int, label: str) -> Ring:
        """A new ring of at least `capacity` bytes, rounded up to whole pages."""
        capacity = whole_pages(capacity)
        memory = create_memory(label, lib.RING_DATA + capacity)
        with closed_if_raises(memory) as memory_fd, closed_if_raises(create_bell()) as data_fd:
            space_fd = create_bell()
        return cls(RingHandle(memory_fd, data_fd, space_fd, capacity), fresh=True)

    @classmethod
    def attach(cls, handle: RingHandle) -> Ring:
        """The other process's ring. Takes over the handle's descriptors, also when it raises."""
        return cls(handle, fresh=False)

    @property
    def handle(self) -> RingHandle:
        """To send to the other process; the descriptors stay this ring's."""
        return RingHandle(self._mapping.fd, self.data_fd, self.space_fd, self.capacity)

    @staticmethod
    def record_bytes(nbytes: int) -> int:
        """Ring bytes taken by a record of `nbytes`: header and alignment, without a wrap's padding."""
        return int(lib.ring_record_bytes(nbytes))

    @property
    def epoch(self) -> int:
        with self._lock:
            return int(lib.ring_epoch(self._open()))

    @property
    def used_bytes(self) -> int:
        """Claimed and not yet freed, padding included."""
        with self._lock:
            return int(lib.ring_used(self._open()))

    @property
    def freed_bytes(self) -> int:
        """`record_bytes` of all records freed since the last recycle, a wrap's padding not counted: for credit."""
        with self._lock:
            return int(lib.ring_freed(self._open()))

    @property
    def stale_records(self) -> int:
        """Records skipped because they came from another epoch, over the ring's life."""
        with self._lock:
            return int(lib.ring_stale(self._open()))

    # -- producer

    def claim(self, nbytes: int) -> Slot | None:
        """Room for `nbytes`, 64-byte aligned, or None while the ring is FULL."""
        if not 0 < nbytes <= self.max_record:
            raise NativeError("record-size", f"record of {nbytes} bytes; this ring takes 1 to {self.max_record}")
        with self._lock:
            if (code := lib.ring_claim(self._open(), nbytes, self._span)) != lib.RING_OK:
                return self._nothing(code, lib.RING_FULL)
            self._slots += 1
            span = self._span
            view = self._mapping.writable[span.offset : span.offset + nbytes]
            return Slot(self, span.position, span.epoch, view)

    def _finish_slot(self, slot: Slot, finish: Any) -> None:
        with contextlib.suppress(BufferError):
            slot.view.release()
        with self._lock:
            self._slots -= 1
            _check(finish(self._open(), slot.position, slot.epoch))

    def clear_space_bell(self) -> None:
        """Call first when `space_fd` is readable, then look (`claim`, `freed_bytes`): nothing is missed."""
        with self._lock:
            lib.ring_clear_space_bell(self._open())

    # -- consumer

    def read(self) -> Record | None:
        """The next committed record, or None. Several may be held; aborted ones are skipped."""
        with self._lock:
            if (code := lib.ring_read(self._open(), self._span)) != lib.RING_OK:
                return self._nothing(code, lib.RING_EMPTY)
            self._records += 1
            span = self._span
            view = self._mapping.readonly[span.offset : span.offset + span.nbytes]
            return Record(self, span.position, span.epoch, view)

    def _finish_record(self, record: Record) -> None:
        with contextlib.suppress(BufferError):
            record.view.release()
        with self._lock:
            self._records -= 1
            _check(lib.ring_release(self._open(), record.position, record.epoch))

    def clear_data_bell(self) -> None:
        """Call first when `data_fd` is readable, then `read` until None: nothing is missed."""
        with self._lock:
            lib.ring_clear_data_bell(self._open())

    # -- liveness and recovery

    def beat_producer(self) -> None:
        with self._lock:
            lib.ring_beat(self._open(), lib.RING_PRODUCER)

    def beat_consumer(self) -> None:
        with self._lock:
            lib.ring_beat(self._open(), lib.RING_CONSUMER)

    def producer_age_s(self) -> float:
        """Seconds since the producer's last beat; infinite before its first."""
        with self._lock:
            return _seconds(lib.ring_age_ns(self._open(), lib.RING_PRODUCER))

    def consumer_age_s(self) -> float:
        """Seconds since the consumer's last beat; infinite before its first."""
        with self._lock:
            return _seconds(lib.ring_age_ns(self._open(), lib.RING_CONSUMER))

    def recover(self, dead: Side) -> int:
        """End what a dead side left: its claims (returns how many), or all records it held or had yet to read.
        Only once it is known to be dead. Rings the survivor's own bell."""
        with self._lock:
            return int(lib.ring_recover(self._open(), _SIDES[dead]))

    def recycle(self) -> int:
        """Wipe all that was written since the last recycle, empty the ring, begin a new epoch; returns bytes wiped.
        The other side must have stopped using the old epoch. Raises NativeError("ring-busy") while a slot or record
        is held by either side."""
        with self._lock:
            if self._slots or self._records:
                raise NativeError(
                    "ring-busy", f"{self._slots} slots and {self._records} records are held here: finish them first"
                )
            wiped = lib.ring_recycle(self._open())
            if wiped == lib.RING_BUSY:
                raise NativeError(
                    "ring-busy", "the other side holds a slot or record: stop it, or recover if it is dead"
                )
            return int(wiped)

    def close(self) -> None:
        """Unmap, close descriptors. Views that are still held stay readable; everything else raises from here on."""
        with self._lock:
            if self._ring is not None:
                self._ring = None
                self._mapping.close()
                self._close_bells()

    def _close_bells(self) -> None:
        os.close(self.data_fd)
        os.close(self.space_fd)

    def _open(self) -> Any:
        if self._ring is None:
            raise NativeError("ring-closed", "this ring was closed")
        return self._ring

    @staticmethod
    def _nothing(code: int, expected: int) -> None:
        if code != expected:
            _check(code)


def _check(code: int) -> None:
    if code == lib.RING_OK:
        return
    if code == lib.RING_STALE:
        raise NativeError("ring-stale", "the ring was recycled since: this slot or record belongs to a past epoch")
    raise NativeError("ring-corrupt", "shared memory holds what no correct peer writes: restart the worker")


def _seconds(age_ns: int) -> float:
    return age_ns / 1e9 if age_ns >= 0 else math.inf
