"""Pages are as large as is cheap: chosen in bytes, within a chunk, a ring and what the engine moves as one."""

from __future__ import annotations

import msgspec
import pytest

from tests.daemon.worker_double import FACTS
from zerocopy.handoff.components import HEADER_BYTES, RECORD_OVERHEAD, Component, ComponentSpec, StateSchema
from zerocopy.runtime.base import EngineError, EngineFacts
from zerocopy.runtime.pages import PAGE_BYTES, fitted, longest, most_page_bytes, page_tokens, span, state_bytes

RING = most_page_bytes(64 << 20)


def schema(token_bytes: int, longest: int = 1 << 24) -> StateSchema:
    spec = ComponentSpec(Component.ATTENTION_KV, True, (token_bytes // 2,) * 2, max_page_tokens=longest)
    return StateSchema("test", (spec,))


@pytest.mark.parametrize(
    ("token_bytes", "chunk", "expected"),
    [
        (8192, 1024, 1024),  # Nemotron 3 Super: 8 MiB
        (327_680, 1024, 16),  # Llama 70B, 80 layers x 8 heads x 128 x (K, V) x F16: 64 tokens would be 20 MiB
        (23_040, 256, 256),  # SmolLM2: no page is longer than a chunk
        (327_680, 1000, 25),  # whatever divides the chunk
        (12 << 20, 1024, 1),  # one token is more than a page should be, but fits the ring
    ],
)
def test_a_page_has_the_most_tokens_within_8_mib_that_divide_a_chunk(
    token_bytes: int, chunk: int, expected: int
) -> None:
    assert page_tokens(schema(token_bytes), chunk, 0, RING) == expected


def test_what_is_asked_for_may_exceed_8_mib_but_never_a_ring() -> None:
    assert page_tokens(schema(327_680), 1024, 32, RING) == 32
    assert page_tokens(schema(327_680), 1024, 64, RING) == 32
    assert page_tokens(schema(8192), 1024, 64, RING) == 64
    assert page_tokens(schema(8192), 1024, 0, most_page_bytes(1 << 20)) == 16


def test_a_sliding_window_and_a_model_without_pages_have_the_last_word() -> None:
    assert page_tokens(schema(8192, longest=100), 1024, 0, RING) == 64
    assert page_tokens(StateSchema("mamba", ()), 512, 0, RING) == 512


def test_a_model_whose_token_fits_no_ring_is_refused_with_the_size_that_would_do() -> None:
    with pytest.raises(EngineError, match="start with --ring-mib 129") as error:
        page_tokens(schema(32 << 20), 1024, 0, RING)
    assert error.value.reason == "page-too-large"
    assert most_page_bytes(129 << 20) >= 32 << 20 > most_page_bytes(128 << 20)


def test_the_largest_page_and_its_headers_are_a_quarter_of_the_ring() -> None:
    assert most_page_bytes(64 << 20) + HEADER_BYTES + RECORD_OVERHEAD == 16 << 20
    assert PAGE_BYTES < RING


@pytest.mark.parametrize(
    ("mtp_bytes", "expected"),
    [
        (1024, 4096),  # Nemotron 3 Super: 1 MiB a chunk beside pages of 8
        (2048, 2048),
        (4096, 1024),
        (8192, 1024),  # as large as the KV itself
    ],
)
def test_a_small_component_spans_ranges_up_to_half_the_largest_page(mtp_bytes: int, expected: int) -> None:
    kv, mtp, all_of_it = with_mtp(mtp_bytes)
    assert (span(kv, all_of_it), span(mtp, all_of_it)) == (1024, expected)


def test_no_page_is_longer_than_what_the_engine_moves_as_one() -> None:
    _, mtp, all_of_it = with_mtp(512, longest=3000)
    assert span(mtp, all_of_it) == 2048


def test_what_the_next_chunk_overwrites_does_not_wait_for_it() -> None:
    _, mtp, all_of_it = with_mtp(1024, export_before_next_chunk=True)
    assert span(mtp, all_of_it) == 1024


def test_a_late_page_is_as_long_as_a_ring_takes_and_the_engine_moves_as_one() -> None:
    kv, mtp, in_time = with_mtp(1024, longest=10_000)
    late = msgspec.structs.replace(in_time, page_bytes=RING)
    assert (longest(kv, late), longest(mtp, late)) == (2047, 10_000)
    assert kv.page_bytes((0, 1), (0, 2047)) <= RING < kv.page_bytes((0, 1), (0, 2048))
    assert (longest(kv, in_time), longest(mtp, in_time)) == (1024, 4096)  # --page-tokens says so
    small = msgspec.structs.replace(in_time, page_bytes=1)
    assert longest(kv, small) == 1024  # never shorter than in time


def test_no_page_of_what_the_next_chunk_overwrites_is_late() -> None:
    kv, _, facts = with_mtp(1024, export_before_next_chunk=True)
    assert longest(kv, msgspec.structs.replace(facts, page_bytes=RING)) == 1024


@pytest.mark.parametrize("ring_mib", [1, 8, 33, 40, 63])
def test_pages_for_a_decoder_with_a_smaller_ring_are_as_long_as_that_ring_takes(ring_mib: int) -> None:
    kv, mtp, own = with_mtp(1024)
    own = msgspec.structs.replace(own, chunk_tokens=1024, page_bytes=RING)
    most = most_page_bytes(ring_mib << 20)
    theirs = fitted(own, most)
    assert theirs.chunk_tokens % theirs.page_tokens == 0 and theirs.page_tokens <= span(mtp, theirs)
    for spec in (kv, mtp):
        tokens = longest(spec, theirs)
        assert spec.page_bytes((0, 1), (0, tokens)) <= most < spec.page_bytes((0, 1), (0, tokens + 1))
    assert (theirs.page_tokens == 1024) == (ring_mib >= 33)


def test_pages_for_a_decoder_with_a_larger_ring_stay_as_they_are() -> None:
    _, _, own = with_mtp(1024)
    for page_bytes in (0, RING):
        facts = msgspec.structs.replace(own, chunk_tokens=1024, page_bytes=page_bytes)
        assert fitted(facts, most_page_bytes(256 << 20)) == facts


def test_a_decoder_whose_ring_takes_no_token_is_refused_with_both_values() -> None:
    _, _, own = with_mtp(1024)
    with pytest.raises(EngineError, match="one token of this model has 8192 bytes, a ring takes 8191") as error:
        fitted(own, 8191)
    assert error.value.reason == "page-too-large"


def with_mtp(mtp_bytes: int, longest: int = 1 << 24, **facts: bool) -> tuple[ComponentSpec, ComponentSpec, EngineFacts]:
    kv = ComponentSpec(Component.ATTENTION_KV, True, (8192,))
    mtp = ComponentSpec(Component.MTP_KV, True, (mtp_bytes,), max_page_tokens=longest)
    schema = StateSchema("test", (kv, mtp))
    return kv, mtp, msgspec.structs.replace(FACTS, schema=schema, page_tokens=1024, **facts)


def test_bytes_count_the_last_short_page_and_pages_no_longer_than_the_component_allows() -> None:
    spec = ComponentSpec(
        Component.ATTENTION_KV, True, layer_bytes=(10, 20), layer_overhead=3, token_overhead=2, page_overhead=7,
        max_page_tokens=64,
    )  # fmt: skip
    page = 7 + 64 * 2 + (3 + 640) + (3 + 1280)
    short = 7 + 2 + (3 + 10) + (3 + 20)
    assert state_bytes(spec, 64, 256) == page
    assert state_bytes(spec, 129, 256) == 2 * page + short
    final = ComponentSpec(Component.RECURRENT, False, layer_bytes=(10, 20))
    assert state_bytes(final, 1 << 20, 256) == 30
