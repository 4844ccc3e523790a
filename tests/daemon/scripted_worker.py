"""A worker process without an engine, for what a real one does only when it is broken.

`python -m tests.daemon.scripted_worker SCRIPT FD OPTIONS_JSON`; SCRIPT names one of the functions below. All but the
first three report a made-up engine and serve `Release`.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from zerocopy.handoff.components import Component, ComponentSpec, Identity, StateSchema
from zerocopy.runtime.base import EngineFacts
from zerocopy.worker import protocol as p

FACTS = EngineFacts(
    identity=Identity("m", "t", "llama", "f16/f16", "on", "scripted", "s", "x"),
    schema=StateSchema("llama", (ComponentSpec(Component.ATTENTION_KV, True, (64,)),)),
    model_name="scripted",
    n_ctx=512,
    sequences=1,
    kv_tokens=512,
    exporting_lanes=1,
    n_vocab=128,
    chunk_tokens=32,
    page_tokens=16,
    page_bytes=0,
    export_before_next_chunk=False,
    chat_template=None,
    bos_token="",
    eos_token="",
    batch_invariant=False,
    mtp="off",
)


def start_failed(sock: socket.socket, channel: p.WorkerSocket) -> None:
    channel.send(p.StartFailed("model-load", "the engine cannot load it: give another file"))


def dies_at_once(sock: socket.socket, channel: p.WorkerSocket) -> None:
    os._exit(3)


def garbage(sock: socket.socket, channel: p.WorkerSocket) -> None:
    sock.sendall(b"\x05\x00\x00\x00hello")
    time.sleep(60)


def oversized(sock: socket.socket, channel: p.WorkerSocket) -> None:
    sock.sendall(b"\xff\xff\xff\xff")
    time.sleep(60)


def serve(sock: socket.socket, channel: p.WorkerSocket) -> None:
    channel.send(p.Ready(FACTS, os.getpid()))
    while True:
        for message in channel.receive():
            match message:
                case p.Release():
                    channel.send(p.Dropped(message.job))
                case p.Tokenize(text="echo"):
                    channel.send(p.Tokenized(message.job, list(message.text.encode())))
                case p.Tokenize(text="refuse"):
                    channel.send(p.Failed(message.job, "tokenize", "this text has no tokens"))
                case p.Tokenize(text="close and linger"):
                    sock.shutdown(socket.SHUT_RDWR)
                    time.sleep(60)
                case p.Ping():
                    channel.send(p.Pong())
                case p.Shutdown():
                    return


def deaf_to_shutdown(sock: socket.socket, channel: p.WorkerSocket) -> None:
    channel.send(p.Ready(FACTS, os.getpid()))
    time.sleep(60)


def counts_descriptors(sock: socket.socket, channel: p.WorkerSocket) -> None:
    """Answers Tokenize with the number of descriptors that came with Attach."""
    channel.send(p.Ready(FACTS, os.getpid()))
    while True:
        for message in channel.receive():
            match message:
                case p.Tokenize():
                    channel.send(p.Tokenized(message.job, [len(channel._fds)]))
                case p.Shutdown():
                    return


def main() -> None:
    with socket.socket(fileno=int(sys.argv[2])) as sock:
        try:
            globals()[sys.argv[1]](sock, p.WorkerSocket(sock))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    main()
