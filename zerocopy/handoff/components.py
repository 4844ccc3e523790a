"""What a model's continuation state is made of, and how one page of it is addressed (S1-S8, H1).

Owns the vocabulary both hosts share: `Component`, `StateSchema` (what must travel, with exact sizes), `Identity`
(what it may travel between) and `PageHeader` (one page's address, 128 bytes on the wire). Owns no buffers.

Addresses are component x layer range x token range. Layers are ordinals *within the component* (0 is its first
layer), so a host that holds only some layers can send just those. A per-token component covers the rectangle
[0, layers) x [0, tokens); a final component is one snapshot per layer, valid after `tokens` tokens.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta

from zerocopy.handoff.errors import RemoteProtocolError

SCHEMA_VERSION: Final = 1
HEADER_BYTES: Final = 128
MAX_TOKENS: Final = 1 << 24  # far above any context; keeps every product of wire integers below 2**63
MAX_LAYERS: Final = 4096
MAX_PAGE_BYTES: Final = 1 << 32

# What a page costs of a landing ring beside its payload: its header, the ring's own record header, alignment. Both
# hosts count credit by this rule and never by their ring's layout, which may differ between builds.
RECORD_OVERHEAD: Final = 64
RECORD_ALIGNMENT: Final = 64

ByteCount = Annotated[int, Meta(ge=0, le=MAX_PAGE_BYTES)]
Name = Annotated[str, Meta(max_length=256)]


class Component(enum.IntEnum):
    """One separately itemised part of the state."""

    ATTENTION_KV = 1
    RECURRENT = 2
    CONVOLUTION = 3
    MTP_KV = 4
    MTP_HIDDEN = 5
    TOKENS = 6
    PROBE = 7  # logits of the last prompt token: proof, not state

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS: Final = {
    Component.ATTENTION_KV: "attention KV",
    Component.RECURRENT: "recurrent state",
    Component.CONVOLUTION: "convolution state",
    Component.MTP_KV: "MTP KV",
    Component.MTP_HIDDEN: "MTP hidden row",
    Component.TOKENS: "token history",
    Component.PROBE: "continuation probe",
}

SNAPSHOT: Final = (Component.CONVOLUTION, Component.RECURRENT)  # in slab order; they land in a slab, not a ring


class ComponentSpec(msgspec.Struct, frozen=True):
    """Exact byte geometry of one component. A page of n tokens over layers [a, b) holds

        page_overhead + n * token_overhead + sum over its layers of (layer_overhead + n * layer_bytes[l])

    bytes, with n = 1 for a final component. Sizes are the engine's (`llama-runtime.md`).
    """

    component: Component
    per_token: bool
    layer_bytes: Annotated[tuple[ByteCount, ...], Meta(max_length=MAX_LAYERS)]
    layer_overhead: ByteCount = 0
    token_overhead: ByteCount = 0
    page_overhead: ByteCount = 0
    max_page_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = MAX_TOKENS

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    def page_bytes(self, layers: tuple[int, int], tokens: tuple[int, int]) -> int:
        n = tokens[1] - tokens[0] if self.per_token else 1
        rows = sum(self.layer_overhead + n * row for row in self.layer_bytes[layers[0] : layers[1]])
        return self.page_overhead + n * self.token_overhead + rows


class StateSchema(msgspec.Struct, frozen=True):
    """Everything that must travel for one model, derived by each host from its own engine."""

    family: Name
    components: Annotated[tuple[ComponentSpec, ...], Meta(max_length=16)]
    snapshot_prefix: ByteCount = 0  # engine header bytes in front of the slab's first row; never on the wire
    version: Annotated[int, Meta(ge=0, le=0xFFFF)] = SCHEMA_VERSION
    position_planes: Annotated[int, Meta(ge=1, le=4)] = 1  # 4 where positions are M-RoPE's (qwen35)

    def spec(self, component: Component) -> ComponentSpec | None:
        return next((s for s in self.components if s.component == component), None)

    def digest(self) -> str:
        """Short name of this geometry, the same on every host that derives it."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    def slab_offset(self, component: Component, layer: int) -> int:
        """Where a snapshot part starts in the slab: prefix, all convolution rows, then all recurrent rows."""
        offset = self.snapshot_prefix
        for kind in SNAPSHOT:
            spec = self.spec(kind)
            if spec is None:
                continue
            if kind == component:
                return offset + spec.page_bytes((0, layer), (0, 1))
            offset += spec.page_bytes((0, spec.layers), (0, 1))
        raise KeyError(component)

    def snapshot_bytes(self) -> int:
        """Bytes of slab one snapshot needs, prefix included; 0 for a model without recurrent state."""
        specs = [self.spec(c) for c in SNAPSHOT]
        rows = sum(s.page_bytes((0, s.layers), (0, 1)) for s in specs if s is not None)
        return self.snapshot_prefix + rows if rows else 0


