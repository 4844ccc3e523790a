"""`zc-handoff bench ring`: what the ring itself costs.

    claim_commit_ns   one ring_claim + ring_commit in C, called from Python in batches of 1000, per pair
    slot_ns           the same through Ring.claim and Slot.commit
    record_ns         Ring.read and Record.release
    wake_up_us        from just before a commit in one process to the return of select in another that slept

Nothing is written into the records: this is the price of the ring, not of memcpy. Both processes read one clock.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Final

import msgspec

from native._ring import ffi, lib
from native.ring import Ring
from zerocopy.cli.measuring import Quantiles, quantiles
from zerocopy.cli.screen import CliError

BATCH: Final = 1000
NBYTES: Final = 64
RING_BYTES: Final = 1 << 20  # holds a batch
WAKE_UP_S: Final = 10.0  # a doorbell that takes longer is lost


class RingReport(msgspec.Struct, frozen=True):
    batch: int
    record_bytes: int
    claim_commit_ns: Quantiles
    slot_ns: Quantiles
    record_ns: Quantiles
    wake_up_us: Quantiles


def measure(batches: int = 200, wake_ups: int = 1000) -> RingReport:
    """The first tenth of each series is warm-up."""
    ring = Ring.create(RING_BYTES, "bench")
    raw, span = ring._ring, ffi.new("struct ring_span *")  # the C calls by themselves need the C object

    def claim_in_c() -> None:
        claim, commit = lib.ring_claim, lib.ring_commit
        for _ in range(BATCH):
            claim(raw, NBYTES, span)
            commit(raw, span.position, span.epoch)

    def claim_slots() -> None:
        for _ in range(BATCH):
            slot = ring.claim(NBYTES)
            assert slot is not None
            slot.commit()

    def read_records() -> None:
        while record := ring.read():
            record.release()

    def check_full() -> None:
        """A claim that is refused costs little: no figure of those."""
        held = BATCH * lib.ring_record_bytes(NBYTES)
        if ring.used_bytes != held:
            raise CliError(f"the ring holds {ring.used_bytes} bytes of a batch, not {held}: this is no measurement")
        read_records()

    try:
        return RingReport(
            BATCH,
            NBYTES,
            claim_commit_ns=_per_call(batches, before=lambda: None, timed=claim_in_c, after=check_full),
            slot_ns=_per_call(batches, before=lambda: None, timed=claim_slots, after=check_full),
            record_ns=_per_call(batches, before=claim_slots, timed=read_records, after=lambda: None),
            wake_up_us=_measure_wake_up(wake_ups),
        )
    finally:
        ring.close()


def _per_call(
    batches: int, before: Callable[[], None], timed: Callable[[], None], after: Callable[[], None]
) -> Quantiles:
    """Nanoseconds per operation over many batches."""
    samples = []
    for _ in range(batches):
        before()
        start = time.perf_counter_ns()
        timed()
        samples.append((time.perf_counter_ns() - start) / BATCH)
        after()
    return _settled(samples)


def _measure_wake_up(count: int) -> Quantiles:
    """Microseconds."""
    ring = Ring.create(RING_BYTES, "bench")
    child = os.fork()
    if child == 0:
        try:
            _send_timestamps(ring, count)
        finally:
            os._exit(0)
    samples: list[float] = []
    try:
        while len(samples) < count:
            if not select.select([ring.data_fd], [], [], WAKE_UP_S)[0]:
                raise CliError(f"the doorbell was silent for {WAKE_UP_S:g} s after {len(samples)} of {count} records")
            woken = time.monotonic_ns()
            ring.clear_data_bell()
            while record := ring.read():
                samples.append((woken - int.from_bytes(record.view, "little")) / 1000)
                record.release()
    finally:
        os.waitpid(child, 0)
        ring.close()
    return _settled(samples)


def _send_timestamps(ring: Ring, count: int) -> None:
    for _ in range(count):
        time.sleep(0.001)  # the consumer is asleep by then
        slot = ring.claim(8)
        assert slot is not None
        slot.view[:] = time.monotonic_ns().to_bytes(8, "little")
        slot.commit()


def _settled(samples: list[float]) -> Quantiles:
    found = quantiles(samples[len(samples) // 10 :])
    assert found is not None
    return found
