"""Keeps a model's MTP head in step with its target, so that its state can move too.

The head has a context of its own. After the target has evaluated tokens, the head evaluates the same tokens, each
with the target's hidden row of the token *before* it; the last row stays pending for the next call. That row is
state: without it a handoff leaves the target right and every later draft silently worse.
Owns the head's context and one chunk of hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from zerocopy.runtime.base import Logits
from zerocopy.runtime.llama.abi import Library
from zerocopy.runtime.llama.blob import LIVE_SEQUENCE
from zerocopy.runtime.llama.context import PROBE_SEQUENCE, Context, ContextOptions

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
        # row 0 is the pending row; row i + 1 follows token i of a chunk
        self._rows = np.zeros((options.chunk_tokens + 1, self._width), np.float32)
        self._inputs = [self._input(row) for row in self._rows]
        self._batch: Any = self._c.llama_batch_ext_init(self.context.handle)
        self._position: Any = library.ffi.new("llama_pos *")

    @property
    def pending(self) -> Logits:
        """F32[n_embd], writable."""
        row: Logits = self._rows[0]
        return row

    def follow(self, tokens: Sequence[int], start: int, *, output: bool) -> None:
        """The target has just evaluated `tokens`; `output` asks for logits of the last."""
        count = len(tokens)
        self._rows[1 : count + 1] = self._target.hidden_rows(count, self._width)
        self._process(tokens, start, LIVE_SEQUENCE, output)
        self._rows[0] = self._rows[count]

    def probe(self, token: int, position: int) -> Logits:
        """What `follow` would give for one token, on a copy: context and pending row stay as they are."""
        self.context.copy(LIVE_SEQUENCE, PROBE_SEQUENCE)
        try:
            self._process([token], position, PROBE_SEQUENCE, output=True)
            return self.context.logits()
        finally:
            self.context.drop(PROBE_SEQUENCE)

    def clear(self) -> None:
        self.context.clear()
        self._rows[:] = 0
        self._c.llama_batch_ext_clear(self._batch)

    def close(self) -> None:
        if self._batch is not None:
            self._c.llama_batch_ext_free(self._batch)
            self._batch = None
        self.context.close()
        self._rows[:] = 0

    def _process(self, tokens: Sequence[int], start: int, sequence: int, output: bool) -> None:
        c, batch = self._c, self._batch
        c.llama_batch_ext_clear(batch)
        for i, token in enumerate(tokens):
            self._position[0] = start + i
            index = c.llama_batch_ext_add_token(batch, sequence, token)
            accepted = (
                index == i
                and c.llama_batch_ext_set_embd_state(batch, i, self._inputs[i])
                and c.llama_batch_ext_set_pos(batch, i, self._position)
            )
            if not accepted:
                raise self._library.failure("engine-mtp", f"the MTP head refused token {i} of {len(tokens)}")
            c.llama_batch_ext_set_output_logits(batch, i, output and i == len(tokens) - 1)
        code = c.llama_process(self.context.handle, _DECODE, batch)
        if code:
            raise self._library.failure("engine-mtp", f"the MTP head failed on {len(tokens)} tokens with {code}")

    def _input(self, row: Logits) -> Any:
        """The engine's view of one hidden row; `_rows` outlives it."""
        embd = self._library.ffi.new("struct llama_embd *")
        embd.data = self._library.ffi.cast("float *", row.ctypes.data)
        embd.n_rows, embd.n_embd = 1, self._width
        return embd[0]
