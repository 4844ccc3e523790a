"""Chooses the next token from logits: greedy, temperature, top-k, top-p, min-p, with a seed.

Pure numpy on one row of logits; owns the random generator of one request and nothing else. Filters apply in the
order llama.cpp and most servers use: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class Sampling(msgspec.Struct, frozen=True):
    """What a request asks for. Temperature 0 is greedy; filters at their neutral value do nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None


class Sampler:
    """Sampling state of one request."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._rng = np.random.default_rng(sampling.seed)

    def choose(self, logits: NDArray[np.float32]) -> int:
        if self._sampling.temperature <= 0:
            return int(logits.argmax())
        tokens, weights = _filtered(logits, self._sampling)
        return int(self._rng.choice(tokens, p=weights))


def _filtered(logits: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Surviving tokens, most likely first, and their probabilities (sum 1)."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    keep = len(order)
    if sampling.top_p < 1:
        # The token that crosses top_p is kept: the smallest set whose mass reaches it.
        keep = int(np.searchsorted(np.cumsum(weights), sampling.top_p)) + 1
    if sampling.min_p > 0:
        keep = min(keep, int(np.count_nonzero(weights >= sampling.min_p * weights[0])))
    keep = max(1, min(keep, len(order)))
    return order[:keep], weights[:keep] / weights[:keep].sum()
