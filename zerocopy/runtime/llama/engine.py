"""llama.cpp as a `Runtime`: one loaded model, its facts and identity, its tokenizer.

Owns the model's weights and every pool of lanes opened on it; `close` releases all, and may be called again.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from native.cores import usable_cores
from zerocopy.handoff.components import Component, Identity, StateSchema
from zerocopy.runtime.base import EngineError, EngineFacts
from zerocopy.runtime.file_digest import file_sha256, written
from zerocopy.runtime.gguf_header import GgufHeader, read_header
from zerocopy.runtime.llama.abi import BLOB_FORMAT, PACKAGE, PACKAGE_VERSION, Library, open_library
from zerocopy.runtime.llama.calibrate import measure
from zerocopy.runtime.llama.context import KV_TYPES, MAX_LIVE_SEQUENCES, N_CTX_STEP, ContextOptions
from zerocopy.runtime.llama.family import family_of
from zerocopy.runtime.llama.lane import LaneModel, LlamaLane
from zerocopy.runtime.llama.pool import LlamaPool
from zerocopy.runtime.pages import PAGE_BYTES, page_tokens

_CONTROL_TOKEN: Final = 1 | 8  # LLAMA_TOKEN_ATTR_UNKNOWN, LLAMA_TOKEN_ATTR_CONTROL: what `parse_special` is about
_MAX_PIECE_BYTES: Final = 1 << 16  # as long as an entry of a GGUF vocabulary may reasonably be
_MAX_CTX: Final = 1 << 22
_MAX_PARTS: Final = 1024  # files of one model
_MIN_CHUNK: Final = 4  # the engine aborts on batches smaller than its scratch sequences


class LlamaOptions(msgspec.Struct, frozen=True):
    """How to run a model. All but `threads` and `shared_cores` must be equal on both hosts; the former, too, for
    bit-equality."""

    n_ctx: int = 4096  # of one sequence; rounded up to a multiple of 256
    sequences: int = 1  # live at once, per pool of lanes
    kv_tokens: int = 0  # all sequences of a pool together; 0: twice n_ctx, or n_ctx for one sequence
    chunk_tokens: int = 256
    page_tokens: int = 0  # at most; 0: chosen by bytes (`runtime.pages`)
    page_bytes: int = PAGE_BYTES  # the most that a ring takes as one page
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    flash_attention: bool = True
    batch_invariant: bool = False  # no answer depends on what else is served; slower prefill of long prompts
    threads: int = 0  # 0: one per physical core
    shared_cores: bool = False  # others compute on them too; only the first runtime of a process is asked
    mtp: bool = True  # track the MTP head where the model has one


class LlamaRuntime:
    """Loads `path`, learns its state's geometry, and refuses what it cannot move exactly (EngineError)."""

    def __init__(self, path: str | Path, options: LlamaOptions) -> None:
        _check_options(options)
        path = Path(path)
        before = {path: _written(path)}
        header = read_header(path)
        before |= {part: _written(part) for part in _parts(path, header.parts)}
        family = family_of(header, mtp=options.mtp)
        self._library = open_library(shared_cores=options.shared_cores)
        self._pools: list[LlamaPool] = []
        self._model = _load(self._library, path, load_mtp=family.mtp)
        self._vocab = self._library.c.llama_model_get_vocab(self._model)
        try:
            context = _context_options(options)
            self._lane_model = measure(self._library, self._model, family, context)
            self._pieces = self._all_pieces(self._lane_model.n_vocab)
            self._ends = self._all_ends(self._lane_model.n_vocab)
            self.facts = self._facts(path, header, options)
            if any(_written(part) != then for part, then in before.items()):
                raise EngineError(
                    "model-changed",
                    f"{path} changed while it was loaded, so its digest is not of what the engine has: start again "
                    "once it is whole, and replace a model file by renaming a new one over it",
                )
        except BaseException:
            self.close()
            raise

    def open_pool(self) -> LlamaPool:
        return self._open(self._lane_model)

    def open_lane(self) -> LlamaLane:
        """A pool of one: for measuring, where nobody shares."""
        options = self._lane_model.options
        alone = msgspec.structs.replace(options, sequences=1, cells=_cells(options.n_ctx, options.chunk_tokens, 1))
        return self._open(msgspec.structs.replace(self._lane_model, options=alone)).lane(0)

    def _open(self, model: LaneModel) -> LlamaPool:
        self._check_open()
        pool = LlamaPool(model)
        self._pools.append(pool)
        return pool

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self._check_open()
        data = text.encode()
        capacity = len(data) + 8  # a byte is one token at most, plus what add_special puts around
        tokens = self._library.ffi.new("llama_token[]", capacity)
        count = self._library.c.llama_tokenize(
            self._vocab, data, len(data), tokens, capacity, add_special, parse_special
        )  # fmt: skip
        if count < 0:
            raise self._library.failure("tokenize", f"text of {len(data)} bytes does not fit {capacity} tokens")
        return list(tokens[0:count])

    def piece(self, token: int) -> bytes:
        self._check_token(token)
        return self._pieces[token]

    def is_end(self, token: int) -> bool:
        self._check_token(token)
        return token in self._ends

    def close(self) -> None:
        while self._pools:
            self._pools.pop().close()
        if self._model is not None:
            self._library.c.llama_model_free(self._model)
            self._model = None

    def _check_open(self) -> None:
        if self._model is None:
            raise EngineError("closed", "the model has been closed: open a new runtime")

    def _check_token(self, token: int) -> None:
        self._check_open()
        if not 0 <= token < self._lane_model.n_vocab:
            raise EngineError("token-range", f"a token is outside the vocabulary of {self._lane_model.n_vocab}")

    def _facts(self, path: Path, header: GgufHeader, options: LlamaOptions) -> EngineFacts:
        lane = self._lane_model
        return EngineFacts(
            identity=_identity(self._library, path, header, lane.options, lane.schema),
            schema=lane.schema,
            model_name=header.name or path.stem,
            n_ctx=lane.options.n_ctx,
            sequences=lane.options.sequences,
            kv_tokens=lane.options.cells,
            # Cells behind a sequence's window go to whoever needs some, exported or not (the engine's `find_slot`).
            exporting_lanes=1 if self._library.c.llama_model_n_swa(self._model) else lane.options.sequences,
            n_vocab=lane.n_vocab,
            chunk_tokens=options.chunk_tokens,
            page_tokens=page_tokens(lane.schema, options.chunk_tokens, options.page_tokens, options.page_bytes),
            page_bytes=0 if options.page_tokens else options.page_bytes,
            export_before_next_chunk=False,  # swa_full keeps every cell
            chat_template=header.chat_template,
            bos_token=self._special(self._library.c.llama_vocab_bos(self._vocab)),
            eos_token=self._special(self._library.c.llama_vocab_eos(self._vocab)),
            batch_invariant=lane.options.batch_invariant,
            mtp="tracked" if lane.schema.spec(Component.MTP_KV) else "off",
            longest_token=max(len(self._text(token)) for token in range(lane.n_vocab)),
            control_tokens=self._control_tokens(lane.n_vocab),
        )

    def _all_pieces(self, n_vocab: int) -> list[bytes]:
        """Of every token, once: asked of the engine between two of its calls, one costs 20 us of cold caches."""
        buffer, pieces = self._library.ffi.new("char[]", _MAX_PIECE_BYTES), list[bytes]()
        for token in range(n_vocab):
            size = self._library.c.llama_token_to_piece(self._vocab, token, buffer, _MAX_PIECE_BYTES, 0, False)
            if size < 0:
                text = f"the text of token {token} has {-size} bytes, more than {_MAX_PIECE_BYTES}"
                raise self._library.failure("piece", text)
            pieces.append(self._library.ffi.buffer(buffer, size)[:])
        return pieces

    def _all_ends(self, n_vocab: int) -> frozenset[int]:
        is_end = self._library.c.llama_vocab_is_eog
        return frozenset(token for token in range(n_vocab) if is_end(self._vocab, token))

    def _control_tokens(self, n_vocab: int) -> tuple[str, ...]:
        attributes = self._library.c.llama_vocab_get_attr
        control = (token for token in range(n_vocab) if attributes(self._vocab, token) & _CONTROL_TOKEN)
        return tuple(text for token in control if (text := self._special(token)))

    def _special(self, token: int) -> str:
        return "" if token < 0 else self._text(token).decode("utf-8", "replace")

    def _text(self, token: int) -> bytes:
        """As the vocabulary spells it, a byte in one to three: never less than it stands for."""
        return bytes(self._library.ffi.string(self._library.c.llama_vocab_get_text(self._vocab, token)))


