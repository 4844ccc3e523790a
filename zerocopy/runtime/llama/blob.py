"""The engine's state blobs: their exact geometry, and the check every one passes before the engine reads it.

The format is unversioned and the engine believes nearly anything: most corrupted headers are accepted and some abort
the process. So nothing reaches `set_data` unless each header byte equals what this host's own engine would write for
that token range. Only rows of numbers are free, and those have checksums. Layout (0.6, little endian, unified KV):

    u32 magic, i32 sequence
    per KV cache   u32 streams = 1, u32 cells
                   cells x {i32 position, u32 1, [i32 x, i32 y, i32 token: M-RoPE only], i32 sequence}
                   (only if cells > 0) u32 v_transposed, u32 layers, u32 k_rotation, u32 v_rotation
                   layers x {i32 type, u64 row bytes, cells x row}                               K
                   layers x {the same} or {i32 type, u32 element bytes, u32 channels, rows}      V, channel-major
    recurrent      u32 cells, cells x {i32 position, u32 0}, u32 transposed = 0, u32 model layers
                   layers x {i32 type, u64 row bytes, cells x row}                               convolution
                   layers x {the same}                                                           SSM

A page holds the KV caches of a token range and a recurrent section of no cells; a snapshot holds the recurrent
section of one cell and nothing else. Owns no memory; every function is pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from zerocopy.handoff.components import MAX_TOKENS, Component, ComponentSpec
from zerocopy.runtime.base import EngineError

MAGIC: Final = 0xAF143CD8
PAGE_SEQUENCE: Final = 1  # pages are of the scratch sequence that ranges are copied to

_PAGE_HEADER: Final = 8
_ROW_HEADER: Final = 12
_RECURRENT_HEADER: Final = 12  # cells, transposed, layers
_CELL: Final = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_M_ROPE_CELL: Final = np.dtype(
    [("position", "<i4"), ("sequences", "<u4"), ("x", "<i4"), ("y", "<i4"), ("token", "<i4"), ("sequence", "<i4")]
)
_SNAPSHOT_PREFIX: Final = struct.Struct("<IiIiIII")  # magic, sequence, cells, position, sequences, transposed, layers


class Row(msgspec.Struct, frozen=True):
    type: int  # ggml type
    bytes: int  # of one token's (or one snapshot's) numbers in one layer


class KvCache(msgspec.Struct, frozen=True):
    k: tuple[Row, ...]
    v: tuple[Row, ...]
    v_element: int  # bytes of one number where V is stored channel-major (flash attention off), else 0
    rotations: tuple[int, int]


class Recurrent(msgspec.Struct, frozen=True):
    model_layers: int
    convolution: tuple[Row, ...]
    state: tuple[Row, ...]


class Geometry(msgspec.Struct, frozen=True):
    """Everything about one context's blobs that does not depend on the tokens."""

    caches: tuple[KvCache, ...]
    recurrent: Recurrent | None
    m_rope: bool

    @property
    def cell(self) -> np.dtype[np.void]:
        return _M_ROPE_CELL if self.m_rope else _CELL


def page_spec(geometry: Geometry, component: Component, window: int = 0) -> ComponentSpec:
    """Exact size of a page: 8 + caches (8 + n cell + 16 + rows) + recurrent headers. A layer is one K and one V row;
    layers are in blob order, so in sliding-window models full-attention layers come first. From a page longer than
    `window` (0: none) the engine would leave masked rows out."""
    rows = [k.bytes + v.bytes for cache in geometry.caches for k, v in zip(cache.k, cache.v, strict=True)]
    overhead = _PAGE_HEADER + 24 * len(geometry.caches)
    if geometry.recurrent:
        overhead += _RECURRENT_HEADER + _ROW_HEADER * 2 * len(geometry.recurrent.state)
    return ComponentSpec(
        component,
        per_token=True,
        layer_bytes=tuple(rows),
        layer_overhead=2 * _ROW_HEADER,
        token_overhead=geometry.cell.itemsize * len(geometry.caches),
        page_overhead=overhead,
        max_page_tokens=window or MAX_TOKENS,
    )


def full_bytes(geometry: Geometry, tokens: int) -> int:
    """Size of a whole sequence's blob: all its tokens as one page, and the recurrent cell if there is one."""
    spec = page_spec(geometry, Component.ATTENTION_KV)
    size = spec.page_bytes((0, spec.layers), (0, tokens))
    if geometry.recurrent:
        size += 8 + sum(row.bytes for row in (*geometry.recurrent.convolution, *geometry.recurrent.state))
    return size


