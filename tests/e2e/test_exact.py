"""A prompt prefilled on one host and continued on another gives the local run's logits, tokens and state, bit for bit
(V1, V3). A control, local against local, stands beside every comparison; tokens alone prove nothing."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.e2e.conftest import StartPair
from tests.e2e.pair import (
    CHUNK,
    OUTPUT,
    PAGE,
    Pair,
    ask,
    assert_disaggregated,
    assert_nothing_held,
    headers,
    new_key,
    prompt_of,
    proof_of,
    text_of,
)
from zerocopy.cli.hosts import Host, smollm2
from zerocopy.runtime import models

_ATTENTION: Final = {"attention KV"}
_SNAPSHOT: Final = {"recurrent state", "convolution state"}
_MTP: Final = {"MTP KV", "MTP hidden row"}
STATE: Final = {
    "llama": _ATTENTION,
    "gemma3": _ATTENTION,
    "mamba2": _SNAPSHOT,
    "nemotron_h": _ATTENTION | _SNAPSHOT,
    "nemotron_h_moe": _ATTENTION | _SNAPSHOT,
    "nemotron_h_moe+mtp": _ATTENTION | _SNAPSHOT | _MTP,
    "qwen35+mtp": _ATTENTION | _SNAPSHOT | _MTP,
}
# Prompt lengths; one token less travels. The shortest, one around a page's and a chunk's end, several chunks.
LENGTHS: Final = (2, 3, PAGE, PAGE + 1, PAGE + 2, CHUNK + 1, 4 * CHUNK + 7)


@pytest.fixture(scope="module", params=models.FAMILIES)
def family_pair(request: pytest.FixtureRequest, start_pair: StartPair, transport: str) -> Iterator[tuple[str, Pair]]:
    with start_pair(request.param, transport=transport) as pair:
        yield request.param, pair


@pytest.mark.parametrize("length", LENGTHS)
def test_a_disaggregated_run_equals_a_local_one_bit_for_bit(family_pair: tuple[str, Pair], length: int) -> None:
    family, pair = family_pair
    key, prompt = new_key(), prompt_of(length)
    local, control, moved = (ask(pair.decoder, prompt, mode, key=key) for mode in ("local", "local", "disaggregated"))
    assert proof_of(local) == proof_of(control), "control: the same host twice"
    assert proof_of(local) == proof_of(moved)
    assert text_of(local) == text_of(moved)
    assert proof_of(local)["state"].keys() == STATE[family]
    assert (proof_of(local)["mtp_logits"] is not None) == ("MTP KV" in STATE[family])
    assert moved.body["timings"]["handoff"]["transport"] == pair.transport
    _check_handoff(family, moved, length)


def _check_handoff(family: str, moved: Any, length: int) -> None:
    assert_disaggregated(moved)
    timings = moved.body["timings"]
    assert timings["prompt_tokens_evaluated_here"] == 1  # from the engine's own counters
    assert moved.body["usage"]["prompt_tokens"] == length
    handoff = timings["handoff"]
    assert handoff["probe"] == "bit-equal"
    sizes = {item["name"]: item["bytes"] for item in handoff["components"]}
    assert sizes.keys() == STATE[family] | {"token history", "continuation probe"}
    assert all(sizes.values())
    assert sizes["token history"] == 4 * (length - 1)
    paged = [item for item in handoff["components"] if item["name"].endswith("KV")]
    assert all(item["pages"] == -(-(length - 1) // PAGE) for item in paged)


def test_nothing_is_held_after_many_handoffs(family_pair: tuple[str, Pair]) -> None:
    assert_nothing_held(family_pair[1].prefiller, family_pair[1].decoder)


# -- the proof itself ------------------------------------------------------------------------------------------


def test_the_proof_tells_prompts_and_keys_apart(pair: Pair) -> None:
    """X4: digests under another key have nothing in common, so they link no two requests."""
    key = new_key()
    proof = proof_of(ask(pair.decoder, prompt_of(70), "local", key=key))
    other_prompt = proof_of(ask(pair.decoder, [*prompt_of(70)[:-2], 5, 6], "local", key=key))
    other_key = proof_of(ask(pair.decoder, prompt_of(70), "local", key=new_key()))
    for other in (other_prompt, other_key):
        assert not _digests(proof) & _digests(other)


def test_the_proof_shows_one_token_of_difference_in_every_component(pair: Pair) -> None:
    key, prompt = new_key(), prompt_of(70)
    first, second = (proof_of(ask(pair.decoder, [token, *prompt], "local", key=key)) for token in (1, 2))
    assert first["state"].keys() == second["state"].keys() == STATE["nemotron_h_moe+mtp"]
    assert all(first["state"][name] != second["state"][name] for name in first["state"])


def _digests(proof: dict[str, Any]) -> set[str]:
    return {proof["tokens"], proof["mtp_logits"], *proof["logits"], *proof["state"].values(),
            *proof["final_state"].values()}  # fmt: skip


# -- other ways to ask -----------------------------------------------------------------------------------------


def test_a_stream_carries_the_same_text(pair: Pair) -> None:
    prompt = prompt_of(150)
    whole = ask(pair.decoder, prompt, "disaggregated")
    got, text = _stream(pair.decoder, {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0})
    assert got["x-zc-placement"] == "disaggregated"
    assert text == text_of(whole) == text_of(ask(pair.decoder, prompt, "local"))


def test_sampling_with_a_seed_is_the_same_on_both_placements(pair: Pair) -> None:
    how: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 7}
    local, moved = (ask(pair.decoder, prompt_of(80), mode, tokens=24, **how) for mode in ("local", "disaggregated"))
    greedy = ask(pair.decoder, prompt_of(80), "local", tokens=24)
    assert text_of(local) == text_of(moved) != text_of(greedy)


def test_the_prefill_hosts_front_door_gives_the_decoders_answer(pair: Pair) -> None:
    key, prompt = new_key(), prompt_of(130)
    for mode in ("local", "disaggregated"):
        here, there = (ask(host, prompt, mode, key=key) for host in (pair.decoder, pair.prefiller))
        assert there.headers["x-zc-placement"] == mode
        assert proof_of(here) == proof_of(there)
        assert text_of(here) == text_of(there)


def test_the_prefill_hosts_front_door_streams_too(pair: Pair) -> None:
    prompt = prompt_of(130)
    got, text = _stream(pair.prefiller, {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0})
    assert got["x-zc-placement"] == "disaggregated"
    assert text == text_of(ask(pair.decoder, prompt, "local"))


def test_both_hosts_say_that_they_serve(pair: Pair) -> None:
    for host in (pair.prefiller, pair.decoder):
        assert host.call("GET", "/ready").status == 200
        assert host.call("GET", "/v1/models").body["data"][0]["id"] == "tiny-nemotron_h_moe+mtp"


def test_a_prompt_of_one_token_has_no_state_to_hand_over(pair: Pair) -> None:
    denied = ask(pair.decoder, [5], "disaggregated")
    assert denied.status == 400 and "no state to hand off" in denied.body["error"]["message"]
    allowed = ask(pair.decoder, [5], "disaggregated", fallback="allow")
    assert text_of(allowed) == text_of(ask(pair.decoder, [5], "local"))
    assert allowed.headers["x-zc-placement"] == "local"
    assert "no state to hand off" in allowed.headers["x-zc-fallback"]


def test_real_weights_chat_the_same_on_both_placements(start_pair: StartPair, transport: str) -> None:
    """SmolLM2-135M with its own template and tokenizer."""
    messages = [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue? Explain it to a child, please."},
    ]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    small = ["--page-tokens", "8"]  # the pages of a real model have to fit these tests' rings
    with start_pair(model=smollm2(), transport=transport, prefill_flags=small, decode_flags=small) as pair:
        key = new_key()
        local, moved = (
            pair.decoder.call("POST", "/v1/chat/completions", body, headers(mode, key=key))
            for mode in ("local", "disaggregated")
        )
        assert_disaggregated(moved)
        assert proof_of(local) == proof_of(moved)
        contents = [answer.body["choices"][0]["message"]["content"] for answer in (local, moved)]
        assert contents[0] == contents[1] and contents[0].strip()


def _stream(host: Host, body: dict[str, object]) -> tuple[dict[str, str], str]:
    """Headers and joined text of a streamed completion that ended as it should."""
    connection = http.client.HTTPConnection("127.0.0.1", host.http_port, timeout=60)
    wanted = {"content-type": "application/json", **headers("disaggregated")}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), wanted)
    response = connection.getresponse()
    events = [line.removeprefix("data: ") for line in response.read().decode().splitlines() if line]
    got = {name.lower(): value for name, value in response.getheaders()}
    connection.close()
    assert response.status == 200 and events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return got, "".join(chunk["choices"][0]["text"] for chunk in chunks)
