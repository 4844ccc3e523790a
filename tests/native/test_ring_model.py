"""The ring against a model of it made of Python lists: any sequence of operations, same answers, exact FULL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from native.ring import Record, Ring, Slot

CAPACITY = 8192


@dataclass
class Entry:
    """One stretch of the ring, oldest first: a record, or the padding before a wrap."""

    nbytes: int  # with header
    payload: bytes = b""
    slot: Slot | None = None
    record: Record | None = None
    state: str = "claimed"  # then committed | aborted | padding, then held, then released


class RingModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.producer = Ring.create(CAPACITY, "model")
        self.consumer = Ring.attach(self.producer.handle.duplicate())
        self.entries: list[Entry] = []
        self.tail = 0
        self.high_water = 0
        self.freed = 0
        self.epoch = 1

    def teardown(self) -> None:
        self.producer.close()
        self.consumer.close()

    def in_state(self, *states: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.state in states]

    @rule(nbytes=st.integers(1, CAPACITY // 4 - 64))
    def claim(self, nbytes: int) -> None:
        need = 64 + -(-nbytes // 64) * 64
        to_end = CAPACITY - self.tail % CAPACITY
        padding = to_end if need > to_end else 0
        slot = self.producer.claim(nbytes)
        if sum(entry.nbytes for entry in self.entries) + padding + need > CAPACITY:
            assert slot is None
            return
        assert slot is not None and len(slot.view) == nbytes and slot.epoch == self.epoch
        if padding:
            self.entries.append(Entry(padding, state="padding"))
        payload = bytes([self.tail // 64 % 255 + 1]) * nbytes
        slot.view[:] = payload
        self.tail += padding + need
        self.high_water = max(self.high_water, min(self.tail, CAPACITY))
        self.entries.append(Entry(need, payload, slot))

    @precondition(lambda self: self.in_state("claimed"))
    @rule(data=st.data(), abort=st.booleans())
    def finish(self, data: Any, abort: bool) -> None:
        entry = data.draw(st.sampled_from(self.in_state("claimed")))
        assert entry.slot is not None
        entry.slot.abort() if abort else entry.slot.commit()
        entry.state = "aborted" if abort else "committed"

    @rule()
    def read(self) -> None:
        expected = None
        for entry in self.in_state("claimed", "committed", "aborted", "padding"):
            if entry.state in ("claimed", "committed"):
                expected = entry if entry.state == "committed" else None
                break
            entry.state = "released"
        record = self.consumer.read()
        self.collect()
        if expected is None:
            assert record is None
            return
        assert record is not None and record.view == expected.payload and record.epoch == self.epoch
        expected.record, expected.state = record, "held"

    @precondition(lambda self: self.in_state("held"))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        entry = data.draw(st.sampled_from(self.in_state("held")))
        assert entry.record is not None and entry.record.view == entry.payload
        entry.record.release()
        entry.state = "released"
        self.collect()

    def collect(self) -> None:
        """Room comes back in order, from the oldest on."""
        while self.entries and self.entries[0].state == "released":
            entry = self.entries.pop(0)
            self.freed += entry.nbytes if entry.slot else 0

    @precondition(lambda self: not self.in_state("claimed", "held"))
    @rule(by_producer=st.booleans())
    def recycle(self, by_producer: bool) -> None:
        if any(entry.state == "released" for entry in self.entries):
            return  # cannot be: what is released in front of unread records is freed
        assert (self.producer if by_producer else self.consumer).recycle() == self.high_water
        self.entries, self.tail, self.high_water, self.freed = [], 0, 0, 0
        self.epoch += 1

    @rule()
    def kill_producer(self) -> None:
        for entry in self.in_state("claimed"):
            assert entry.slot is not None
            entry.state = "aborted"
            self.producer._slots -= 1  # the process that counted them is gone
        self.consumer.recover("producer")

    @precondition(lambda self: not self.in_state("claimed"))
    @rule()
    def kill_consumer(self) -> None:
        self.consumer._records -= len(self.in_state("held"))
        self.producer.recover("consumer")
        for entry in self.entries:
            entry.state = "released"
        self.collect()

    @invariant()
    def the_ring_and_the_model_agree(self) -> None:
        assert self.producer.used_bytes == sum(entry.nbytes for entry in self.entries)
        assert self.consumer.freed_bytes == self.freed
        assert self.consumer.epoch == self.epoch


RingModel.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestTheRingAgainstItsModel = RingModel.TestCase
