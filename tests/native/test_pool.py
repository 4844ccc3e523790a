"""Pools: a fixed number of buffers, wiped on the way back, counted."""

from __future__ import annotations

import pytest

from native.memory import NativeError
from native.pool import ring_pool, slab_pool


def test_a_pool_gives_what_it_has_and_then_none() -> None:
    pool = ring_pool(2, 16384, "pool")
    first, second = pool.acquire(), pool.acquire()
    assert first is not None and second is not None and first is not second
    assert pool.acquire() is None
    assert (pool.in_use, pool.reserved_bytes) == (2, 32768)
    pool.release(first)
    assert (pool.in_use, pool.reserved_bytes) == (1, 16384)
    assert pool.acquire() is first
    pool.close()


def test_a_ring_comes_back_wiped_and_in_a_new_epoch() -> None:
    pool = ring_pool(1, 16384, "pool")
    ring = pool.acquire()
    assert ring is not None
    slot = ring.claim(10)
    assert slot is not None
    slot.view[:] = b"0123456789"
    slot.commit()
    epoch = ring.epoch
    assert pool.release(ring) == 128
    again = pool.acquire()
    assert again is ring and ring.epoch == epoch + 1 and ring.read() is None
    pool.close()


def test_a_slab_comes_back_wiped_and_free() -> None:
    pool = slab_pool(1, 16384, "pool")
    slab = pool.acquire()
    assert slab is not None and slab.claim(3)
    slab.view(0, 100)[:] = b"x" * 100
    assert pool.release(slab) == 100
    again = pool.acquire()
    assert again is slab and slab.claim(4)
    assert not any(slab.view(0, 16384))
    pool.close()


def test_a_ring_still_in_use_does_not_come_back() -> None:
    pool = ring_pool(1, 16384, "pool")
    ring = pool.acquire()
    assert ring is not None
    slot = ring.claim(10)
    assert slot is not None
    with pytest.raises(NativeError, match="1 slots and 0 records"):
        pool.release(ring)
    assert pool.in_use == 1 and pool.acquire() is None
    slot.abort()
    pool.release(ring)
    assert pool.in_use == 0
    pool.close()


def test_an_item_is_not_released_twice_nor_into_another_pool() -> None:
    pool, other = ring_pool(1, 16384, "pool"), ring_pool(1, 16384, "other")
    ring = pool.acquire()
    assert ring is not None
    with pytest.raises(NativeError, match="not in use from this pool"):
        other.release(ring)
    pool.release(ring)
    with pytest.raises(NativeError, match="not in use from this pool"):
        pool.release(ring)
    pool.close()
    other.close()
