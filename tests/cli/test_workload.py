"""Loads: lengths follow their traces' percentiles, arrivals their rate, and foreign files are told."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from zerocopy.cli.workload import (
    BLOCK_TOKENS,
    PERCENTILES,
    Arrival,
    TraceError,
    generated,
    limited,
    poisson,
    prompt_of,
    read_trace,
)


def test_poisson_arrivals_come_at_their_rate_and_as_unevenly_as_they_should() -> None:
    moments = list(itertools.islice(poisson(5.0, seed=1), 4000))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *moments])]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert abs(mean - 0.2) < 0.02 and abs(spread / mean - 1) < 0.1


@pytest.mark.parametrize("profile", list(PERCENTILES))
def test_generated_lengths_have_the_percentiles_of_their_trace(profile: str) -> None:
    drawn = list(itertools.islice(generated(profile, 1.0, seed=2), 4000))  # type: ignore[arg-type]
    lengths = [sorted(a.prompt_tokens for a in drawn), sorted(a.output_tokens for a in drawn)]
    for ordered, points in zip(lengths, PERCENTILES[profile], strict=True):  # type: ignore[index]
        for percentile, value in points[1:-1]:
            assert ordered[int(percentile / 100 * len(ordered))] == pytest.approx(value, rel=0.2)


def test_the_same_seed_is_the_same_load() -> None:
    first, again, other = (list(itertools.islice(generated("azure-code", 2.0, seed), 20)) for seed in (3, 3, 4))
    assert first == again != other


def test_a_load_ends_with_its_seconds_and_fits_the_context() -> None:
    load = limited(generated("mooncake-conversation", 10.0, 0), seconds=3.0, requests=1000, longest=512)
    assert 10 < len(load) < 60 and load[-1].at_s <= 3.0
    assert all(a.prompt_tokens + a.output_tokens <= 512 and a.prompt_tokens > 0 for a in load)


def test_prompts_share_what_their_blocks_say_and_nothing_else() -> None:
    one, other = Arrival(0, 1200, 1, blocks=(7, 8)), Arrival(0, 1500, 1, blocks=(7, 9))
    a, b = prompt_of(one, 0, 1000), prompt_of(other, 1, 1000)
    assert len(a) == 1200 and len(b) == 1500 and max(a + b) < 1000
    assert a[:BLOCK_TOKENS] == b[:BLOCK_TOKENS] and a[BLOCK_TOKENS : 2 * BLOCK_TOKENS] != b[BLOCK_TOKENS:1024]
    assert prompt_of(Arrival(0, 50, 1), 0, 1000) != prompt_of(Arrival(0, 50, 1), 1, 1000)


def test_only_blocks_that_a_prompt_has_room_for_are_made() -> None:
    """A prompt cut to fit a context had all its trace's blocks drawn, on the loop that times the answers."""
    counted = itertools.count()
    blocks = tuple(_Counted(n, counted) for n in range(300))
    assert len(prompt_of(Arrival(0, 600, 1, blocks=blocks), 0, 1000)) == 600
    assert next(counted) == 2


class _Counted(int):
    """A block id that counts whose tokens were drawn."""

    def __new__(cls, number: int, counted: itertools.count[int]) -> _Counted:
        made = super().__new__(cls, number)
        made.counted = counted
        return made

    counted: itertools.count[int]

    def __format__(self, spec: str) -> str:
        next(self.counted)
        return super().__format__(spec)


def test_traces_of_both_formats_are_read(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,9,8\n"
    )
    mooncake.write_text('{"timestamp": 3000, "input_length": 67, "output_length": 5, "hash_ids": [0, 14]}\n\n')
    assert read_trace(azure) == [Arrival(0.0, 4808, 10), Arrival(0.5, 9, 8)]
    assert read_trace(mooncake) == [Arrival(3.0, 67, 5, (0, 14))]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", "a,b\n1,2\n"), ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n"), ("m.jsonl", "{}\n"),
     ("m.jsonl", "no json\n"), ("absent.csv", ""),
     ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,-1,8\n"),
     ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,9,0\n"),
     ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,9," + "9" * 30 + "\n"),
     ("a.csv", '"' + "a" * 200_000 + '"\n'),
     ("m.jsonl", '{"timestamp": 0, "input_length": -67, "output_length": 5}\n'),
     ("m.jsonl", '{"timestamp": 0, "input_length": 67, "output_length": 0}\n')],
)  # fmt: skip
def test_what_is_no_trace_is_told_so(name: str, text: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=name):
        read_trace(tmp_path / name)