def snapshot_specs(recurrent: Recurrent) -> tuple[ComponentSpec, ComponentSpec]:
    """Convolution and recurrent rows; in front of them is a prefix of `SNAPSHOT_PREFIX_BYTES`."""
    kinds = ((Component.CONVOLUTION, recurrent.convolution), (Component.RECURRENT, recurrent.state))
    a, b = (ComponentSpec(c, False, tuple(r.bytes for r in rows), layer_overhead=_ROW_HEADER) for c, rows in kinds)
    return a, b


SNAPSHOT_PREFIX_BYTES: Final = _SNAPSHOT_PREFIX.size


def write_snapshot_prefix(blob: memoryview, geometry: Geometry, sequence: int, n_tokens: int) -> None:
    """The importing host writes the prefix itself: it never travels."""
    assert geometry.recurrent is not None
    _SNAPSHOT_PREFIX.pack_into(
        blob, 0, MAGIC, sequence, 1, n_tokens - 1, 0, 0, geometry.recurrent.model_layers
    )  # fmt: skip


def check_page(page: memoryview, geometry: Geometry, tokens: tuple[int, int], n_vocab: int) -> None:
    """Raise EngineError `blob` unless `page` is exactly a page of these tokens: all that follows is rows."""
    walk = _Walk(page)
    _check_page(walk, geometry, tokens, n_vocab)
    walk.finish()


def write_blank_page(page: memoryview, geometry: Geometry, tokens: tuple[int, int]) -> None:
    """Headers of these tokens' page around rows left as they are; for filling an engine without evaluating."""
    _check_page(_WritingWalk(page), geometry, tokens, n_vocab=1)


def _check_page(walk: _Walk, geometry: Geometry, tokens: tuple[int, int], n_vocab: int) -> None:
    cells = tokens[1] - tokens[0]
    walk.expect("magic", "<I", MAGIC)
    walk.expect("sequence", "<i", PAGE_SEQUENCE)
    for cache in geometry.caches:
        walk.expect("stream count", "<I", 1)
        walk.expect("cell count", "<I", cells)
        walk.expect_cells(geometry, tokens, n_vocab)
        _check_cache(walk, cache, cells)
    if geometry.recurrent:
        walk.expect("recurrent cell count", "<I", 0)
        _check_recurrent(walk, geometry.recurrent, 0)


def check_snapshot(blob: memoryview, geometry: Geometry, sequence: int, n_tokens: int) -> None:
    """Raise EngineError `blob` unless `blob` is exactly a recurrent snapshot of that sequence after `n_tokens`
    tokens. The prefix, which names the sequence, is this host's own."""
    assert geometry.recurrent is not None
    walk = _Walk(blob)
    walk.expect("magic", "<I", MAGIC)
    walk.expect("sequence", "<i", sequence)
    walk.expect("recurrent cell count", "<I", 1)
    walk.expect("position", "<i", n_tokens - 1)
    walk.expect("sequences of the cell", "<I", 0)
    _check_recurrent(walk, geometry.recurrent, 1)
    walk.finish()


