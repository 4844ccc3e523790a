"""What a GGUF file says about itself, read without loading weights: architecture, chat template, tokenizer digest.

A model file comes from anywhere, so every count is checked against the file's end before it is used. Reads metadata
only and keeps nothing open.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from pathlib import Path
from typing import Final

import msgspec

from zerocopy.runtime.base import EngineError

_MAX_KEYS: Final = 4096
_MAX_TEMPLATE_BYTES: Final = 1 << 20
_MAX_NAME: Final = 128  # characters of a name: it stands in every answer and on terminals
_STRING: Final = 8
_ARRAY: Final = 9
# GGUF value type -> bytes: u8 i8 u16 i16 u32 i32 f32 bool, then u64 i64 f64
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_INTEGERS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_TEMPLATE: Final = "tokenizer.chat_template"


class GgufHeader(msgspec.Struct, frozen=True):
    architecture: str
    name: str
    chat_template: str | None
    mtp_layers: int
    rope_scaling: str
    parts: int  # files that the weights are split into; this is the first
    tokenizer: str  # sha256 over all tokenizer metadata but chat templates, which only shape text


def read_header(path: Path) -> GgufHeader:
    """Raises EngineError `model-file` when the file is missing, truncated or not GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except OSError as error:
        raise EngineError("model-file", f"cannot read model {path}: {error.strerror or error}") from error
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise EngineError("model-file", f"{path} is not a whole GGUF file: {error}; fetch it again") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise ValueError("no GGUF magic")
        version, _, keys = self._unpack("<IQQ")
        if version not in (2, 3) or keys > _MAX_KEYS:
            raise ValueError(f"version {version} with {keys} keys, expected 2 or 3 with at most {_MAX_KEYS}")
        values: dict[str, tuple[int, int, int]] = {}
        for _ in range(keys):
            key = self._take(self._length()).decode()
            (kind,) = self._unpack("<I")
            start = self._at
            self._skip(kind)
            values[key] = (kind, start, self._at)
        architecture = self._name(values, "general.architecture")
        return GgufHeader(
            architecture=architecture,
            name=self._name(values, "general.name"),
            chat_template=self._text(values, _TEMPLATE),
            mtp_layers=self._integer(values, f"{architecture}.nextn_predict_layers"),
            rope_scaling=self._name(values, f"{architecture}.rope.scaling.type") or "none",
            parts=self._integer(values, "split.count") or 1,
            tokenizer=self._tokenizer(values),
        )

    def _unpack(self, layout: str) -> tuple[int, ...]:
        fields = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return fields

    def _length(self) -> int:
        (length,) = self._unpack("<Q")
        if length > len(self._data) - self._at:
            raise ValueError(f"a length of {length} at byte {self._at} reaches past the end")
        return length

    def _take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            (element,) = self._unpack("<I")
            count = self._length()
            if element == _STRING:
                for _ in range(count):
                    self._skip_string()
            else:
                self._at += count * _size(element)
        else:
            self._at += _size(kind)
        if self._at > len(self._data):
            raise ValueError("metadata reaches past the end")

    def _skip_string(self) -> None:
        length = self._length()
        self._at += length

    def _text(self, values: dict[str, tuple[int, int, int]], key: str) -> str | None:
        kind, start, end = values.get(key, (0, 0, 0))
        if kind != _STRING:
            return None
        if end - start > _MAX_TEMPLATE_BYTES:
            raise ValueError(f"{key} has {end - start} bytes, more than {_MAX_TEMPLATE_BYTES}")
        return self._data[start + 8 : end].decode()

    def _name(self, values: dict[str, tuple[int, int, int]], key: str) -> str:
        text = self._text(values, key) or ""
        return "".join(filter(str.isprintable, text))[:_MAX_NAME]

    def _integer(self, values: dict[str, tuple[int, int, int]], key: str) -> int:
        kind, start, _ = values.get(key, (_STRING, 0, 0))
        return int(struct.unpack_from(_INTEGERS[kind], self._data, start)[0]) if kind in _INTEGERS else 0

    def _tokenizer(self, values: dict[str, tuple[int, int, int]]) -> str:
        """Keys in sorted order: two writers of one tokenizer may order them differently."""
        digest = hashlib.sha256()
        for key in sorted(k for k in values if k.startswith("tokenizer.") and not k.startswith(_TEMPLATE)):
            kind, start, end = values[key]
            digest.update(struct.pack("<II", len(key), kind) + key.encode())  # values delimit themselves
            with memoryview(self._data) as data, data[start:end] as value:
                digest.update(value)
        return digest.hexdigest()


def _size(kind: int) -> int:
    if kind not in _SIZES:
        raise ValueError(f"unknown value type {kind}")
    return _SIZES[kind]
