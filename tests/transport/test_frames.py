"""The wire format: golden vectors, every bound, keys per direction, nonces that never repeat."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.frames import (
    APPLICATION,
    INTERNAL,
    MAX_INTERNAL,
    MAX_PAYLOAD,
    MAX_RECORD,
    OPENING,
    RECORD_HEADER,
    TAG,
    WINDOW,
    Announce,
    Bye,
    Cancel,
    Done,
    FrameReader,
    Hello,
    KeyChain,
    Kind,
    OpenStream,
    PageShape,
    Ping,
    Pong,
    RecordHeader,
    StreamReady,
    decode,
    encode,
    frame,
    key_chains,
    preamble,
    seal,
    unseal,
)
from transport.link import MAX_HEADER, MAX_MESSAGE, LinkError

SECRET, STREAM = bytes(range(32)), bytes(range(16))

MESSAGES = [
    (Hello(1), "010100"),
    (Ping(7), "020700000000000000"),
    (Pong(2**64 - 1), "03ffffffffffffffff"),
    (OpenStream(STREAM, SECRET), "04" + STREAM.hex() + SECRET.hex()),
    (StreamReady(STREAM), "05" + STREAM.hex()),
    (Announce(3, PageShape(9, 4096, b"h").packed), "060300000000000000" + "0900000000000000" + "00100000" + "68"),
    (Done((1, 2)), "0701000000000000000200000000000000"),
    (Cancel(5), "080500000000000000"),
    (Bye("shutdown"), "0973687574646f776e"),
]


@pytest.mark.parametrize(("message", "wire"), MESSAGES, ids=[type(m).__name__ for m, _ in MESSAGES])
def test_link_messages_have_these_bytes(message: Any, wire: str) -> None:
    assert encode(message).hex() == wire
    assert decode(bytes.fromhex(wire)) == message


@given(st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_body_is_a_message_or_a_typed_error(body: bytes) -> None:
    try:
        assert encode(decode(body)) == body
    except LinkError as error:
        assert error.reason == "frame-malformed"


@pytest.mark.parametrize(
    "body",
    [b"", b"\x00", b"\x01", b"\x01\x01\x00\x00", b"\x07", b"\x07" + bytes(9), b"\x07" + bytes(8 * (WINDOW + 1)),
     b"\x06" + bytes(8), b"\x09" + b"x" * 65, b"\x09\xff", b"\x09\n", b"\x0a" + bytes(8)],
)  # fmt: skip
def test_messages_out_of_bounds_are_refused(body: bytes) -> None:
    with pytest.raises(LinkError):
        decode(body)


@given(
    st.lists(st.tuples(st.sampled_from([INTERNAL, APPLICATION]), st.binary(max_size=300)), max_size=12),
    st.lists(st.integers(1, 400), max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_frames_survive_any_cutting_of_the_stream(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    stream, reader, got = b"".join(frame(*f) for f in frames), FrameReader(), []
    for cut in cuts:
        got += list(reader.feed(stream[:cut]))
        stream = stream[cut:]
    got += list(reader.feed(stream))
    assert got == frames


@pytest.mark.parametrize(
    ("length", "channel"),
    [(MAX_MESSAGE + 1, APPLICATION), (2**31, APPLICATION), (2**32 - 1, APPLICATION), (MAX_INTERNAL + 1, INTERNAL),
     (0, 2), (1, 255)],
)  # fmt: skip
def test_a_frame_out_of_bounds_is_refused_from_its_header_alone(length: int, channel: int) -> None:
    with pytest.raises(LinkError) as caught:
        list(FrameReader().feed(struct.pack("<IB", length, channel)))
    assert caught.value.reason == "frame-malformed"


# -- records


def sealed(keys: KeyChain, header: RecordHeader, plaintext: bytes, bound: bytes) -> bytes:
    into = memoryview(bytearray(RECORD_HEADER + len(plaintext) + TAG))
    assert seal(keys, header, plaintext, bound, into) == len(into)
    return bytes(into)


def test_records_have_these_bytes() -> None:
    """Golden: a change here is a new link version."""
    there, back = key_chains(SECRET, STREAM, connecting=True)
    shape = PageShape(5, 4096, b"header")
    opened = sealed(there, RecordHeader(Kind.OPEN, False, 0, 0, 0), b"", preamble(STREAM))
    page = sealed(there, RecordHeader(Kind.PAGE, False, 18, 7, 0), shape.packed, b"")
    data = sealed(there, shape.record(7, 0), b"state", shape.packed)
    answer = sealed(back, RecordHeader(Kind.OPEN, False, 0, 0, 0), b"", preamble(STREAM))
    there.advance()
    renewed = sealed(there, shape.record(7, 0), b"state", shape.packed)
    assert preamble(STREAM).hex() == "5a434231" + STREAM.hex()
    assert [r.hex() for r in (opened, page, data, answer, renewed)] == GOLDEN


GOLDEN = [
    "0100000000000000000000000000000000000000000000008d1b950d1221e3174197abff7170dc6c",
    "020000001200000007000000000000000000000000000000"
    "4a32a16f1c1ffbfb06960b8a5c9c1e9ed9bb22fc0bb6f6fc5a8fc733ae0cb9eb9ca1",
    "03010000050000000700000000000000000000000000000029fbe69c1bed02bdff4566b1140a80ac2e5fcf5795",
    "01000000000000000000000000000000000000000000000003de43305cb3dfb7d80a4d9d660ae9da",
    "0301000005000000070000000000000000000000000000006ea7e9856d34809f7429f2704f209b99bf21bb96a9",
]


def test_both_sides_read_what_the_other_wrote_and_not_what_they_wrote_themselves() -> None:
    header = RecordHeader(Kind.DATA, True, 5, 1, 0)
    for connecting in (True, False):
        send, _ = key_chains(SECRET, STREAM, connecting=connecting)
        _, receive = key_chains(SECRET, STREAM, connecting=not connecting)
        _, own = key_chains(SECRET, STREAM, connecting=connecting)
        record, into = memoryview(sealed(send, header, b"state", b"bound")), memoryview(bytearray(5))
        unseal(receive, header.pack(), record[RECORD_HEADER:], b"bound", into)
        assert into == b"state"
        with pytest.raises(LinkError, match="tag"):
            unseal(own, header.pack(), record[RECORD_HEADER:], b"bound", into)


@pytest.mark.parametrize(
    "changed",
    [
        RecordHeader(Kind.DATA, False, 5, 1, 8192),
        RecordHeader(Kind.DATA, True, 5, 2, 8192),
        RecordHeader(Kind.DATA, True, 5, 1, 4096),
        RecordHeader(Kind.PAGE, True, 5, 1, 8192),
    ],
)
def test_page_offset_kind_and_final_flag_are_bound_to_the_tag(changed: RecordHeader) -> None:
    send, _ = key_chains(SECRET, STREAM, connecting=True)
    _, receive = key_chains(SECRET, STREAM, connecting=False)
    record = memoryview(sealed(send, RecordHeader(Kind.DATA, True, 5, 1, 8192), b"state", b"bound"))
    with pytest.raises(LinkError):
        unseal(receive, changed.pack(), record[RECORD_HEADER:], b"bound", memoryview(bytearray(5)))


def test_the_page_header_is_bound_to_the_tag_of_each_record() -> None:
    send, _ = key_chains(SECRET, STREAM, connecting=True)
    _, receive = key_chains(SECRET, STREAM, connecting=False)
    shape, other = PageShape(5, 4096, b"handoff A"), PageShape(5, 4096, b"handoff B")
    record = memoryview(sealed(send, shape.record(0, 0), b"state", shape.packed))
    with pytest.raises(LinkError):
        unseal(receive, shape.record(0, 0).pack(), record[RECORD_HEADER:], other.packed, memoryview(bytearray(5)))


def test_a_stream_of_another_id_has_other_keys() -> None:
    header = RecordHeader(Kind.OPEN, False, 0, 0, 0)
    records = {
        sealed(keys, header, b"", b"")
        for stream in (STREAM, bytes(16))
        for secret in (SECRET, bytes(32))
        for keys in key_chains(secret, stream, connecting=True)
    }
    assert len(records) == 8


def test_no_nonce_is_used_twice_under_a_key() -> None:
    keys, _ = key_chains(SECRET, STREAM, connecting=True)
    nonces = [keys.nonce(100) for _ in range(1000)]
    assert len(set(nonces)) == 1000
    first = keys.cipher
    keys.advance()
    assert keys.cipher is not first and keys.nonce(0) == bytes(12)


def test_a_key_wears_out_by_bytes_and_a_peer_that_does_not_renew_is_refused() -> None:
    keys, _ = key_chains(SECRET, STREAM, connecting=True, key_bytes=1000)
    while not keys.worn:
        keys.nonce(100)
    with pytest.raises(LinkError, match="limit is 1000"):
        for _ in range(20):
            keys.nonce(100)
    keys.advance()
    keys.nonce(100)


@pytest.mark.parametrize(
    ("kind", "flags", "zero", "length"),
    [(0, 0, 0, 0), (5, 0, 0, 0), (255, 0, 0, 0), (3, 2, 0, 0), (3, 0, 1, 0), (3, 0, 0, MAX_RECORD + 1),
     (3, 0, 0, 2**31), (3, 0, 0, 2**32 - 1), (1, 0, 0, 1), (4, 0, 0, 1), (2, 0, 0, MAX_HEADER + 13)],
)  # fmt: skip
def test_a_record_header_out_of_bounds_is_refused(kind: int, flags: int, zero: int, length: int) -> None:
    with pytest.raises(LinkError):
        RecordHeader.unpack(struct.pack("<BBHIQQ", kind, flags, zero, length, 0, 0))


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_any_record_header_is_taken_whole_or_refused(kind: int, flags: int, length: int, page: int) -> None:
    wire = struct.pack("<BBHIQQ", kind, flags, 0, length, page, page)
    try:
        assert RecordHeader.unpack(wire).pack() == wire
    except LinkError:
        assert kind not in (1, 2, 3, 4) or flags > 1 or length > 0


# -- pages


@given(st.integers(1, 1 << 22), st.integers(4096, MAX_RECORD))
@settings(max_examples=200, deadline=None)
def test_the_cut_of_a_page_covers_it_exactly_once(size: int, record_bytes: int) -> None:
    shape = PageShape(size, record_bytes, b"h")
    records = [shape.record(3, i) for i in range(shape.records)]
    assert sum(r.length for r in records) == size
    assert all(a.offset + a.length == b.offset for a, b in itertools.pairwise(records))
    assert [r.final for r in records] == [False] * (len(records) - 1) + [True]
    assert [shape.index_of(r) for r in records] == list(range(len(records)))


@pytest.mark.parametrize(
    "record",
    [
        RecordHeader(Kind.DATA, False, 4096, 0, 4095),
        RecordHeader(Kind.DATA, False, 4095, 0, 4096),
        RecordHeader(Kind.DATA, True, 4096, 0, 4096),
        RecordHeader(Kind.DATA, False, 1808, 0, 8192),
        RecordHeader(Kind.DATA, True, 4096, 0, 8192),
        RecordHeader(Kind.DATA, True, 1808, 0, 12288),
        RecordHeader(Kind.DATA, False, 0, 0, 0),
        RecordHeader(Kind.DATA, False, 4096, 0, 2**63),
        RecordHeader(Kind.DATA, False, 4096, 0, 2**64 - 4096),
    ],
)
def test_a_record_outside_the_cut_is_refused(record: RecordHeader) -> None:
    with pytest.raises(LinkError):
        PageShape(10_000, 4096, b"h").index_of(record)


@pytest.mark.parametrize(
    ("payload", "record", "header"),
    [(0, 4096, b"h"), (MAX_PAYLOAD + 1, 4096, b"h"), (2**63, 4096, b"h"), (2**64 - 1, 4096, b"h"), (1, 0, b"h"),
     (1, 4095, b"h"), (1, MAX_RECORD + 1, b"h"), (1, 2**32 - 1, b"h"), (1, 4096, b""), (1, 4096, b"h" * 257)],
)  # fmt: skip
def test_a_page_announcement_out_of_bounds_is_refused(payload: int, record: int, header: bytes) -> None:
    with pytest.raises(LinkError):
        PageShape.unpack(struct.pack("<QI", payload, record) + header)


def test_opening_is_the_size_of_an_empty_record() -> None:
    assert RECORD_HEADER + TAG == OPENING == 40
