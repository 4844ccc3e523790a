"""Chooses the next token from logits: bias and penalties, then greedy, or temperature, top-k, top-p, min-p with a seed.

Pure numpy on one row of logits; owns the random generator and the token counts of one request. Filters apply in the
order llama.cpp and most servers use: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

MAX_LOGPROBS: Final = 20  # alternatives told per token
_GREEDY_BELOW: Final = 1e-5  # temperature at which logits that differ in float16 already weigh 1 to e**-90

Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepeatPenalty = Annotated[float, Meta(ge=0.01, le=10)]  # of less, float32 has no quotient
Bias = tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], Annotated[float, Meta(ge=-100, le=100)]]  # token id, added


class Sampling(msgspec.Struct, frozen=True):
    """What a request asks for. Temperature 0 is greedy; filters at their neutral value do nothing."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    presence_penalty: Penalty = 0.0  # taken off the logit of every token generated before
    frequency_penalty: Penalty = 0.0  # the same, as often as it was
    repeat_penalty: RepeatPenalty = 1.0  # divides logits of tokens of prompt and answer
    logit_bias: Annotated[tuple[Bias, ...], Meta(max_length=1024)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # alternatives told with each token


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's bytes and its probability before filters, as a logarithm; `top` are the likeliest, itself or not."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class Sampler:
    """Sampling state of one request."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._rng = np.random.default_rng(sampling.seed)
        penalties = sampling.repeat_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        self._adjusts = bool(sampling.logit_bias or penalties)
        self._generated: Counter[int] = Counter()
        self._seen = set(prompt) if sampling.repeat_penalty != 1 else set[int]()

    def choose(self, logits: NDArray[np.float32]) -> int:
        if not self._adjusts:
            return self._choose(logits)
        token = self._choose(self._adjusted(logits))
        self._generated[token] += 1
        self._seen.add(token)
        return token

    def _adjusted(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """With bias and penalties; the engine's own row stays as it is."""
        s = self._sampling
        logits = logits.copy()
        for token, bias in s.logit_bias:
            if token < len(logits):
                logits[token] += bias
        if s.repeat_penalty != 1 and self._seen:
            seen = np.fromiter(self._seen, np.int64)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / s.repeat_penalty, logits[seen] * s.repeat_penalty)
        for token, count in self._generated.items():
            logits[token] -= s.presence_penalty + count * s.frequency_penalty
        return logits

    def _choose(self, logits: NDArray[np.float32]) -> int:
        if self._sampling.temperature < _GREEDY_BELOW:
            return int(logits.argmax())
        tokens, weights = _survivors(logits, self._sampling)
        bounds = np.cumsum(weights)
        # Each token owns the interval that ends at its bound; one without weight owns nothing, hence "right".
        return int(tokens[np.searchsorted(bounds[:-1], self._rng.random() * bounds[-1], side="right")])


def log_probabilities(logits: NDArray[np.float32], token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """Of `token`, and the `top` likeliest tokens with theirs: natural logarithms of the softmax."""
    shifted = logits.astype(np.float64) - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    likeliest = np.argpartition(shifted, -top)[-top:] if 0 < top < len(shifted) else np.arange(min(top, len(shifted)))
    order = likeliest[np.argsort(-shifted[likeliest], kind="stable")]
    return float(shifted[token]), [(int(t), float(shifted[t])) for t in order]


def _survivors(logits: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that pass all filters and their weights (not normalized). Sorts only what top-p has to see in order:
    sorting a vocabulary of 150,000 would take longer than many models need for a token."""
    tokens = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):
        tokens = np.argpartition(logits, -sampling.top_k)[-sampling.top_k :]
    scaled = logits[tokens].astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    mass = float(weights.sum())
    # The heaviest weight is 1, so this is min-p itself. All tokens lighter than the second term weigh less than
    # 1 - top_p together, so top-p ends before the first of them.
    keep = weights >= max(sampling.min_p, (1 - sampling.top_p) * mass / len(weights))
    tokens, weights = tokens[keep], weights[keep]
    if sampling.top_p >= 1:
        return tokens, weights
    order = np.argsort(-weights, kind="stable")
    # The token that crosses top_p is kept: the smallest set whose mass reaches it.
    count = int(np.searchsorted(np.cumsum(weights[order]), sampling.top_p * mass)) + 1
    return tokens[order[:count]], weights[order[:count]]
