"""Sampling: filters keep exactly what their definitions say, seeds repeat, frequencies match probabilities."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from zerocopy.worker.sampling import Sampler, Sampling

PROBABILITIES = [0.05, 0.4, 0.1, 0.25, 0.2]
LOGITS = np.log(np.array(PROBABILITIES)).astype(np.float32)


def frequencies(sampling: Sampling, logits: NDArray[np.float32] = LOGITS, draws: int = 4000) -> list[float]:
    sampler = Sampler(sampling)
    counts = np.bincount([sampler.choose(logits) for _ in range(draws)], minlength=len(logits))
    return [float(count) / draws for count in counts]


def assert_close(seen: list[float], expected: list[float]) -> None:
    """Within 5 standard deviations of 4,000 draws; the seed is fixed, so this never flakes."""
    for have, want in zip(seen, expected, strict=True):
        assert abs(have - want) <= 5 * math.sqrt(want * (1 - want) / 4000) + 1e-12, (seen, expected)


def renormalized(keep: set[int], weights: list[float] = PROBABILITIES) -> list[float]:
    total = sum(weights[i] for i in keep)
    return [weights[i] / total if i in keep else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1), PROBABILITIES),
        (Sampling(temperature=1, top_k=2), renormalized({1, 3})),
        (Sampling(temperature=1, top_k=99), PROBABILITIES),
        (Sampling(temperature=1, top_p=0.6), renormalized({1, 3})),  # 0.4 < 0.6, 0.4 + 0.25 >= 0.6
        (Sampling(temperature=1, top_p=0.41), renormalized({1, 3})),
        (Sampling(temperature=1, top_p=0.39), renormalized({1})),
        (Sampling(temperature=1, top_p=0.0), renormalized({1})),
        (Sampling(temperature=1, min_p=0.45), renormalized({1, 3, 4})),  # 0.45 * 0.4 = 0.18 <= 0.2
        (Sampling(temperature=1, min_p=1.0), renormalized({1})),
        (Sampling(temperature=1, top_k=3, top_p=0.8, min_p=0.55), renormalized({1, 3})),
    ],
)
def test_tokens_are_drawn_with_the_filtered_probabilities(sampling: Sampling, expected: list[float]) -> None:
    seeded = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed=11)
    assert_close(frequencies(seeded), expected)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_reshapes_before_the_filters(temperature: float) -> None:
    powered = [p ** (1 / temperature) for p in PROBABILITIES]
    total = sum(powered)
    assert_close(frequencies(Sampling(temperature, seed=3)), [p / total for p in powered])
    # min_p against the reshaped probabilities: which tokens survive depends on the temperature
    keep = {i for i, p in enumerate(powered) if p >= 0.3 * max(powered)}
    assert_close(frequencies(Sampling(temperature, min_p=0.3, seed=3)), renormalized(keep, powered))


def test_temperature_zero_takes_the_most_likely_token_and_the_first_of_equals() -> None:
    assert Sampler(Sampling()).choose(LOGITS) == 1
    assert Sampler(Sampling(top_k=5, top_p=0.1, min_p=0.9)).choose(np.array([2, 7, 7], np.float32)) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [2e-5, 1e-6, 1e-310])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    """At 1e-310 the last token of the vocabulary was drawn."""
    big = np.array([3e38, -3e38, 0], np.float32)
    assert all(Sampler(Sampling(temperature, seed=i)).choose(big) == 0 for i in range(20))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_least_repeat_penalty_does_not_overflow(temperature: float) -> None:
    """1e-40 made infinities, and of those the last token."""
    row = np.array([1000, 900, -1000, 0], np.float32)
    assert Sampler(Sampling(temperature, repeat_penalty=0.01, seed=1), [0, 1, 2]).choose(row) == 0
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"repeat_penalty": 1e-40}, Sampling)


def test_the_same_seed_repeats_and_another_does_not() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1, seed=seed))
        return [sampler.choose(LOGITS) for _ in range(64)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert draw(None) != draw(None)
    assert draw((1 << 63) - 1) == draw((1 << 63) - 1)


def test_tokens_that_the_engine_forbids_are_never_drawn() -> None:
    forbidden = np.array([0, -np.inf, 0, -np.inf], np.float32)
    assert_close(frequencies(Sampling(temperature=1, seed=1), forbidden), [0.5, 0, 0.5, 0])


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.01, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_setting_draws_a_token_that_every_filter_allows(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    row = np.array(logits, np.float32)
    before = row.copy()
    token = Sampler(Sampling(temperature, top_k, top_p, min_p, seed)).choose(row)
    assert (row == before).all()  # the engine's buffer is not ours to change
    scaled = row.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    assert weights[token] >= min_p * (1 - 1e-9)
    more_likely = weights[weights > weights[token]]
    assert top_k == 0 or len(more_likely) < top_k
    if top_k == 0:
        assert len(more_likely) == 0 or more_likely.sum() / weights.sum() <= top_p + 1e-9
