"""The other process of the ring tests; some roles kill themselves at a named step, by a real SIGKILL.

Steps in ring.c and slab.c (`STEP("...")`) are reached in the test build; steps of this file are `die_at`'s.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import sys
import time
from typing import Any

from xxhash import xxh3_64_intdigest


def load_ring_module(path: str) -> Any:
    """Put the test build in the place of the product's extension, before anything imports it."""
    spec = importlib.util.spec_from_file_location("native._ring", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["native._ring"] = module
    spec.loader.exec_module(module)
    return module


def page(number: int, nbytes: int) -> bytes:
    """What record `number` holds, its number first."""
    return (number.to_bytes(8, "little") + bytes([number % 251]) * nbytes)[:nbytes]


class Peer:
    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.step = order.get("step", "")
        self.lib = load_ring_module(order["module"]).lib

    def arm(self) -> None:
        self.lib.ring_test_stop_at = self.step.encode()

    def die_at(self, step: str) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def ring(self) -> Any:
        from native.ring import Ring, RingHandle

        return Ring.attach(RingHandle(*self.order["fds"], self.order["capacity"]))

    def produce_and_die(self) -> None:
        ring = self.ring()
        ring.beat_producer()
        self.arm()
        slot = ring.claim(1000)
        self.die_at("claimed")
        slot.view[:500] = page(8, 500)
        self.die_at("half written")
        slot.view[:] = page(8, 1000)
        self.die_at("written")
        slot.abort() if self.order.get("abort") else slot.commit()
        self.die_at("committed")

    def consume_and_die(self) -> None:
        ring = self.ring()
        ring.beat_consumer()
        self.arm()
        first, second = ring.read(), ring.read()
        self.die_at("read")
        xxh3_64_intdigest(first.view)
        self.die_at("before release")
        second.release()
        self.die_at("released out of order")
        first.release()
        self.die_at("released")

    def recycle_and_die(self) -> None:
        ring = self.ring()
        self.arm()
        while record := ring.read():
            record.release()
        ring.recycle()

    def own_slab_and_die(self) -> None:
        from native.slab import Slab, SlabHandle

        slab = Slab.attach(SlabHandle(*self.order["fds"], self.order["capacity"]))
        self.arm()
        assert slab.claim(7)
        view = slab.view(0, 8192)
        view[:4096] = b"\xee" * 4096
        self.die_at("half written")
        view[:] = b"\xee" * 8192
        slab.release()

    def produce(self) -> None:
        """Records of many sizes, each as soon as there is room; sleeps on the space bell only."""
        ring = self.ring()
        for number in range(self.order["count"]):
            nbytes = 8 + number * 997 % (ring.max_record - 8)
            while (slot := ring.claim(nbytes)) is None:
                ring.clear_space_bell()
                if (slot := ring.claim(nbytes)) is not None:
                    break
                assert select.select([ring.space_fd], [], [], 20)[0], "lost wake-up of the producer"
            slot.view[:] = page(number, nbytes)
            slot.commit()
            if number % self.order["pause_every"] == 0:
                time.sleep(0.0005)  # lets the consumer fall asleep

    def echo(self) -> None:
        """Answer each record on the second ring of the pair: fds are (three of one, three of the other)."""
        from native.ring import Ring, RingHandle

        fds, capacity = self.order["fds"], self.order["capacity"]
        requests, answers = (Ring.attach(RingHandle(*half, capacity)) for half in (fds[:3], fds[3:]))
        for _ in range(self.order["count"]):
            requests.clear_data_bell()
            while (record := requests.read()) is None:
                assert select.select([requests.data_fd], [], [], 20)[0], "lost wake-up of the echo"
                requests.clear_data_bell()
            slot = answers.claim(len(record.view))
            slot.view[:] = record.view
            slot.commit()
            record.release()

    def hold(self) -> None:
        """Read everything, release nothing, say so by a beat, live until killed."""
        ring = self.ring()
        while ring.read():
            pass
        ring.beat_consumer()
        time.sleep(60)


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    getattr(Peer(order), order["role"])()
