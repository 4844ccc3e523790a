"""Lanes and cells: who gets them in which order, who waits how long, what is refused (Q2, G3)."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from tests.daemon.front_door import on_uvloop
from zerocopy.daemon.admission import Admission, Refused, Ticket


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def line(sequences: int = 2, tokens: int = 100, **settings: object) -> tuple[Admission, Clock]:
    clock = Clock()
    admission = Admission(**({"waiting": 8, "wait_s": 30.0, "clock": clock} | settings))  # type: ignore[arg-type]
    admission.open(sequences, tokens)
    return admission, clock


def has_a_lane(ticket: Ticket) -> bool:
    return ticket.granted.done() and not ticket.granted.cancelled()


@on_uvloop
async def test_lanes_are_given_from_the_first_on_and_come_back() -> None:
    """A request that is alone is always on lane 0, in cells from 0 on."""
    admission, _ = line(sequences=3)
    tickets = [admission.ask("", 10) for _ in range(3)]
    assert [ticket.lane for ticket in tickets] == [0, 1, 2]
    admission.give_back(tickets[2])
    admission.give_back(tickets[0])
    assert admission.ask("", 10).lane == 0


@on_uvloop
async def test_a_request_waits_until_all_it_can_need_is_free() -> None:
    """Q2: not only until there is a lane."""
    admission, _ = line()
    first, second = admission.ask("", 60), admission.ask("", 41)
    assert has_a_lane(first) and not has_a_lane(second)
    admission.give_back(first)
    assert has_a_lane(second)


@on_uvloop
async def test_with_room_for_one_and_a_half_four_large_requests_all_get_their_turn() -> None:
    admission, _ = line(sequences=4, tokens=150)
    waiting = [admission.ask("", 100) for _ in range(4)]
    order = []
    while waiting:
        (running,) = [ticket for ticket in waiting if has_a_lane(ticket)]
        order.append(running)
        waiting.remove(running)
        admission.give_back(running)
    assert len(order) == 4


@on_uvloop
async def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    """So it is never starved."""
    admission, _ = line(sequences=4)
    first = admission.ask("", 60)
    large, small = admission.ask("", 90), admission.ask("", 5)
    assert not has_a_lane(large) and not has_a_lane(small)
    admission.give_back(first)
    assert has_a_lane(large) and has_a_lane(small)


@on_uvloop
async def test_what_can_never_fit_is_refused_at_once_with_both_figures() -> None:
    admission, _ = line()
    with pytest.raises(Refused, match="needs 101 tokens of context, this host has 100") as refused:
        admission.ask("", 101)
    assert (refused.value.reason, refused.value.retry_after_s) == ("too-large", None)


@on_uvloop
async def test_the_line_has_an_end() -> None:
    admission, _ = line(sequences=1, waiting=2)
    tickets = [admission.ask("", 1) for _ in range(3)]
    with pytest.raises(Refused) as refused:
        admission.ask("", 1)
    assert refused.value.reason == "queue-full" and refused.value.retry_after_s
    admission.give_back(tickets[1])  # gave up waiting
    admission.ask("", 1)


@on_uvloop
async def test_without_a_line_a_free_lane_is_still_given() -> None:
    admission, _ = line(sequences=1, waiting=0)
    assert has_a_lane(admission.ask("", 1))
    with pytest.raises(Refused, match="0 requests are waiting"):
        admission.ask("", 1)
    assert admission.use().waiting == 0


@on_uvloop
async def test_a_tenant_cannot_fill_the_line_for_the_others() -> None:
    admission, _ = line(sequences=1, tenant_requests=3)
    mine = [admission.ask("greedy", 1) for _ in range(3)]
    with pytest.raises(Refused) as refused:
        admission.ask("greedy", 1)
    assert refused.value.reason == "tenant-limit"
    assert "3 requests of this API key" in str(refused.value)
    admission.ask("modest", 1)
    for ticket in mine:
        admission.give_back(ticket)
    admission.ask("greedy", 1)


@on_uvloop
async def test_who_has_no_key_is_not_told_of_one() -> None:
    admission, _ = line(sequences=1, tenant_requests=1)
    admission.ask("", 1)
    with pytest.raises(Refused, match=r"1 requests without a tenant's API key .*--tenant-requests"):
        admission.ask("", 1)


@on_uvloop
async def test_a_group_that_has_its_share_lets_others_pass() -> None:
    """H5: a peer that stands still never holds every place."""
    admission, _ = line(sequences=3, share=lambda sequences: sequences - 1)
    stuck = [admission.ask("", 1, "slow") for _ in range(4)]
    other = admission.ask("", 1, "fast")
    assert [has_a_lane(ticket) for ticket in stuck] == [True, True, False, False]
    assert has_a_lane(other)
    admission.leave_group(stuck[0])  # its state has come: it depends on that peer no more
    admission.give_back(other)
    assert has_a_lane(stuck[2]) and not has_a_lane(stuck[3])


@on_uvloop
async def test_a_share_is_at_least_one() -> None:
    admission, _ = line(sequences=1, share=lambda sequences: sequences - 1)
    assert has_a_lane(admission.ask("", 1, "only"))


@on_uvloop
async def test_who_would_wait_too_long_is_told_at_once() -> None:
    """Refused within a second or served within the deadline: nothing in between."""
    admission, clock = line(sequences=1, waiting=1000, wait_s=10.0)
    running = admission.ask("", 1)
    for _ in range(30):  # a turn takes 2 s
        ticket = admission.ask("", 1)
        clock.now += 2.0
        admission.give_back(running)
        running = ticket
    accepted = 0
    with pytest.raises(Refused) as refused:
        for _ in range(100):
            admission.ask("", 1)
            accepted += 1
    assert refused.value.reason == "queue-full"
    assert 2 <= accepted <= 5  # five turns fit ten seconds, as long as the host becomes no slower


@on_uvloop
async def test_a_place_given_back_twice_counts_once() -> None:
    admission, _ = line()
    ticket = admission.ask("", 10)
    admission.give_back(ticket)
    admission.give_back(ticket)
    assert (admission.use().held_sequences, admission.use().held_tokens) == (0, 0)
    assert [admission.ask("", 1).lane for _ in range(2)] == [0, 1]


@on_uvloop
async def test_one_that_gives_up_waiting_wakes_those_behind_it() -> None:
    admission, _ = line()
    admission.ask("", 60)
    large, small = admission.ask("", 90), admission.ask("", 5)
    admission.give_back(large)
    assert has_a_lane(small)
    with pytest.raises(asyncio.CancelledError):
        await large.granted


@on_uvloop
async def test_a_restarted_engine_changes_nothing_for_those_who_wait() -> None:
    admission, _ = line(sequences=1)
    admission.ask("", 1)
    admission.open(1, 100)
    assert not has_a_lane(admission.ask("", 1))


@on_uvloop
async def test_requests_that_find_a_lane_free_say_nothing_of_how_long_a_turn_takes() -> None:
    admission, clock = line(sequences=1, waiting=1000, wait_s=40.0)
    for _ in range(100):
        ticket = admission.ask("", None)
        clock.now += 0.01  # its prompt is tokenized
        admission.measured(ticket, 1, None)
        admission.give_back(ticket)
    running = admission.ask("", 1)
    for _ in range(10):  # a turn takes 2 s
        ticket = admission.ask("", 1)
        clock.now += 2.0
        admission.give_back(running)
        running = ticket
    accepted = 0
    with contextlib.suppress(Refused):
        while accepted < 100:
            admission.ask("", 1)
            accepted += 1
    assert 5 < accepted <= 20  # twenty turns fit forty seconds


@pytest.mark.parametrize("seed", range(5))
@on_uvloop
async def test_turns_of_very_different_length_still_come_in_time_for_all_who_wait(seed: int) -> None:
    """Ten times what can be served: whoever is not refused has a lane within the allowed wait."""
    rng = random.Random(seed)
    admission, clock = line(sequences=1, waiting=1000, wait_s=30.0)
    running, queue, waits = admission.ask("", 1), list[tuple[Ticket, float, int]](), list[float]()
    for turn in range(500):
        for _ in range(10):
            with contextlib.suppress(Refused):
                queue.append((admission.ask("", 1), clock.now, turn))
        clock.now += rng.expovariate(1.0)
        admission.give_back(running)
        running, asked, since = queue.pop(0)
        if since >= 30:  # before, too few turns were over to know what one takes
            waits.append(clock.now - asked)
    assert len(waits) > 300 and 10.0 < max(waits) <= 30.0


@on_uvloop
async def test_a_host_that_becomes_half_as_fast_again_keeps_its_word_to_those_in_line() -> None:
    """Turns of equal length have no spread that would tell of it."""
    admission, clock = line(sequences=1, waiting=1000, wait_s=30.0)
    running, queue, waits = admission.ask("", 1), list[tuple[Ticket, float]](), list[float]()
    for turn in range(200):
        for _ in range(10):
            with contextlib.suppress(Refused):
                queue.append((admission.ask("", 1), clock.now))
        clock.now += 1.0 if turn < 100 else 1.5
        admission.give_back(running)
        running, asked = queue.pop(0)
        if turn >= 100:
            waits.append(clock.now - asked)
    assert 15.0 < max(waits) <= 30.0


@on_uvloop
async def test_one_whose_prompt_is_still_text_keeps_its_place_and_lets_others_pass() -> None:
    admission, _ = line(sequences=1)
    text, other = admission.ask("", None), admission.ask("", 10)
    assert has_a_lane(other) and not has_a_lane(text)
    late = admission.ask("", 10)
    admission.measured(text, 20, None)
    admission.give_back(other)
    assert has_a_lane(text) and not has_a_lane(late)
    assert admission.use().held_tokens == 20


@on_uvloop
async def test_one_whose_prompt_is_still_text_is_let_in_where_nobody_may_wait_and_a_lane_is_free() -> None:
    admission, _ = line(sequences=1, waiting=0)
    text = admission.ask("", None)
    with pytest.raises(Refused):
        admission.ask("", None)
    admission.measured(text, 5, None)
    assert has_a_lane(text)


@pytest.mark.parametrize("seed", range(20))
@on_uvloop
async def test_whatever_comes_and_goes_nothing_is_lent_twice_and_nothing_is_lost(seed: int) -> None:
    """Sequences, cells and places come back whole (G6)."""
    rng = random.Random(seed)
    admission, clock = line(sequences=4, waiting=20, tenant_requests=9, share=lambda n: n - 1)
    tickets: list[Ticket] = []
    for _ in range(400):
        clock.now += rng.random()
        if tickets and rng.random() < 0.5:
            admission.give_back(tickets.pop(rng.randrange(len(tickets))))
        else:
            try:
                group = rng.choice([None, "a", "b"])
                tickets.append(admission.ask(rng.choice("xyz"), rng.randint(1, 100), group))
            except Refused:
                continue
        held = [ticket for ticket in tickets if has_a_lane(ticket)]
        assert len({ticket.lane for ticket in held}) == len(held) <= 4
        assert sum(ticket.tokens for ticket in held) <= 100
        assert held or not tickets, "somebody waits for nobody"
    for ticket in tickets:
        admission.give_back(ticket)
    use = admission.use()
    assert (use.held_sequences, use.held_tokens, use.waiting, use.held) == (0, 0, 0, [])
    assert not admission._tenants
    assert sorted(admission._free) == [0, 1, 2, 3]
