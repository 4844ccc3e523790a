"""Two processes on one ring: nothing lost, nothing torn, nobody sleeps through a bell."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from native.memory import create_fifo_bell, create_posix_memory
from native.ring import Ring, RingHandle
from tests.native.conftest import Spawn, open_descriptors
from tests.native.peer import page


@pytest.fixture(params=["memfd and eventfds", "POSIX memory and FIFOs"])
def consumer(request: pytest.FixtureRequest) -> Iterator[Ring]:
    """Both ways of making a ring: Linux's own, and the one other systems use."""
    before = open_descriptors()
    if request.param.startswith("memfd"):
        ring = Ring.create(65536, "two processes")
    else:
        from native._ring import lib

        memory_fd = create_posix_memory(lib.RING_DATA + 65536)
        ring = Ring(RingHandle(memory_fd, create_fifo_bell(), create_fifo_bell(), 65536), fresh=True)
    yield ring
    ring.close()
    assert open_descriptors() <= before


@pytest.mark.parametrize("pause_every", [7, 10**9])
def test_every_record_crosses_whole_and_in_order(consumer: Ring, spawn: Spawn, pause_every: int) -> None:
    count = 6000
    producer = spawn("produce", consumer.handle, count=count, pause_every=pause_every)
    held, number = [], 0
    while number < count:
        while record := consumer.read():
            nbytes = 8 + number * 997 % (consumer.max_record - 8)
            assert record.view == page(number, nbytes)
            held.append(record)
            number += 1
            if len(held) == 4:
                for late in reversed(held):
                    late.release()
                held.clear()
        for late in held:
            late.release()
        held.clear()
        if number < count:
            consumer.clear_data_bell()
            if not consumer.used_bytes:
                assert select.select([consumer.data_fd], [], [], 20)[0], "lost wake-up of the consumer"
    assert producer.wait(60) == 0
    assert consumer.read() is None and consumer.used_bytes == 0


def test_no_wake_up_is_lost_when_both_sides_sleep_after_every_record(spawn: Spawn) -> None:
    requests, answers = Ring.create(16384, "requests"), Ring.create(16384, "answers")
    count = 4000
    echo = spawn("echo", (*requests.handle.fds, *answers.handle.fds, requests.capacity), count=count)
    for number in range(count):
        slot = requests.claim(64)
        assert slot is not None
        slot.view[:] = page(number, 64)
        slot.commit()
        answers.clear_data_bell()
        while (record := answers.read()) is None:
            assert select.select([answers.data_fd], [], [], 20)[0], "lost wake-up"
            answers.clear_data_bell()
        assert record.view == page(number, 64)
        record.release()
    assert echo.wait(60) == 0
    requests.close()
    answers.close()


def test_an_event_loop_waits_on_the_bell_by_the_documented_recipe(spawn: Spawn) -> None:
    ring, count = Ring.create(65536, "loop"), 1500

    async def consume() -> list[int]:
        seen: list[int] = []
        done = asyncio.get_running_loop().create_future()

        def on_data() -> None:
            ring.clear_data_bell()
            while record := ring.read():
                seen.append(int.from_bytes(record.view[:8], "little"))
                record.release()
            if len(seen) == count:
                done.set_result(None)

        asyncio.get_running_loop().add_reader(ring.data_fd, on_data)
        spawn("produce", ring.handle, count=count, pause_every=5)
        await asyncio.wait_for(done, 30)
        asyncio.get_running_loop().remove_reader(ring.data_fd)
        return seen

    assert asyncio.run(consume()) == list(range(count))
    ring.close()


def test_space_is_noticed_by_a_producer_that_only_watches_credit() -> None:
    """It never sees FULL: clearing alone must arm the bell, and looking at `freed_bytes` must find what was freed."""
    producer = Ring.create(16384, "credit")
    consumer = Ring.attach(producer.handle.duplicate())
    rounds, limit = 3000, producer.capacity - producer.capacity // 4

    def consume() -> None:
        for _ in range(rounds):
            while (record := consumer.read()) is None:
                consumer.clear_data_bell()
                if not consumer.used_bytes:
                    select.select([consumer.data_fd], [], [], 20)
            record.release()

    thread = threading.Thread(target=consume)
    thread.start()
    sent = 0
    for _ in range(rounds):
        while sent + Ring.record_bytes(2000) > limit + producer.freed_bytes:
            producer.clear_space_bell()
            if sent + Ring.record_bytes(2000) > limit + producer.freed_bytes:
                assert select.select([producer.space_fd], [], [], 20)[0], "lost wake-up"
        slot = producer.claim(2000)
        assert slot is not None
        slot.commit()
        sent += Ring.record_bytes(2000)
    thread.join()
    producer.close()
    consumer.close()


def test_a_handle_travels_over_a_socket() -> None:
    ring = Ring.create(16384, "sent")
    here, there = socket.socketpair()
    socket.send_fds(here, [b"ring"], list(ring.handle.fds))
    _, fds, _, _ = socket.recv_fds(there, 16, 3)
    other = Ring.attach(RingHandle(fds[0], fds[1], fds[2], ring.capacity))
    slot = other.claim(3)
    assert slot is not None
    slot.view[:] = b"abc"
    slot.commit()
    record = ring.read()
    assert record is not None and record.view == b"abc"
    for closing in (ring, other, here, there):
        closing.close()
    with pytest.raises(OSError):
        os.fstat(fds[0])
