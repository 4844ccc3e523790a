"""One request on a decode lane: prompt evaluated here or imported, then tokens generated.

An import is uncommitted until the daemon says `Commit`; nothing is generated before (H3). The last prompt token is
always evaluated here and as a row of its own, so the first logits are this host's, and the probe is compared with them.
Owns the lane's live sequence from start to `close`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import Literal

import numpy as np

from native.ring import Record, Ring
from native.slab import Slab
from zerocopy.handoff.components import HEADER_BYTES, Component, PageHeader
from zerocopy.runtime.base import EngineError, Lane, Logits, Output, Pool, Row, Runtime
from zerocopy.worker.protocol import Generate, Generated, Imported, Span, TextDelta, ToDaemon, Verified
from zerocopy.worker.sampling import Sampler, TokenLogprob, log_probabilities
from zerocopy.worker.text import TextStream


class DecodeJob:
    """One strand: it either has something `wanted()` evaluated, or `work()` to do, or waits."""

    whole_slices = False

    def __init__(
        self,
        message: Generate,
        runtime: Runtime,
        pool: Pool,
        ring: Ring | None,
        slab: Slab | None,
        send: Callable[[ToDaemon], None],
    ) -> None:
        self.job = message.job
        self._message = message
        self._runtime = runtime
        self._pool = pool
        self.lane: Lane = pool.lane(message.lane)
        self.ring = ring
        self.shared = False  # the loop's to say: others were in the pool
        self.decoding = False
        self.remaining = 0  # prompt tokens still to evaluate
        self._slab = slab
        self._send = send
        self._tokens = message.tokens
        self._logits: Logits | None = None
        self._mtp_logits: Logits | None = None
        self._expected: Logits | None = None
        self._proof = _Proof(message.proof_key) if message.proof_key else None
        self._marks: dict[str, float] = {}
        self._prompt_evaluated = 0
        self._imports: list[Span] = []
        self._chosen: list[int] = []
        self.state_complete = False
        self.committed = ring is None
        self._row: Row | None = None
        self._run = self._steps()
        self.finished = False

    @property
    def solo(self) -> bool:
        """Nothing but the prompt decided the last bit."""
        return not self.shared or self._runtime.facts.batch_invariant

    @property
    def starting(self) -> bool:
        """Its prompt has been read and its first token is not known."""
        return self.decoding and self._logits is None

    def wanted(self) -> Row | None:
        return self._row

    def evaluated(self, tokens: int, output: Output, began: float) -> None:
        """The row that `wanted` gave has been evaluated. Evaluates nothing itself: `output` is still in the engine."""
        self._row = None
        if not self.decoding:
            self.remaining -= tokens
        self._advance(output)

    def work(self) -> bool:
        """One page, the snapshot, the first evaluation or the choice of a token; False when it waits for pages, for an
        engine call or for the daemon. True with a row wanted: the loop must come round again, not sleep."""
        return self._row is None and not self.finished and self._advance(None)

    def close(self) -> None:
        """Let go of every view of ring and slab. The lane is the loop's to clear."""
        self._run.close()
        self._row = self.ring = None
        self.finished = True

    def _advance(self, output: Output | None) -> bool:
        try:
            step = self._run.send(output)
        except StopIteration:
            self.finished = True
            return False
        if isinstance(step, Row):
            self._row = step
        return step is not False

    # The whole job as one generator: yields True after a piece of work, False to wait, a Row to have it evaluated.
    def _steps(self) -> Generator[Row | bool, Output | None, None]:
        self._marks["started"] = time.monotonic()
        if self.ring is None:
            yield from self._evaluate_prompt()
        else:
            yield from self._import(self.ring)
            yield from self._first_evaluation()
            self._send(Imported(self.job, self._marks, tuple(self._imports), self.solo))
            yield from self._verify(self.ring)
        while not self.committed:
            yield False
        yield from self._generate()

    # -- the prompt's state --------------------------------------------------------------------------------

    def _evaluate_prompt(self) -> Generator[Row | bool, Output | None, None]:
        history, size = self._tokens[:-1], self._runtime.facts.chunk_tokens
        self.remaining = len(history)
        while self.remaining:
            start = len(history) - self.remaining
            yield Row(self.lane, history[start : start + size], start)  # `evaluated` says how much of it was
        self._marks["prefilled"] = time.monotonic()
        self._prove_state()
        self._prompt_evaluated = len(self._tokens)
        yield from self._evaluate_last()

    def _evaluate_last(self) -> Generator[Row, Output | None, None]:
        """The last prompt token, as a row of whatever engine call comes next."""
        self.decoding = True  # one token, as of those that generate
        output = yield Row(self.lane, self._tokens[-1:], len(self._tokens) - 1)
        self.decoding = False
        assert output is not None
        self._take_first(output)

    def _import(self, ring: Ring) -> Iterator[bool]:
        while True:
            last_look = self.state_complete  # read before the ring: complete means every record is in it
            record = ring.read()
            if record is not None:
                self._take(record)
                yield True
            elif last_look:
                break
            else:
                yield False
        if self._slab is not None:
            began = time.monotonic()
            size = self._runtime.facts.schema.snapshot_bytes()
            self.lane.import_snapshot(self._slab.view(0, size), len(self._tokens) - 1)
            self._imports.append((began, time.monotonic(), size))
        self._check_positions()
        self._marks["imported"] = time.monotonic()

    def _take(self, record: Record) -> None:
        """Import one published page. The daemon has checked its address, size and checksum; the engine's own
        headers inside are checked by the runtime."""
        began = time.monotonic()
        try:
            header = PageHeader.unpack(record.view[:HEADER_BYTES])
            self._import_payload(header, record.view[HEADER_BYTES:])
            self._imports.append((began, time.monotonic(), header.payload_bytes))
        finally:
            record.release()

    def _import_payload(self, header: PageHeader, payload: memoryview) -> None:
        match header.component:
            case Component.ATTENTION_KV | Component.MTP_KV:
                self.lane.import_page(header.component, header.tokens, payload)
            case Component.MTP_HIDDEN:
                self.lane.import_hidden(payload)
            case Component.TOKENS:
                if not np.array_equal(np.frombuffer(payload, dtype="<u4"), self._tokens[:-1]):
                    raise EngineError("token-history", "token history is not this request's prompt")
            case Component.PROBE:
                rows = np.frombuffer(payload, dtype=np.float32)
                self._expected = rows.reshape(-1, self._runtime.facts.n_vocab).copy()
            case _:
                raise EngineError("component", f"{header.component.label} does not travel in the ring")

    def _check_positions(self) -> None:
        expected, found = len(self._tokens) - 2, self.lane.positions()
        if found.target != expected or found.mtp not in (None, expected):
            raise EngineError("position", f"engine stands at {found} after the import, not at {expected}")

    def _first_evaluation(self) -> Generator[Row | bool, Output | None, None]:
        """After an import. Alone it is an engine call of its own, and the engine's counters say what was evaluated
        here; beside others it is a row of theirs, so that they do not wait for a second call."""
        self._prove_state()
        if self.shared:
            self._prompt_evaluated = 1
            yield from self._evaluate_last()
            return
        self._pool.reset_counters()
        logits = self.lane.evaluate(self._tokens[-1], len(self._tokens) - 1)
        counters = self._pool.counters()
        self._prompt_evaluated = counters.prompt_tokens + counters.single_tokens
        self._take_first(Output(logits, self.lane.mtp_logits()))
        yield True

    def _prove_state(self) -> None:
        if self._proof:
            self._proof.state = self.lane.state_digests(self._proof.key)

    def _take_first(self, output: Output) -> None:
        # Copies: others may be evaluated before this request is committed.
        self._logits = output.logits.copy()
        self._mtp_logits = None if output.mtp_logits is None else output.mtp_logits.copy()
        self._marks["evaluated"] = time.monotonic()
        if self._proof:
            self._proof.add(self._logits)
            self._proof.mtp = self._proof.digest(self._mtp_logits)

    def _verify(self, ring: Ring) -> Iterator[bool]:
        if not self._message.probe:
            return
        while self._expected is None:
            record = ring.read()
            if record is None:
                yield False
            else:
                self._take(record)
        assert self._logits is not None
        rows = [self._logits] if self._mtp_logits is None else [self._logits, self._mtp_logits]
        exact, error = compare(np.stack(rows), self._expected)
        self._marks["probed"] = time.monotonic()
        self._send(Verified(self.job, exact, error))

    # -- generation ----------------------------------------------------------------------------------------

    def _generate(self) -> Generator[Row, Output | None, None]:
        sampler, text = Sampler(self._message.sampling, self._tokens), TextStream(self._message.stop)
        position, count = len(self._tokens), 0
        reason: Literal["stop", "length"] = "length"
        self._marks["first_token"] = time.monotonic()
        self.decoding = True
        while count < self._message.max_tokens:
            assert self._logits is not None
            token = sampler.choose(self._logits)
            count += 1
            if self._message.return_tokens:
                self._chosen.append(token)
            if self._proof:
                self._proof.add_token(token)
            if self._runtime.is_end(token):
                reason = "stop"
                break
            piece = self._runtime.piece(token)
            self._send(TextDelta(self.job, text.feed(piece), 1, self._logprob(token, piece)))
            if text.stopped:
                reason = "stop"
                break
            if count == self._message.max_tokens or position >= self._runtime.facts.n_ctx:
                break
            output = yield Row(self.lane, [token], position)
            assert output is not None
            self._logits = output.logits
            position += 1
            if self._proof:
                self._proof.add(self._logits)
        self._finish(reason, count, text.finish())

    def _logprob(self, token: int, piece: bytes) -> TokenLogprob | None:
        wanted = self._message.sampling.logprobs
        if wanted is None:
            return None
        assert self._logits is not None
        mine, top = log_probabilities(self._logits, token, wanted)
        return TokenLogprob(piece, mine, tuple((self._runtime.piece(other), value) for other, value in top))

    def _finish(self, reason: Literal["stop", "length"], count: int, rest: str) -> None:
        if rest:
            self._send(TextDelta(self.job, rest, 0))
        self._marks["generated"] = time.monotonic()
        if self._proof:
            self._proof.final_state = self.lane.state_digests(self._proof.key)
        self._send(
            Generated(
                job=self.job,
                reason=reason,
                completion_tokens=count,
                prompt_tokens_evaluated=self._prompt_evaluated,
                marks=self._marks,
                proof=self._proof.report() if self._proof else None,
                tokens=tuple(self._chosen),
            )
        )


