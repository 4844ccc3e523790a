"""The transition table says what it should, and blames the right side."""

from __future__ import annotations

import pytest

from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError
from zerocopy.handoff.states import INITIAL, OVER, REMOTE, TRANSITIONS, Event, Role, State, advance

ROLES = list(Role)
EVERYTHING = [(r, s, e) for r in Role for s in TRANSITIONS[r] for e in Event]


@pytest.mark.parametrize(("role", "state", "event"), EVERYTHING)
def test_an_event_is_in_the_table_or_somebodys_fault(role: Role, state: State, event: Event) -> None:
    following = TRANSITIONS[role][state].get(event)
    if following is not None:
        assert advance(role, state, event) is following
        return
    fault = RemoteProtocolError if event in REMOTE[role] else LocalProtocolError
    with pytest.raises(
        fault, match=f"{event.value} while the {role.value} of this handoff was {state.value}"
    ) as caught:
        advance(role, state, event)
    assert caught.value.reason == "out-of-order"


def reachable(role: Role, start: State) -> set[State]:
    seen, todo = set[State](), [start]
    while todo:
        if (state := todo.pop()) not in seen:
            seen.add(state)
            todo += TRANSITIONS[role][state].values()
    return seen


@pytest.mark.parametrize("role", ROLES)
def test_there_is_one_outcome_and_it_cannot_be_changed(role: Role) -> None:
    assert State.ABORTED not in reachable(role, State.COMMITTED)
    assert State.COMMITTED not in reachable(role, State.ABORTED)
    assert TRANSITIONS[role][State.RELEASED] == {}


@pytest.mark.parametrize("role", ROLES)
def test_every_state_can_be_reached_and_leads_to_release(role: Role) -> None:
    assert reachable(role, INITIAL[role]) == set(TRANSITIONS[role])
    for state in TRANSITIONS[role]:
        assert State.RELEASED in reachable(role, state)


@pytest.mark.parametrize("role", ROLES)
def test_it_can_be_cancelled_at_every_step_before_its_end(role: Role) -> None:
    """H7."""
    for state in set(TRANSITIONS[role]) - OVER:
        assert advance(role, state, Event.FAIL) is State.ABORTED


@pytest.mark.parametrize("role", ROLES)
def test_the_peer_can_call_it_off_at_every_step_it_knows_of(role: Role) -> None:
    for state in set(TRANSITIONS[role]) - OVER - {State.MINTED}:
        assert advance(role, state, Event.ABORT) is State.ABORTED


def test_only_a_sealed_handoff_commits() -> None:
    """H3: the manifest comes first."""
    for role in ROLES:
        committing = [s for s in TRANSITIONS[role] if State.COMMITTED in TRANSITIONS[role][s].values()]
        assert committing == [State.SEALED]


def test_the_sink_decides_and_the_source_only_hears_of_it() -> None:
    assert Event.COMMIT_ACK in REMOTE[Role.SOURCE]
    assert Event.COMMIT_ACK not in REMOTE[Role.SINK]


def test_memory_is_given_back_only_after_an_outcome() -> None:
    for role in ROLES:
        draining = {s for s, events in TRANSITIONS[role].items() if Event.DRAINED in events}
        assert draining == {State.COMMITTED, State.ABORTED}


def test_no_page_moves_before_grant() -> None:
    for role in ROLES:
        assert {s for s, events in TRANSITIONS[role].items() if Event.PAGE in events} <= {State.STREAMING, State.SEALED}