def _check_options(options: LlamaOptions) -> None:
    problem = next(
        (
            sentence
            for wrong, sentence in (
                (not 1 <= options.n_ctx <= _MAX_CTX, f"n_ctx {options.n_ctx} is outside 1 to {_MAX_CTX}"),
                (
                    options.chunk_tokens < _MIN_CHUNK,
                    f"chunk_tokens {options.chunk_tokens} is below {_MIN_CHUNK}",
                ),
                (
                    options.page_tokens < 0 or (options.page_tokens and options.chunk_tokens % options.page_tokens > 0),
                    f"page_tokens {options.page_tokens} does not divide chunk_tokens {options.chunk_tokens}",
                ),
                (
                    options.chunk_tokens > options.n_ctx,
                    f"chunk_tokens {options.chunk_tokens} exceeds n_ctx {options.n_ctx}: lower one or raise the other",
                ),
                (
                    not 1 <= options.sequences <= MAX_LIVE_SEQUENCES,
                    f"sequences {options.sequences} is outside 1 to {MAX_LIVE_SEQUENCES}",
                ),
                (
                    options.kv_tokens and not options.n_ctx <= options.kv_tokens <= _MAX_CTX,
                    f"kv_tokens {options.kv_tokens} is outside n_ctx {options.n_ctx} to {_MAX_CTX}",
                ),
                (options.kv_type_k not in KV_TYPES, f"KV type {options.kv_type_k} is none of {', '.join(KV_TYPES)}"),
                (options.kv_type_v not in KV_TYPES, f"KV type {options.kv_type_v} is none of {', '.join(KV_TYPES)}"),
                (
                    options.batch_invariant and not options.flash_attention,
                    "without flash attention results depend on the batch: switch it on, or give --no-batch-invariant",
                ),
                (
                    options.kv_type_v == "q8_0" and not options.flash_attention,
                    "KV type q8_0 for V needs flash attention: switch it on or use f16",
                ),
                (options.threads < 0, f"threads {options.threads} is below 0"),
            )
            if wrong
        ),
        None,
    )
    if problem:
        raise EngineError("engine-options", problem)


