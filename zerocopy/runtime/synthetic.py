"""A runtime without weights: the exact state geometry of a large model, at a compute speed one can set.

For benches and for economics: it makes overlap and tail measurable without a 70 GB model, and is never a model: its
identity says synthetic in every field, it understands nothing and its answers are noise. Computing is sleeping, so it
leaves the processor to the data plane, as a GPU would.

Every byte of state is checkable. After t tokens the lane stands at a 64-bit prefix value P(t) of the tokens so far.
State is cells of a KiB: a cell's first word is its stamp, P(t) under a salt of component, layer and place in the row;
the rest is zero. An import reads every byte, as copying it into an engine would, and refuses a cell that is missing,
misplaced, of another prompt or changed (by the xor of a layer's words: pages have checksums of their own). Logits
derive from everything that was imported. Bound: 8 bytes a token of `n_ctx`, 8 bytes a cell of a snapshot, two rows of
logits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from zerocopy.handoff.components import Component, ComponentSpec, Identity, StateSchema
from zerocopy.runtime.base import EngineCounters, EngineError, EngineFacts, Logits, Output, Positions, Row
from zerocopy.runtime.pages import PAGE_BYTES, page_tokens

SUFFIX: Final = ".synthetic.json"
MAX_DESCRIPTOR_BYTES: Final = 1 << 16

Words = NDArray[np.uint64]
Range = tuple[int, int]

_CELL_BYTES: Final = 1024  # divides every row
_CELL_WORDS: Final = _CELL_BYTES // 8
_BLOCK_CELLS: Final = 1024  # written at a time: a core's own cache still has the cells when their stamps come
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STATE: Final = (Component.ATTENTION_KV, Component.CONVOLUTION, Component.RECURRENT, Component.MTP_KV,
                 Component.MTP_HIDDEN)  # fmt: skip
_PAGED: Final = (Component.ATTENTION_KV, Component.MTP_KV)
_UNKNOWN: Final = -1  # an import of the part began and did not end well


class Geometry(msgspec.Struct, frozen=True):
    """Bytes of state, F16 KV. Rows are whole cells."""

    attention_layers: int
    attention_row: int  # K and V of one token in one layer
    recurrent_layers: int
    convolution_row: int
    recurrent_row: int
    mtp_row: int
    hidden_row: int
    n_vocab: int


GeometryName = Literal["nemotron-3-super", "small"]

GEOMETRIES: Final[dict[GeometryName, Geometry]] = {
    # NVIDIA Nemotron 3 Super 120B-A12B, from its public config.json and llama.cpp's size formulas (machine-profiles):
    # attention 8 layers x 2 KV heads x 128 x (K, V) x 2 bytes = 8,192 bytes a token; Mamba-2 40 layers, convolution
    # (4 - 1) x (128 x 64 + 2 x 8 x 128) x 4 bytes, SSM 128 x 64 x 128 x 4 bytes; one MTP attention layer; hidden
    # 4096 x 4 bytes; 131,072 words.
    "nemotron-3-super": Geometry(
        attention_layers=8, attention_row=1024, recurrent_layers=40, convolution_row=122_880, recurrent_row=4_194_304,
        mtp_row=1024, hidden_row=16_384, n_vocab=131_072,
    ),
    # The same parts, small: for tests.
    "small": Geometry(
        attention_layers=2, attention_row=1024, recurrent_layers=3, convolution_row=3072, recurrent_row=65_536,
        mtp_row=1024, hidden_row=1024, n_vocab=512,
    ),
}  # fmt: skip

# DGX Spark, Nemotron 3 Super Q4_K, pp2048 and tg32 (llama.cpp PR #20420, in machine-profiles).
GB10_PREFILL: Final = 768.84
GB10_DECODE: Final = 19.94

Speed = Annotated[float, Meta(ge=0, le=1e9)]


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a `.synthetic.json` file says. Speeds are tokens a second; 0 takes no time."""

    geometry: GeometryName = "nemotron-3-super"
    prefill_tokens_per_s: Speed = 0.0
    decode_tokens_per_s: Speed = 0.0


