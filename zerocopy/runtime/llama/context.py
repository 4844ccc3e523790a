"""One engine context as Python sees it: decode, copy between sequences, read and write state. Typed, and nothing more.

Sequences: 0 always empty, 1 scratch for pages, 2 for probes, 3 holds the cells of those that ended, live ones from
`FIRST_LIVE_SEQUENCE` on. The cache is unified, all sequences share its cells: with one stream per sequence a copy of a
token range aborts the process. Whoever calls has checked positions and bytes before: the engine does not. One thread.
Owns the context's memory until `close`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np

from zerocopy.runtime.base import EngineError, Logits
from zerocopy.runtime.llama.abi import Library
from zerocopy.runtime.llama.blob import PAGE_SEQUENCE

_EMPTY_SEQUENCE: Final = 0
PROBE_SEQUENCE: Final = 2
_ENDED_SEQUENCE: Final = 3
FIRST_LIVE_SEQUENCE: Final = 4
MAX_LIVE_SEQUENCES: Final = 252  # the engine's own limit is 256 sequences in all
_RECURRENT_ONLY: Final = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_MTP_CONTEXT: Final = 1
N_CTX_STEP: Final = 256  # the engine rounds context sizes up to this

KV_TYPES: Final = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}  # ggml type numbers


class ContextOptions(msgspec.Struct, frozen=True):
    n_ctx: int  # tokens one sequence may hold
    sequences: int  # live ones
    cells: int  # tokens all sequences together may hold
    chunk_tokens: int
    kv_type_k: str
    kv_type_v: str
    flash_attention: bool
    batch_invariant: bool
    threads: int

    @property
    def batch_tokens(self) -> int:
        """One chunk of a prompt beside one token of every other sequence."""
        return self.chunk_tokens + self.sequences

    @property
    def engine_sequences(self) -> int:
        return FIRST_LIVE_SEQUENCE + self.sequences


class Run(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence, as part of a batch."""

    sequence: int
    tokens: Sequence[int]
    start: int


