"""The control messages of a handoff and how they look on the wire (`docs/wire.md`).

One message is a version byte and a MessagePack map whose `type` names it. Every field has a stated bound and is
checked before anything is done with it; a map entry this build does not know is ignored, so fields may be added (H9).
Sequences are tuples and structs are frozen: a message is a value. State pages never travel here.

`repr` shows a message's type and handoff only: prompts, requests and checksum seeds stay out of logs (X4).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from zerocopy.handoff.components import MAX_LAYERS, MAX_PAGE_BYTES, MAX_TOKENS, Component, Identity, StateSchema
from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError

WIRE_VERSION: Final = 1
MAX_MESSAGE: Final = 8 << 20  # the link's own bound; a test holds the two together
MAX_PROMPT_TOKENS: Final = 1 << 20
MAX_PAYLOAD: Final = 4 << 20  # one front-door request or event
MAX_TOTAL_BYTES: Final = 1 << 62
MAX_PAGES: Final = 1 << 17  # a 1M-token prompt in 256-token pages is 4,096 per component

Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Epoch = Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
AnyEpoch = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TotalBytes = Annotated[int, Meta(ge=0, le=MAX_TOTAL_BYTES)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Figure = Annotated[float, Meta(ge=-1e15, le=1e15)]  # for people; bounded to keep NaN and infinity out of JSON
Position = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Slug = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"\A[a-z0-9-]+\Z")]
Label = Annotated[str, Meta(min_length=1, max_length=128)]
Value = Annotated[str, Meta(max_length=512)]
Sentence = Annotated[str, Meta(max_length=1024)]
Payload = Annotated[bytes, Meta(max_length=MAX_PAYLOAD)]
Prompt = Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_PROMPT_TOKENS)]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all; shows no content."""

    def __repr__(self) -> str:
        handoff_id = getattr(self, "handoff_id", None)
        return f"<{type(self).__name__}{' ' + handoff_id.hex() if handoff_id else ''}>"


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First on every link, and again whenever it changes. `identity` is None until the engine is up; its `schema`
    field advertises the state schema. Unknown roles, capabilities and transports are ignored."""

    boot_id: Id
    name: Label
    roles: Annotated[tuple[Label, ...], Meta(max_length=8)]
    addresses: Annotated[tuple[Label, ...], Meta(max_length=16)]
    transports: Annotated[tuple[Label, ...], Meta(max_length=8)]
    capabilities: Annotated[tuple[Label, ...], Meta(max_length=64)] = ()
    identity: Identity | None = None


class Prefill(Message, frozen=True, kw_only=True, tag="prefill"):
    """Decoder to prefiller: compute this prompt's state. `prompt` is u32 little endian per token; all but the last
    are transferred. Seconds run on the prefiller's clock: the queue's from arrival, the transfer's from GRANT.
    `largest_page` is the biggest payload that the decoder's landing ring takes as one page."""

    handoff_id: Id
    identity: Identity
    prompt: Prompt
    tenant: Annotated[str, Meta(max_length=128)]
    queue_deadline_s: Seconds
    probe: bool = True
    largest_page: Annotated[int, Meta(ge=1, le=MAX_PAGE_BYTES)] = MAX_PAGE_BYTES

    @property
    def tokens(self) -> int:
        """Prompt tokens, the last one included."""
        return len(self.prompt) // 4


class Estimate(msgspec.Struct, frozen=True):
    component: Component
    nbytes: TotalBytes


class Reserve(Message, frozen=True, kw_only=True, tag="reserve"):
    """Prefiller to decoder: what will come. `tokens` counts those transferred; `largest_page` is the biggest payload
    that will ask for landing-ring credit."""

    handoff_id: Id
    identity: Identity
    state: StateSchema
    tenant: Annotated[str, Meta(max_length=128)]
    tokens: Tokens
    largest_page: Annotated[int, Meta(ge=0, le=MAX_PAGE_BYTES)]
    components: Annotated[tuple[Estimate, ...], Meta(max_length=16)]


class Grant(Message, frozen=True, kw_only=True, tag="grant"):
    """Decoder to prefiller: stream. `credit` is the first absolute limit, `seed` the secret of the page checksums."""

    handoff_id: Id
    epoch: Epoch
    credit: TotalBytes
    seed: Annotated[int, Meta(ge=0)]  # 64 bits; MessagePack has no larger integer
    deadline_s: Seconds


