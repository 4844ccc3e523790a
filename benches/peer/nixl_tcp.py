"""NIXL, DRAM to DRAM over UCX, TCP on loopback: one WRITE of all blocks at a time. Plaintext."""

from __future__ import annotations

import base64
import ctypes
import os
from typing import Any, NoReturn

from both_ends import MEMORY, Once, answer, memory, run, say

os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

from nixl_cu12._api import nixl_agent, nixl_agent_config  # reads the environment


def agent(name: str) -> Any:
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def receive(block: int) -> NoReturn:
    receiver, landed = agent("receiver"), memory(fill=False)
    receiver.register_memory([(address(landed), MEMORY, 0, "landed")], "DRAM")
    metadata = base64.b64encode(receiver.get_agent_metadata()).decode()
    say({"metadata": metadata, "address": address(landed)})
    answer(landed, receiver.get_new_notifs)


def prepare(setup: Any, source: memoryview, block: int) -> Once:
    sender = agent("sender")
    sender.register_memory([(address(source), MEMORY, 0, "source")], "DRAM")
    name = sender.add_remote_agent(base64.b64decode(setup["metadata"]))
    name = name.decode() if isinstance(name, bytes) else name
    starts = range(0, MEMORY, block)
    ours = sender.get_xfer_descs([(address(source) + start, block, 0) for start in starts], "DRAM")
    theirs = sender.get_xfer_descs([(setup["address"] + start, block, 0) for start in starts], "DRAM")
    transfer = sender.initialize_xfer("WRITE", ours, theirs, name, b"done")

    def once() -> None:
        state = sender.transfer(transfer)
        while state == "PROC":
            state = sender.check_xfer_state(transfer)
        if state != "DONE":
            raise SystemExit(f"NIXL transfer ended as {state}")

    return once


if __name__ == "__main__":
    run(receive, prepare)
