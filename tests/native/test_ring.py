"""The ring within one process: records, order, epochs, wiping, views that outlive it."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import select
import sys
import threading
from pathlib import Path

import pytest

from native.memory import NativeError, create_memory
from native.ring import Record, Ring, RingHandle, Slot
from tests.native.conftest import open_descriptors

Pair = tuple[Ring, Ring]


def push(ring: Ring, payload: bytes) -> None:
    slot = ring.claim(len(payload))
    assert slot is not None
    slot.view[:] = payload
    slot.commit()


def pull(ring: Ring) -> Record:
    record = ring.read()
    assert record is not None
    return record


def claim(ring: Ring, nbytes: int) -> Slot:
    slot = ring.claim(nbytes)
    assert slot is not None
    return slot


def drain(ring: Ring) -> list[bytes]:
    found = []
    while record := ring.read():
        found.append(bytes(record.view))
        record.release()
    return found


def rings_bell(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def raw_data(ring: Ring) -> bytes:
    """The data area as another process would see it, through a mapping of its own."""
    from native._ring import lib

    with mmap.mmap(ring.handle.memory_fd, 0, prot=mmap.PROT_READ) as memory:
        return memory[lib.RING_DATA : lib.RING_DATA + ring.capacity]


def reason_of(action: object) -> str:
    with pytest.raises(NativeError) as raised:
        action()  # type: ignore[operator]
    return raised.value.reason


def test_records_arrive_in_claim_order_with_their_exact_length(pair: Pair) -> None:
    producer, consumer = pair
    payloads = [bytes([n % 251]) * n for n in (1, 63, 64, 65, 1000)]
    for payload in payloads:
        push(producer, payload)
    assert drain(consumer) == payloads


def test_a_record_is_invisible_until_it_is_committed(pair: Pair) -> None:
    producer, consumer = pair
    slot = claim(producer, 10)
    slot.view[:] = b"0123456789"
    assert consumer.read() is None
    slot.commit()
    assert drain(consumer) == [b"0123456789"]


def test_a_record_committed_early_waits_for_the_one_claimed_before_it(pair: Pair) -> None:
    producer, consumer = pair
    first, second = claim(producer, 1), claim(producer, 1)
    first.view[:], second.view[:] = b"1", b"2"
    second.commit()
    assert consumer.read() is None
    first.commit()
    assert drain(consumer) == [b"1", b"2"]


def test_an_aborted_record_is_skipped_and_its_room_comes_back(pair: Pair) -> None:
    producer, consumer = pair
    slot = claim(producer, 100)
    push(producer, b"after")
    slot.abort()
    assert drain(consumer) == [b"after"]
    assert producer.used_bytes == 0
    assert producer.freed_bytes == Ring.record_bytes(100) + Ring.record_bytes(5)


def test_records_released_out_of_order_are_freed_in_order(pair: Pair) -> None:
    producer, consumer = pair
    for _ in range(3):
        push(producer, bytes(100))
    first, second, third = (pull(consumer) for _ in range(3))
    third.release()
    second.release()
    assert producer.used_bytes == 3 * Ring.record_bytes(100)
    first.release()
    assert producer.used_bytes == 0


def test_a_record_stays_as_it_is_while_it_is_held(pair: Pair) -> None:
    producer, consumer = pair
    push(producer, b"held" * 100)
    held = pull(consumer)
    while (slot := producer.claim(1000)) is not None:
        slot.view[:] = b"\xff" * 1000
        slot.commit()
    assert bytes(held.view) == b"held" * 100


def test_a_full_ring_says_so_and_takes_again_after_a_release(pair: Pair) -> None:
    producer, consumer = pair
    count = 0
    while producer.claim(1000) is not None:
        count += 1
    assert count == producer.capacity // Ring.record_bytes(1000)
    assert producer.used_bytes <= producer.capacity
    producer.recover("producer")
    assert consumer.read() is None  # all aborted, all skipped
    assert producer.claim(1000) is not None


def test_a_record_never_wraps_and_padding_is_no_record(pair: Pair) -> None:
    producer, consumer = pair
    nbytes, sent, seen = 3000, 0, []
    for number in range(50):
        push(producer, bytes([number]) * nbytes)
        sent += Ring.record_bytes(nbytes)
        seen += drain(consumer)
    assert seen == [bytes([number]) * nbytes for number in range(50)]
    assert producer.freed_bytes == sent  # the padding at each wrap is not counted
    assert producer.used_bytes == 0


def test_the_largest_record_fits_wherever_the_cursors_stand(pair: Pair) -> None:
    producer, consumer = pair
    assert Ring.record_bytes(producer.max_record) == producer.capacity // 4
    for nbytes in range(1, producer.capacity, 64 * 7):
        push(producer, bytes(min(nbytes, producer.max_record)))
        drain(consumer)
        push(producer, bytes(producer.max_record))
        drain(consumer)


def test_credit_of_capacity_less_the_largest_record_is_never_refused(pair: Pair) -> None:
    producer, consumer = pair
    limit = producer.capacity - Ring.record_bytes(producer.max_record)
    flying: list[Record] = []
    sent = 0
    for number in range(2000):
        nbytes = 1 + number * 997 % producer.max_record
        while sent + Ring.record_bytes(nbytes) > producer.freed_bytes + limit:
            flying.pop(0).release()
        push(producer, bytes(nbytes))
        sent += Ring.record_bytes(nbytes)
        flying.append(pull(consumer))
    for record in flying:
        record.release()


@pytest.mark.parametrize("nbytes", [0, -1, 4033, 2**31, 2**63, 2**64])
def test_a_size_the_ring_can_never_take_is_an_error(pair: Pair, nbytes: int) -> None:
    assert pair[0].max_record == 4032
    assert reason_of(lambda: pair[0].claim(nbytes)) == "record-size"


def test_payloads_start_on_64_bytes_and_data_on_a_page() -> None:
    from native._ring import ffi, lib

    ring = Ring.create(1, "aligned")
    assert ring.capacity == mmap.PAGESIZE and lib.RING_DATA % 65536 == 0
    for nbytes in (1, 64, 100):
        address = int(ffi.cast("uintptr_t", ffi.from_buffer(claim(ring, nbytes).view)))
        assert address % 64 == 0
    ring.close()


def test_a_slot_finishes_once_and_a_record_is_released_once(pair: Pair) -> None:
    producer, consumer = pair
    slot = claim(producer, 1)
    slot.commit()
    assert reason_of(slot.commit) == reason_of(slot.abort) == "slot-finished"
    record = pull(consumer)
    record.release()
    assert reason_of(record.release) == "record-released"


def test_the_view_of_a_finished_slot_or_record_is_dead(pair: Pair) -> None:
    producer, consumer = pair
    slot = claim(producer, 1)
    slot.commit()
    with pytest.raises(ValueError):
        slot.view[0] = 1
    record = pull(consumer)
    with pytest.raises(TypeError):
        record.view[0] = 1  # read-only
    record.release()
    with pytest.raises(ValueError):
        record.view[0]


def test_a_view_kept_past_close_neither_faults_nor_blocks_it() -> None:
    ring = Ring.create(16384, "kept")
    slot = claim(ring, 4)
    kept = slot.view[:]
    kept[:] = b"kept"
    slot.commit()
    ring.close()
    ring.close()
    assert bytes(kept) == b"kept"
    kept[:] = b"late"
    for use in (ring.read, ring.recycle, ring.beat_producer, lambda: ring.epoch, lambda: ring.claim(1)):
        assert reason_of(use) == "ring-closed"


def test_a_slot_committed_after_close_is_an_error_not_a_crash() -> None:
    ring = Ring.create(16384, "closed")
    push(ring, b"x")
    slot, record = claim(ring, 4), pull(ring)
    ring.close()
    assert reason_of(slot.commit) == reason_of(record.release) == "ring-closed"


def test_recycling_wipes_all_that_was_touched_and_begins_an_epoch(pair: Pair) -> None:
    producer, consumer = pair
    push(producer, b"secret" * 100)
    drain(consumer)
    slot = claim(producer, 600)
    slot.view[:] = b"secret" * 100
    slot.abort()
    epoch = producer.epoch
    assert b"secret" in raw_data(producer)
    assert consumer.recycle() == 2 * Ring.record_bytes(600)
    assert raw_data(producer) == bytes(producer.capacity)
    assert producer.epoch == consumer.epoch == epoch + 1
    assert (producer.used_bytes, producer.freed_bytes) == (0, 0)


def test_recycling_a_ring_that_went_round_wipes_all_of_it(pair: Pair) -> None:
    producer, consumer = pair
    for _ in range(40):
        push(producer, b"\xee" * 1000)
        drain(consumer)
    assert producer.recycle() == producer.capacity
    assert raw_data(producer) == bytes(producer.capacity)
    assert producer.recycle() == 0


def test_unread_records_do_not_survive_recycling(pair: Pair) -> None:
    producer, consumer = pair
    push(producer, b"old")
    consumer.recycle()
    push(producer, b"new")
    assert drain(consumer) == [b"new"]


def test_a_ring_in_use_on_either_side_is_not_recycled(pair: Pair) -> None:
    producer, consumer = pair
    slot = claim(producer, 1)
    for ring in pair:
        assert reason_of(ring.recycle) == "ring-busy"
    slot.commit()
    record = pull(consumer)
    for ring in pair:
        assert reason_of(ring.recycle) == "ring-busy"
    record.release()
    producer.recycle()


def test_a_slot_of_a_past_epoch_cannot_be_committed(pair: Pair) -> None:
    producer, consumer = pair
    slot = claim(producer, 1)
    consumer.recover("producer")  # it was thought dead
    consumer.recycle()
    assert reason_of(slot.commit) == "ring-stale"
    assert consumer.read() is None
    assert raw_data(producer) == bytes(producer.capacity)


def test_a_slot_ended_by_recovery_cannot_be_committed(pair: Pair) -> None:
    producer, consumer = pair
    slot = claim(producer, 1)
    consumer.recover("producer")
    assert reason_of(slot.commit) == "ring-stale"
    assert consumer.read() is None


def test_a_record_of_a_past_epoch_cannot_be_released(pair: Pair) -> None:
    producer, consumer = pair
    push(producer, b"x")
    record = pull(consumer)
    producer.recover("consumer")
    producer.recycle()
    push(producer, b"y")
    assert reason_of(record.release) == "ring-stale"
    assert drain(consumer) == [b"y"]


def test_a_record_that_carries_another_epoch_is_skipped_and_counted(pair: Pair) -> None:
    from native._ring import lib

    producer, consumer = pair
    push(producer, b"late")
    push(producer, b"good")
    with mmap.mmap(producer.handle.memory_fd, 0) as memory:
        memory[lib.RING_DATA + 16 : lib.RING_DATA + 20] = (99).to_bytes(4, sys.byteorder)
    assert drain(consumer) == [b"good"]
    assert consumer.stale_records == 1
    assert producer.used_bytes == 0


def test_a_bell_rings_for_the_first_event_and_again_only_once_cleared(pair: Pair) -> None:
    producer, consumer = pair
    assert not rings_bell(consumer.data_fd)
    push(producer, b"1")
    assert rings_bell(consumer.data_fd)
    consumer.clear_data_bell()
    assert not rings_bell(consumer.data_fd)
    push(producer, b"2")
    push(producer, b"3")
    assert rings_bell(consumer.data_fd)
    assert os.read(consumer.data_fd, 8) == (1).to_bytes(8, sys.byteorder)  # two records, one ring


def test_the_space_bell_rings_on_release_and_on_a_skipped_abort(pair: Pair) -> None:
    producer, consumer = pair
    push(producer, b"1")
    record = pull(consumer)
    assert not rings_bell(producer.space_fd)
    record.release()
    assert rings_bell(producer.space_fd)
    producer.clear_space_bell()
    claim(producer, 1).abort()
    assert consumer.read() is None
    assert rings_bell(producer.space_fd)


def test_an_event_before_clearing_is_seen_by_the_look_after_it(pair: Pair) -> None:
    producer, consumer = pair
    push(producer, b"1")
    consumer.clear_data_bell()
    assert drain(consumer) == [b"1"]
    push(producer, b"2")
    assert rings_bell(consumer.data_fd)


def test_bells_are_armed_again_by_recycling(pair: Pair) -> None:
    producer, consumer = pair
    push(producer, b"1")
    consumer.recycle()
    assert not rings_bell(consumer.data_fd)
    push(producer, b"2")
    assert rings_bell(consumer.data_fd)


def test_ages_are_infinite_before_the_first_beat_and_small_after(pair: Pair) -> None:
    producer, consumer = pair
    assert consumer.producer_age_s() == producer.consumer_age_s() == math.inf
    producer.beat_producer()
    consumer.beat_consumer()
    assert 0 <= consumer.producer_age_s() < 60 and 0 <= producer.consumer_age_s() < 60


def test_threads_of_one_producer_take_turns(pair: Pair) -> None:
    producer, consumer = pair
    per_thread, seen = 500, []

    def produce(name: int) -> None:
        for number in range(per_thread):
            while (slot := producer.claim(4)) is None:
                pass
            slot.view[:] = bytes([name, number & 255, number >> 8, 7])
            slot.commit()

    threads = [threading.Thread(target=produce, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    while len(seen) < 4 * per_thread:
        seen += drain(consumer)
    for thread in threads:
        thread.join()
    for name in range(4):
        assert [m[1] | m[2] << 8 for m in seen if m[0] == name] == list(range(per_thread))


def test_memory_is_pre_faulted_by_creator_and_by_whoever_attaches() -> None:
    ring = Ring.create(8 << 20, "fault")
    other = Ring.attach(ring.handle.duplicate())
    pages = ring.capacity // mmap.PAGESIZE
    for side in (ring, other):
        view = claim(side, 64)
        view.abort()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        slots = [claim(side, side.max_record) for _ in range(3)]
        for slot in slots:
            slot.view[:: mmap.PAGESIZE] = b"\1" * len(slot.view[:: mmap.PAGESIZE])
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages // 20
        ring.recover("producer")
        assert other.read() is None
    ring.close()
    other.close()


@pytest.mark.skipif(sys.platform != "linux", reason="smaps exists on Linux only")
def test_memory_is_left_out_of_core_dumps() -> None:
    ring = Ring.create(16384, "no-core")
    smaps = Path("/proc/self/smaps").read_text()
    flags = smaps[smaps.index("memfd:no-core") :].split("VmFlags:")[1].split("\n")[0]
    assert "dd" in flags.split()
    ring.close()


def test_nothing_is_left_of_a_closed_ring() -> None:
    ring = Ring.create(16384, "gone-without-trace")
    ring.close()
    assert "gone-without-trace" not in Path("/proc/self/maps").read_text()
    assert not any("gone" in name for name in os.listdir("/dev/shm"))


@pytest.mark.parametrize("wrong", [4096, 20480, 1 << 40])
def test_a_handle_of_another_size_is_refused_and_its_descriptors_closed(pair: Pair, wrong: int) -> None:
    before = open_descriptors()
    handle = RingHandle(*pair[0].handle.duplicate().fds, wrong)
    assert reason_of(lambda: Ring.attach(handle)) in ("ring-corrupt", "memory-size")
    assert open_descriptors() <= before


def test_a_peer_cannot_shrink_the_memory_under_this_process(pair: Pair) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(pair[0].handle.memory_fd, 4096)


def test_garbage_from_a_mad_producer_is_an_error_and_recoverable(pair: Pair) -> None:
    from native._ring import lib

    producer, consumer = pair
    push(producer, b"x")
    with mmap.mmap(producer.handle.memory_fd, 0) as memory:
        memory[lib.RING_DATA : lib.RING_DATA + 8] = (1 << 62).to_bytes(8, sys.byteorder)
    assert reason_of(consumer.read) == "ring-corrupt"
    consumer.recover("producer")
    assert consumer.read() is None
    consumer.recycle()
    push(producer, b"y")
    assert drain(consumer) == [b"y"]


@pytest.mark.parametrize("left", [1, 2])
def test_a_ring_that_runs_out_of_descriptors_half_way_keeps_none(left: int) -> None:
    """A ring is three; a host at its limit lost one or two at each attempt."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 4, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(left):
            os.close(taken.pop())
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                Ring.create(1 << 20, "test")
        taken += [os.dup(0) for _ in range(left)]  # as many as before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_memory_that_cannot_be_as_large_keeps_no_descriptor() -> None:
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with pytest.raises((OSError, OverflowError)):
            create_memory("test", 1 << 63)
    assert len(os.listdir("/dev/fd")) == before
