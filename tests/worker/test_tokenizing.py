"""The thread that turns texts into tokens."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from zerocopy.runtime.base import EngineError
from zerocopy.runtime.llama.engine import LlamaRuntime
from zerocopy.worker import protocol as p
from zerocopy.worker.tokenizing import Tokenizing, _pieces

TIMEOUT_S = 20.0


class Bench:
    """The thread, with a vocabulary's failures in the test's hand."""

    def __init__(self, runtime: LlamaRuntime) -> None:
        self.runtime = runtime
        self.fails: dict[str, Exception] = {}
        self.meanwhile: Callable[[], object] = lambda: None
        self.answers: queue.SimpleQueue[p.ToDaemon] = queue.SimpleQueue()
        self.thread = Tokenizing(self, self.answers.put)  # type: ignore[arg-type]

    def tokenize(self, text: str, **special: bool) -> list[int]:
        self.meanwhile()
        if text in self.fails:
            raise self.fails[text]
        return self.runtime.tokenize(text, **special)

    def ask(self, job: int, text: str) -> None:
        self.thread.ask(p.Tokenize(job, text, add_special=True, parse_special=False))

    def answer(self) -> Any:
        return self.answers.get(timeout=TIMEOUT_S)


@pytest.fixture
def bench(runtime_of: Callable[[str], LlamaRuntime]) -> Iterator[Bench]:
    one = Bench(runtime_of("llama"))
    yield one
    one.thread.close()


def test_texts_are_done_in_order_and_give_the_engines_tokens(bench: Bench) -> None:
    texts = ["a", "bc" * 500, "", "d e f"]
    for job, text in enumerate(texts):
        bench.ask(job, text)
    for job, text in enumerate(texts):
        tokens = bench.runtime.tokenize(text, add_special=True, parse_special=False)
        assert bench.answer() == p.Tokenized(job, tokens)


def test_what_fails_ends_its_request_by_name_and_not_the_thread(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also a bug: whoever asked would wait for ever, and all after it."""
    bench.fails = {
        "x": EngineError("tokenize", "text of 1 bytes does not fit 0 tokens"),
        "y": ZeroDivisionError("secret"),
    }
    for job, text in enumerate("xyz"):
        bench.ask(job, text)
    assert bench.answer() == p.Failed(0, "tokenize", "text of 1 bytes does not fit 0 tokens")
    bug = bench.answer()
    assert (bug.reason, "ZeroDivisionError" in bug.message, "secret" in bug.message) == ("internal", True, False)
    told = capfd.readouterr().err
    assert "tokenizing.py" in told and "secret" not in told
    assert isinstance(bench.answer(), p.Tokenized)


def test_closing_waits_for_the_text_in_progress_and_for_no_other(bench: Bench) -> None:
    """The vocabulary is freed after it."""
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go.wait(TIMEOUT_S)

    bench.meanwhile = hold
    for job in range(3):
        bench.ask(job, "a")
    assert begun.wait(TIMEOUT_S)
    closing = threading.Thread(target=bench.thread.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "closed while the vocabulary is in use"
    go.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert bench.answer().job == 0
    assert bench.answers.empty(), "texts that nobody waits for held up the end"


def test_a_daemon_that_is_gone_ends_the_thread_in_silence(
    runtime_of: Callable[[str], LlamaRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = list[object]()
    monkeypatch.setattr(threading, "excepthook", raised.append)

    sent = threading.Event()

    def gone(message: p.ToDaemon) -> None:
        sent.set()
        raise BrokenPipeError

    thread = Tokenizing(runtime_of("llama"), gone)
    thread.ask(p.Tokenize(1, "a", add_special=True, parse_special=False))
    assert sent.wait(TIMEOUT_S)
    thread.close()
    assert not raised


def test_parts_of_a_text_that_are_literal_are_tokenized_apart() -> None:
    text = "<a>user <a><b> says<b>"
    message = p.Tokenize(1, text, add_special=False, parse_special=True, literal=((8, 14),))
    assert list(_pieces(message)) == [("<a>user ", True), ("<a><b>", False), (" says<b>", True)]
    assert list(_pieces(msgspec.structs.replace(message, literal=()))) == [(text, True)]
    ends = msgspec.structs.replace(message, literal=((0, 3), (19, 22)))
    assert list(_pieces(ends)) == [("<a>", False), (text[3:19], True), ("<b>", False)]
    assert list(_pieces(p.Tokenize(1, "", add_special=True, parse_special=False))) == [("", False)]


# -- the end
