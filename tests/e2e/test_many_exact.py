"""Real weights, many requests at once on a few sequences: every answer and every state is what it is alone (Q1, V1).

The full size, 32 requests of up to 1,500 tokens, is `python -m benches.many_exact`.
"""

from __future__ import annotations

from benches.many_exact import Load, run


def test_answers_given_at_once_are_those_of_a_context_where_nothing_else_ever_was() -> None:
    found = run(Load(requests=8, longest=300, output=6))
    assert found["failed"] == {}
    assert found["not_argmax"] == 0 and found["tokens"] >= 40
    assert found["states_compared"] == 7
    assert found["states_unlike_prefiller"] == found["states_unlike_lone"] == 0
