"""Messages between a daemon and its worker over one Unix stream socket.

Both ends are ours, of the same build and the same machine; still every frame is bounded, and a socket that closes
or breaks the framing means the other side died. Shared memory (rings, slabs) comes over the same socket as file
descriptors, once, with `Attach`. State never travels here: only addresses of it.

Times are readings of this machine's monotonic clock, in seconds: daemon and worker share it.
`job` numbers are minted by the daemon and never reused while a worker lives.
"""

from __future__ import annotations

import array
import socket
import threading
from typing import Final, Literal

import msgspec

from zerocopy.handoff.components import MAX_PAGE_BYTES
from zerocopy.runtime.base import EngineFacts
from zerocopy.worker.sampling import Sampling, TokenLogprob

MAX_FRAME: Final = 96 << 20  # a prompt of 16 MiB, every byte of it a token id of five
MAX_FDS: Final = 64


class ProtocolError(Exception):
    """The other end sent what no build of ours sends."""


# -- daemon to worker ------------------------------------------------------------------------------------------


class RingSpec(msgspec.Struct, frozen=True):
    """One ring of the pool: three descriptors follow (memory, data bell, space bell)."""

    capacity: int


class SlabSpec(msgspec.Struct, frozen=True):
    """One slab of the pool: one descriptor follows."""

    capacity: int


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The shared memory of this host, in pool order. Export and landing memory are separate pools."""

    export_rings: tuple[RingSpec, ...]
    export_slabs: tuple[SlabSpec, ...]
    landing_rings: tuple[RingSpec, ...]
    landing_slabs: tuple[SlabSpec, ...]


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    job: int
    text: str
    add_special: bool
    parse_special: bool
    literal: tuple[tuple[int, int], ...] = ()  # parts of the text, in order, where no control token is parsed


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Evaluate tokens[:-1] on a free lane of the prefill pool and export everything, in pages of at most
    `largest_page` bytes; evaluate tokens[-1] only as the probe."""

    job: int
    tokens: list[int]
    handoff_id: bytes
    epoch: int
    seed: int
    ring: int
    slab: int | None
    probe: bool
    lane: int = 0
    largest_page: int = MAX_PAGE_BYTES


class Release(msgspec.Struct, frozen=True, tag=True):
    """The job's state may go: committed elsewhere, or given up. Answered by `Dropped`, at every stage."""

    job: int


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Continue `tokens` on a free lane of the decode pool. With `ring` None the prompt is evaluated here; else it is
    imported."""

    job: int
    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    proof_key: bytes | None
    ring: int | None = None
    slab: int | None = None
    probe: bool = False
    lane: int = 0
    return_tokens: bool = False


class StateComplete(msgspec.Struct, frozen=True, tag=True):
    """Every state page of the import has been published: finish it and evaluate the last prompt token."""

    job: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """The handoff is committed; only now may tokens be generated from it."""

    job: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Pong` between two engine calls: the loop comes round."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


ToWorker = Attach | Tokenize | Prefill | Release | Generate | StateComplete | Commit | Ping | Shutdown


Span = tuple[float, float, int]  # began, ended, bytes


# -- worker to daemon ------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: EngineFacts
    pid: int


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served here; trying again will not help."""

    reason: str
    message: str


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    job: int
    tokens: list[int]


class SlabPart(msgspec.Struct, frozen=True):
    """One page that lies in a slab: packed header, and where its payload is."""

    header: bytes
    offset: int
    nbytes: int


class SnapshotReady(msgspec.Struct, frozen=True, tag=True):
    """Parts of the snapshot that may leave, in page order; more may follow."""

    job: int
    parts: tuple[SlabPart, ...]


class ChunkDone(msgspec.Struct, frozen=True, tag=True):
    """One prompt chunk was evaluated; `tokens` is how far the prompt is."""

    job: int
    tokens: int
    started: float
    ended: float


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """Everything is exported, the probe too."""

    job: int
    target_position: int
    mtp_position: int | None
    pages: int
    marks: dict[str, float]
    exports: tuple[Span, ...]
    solo: bool  # no other sequence was in the pool: nothing but the prompt decided the last bit


class Imported(msgspec.Struct, frozen=True, tag=True):
    """The state is in the engine, positions agree, and the last prompt token is evaluated."""

    job: int
    marks: dict[str, float]
    imports: tuple[Span, ...]
    solo: bool  # as in `Prefilled`


class Verified(msgspec.Struct, frozen=True, tag=True):
    """What the comparison with the source's probe gave: `exact`, or the relative rms error. What to think of it is
    the daemon's to say."""

    job: int
    exact: bool
    error: float


