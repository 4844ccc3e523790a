from __future__ import annotations

import pytest

from planner.placement import MIN_HANDOFF_TOKENS, Decision, Mode, Prefiller, choose

READY = Prefiller("p1", None)
DOWN = Prefiller("p2", "its engine is not up")


@pytest.mark.parametrize("allow", [True, False])
@pytest.mark.parametrize("peers", [(), (READY,), (DOWN,)])
def test_local_is_local_whatever_the_peers(peers: tuple[Prefiller, ...], allow: bool) -> None:
    decision = choose("local", 100, peers, allow_fallback=allow)
    assert decision == Decision("local", None, "local placement was asked for")


@pytest.mark.parametrize("allow", [True, False])
def test_a_usable_prefiller_is_used(allow: bool) -> None:
    decision = choose("disaggregated", 100, [DOWN, READY], allow_fallback=allow)
    assert (decision.placement, decision.prefiller) == ("disaggregated", "p1")
    assert (decision.fallback_reason, decision.refused, decision.obstacle) == (None, None, None)
    assert decision.explanation == "p1 is connected and matches this host's engine"


def test_the_prefiller_with_the_shortest_queue_is_used_and_names_break_ties() -> None:
    peers = [Prefiller("c", None, 2), Prefiller("b", None, 1), Prefiller("a", None, 1), Prefiller("d", "gone", 0)]
    assert choose("disaggregated", 100, peers, allow_fallback=True).prefiller == "a"


@pytest.mark.parametrize(
    ("peers", "why"),
    [
        ((), "no peer is configured"),
        ((DOWN,), "p2: its engine is not up"),
        ((DOWN, Prefiller("p3", "not connected yet")), "p2: its engine is not up; p3: not connected yet"),
    ],
)
def test_with_no_usable_prefiller_the_request_falls_back_or_is_refused_naming_every_obstacle(
    peers: tuple[Prefiller, ...], why: str
) -> None:
    """L5, G3."""
    allowed = choose("disaggregated", 100, peers, allow_fallback=True)
    assert (allowed.placement, allowed.prefiller, allowed.refused) == ("local", None, None)
    assert allowed.fallback_reason == f"no usable prefiller ({why})"
    assert allowed.explanation == f"local because no usable prefiller ({why})"
    assert allowed.obstacle == "no-prefiller"
    denied = choose("disaggregated", 100, peers, allow_fallback=False)
    assert (denied.prefiller, denied.fallback_reason) == (None, None)
    assert (denied.refused, denied.obstacle) == (f"no usable prefiller ({why})", "no-prefiller")


@pytest.mark.parametrize(
    ("tokens", "placement"), [(0, "local"), (1, "local"), (MIN_HANDOFF_TOKENS, "disaggregated"), (3, "disaggregated")]
)
def test_a_prompt_without_a_state_to_hand_off_stays(tokens: int, placement: Mode) -> None:
    """The decoder evaluates the last token itself, so the first prompt with state has two."""
    decision = choose("disaggregated", tokens, [READY], allow_fallback=True)
    assert decision.placement == placement
    if placement == "local":
        assert f"a prompt of {tokens} token" in (decision.fallback_reason or "")
        assert decision.obstacle == "prompt-too-short"
        assert choose("disaggregated", tokens, [READY], allow_fallback=False).refused
