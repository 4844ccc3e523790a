"""Entry point of the worker process: `python -m zerocopy.worker.main FD OPTIONS_JSON`.

Started by the daemon only. Loads the model, reports `Ready`, runs the loop, and ends with the daemon: a closed socket
means the daemon is gone, and nobody else may use what this process holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from zerocopy.runtime.base import EngineError, Runtime
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime
from zerocopy.runtime.synthetic import SyntheticOptions, SyntheticRuntime, is_descriptor
from zerocopy.worker.loop import Worker
from zerocopy.worker.protocol import Ready, StartFailed, WorkerSocket


class WorkerOptions(msgspec.Struct, frozen=True):
    """What the daemon tells a worker on its command line; no secrets, it shows in `ps`."""

    model: str
    roles: tuple[str, ...]  # of "prefill", "decode"
    llama: LlamaOptions


def open_runtime(options: WorkerOptions) -> Runtime:
    if is_descriptor(options.model):
        o = options.llama
        return SyntheticRuntime(
            options.model,
            SyntheticOptions(
                n_ctx=o.n_ctx,
                chunk_tokens=o.chunk_tokens,
                page_tokens=o.page_tokens,
                page_bytes=o.page_bytes,
                kv_type=o.kv_type_k,
                sequences=o.sequences,
                kv_tokens=o.kv_tokens,
            ),
        )
    return LlamaRuntime(options.model, options.llama)


def main(argv: list[str], open_engine: Callable[[WorkerOptions], Runtime] = open_runtime) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the daemon decides
    options = msgspec.json.decode(argv[2], type=WorkerOptions)
    with socket.socket(fileno=int(argv[1])) as sock:
        channel = WorkerSocket(sock)
        try:
            runtime = open_engine(options)
            worker = Worker(channel, runtime, frozenset(options.roles))
        except EngineError as error:
            channel.send(StartFailed(error.reason, str(error)))
            return 1
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the daemon is gone
            channel.send(Ready(runtime.facts, os.getpid()))
            worker.run()
        runtime.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
