"""Real weights, many requests at once on a few sequences: every answer and every state is what it is alone (Q1, V1).

The full size, 32 requests of up to 1,500 tokens, is `python -m benches.many_exact`.
"""

from __future__ import annotations

import pytest

from benches.many_exact import Load, incomplete, run
from zerocopy.cli.hosts import Answer


def test_answers_given_at_once_are_those_of_a_context_where_nothing_else_ever_was() -> None:
    found = run(Load(requests=8, longest=300, output=6))
    assert found["failed"] == {} and found["incomplete"] == 0 and found["met"]
    assert found["not_argmax"] == 0 and found["tokens"] >= 40
    assert found["states_compared"] == 7
    assert found["states_unlike_prefiller"] == found["states_unlike_lone"] == 0


@pytest.mark.parametrize(
    ("tokens", "reason", "wrong"),
    [([5] * 6, "length", False), ([5] * 2, "stop", False), ([], "stop", True), ([5] * 5, "length", True)],
)
def test_an_answer_that_is_cut_short_is_not_right_because_what_there_is_of_it_is(
    tokens: list[int], reason: str, wrong: bool
) -> None:
    """All its tokens were the most probable ones: an empty answer met the bench."""
    answer = Answer(200, {}, {"choices": [{"tokens": tokens, "finish_reason": reason}]})
    assert incomplete(answer, 6) is wrong
