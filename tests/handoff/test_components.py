"""Schema arithmetic, identity, page headers and checksums (S1-S8, H1)."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.handoff.scene import IDENTITY, SCHEMA, SEED, C, page, pages, replaced
from zerocopy.handoff import components
from zerocopy.handoff.components import HEADER_BYTES, Component, Identity, PageHeader, page_checksum, record_bytes
from zerocopy.handoff.errors import RemoteProtocolError

HEADER, PAYLOAD = pages()[1]

# Where each integer of a packed header lies: name, offset, width in bytes (docs/wire.md).
FIELDS = [
    ("magic", 0, 4),
    ("header version", 4, 2),
    ("component", 8, 1),
    ("codec", 9, 1),
    ("flags", 10, 1),
    ("reserved", 11, 1),
    ("layer from", 54, 2),
    ("layer to", 56, 2),
    ("position planes", 58, 2),
    ("token from", 60, 4),
    ("token to", 64, 4),
    ("payload bytes", 68, 8),
    ("tail", 84, 4),
]
UNBOUNDED = [("schema version", 6, 2), ("epoch", 44, 4), ("sequence", 48, 4), ("source", 52, 2), ("checksum", 76, 8)]
FUZZ = [0, -1, 1 << 31, 1 << 63]


def patched(offset: int, width: int, value: int) -> bytes:
    data = bytearray(HEADER.pack())
    data[offset : offset + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return bytes(data)


def test_a_header_is_128_bytes_and_comes_back_as_it_went() -> None:
    for header, _payload in pages():
        assert len(header.pack()) == HEADER_BYTES
        assert PageHeader.unpack(memoryview(header.pack())) == header


def test_the_offsets_in_these_tests_are_those_of_the_header() -> None:
    packed = replaced(HEADER, layers=(1, 2), source=9, sequence=77, payload_bytes=5, checksum=6).pack()
    read = {name: int.from_bytes(packed[o : o + w], "little") for name, o, w in [*FIELDS, *UNBOUNDED]}
    assert (read["layer from"], read["layer to"], read["source"], read["sequence"]) == (1, 2, 9, 77)
    assert (read["payload bytes"], read["checksum"], read["epoch"], read["position planes"]) == (5, 6, 3, 1)
    assert (read["token from"], read["token to"]) == HEADER.tokens


@pytest.mark.parametrize("length", range(HEADER_BYTES))
def test_a_header_cut_at_any_byte_is_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        PageHeader.unpack(HEADER.pack()[:length])


def test_a_header_that_is_too_long_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="129 bytes, not 128"):
        PageHeader.unpack(HEADER.pack() + b"\0")


OUT_OF_BOUNDS = [
    (name, offset, width, value)
    for name, offset, width in FIELDS
    for value in (-1, 1 << 31, 1 << 63)
    if value < 1 << 8 * width and (name, value) != ("payload bytes", 1 << 31)  # that one is for the schema to judge
]


@pytest.mark.parametrize(("name", "offset", "width", "value"), OUT_OF_BOUNDS)
def test_an_integer_outside_its_bounds_is_refused(name: str, offset: int, width: int, value: int) -> None:
    with pytest.raises(RemoteProtocolError, match="outside its bounds"):
        PageHeader.unpack(patched(offset, width, value))


@pytest.mark.parametrize("name", ["component", "layer to", "position planes", "token to", "payload bytes"])
def test_a_zero_where_nothing_can_be_zero_is_refused(name: str) -> None:
    _, offset, width = next(f for f in FIELDS if f[0] == name)
    with pytest.raises(RemoteProtocolError):
        PageHeader.unpack(patched(offset, width, 0))


@pytest.mark.parametrize("value", FUZZ)
@pytest.mark.parametrize(("name", "offset", "width"), UNBOUNDED)
def test_an_integer_that_sizes_nothing_is_carried_as_it_is(name: str, offset: int, width: int, value: int) -> None:
    data = patched(offset, width, value)
    assert PageHeader.unpack(data).pack() == data


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_never_make_a_header_that_means_something_else(data: bytes) -> None:
    for candidate in (data, HEADER.pack()[:8] + data[8:], HEADER.pack()[:60] + data[60:]):
        try:
            header = PageHeader.unpack(candidate)
        except RemoteProtocolError:
            continue
        assert header.pack() == candidate
        assert header.layers[0] < header.layers[1] <= components.MAX_LAYERS
        assert header.tokens[0] < header.tokens[1] <= components.MAX_TOKENS
        assert 0 < header.payload_bytes <= components.MAX_PAGE_BYTES


def test_a_header_shows_its_address_and_not_its_checksum() -> None:
    """X4: nothing content-derived in logs."""
    assert "attention KV layers [0,2) tokens [4,8)" in repr(HEADER)
    assert str(HEADER.checksum) not in repr(HEADER)


@pytest.mark.parametrize("component", list(Component))
def test_every_component_has_a_name_for_people(component: Component) -> None:
    assert component.label


def test_page_sizes_follow_the_schema() -> None:
    spec = SCHEMA.spec(C.ATTENTION_KV)
    assert spec is not None
    assert spec.page_bytes((0, 2), (4, 8)) == 32 + 4 * 12 + (24 + 4 * 24) + (24 + 4 * 40)
    assert spec.page_bytes((1, 2), (0, 1)) == 32 + 12 + 24 + 40
    final = SCHEMA.spec(C.RECURRENT)
    assert final is not None
    assert final.page_bytes((1, 3), (0, 10)) == 104 + 112, "a snapshot's size does not depend on the tokens"


def test_a_slab_holds_prefix_then_convolution_then_recurrent_rows() -> None:
    conv, recurrent = 20 + 28 + 36, 96 + 104 + 112
    assert SCHEMA.slab_offset(C.CONVOLUTION, 0) == 48
    assert SCHEMA.slab_offset(C.CONVOLUTION, 2) == 48 + 20 + 28
    assert SCHEMA.slab_offset(C.RECURRENT, 0) == 48 + conv
    assert SCHEMA.slab_offset(C.RECURRENT, 1) == 48 + conv + 96
    assert SCHEMA.snapshot_bytes() == 48 + conv + recurrent
    with pytest.raises(KeyError):
        SCHEMA.slab_offset(C.TOKENS, 0)


def test_a_model_without_recurrent_state_needs_no_slab() -> None:
    dense = msgspec.structs.replace(SCHEMA, components=SCHEMA.components[:1])
    assert dense.snapshot_bytes() == 0


def test_a_schema_digest_changes_with_every_field() -> None:
    changed = [
        msgspec.structs.replace(SCHEMA, family="other"),
        msgspec.structs.replace(SCHEMA, position_planes=4),
        msgspec.structs.replace(SCHEMA, snapshot_prefix=0),
        msgspec.structs.replace(SCHEMA, version=2),
        msgspec.structs.replace(SCHEMA, components=SCHEMA.components[:-1]),
    ]
    assert len({schema.digest() for schema in [SCHEMA, *changed]}) == 6


@pytest.mark.parametrize("field", [f for f in Identity.__struct_fields__ if f != "exactness"])
def test_every_field_of_the_identity_separates_hosts(field: str) -> None:
    """S8: a difference anywhere forbids a handoff and changes the digest in page headers."""
    other = msgspec.structs.replace(IDENTITY, **{field: "other"})
    assert IDENTITY.differences(other) == [(field, getattr(IDENTITY, field), "other")]
    assert IDENTITY.digest() != other.digest()


def test_the_exactness_class_does_not_separate_hosts() -> None:
    other = msgspec.structs.replace(IDENTITY, exactness="arm64")
    assert IDENTITY.differences(other) == []
    assert IDENTITY.digest() == other.digest()


def test_a_checksum_holds_only_for_its_own_payload_address_and_handoff() -> None:
    """A page moved to another layer or token range, or taken from another request, fails (field reports)."""
    view = memoryview(PAYLOAD)
    arguments = (view, SEED, C.ATTENTION_KV, (0, 2), (4, 8))
    right = page_checksum(*arguments)
    wrong = [
        page_checksum(memoryview(PAYLOAD[:-1] + bytes([PAYLOAD[-1] ^ 1])), *arguments[1:]),
        page_checksum(view, SEED ^ 1, *arguments[2:]),
        page_checksum(view, SEED, C.MTP_KV, (0, 2), (4, 8)),
        page_checksum(view, SEED, C.ATTENTION_KV, (1, 2), (4, 8)),
        page_checksum(view, SEED, C.ATTENTION_KV, (0, 2), (0, 8)),
    ]
    assert right == HEADER.checksum
    assert right not in wrong


def test_a_record_costs_what_the_ring_takes() -> None:
    native = pytest.importorskip("native.ring")
    for payload in (1, 63, 64, 65, 4096, 1_000_001):
        assert record_bytes(C.ATTENTION_KV, payload) == native.Ring.record_bytes(HEADER_BYTES + payload)


def test_parts_of_the_snapshot_cost_no_ring() -> None:
    assert record_bytes(C.RECURRENT, 1 << 20) == record_bytes(C.CONVOLUTION, 1 << 20) == 0


def test_a_page_of_one_byte_round_trips() -> None:
    header, payload = page(HEADER, b"x")
    assert PageHeader.unpack(header.pack()) == header
    assert header.payload_bytes == len(payload) == 1


def test_the_header_layout_leaves_room_to_grow() -> None:
    """The unused tail must be zero, so that a later build may give it a meaning."""
    assert struct.calcsize("<4sHHBBBB16s16sIIHHHHIIQQ") == 84
    assert HEADER.pack()[84:] == bytes(HEADER_BYTES - 84)
