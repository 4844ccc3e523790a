"""Iterations in simulated time: who is evaluated when, how long anybody waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from zerocopy.worker.scheduler import (
    LEFT_OUT,
    MIN_COPY_S,
    MIN_SHARE,
    QUIET_COPY_S,
    TILE,
    Scheduler,
    Waiting,
    copy_seconds,
)

CHUNK = 256


@dataclass
class Simulation:
    """Prompts that arrive at iterations; an iteration evaluates what the scheduler chooses."""

    arrivals: list[tuple[int, int]]  # (iteration, tokens), in order of arrival
    served: dict[int, list[int]] = field(default_factory=dict)  # key: iterations in which it had a slice
    done: dict[int, int] = field(default_factory=dict)

    def run(self, iterations: int) -> None:
        left = {key: tokens for key, (_, tokens) in enumerate(self.arrivals)}
        scheduler = Scheduler(CHUNK)
        for now in range(iterations):
            waiting = [
                Waiting(key, key, self.arrivals[key][1] - left[key], min(CHUNK, left[key]), left[key])
                for key, (arrived, _) in enumerate(self.arrivals)
                if arrived <= now and left[key]
            ]
            chosen = scheduler.slices(waiting)
            assert len({key for key, _ in chosen}) == len(chosen)
            full = min(CHUNK, sum(prompt.slice_tokens for prompt in waiting))
            assert full - LEFT_OUT * CHUNK <= sum(tokens for _, tokens in chosen) <= full
            for key, tokens in chosen:
                assert 0 < tokens <= left[key]
                left[key] -= tokens
                self.served.setdefault(key, []).append(now)
                if not left[key]:
                    self.done[key] = now


def test_a_lone_prompt_gets_every_iteration() -> None:
    """So a lone prompt is evaluated in the chunks that it always was: exactness."""
    play = Simulation([(0, 5 * CHUNK + 7)])
    play.run(10)
    assert play.served[0] == [0, 1, 2, 3, 4, 5]


def test_prompts_of_one_length_are_served_in_order_of_arrival() -> None:
    play = Simulation([(0, CHUNK)] * 5)
    play.run(5)
    assert [play.done[key] for key in range(5)] == [0, 1, 2, 3, 4]


def test_short_prompts_share_an_iteration() -> None:
    play = Simulation([(0, 60)] * 5)
    play.run(2)
    assert [play.done[key] for key in range(5)] == [0, 0, 0, 0, 1]


def test_a_call_is_filled_with_the_beginning_of_the_next_prompt() -> None:
    """Two prompts of one and a half chunks take three calls, not four."""
    play = Simulation([(0, CHUNK * 3 // 2)] * 2)
    play.run(3)
    assert sorted(play.done.values()) == [1, 2]


def test_a_cut_slice_leaves_a_few_tokens_out_so_that_the_next_begins_with_a_tile_of_attention() -> None:
    """Every second prompt began at a token that nothing else divides by, and its calls took 2% longer."""
    whole = 6 * TILE - 1
    scheduler, left, calls = Scheduler(CHUNK), dict.fromkeys(range(6), whole), 0
    while any(left.values()):
        waiting = [Waiting(key, key, whole - n, min(CHUNK, n), n) for key, n in left.items() if n]
        for key, tokens in scheduler.slices(waiting):
            left[key] -= tokens
            assert not left[key] or (whole - left[key]) % TILE == 0
        calls += 1
    assert calls == -(-6 * whole // CHUNK), "no call more than when each was full"


def test_tokens_are_left_out_only_where_that_costs_little_and_never_all() -> None:
    lone = Waiting(1, 1, 0, 4 * CHUNK, 4 * CHUNK)
    assert Scheduler(TILE + 4).slices([lone]) == [(1, TILE)]
    assert Scheduler(TILE + 5).slices([lone]) == [(1, TILE + 5)], "5 are more than a sixteenth of 69"
    assert Scheduler(3).slices([lone]) == [(1, 3)], "a prompt never starves"
    short, long = Waiting(1, 1, 0, CHUNK - 2, CHUNK - 2), Waiting(2, 2, 0, CHUNK, CHUNK)
    assert Scheduler(CHUNK).slices([short, long]) == [(1, CHUNK - 2)], "two tokens would put the second off its tiles"


def test_sequences_that_generate_take_their_tokens_from_the_budget() -> None:
    assert Scheduler(CHUNK).slices([Waiting(1, 1, 0, CHUNK, CHUNK)], generating=6) == [(1, CHUNK - 6)]
    assert Scheduler(4).slices([Waiting(1, 1, 0, 4, 4)], generating=9) == [(1, 1)], "a prompt never starves"


def test_a_slice_that_must_stay_whole_waits_for_a_call_that_it_fits() -> None:
    scheduler = Scheduler(CHUNK)
    first, second = Waiting(1, 1, 0, 100, 100), Waiting(2, 2, 0, CHUNK, CHUNK, whole=True)
    assert scheduler.slices([first, second]) == [(1, 100)]
    assert scheduler.slices([second], generating=6) == [(2, CHUNK)]


def test_a_short_prompt_does_not_wait_for_a_huge_one() -> None:
    """H5: no handoff blocks another, also not by its size."""
    play = Simulation([(0, 400 * CHUNK), (10, 2 * CHUNK)])
    play.run(400)
    assert play.done[1] <= 14


def test_a_huge_prompt_is_not_starved_by_short_ones_that_keep_coming() -> None:
    """Q1."""
    play = Simulation([(0, 50 * CHUNK), *((n, CHUNK) for n in range(1, 200))])
    play.run(150)
    assert play.done[0] <= 100


def test_priority_goes_before_arrival() -> None:
    scheduler = Scheduler(CHUNK)
    waiting = [Waiting(1, 1, 0, CHUNK, CHUNK, priority=1), Waiting(2, 2, 0, CHUNK, 9 * CHUNK, priority=0)]
    assert [scheduler.slices(waiting) for _ in range(4)] == [[(2, CHUNK)]] * 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6 * CHUNK)), min_size=1, max_size=20))
def test_the_oldest_prompt_gets_at_least_every_other_iteration(arrivals: list[tuple[int, int]]) -> None:
    """Q1: so every prompt's end is bounded, whatever comes after it."""
    play = Simulation(sorted(arrivals))
    total = sum(-(-tokens // CHUNK) for _, tokens in arrivals)
    play.run(31 + 2 * total)
    assert len(play.done) == len(arrivals)
    before = 0
    for key, (arrived, tokens) in enumerate(play.arrivals):
        before += -(-tokens // CHUNK)
        assert play.done[key] <= arrived + 2 * before + 1


def calls(scheduler: Scheduler, prompts: int, *, cells: int, beside: int, count: int) -> list[tuple[int, float]]:
    """(tokens, seconds) of calls for so many long prompts at their beginning, by an engine whose shared cache holds so
    many cells: a token takes 3 ms and 0.3 us for every cell, a call 10 ms beside that."""
    made = []
    for _ in range(count):
        waiting = [Waiting(key, key, 0, CHUNK, 100 * CHUNK) for key in range(prompts)]
        tokens = sum(tokens for _, tokens in scheduler.slices(waiting, generating=beside))
        made.append((tokens, 0.01 + (tokens + beside) * (0.003 + 3e-7 * cells)))
        scheduler.took(made[-1][1], tokens, beside=beside, beginning=prompts == 1)
    return made


def test_a_gap_is_as_long_as_a_lone_chunk_takes_whatever_the_cache_holds() -> None:
    """Q1: cells of others make a prompt's tokens slow; those who generate would wait all that time."""
    scheduler = Scheduler(CHUNK)
    [(_, alone)] = calls(scheduler, 1, cells=0, beside=0, count=1)
    for cells in (1_000, 4_000, 20_000, 4_000, 0):
        tokens, seconds = calls(scheduler, 3, cells=cells, beside=7, count=5)[-1]
        assert 0.9 * alone < seconds < 1.1 * alone, f"{cells} cells"
    assert tokens > 0.95 * CHUNK - 7, "the cut outlived its reason"


def test_a_prompt_goes_on_at_a_quarter_of_the_budget_however_slow_a_call_is() -> None:
    """Q1: a prompt never starves."""
    scheduler = Scheduler(CHUNK)
    calls(scheduler, 1, cells=0, beside=0, count=1)
    assert calls(scheduler, 3, cells=500_000, beside=7, count=5)[-1][0] == MIN_SHARE * CHUNK - 7
    [(tokens, _)] = calls(scheduler, 3, cells=500_000, beside=0, count=1)
    assert tokens == CHUNK, "nobody waits for a token"


def test_only_a_whole_chunk_alone_at_its_beginning_says_what_one_takes() -> None:
    """Others' cells, a prompt's own, or a call's fixed cost would make the bound as long as what it bounds."""
    for tokens, beginning in ((CHUNK, False), (CHUNK // 8, True), (CHUNK // 2, True)):
        scheduler = Scheduler(CHUNK)
        calls(scheduler, 1, cells=0, beside=0, count=1)
        scheduler.took(0.02 * tokens, tokens, beside=0, beginning=beginning)
        assert calls(scheduler, 3, cells=20_000, beside=7, count=5)[-1][0] < 0.5 * CHUNK, (tokens, beginning)


def test_calls_of_few_tokens_and_clocks_that_stand_still_change_nothing() -> None:
    prompt = Waiting(1, 1, 0, CHUNK, CHUNK)
    for tokens, seconds in ((1, 0.5), (CHUNK // 8, 0.5), (CHUNK, 0.0)):
        scheduler = Scheduler(CHUNK)
        calls(scheduler, 1, cells=0, beside=0, count=1)
        scheduler.took(seconds, tokens, beside=7, beginning=False)
        assert scheduler.slices([prompt], generating=7) == [(1, CHUNK - 7)], (tokens, seconds)


def test_copying_takes_a_share_of_a_gap_while_somebody_waits_for_tokens() -> None:
    """A gap with copying stays below twice the gap without it."""
    for engine_s in (0.004, 0.02, 0.3):
        assert engine_s + copy_seconds(engine_s, generating=True) < 2 * engine_s
    assert copy_seconds(0.0, generating=True) == MIN_COPY_S
    assert copy_seconds(0.3, generating=False) == QUIET_COPY_S