class SyntheticOptions(msgspec.Struct, frozen=True):
    n_ctx: int = 4096
    chunk_tokens: int = 256
    page_tokens: int = 0  # at most; 0: chosen by bytes (`runtime.pages`)
    kv_type: str = "f16"
    sequences: int = 1
    page_bytes: int = PAGE_BYTES  # the most that a ring takes as one page
    kv_tokens: int = 0  # 0: n_ctx for every sequence; nothing is allocated for it


def is_descriptor(path: str | Path) -> bool:
    return Path(path).name.endswith(SUFFIX)


def read_descriptor(path: str | Path) -> Descriptor:
    """Raises EngineError `descriptor`, saying what is wrong with the file."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_DESCRIPTOR_BYTES)
        return msgspec.json.decode(data, type=Descriptor)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(
            "descriptor", f"cannot use {path}: {error}: write one with `zc-handoff model make synthetic`"
        ) from None


def write_descriptor(path: Path, descriptor: Descriptor) -> None:
    """Raises OSError, and ValueError for a name by which nobody would know the file for what it is."""
    if not is_descriptor(path):
        raise ValueError(f"{path.name} must end in {SUFFIX}: that is how a synthetic model is told from a real one")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(descriptor)) + b"\n")


def state_schema(name: str, geometry: Geometry) -> StateSchema:
    """Rows only: unlike an engine's blobs, synthetic pages have no headers inside."""

    def paged(component: Component, layers: int, row: int) -> ComponentSpec:
        return ComponentSpec(component, per_token=True, layer_bytes=(row,) * layers)

    def final(component: Component, layers: int, row: int) -> ComponentSpec:
        return ComponentSpec(component, per_token=False, layer_bytes=(row,) * layers)

    g = geometry
    specs = (
        paged(Component.ATTENTION_KV, g.attention_layers, g.attention_row),
        final(Component.CONVOLUTION, g.recurrent_layers, g.convolution_row),
        final(Component.RECURRENT, g.recurrent_layers, g.recurrent_row),
        paged(Component.MTP_KV, 1, g.mtp_row),
        final(Component.MTP_HIDDEN, 1, g.hidden_row),
        paged(Component.TOKENS, 1, 4),
        final(Component.PROBE, 2, 4 * g.n_vocab),
    )
    return StateSchema(family=f"synthetic-{name}", components=tuple(sorted(specs, key=lambda s: s.component)))


class SyntheticRuntime:
    """Implements `Runtime`."""

    def __init__(self, path: str | Path, options: SyntheticOptions) -> None:
        self._descriptor = read_descriptor(path)
        name = self._descriptor.geometry
        _check(options)
        self._n_vocab = GEOMETRIES[name].n_vocab
        schema = state_schema(name, GEOMETRIES[name])
        self.facts = EngineFacts(
            identity=_identity(name, schema),
            schema=schema,
            model_name=f"synthetic {name}",
            n_ctx=options.n_ctx,
            sequences=options.sequences,
            kv_tokens=options.kv_tokens or options.n_ctx * options.sequences,
            exporting_lanes=options.sequences,
            n_vocab=self._n_vocab,
            chunk_tokens=options.chunk_tokens,
            page_tokens=page_tokens(schema, options.chunk_tokens, options.page_tokens, options.page_bytes),
            page_bytes=0 if options.page_tokens else options.page_bytes,
            export_before_next_chunk=False,
            chat_template=None,
            bos_token="",
            eos_token="",
            batch_invariant=True,
            mtp="tracked",
        )

    def open_pool(self) -> SyntheticPool:
        return SyntheticPool(self.facts, self._descriptor)

    def open_lane(self) -> SyntheticLane:
        return SyntheticPool(msgspec.structs.replace(self.facts, sequences=1), self._descriptor).lane(0)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """A byte is a token."""
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return f" {token}".encode()

    def is_end(self, token: int) -> bool:
        return False  # it always speaks until it is stopped

    def close(self) -> None:
        """Nothing is held."""


