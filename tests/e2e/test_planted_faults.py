"""Faults planted in a test build of the source, for every component in turn (acceptance 7, H2, H3).

Each is tried twice: on a source whose own ledger looks at what its exporter made, and on a credulous one that sends
anything, so that the decoder stands alone. No request is ever answered from such a state: the client gets a typed
error, or, where it allows that, the local answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.e2e.conftest import StartPair
from tests.e2e.pair import (
    Pair,
    ask,
    assert_disaggregated,
    assert_nothing_held,
    assert_still_exact,
    error_of,
    metric,
    new_key,
    prompt_of,
    proof_of,
    text_of,
)

COMPONENTS: Final = (
    "attention KV",
    "recurrent state",
    "convolution state",
    "MTP KV",
    "MTP hidden row",
    "token history",
)
LENGTH: Final = 100  # four pages, two chunks

# What the decoder says by itself; a source that looks says some of it earlier, and then with its own reason.
REASONS: Final = {
    "omit": {"component-missing", "state-incomplete"},
    "cut": {"component-missing", "state-incomplete"},
    "truncate": {"page-size"},
    "swap": {"page-checksum", "page-range", "page-overlap"},  # by which page comes first
    "foreign-bytes": {"page-checksum"},
}
EARLY: Final = ("zero", "exchange", "foreign-early")


@pytest.fixture(scope="module", params=["careful", "credulous"])
def planted(request: pytest.FixtureRequest, start_pair: StartPair, transport: str) -> Iterator[Pair]:
    with start_pair(planted=[request.param], transport=transport) as pair:
        pair.scheme()
        assert_disaggregated(ask(pair.decoder, prompt_of(LENGTH, seed=1), "disaggregated"))  # the "other request"
        yield pair


@pytest.fixture(scope="module")
def trusting(start_pair: StartPair, transport: str) -> Iterator[Pair]:
    """Its decoder asks for no probe."""
    with start_pair(planted=["careful"], transport=transport, decode_flags=["--no-probe"]) as pair:
        yield pair


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("fault", REASONS)
def test_the_ledger_refuses_it_and_names_the_component(planted: Pair, fault: str, component: str) -> None:
    reason, message = _denied(planted, fault, component)
    assert reason in REASONS[fault]
    assert component in message
    _check_fallback(planted, REASONS[fault])


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_page_of_another_request_is_refused(planted: Pair, component: str) -> None:
    """Header and all. A careful source names it; alone, the decoder drops it like any late page, counts it, and
    refuses the state for the gap that it leaves."""
    late = metric(planted.decoder, "zc_late_pages_total")
    reason, message = _denied(planted, "foreign-page", component)
    if reason == "page-foreign":
        assert component in message
    else:
        assert reason == "page-sequence" and "a page before it is missing" in message
        assert metric(planted.decoder, "zc_late_pages_total") > late
    _check_fallback(planted, {"page-foreign", "page-sequence"})


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("fault", EARLY)
def test_wrong_numbers_under_a_right_checksum_are_refused(planted: Pair, fault: str, component: str) -> None:
    """No checksum can tell. The token history is compared with the prompt, all else by the continuation probe."""
    reason, _message = _denied(planted, fault, component)
    assert reason == ("token-history" if component == "token history" else "probe-mismatch")
    _check_fallback(planted, {reason})


def test_after_all_that_the_pair_is_still_exact(planted: Pair) -> None:
    planted.scheme()
    assert_still_exact(planted)
    assert planted.decoder.status()["worker"]["restarts"] == 0
    assert planted.prefiller.status()["worker"]["restarts"] == 0


@pytest.mark.parametrize("component", COMPONENTS[:-1])
def test_without_the_probe_a_zeroed_component_would_be_answered_from(trusting: Pair, component: str) -> None:
    """The tests above have power: it is the probe that refuses, and every component matters to the logits."""
    key, prompt = new_key(), prompt_of(LENGTH)
    local = ask(trusting.decoder, prompt, "local", key=key)
    trusting.scheme(fault="zero", component=component)
    moved = ask(trusting.decoder, prompt, "disaggregated", key=key)
    assert_disaggregated(moved)
    assert moved.body["timings"]["handoff"]["probe"] == "off"
    good, bad = proof_of(local), proof_of(moved)
    assert [name for name in good["state"] if good["state"][name] != bad["state"][name]] == [component]
    assert (good["logits"], good["mtp_logits"]) != (bad["logits"], bad["mtp_logits"])


def test_without_the_probe_a_right_state_is_still_exact(trusting: Pair) -> None:
    trusting.scheme()
    assert_still_exact(trusting)


@pytest.mark.parametrize("component", COMPONENTS[:-1])
def test_across_exactness_classes_the_tolerance_still_tells(across: Pair, component: str) -> None:
    across.scheme(fault="zero", component=component)
    assert error_of(ask(across.decoder, prompt_of(LENGTH), "disaggregated"))[0] == "probe-mismatch"


def test_across_exactness_classes_a_right_state_is_accepted(across: Pair) -> None:
    across.scheme()
    classes = {host.status()["engine"]["exactness"] for host in (across.prefiller, across.decoder)}
    assert len(classes) == 2
    moved = ask(across.decoder, prompt_of(LENGTH), "disaggregated")
    assert_disaggregated(moved)
    assert moved.body["timings"]["handoff"]["probe"] != "off"


@pytest.fixture(scope="module")
def across(start_pair: StartPair, transport: str) -> Iterator[Pair]:
    """The prefiller evaluates in other chunks, so the last bits may differ."""
    with start_pair(planted=["careful"], transport=transport, prefill_flags=["--chunk-tokens", "32"]) as pair:
        yield pair


def _denied(planted: Pair, fault: str, component: str) -> tuple[str, str]:
    planted.scheme(fault=fault, component=component)
    refused = ask(planted.decoder, prompt_of(LENGTH), "disaggregated")
    assert refused.status == 503
    assert_nothing_held(planted.prefiller, planted.decoder)
    return error_of(refused)


def _check_fallback(planted: Pair, reasons: set[str]) -> None:
    """The same fault again, for a client that allows fallback. Which host sees it first may differ from run to run."""
    key = new_key()
    fallen = ask(planted.decoder, prompt_of(LENGTH), "disaggregated", fallback="allow", key=key)
    assert fallen.headers["x-zc-placement"] == "local"
    assert fallen.headers["x-zc-fallback"] in reasons
    local = ask(planted.decoder, prompt_of(LENGTH), "local", key=key)
    assert proof_of(fallen) == proof_of(local)
    assert text_of(fallen) == text_of(local)
