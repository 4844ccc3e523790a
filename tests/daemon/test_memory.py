from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from multiprocessing import get_context

import pytest

from native.memory import NativeError
from native.ring import Ring, RingHandle
from native.slab import Slab, SlabHandle
from zerocopy.daemon import memory as daemon_memory
from zerocopy.daemon.memory import FEWEST_SLABS, Lease, SharedMemory
from zerocopy.handoff.components import HEADER_BYTES, Component, ComponentSpec, StateSchema

RING = 1 << 16
DENSE = StateSchema("llama", (ComponentSpec(Component.ATTENTION_KV, True, (64,)),))
HYBRID = StateSchema("mamba2", (ComponentSpec(Component.RECURRENT, False, (5000,)),), snapshot_prefix=100)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    shared = SharedMemory(export=True, landing=True, rings=2, ring_bytes=RING)
    yield shared
    shared.close()


def lend(shared: SharedMemory, side: str = "landing", epoch: int = 1) -> Lease:
    lease = shared.lend("landing" if side == "landing" else "export", epoch)
    assert lease is not None
    return lease


def contents(ring: Ring) -> bytes:
    """The ring's data, whatever its descriptor says."""
    os.lseek(ring.handle.memory_fd, 0, os.SEEK_SET)
    return os.pread(ring.handle.memory_fd, ring.capacity, os.fstat(ring.handle.memory_fd).st_size - ring.capacity)


def slab_contents(slab: Slab) -> bytes:
    size = os.fstat(slab.handle.memory_fd).st_size
    return os.pread(slab.handle.memory_fd, slab.capacity, size - slab.capacity)


def write(lease: Lease, text: bytes) -> None:
    slot = lease.ring.claim(len(text))
    assert slot is not None
    slot.view[:] = text
    slot.commit()


def test_nothing_can_be_lent_before_an_engine_is_up(memory: SharedMemory) -> None:
    assert memory.lend("landing", 1) is None
    assert memory.reserved_bytes() == 0


def test_a_worker_is_told_of_every_ring_and_slab_and_gets_their_descriptors(memory: SharedMemory) -> None:
    attach, fds = memory.attach(HYBRID)
    assert [len(specs) for specs in (attach.export_rings, attach.export_slabs)] == [2, 2]
    assert [len(specs) for specs in (attach.landing_rings, attach.landing_slabs)] == [2, 2]
    assert len(fds) == len(set(fds)) == 2 * (2 * 3 + 2)


def test_descriptors_are_in_the_order_in_which_a_worker_takes_them(memory: SharedMemory) -> None:
    attach, fds = memory.attach(HYBRID)
    copies = iter([os.dup(fd) for fd in fds])
    for rings, slabs, side in (
        (attach.export_rings, attach.export_slabs, "export"),
        (attach.landing_rings, attach.landing_slabs, "landing"),
    ):
        theirs = [Ring.attach(RingHandle(next(copies), next(copies), next(copies), r.capacity)) for r in rings]
        their_slabs = [Slab.attach(SlabHandle(next(copies), s.capacity)) for s in slabs]
        lease = lend(memory, side, epoch=5)
        write(lease, b"for the worker")
        record = theirs[lease.ring_index].read()
        assert record is not None
        assert bytes(record.view) == b"for the worker"
        record.release()
        assert lease.slab_index is not None
        assert their_slabs[lease.slab_index].epoch == 5
        lease.end()
        for item in theirs:
            item.close()
        for slab in their_slabs:
            slab.close()


def test_a_side_that_no_role_needs_has_no_memory() -> None:
    shared = SharedMemory(export=True, landing=False, rings=2, ring_bytes=RING)
    attach, fds = shared.attach(HYBRID)
    assert (attach.landing_rings, attach.landing_slabs) == ((), ())
    assert len(fds) == 2 * 3 + 2
    assert shared.lend("landing", 1) is None
    assert shared.lend("export", 1) is not None
    shared.close()


def test_a_model_without_recurrent_state_needs_no_slab(memory: SharedMemory) -> None:
    attach, _ = memory.attach(DENSE)
    assert attach.landing_slabs == ()
    lease = lend(memory)
    assert (lease.slab, lease.slab_index, lease.nbytes) == (None, None, RING)


# -- lending


def test_memory_that_is_all_lent_is_lent_no_more_until_some_comes_back(memory: SharedMemory) -> None:
    """H5, Q2."""
    memory.attach(DENSE)
    first, second = lend(memory), lend(memory)
    assert first.ring is not second.ring
    assert memory.lend("landing", 3) is None
    first.end()
    assert lend(memory).ring is first.ring


def test_the_two_sides_are_lent_apart(memory: SharedMemory) -> None:
    memory.attach(DENSE)
    rings = [lend(memory, side).ring for side in ("landing", "export", "landing", "export")]
    assert len({id(ring) for ring in rings}) == 4


def test_there_is_a_slab_for_every_ring_while_they_are_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """H5: handoffs of recurrent models run at once as others do. Large snapshots get the fewest that overlap."""
    size = HYBRID.snapshot_bytes()
    for budget, slabs in ((5 * size, 4), (3 * size, 3), (1, FEWEST_SLABS)):
        monkeypatch.setattr(daemon_memory, "SLAB_BYTES", budget)
        shared = SharedMemory(export=False, landing=True, rings=4, ring_bytes=RING)
        shared.attach(HYBRID)
        leases = [lend(shared, epoch=n + 1) for n in range(slabs)]
        assert shared.lend("landing", 9) is None
        leases[0].end()
        assert shared.lend("landing", 9) is not None
        shared.close()


