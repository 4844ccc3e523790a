"""Control messages: bounds, truncation, unknown fields, and what is shown of them (H9, X4)."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.handoff.scene import C
from tests.handoff.vectors import MESSAGES
from transport import link
from zerocopy.handoff import messages as m
from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError

NAMES = sorted(MESSAGES)
FUZZ = [0, -1, 1 << 31, 1 << 63, 1 << 40, (1 << 64) - 1]


def as_map(message: m.AnyMessage) -> dict[str, Any]:
    return msgspec.msgpack.decode(m.encode(message)[1:])  # type: ignore[no-any-return]


def wire(fields: object) -> bytes:
    return bytes([m.WIRE_VERSION]) + msgspec.msgpack.encode(fields)


def integers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every integer inside a decoded message."""
    if isinstance(value, dict):
        return [p for key, item in value.items() for p in integers(item, (*path, key))]
    if isinstance(value, list):
        return [p for i, item in enumerate(value[:2]) for p in integers(item, (*path, i))]
    return [path] if isinstance(value, int) and not isinstance(value, bool) else []


def put(value: Any, path: tuple[Any, ...], new: int) -> None:
    for step in path[:-1]:
        value = value[step]
    value[path[-1]] = new


INTEGERS = [(name, path) for name in NAMES for path in integers(as_map(MESSAGES[name]))]


@pytest.mark.parametrize("name", NAMES)
def test_a_message_comes_back_as_it_went(name: str) -> None:
    assert m.decode(m.encode(MESSAGES[name])) == MESSAGES[name]
    assert m.decode(memoryview(m.encode(MESSAGES[name]))) == MESSAGES[name]


def test_every_kind_of_message_is_covered_here() -> None:
    assert {type(v) for v in MESSAGES.values()} == set(m.AnyMessage.__args__)


@pytest.mark.parametrize("name", NAMES)
def test_a_message_cut_at_any_byte_is_refused(name: str) -> None:
    data = m.encode(MESSAGES[name])
    for length in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            m.decode(data[:length])


@pytest.mark.parametrize("name", NAMES)
def test_bytes_after_a_message_are_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        m.decode(m.encode(MESSAGES[name]) + b"\xc0")


@pytest.mark.parametrize("name", NAMES)
def test_fields_of_a_later_build_are_ignored(name: str) -> None:
    """H9: the protocol is additive."""
    assert m.decode(wire({**as_map(MESSAGES[name]), "from_the_future": [1, {"a": b"b"}]})) == MESSAGES[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_message_without_one_of_its_required_fields_is_refused(name: str) -> None:
    message = MESSAGES[name]
    required = {f.name for f in msgspec.structs.fields(type(message)) if f.required}
    for field in required:
        fields = as_map(message)
        del fields[field]
        with pytest.raises(RemoteProtocolError, match=field):
            m.decode(wire(fields))


@pytest.mark.parametrize("value", FUZZ)
@pytest.mark.parametrize(("name", "path"), INTEGERS)
def test_an_integer_is_in_its_bounds_or_the_message_is_refused(name: str, path: tuple[Any, ...], value: int) -> None:
    fields = as_map(MESSAGES[name])
    put(fields, path, value)
    try:
        message = m.decode(wire(fields))
    except RemoteProtocolError:
        return
    assert value >= 0
    field = path[-1] if isinstance(path[-1], str) else path[-2]
    bounds = {
        "credit": m.MAX_TOTAL_BYTES,
        "limit": m.MAX_TOTAL_BYTES,
        "nbytes": m.MAX_TOTAL_BYTES,
        "seed": (1 << 64) - 1,
    }
    assert value <= bounds.get(field, 1 << 32), f"{field} of {message!r} took {value}"


def test_negative_and_huge_sizes_are_refused_by_name() -> None:
    for field, value in (("tokens", 0), ("tokens", 1 << 31), ("largest_page", -1), ("largest_page", 1 << 63)):
        fields = as_map(MESSAGES["reserve"])
        fields[field] = value
        with pytest.raises(RemoteProtocolError, match=field):
            m.decode(wire(fields))


@pytest.mark.parametrize("length", [0, 15, 17, 1 << 16])
def test_an_id_that_is_not_16_bytes_is_refused(length: int) -> None:
    fields = as_map(MESSAGES["commit-ack"])
    fields["handoff_id"] = bytes(length)
    with pytest.raises(RemoteProtocolError, match="handoff_id"):
        m.decode(wire(fields))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("hello", "name", "x" * 129),
        ("hello", "roles", ["r"] * 9),
        ("hello", "capabilities", ["c"] * 65),
        ("hello", "addresses", ["a" * 129]),
        ("prefill", "tenant", "t" * 129),
        ("prefill", "prompt", b""),
        ("prefill", "prompt", bytes(4 * m.MAX_PROMPT_TOKENS + 4)),
        ("prefill", "queue_deadline_s", float("nan")),
        ("prefill", "queue_deadline_s", float("inf")),
        ("prefill", "queue_deadline_s", 0.0),
        ("prefill", "largest_page", 0),
        ("prefill", "largest_page", (1 << 32) + 1),
        ("grant", "deadline_s", -1.0),
        ("reject", "reason", "not a slug"),
        ("reject", "reason", "slug\n"),
        ("abort", "reason", ""),
        ("abort", "reason", "s" * 65),
        ("abort", "message", "m" * 1025),
        ("manifest", "components", []),
        ("manifest", "timings", {str(i): 1.0 for i in range(65)}),
        ("manifest", "timings", {"prefill_s": float("nan")}),
        ("manifest", "timings", {"prefill_s": float("inf")}),
        ("reserve", "components", [{"component": 1, "nbytes": 1}] * 17),
        ("reserve", "components", [{"component": 99, "nbytes": 1}]),
        ("generate", "payload", bytes(m.MAX_PAYLOAD + 1)),
    ],
)
def test_a_field_beyond_its_bound_is_refused_by_name(name: str, field: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match=field):
        m.decode(wire({**as_map(MESSAGES[name]), field: value}))


