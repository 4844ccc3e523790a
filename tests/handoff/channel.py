"""A channel that does to frames what networks, peers and bugs do. Tested itself in `test_channel.py`."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    DROP = "drop"
    DUPLICATE = "duplicate"
    SWAP = "swap"  # overtaken by the next frame
    HOLD = "hold"  # comes only when `let_go` is called: long after its time
    TRUNCATE = "truncate"  # cut to `at` bytes (modulo its length)
    FLIP = "flip"  # one bit wrong at byte `at` (modulo its length)


class Fault(NamedTuple):
    kind: Kind
    frame: int  # which frame of this channel, from 0
    at: int = 0


class Channel:
    """One direction of one stream: frames come out in order, but for the faults."""

    def __init__(self, faults: list[Fault] | None = None) -> None:
        self._faults = {f.frame: f for f in faults or []}
        self._frames: deque[bytes] = deque()
        self._overtaken: bytes | None = None
        self._held: list[bytes] = []
        self.sent = 0
        self.lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._frames) + (self._overtaken is not None)

    def put(self, frame: bytes) -> None:
        fault = self._faults.get(self.sent)
        self.sent += 1
        self.lengths.append(len(frame))
        overtaken, self._overtaken = self._overtaken, None
        match fault.kind if fault else None:
            case Kind.DROP:
                pass
            case Kind.DUPLICATE:
                self._frames += [frame, frame]
            case Kind.SWAP:
                self._overtaken = frame
            case Kind.HOLD:
                self._held.append(frame)
            case Kind.TRUNCATE:
                assert fault is not None
                self._frames.append(frame[: fault.at % len(frame)])
            case Kind.FLIP:
                assert fault is not None
                at = fault.at % len(frame)
                self._frames.append(frame[:at] + bytes([frame[at] ^ 1 << fault.at % 8]) + frame[at + 1 :])
            case None:
                self._frames.append(frame)
        if overtaken is not None:
            self._frames.append(overtaken)

    def get(self) -> bytes:
        """The next frame; one that waits to be overtaken comes by itself when nothing overtakes it."""
        if not self._frames and self._overtaken is not None:
            frame, self._overtaken = self._overtaken, None
            return frame
        return self._frames.popleft()

    def let_go(self) -> None:
        """What was held comes now, at the end."""
        self._frames += self._held
        self._held.clear()
