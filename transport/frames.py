"""Every byte the TCP link puts on the wire, and the keys that protect it. Sans-IO: no socket, thread, clock or loop.

Control connection (inside TLS 1.3), little endian:

    frame     u32 body length | u8 channel | body          channel 0: the link's own messages, 1: the application's

Bulk connection (one raw TCP stream; keys from a secret sent over the control connection):

    preamble  "ZCB1" | 16-byte stream id                    connecting side only, once
    record    u8 kind | u8 flags | u16 0 | u32 length | u64 page | u64 offset || ciphertext (length) | 16-byte tag

    OPEN   first record each way, empty: proves the key. Associated data ends with the preamble.
    PAGE   opens a run of DATA for one page; a DATA record follows at once.
           Plaintext: u64 payload bytes | u32 record bytes | page header.
    DATA   `length` bytes of that page at `offset`; flag 1 on the page's last record. Associated data ends with PAGE's
           plaintext, so a record cannot move to another page, place, length or header.
    REKEY  empty: the sender's next record uses the next key of its chain.

Keys: HKDF-SHA256 over the stream's secret, salted with its id; one chain per direction, AES-128-GCM. The nonce is the
count of records under the key, never sent: a lost, repeated or reordered record fails its tag. A record's header is
always associated data. Bounds: `MAX_MESSAGE`, `MAX_INTERNAL`, `MAX_RECORD`, `MAX_HEADER`, `KEY_BYTES` per key.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from transport.link import MAX_HEADER, MAX_MESSAGE, LinkError

VERSION: Final = 1
MAX_INTERNAL: Final = 16 << 10
MAX_RECORD: Final = 2 << 20
MIN_RECORD: Final = 1 << 12
MAX_PAYLOAD: Final = 1 << 34  # 4 Mi records of the smallest size: what a peer's page can make this host count
WINDOW: Final = 1024  # pages announced and not yet acknowledged, per direction of a link
# 2**32 AES blocks under one key: 64 times less than TLS 1.3 allows AES-GCM (RFC 8446, 5.5).
KEY_BYTES: Final = 1 << 36

APPLICATION: Final = 1
INTERNAL: Final = 0
_FRAME: Final = struct.Struct("<IB")


def malformed(what: str) -> LinkError:
    return LinkError("frame-malformed", f"{what}: the peer is broken, of another version, or not zc-handoff")


# -- control connection


def frame(channel: int, body: bytes) -> bytes:
    return _FRAME.pack(len(body), channel) + body


class FrameReader:
    """Cuts a byte stream into (channel, body). Holds at most one frame and what came with it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Raises LinkError on the first frame out of bounds, before any of its body is kept."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _FRAME.size:
                length, channel = _FRAME.unpack_from(self._buffer, start)
                if channel not in (INTERNAL, APPLICATION):
                    raise malformed(f"frame on channel {channel}, known are 0 and 1")
                limit = MAX_MESSAGE if channel == APPLICATION else MAX_INTERNAL
                if length > limit:
                    raise malformed(f"frame of {length} bytes on channel {channel}, the limit is {limit}")
                end = start + _FRAME.size + length
                if len(self._buffer) < end:
                    return
                body = bytes(memoryview(self._buffer)[start + _FRAME.size : end])
                start = end
                yield channel, body
        finally:
            del self._buffer[:start]


class Hello(NamedTuple):
    """First message each way: this side has accepted the other's key."""

    version: int


class Ping(NamedTuple):
    number: int


class Pong(NamedTuple):
    number: int


class OpenStream(NamedTuple):
    """Connecting side: a bulk connection with this id and secret will follow."""

    stream_id: bytes
    secret: bytes


class StreamReady(NamedTuple):
    stream_id: bytes


class Announce(NamedTuple):
    """A PAGE record again, after the stream that carried it was lost."""

    page: int
    announcement: bytes


class Done(NamedTuple):
    """These pages are complete here, or dropped: the sender may forget them."""

    pages: tuple[int, ...]


class Cancel(NamedTuple):
    page: int


class Bye(NamedTuple):
    reason: str


Internal = Hello | Ping | Pong | OpenStream | StreamReady | Announce | Done | Cancel | Bye

_FIXED: Final = {
    1: (Hello, struct.Struct("<H")),
    2: (Ping, struct.Struct("<Q")),
    3: (Pong, struct.Struct("<Q")),
    4: (OpenStream, struct.Struct("<16s32s")),
    5: (StreamReady, struct.Struct("<16s")),
    8: (Cancel, struct.Struct("<Q")),
}
_ANNOUNCE, _DONE, _BYE = 6, 7, 9
_CODES: Final = {kind: code for code, (kind, _) in _FIXED.items()}