def test_a_decoder_that_does_not_say_how_large_a_page_may_be_takes_any() -> None:
    """H9."""
    fields = as_map(MESSAGES["prefill"])
    del fields["largest_page"]
    message = m.decode(wire(fields))
    assert isinstance(message, m.Prefill) and message.largest_page == 1 << 32


def test_a_schema_from_the_wire_is_bounded_too() -> None:
    fields = as_map(MESSAGES["reserve"])
    fields["state"]["components"][0]["layer_bytes"] = [1] * 4097
    with pytest.raises(RemoteProtocolError, match="layer_bytes"):
        m.decode(wire(fields))


def test_a_prompt_of_broken_tokens_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="not whole 4-byte tokens"):
        m.decode(wire({**as_map(MESSAGES["prefill"]), "prompt": bytes(5)}))


def test_the_longest_prompt_fits_a_message_and_the_link() -> None:
    longest = msgspec.structs.replace(MESSAGES["prefill"], prompt=bytes(4 * m.MAX_PROMPT_TOKENS))
    assert m.decode(m.encode(longest)) == longest
    assert m.MAX_MESSAGE <= link.MAX_MESSAGE


def test_a_message_above_the_bound_is_not_parsed_at_all() -> None:
    with pytest.raises(RemoteProtocolError, match="allowed are 2 to"):
        m.decode(bytes(m.MAX_MESSAGE + 1))


def test_an_unknown_kind_of_message_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        m.decode(wire({"type": "teleport"}))


def test_another_wire_version_is_refused_with_both_versions_and_the_remedy() -> None:
    data = bytes([9]) + m.encode(MESSAGES["hello"])[1:]
    with pytest.raises(RemoteProtocolError, match="version 9, this host 1: install the same") as caught:
        m.decode(data)
    assert caught.value.reason == "wire-version"


def test_deep_nesting_is_refused_and_does_not_crash() -> None:
    for opener in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(RemoteProtocolError):
            m.decode(bytes([m.WIRE_VERSION]) + b"\x82\xa4type\xa5hello\xa1x" + opener * 200_000 + b"\xc0")


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_in_one_way_only(data: bytes) -> None:
    for candidate in (data, bytes([m.WIRE_VERSION]) + data):
        try:
            m.decode(candidate)
        except RemoteProtocolError as error:
            assert error.reason in ("message", "wire-version")


@settings(max_examples=200)
@given(st.sampled_from(NAMES), st.data())
def test_a_flipped_byte_gives_a_message_or_a_refusal(name: str, data: st.DataObject) -> None:
    raw = bytearray(m.encode(MESSAGES[name]))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(RemoteProtocolError):
        m.decode(bytes(raw))


def test_a_message_that_a_peer_would_refuse_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="out of bounds"):
        m.encode(m.Abort(handoff_id=bytes(16), epoch=0, reason="Not A Slug", message=""))
    with pytest.raises(LocalProtocolError):
        m.encode(m.Credit(handoff_id=bytes(16), epoch=1, limit=-1))


@pytest.mark.parametrize("name", NAMES)
def test_a_message_shows_no_content(name: str) -> None:
    """X4: prompts, seeds and requests must not get into a log by way of repr."""
    shown = repr(MESSAGES[name])
    assert shown.startswith(f"<{type(MESSAGES[name]).__name__}")
    assert len(shown) < 60
    assert str(MESSAGES["grant"].seed) not in shown  # type: ignore[union-attr]


def test_refusals_do_not_quote_what_was_sent() -> None:
    secret = "tell-nobody"
    for field in ("prompt", "tenant", "handoff_id"):
        with pytest.raises(RemoteProtocolError) as caught:
            m.decode(wire({**as_map(MESSAGES["prefill"]), field: [secret]}))
        assert secret not in str(caught.value)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=50))
def test_tokens_are_packed_little_endian_and_come_back(tokens: list[int]) -> None:
    packed = m.pack_tokens(tokens)
    assert packed == b"".join(t.to_bytes(4, "little") for t in tokens)
    assert m.unpack_tokens(memoryview(packed)) == tokens


def test_a_manifest_lists_components_by_number() -> None:
    fields = as_map(MESSAGES["manifest"])
    assert fields["components"][0]["component"] == int(C.ATTENTION_KV) == 1
