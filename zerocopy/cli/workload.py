"""What a load consists of: who arrives when, with how long a prompt, wanting how long an answer. Pure but for reading
trace files, which are read where they are and never shipped.

A prompt is a list of blocks: requests that share a leading block id share its tokens, as in Mooncake's traces.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

BLOCK_TOKENS: Final = 512  # of Mooncake's hash ids

Profile = Literal["fixed", "azure-code", "azure-conversation", "mooncake-conversation", "mooncake-synthetic"]


class Arrival(msgspec.Struct, frozen=True):
    """One request: seconds after the start, lengths in tokens, ids of the shared blocks that its prompt begins with."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class TraceError(Exception):
    """The file is not a trace of a known format."""


_AZURE_LENGTHS: Final = ("ContextTokens", "GeneratedTokens")
Length = Annotated[int, Meta(ge=1, le=1 << 24)]  # of a prompt or an answer; a request of none is none


# (percentile, tokens) of the public traces, computed from their files: prompts, then answers. The minimum and what lies
# above p99 are round figures.
PERCENTILES: Final[Mapping[Profile, tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]]] = {
    "azure-code": (((0, 32), (50, 1469), (90, 5187.6), (99, 7436), (100, 7800)), ((0, 4), (50, 13), (90, 55), (99, 251),
                   (100, 500))),
    "azure-conversation": (((0, 16), (50, 1020), (90, 2734.5), (99, 4142), (100, 8000)), ((0, 8), (50, 129), (90, 424),
                           (99, 601), (100, 900))),
    "mooncake-conversation": (((0, 900), (50, 6909), (90, 27367), (99, 85400), (100, 120000)), ((0, 20), (50, 350),
                              (90, 600), (99, 900), (100, 2000))),
    "mooncake-synthetic": (((0, 200), (50, 11587), (90, 40000), (99, 66456), (100, 120000)), ((0, 4), (50, 69),
                           (90, 400), (99, 900), (100, 2000))),
}  # fmt: skip


def azure_trace(path: Path) -> list[Arrival]:
    """`TIMESTAMP,ContextTokens,GeneratedTokens`. Raises TraceError."""
    arrivals: list[Arrival] = []
    first: datetime | None = None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven digits of a second are one too many
                first = first or at
                prompt, output = (msgspec.convert(row[name], Length, strict=False) for name in _AZURE_LENGTHS)
                arrivals.append(Arrival((at - first).total_seconds(), prompt, output))
    except (OSError, csv.Error, msgspec.ValidationError, KeyError, ValueError, TypeError) as error:
        raise TraceError(f"{path} is no Azure trace (TIMESTAMP,ContextTokens,GeneratedTokens): {error}") from None
    return arrivals


class _Mooncake(msgspec.Struct):
    timestamp: float  # ms
    input_length: Length
    output_length: Length
    hash_ids: tuple[int, ...] = ()


def mooncake_trace(path: Path) -> list[Arrival]:
    """One JSON object a line: timestamp, input_length, output_length, hash_ids. Raises TraceError."""
    decoder = msgspec.json.Decoder(_Mooncake)
    try:
        rows = [decoder.decode(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, msgspec.DecodeError) as error:
        raise TraceError(
            f"{path} is no Mooncake trace (JSON lines with timestamp, input_length, ...): {error}"
        ) from None
    return [Arrival(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids) for row in rows]


def read_trace(path: Path) -> list[Arrival]:
    """By its suffix: .csv is Azure's format, .jsonl is Mooncake's. Raises TraceError."""
    if not path.is_file():
        raise TraceError(f"{path} is no file: give a trace of Azure's (.csv) or Mooncake's (.jsonl)")
    return azure_trace(path) if path.suffix == ".csv" else mooncake_trace(path)


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Arrival times of a Poisson process: nobody waits for an answer before the next one comes."""
    rng, at = random.Random(seed), 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def generated(
    profile: Profile, rate: float, seed: int, *, prompt_tokens: int = 512, output_tokens: int = 64, shared: float = 0.0
) -> Iterator[Arrival]:
    """Poisson arrivals with lengths of a profile, or all `fixed`. Of them `shared` begin with the same blocks."""
    rng = random.Random(seed + 1)
    for at in poisson(rate, seed):
        prompt, output = prompt_tokens, output_tokens
        if profile != "fixed":
            prompt, output = (round(_drawn(points, 100 * rng.random())) for points in PERCENTILES[profile])
        blocks = tuple(range(prompt // 2 // BLOCK_TOKENS)) if rng.random() < shared else ()
        yield Arrival(at, max(1, prompt), max(1, output), blocks)


def limited(arrivals: Iterator[Arrival], *, seconds: float, requests: int, longest: int) -> list[Arrival]:
    """The first so many, in so many seconds; lengths are cut so that each fits `longest` tokens of context."""
    chosen = itertools.islice(itertools.takewhile(lambda arrival: arrival.at_s <= seconds, arrivals), requests)
    return [_cut(arrival, longest) for arrival in chosen]


def _cut(arrival: Arrival, longest: int) -> Arrival:
    output = min(arrival.output_tokens, max(1, longest // 2))
    return msgspec.structs.replace(
        arrival, output_tokens=output, prompt_tokens=min(arrival.prompt_tokens, longest - output)
    )


def prompt_of(arrival: Arrival, number: int, words: int) -> list[int]:
    """Token ids below `words`: the shared blocks, then ids that only this request has."""
    tokens = list[int]()
    for block in arrival.blocks[: -(-arrival.prompt_tokens // BLOCK_TOKENS)]:  # it may have been cut shorter since
        rng = random.Random(f"block {block}")
        tokens += [rng.randrange(words) for _ in range(BLOCK_TOKENS)]
    rng = random.Random(f"request {number}")
    tokens += [rng.randrange(words) for _ in range(arrival.prompt_tokens - len(tokens))]
    return tokens[: arrival.prompt_tokens]


def _drawn(points: Sequence[tuple[float, float]], percentile: float) -> float:
    """On the curve through the points, straight between them in the logarithm of length."""
    for (p0, low), (p1, high) in itertools.pairwise(points):
        if percentile <= p1:
            return float(low * (high / low) ** ((percentile - p0) / (p1 - p0)))
    return points[-1][1]