class SyntheticPool:
    """Implements `Pool`: keeps the time and the counters of its lanes."""

    def __init__(self, facts: EngineFacts, descriptor: Descriptor) -> None:
        self._pace = {"prefill": descriptor.prefill_tokens_per_s, "decode": descriptor.decode_tokens_per_s}
        self._counters = EngineCounters(0, 0)
        self._lanes = [SyntheticLane(self, facts) for _ in range(facts.sequences)]

    def lane(self, number: int) -> SyntheticLane:
        return self._lanes[number]

    def evaluate(self, rows: Sequence[Row]) -> list[Output | EngineError]:
        began = time.monotonic()
        lanes = [next(lane for lane in self._lanes if lane is row.lane) for row in rows]
        answers: list[Output | EngineError] = []
        for lane, row in zip(lanes, rows, strict=True):
            answers.append(lane.refusal(row.tokens, row.start) or lane.append(row.tokens, row.start))
        rows = [row for row, answer in zip(rows, answers, strict=True) if isinstance(answer, Output)]
        total = sum(len(row.tokens) for row in rows)
        if total == 1:
            self._counters.single_tokens += 1
        else:
            self._counters.prompt_tokens += total
        # One token of every sequence costs one pass over the weights, like one token of one sequence.
        prompt_tokens = sum(len(row.tokens) for row in rows if len(row.tokens) > 1)
        self.work("prefill", prompt_tokens, began)
        self.work(
            "decode", int(any(len(row.tokens) == 1 for row in rows)), time.monotonic() if prompt_tokens else began
        )
        return answers

    def work(self, kind: str, tokens: int, began: float) -> None:
        """Take the time that so many tokens take at the set speed."""
        if self._pace[kind]:
            time.sleep(max(0.0, began + tokens / self._pace[kind] - time.monotonic()))

    def reset_counters(self) -> None:
        self._counters = EngineCounters(0, 0)

    def counters(self) -> EngineCounters:
        return EngineCounters(self._counters.prompt_tokens, self._counters.single_tokens)

    def close(self) -> None:
        for lane in self._lanes:
            lane.clear()