class Identity(msgspec.Struct, frozen=True):
    """What ties a state to one model and one way of running it (S8). All fields but `exactness` must match."""

    model: Name  # sha256 of the weights file
    tokenizer: Name  # sha256 of the tokenizer's metadata
    architecture: Name
    kv_type: Name  # "f16/f16": K and V
    flash_attention: Name  # "on" or "off"
    engine: Name  # package version and blob format, not the file: hosts of different kinds may pair
    schema: Name  # family/version/digest
    exactness: Name  # hosts with equal strings must agree bit for bit; others within the probe's tolerance

    def differences(self, other: Identity) -> list[tuple[str, str, str]]:
        """(field, mine, theirs) of everything that forbids a handoff."""
        fields = (f for f in self.__struct_fields__ if f != "exactness")
        return [(f, getattr(self, f), getattr(other, f)) for f in fields if getattr(self, f) != getattr(other, f)]

    def digest(self) -> bytes:
        """16 bytes for page headers; `exactness` is left out, as it does not decide whether a page fits."""
        values = [getattr(self, f) for f in self.__struct_fields__ if f != "exactness"]
        return hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=16).digest()


class Codec(enum.IntEnum):
    NONE = 0


# magic, header version, schema version, component, codec, flags, reserved, handoff id, identity digest,
# epoch, sequence, source, layers, tokens, position planes, payload bytes, checksum
_HEADER: Final = struct.Struct("<4sHHBBBB16s16sIIHHHHIIQQ")
_MAGIC: Final = b"ZCP1"
_PADDING: Final = bytes(HEADER_BYTES - _HEADER.size)
_FINAL: Final = 1


class PageHeader(msgspec.Struct, frozen=True):
    """Address and proof of one page (H1); packs to exactly `HEADER_BYTES`."""

    handoff_id: bytes
    identity: bytes
    epoch: int
    sequence: int  # position in this source's page order, from 0, no gaps
    component: Component
    layers: tuple[int, int]
    tokens: tuple[int, int]
    payload_bytes: int
    checksum: int
    source: int = 0
    position_planes: int = 1
    codec: Codec = Codec.NONE
    final: bool = False
    schema_version: int = SCHEMA_VERSION

    def pack(self) -> bytes:
        fixed = _HEADER.pack(
            _MAGIC, 1, self.schema_version, self.component, self.codec, _FINAL if self.final else 0, 0,
            self.handoff_id, self.identity, self.epoch, self.sequence, self.source, *self.layers,
            self.position_planes, *self.tokens, self.payload_bytes, self.checksum,
        )  # fmt: skip
        return fixed.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> PageHeader:
        """Parse and bound-check. Raises RemoteProtocolError; never trusts an integer before checking it."""
        if len(data) != HEADER_BYTES:
            raise RemoteProtocolError("page-header", f"page header has {len(data)} bytes, not {HEADER_BYTES}")
        (magic, version, schema, component, codec, flags, reserved, handoff_id, identity, epoch, sequence,
         source, l0, l1, planes, t0, t1, payload, checksum) = _HEADER.unpack_from(data)  # fmt: skip
        ok = (
            magic == _MAGIC
            and version == 1
            and component in Component._value2member_map_
            and codec in Codec._value2member_map_
            and flags in (0, _FINAL)
            and reserved == 0
            and data[_HEADER.size :] == _PADDING
            and l0 < l1 <= MAX_LAYERS
            and t0 < t1 <= MAX_TOKENS
            and planes in (1, 4)
            and 0 < payload <= MAX_PAGE_BYTES
        )
        if not ok:
            raise RemoteProtocolError("page-header", "page header has a field outside its bounds")
        return cls(
            handoff_id=handoff_id, identity=identity, epoch=epoch, sequence=sequence, component=Component(component),
            layers=(l0, l1), tokens=(t0, t1), payload_bytes=payload, checksum=checksum, source=source,
            position_planes=planes, codec=Codec(codec), final=bool(flags & _FINAL), schema_version=schema,
        )  # fmt: skip

    def __repr__(self) -> str:  # the checksum stays out of logs (X4)
        return f"<page {self.sequence} {self.address} of {self.handoff_id.hex()}>"

    @property
    def address(self) -> str:
        """For people: component, layers and tokens."""
        (l0, l1), (t0, t1) = self.layers, self.tokens
        return f"{self.component.label} layers [{l0},{l1}) tokens [{t0},{t1})"


_ADDRESS: Final = struct.Struct("<QBHHII")


def page_checksum(
    payload: memoryview, seed: int, component: Component, layers: tuple[int, int], tokens: tuple[int, int]
) -> int:
    """xxh3-64 of the payload, seeded per handoff *and per address*: a page moved to another address, or taken
    from another handoff, fails its checksum. `seed` is the secret 64-bit value of GRANT."""
    address_seed = xxhash.xxh3_64_intdigest(_ADDRESS.pack(seed, component, *layers, *tokens))
    return xxhash.xxh3_64_intdigest(payload, seed=address_seed)


def record_bytes(component: Component, payload_bytes: int) -> int:
    """What one page is charged against credit; nothing for parts of the snapshot, whose slab is reserved whole."""
    if component in SNAPSHOT:
        return 0
    used = RECORD_OVERHEAD + HEADER_BYTES + payload_bytes
    return -(-used // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