class Reject(Message, frozen=True, kw_only=True, tag="reject"):
    """Decoder to prefiller, instead of GRANT: the reason, and both values."""

    handoff_id: Id
    reason: Slug
    message: Sentence
    have: Value = ""
    want: Value = ""


class Credit(Message, frozen=True, kw_only=True, tag="credit"):
    """Decoder to prefiller: records may be sent until their sizes add up to `limit`, counted from GRANT."""

    handoff_id: Id
    epoch: Epoch
    limit: TotalBytes


class ComponentManifest(msgspec.Struct, frozen=True):
    """Everything one source sent of one component; `digest` covers its pages' addresses and checksums in order."""

    component: Component
    layers: tuple[Annotated[int, Meta(ge=0, le=MAX_LAYERS)], Annotated[int, Meta(ge=1, le=MAX_LAYERS)]]
    tokens: tuple[Annotated[int, Meta(ge=0, le=MAX_TOKENS)], Annotated[int, Meta(ge=1, le=MAX_TOKENS)]]
    pages: Annotated[int, Meta(ge=1, le=MAX_PAGES)]
    nbytes: Annotated[int, Meta(ge=1, le=MAX_TOTAL_BYTES)]
    digest: Digest


class Manifest(Message, frozen=True, kw_only=True, tag="manifest"):
    """Prefiller to decoder: all that was sent, and the engine's last positions. `solo`: no other sequence was in the
    engine context meanwhile, so equal hosts must agree bit for bit. `timings` are seconds, for people."""

    handoff_id: Id
    epoch: Epoch
    components: Annotated[tuple[ComponentManifest, ...], Meta(min_length=1, max_length=16)]
    position: Position
    mtp_position: Position | None = None
    source: Annotated[int, Meta(ge=0, le=0xFFFF)] = 0
    solo: bool = False
    timings: Annotated[dict[Label, Figure], Meta(max_length=64)] = {}


class CommitAck(Message, frozen=True, kw_only=True, tag="commit-ack"):
    """Decoder to prefiller: the state is committed here; the source may be released."""

    handoff_id: Id
    epoch: Epoch


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Either way: this handoff is over. `epoch` is 0 before GRANT."""

    handoff_id: Id
    epoch: AnyEpoch
    reason: Slug
    message: Sentence


class Generate(Message, frozen=True, kw_only=True, tag="generate"):
    """A front door on a prefill host asks its decode peer to serve a request. `payload` is the daemon's own."""

    request_id: Id
    payload: Payload


class GenerateEvent(Message, frozen=True, kw_only=True, tag="generate-event"):
    request_id: Id
    payload: Payload


class GenerateEnd(Message, frozen=True, kw_only=True, tag="generate-end"):
    """Exactly one per GENERATE. `reason` is None for success."""

    request_id: Id
    payload: Payload = b""
    reason: Slug | None = None
    message: Sentence = ""


class CancelGenerate(Message, frozen=True, kw_only=True, tag="generate-cancel"):
    request_id: Id


HandoffMessage = Prefill | Reserve | Grant | Reject | Credit | Manifest | CommitAck | Abort
AnyMessage = Hello | HandoffMessage | Generate | GenerateEvent | GenerateEnd | CancelGenerate

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Raises LocalProtocolError for a message that the peer would have to refuse."""
    data = bytes([WIRE_VERSION]) + _encoder.encode(message)
    try:
        decode(data)  # the bounds are checked by decoding only: a bad message must fail here, not at the peer
    except RemoteProtocolError as error:
        raise LocalProtocolError(
            "message", f"this host built a {type(message).__name__} out of bounds: {error}"
        ) from None
    return data


def decode(data: bytes | memoryview) -> AnyMessage:
    """Parse and bound-check one message. Raises RemoteProtocolError."""
    if not 1 < len(data) <= MAX_MESSAGE:
        raise RemoteProtocolError("message", f"control message of {len(data)} bytes, allowed are 2 to {MAX_MESSAGE}")
    if data[0] != WIRE_VERSION:
        raise RemoteProtocolError(
            "wire-version",
            f"peer speaks wire version {data[0]}, this host {WIRE_VERSION}: install the same zc-handoff on both",
        )
    try:
        message = _decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("message", f"control message refused: {error}") from None
    if isinstance(message, Prefill) and len(message.prompt) % 4:
        raise RemoteProtocolError("message", f"prompt of {len(message.prompt)} bytes is not whole 4-byte tokens")
    return message


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """A prompt as PREFILL carries it, and a token history as its page does: u32 little endian each."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes | memoryview) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))
