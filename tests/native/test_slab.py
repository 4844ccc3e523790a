"""Slabs: one owner at a time, wiped as far as it was touched, never a byte outside."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from native.memory import NativeError
from native.slab import Slab, SlabHandle
from tests.native.conftest import open_descriptors


@pytest.fixture
def pair() -> Iterator[tuple[Slab, Slab]]:
    before = open_descriptors()
    owner = Slab.create(65536, "test-slab")
    other = Slab.attach(owner.handle.duplicate())
    yield owner, other
    owner.close()
    other.close()
    assert open_descriptors() <= before


def raw_data(slab: Slab) -> bytes:
    with mmap.mmap(slab.handle.memory_fd, 0, prot=mmap.PROT_READ) as memory:
        return memory[65536:]


def reason_of(action: object) -> str:
    with pytest.raises(NativeError) as raised:
        action()  # type: ignore[operator]
    return raised.value.reason


def test_what_one_process_writes_the_other_reads_in_place(pair: tuple[Slab, Slab]) -> None:
    owner, other = pair
    assert owner.claim(7)
    owner.view(100, 5)[:] = b"state"
    assert other.view(100, 5) == b"state"


def test_a_taken_slab_is_not_claimed_twice(pair: tuple[Slab, Slab]) -> None:
    owner, other = pair
    assert owner.claim(7) and not other.claim(8) and not owner.claim(7)
    assert (other.epoch, other.owner_pid) == (7, os.getpid())
    owner.release()
    assert (other.epoch, other.owner_pid) == (0, 0)
    assert other.claim(8)


def test_release_wipes_as_far_as_anybody_touched(pair: tuple[Slab, Slab]) -> None:
    owner, other = pair
    owner.claim(1)
    owner.view(0, 10)[:] = b"\xee" * 10
    other.view(5000, 10)[:] = b"\xee" * 10
    other.view(20, 10)[:] = b"\xee" * 10
    assert b"\xee" in raw_data(owner)
    assert owner.release() == 5010
    assert raw_data(owner) == bytes(65536)
    owner.claim(2)
    assert owner.release() == 0


def test_releasing_a_free_slab_does_nothing(pair: tuple[Slab, Slab]) -> None:
    assert pair[0].release() == 0


def test_a_free_slab_gives_no_view(pair: tuple[Slab, Slab]) -> None:
    assert reason_of(lambda: pair[0].view(0, 1)) == "slab-free"


@pytest.mark.parametrize(
    "offset, nbytes", [(-1, 2), (0, 0), (0, -1), (0, 65537), (65536, 1), (65535, 2), (2**63, 1), (0, 2**63)]
)
def test_a_view_outside_the_slab_is_refused(pair: tuple[Slab, Slab], offset: int, nbytes: int) -> None:
    pair[0].claim(1)
    assert reason_of(lambda: pair[0].view(offset, nbytes)) == "slab-range"
    assert len(pair[0].view(0, 65536)) == 65536


@pytest.mark.parametrize("epoch", [0, -1, 2**32])
def test_an_epoch_that_would_not_fit_its_word_is_refused(pair: tuple[Slab, Slab], epoch: int) -> None:
    assert reason_of(lambda: pair[0].claim(epoch)) == "slab-epoch"


def test_only_the_owner_or_its_survivor_releases(pair: tuple[Slab, Slab]) -> None:
    owner, other = pair
    child = os.fork()
    if child == 0:
        os._exit(0 if owner.claim(5) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert other.owner_pid == child
    assert reason_of(other.release) == "slab-busy"
    assert other.recover(child) == 0 and other.owner_pid == 0


def test_a_view_kept_past_close_neither_faults_nor_blocks_it() -> None:
    slab = Slab.create(4096, "kept")
    slab.claim(1)
    view = slab.view(0, 4)
    slab.close()
    slab.close()
    view[:] = b"late"
    assert reason_of(lambda: slab.view(0, 1)) == reason_of(slab.release) == "slab-closed"


def test_memory_that_is_no_slab_is_refused(pair: tuple[Slab, Slab]) -> None:
    before = open_descriptors()
    assert reason_of(lambda: Slab.attach(SlabHandle(os.dup(pair[0].handle.memory_fd), 4096))) == "slab-corrupt"
    assert reason_of(lambda: Slab.attach(SlabHandle(os.dup(pair[0].handle.memory_fd), 1 << 40))) == "memory-size"
    assert open_descriptors() <= before


def test_nothing_is_left_of_a_closed_slab() -> None:
    Slab.create(4096, "slab-without-trace").close()
    assert "slab-without-trace" not in Path("/proc/self/maps").read_text()
