"""Keeps a model's MTP head in step with its target, so that its state can move too.

The head has a context of its own. After the target has evaluated tokens, the head evaluates the same tokens, each
with the target's hidden row of the token *before* it; the last row of each sequence stays pending for its next call.
That row is state: without it a handoff leaves the target right and every later draft silently worse.
Owns the head's context, one batch of hidden rows and one pending row per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from zerocopy.runtime.base import Logits
from zerocopy.runtime.llama.abi import Library
from zerocopy.runtime.llama.context import PROBE_SEQUENCE, Context, ContextOptions, Run

_DECODE: Final = 1  # LLAMA_PROCESS_TYPE_DECODE


class MtpFollower:
    def __init__(self, library: Library, model: Any, options: ContextOptions, target: Context) -> None:
        self._library = library
        self._c = library.c
        self._target = target
        self.context = Context(library, model, options, mtp=True)
        target.keep_hidden_rows(only_outputs=False)
        self.context.keep_hidden_rows(only_outputs=True)
        self._width = self._c.llama_model_n_embd_out(model)
        self._pending = np.zeros((options.engine_sequences, self._width), np.float32)
        self._rows = np.zeros((options.batch_tokens, self._width), np.float32)  # what each token of a batch is given
        self._inputs = [self._input(row) for row in self._rows]
        self._batch: Any = self._c.llama_batch_ext_init(self.context.handle)
        self._position: Any = library.ffi.new("llama_pos *")

    def pending(self, sequence: int) -> Logits:
        """F32[n_embd], writable."""
        row: Logits = self._pending[sequence]
        return row

    def follow(self, runs: Sequence[Run]) -> None:
        """The target has just evaluated `runs`; logits are kept of the last token of each."""
        total = sum(len(run.tokens) for run in runs)
        hidden = self._target.hidden_rows(total, self._width)
        at = 0
        for run in runs:
            count = len(run.tokens)
            self._rows[at] = self._pending[run.sequence]
            self._rows[at + 1 : at + count] = hidden[at : at + count - 1]
            at += count
        self._process(runs)
        at = 0
        for run in runs:
            at += len(run.tokens)
            self._pending[run.sequence] = hidden[at - 1]

    def probe(self, sequence: int, token: int, position: int) -> Logits:
        """What `follow` would give for one token, on a copy: context and pending row stay as they are."""
        self.context.copy(sequence, PROBE_SEQUENCE)
        self._rows[0] = self._pending[sequence]
        try:
            self._process([Run(PROBE_SEQUENCE, [token], position)])
            return self.context.logits()
        finally:
            self.context.drop(PROBE_SEQUENCE)

    def bury(self, sequence: int) -> None:
        self.context.bury(sequence)
        self._pending[sequence] = 0

    def clear(self) -> None:
        """Overwrite the engine's cells and the last batch. Pending rows end with their sequences."""
        self.context.clear()
        self._rows[:] = 0
        self._c.llama_batch_ext_clear(self._batch)

    def close(self) -> None:
        if self._batch is not None:
            self._c.llama_batch_ext_free(self._batch)
            self._batch = None
        self.context.close()
        self._pending[:] = 0
        self._rows[:] = 0

    def _process(self, runs: Sequence[Run]) -> None:
        c, batch, at = self._c, self._batch, 0
        c.llama_batch_ext_clear(batch)
        for run in runs:
            for i, token in enumerate(run.tokens):
                self._position[0] = run.start + i
                index = c.llama_batch_ext_add_token(batch, run.sequence, token)
                accepted = (
                    index == at
                    and c.llama_batch_ext_set_embd_state(batch, at, self._inputs[at])
                    and c.llama_batch_ext_set_pos(batch, at, self._position)
                )
                if not accepted:
                    raise self._library.failure("engine-mtp", f"the MTP head refused token {i} of {len(run.tokens)}")
                c.llama_batch_ext_set_output_logits(batch, at, i == len(run.tokens) - 1)
                at += 1
        code = c.llama_process(self.context.handle, _DECODE, batch)
        if code:
            raise self._library.failure("engine-mtp", f"the MTP head failed on {at} tokens with {code}")

    def _input(self, row: Logits) -> Any:
        """The engine's view of one hidden row; `_rows` outlives it."""
        embd = self._library.ffi.new("struct llama_embd *")
        embd.data = self._library.ffi.cast("float *", row.ctypes.data)
        embd.n_rows, embd.n_embd = 1, self._width
        return embd[0]
