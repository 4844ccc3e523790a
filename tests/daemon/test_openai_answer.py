from __future__ import annotations

import msgspec
import pytest

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


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("model", ["", '"text":""', '"content":""'])
@pytest.mark.parametrize("text", ["né", '"text":""', '"content":""', "\n\u0000\u2028"])
def test_what_stands_around_a_text_makes_the_same_piece_of_it(
    chat: bool, with_usage: bool, model: str, text: str
) -> None:
    """Also when the model's name reads like the text's place."""
    answer = Answer(model, chat=chat, with_usage=with_usage)
    before, after = answer.around_text(3)
    assert before + msgspec.json.encode(text) + after == msgspec.json.encode(answer.piece(3, text, None, 0))
