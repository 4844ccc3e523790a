"""What one iteration of the worker's loop does. Pure: time and work come in as arguments.

An iteration is one engine call per pool, then some copying. The call holds one token of every sequence that
generates (later: a draft of several) and slices of prompts up to a token budget, unless a prompt has just been read:
then its first token comes before more prompt. Copying is pages in and out. So the gap between two tokens of a sequence
is bounded by one budget of prompt and one share of copying, however much waits.

The more cells a prompt's token looks past, its own prompt's and in a shared cache everybody's, the longer it takes. So
beside sequences that generate, the budget is cut to what, by the last such call, takes the time of a lone chunk.

A prompt that is alone is evaluated chunk by chunk. Of several, the last that goes into a call is cut to what is left
of the budget: a call costs much that does not depend on its tokens, so each is filled, but for a few tokens where that
lets the prompt's next slice begin with a tile of the engine's attention. Of prompts with equal priority
the oldest goes first and, every other iteration, the one with the least left: a short prompt does not wait for a
huge one, and the oldest gets at least every other turn, so nobody starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

# Of the time of an iteration's engine calls, while sequences generate: with one page more than that, which may be in
# progress when the share ends, a gap stays well below twice what it is without copying.
COPY_SHARE: Final = 0.25
MIN_COPY_S: Final = 0.001  # so that copying goes on beside an engine that answers at once
# While nobody waits for a token. A chunk's pages leave within it before the next chunk is evaluated.
QUIET_COPY_S: Final = 0.05
# The engine's attention takes rows and cells by so many at once: SmolLM2's chunk of 256 on two cores takes 770 ms, and
# 20 ms more where the prompt's tokens before it end within a tile.
TILE: Final = 64
LEFT_OUT: Final = 1 / 16  # of the budget at most; more would cost more than it saves
# Of the budget, however slow a call is: a prompt that is long already must end, too.
MIN_SHARE: Final = 0.25


class Waiting(msgspec.Struct, frozen=True):
    """A prompt with a slice to evaluate."""

    key: int
    arrived: int  # earlier is smaller
    start: int  # of the slice, in the prompt
    slice_tokens: int
    remaining: int  # tokens, this slice included
    whole: bool = False  # the slice must not be cut
    priority: int = 0  # smaller goes first


class Scheduler:
    def __init__(self, budget_tokens: int) -> None:
        self._budget = budget_tokens
        self._turn = 0
        self._lone_token_s: float | None = None  # of a prompt's first chunk, in a call of its own
        self._share = 1.0  # of the budget, beside sequences that generate

    def slices(self, waiting: Sequence[Waiting], generating: int = 0) -> list[tuple[int, int]]:
        """(key, tokens) of the prompts that are evaluated now beside so many sequences that generate: in order while
        the budget lasts, but always one."""
        if not waiting:
            return []
        self._turn += 1
        short_first = self._turn % 2 == 0

        def order(prompt: Waiting) -> tuple[int, int, int]:
            return prompt.priority, prompt.remaining if short_first else 0, prompt.arrived

        budget = int(self._budget * self._share) if generating else self._budget
        chosen, left = list[tuple[int, int]](), max(1, budget - generating)
        for prompt in sorted(waiting, key=order):
            tokens = prompt.slice_tokens
            if tokens > left and not prompt.whole:
                tokens = left - _left_out(prompt.start + left, budget)
                if tokens <= 0 and not chosen:
                    tokens = left
            if tokens > 0 and (tokens <= left or not chosen):
                chosen.append((prompt.key, tokens))
                left = max(0, left - tokens)
        return chosen

    def took(self, seconds: float, tokens: int, *, beside: int, beginning: bool) -> None:
        """What an engine call took with so many tokens of prompts beside so many sequences that generate; `beginning`:
        all of one prompt's, from its first. Calls of few tokens say little: much does not depend on these."""
        if tokens < MIN_SHARE * self._budget - beside:
            return
        token_s = max(seconds, 1e-9) / tokens
        if beside and self._lone_token_s is not None:
            self._share = min(1.0, max(MIN_SHARE, self._lone_token_s / token_s))
        elif not beside and beginning and tokens == self._budget:
            self._lone_token_s = token_s


def _left_out(end: int, budget: int) -> int:
    """How many tokens of a slice that would end there would be the beginning of a tile, if few."""
    over = end % TILE
    return over if over <= LEFT_OUT * budget else 0


def copy_seconds(engine_s: float, *, generating: bool) -> float:
    """How long pages may be copied after engine calls that took `engine_s`."""
    return max(MIN_COPY_S, COPY_SHARE * engine_s) if generating else QUIET_COPY_S
