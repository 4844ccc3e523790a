"""What compressing KV would cost and save. The wire has no codec: this measures codecs alone, in memory, on one core.

The buffer is made to look like KV and is random otherwise: F16 numbers, normal, with a scale of its own for every
channel, as keys and values of a layer have. Real caches compress about as badly (transport.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import lz4.block
import msgspec
import numpy as np
from numpy.typing import NDArray

from zerocopy.cli.measuring import GIB, gbps

CODECS: Final = ("none", "lz4", "shuffle+lz4")
SAMPLE_BYTES: Final = 4 << 20
CHANNELS: Final = 512  # 2 KV heads x 128, K and V
REPEATS: Final = 5

Bytes = NDArray[np.uint8]


class CodecCost(msgspec.Struct, frozen=True):
    name: str
    page_bytes: int
    encode_gbps: float  # raw bits a second, one core
    cpu_s_per_gib: float  # encoding and decoding one raw GiB
    ratio: float

    @property
    def pays_below_gbps(self) -> float:
        """On a slower link the bytes saved take longer than encoding does; 0 if too little is saved ever to pay.
        With encoding beside sending, time is the larger of raw / encode rate and encoded / link rate."""
        return self.encode_gbps if self.ratio > 1.01 else 0.0


def kv_like(nbytes: int, seed: int = 0) -> Bytes:
    random = np.random.default_rng(seed)
    scale = np.exp(random.normal(0.0, 1.0, CHANNELS)).astype(np.float32)
    rows = random.standard_normal((nbytes // 2 // CHANNELS, CHANNELS), np.float32) * scale
    return rows.astype(np.float16).view(np.uint8).reshape(-1)


def shuffled(raw: Bytes) -> Bytes:
    """All low bytes, then all high bytes: exponents beside exponents."""
    return np.ascontiguousarray(raw.reshape(-1, 2).T).reshape(-1)


def unshuffled(planes: Bytes) -> Bytes:
    return np.ascontiguousarray(planes.reshape(2, -1).T).reshape(-1)


def encode(name: str, raw: Bytes) -> bytes:
    return bytes(lz4.block.compress(shuffled(raw) if name == "shuffle+lz4" else raw))


def decode(name: str, encoded: bytes) -> Bytes:
    plain = np.frombuffer(lz4.block.decompress(encoded), np.uint8)
    return unshuffled(plain) if name == "shuffle+lz4" else plain


def codec_rows(names: Sequence[str], step: Callable[[str], None]) -> list[CodecCost]:
    raw = kv_like(SAMPLE_BYTES)
    return [_measure(name, raw, step) for name in names]


def _measure(name: str, raw: Bytes, step: Callable[[str], None]) -> CodecCost:
    step(f"codec {name}")
    encoded = encode(name, raw)
    began = time.thread_time()
    for _ in range(REPEATS):
        encoded = encode(name, raw)
    middle = time.thread_time()
    for _ in range(REPEATS):
        decoded = decode(name, encoded)
    ended = time.thread_time()
    assert np.array_equal(decoded, raw)
    total = REPEATS * len(raw)
    return CodecCost(
        name, len(raw), gbps(total, middle - began), (ended - began) / (total / GIB), len(raw) / len(encoded)
    )
