"""Chooses the next token from logits: greedy, temperature, top-k, top-p, min-p, with a seed.

Pure numpy on one row of logits; owns the random generator of one request and nothing else. Filters apply in the
order llama.cpp and most servers use: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray


class Sampling(msgspec.Struct, frozen=True):
    """What a request asks for. Temperature 0 is greedy; filters at their neutral value do nothing."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None


class Sampler:
    """Sampling state of one request."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._rng = np.random.default_rng(sampling.seed)

    def choose(self, logits: NDArray[np.float32]) -> int:
        if self._sampling.temperature <= 0:
            return int(logits.argmax())
        tokens, weights = _survivors(logits, self._sampling)
        bounds = np.cumsum(weights)
        # Each token owns the interval that ends at its bound; one without weight owns nothing, hence "right".
        return int(tokens[np.searchsorted(bounds[:-1], self._rng.random() * bounds[-1], side="right")])


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
