from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.links import BETTER_BY, DEGRADED, FRESH_S, MAX_PATHS, REFERENCE_BYTES, Measurement, PathTable

NOW = 1000.0
GBIT = 1e9


def probe(table: PathTable, now: float = NOW, **gbps: float) -> None:
    for address, rate in gbps.items():
        table.probed(address, Measurement(now, 0.0001, rate * GBIT))


def test_the_fastest_path_wins_and_the_reason_shows_all_of_them() -> None:
    """T6."""
    table = PathTable(["slow", "fast"])
    table.use("slow")
    probe(table, slow=1, fast=10)
    choice = table.choose(NOW)
    assert (choice.address, choice.open) == ("fast", False)
    assert "fast: 64 MiB in 0.0539 s (10 Gb/s, RTT 0.1 ms); slow: 64 MiB in 0.537 s" in choice.explanation
    assert table.reason == choice.explanation


def test_an_address_that_is_withdrawn_while_it_is_dialled_may_still_answer() -> None:
    """It is in use then, like any other, until it is lost."""
    table = PathTable(["a", "b"])
    table.offer(["a"])
    table.use("b")
    assert (table.current, [path.address for path in table.all()]) == ("b", ["a", "b"])
    table.lost("link closed")
    table.offer(["a"])
    assert [path.address for path in table.all()] == ["a"]


def test_what_counts_is_bandwidth_and_round_trip_together() -> None:
    near, far = Measurement(NOW, 0.0002, 8 * GBIT), Measurement(NOW, 0.050, 10 * GBIT)
    assert near.seconds == pytest.approx(8 * REFERENCE_BYTES / (8 * GBIT) + 0.0004)
    table = PathTable(["near", "far"])
    table.probed("near", near)
    table.probed("far", far)
    assert table.choose(NOW).address == "near"


def test_the_first_to_answer_is_left_at_once_but_a_chosen_path_only_after_two_losses() -> None:
    table = PathTable(["a", "b"])
    table.use("a")
    probe(table, a=1, b=10)
    assert table.choose(NOW).address == "b"
    table.use("b", chosen=True)
    probe(table, a=10, b=1)
    first = table.choose(NOW)
    assert (first.address, first.open) == ("b", True)
    assert "kept until a is faster a second time" in first.explanation
    probe(table, a=10, b=1)
    assert table.choose(NOW).address == "a"


def test_one_good_round_between_two_losses_saves_the_current_path() -> None:
    table = PathTable(["a", "b"])
    table.use("a", chosen=True)
    for a, b in ((1, 10), (10, 10), (1, 10)):
        probe(table, a=a, b=b)
        assert table.choose(NOW).address == "a"


def test_two_different_challengers_do_not_add_up() -> None:
    table = PathTable(["a", "b", "c"])
    table.use("a", chosen=True)
    probe(table, a=1, b=10, c=1)
    assert table.choose(NOW).open
    probe(table, a=1, b=1, c=10)
    assert table.choose(NOW).address == "a"


@settings(max_examples=200)
@given(st.lists(st.tuples(st.floats(0.9, 1.1), st.floats(0.9, 1.1)), min_size=1, max_size=40), st.booleans())
def test_equal_paths_with_noise_never_flap(noise: list[tuple[float, float]], chosen: bool) -> None:
    table = PathTable(["a", "b"])
    table.use("a", chosen=chosen)
    for a, b in noise:
        probe(table, a=10 * a, b=10 * b)
        assert table.choose(NOW).address == "a"


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100), st.booleans()), min_size=1, max_size=40),
)
def test_a_change_is_always_to_a_much_faster_path(rounds: list[tuple[float, float, bool]]) -> None:
    table = PathTable(["a", "b"])
    table.use("a", chosen=True)
    rates = {"a": 0.0, "b": 0.0}
    for a, b, _ in rounds:
        rates = {"a": a, "b": b}
        probe(table, **rates)
        before = table.current
        after = table.choose(NOW).address
        assert before is not None and after is not None
        if after != before:
            assert rates[after] > rates[before] * BETTER_BY
            table.use(after, chosen=True)


def test_an_old_measurement_decides_nothing() -> None:
    table = PathTable(["a", "b"])
    table.use("a", chosen=True)
    probe(table, now=NOW - FRESH_S - 1, b=100)
    probe(table, a=1)
    assert table.choose(NOW).address == "a"
    table = PathTable(["a"])
    table.use("a")
    choice = table.choose(NOW)
    assert (choice.address, choice.explanation) == ("a", "no path could be measured")


def test_a_path_that_failed_is_out_until_it_works_again() -> None:
    table = PathTable(["a", "b"])
    table.use("a", chosen=True)
    probe(table, a=10, b=1)
    table.failed("a", "no route")
    choice = table.choose(NOW)
    assert choice.address == "b"
    assert "a cannot be used now" in choice.explanation
    probe(table, a=10)
    assert table.choose(NOW).address == "a"


def test_paths_are_tried_fastest_first_then_unknown_then_failed() -> None:
    table = PathTable(["failed", "unknown", "slow", "fast"])
    probe(table, slow=1, fast=10)
    table.failed("failed", "no route")
    assert table.by_speed(NOW) == ["fast", "slow", "unknown", "failed"]


def test_a_lost_link_makes_its_path_the_last_to_try() -> None:
    table = PathTable(["a", "b"])
    table.use("a", chosen=True)
    probe(table, a=10, b=1)
    table.lost("link closed: peer-unresponsive")
    assert table.current is None
    assert table.by_speed(NOW) == ["b", "a"]


def test_transfers_keep_the_measurement_fresh() -> None:
    """T5."""
    table = PathTable(["a"])
    table.use("a")
    probe(table, a=10)
    later = NOW + 100 * FRESH_S
    assert not table.transferred(9 * GBIT, None, later)
    (path,) = table.all()
    assert path.fresh(later) == Measurement(later, 0.0001, 9 * GBIT, "transfer")


def test_a_transfer_far_below_the_probe_asks_for_a_measurement() -> None:
    table = PathTable(["a"])
    table.use("a")
    probe(table, a=10)
    assert not table.transferred(10 * GBIT * DEGRADED * 1.01, 0.001, NOW)
    assert table.transferred(10 * GBIT * DEGRADED * 0.99, 0.001, NOW)


def test_a_transfer_over_no_known_path_says_nothing() -> None:
    table = PathTable(["a"])
    assert not table.transferred(GBIT, 0.001, NOW)
    table.use("a")
    assert not table.transferred(GBIT, None, NOW)
    assert table.all()[0].measured is None


def test_addresses_are_bounded_and_the_current_one_stays() -> None:
    table = PathTable(["a"])
    table.use("a")
    probe(table, a=10)
    table.offer([f"x{number}" for number in range(100)])
    addresses = [path.address for path in table.all()]
    assert len(addresses) == MAX_PATHS
    assert "a" in addresses
    table.offer(["b", "a", "b"])
    assert [path.address for path in table.all()] == ["b", "a"]
    assert table.all()[1].measured is not None, "what is known of an address outlives a new list"