class SyntheticLane:
    """Implements `Lane`. Each part of the state knows after how many tokens it is valid."""

    def __init__(self, pool: SyntheticPool, facts: EngineFacts) -> None:
        self.pool = pool
        self._facts = facts
        self._schema = facts.schema
        self._prefix = np.zeros(facts.n_ctx + 1, np.uint64)  # P(t); untouched pages take no memory
        self._reach = 0  # no P beyond it was ever written
        self._salts = {c: _salts(self._spec(c)) for c in _STATE}
        self._noise = np.random.default_rng(1).standard_normal(facts.n_vocab, np.float32)
        self._valid = dict.fromkeys(_STATE, 0)
        self._folds = dict.fromkeys(_STATE, 0)
        self._mtp_logits: Logits | None = None

    # -- evaluation ------------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        self._evaluate(tokens, start)
        self._mtp_logits = None

    def evaluate(self, token: int, position: int) -> Logits:
        return self._evaluate([token], position).logits

    def mtp_logits(self) -> Logits | None:
        return self._mtp_logits

    def probe(self, token: int, position: int) -> Logits:
        began = time.monotonic()
        if error := self.refusal([token], position):
            raise error
        value = self._advance([token], position)
        logits = self._logits(self._folded(value))
        self.pool.work("decode", 1, began)
        return logits

    def _evaluate(self, tokens: Sequence[int], start: int) -> Output:
        (answer,) = self.pool.evaluate([Row(self, tokens, start)])
        if isinstance(answer, EngineError):
            raise answer
        return answer

    def append(self, tokens: Sequence[int], start: int) -> Output:
        """The pool's: evaluate tokens that were not refused."""
        values = self._advance(tokens, start)
        end = start + len(tokens)
        self._remember((start, end), values)
        self._folds = self._folded(values)
        self._valid = dict.fromkeys(_STATE, end)
        if len(tokens) > 1:
            return Output(self._noise, None)
        return Output(self._logits(self._folds), self._mtp_logits)

    def _remember(self, tokens: Range, values: Words) -> None:
        self._prefix[tokens[0] + 1 : tokens[1] + 1] = values
        self._reach = max(self._reach, tokens[1])

    def refusal(self, tokens: Sequence[int], start: int) -> EngineError | None:
        """None if the whole state stands at `start` and the tokens may follow."""
        if not 0 < len(tokens) <= self._facts.chunk_tokens:
            most = self._facts.chunk_tokens
            return EngineError("chunk-size", f"a chunk has {len(tokens)} tokens, this lane takes 1 to {most}")
        for component, valid in self._valid.items():
            if valid != start:
                return EngineError(
                    "state-incomplete",
                    f"{component.label} is valid after {max(valid, 0)} tokens, position {start} needs {start}: "
                    "import or evaluate what is missing, or clear the lane",
                )
        if start + len(tokens) > self._facts.n_ctx:
            total, most = start + len(tokens), self._facts.n_ctx
            return EngineError("context-full", f"{total} tokens do not fit a context of {most}")
        if not 0 <= min(tokens) <= max(tokens) < self._facts.n_vocab:
            return EngineError("token-range", f"a token is outside the vocabulary of {self._facts.n_vocab}")
        return None

    def _advance(self, tokens: Sequence[int], start: int) -> Words:
        """P(start + 1) ... of the tokens that follow, which were not refused."""
        ids = np.array(tokens, dtype=np.uint64)
        positions = np.arange(start + 1, start + 1 + len(ids), dtype=np.uint64)
        values: Words = np.cumsum(_scramble(ids + (positions << np.uint64(32)))) + self._prefix[start]
        return values

    def _folded(self, values: Words) -> dict[Component, int]:
        """What each part folds to after `values`: sums over the rows that stay, the last row of those overwritten."""
        added, last = int(np.add.reduce(values)), int(values[-1])
        return {c: _word(self._folds[c] + added) if c in _PAGED else last for c in _STATE}

    def _logits(self, folds: dict[Component, int]) -> Logits:
        """Noise that any change of any part changes everywhere. The MTP head's row is made beside it."""
        key = hashlib.blake2b(np.array([folds[c] for c in _STATE], np.uint64).data, digest_size=8).digest()
        target, mtp = (int.from_bytes(part, "little") % self._facts.n_vocab for part in (key[:4], key[4:]))
        self._mtp_logits = np.roll(self._noise, mtp)
        return np.roll(self._noise, target) + self._mtp_logits

    # -- export ----------------------------------------------------------------------------------------------------

    def export_page(self, component: Component, tokens: Range, into: memoryview) -> None:
        self._page_spec(component, tokens, into)
        if tokens[1] > self._valid[component]:
            have = self._valid[component]
            raise EngineError("page-range", f"{component.label} of tokens {tokens} asked, the lane holds {have}")
        self._write(into, component, self._prefix[tokens[0] + 1 : tokens[1] + 1])

    def export_snapshot(self, into: memoryview) -> None:
        for component in (Component.CONVOLUTION, Component.RECURRENT):
            self._export_final(component, self._part(component, into))

    def export_hidden(self, into: memoryview) -> None:
        self._export_final(Component.MTP_HIDDEN, into)

    def _export_final(self, component: Component, into: memoryview) -> None:
        self._final_spec(component, into)
        valid = self._valid[component]
        if valid < 1:
            raise EngineError("state-incomplete", f"{component.label} asked of a lane that holds none")
        self._write(into, component, self._prefix[valid : valid + 1])

    def _write(self, into: memoryview, component: Component, prefix: Words) -> None:
        """Layer by layer, so that what is made on the way is small beside it."""
        salts = self._salts[component]
        for layer, cells in zip(salts, _cells(into, len(salts)), strict=True):
            stamps = (prefix[:, None] ^ layer).reshape(-1)
            for start in range(0, len(cells), _BLOCK_CELLS):
                block = cells[start : start + _BLOCK_CELLS]
                block.fill(0)
                block[:, 0] = stamps[start : start + _BLOCK_CELLS]

    # -- import ----------------------------------------------------------------------------------------------------

    def import_page(self, component: Component, tokens: Range, payload: memoryview) -> None:
        spec = self._page_spec(component, tokens, payload)
        if tokens[0] != self._valid[component]:
            have = self._valid[component]
            raise EngineError("page-order", f"{component.label} page starts at {tokens[0]}, the lane holds {have}")
        self._valid[component] = _UNKNOWN
        values = self._read(spec, tokens, payload)
        if component is Component.ATTENTION_KV:
            self._remember(tokens, values)
        elif not np.array_equal(self._prefix[tokens[0] + 1 : tokens[1] + 1], values):
            raise EngineError("page-content", f"{component.label} of tokens {tokens} is of other tokens than the KV")
        self._folds[component] = _word(self._folds[component] + int(np.add.reduce(values)))
        self._valid[component] = tokens[1]

    def import_snapshot(self, blob: memoryview, n_tokens: int) -> None:
        if n_tokens < 1 or self._valid[Component.ATTENTION_KV] != n_tokens:
            have = self._valid[Component.ATTENTION_KV]
            raise EngineError("snapshot-last", f"the snapshot is of {n_tokens} tokens, attention KV holds {have}")
        for component in (Component.CONVOLUTION, Component.RECURRENT):
            self._import_final(component, self._part(component, blob), n_tokens)

    def import_hidden(self, row: memoryview) -> None:
        self._import_final(Component.MTP_HIDDEN, row, self._valid[Component.MTP_KV])

    def _import_final(self, component: Component, payload: memoryview, n_tokens: int) -> None:
        spec = self._final_spec(component, payload)
        self._valid[component] = _UNKNOWN
        value = int(self._read(spec, (n_tokens - 1, n_tokens), payload)[0])
        if n_tokens < 1 or value != int(self._prefix[n_tokens]):
            raise EngineError("page-content", f"{component.label} is not the state after these {n_tokens} tokens")
        self._folds[component] = value
        self._valid[component] = n_tokens

    def _read(self, spec: ComponentSpec, tokens: Range, payload: memoryview) -> Words:
        """P of each token, from the stamps."""
        where = f"{spec.component.label} of tokens {tokens}"
        first: Words | None = None
        salts = self._salts[spec.component]
        for layer, cells in zip(salts, _cells(payload, len(salts)), strict=True):
            stamps = cells[:, 0].copy()
            if np.bitwise_xor.reduce(cells, axis=None) != np.bitwise_xor.reduce(stamps):
                raise EngineError("page-content", f"{where}: a byte was changed on its way")
            values: Words = stamps.reshape(-1, len(layer)) ^ layer
            first = values[:, 0].copy() if first is None else first
            if not (values == first[:, None]).all():
                raise EngineError("page-content", f"{where}: its cells do not agree on where they belong")
        assert first is not None  # no component is without layers
        return first

    # -- state -----------------------------------------------------------------------------------------------------

    def positions(self) -> Positions:
        complete = self._valid[Component.RECURRENT] == self._valid[Component.ATTENTION_KV]
        target = self._valid[Component.ATTENTION_KV] - 1 if complete else -1
        return Positions(target, self._valid[Component.MTP_KV] - 1)

    def state_digests(self, key: bytes) -> dict[str, str]:
        """Re-exports it page by page."""
        digests = {}
        for component in _STATE:
            spec, valid = self._spec(component), self._valid[component]
            digest = hashlib.blake2b(key=key, digest_size=16)
            for start, end in _digest_ranges(spec, valid):
                page = memoryview(bytearray(spec.page_bytes((0, spec.layers), (start, end))))
                self._write(page, component, self._prefix[start + 1 : end + 1])
                digest.update(page)
            digests[component.label] = digest.hexdigest()
        return digests

    def reset_counters(self) -> None:
        self.pool.reset_counters()

    def counters(self) -> EngineCounters:
        return self.pool.counters()

    def clear(self) -> None:
        self._prefix[: self._reach + 1] = 0
        self._reach = 0
        self._valid = dict.fromkeys(_STATE, 0)
        self._folds = dict.fromkeys(_STATE, 0)
        self._mtp_logits = None

    def close(self) -> None:
        self.clear()

    # -- details ---------------------------------------------------------------------------------------------------

    def _spec(self, component: Component) -> ComponentSpec:
        spec = self._schema.spec(component)
        assert spec is not None  # every synthetic schema has every component
        return spec

    def _page_spec(self, component: Component, tokens: Range, page: memoryview) -> ComponentSpec:
        if component not in _PAGED:
            raise EngineError("component", f"{component.label} does not travel in pages of tokens")
        if not 0 <= tokens[0] < tokens[1] <= self._facts.n_ctx:
            raise EngineError("page-range", f"tokens {tokens} are no page in a context of {self._facts.n_ctx}")
        return _sized(self._spec(component), tokens, page)

    def _final_spec(self, component: Component, view: memoryview) -> ComponentSpec:
        return _sized(self._spec(component), (0, 1), view)

    def _part(self, component: Component, blob: memoryview) -> memoryview:
        if len(blob) != self._schema.snapshot_bytes():
            raise EngineError("page-size", f"a snapshot is {self._schema.snapshot_bytes()} bytes, not {len(blob)}")
        offset, spec = self._schema.slab_offset(component, 0), self._spec(component)
        return blob[offset : offset + spec.page_bytes((0, spec.layers), (0, 1))]


