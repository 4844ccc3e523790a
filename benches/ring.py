"""What the ring costs: `python -m benches.ring [--json]`.

    claim_commit_ns   one ring_claim + ring_commit in C, called from Python in batches of 1000, per pair
    slot_ns           the same through Ring.claim and Slot.commit
    record_ns         Ring.read and Record.release
    wake_up_us        from just before a commit in one process to the return of select in another that slept

Nothing is written into the records: this is the ring's own price, not memcpy's. Linux: both processes read the same
monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import time
from collections.abc import Callable

from native._ring import ffi, lib
from native.ring import Ring

BATCH = 1000
BATCHES = 200
WAKE_UPS = 1000
NBYTES = 64


def quantiles(samples: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(samples, n=100)
    return {"p50": round(cuts[49], 3), "p90": round(cuts[89], 3), "p99": round(cuts[98], 3)}


def per_call(batch: Callable[[], None], after: Callable[[], None]) -> dict[str, float]:
    """Nanoseconds per operation over many batches; `after` is not timed."""
    samples = []
    for _ in range(BATCHES):
        start = time.perf_counter_ns()
        batch()
        samples.append((time.perf_counter_ns() - start) / BATCH)
        after()
    return quantiles(samples[BATCHES // 10 :])


def measure_calls() -> dict[str, dict[str, float]]:
    ring = Ring.create(1 << 20, "bench")
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

    results = {"claim_commit_ns": per_call(claim_in_c, read_records), "slot_ns": per_call(claim_slots, read_records)}
    samples = []
    for _ in range(BATCHES):
        claim_slots()
        start = time.perf_counter_ns()
        read_records()
        samples.append((time.perf_counter_ns() - start) / BATCH)
    results["record_ns"] = quantiles(samples)
    ring.close()
    return results


def send_timestamps(ring: Ring) -> None:
    for _ in range(WAKE_UPS):
        time.sleep(0.001)  # the consumer is asleep by then
        slot = ring.claim(8)
        assert slot is not None
        slot.view[:] = time.monotonic_ns().to_bytes(8, "little")
        slot.commit()


def measure_wake_up() -> dict[str, float]:
    ring = Ring.create(1 << 20, "bench")
    child = os.fork()
    if child == 0:
        send_timestamps(ring)
        os._exit(0)
    samples: list[float] = []
    while len(samples) < WAKE_UPS:
        select.select([ring.data_fd], [], [], 10)
        woken = time.monotonic_ns()
        ring.clear_data_bell()
        while record := ring.read():
            samples.append((woken - int.from_bytes(record.view, "little")) / 1000)
            record.release()
    os.waitpid(child, 0)
    ring.close()
    return quantiles(samples[WAKE_UPS // 10 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    as_json = parser.parse_args().json
    results = {**measure_calls(), "wake_up_us": measure_wake_up()}
    if as_json:
        print(json.dumps({"batch": BATCH, "record_bytes": NBYTES, **results}))
        return
    for name, values in results.items():
        print(f"{name:16}" + "".join(f"  {label} {value:>10.1f}" for label, value in values.items()))


if __name__ == "__main__":
    main()
