"""Mooncake's TransferEngine, DRAM to DRAM over TCP on loopback: one batch of all blocks at a time. Plaintext."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NoReturn

from both_ends import MEMORY, Once, answer, memory, run, say

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("MC_FORCE_TCP", "true")
os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")

from mooncake.engine import TransferEngine  # reads the environment


def engine(view: memoryview) -> tuple[Any, int]:
    made = TransferEngine()
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or made.register_memory(address, MEMORY):
        raise SystemExit("Mooncake did not initialise")
    return made, address


def receive(block: int) -> NoReturn:
    landed = memory(fill=False)
    receiver, address = engine(landed)
    say({"port": receiver.get_rpc_port(), "address": address})
    answer(landed)


def prepare(setup: Any, source: memoryview, block: int) -> Once:
    sender, address = engine(source)
    starts = range(0, MEMORY, block)
    ours, theirs = [address + start for start in starts], [setup["address"] + start for start in starts]
    lengths = [block] * len(ours)

    def once() -> None:
        if code := sender.batch_transfer_sync_write(f"127.0.0.1:{setup['port']}", ours, theirs, lengths):
            raise SystemExit(f"Mooncake transfer failed with {code}")

    return once


if __name__ == "__main__":
    run(receive, prepare)