class Context:
    def __init__(self, library: Library, model: Any, options: ContextOptions, *, mtp: bool = False) -> None:
        self._library = library
        self._c = library.c
        self.handle = self._c.llama_init_from_model(model, _parameters(library, options, mtp))
        if self.handle == library.ffi.NULL:
            raise library.failure("engine-context", f"the engine cannot make a context of {options.cells} tokens")
        self._memory = self._c.llama_get_memory(self.handle)
        self._n_vocab = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(model))
        self._capacity = options.batch_tokens
        self._batch = self._c.llama_batch_init(self._capacity, 0, 1)
        self._batch.n_seq_id[0 : self._capacity] = [1] * self._capacity
        self._sequences = [self._batch.seq_id[at] for at in range(self._capacity)]
        if options.batch_invariant:
            self._use_row_kernels()
        self._check_echo(options)

    def decode(self, runs: Sequence[Run]) -> None:
        """Evaluate all runs in one engine call; logits are kept of the last token of each."""
        batch, at = self._batch, 0
        tokens, positions, wanted = batch.token, batch.pos, batch.logits
        for run in runs:
            assert 0 < len(run.tokens) <= self._capacity - at
            for position, token in enumerate(run.tokens, run.start):
                tokens[at] = token
                positions[at] = position
                self._sequences[at][0] = run.sequence
                wanted[at] = 0
                at += 1
            wanted[at - 1] = 1
        batch.n_tokens = at
        code = self._c.llama_decode(self.handle, batch)
        if code:
            raise self._library.failure("engine-decode", f"decoding {at} tokens of {len(runs)} failed with {code}")

    def logits(self, index: int = -1) -> Logits:
        """F32[n_vocab] of the token at `index` of the last batch, in the engine's memory: valid until the next one."""
        return self._row(self._c.llama_get_logits_ith(self.handle, index), self._n_vocab)

    def hidden_rows(self, count: int, width: int) -> Logits:
        """F32[count, width] hidden states of the last decode; needs `keep_hidden_rows`. In the engine's memory."""
        pointer = self._c._Z26llama_get_embeddings_nextnP13llama_context(self.handle)
        return self._row(pointer, count * width).reshape(count, width)

    def keep_hidden_rows(self, *, only_outputs: bool) -> None:
        self._c._Z26llama_set_embeddings_nextnP13llama_contextbb(self.handle, True, only_outputs)

    def copy(self, source: int, target: int, tokens: tuple[int, int] = (-1, -1)) -> None:
        self._c.llama_memory_seq_cp(self._memory, source, target, *tokens)

    def drop(self, sequence: int) -> None:
        self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def bury(self, sequence: int) -> None:
        """End a sequence and keep its cells taken: the engine gives out the first free cell, and one that lies before
        cells of a live sequence would put a later token before an earlier one. `clear` frees them."""
        self.copy(sequence, _ENDED_SEQUENCE)
        self.copy(_EMPTY_SEQUENCE, _ENDED_SEQUENCE)  # not its recurrent state: as in `_scratch`
        self.drop(sequence)

    def block(self, page: memoryview) -> None:
        """Take the first free cells for the tokens of a checked page, until `unblock` of each or `clear`."""
        self.import_range(_ENDED_SEQUENCE, page)

    def unblock(self, position: int) -> None:
        self._c.llama_memory_seq_rm(self._memory, _ENDED_SEQUENCE, position, position + 1)

    def overwrite(self, page: memoryview, times: int) -> None:
        """Write a checked page to the first free cells, again and again. They are free afterwards, and so are those of
        all that were buried or blocked."""
        for _ in range(times):
            self.block(page)
        self.drop(_ENDED_SEQUENCE)

    def last_position(self, sequence: int) -> int:
        return int(self._c.llama_memory_seq_pos_max(self._memory, sequence))

    @contextmanager
    def _scratch(self, sequence: int, tokens: tuple[int, int]) -> Iterator[None]:
        """A copy of the range in the page sequence. The second copy, of nothing, drops the recurrent state, which a
        ranged copy drags along whole."""
        self.copy(sequence, PAGE_SEQUENCE, tokens)
        self.copy(_EMPTY_SEQUENCE, PAGE_SEQUENCE)
        try:
            yield
        finally:
            self.drop(PAGE_SEQUENCE)

    def export_range(self, sequence: int, tokens: tuple[int, int], into: memoryview) -> None:
        """Attention state of a token range, without any recurrent state."""
        with self._scratch(sequence, tokens):
            self._read(into, PAGE_SEQUENCE, 0)

    def range_size(self, sequence: int, tokens: tuple[int, int]) -> int:
        """Bytes of a page by the engine's own count; slow, so only for checking formulas."""
        with self._scratch(sequence, tokens):
            return int(self._c.llama_state_seq_get_size_ext(self.handle, PAGE_SEQUENCE, 0))

    def recurrent_size(self, sequence: int) -> int:
        return int(self._c.llama_state_seq_get_size_ext(self.handle, sequence, _RECURRENT_ONLY))

    def import_range(self, sequence: int, page: memoryview) -> None:
        """Append a checked page to the sequence. On a hybrid this drops its recurrent state."""
        try:
            self._write(page, PAGE_SEQUENCE, 0)
            self.copy(PAGE_SEQUENCE, sequence)
        finally:
            self.drop(PAGE_SEQUENCE)

    def export_recurrent(self, sequence: int, into: memoryview) -> None:
        """Always of the live sequence: taken through a copy it can be silently wrong."""
        self._read(into, sequence, _RECURRENT_ONLY)

    def import_recurrent(self, sequence: int, blob: memoryview) -> None:
        self._write(blob, sequence, _RECURRENT_ONLY)

    def full_state(self, sequence: int) -> bytearray:
        """Every byte of one sequence; for calibration on a few tokens, not for serving."""
        blob = bytearray(self._c.llama_state_seq_get_size_ext(self.handle, sequence, 0))
        self._read(memoryview(blob), sequence, 0)
        return blob

    def reset_counters(self) -> None:
        self._c.llama_perf_context_reset(self.handle)

    def counters(self) -> tuple[int, int]:
        """(tokens evaluated in batches, tokens evaluated one at a time). The engine reports at least 1 of each, so
        the time spent, which is not rounded, tells none from one."""
        data = self._c.llama_perf_context(self.handle)
        return data.n_p_eval if data.t_p_eval_ms > 0 else 0, data.n_eval if data.t_eval_ms > 0 else 0

    def clear(self, *, cells: bool = True) -> None:
        """Drop every sequence, overwrite the tokens of the last batch and every cell, unless told to leave these."""
        self._c.llama_memory_clear(self._memory, cells)
        size = self._capacity * self._library.ffi.sizeof("llama_token")
        self._library.ffi.memmove(self._batch.token, bytes(size), size)

    def close(self) -> None:
        if self.handle is not None:
            self._c.llama_batch_free(self._batch)
            self._c.llama_free(self.handle)
            self.handle = self._memory = None  # a late call is a TypeError in cffi, not a read of freed memory

    def _read(self, into: memoryview, sequence: int, flags: int) -> None:
        target = self._library.ffi.from_buffer("uint8_t[]", into, require_writable=True)
        written = self._c.llama_state_seq_get_data_ext(self.handle, target, len(into), sequence, flags)
        if written != len(into):
            raise self._library.failure("engine-export", f"the engine exported {written} bytes, {len(into)} expected")

    def _write(self, blob: memoryview, sequence: int, flags: int) -> None:
        source = self._library.ffi.from_buffer("uint8_t[]", blob)
        read = self._c.llama_state_seq_set_data_ext(self.handle, source, len(blob), sequence, flags)
        if read != len(blob):
            raise self._library.failure("engine-import", f"the engine took {read} of {len(blob)} bytes of state")

    def _row(self, pointer: Any, count: int) -> Logits:
        if not pointer:
            raise self._library.failure("engine-decode", "the engine has no output for the last token")
        return np.frombuffer(self._library.ffi.buffer(pointer, 4 * count), dtype=np.float32)

    def _use_row_kernels(self) -> None:
        """Kernels that compute each row of a batch alone, cell by cell: what a sequence gets then depends neither on
        the rest of its batch, nor on which cells it lies in, nor on where its prompt was cut. The engine's others do:
        flash attention works in tiles of 64 rows and 64 cells, or splits the cells among threads for a single row, and
        products of matrices of floats are blocked as soon as there are two rows (ggml-cpu, `use_ref`)."""
        scheduler = self._c._ZNK13llama_context9get_schedEv(self.handle)
        for number in range(self._c.ggml_backend_sched_get_n_backends(scheduler)):
            backend = self._c.ggml_backend_sched_get_backend(scheduler, number)
            if not self._c.ggml_backend_is_cpu(backend):
                self.close()
                raise EngineError(
                    "batch-invariant",
                    f"backend {number} of the engine is not its CPU's, which alone can be batch-invariant: "
                    "start without --batch-invariant",
                )
            self._c.ggml_backend_cpu_set_use_ref(backend, True)

    def _check_echo(self, options: ContextOptions) -> None:
        """The engine read our parameters where we wrote them."""
        wanted = (options.cells, options.engine_sequences, options.batch_tokens)
        found = tuple(f(self.handle) for f in (self._c.llama_n_ctx, self._c.llama_n_seq_max, self._c.llama_n_ubatch))
        if found != wanted:
            self.close()
            raise EngineError("engine-echo", f"asked the engine for (n_ctx, n_seq_max, n_ubatch) {wanted}, got {found}")


def _parameters(library: Library, options: ContextOptions, mtp: bool) -> Any:
    p = library.c.llama_context_default_params()
    p.n_ctx = options.cells
    p.n_batch = p.n_ubatch = options.batch_tokens  # one engine step per batch: bit-equality needs equal steps
    p.n_seq_max = options.engine_sequences
    p.kv_unified = True
    p.swa_full = True  # old cells stay, so a page may be exported any time after it was computed
    p.flash_attn_type = int(options.flash_attention)
    p.n_threads = p.n_threads_batch = options.threads
    p.type_k, p.type_v = KV_TYPES[options.kv_type_k], KV_TYPES[options.kv_type_v]
    p.offload_kqv = p.op_offload = False
    p.no_perf = False  # the counters prove how many tokens were evaluated
    p.ctx_type = _MTP_CONTEXT if mtp else 0
    return p
