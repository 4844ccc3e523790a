from __future__ import annotations

from zerocopy.daemon.openai_answer import Answer, Choice
from zerocopy.daemon.requests import Finished
from zerocopy.worker.sampling import TokenLogprob


def test_each_tokens_offset_is_where_its_text_begins() -> None:
    """A long answer's, too: the event loop makes them, and links are lost when it is busy for ten seconds."""
    texts = [b"a", "né".encode(), b" gram"] * 50_000
    tokens = [TokenLogprob(text, -0.5) for text in texts]
    choice = Choice("", tokens, Finished("length", 3, len(tokens), {}))
    told = Answer("m", chat=False).whole([choice])["choices"][0]["logprobs"]
    assert told["text_offset"][:4] == [0, 1, 3, 8]
    assert told["text_offset"][-1] == 8 * 50_000 - len(" gram")
    assert told["tokens"][:3] == ["a", "né", " gram"]


def test_a_pieces_offset_goes_on_from_what_was_sent() -> None:
    piece = Answer("m", chat=False).piece(0, "né", TokenLogprob("né".encode(), -0.5), 41)
    assert piece["choices"][0]["logprobs"]["text_offset"] == [41]
