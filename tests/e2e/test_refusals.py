"""Hosts that do not match: refused before any page, with both values named (acceptance 5, S8).

First as peers say it in HELLO, then as RESERVE says it, from a prefiller whose HELLO said otherwise: once refused by
the prefiller itself, once (when it does not look) by the decoder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.conftest import ModelFile, StartPair
from tests.e2e.pair import (
    ENGINE,
    Pair,
    ask,
    assert_disaggregated,
    assert_nothing_held,
    assert_still_exact,
    error_of,
    metric,
    prompt_of,
    text_of,
)
from zerocopy.cli.hosts import Host, Hosts
from zerocopy.handoff.components import Component
from zerocopy.runtime.synthetic import SUFFIX, Descriptor, write_descriptor

ENGINES: Final = "xllamacpp 2025.1.1, llama.cpp 0.5.0, blob 0.5"
TOKENIZER: Final = "00" * 32


@dataclass(frozen=True)
class Odd:
    """One prefiller that does not fit: its flags or claimed facts, and words the refusal must have."""

    flags: tuple[str, ...]
    facts: dict[str, str]
    field: str
    words: tuple[str, ...]
    seed: int = 0


ODD: Final = {
    "model": Odd((), {}, "model", ("decoder has model digest", "give both hosts the same model file"), seed=1),
    "tokenizer": Odd((), {"tokenizer": TOKENIZER}, "tokenizer", ("decoder has tokenizer digest",)),
    "kv": Odd(("--kv-type", "q8_0"), {}, "kv_type", ("decoder has KV type", "start both with the same --kv-type")),
    "flash": Odd(
        ("--flash-attention", "off"), {}, "flash_attention", ("decoder has flash attention on, prefiller off",)
    ),
    "engine": Odd((), {"engine": ENGINES}, "engine", ("decoder has engine", "install the same zc-handoff")),
    "schema": Odd(("--mtp", "off"), {}, "schema", ("decoder has state schema", "the same model, --mtp and context")),
}


@pytest.fixture(scope="module")
def crowd(
    tmp_path_factory: pytest.TempPathFactory, model_file: ModelFile, transport: str
) -> Iterator[tuple[Host, dict[str, Host]]]:
    """One decoder and a prefiller of every kind that does not fit it."""
    folder = tmp_path_factory.mktemp("crowd")
    with Hosts(folder) as hosts:
        prefillers = {}
        for name, odd in ODD.items():
            plan = folder / f"{name}.json"
            plan.write_text(json.dumps({"facts": odd.facts}))
            flags = ["--role", "prefill", "--model", str(model_file("nemotron_h_moe+mtp", seed=odd.seed)), *ENGINE]
            command = (sys.executable, "-m", "tests.e2e.host", str(plan))
            prefillers[name] = hosts.add(name, [*flags, *odd.flags], command=command)
        flags = ["--role", "decode", "--model", str(model_file("nemotron_h_moe+mtp")), *ENGINE]
        decoder = hosts.add("decoder", flags, peers=prefillers.values(), transport=transport)
        for host in (*prefillers.values(), decoder):
            host.start()
        for host in prefillers.values():
            host.wait_ready()
        decoder.wait_ready(connected_to=prefillers)
        yield decoder, prefillers


@pytest.mark.parametrize("name", ODD)
def test_hello_shows_the_difference_and_both_values(crowd: tuple[Host, dict[str, Host]], name: str) -> None:
    decoder, prefillers = crowd
    refused = ask(decoder, prompt_of(100), "disaggregated")
    code, message = error_of(refused)
    assert (refused.status, code) == (503, "no-prefiller")
    (sentence,) = [part for part in message.split("; ") if part.removeprefix("no usable prefiller (").startswith(name)]
    ours, theirs = (host.status()["engine"][ODD[name].field] for host in (decoder, prefillers[name]))
    assert ours != theirs
    for words in (ours, theirs, *ODD[name].words):
        assert words in sentence


def test_no_odd_prefiller_was_asked_for_anything(crowd: tuple[Host, dict[str, Host]]) -> None:
    decoder, prefillers = crowd
    fallen = ask(decoder, prompt_of(100), "disaggregated", fallback="allow")
    assert fallen.headers["x-zc-placement"] == "local"
    assert "decoder has KV type" in fallen.headers["x-zc-fallback"]
    assert text_of(fallen) == text_of(ask(decoder, prompt_of(100), "local"))
    for host in (decoder, *prefillers.values()):
        status = host.status()
        assert (status["recent_handoffs"], status["handoffs_out"], status["reserved_bytes"]) == ([], 0, 0)
        assert metric(host, "zc_handoff_bytes_total") == 0


# -- RESERVE ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["prefiller", "decoder"])
def changed(request: pytest.FixtureRequest, start_pair: StartPair, transport: str) -> Iterator[Pair]:
    """The prefiller says something else in RESERVE than in HELLO. `param` is who refuses."""
    words = ["odd"] if request.param == "prefiller" else ["odd", "unmatched"]
    with start_pair(planted=words, transport=transport) as pair:
        yield pair


IDENTITY: Final = {
    "model": ("model digest", "11" * 32),
    "tokenizer": ("tokenizer digest", TOKENIZER),
    "architecture": ("architecture", "llama"),
    "kv_type": ("KV type", "q8_0/q8_0"),
    "flash_attention": ("flash attention", "off"),
    "engine": ("engine", ENGINES),
    "schema": ("state schema", "nemotron_h_moe+mtp/2/0011223344556677"),
}


@pytest.mark.parametrize("field", IDENTITY)
def test_another_identity_in_reserve_is_refused_before_any_page(changed: Pair, field: str) -> None:
    name, value = IDENTITY[field]
    message = _refused(changed, "identity-mismatch", identity={field: value})
    ours = changed.decoder.status()["engine"][field]
    assert f"decoder has {name} {ours}, prefiller {value}: " in message


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"schema": {"version": 2}}, ("decoder has version 1, prefiller 2",)),
        ({"schema": {"position_planes": 4}}, ("decoder has position_planes 1, prefiller 4",)),
        ({"wider": "attention KV"}, ("attention KV: decoder has layer_bytes 2 layers of",)),
        ({"wider": "recurrent state"}, ("recurrent state: decoder has layer_bytes 2 layers of",)),
        ({"without": "convolution state"}, ("convolution state is present on the decoder, absent on the prefiller",)),
        ({"without": "MTP hidden row"}, ("MTP hidden row is present on the decoder, absent on the prefiller",)),
    ],
)
def test_another_schema_under_the_same_identity_is_refused(
    changed: Pair, plan: dict[str, Any], words: tuple[str, ...]
) -> None:
    message = _refused(changed, "identity-mismatch", **plan)
    assert all(word in message for word in words)


def test_a_component_that_reserve_does_not_announce_is_refused(changed: Pair) -> None:
    message = _refused(changed, "component-missing", announces_all=False)
    assert "prefiller does not offer" in message and Component.ATTENTION_KV.label in message


def test_a_prefiller_that_changes_back_is_used_again(changed: Pair) -> None:
    changed.scheme()
    assert_still_exact(changed)


def _refused(pair: Pair, reason: str, **plan: object) -> str:
    """The message of the refusal; no page has gone anywhere, nothing is held, and with fallback there is an answer."""
    pair.scheme(**plan)
    before = _moved(pair)
    refused = ask(pair.decoder, prompt_of(100), "disaggregated")
    assert refused.status == 503
    code, message = error_of(refused)
    assert code == reason
    fallen = ask(pair.decoder, prompt_of(100), "disaggregated", fallback="allow")
    assert fallen.headers["x-zc-fallback"] == reason
    assert text_of(fallen) == text_of(ask(pair.decoder, prompt_of(100), "local"))
    assert _moved(pair) == before
    assert_nothing_held(pair.prefiller, pair.decoder)
    for host in (pair.prefiller, pair.decoder):
        trace = host.status()["recent_handoffs"][-1]
        assert "granted" not in trace["marks"]
        assert trace["reason"] == reason  # also the one that was refused has heard why
    return message


def _moved(pair: Pair) -> list[float]:
    return [metric(host, "zc_handoff_bytes_total") for host in (pair.prefiller, pair.decoder)]


# -- sizes -----------------------------------------------------------------------------------------------------

BIG_PAGES: Final = ("--chunk-tokens", "512", "--page-tokens", "512")


def test_a_prefiller_makes_its_pages_fit_the_decoders_ring(start_pair: StartPair, transport: str) -> None:
    """Field report: page sizes."""
    flags = ["--page-tokens", "0", "--ring-mib", "8"]
    with start_pair("llama", transport=transport, prefill_flags=flags) as pair:
        assert_still_exact(pair, 1000)


@pytest.mark.parametrize("ring_mib", [8, 40])
def test_hosts_whose_rings_differ_need_no_setting_for_it(start_pair: StartPair, tmp_path: Path, ring_mib: int) -> None:
    """Pages of 8 MiB, and of 16 behind a full ring, are what a prefiller with a ring of 64 makes of this state."""
    model = tmp_path / f"large{SUFFIX}"
    write_descriptor(model, Descriptor("small"))  # 2 KiB a token
    engine = ["--n-ctx", "32768", "--chunk-tokens", "4096", "--rings", "1"]
    with start_pair(model=model, engine=engine, decode_flags=["--ring-mib", str(ring_mib)]) as pair:
        moved = ask(pair.decoder, prompt_of(24_000), "disaggregated")
        assert_disaggregated(moved)
        wire = pair.prefiller.trace(moved.body["timings"]["handoff"]["id"])["wire"]
        assert ring_mib << 17 < max(span[2] for span in wire if span[3] == "attention KV") < ring_mib << 18


def test_a_prefiller_makes_its_pages_fit_its_own_ring(start_pair: StartPair, transport: str) -> None:
    flags = {"prefill_flags": BIG_PAGES, "decode_flags": [*BIG_PAGES, "--ring-mib", "8"]}
    with start_pair("llama", transport=transport, **flags) as pair:
        assert_still_exact(pair, 600)
