"""How many tokens one exported page holds: chosen in bytes, because that is what a page costs. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from zerocopy.handoff.components import HEADER_BYTES, RECORD_OVERHEAD, Component, ComponentSpec, StateSchema
from zerocopy.runtime.base import EngineError, EngineFacts

# A page costs both hosts some Python whatever its size, and the next one waits until it has been exported whole: with
# Nemotron 3 Super's state the path costs 3.5 CPU-s/GiB in pages of 512 KiB, 2.0 of 2 MiB, 1.1 of 8 MiB.
PAGE_BYTES: Final = 8 << 20


def most_page_bytes(ring_bytes: int) -> int:
    """The largest payload of a record in a ring of that size: a quarter of it, headers not counted."""
    return ring_bytes // 4 - RECORD_OVERHEAD - HEADER_BYTES


def paged(schema: StateSchema) -> list[ComponentSpec]:
    """What leaves as pages of token ranges, in the order in which pages of one range leave."""
    return [spec for spec in map(schema.spec, (Component.ATTENTION_KV, Component.MTP_KV)) if spec is not None]


def span(spec: ComponentSpec, facts: EngineFacts) -> int:
    """Tokens of one page of this component: as many of the engine's ranges of `page_tokens` as keep it within half the
    bytes of the largest component's page. A page costs the same Python however small it is; and what has to wait for
    its last range is then less than a page of the state that has to wait in any case."""
    if facts.export_before_next_chunk:
        return facts.page_tokens
    one = _bytes(spec, facts.page_tokens)
    largest = max((_bytes(other, facts.page_tokens) for other in paged(facts.schema)), default=one)
    return facts.page_tokens * max(1, min(largest // 2 // one, spec.max_page_tokens // facts.page_tokens))


def longest(spec: ComponentSpec, facts: EngineFacts) -> int:
    """Tokens of this component's longest page: what leaves where several ranges wait, with the ring full or in a chunk
    of many bytes. They would leave one right after the other, each at the price of a page."""
    if facts.export_before_next_chunk:
        return span(spec, facts)
    one, two = _bytes(spec, 1), _bytes(spec, 2)
    return max(span(spec, facts), min(1 + (facts.page_bytes - one) // (two - one), spec.max_page_tokens))


def fitted(facts: EngineFacts, most_bytes: int) -> EngineFacts:
    """The same engine as it exports for a decoder whose ring takes payloads of at most `most_bytes`: in shorter pages
    where its own are longer. Raises EngineError where not even one token's page fits."""
    tokens = page_tokens(facts.schema, facts.chunk_tokens, facts.page_tokens, most_bytes)
    return msgspec.structs.replace(facts, page_tokens=tokens, page_bytes=min(facts.page_bytes, most_bytes))


def state_bytes(spec: ComponentSpec, tokens: int, page_tokens: int) -> int:
    """Payload bytes of one component for a state of `tokens` tokens, in the pages that a handoff uses."""
    layers = (0, spec.layers)
    if not spec.per_token:
        return spec.page_bytes(layers, (0, 1))
    step = min(page_tokens, spec.max_page_tokens)
    whole, rest = divmod(tokens, step)
    return whole * spec.page_bytes(layers, (0, step)) + (spec.page_bytes(layers, (0, rest)) if rest else 0)


def _bytes(spec: ComponentSpec, tokens: int) -> int:
    return spec.page_bytes((0, spec.layers), (0, tokens))


def page_tokens(schema: StateSchema, chunk_tokens: int, wanted: int, most_bytes: int) -> int:
    """The most tokens that divide a chunk (so that no page waits for a second one) and that the engine moves as one
    page: at most `wanted` or, where that is 0, of at most PAGE_BYTES; always of at most `most_bytes`, what a ring
    takes. Raises EngineError where not even one token's page fits a ring."""
    specs = paged(schema)

    def size(tokens: int) -> int:
        return max((_bytes(spec, tokens) for spec in specs), default=0)

    if size(1) > most_bytes:
        ring_mib = -(-4 * (size(1) + RECORD_OVERHEAD + HEADER_BYTES) // (1 << 20))
        raise EngineError(
            "page-too-large",
            f"a page of one token of this model has {size(1)} bytes, a ring takes {most_bytes}: "
            f"start with --ring-mib {ring_mib}",
        )
    limit = most_bytes if wanted else min(PAGE_BYTES, most_bytes)
    longest = min([wanted or chunk_tokens, chunk_tokens, *(spec.max_page_tokens for spec in specs)])
    fitting = (n for n in range(longest, 0, -1) if chunk_tokens % n == 0 and size(n) <= limit)
    return next(fitting, 1)  # one token may be more than a page should be