def compare(mine: Logits, theirs: Logits) -> tuple[bool, float]:
    """(bit-equal, largest relative rms difference of any row) of F32[rows, n_vocab]; an unlike shape or a NaN is an
    infinite error. Rows count one by one, so that a wrong MTP row cannot hide behind a right target row."""
    if mine.shape != theirs.shape:
        return False, float("inf")
    if np.array_equal(mine.view(np.uint32), theirs.view(np.uint32)):
        return True, 0.0
    with np.errstate(invalid="ignore"):  # infinities end as NaN, which is told below
        scale = np.sqrt(np.mean(np.square(theirs, dtype=np.float64), axis=1))
        errors = np.sqrt(np.mean(np.square(mine.astype(np.float64) - theirs), axis=1)) / np.maximum(scale, 1e-30)
    worst = float(errors.max())
    return False, worst if np.isfinite(worst) else float("inf")


class _Proof:
    """Keyed digests a client asked for: two runs under one key agree iff their logits and state do, bit for bit."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.state: dict[str, str] = {}
        self.final_state: dict[str, str] = {}
        self.mtp: str | None = None
        self._logits: list[str] = []
        self._tokens = hashlib.blake2b(key=key, digest_size=16)

    def digest(self, row: Logits | None) -> str | None:
        return None if row is None else hashlib.blake2b(row.data, key=self.key, digest_size=16).hexdigest()

    def add(self, logits: Logits) -> None:
        self._logits.append(self.digest(logits) or "")

    def add_token(self, token: int) -> None:
        self._tokens.update(token.to_bytes(4, "little"))

    def report(self) -> dict[str, object]:
        return {
            "state": self.state,
            "logits": self._logits,
            "mtp_logits": self.mtp,
            "tokens": self._tokens.hexdigest(),
            "final_state": self.final_state,
        }