def _context_options(options: LlamaOptions) -> ContextOptions:
    n_ctx, wanted = _rounded(options.n_ctx), options.kv_tokens or options.n_ctx * min(2, options.sequences)
    return ContextOptions(
        n_ctx=n_ctx,
        sequences=options.sequences,
        cells=_cells(max(n_ctx, wanted), options.chunk_tokens, options.sequences),
        chunk_tokens=options.chunk_tokens,
        kv_type_k=options.kv_type_k,
        kv_type_v=options.kv_type_v,
        flash_attention=options.flash_attention,
        batch_invariant=options.batch_invariant,
        threads=options.threads or _physical_cores(),
    )


def _cells(tokens: int, chunk_tokens: int, sequences: int) -> int:
    """For so many tokens, and a whole batch: the engine cuts a batch that is longer than its context, which a chunk as
    long as n_ctx beside one token of another sequence would be."""
    return _rounded(max(tokens, chunk_tokens + sequences))


def _rounded(tokens: int) -> int:
    return -(-tokens // N_CTX_STEP) * N_CTX_STEP


def _physical_cores() -> int:
    usable = usable_cores()
    return min(psutil.cpu_count(logical=False) or usable, usable)


def _parts(path: Path, count: int) -> list[Path]:
    """All files of a model whose first one is `path`, as the engine finds them. Raises EngineError `model-file`."""
    if count == 1:
        return [path]
    first = f"-00001-of-{count:05}.gguf"
    if not 1 < count <= _MAX_PARTS or not path.name.endswith(first):
        raise EngineError(
            "model-file",
            f"{path} says that it is one of {count} files, of at most {_MAX_PARTS}: give the first, whose name ends in "
            f"{first}",
        )
    start = path.name.removesuffix(first)
    return [path.with_name(f"{start}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _weights(parts: Sequence[Path]) -> str:
    """One file's sha256, or that of all files' together."""
    digests = [file_sha256(part) for part in parts]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _written(path: Path) -> tuple[int, int, int]:
    """Raises EngineError `model-file`."""
    try:
        return written(path)
    except OSError as error:
        raise EngineError("model-file", f"cannot read model {path}: {error.strerror or error}") from error


def _load(library: Library, path: Path, *, load_mtp: bool) -> Any:
    params = library.c.llama_model_default_params()
    params.n_gpu_layers = 0  # only the CPU backend has been certified
    params.load_mtp = load_mtp
    model = library.c.llama_model_load_from_file(os.fsencode(path), params)
    if model == library.ffi.NULL:
        raise library.failure("model-load", f"the engine cannot load {path}")
    return model


def _identity(
    library: Library, path: Path, header: GgufHeader, options: ContextOptions, schema: StateSchema
) -> Identity:
    flash = "on" if options.flash_attention else "off"
    return Identity(
        model=_weights(_parts(path, header.parts)),
        tokenizer=header.tokenizer,
        architecture=header.architecture,
        kv_type=f"{options.kv_type_k}/{options.kv_type_v}",
        flash_attention=flash,
        engine=f"{PACKAGE} {PACKAGE_VERSION}, llama.cpp {library.version}, blob {BLOB_FORMAT}",
        schema=f"{schema.family}/{schema.version}/{schema.digest()}",
        exactness=_exactness(library, options),
    )


def _exactness(library: Library, options: ContextOptions) -> str:
    """Everything that decides the last bit besides the model. libc counts: the engine calls its expf and cosf."""
    libc = _libc()
    flash = "on" if options.flash_attention else "off"
    return (
        f"{library.sha256[:16]} {library.cpu()} {libc} chunk {options.chunk_tokens} "
        f"threads {options.threads} flash attention {flash}{' batch-invariant' if options.batch_invariant else ''}"
    )


def _libc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "-")
    except (AttributeError, ValueError):  # not glibc: the system's release stands for its libm
        return platform.platform(terse=True)
