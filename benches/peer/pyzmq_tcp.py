"""pyzmq, one PAIR of sockets over TCP on loopback; each block is copied to its place, as state must be. Plaintext."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import zmq
from both_ends import MEMORY, Once, answer, memory, run, say


def receive(block: int) -> NoReturn:
    landed, socket = memory(fill=False), zmq.Context().socket(zmq.PAIR)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def land() -> None:
        at = 0
        while True:
            frame = socket.recv(copy=False)
            landed[at : at + len(frame)] = frame.buffer
            at += len(frame)
            if at == MEMORY:
                socket.send(b"all")
                at = 0

    threading.Thread(target=land, daemon=True).start()
    say({"port": port})
    answer(landed)


def prepare(setup: Any, source: memoryview, block: int) -> Once:
    socket = zmq.Context().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, max(1, (32 << 20) // block))  # what our link may have on its way
    socket.connect(f"tcp://127.0.0.1:{setup['port']}")

    def once() -> None:
        for start in range(0, MEMORY, block):
            socket.send(source[start : start + block], copy=False)
        socket.recv()

    return once


if __name__ == "__main__":
    run(receive, prepare)