def check_hello(message: Internal | None, peer: str) -> None:
    """Raises LinkError unless it is the hello of a peer that speaks this version. None: an application's message."""
    if not isinstance(message, Hello):
        raise malformed("the first message was no hello")
    if message.version != VERSION:
        versions = f"{peer} speaks link version {message.version}, this host {VERSION}"
        raise LinkError("version-mismatch", f"{versions}: install the same zc-handoff on both")


def encode(message: Internal) -> bytes:
    if isinstance(message, Announce):
        return struct.pack("<BQ", _ANNOUNCE, message.page) + message.announcement
    if isinstance(message, Done):
        return struct.pack(f"<B{len(message.pages)}Q", _DONE, *message.pages)
    if isinstance(message, Bye):
        return bytes([_BYE]) + message.reason.encode("ascii", "replace")[:64]
    code = _CODES[type(message)]
    return bytes([code]) + _FIXED[code][1].pack(*message)


def decode(body: bytes) -> Internal:
    """Raises LinkError for anything that `encode` does not produce."""
    code, rest = (body[0], body[1:]) if body else (0, b"")
    if code in _FIXED:
        kind, layout = _FIXED[code]
        if len(rest) != layout.size:
            raise malformed(f"{kind.__name__} of {len(rest)} bytes, not {layout.size}")
        message: Internal = kind(*layout.unpack(rest))
        return message
    if code == _ANNOUNCE and len(rest) > 8:
        return Announce(int.from_bytes(rest[:8], "little"), rest[8:])
    if code == _DONE and rest and len(rest) % 8 == 0 and len(rest) <= 8 * WINDOW:
        return Done(struct.unpack(f"<{len(rest) // 8}Q", rest))
    if code == _BYE and len(rest) <= 64 and rest.isascii() and rest.decode().isprintable():
        return Bye(rest.decode())
    raise malformed(f"unknown or malformed link message {code} of {len(body)} bytes")


# -- bulk connection

MAGIC: Final = b"ZCB1"
ID_BYTES: Final = 16
SECRET_BYTES: Final = 32
PREAMBLE: Final = len(MAGIC) + ID_BYTES
TAG: Final = 16
FINAL: Final = 1
_RECORD: Final = struct.Struct("<BBHIQQ")
RECORD_HEADER: Final = _RECORD.size
OPENING: Final = RECORD_HEADER + TAG  # size of an OPEN or REKEY record
_PAGE: Final = struct.Struct("<QI")
MAX_ANNOUNCEMENT: Final = _PAGE.size + MAX_HEADER


class Kind(enum.IntEnum):
    OPEN = 1
    PAGE = 2
    DATA = 3
    REKEY = 4


# by wire value: the kind and the longest plaintext it may have
_KINDS: Final = {kind.value: (kind, limit) for kind, limit in (
    (Kind.OPEN, 0), (Kind.PAGE, MAX_ANNOUNCEMENT), (Kind.DATA, MAX_RECORD), (Kind.REKEY, 0)
)}  # fmt: skip


class RecordHeader(NamedTuple):
    kind: Kind
    final: bool
    length: int
    page: int
    offset: int

    def pack(self) -> bytes:
        return _RECORD.pack(self.kind, FINAL if self.final else 0, 0, self.length, self.page, self.offset)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> RecordHeader:
        """Bounds only: nothing is authentic before the record's tag is."""
        code, flags, zero, length, page, offset = _RECORD.unpack_from(data)
        kind, limit = _KINDS.get(code, (Kind.OPEN, -1))
        if length > limit or flags not in (0, FINAL) or zero:
            raise malformed(f"record of kind {code}, flags {flags}, length {length}")
        return cls(kind, bool(flags), length, page, offset)


