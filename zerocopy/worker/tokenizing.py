"""Text into tokens, on a thread of its own.

A long text takes as long as many engine calls: nobody's next token waits for it, nor its answer for the call in
progress. Texts are done in the order in which they come. Owns the thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Iterator

from zerocopy.runtime.base import EngineError, Runtime
from zerocopy.worker.protocol import Failed, ToDaemon, Tokenize, Tokenized


class Tokenizing:
    def __init__(self, runtime: Runtime, send: Callable[[ToDaemon], None]) -> None:
        """`send` is called on the thread."""
        self._runtime = runtime
        self._send = send
        self._asked: queue.SimpleQueue[Tokenize | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tokenizing", daemon=True)
        self._thread.start()

    def ask(self, message: Tokenize) -> None:
        self._asked.put(message)

    def close(self) -> None:
        """Returns when the thread has ended and so nobody uses the vocabulary: after the text in progress, if any."""
        self._closing = True
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone, which the loop notices by itself
            while (message := self._asked.get()) is not None and not self._closing:
                self._send(self._answer(message))

    def _answer(self, message: Tokenize) -> Tokenized | Failed:
        try:
            tokens = [
                token
                for text, parsed in _pieces(message)
                for token in self._runtime.tokenize(text, add_special=message.add_special, parse_special=parsed)
            ]
        except EngineError as error:
            return Failed(message.job, error.reason, str(error))
        except Exception as error:
            traceback.print_tb(error.__traceback__)  # without its message, which may quote the text
            return Failed(
                message.job, "internal", f"a bug in tokenizing: {type(error).__name__}; the worker's stderr says where"
            )
        return Tokenized(message.job, tokens)


def _pieces(message: Tokenize) -> Iterator[tuple[str, bool]]:
    """The text in order, and of each piece whether control tokens in it are parsed."""
    at = 0
    for start, end in message.literal:
        if at < start:
            yield message.text[at:start], message.parse_special
        yield message.text[start:end], False
        at = end
    if at < len(message.text) or not message.literal:
        yield message.text[at:], message.parse_special
