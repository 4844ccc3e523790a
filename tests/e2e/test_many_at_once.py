"""Several requests at once on hosts with one lane are each answered as if they were alone, and everything is given back
(G3, G6). With several lanes others share the engine's calls: that is `test_serving`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from tests.e2e.conftest import ModelFile, StartPair
from tests.e2e.pair import (
    CHUNK,
    N_CTX,
    Pair,
    ask,
    assert_nothing_held,
    headers,
    metric,
    new_key,
    prompt_of,
    proof_of,
    send_only,
    text_of,
)
from zerocopy.cli.hosts import Answer, Host

AT_ONCE: Final = 8
ROUNDS: Final = 3


ONE: Final = ("--sequences", "1")


@pytest.fixture(scope="module")
def pair(start_pair: StartPair, transport: str) -> Iterator[Pair]:
    with start_pair(transport=transport, prefill_flags=ONE, decode_flags=ONE) as pair:
        yield pair


@pytest.fixture(scope="module")
def both_roles(start_pair: StartPair, transport: str) -> Iterator[Pair]:
    """Two hosts that prefill for each other."""
    roles = {"prefill_role": "prefill+decode", "decode_role": "prefill+decode"}
    with start_pair(**roles, transport=transport, prefill_flags=ONE, decode_flags=ONE) as pair:
        yield pair


@pytest.fixture(scope="module")
def narrow(start_pair: StartPair, model_file: ModelFile, transport: str) -> Iterator[Pair]:
    """One ring on each side, far smaller than one long prompt's state."""
    one = ["--rings", "1", *ONE]
    wide = model_file("llama", scale=4)
    with start_pair(model=wide, transport=transport, prefill_flags=one, decode_flags=one) as pair:
        yield pair


def _all_at_once(asked: list[tuple[Host, list[int], str]], key: str) -> list[Answer]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: ask(*one, key=key), asked))


def _shown(answer: Answer) -> tuple[str, dict[str, Any]]:
    return text_of(answer), proof_of(answer)


def test_eight_mixed_requests_are_answered_as_if_alone(pair: Pair) -> None:
    key = new_key()
    lengths = [2, 33, 64, 65, 100, 257, 400, 513]
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    alone = [_shown(ask(pair.decoder, prompt, "local", key=key)) for prompt in prompts]
    doors = (pair.decoder, pair.prefiller)
    for turn in range(ROUNDS):
        modes = ["disaggregated" if (n + turn) % 3 else "local" for n in range(AT_ONCE)]
        asked = [(doors[(n + turn) % 2], prompts[n], modes[n]) for n in range(AT_ONCE)]
        answers = _all_at_once(asked, key)
        assert [_shown(answer) for answer in answers] == alone
        assert [answer.headers["x-zc-placement"] for answer in answers] == modes
    assert_nothing_held(pair.prefiller, pair.decoder)
    assert metric(pair.decoder, "zc_late_pages_total") == 0


def test_two_hosts_that_prefill_for_each_other_do_not_wait_for_each_other(both_roles: Pair) -> None:
    """Each one's prefill lane serves the other while its own requests hold its decode lane."""
    key = new_key()
    prompts = [prompt_of(5 * CHUNK + n, n) for n in range(AT_ONCE)]
    alone = [_shown(ask(both_roles.decoder, prompt, "local", key=key)) for prompt in prompts]
    for _ in range(ROUNDS):
        hosts = (both_roles.decoder, both_roles.prefiller)
        asked = [(hosts[n % 2], prompts[n], "disaggregated") for n in range(AT_ONCE)]
        answers = _all_at_once(asked, key)
        assert [_shown(answer) for answer in answers] == alone
        assert [answer.headers["x-zc-prefiller"] for answer in answers] == ["prefiller", "decoder"] * (AT_ONCE // 2)
    assert_nothing_held(both_roles.prefiller, both_roles.decoder)


def test_four_long_prompts_pass_through_one_small_ring(narrow: Pair) -> None:
    """Field report: deadlock of buffers. The state is several times the ring, and there is one ring."""
    key = new_key()
    prompts = [prompt_of(N_CTX - 20 - n, n) for n in range(4)]
    alone = [_shown(ask(narrow.decoder, prompt, "local", key=key)) for prompt in prompts]
    answers = _all_at_once([(narrow.decoder, prompt, "disaggregated") for prompt in prompts], key)
    assert [_shown(answer) for answer in answers] == alone
    assert all(answer.body["timings"]["handoff"]["kv_bytes"] > 3 << 19 for answer in answers)
    assert_nothing_held(narrow.prefiller, narrow.decoder)


def test_a_request_stays_exact_while_others_come_and_leave(pair: Pair) -> None:
    """Field report: foreign state. Rings and lanes of the departed are used again at once."""
    key, prompt = new_key(), prompt_of(300)
    alone = _shown(ask(pair.decoder, prompt, "local", key=key))
    for turn in range(2 * AT_ONCE):
        body = {"prompt": prompt_of(300, seed=turn + 1), "max_tokens": 400}
        with send_only(pair.decoder, body, headers("disaggregated")):
            if turn % 2:
                pair.decoder.status()
        assert _shown(ask(pair.decoder, prompt, "disaggregated", key=key)) == alone
    assert_nothing_held(pair.prefiller, pair.decoder)