@dataclass(frozen=True)
class PageShape:
    """A page as its sender announced it, and the cut into records that both sides derive from that."""

    payload_bytes: int
    record_bytes: int
    header: bytes

    @functools.cached_property
    def records(self) -> int:
        return -(-self.payload_bytes // self.record_bytes)

    @functools.cached_property
    def packed(self) -> bytes:
        """PAGE's plaintext, and the end of each of its records' associated data."""
        return _PAGE.pack(self.payload_bytes, self.record_bytes) + self.header

    def record(self, page: int, index: int) -> RecordHeader:
        offset = index * self.record_bytes
        length = min(self.record_bytes, self.payload_bytes - offset)
        return RecordHeader(Kind.DATA, index == self.records - 1, length, page, offset)

    def index_of(self, record: RecordHeader) -> int:
        """Raises LinkError unless the record is one of this page's cut."""
        index, rest = divmod(record.offset, self.record_bytes)
        left = self.payload_bytes - record.offset
        length = min(left, self.record_bytes)
        if rest or left <= 0 or (record.length, record.final) != (length, left == length):
            raise malformed(f"record [{record.offset}, +{record.length}) of a page of {self.payload_bytes} bytes")
        return index

    @classmethod
    def unpack(cls, data: bytes) -> PageShape:
        if not _PAGE.size < len(data) <= MAX_ANNOUNCEMENT:
            raise malformed(f"page announcement of {len(data)} bytes")
        payload_bytes, record_bytes = _PAGE.unpack_from(data)
        if not (0 < payload_bytes <= MAX_PAYLOAD and MIN_RECORD <= record_bytes <= MAX_RECORD):
            raise malformed(f"page of {payload_bytes} bytes in records of {record_bytes}")
        return cls(payload_bytes, record_bytes, data[_PAGE.size :])


def check_page(header: bytes, payload: memoryview) -> None:
    """Raises LinkError for a page that no link takes."""
    if not 0 < len(header) <= MAX_HEADER or not 0 < payload.nbytes <= MAX_PAYLOAD:
        sizes = f"page of {payload.nbytes} bytes, header of {len(header)}"
        raise LinkError("page-bounds", f"{sizes}: split it or fix the caller")


def preamble(stream_id: bytes) -> bytes:
    return MAGIC + stream_id


class KeyChain:
    """The keys of one direction of one stream, and the nonce: a 96-bit count of records under the current key."""

    def __init__(self, secret: bytes, stream_id: bytes, direction: str, key_bytes: int = KEY_BYTES) -> None:
        label = f"zc-handoff bulk 1 {direction}".encode()
        self._chain = HKDF(hashes.SHA256(), 32, salt=stream_id, info=label).derive(secret)
        self._key_bytes = key_bytes
        self._start()

    def _start(self) -> None:
        self.cipher = AESGCM(HKDFExpand(hashes.SHA256(), 16, b"zc-handoff key").derive(self._chain))
        self._count = 0
        self._used = 0

    def nonce(self, length: int) -> bytes:
        """For the next record, of `length` plaintext bytes. Raises LinkError on a key that should be dead."""
        self._used += length + OPENING
        if self._used > 2 * self._key_bytes:
            raise malformed(f"a key was used for {self._used} bytes, its limit is {self._key_bytes}")
        nonce = self._count.to_bytes(12, "little")
        self._count += 1
        return nonce

    @property
    def worn(self) -> bool:
        return self._used >= self._key_bytes

    def advance(self) -> None:
        self._chain = HKDFExpand(hashes.SHA256(), 32, b"zc-handoff next").derive(self._chain)
        self._start()


def key_chains(
    secret: bytes, stream_id: bytes, *, connecting: bool, key_bytes: int = KEY_BYTES
) -> tuple[KeyChain, KeyChain]:
    """(to send with, to receive with)."""
    there = KeyChain(secret, stream_id, "connecting to listening", key_bytes)
    back = KeyChain(secret, stream_id, "listening to connecting", key_bytes)
    return (there, back) if connecting else (back, there)


def seal(keys: KeyChain, header: RecordHeader, plaintext: bytes | memoryview, bound: bytes, into: memoryview) -> int:
    """Write one record at the start of `into`; returns its size. `bound` is the rest of the associated data."""
    packed = header.pack()
    end = RECORD_HEADER + header.length + TAG
    into[:RECORD_HEADER] = packed
    keys.cipher.encrypt_into(keys.nonce(header.length), plaintext, packed + bound, into[RECORD_HEADER:end])
    return end


def unseal(keys: KeyChain, head: bytes, sealed: memoryview, bound: bytes, into: memoryview) -> None:
    """Decrypt `sealed` (ciphertext and tag) into `into`, of exactly the plaintext's length. `head` is the record's
    header as it came. On LinkError ("record-tampered") `into` may hold unauthenticated bytes: the caller wipes it."""
    try:
        keys.cipher.decrypt_into(keys.nonce(len(into)), sealed, head + bound, into)
    except InvalidTag:
        raise LinkError(
            "record-tampered", "a record failed its authentication tag: the path changes data, or is attacked"
        ) from None
