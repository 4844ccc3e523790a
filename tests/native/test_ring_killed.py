"""One side dies by SIGKILL between any two steps: the other notices, recovers, and nothing leaks (issue 2)."""

from __future__ import annotations

import mmap
import re
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from native.ring import Ring
from native.slab import Slab
from tests.native.conftest import ROOT, Spawn, open_descriptors
from tests.native.peer import page

CLAIM = ["claim-touched", "claim-padded", "claim-headed", "claim-done"]
FINISH = ["commit-published", "bell-taken", "bell-rung"]
PRODUCING = [*CLAIM, "claimed", "half written", "written", "commit-begun", *FINISH, "committed"]
ABORTING = ["abort-marked", *FINISH]
RELEASE = ["release-marked", "release-head", "release-freed", "bell-taken", "bell-rung"]
CONSUMING = ["read-moved", "read-skipped", "read", "before release", "released out of order", *RELEASE, "released"]
RECYCLING = ["recycle-epoch", "recycle-wiped", "recycle-untouched", "recycle-head", "recycle-read", "recycle-tail"]
OWNING = ["slab-claimed", "half written", "slab-release-begun", "slab-wiped", "slab-untouched", "slab-released"]


def test_every_step_in_the_c_code_has_a_kill_test() -> None:
    source = "".join((ROOT / "native" / name).read_text() for name in ("ring.c", "slab.c"))
    steps = set(re.findall(r'STEP\("([^"]+)"\)', source))
    assert steps and steps <= {*PRODUCING, *ABORTING, *CONSUMING, *RECYCLING, *OWNING}


@pytest.fixture
def ring() -> Iterator[Ring]:
    """Nothing of it may be held when the test ends; its descriptors and memory go with it."""
    before = open_descriptors()
    ring = Ring.create(16384, "killed")
    yield ring
    ring.recycle()
    ring.close()
    assert open_descriptors() <= before
    assert "killed" not in Path("/proc/self/maps").read_text()


def push(ring: Ring, number: int) -> None:
    slot = ring.claim(1000)
    assert slot is not None
    slot.view[:] = page(number, 1000)
    slot.commit()


def fill_to_the_wrap(ring: Ring) -> None:
    """The next record of 1000 bytes must wrap; record 7 is unread before it, and the bells are armed."""
    for _ in range(ring.capacity // Ring.record_bytes(1000) - 1):
        push(ring, 1)
        record = ring.read()
        assert record is not None
        record.release()
    push(ring, 7)
    ring.clear_data_bell()
    ring.clear_space_bell()


def wait_until_killed(process: object) -> None:
    assert process.wait(60) == -signal.SIGKILL, "the step was not reached"  # type: ignore[attr-defined]


def rung(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def read_all(ring: Ring) -> list[bytes]:
    seen = []
    while record := ring.read():
        seen.append(bytes(record.view))
        record.release()
    return seen


def is_zero(fd: int) -> bool:
    """All data of the memory, through a mapping of its own; the first 64 KiB are the descriptor."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        return not any(memory[65536:])


def serves_again(ring: Ring) -> None:
    push(ring, 9)
    assert rung(ring.data_fd)
    assert read_all(ring) == [page(9, 1000)]
    ring.recycle()


@pytest.mark.parametrize("step", PRODUCING)
def test_the_consumer_survives_a_producer_killed_at(step: str, ring: Ring, spawn: Spawn) -> None:
    fill_to_the_wrap(ring)
    wait_until_killed(spawn("produce_and_die", ring.handle, step=step))
    assert ring.producer_age_s() < 60
    committed = step in (*FINISH, "committed")
    before_death = read_all(ring)
    assert before_death == [page(7, 1000)] + [page(8, 1000)] * committed  # whole, or not there
    claimed = step in ("claim-done", "claimed", "half written", "written", "commit-begun")
    assert ring.recover("producer") == claimed
    assert rung(ring.data_fd)
    assert read_all(ring) == []
    assert ring.used_bytes == 0
    epoch = ring.epoch
    assert ring.recycle() == ring.capacity
    assert ring.epoch == epoch + 1 and is_zero(ring.handle.memory_fd)
    serves_again(ring)


@pytest.mark.parametrize("step", ABORTING)
def test_the_consumer_survives_a_producer_killed_while_aborting_at(step: str, ring: Ring, spawn: Spawn) -> None:
    fill_to_the_wrap(ring)
    wait_until_killed(spawn("produce_and_die", ring.handle, step=step, abort=True))
    assert ring.recover("producer") == (step == "abort-marked")
    assert read_all(ring) == [page(7, 1000)]
    assert ring.used_bytes == 0
    ring.recycle()
    assert is_zero(ring.handle.memory_fd)
    serves_again(ring)


@pytest.mark.parametrize("step", CONSUMING)
def test_the_producer_survives_a_consumer_killed_at(step: str, ring: Ring, spawn: Spawn) -> None:
    fill_to_the_wrap(ring)
    push(ring, 8)  # after the padding
    wait_until_killed(spawn("consume_and_die", ring.handle, step=step))
    assert ring.consumer_age_s() < 60
    ring.recover("consumer")
    assert rung(ring.space_fd)
    assert ring.used_bytes == 0
    push(ring, 9)  # a new consumer may go on in the same epoch
    assert read_all(ring) == [page(9, 1000)]
    assert ring.recycle() == ring.capacity
    assert is_zero(ring.handle.memory_fd)
    serves_again(ring)


@pytest.mark.parametrize("step", RECYCLING)
def test_a_ring_is_recycled_after_whoever_recycled_it_was_killed_at(step: str, ring: Ring, spawn: Spawn) -> None:
    fill_to_the_wrap(ring)
    wait_until_killed(spawn("recycle_and_die", ring.handle, step=step))
    ring.recover("consumer")
    ring.recycle()
    assert is_zero(ring.handle.memory_fd)
    serves_again(ring)


def test_a_producer_with_a_claim_of_its_own_survives_its_consumer(ring: Ring, spawn: Spawn) -> None:
    fill_to_the_wrap(ring)
    push(ring, 8)
    mine = ring.claim(1000)
    assert mine is not None
    holder = spawn("hold", ring.handle)
    while ring.consumer_age_s() > 60:
        select.select([], [], [], 0.01)
    holder.kill()
    wait_until_killed(holder)
    assert ring.recover("consumer") == 2
    assert ring.used_bytes == Ring.record_bytes(1000)  # the claim is still being written
    mine.abort()
    ring.recycle()
    serves_again(ring)


def test_a_ring_held_by_a_dead_consumer_is_not_recycled_before_recovery(ring: Ring, spawn: Spawn) -> None:
    fill_to_the_wrap(ring)
    wait_until_killed(spawn("consume_and_die", ring.handle, step="before release"))
    with pytest.raises(Exception, match="recover if it is dead"):
        ring.recycle()
    ring.recover("consumer")
    ring.recycle()


@pytest.mark.parametrize("step", OWNING)
def test_a_slab_survives_its_owner_killed_at(step: str, spawn: Spawn) -> None:
    slab = Slab.create(65536, "killed slab")
    owner = spawn("own_slab_and_die", slab.handle, step=step)
    wait_until_killed(owner)
    assert slab.owner_pid in (owner.pid, 0)
    assert slab.recover(owner.pid + 1) == 0  # not that one's
    slab.recover(owner.pid)
    assert (slab.owner_pid, slab.epoch) == (0, 0)
    assert is_zero(slab.handle.memory_fd)
    assert slab.claim(8)
    slab.close()