def _scramble(values: Words) -> Words:
    """splitmix64's output function: neighbouring inputs give unrelated words."""
    x = (values + _GOLDEN) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    mixed: Words = x ^ (x >> np.uint64(31))
    return mixed


def _salts(spec: ComponentSpec) -> Words:
    """(layers, cells of a row): all different."""
    shape = (spec.layers, spec.layer_bytes[0] // _CELL_BYTES)
    numbers = np.arange(shape[0] * shape[1], dtype=np.uint64) + np.uint64(int(spec.component) << 32)
    return _scramble(numbers).reshape(shape)


def _cells(view: memoryview, layers: int) -> NDArray[np.uint64]:
    """(layers, cells of a layer, words)"""
    return np.frombuffer(view, np.uint64).reshape(layers, -1, _CELL_WORDS)


def _word(value: int) -> int:
    return value & (1 << 64) - 1


def _digest_ranges(spec: ComponentSpec, valid: int) -> list[Range]:
    """Equal on every host, whatever its page size; so digests compare."""
    if not spec.per_token:
        return [(valid - 1, valid)] if valid > 0 else []
    return [(start, min(start + 64, valid)) for start in range(0, valid, 64)]


def _sized(spec: ComponentSpec, tokens: Range, view: memoryview) -> ComponentSpec:
    expected = spec.page_bytes((0, spec.layers), tokens)
    if len(view) != expected:
        raise EngineError("page-size", f"{spec.component.label} of {tokens} is {expected} bytes, not {len(view)}")
    return spec


def _check(options: SyntheticOptions) -> None:
    chunk, page = options.chunk_tokens, options.page_tokens
    if page < 0 or chunk < page or (page and chunk % page) or chunk > options.n_ctx:
        sizes = f"page_tokens {page}, chunk_tokens {chunk}, n_ctx {options.n_ctx}"
        raise EngineError("engine-options", f"{sizes}: each must divide or fit the next")
    if options.kv_type != "f16":
        raise EngineError("engine-options", f"synthetic state is F16, not {options.kv_type}: leave --kv-type out")


def _identity(name: str, schema: StateSchema) -> Identity:
    """Speed is not in it: hosts of different speed may pair, and a synthetic host never pairs with a real one."""
    return Identity(
        model=f"synthetic {name}",
        tokenizer="synthetic bytes",
        architecture="synthetic",
        kv_type="f16/f16",
        flash_attention="on",
        engine="synthetic 1",
        schema=f"{schema.family}/{schema.version}/{schema.digest()}",
        exactness="synthetic",
    )