def _check_cache(walk: _Walk, cache: KvCache, cells: int) -> None:
    walk.expect("V layout", "<I", int(cache.v_element > 0))
    walk.expect("layer count", "<I", len(cache.k))
    walk.expect("K rotation", "<I", cache.rotations[0])
    walk.expect("V rotation", "<I", cache.rotations[1])
    _check_rows(walk, "K", cache.k, cells)
    if not cache.v_element:
        _check_rows(walk, "V", cache.v, cells)
        return
    for row in cache.v:
        walk.expect("V type", "<i", row.type)
        walk.expect("V element bytes", "<I", cache.v_element)
        walk.expect("V channels", "<I", row.bytes // cache.v_element)
        walk.take(cells * row.bytes)


def _check_recurrent(walk: _Walk, recurrent: Recurrent, cells: int) -> None:
    walk.expect("recurrent layout", "<I", 0)
    walk.expect("model layer count", "<I", recurrent.model_layers)
    _check_rows(walk, "convolution", recurrent.convolution, cells)
    _check_rows(walk, "recurrent", recurrent.state, cells)


def _check_rows(walk: _Walk, what: str, rows: Iterable[Row], cells: int) -> None:
    for row in rows:
        walk.expect(f"{what} type", "<i", row.type)
        walk.expect(f"{what} row bytes", "<Q", row.bytes)
        walk.take(cells * row.bytes)


class _Walk:
    """A cursor that refuses to pass the end."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def take(self, count: int) -> memoryview:
        start, self._at = self._at, self._at + count
        if self._at > len(self._view):
            raise EngineError("blob", f"state blob ends at byte {len(self._view)}, inside a field at {start}")
        return self._view[start : self._at]

    def read(self, layout: str) -> int:
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])

    def expect(self, what: str, layout: str, value: int) -> None:
        found = self.read(layout)
        if found != value:
            raise EngineError("blob", f"state blob has {what} {found}, this engine's is {value}; the state is refused")

    def expect_cells(self, geometry: Geometry, tokens: tuple[int, int], n_vocab: int) -> None:
        cells = self.take((tokens[1] - tokens[0]) * geometry.cell.itemsize)
        found = np.frombuffer(cells, dtype=geometry.cell)
        positions = np.arange(*tokens, dtype=np.int32)
        right = (found["position"] == positions) & (found["sequences"] == 1) & (found["sequence"] == PAGE_SEQUENCE)
        if geometry.m_rope:  # text: all planes agree, and the token is one of the vocabulary
            right &= (found["x"] == positions) & (found["y"] == positions)
            right &= (found["token"] >= 0) & (found["token"] < n_vocab)
        if not right.all():
            wrong = tokens[0] + int(np.argmin(right))
            raise EngineError("blob", f"a cell of the page does not describe position {wrong}; the page is refused")

    def finish(self) -> None:
        if self._at != len(self._view):
            raise EngineError("blob", f"state blob has {len(self._view) - self._at} bytes after its end")

    @property
    def at_end(self) -> bool:
        return self._at == len(self._view)


class _WritingWalk(_Walk):
    """The same cursor, writing what it would have expected."""

    def expect(self, what: str, layout: str, value: int) -> None:
        self.take(struct.calcsize(layout))[:] = struct.pack(layout, value)

    def expect_cells(self, geometry: Geometry, tokens: tuple[int, int], n_vocab: int) -> None:
        cells = np.frombuffer(self.take((tokens[1] - tokens[0]) * geometry.cell.itemsize), dtype=geometry.cell)
        cells["position"] = np.arange(*tokens, dtype=np.int32)
        cells["sequences"], cells["sequence"] = 1, PAGE_SEQUENCE
        if geometry.m_rope:
            cells["x"] = cells["y"] = cells["position"]
            cells["token"] = 0


def discover(blob: memoryview, sequence: int, *, kv_caches: int, recurrent: bool, m_rope: bool) -> Geometry:
    """Geometry from a full blob that this host's engine just wrote of one sequence of at least one token.

    Raises EngineError `blob` when the bytes do not add up, which means the family's layout is not what we think."""
    walk = _Walk(blob)
    walk.expect("magic", "<I", MAGIC)
    walk.expect("sequence", "<i", sequence)
    empty = Geometry((), None, m_rope)
    caches = tuple(_discover_cache(walk, empty.cell.itemsize) for _ in range(kv_caches))
    section = _discover_recurrent(walk) if recurrent else None
    walk.finish()
    return Geometry(caches, section, m_rope)


def _discover_cache(walk: _Walk, cell_bytes: int) -> KvCache:
    walk.expect("stream count", "<I", 1)
    cells = walk.read("<I")
    walk.take(cells * cell_bytes)
    transposed, layers = walk.read("<I"), walk.read("<I")
    rotations = walk.read("<I"), walk.read("<I")
    k = tuple(_discover_row(walk, cells) for _ in range(layers))
    if not transposed:
        return KvCache(k, tuple(_discover_row(walk, cells) for _ in range(layers)), 0, rotations)
    v, element = [], 0
    for _ in range(layers):
        kind, element = walk.read("<i"), walk.read("<I")
        v.append(Row(kind, element * walk.read("<I")))
        walk.take(cells * v[-1].bytes)
    return KvCache(k, tuple(v), element, rotations)


def _discover_recurrent(walk: _Walk) -> Recurrent:
    cells = walk.read("<I")
    walk.take(8 * cells)
    walk.expect("recurrent layout", "<I", 0)
    model_layers = walk.read("<I")
    rows = []
    while not walk.at_end:  # layers without recurrent state are skipped, so only the end says how many there are
        rows.append(_discover_row(walk, cells))
    half, odd = divmod(len(rows), 2)
    if odd or not half:
        raise EngineError("blob", f"the recurrent section has {len(rows)} rows, not as many of each kind")
    return Recurrent(model_layers, tuple(rows[:half]), tuple(rows[half:]))


def _discover_row(walk: _Walk, cells: int) -> Row:
    row = Row(walk.read("<i"), walk.read("<Q"))
    walk.take(cells * row.bytes)
    return row
