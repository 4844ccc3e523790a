"""Learn a model's exact state geometry from the engine itself, and test on the way that we understand the engine.

Once per start, on a small context and a few tokens: the engine's own blob says what its rows are; our size formula
must then agree with the engine's size function at another length, and a state must survive export, import and
re-export byte for byte and continue bit for bit. A library or a model that does not behave is refused.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import msgspec

from zerocopy.handoff.components import Component, ComponentSpec, StateSchema
from zerocopy.runtime.base import EngineError, Logits
from zerocopy.runtime.llama import blob
from zerocopy.runtime.llama.abi import Library
from zerocopy.runtime.llama.blob import Geometry
from zerocopy.runtime.llama.context import FIRST_LIVE_SEQUENCE, N_CTX_STEP, Context, ContextOptions, Run
from zerocopy.runtime.llama.family import Family
from zerocopy.runtime.llama.lane import LaneModel, LlamaLane
from zerocopy.runtime.llama.mtp import MtpFollower
from zerocopy.runtime.llama.pool import LlamaPool

_TOKENS: Final = (0, 1, 0)  # any tokens do; every vocabulary has these
_PAGES: Final = ((0, 2), (2, 3))
_SMALL: Final = 16  # tokens per engine call here


def measure(library: Library, model: Any, family: Family, options: ContextOptions) -> LaneModel:
    """What every lane of this model needs. Raises EngineError `family-layout` or `calibration`."""
    _check_kind(library, model, family)
    small = msgspec.structs.replace(
        options, n_ctx=N_CTX_STEP, sequences=1, cells=N_CTX_STEP, chunk_tokens=min(_SMALL, options.chunk_tokens)
    )
    geometries, specs = _discover(library, model, family, small)
    n_vocab = library.c.llama_vocab_n_tokens(library.c.llama_model_get_vocab(model))
    if family.mtp:
        specs.append(_final(Component.MTP_HIDDEN, 4 * library.c.llama_model_n_embd_out(model)))
    specs.append(ComponentSpec(Component.TOKENS, per_token=True, layer_bytes=(4,)))
    specs.append(_final(Component.PROBE, *[4 * n_vocab] * (2 if family.mtp else 1)))
    schema = StateSchema(
        family=family.name,
        components=tuple(sorted(specs, key=lambda s: s.component)),
        snapshot_prefix=blob.SNAPSHOT_PREFIX_BYTES if family.layout.recurrent else 0,
        position_planes=4 if family.layout.m_rope else 1,
    )
    lane_model = LaneModel(library, model, options, schema, geometries, n_vocab)
    _round_trip(msgspec.structs.replace(lane_model, options=small))
    return lane_model


def _final(component: Component, *rows: int) -> ComponentSpec:
    return ComponentSpec(component, per_token=False, layer_bytes=rows)


def _check_kind(library: Library, model: Any, family: Family) -> None:
    """The engine builds the kind of memory this family is certified with."""
    c, layout = library.c, family.layout
    found = (bool(c.llama_model_n_swa(model)), c.llama_model_is_hybrid(model) or c.llama_model_is_recurrent(model))
    expected = (layout.kv_caches == 2, layout.recurrent)
    if found != expected:
        raise EngineError(
            "family-layout",
            f"{family.name} is certified with (sliding window, recurrent) {expected}, this model has {found}",
        )


def _discover(
    library: Library, model: Any, family: Family, options: ContextOptions
) -> tuple[dict[Component, Geometry], list[ComponentSpec]]:
    layout = family.layout
    geometries: dict[Component, Geometry] = {}
    specs: list[ComponentSpec] = []
    target, follower = Context(library, model, options), None
    try:
        follower = MtpFollower(library, model, options, target) if family.mtp else None
        geometry = _geometry_of(target, follower, target, layout.kv_caches, layout.recurrent, layout.m_rope)
        if layout.kv_caches:
            geometries[Component.ATTENTION_KV] = geometry
            window = library.c.llama_model_n_swa(model)
            specs.append(blob.page_spec(geometry, Component.ATTENTION_KV, window))
        if geometry.recurrent:
            geometries[Component.RECURRENT] = geometry
            specs += blob.snapshot_specs(geometry.recurrent)
        if follower:
            geometry = _geometry_of(target, follower, follower.context, 1, False, layout.m_rope)
            geometries[Component.MTP_KV] = geometry
            specs.append(blob.page_spec(geometry, Component.MTP_KV))
    finally:
        if follower:
            follower.close()
        target.close()
    return geometries, specs


def _geometry_of(
    target: Context, follower: MtpFollower | None, context: Context, kv_caches: int, recurrent: bool, m_rope: bool
) -> Geometry:
    """Read `context`'s geometry off its blob of three tokens, then foretell its size at four."""

    def evaluate(token: int, position: int) -> None:
        run = Run(FIRST_LIVE_SEQUENCE, [token], position)
        target.decode([run])
        if follower:
            follower.follow([run])

    target.clear()
    if follower:
        follower.clear()
    for position, token in enumerate(_TOKENS):
        evaluate(token, position)
    state = memoryview(context.full_state(FIRST_LIVE_SEQUENCE))
    geometry = blob.discover(state, FIRST_LIVE_SEQUENCE, kv_caches=kv_caches, recurrent=recurrent, m_rope=m_rope)
    evaluate(0, len(_TOKENS))
    foretold, found = blob.full_bytes(geometry, len(_TOKENS) + 1), len(context.full_state(FIRST_LIVE_SEQUENCE))
    if foretold != found:
        raise EngineError("calibration", f"a state of 4 tokens should be {foretold} bytes, the engine says {found}")
    return geometry


def _round_trip(model: LaneModel) -> None:
    """Export, import, re-export and continue: the production path, on this library and this model."""
    key = secrets.token_bytes(16)
    pool = LlamaPool(model)
    lane = pool.lane(0)
    try:
        lane.prefill(_TOKENS, 0)
        pages, snapshot, hidden = _export(lane, model.schema)
        before, expected = lane.state_digests(key), _next(lane)
        lane.clear()
        for component, tokens, page in pages:
            lane.import_page(component, tokens, page)
        if snapshot:
            lane.import_snapshot(snapshot, len(_TOKENS))
        if hidden:
            lane.import_hidden(hidden)
        if lane.state_digests(key) != before or _next(lane) != expected:
            raise EngineError("calibration", "the engine's state does not survive export and import bit for bit")
    finally:
        pool.close()


def _export(
    lane: LlamaLane, schema: StateSchema
) -> tuple[list[tuple[Component, tuple[int, int], memoryview]], memoryview | None, memoryview | None]:
    pages = []
    for component in (Component.ATTENTION_KV, Component.MTP_KV):
        if spec := schema.spec(component):
            for tokens in _PAGES:
                page = memoryview(bytearray(spec.page_bytes((0, spec.layers), tokens)))
                lane.export_page(component, tokens, page)
                pages.append((component, tokens, page))
    snapshot = hidden = None
    if size := schema.snapshot_bytes():
        snapshot = memoryview(bytearray(size))
        lane.export_snapshot(snapshot)
    if spec := schema.spec(Component.MTP_HIDDEN):
        hidden = memoryview(bytearray(spec.layer_bytes[0]))
        lane.export_hidden(hidden)
    return pages, snapshot, hidden


def _next(lane: LlamaLane) -> list[bytes]:
    """Logits of one more token, as bits."""

    def bits(logits: Logits | None) -> bytes:
        return b"" if logits is None else logits.tobytes()

    return [bits(lane.evaluate(0, len(_TOKENS))), bits(lane.mtp_logits())]