def test_there_is_room_for_a_page_as_large_as_a_landing_ring_takes(memory: SharedMemory) -> None:
    memory.attach(DENSE)
    ring = lend(memory).ring
    assert ring.claim(HEADER_BYTES + memory.page_room()) is not None
    with pytest.raises(NativeError):
        ring.claim(HEADER_BYTES + memory.page_room() + 1)


def test_what_is_lent_is_what_is_reserved(memory: SharedMemory) -> None:
    """X6: an operator sees that an idle host holds no state."""
    memory.attach(HYBRID)
    assert memory.reserved_bytes() == 0
    one, two = lend(memory, "export"), lend(memory, "landing")
    assert memory.reserved_bytes() == one.nbytes + two.nbytes == 2 * (RING + 8192)
    one.end()
    two.end()
    assert memory.reserved_bytes() == 0


def test_the_slab_belongs_to_the_handoffs_epoch(memory: SharedMemory) -> None:
    memory.attach(HYBRID)
    lease = lend(memory, epoch=77)
    assert lease.slab is not None
    assert (lease.slab.epoch, lease.slab.owner_pid) == (77, os.getpid())


# -- giving back


def test_a_ring_comes_back_wiped(memory: SharedMemory) -> None:
    """X6."""
    memory.attach(DENSE)
    lease = lend(memory)
    for _ in range(3):
        write(lease, b"a state page" * 100)
    record = lease.ring.read()
    assert record is not None
    record.release()
    assert b"state page" in contents(lease.ring)
    lease.end()
    assert b"state page" not in contents(lease.ring)
    assert lease.ring.read() is None


def test_a_slab_comes_back_wiped_and_free(memory: SharedMemory) -> None:
    """X6."""
    memory.attach(HYBRID)
    lease = lend(memory)
    assert lease.slab is not None
    lease.slab.view(0, 5100)[4000:4011] = b"SSM rows..."
    assert b"SSM rows" in slab_contents(lease.slab)
    lease.end()
    assert not any(slab_contents(lease.slab))
    assert lease.slab.owner_pid == 0


def test_ending_twice_is_ending_once(memory: SharedMemory) -> None:
    memory.attach(DENSE)
    one, _two = lend(memory), lend(memory)
    one.end()
    one.end()
    assert memory.lend("landing", 1) is not None
    assert memory.lend("landing", 1) is None


def test_memory_that_somebody_still_holds_is_kept_out_of_use(
    memory: SharedMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug elsewhere must not show one tenant's state to the next, and must not end the daemon."""
    memory.attach(HYBRID)
    lease = lend(memory)
    held = lease.ring.claim(100)
    with caplog.at_level(logging.ERROR):
        lease.end()
    assert "memory cannot be wiped" in caplog.text
    assert memory.reserved_bytes() == lease.nbytes
    assert lend(memory).ring is not lease.ring
    assert memory.lend("landing", 1) is None
    assert held is not None
    held.abort()
    lease.end()
    assert memory.lend("landing", 1) is not None


# -- the worker dies, another comes


def _die_writing(handle: RingHandle) -> None:
    ring = Ring.attach(handle)
    ring.claim(1000)
    os._exit(1)


def _die_reading(handle: RingHandle) -> None:
    ring = Ring.attach(handle)
    ring.read()
    os._exit(1)


def run_and_reap(target: object, ring: Ring) -> None:
    child = get_context("fork").Process(target=target, args=(ring.handle,))  # type: ignore[arg-type]
    child.start()
    child.join(30)
    assert child.exitcode == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_page_that_a_dead_worker_was_exporting_does_not_block_its_ring(memory: SharedMemory) -> None:
    memory.attach(DENSE)
    lease = lend(memory, "export")
    run_and_reap(_die_writing, lease.ring)
    memory.recover()
    lease.end()
    assert memory.reserved_bytes() == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_page_that_a_dead_worker_was_importing_does_not_block_its_ring(memory: SharedMemory) -> None:
    memory.attach(DENSE)
    lease = lend(memory, "landing")
    write(lease, b"half imported")
    run_and_reap(_die_reading, lease.ring)
    memory.recover()
    lease.end()
    assert memory.reserved_bytes() == 0
    assert b"half imported" not in contents(lease.ring)


def test_a_restarted_worker_gets_the_same_memory(memory: SharedMemory) -> None:
    assert memory.attach(HYBRID) == memory.attach(HYBRID)


def test_a_model_that_was_replaced_under_the_daemon_is_refused(memory: SharedMemory) -> None:
    memory.attach(DENSE)
    with pytest.raises(NativeError) as refused:
        memory.attach(HYBRID)
    assert refused.value.reason == "model-changed"
    assert "has 5100 bytes, it had 0" in str(refused.value)


def test_memory_that_the_system_does_not_have_is_a_sentence(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(label: str, nbytes: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("native.ring.create_memory", full)
    with pytest.raises(NativeError, match=r"no shared memory for 4 rings of 65536 bytes .*lower --rings or --ring-mib"):
        memory.attach(DENSE)


def test_memory_that_the_machine_does_not_have_is_refused_before_any_of_it_is_taken() -> None:
    """Q2. All of it is mapped at once: two rings of 512 GiB drove the machine into its last page."""
    shared = SharedMemory(export=True, landing=True, rings=1, ring_bytes=1 << 39)
    with pytest.raises(NativeError, match=r"2 rings of 524288 MiB .* need 1048576 MiB, \d+ MiB are available: lower"):
        shared.attach(DENSE)
    shared.close()