class TextDelta(msgspec.Struct, frozen=True, tag=True):
    job: int
    text: str
    tokens: int
    logprob: TokenLogprob | None = None  # of the token, where they were asked for


class Generated(msgspec.Struct, frozen=True, tag=True):
    job: int
    reason: Literal["stop", "length"]
    completion_tokens: int
    prompt_tokens_evaluated: int  # on this host; after an import the engine's own count
    marks: dict[str, float]
    proof: dict[str, object] | None
    tokens: tuple[int, ...] = ()  # all that were chosen, where they were asked for


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """The worker holds nothing of this job any more: no sequence, no view of its ring or slab."""

    job: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This job failed, the worker lives and its lane is cleared; `Release` still ends the job."""

    job: int
    reason: str
    message: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The worker lives."""


ToDaemon = (
    Ready
    | StartFailed
    | Pong
    | Tokenized
    | SnapshotReady
    | ChunkDone
    | Prefilled
    | Imported
    | Verified
    | TextDelta
    | Generated
    | Dropped
    | Failed
)

_encoder: Final = msgspec.msgpack.Encoder()
_to_worker: Final = msgspec.msgpack.Decoder(ToWorker)
_to_daemon: Final = msgspec.msgpack.Decoder(ToDaemon)


def encode(message: ToWorker | ToDaemon) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"frame of {len(body)} bytes, at most {MAX_FRAME}")
    return len(body).to_bytes(4, "little") + body


def frame_length(prefix: bytes | bytearray | memoryview) -> int:
    length = int.from_bytes(prefix[:4], "little")
    if length > MAX_FRAME:
        raise ProtocolError(f"frame of {length} bytes, at most {MAX_FRAME}")
    return length


def decode_to_daemon(body: bytes | memoryview) -> ToDaemon:
    try:
        return _to_daemon.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"worker sent a frame that does not decode: {error}") from None


class Frames:
    """Cuts a stream of bytes into the bodies of frames. Owns what is here of the next one."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are whole now. Raises ProtocolError for one that is too large."""
        whole = not self._held  # mostly: then nothing is copied here but the bodies
        if not whole:
            self._held += data
        source = data if whole else self._held
        bodies, at = list[bytes](), 0
        while len(source) - at >= 4:
            start = at + 4
            end = start + frame_length(source[at:start])
            if len(source) < end:
                break
            bodies.append(bytes(source[start:end]))
            at = end
        if whole:
            self._held += data[at:]
        else:
            del self._held[:at]
        return bodies


class _Together:
    """A block of `WorkerSocket.together`, as a class: entered for every token, a generator costs 15 us more."""

    def __init__(self, sock: WorkerSocket) -> None:
        self._sock = sock

    def __enter__(self) -> None:
        self._sock.gather()

    def __exit__(self, *_: object) -> None:
        self._sock.send_gathered()


class WorkerSocket:
    """The worker's end: blocking, on the engine thread except `send_at_once`; collects descriptors as they come."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = Frames()
        self._gathered: bytearray | None = None
        self._together = _Together(self)
        self._writing = threading.Lock()
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: ToDaemon) -> None:
        if self._gathered is None:
            self._write(encode(message))
        else:
            self._gathered += encode(message)

    def send_at_once(self, message: ToDaemon) -> None:
        """From any thread."""
        self._write(encode(message))

    def together(self) -> _Together:
        """What is sent in here leaves in one write at its end: the daemon wakes once for a token of each sequence."""
        return self._together

    def gather(self) -> None:
        self._gathered = bytearray()

    def send_gathered(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered:
            self._write(gathered)

    def receive(self) -> list[ToWorker]:
        """Every whole message that is here, after one blocking read. Raises EOFError when the daemon is gone."""
        messages: list[ToWorker] = []
        for body in self._frames.feed(self._read()):
            try:
                messages.append(_to_worker.decode(body))
            except msgspec.DecodeError as error:
                raise ProtocolError(f"daemon sent a frame that does not decode: {error}") from None
        return messages

    def take_fd(self) -> int:
        """The next descriptor that came, in sending order."""
        if not self._fds:
            raise ProtocolError("a descriptor was announced but did not come")
        return self._fds.pop(0)

    def _write(self, frames: bytes | bytearray) -> None:
        with self._writing:  # a large frame leaves in several writes
            self._sock.sendall(frames)

    def _read(self) -> bytes:
        size = array.array("i").itemsize
        data, ancillary, _flags, _address = self._sock.recvmsg(1 << 20, socket.CMSG_SPACE(MAX_FDS * size))
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % size])
                self._fds.extend(fds)
        if not data:
            raise EOFError
        return data
