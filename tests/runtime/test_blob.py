"""Nothing reaches the engine but what this host's own engine would have written. The engine itself accepts most
corrupted headers and aborts on some, so the mutations here would end the test process if one slipped through."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.conftest import TINY, ModelFile, OpenRuntime
from tests.runtime.handover import export_state, page_room, prefill, prompt, room
from zerocopy.handoff.components import Component
from zerocopy.runtime import models
from zerocopy.runtime.base import EngineError
from zerocopy.runtime.llama import blob
from zerocopy.runtime.llama.context import FIRST_LIVE_SEQUENCE
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime
from zerocopy.runtime.llama.lane import LlamaLane

TOKENS = (32, 55)
N = 55
SPECIAL = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE]


@dataclass
class Specimen:
    runtime: LlamaRuntime
    decoder: LlamaLane
    first: dict[Component, memoryview]  # pages of [0, 32)
    page: dict[Component, memoryview]  # pages of TOKENS
    snapshot: memoryview | None

    def geometry(self, component: Component) -> blob.Geometry:
        return self.decoder._m.geometries[component]


@pytest.fixture(scope="module", params=["flash", "no-flash"])
def specimens(request: pytest.FixtureRequest, model_file: ModelFile) -> dict[str, Specimen]:
    made = {}
    options = LlamaOptions(
        n_ctx=256, chunk_tokens=64, page_tokens=32, threads=1, flash_attention=request.param == "flash"
    )
    for family in ("llama", "gemma3", "mamba2", "nemotron_h_moe+mtp", "qwen35+mtp"):
        runtime = LlamaRuntime(model_file(family), options)
        request.addfinalizer(runtime.close)
        source = runtime.open_lane()
        prefill(source, runtime.facts, prompt(runtime.facts, N))
        state = export_state(source, runtime.facts, N)
        if state.snapshot is not None:
            blob.write_snapshot_prefix(state.snapshot, source._m.geometries[Component.RECURRENT], source.sequence, N)
        first = {c: p for c, t, p in state.pages if t == (0, 32)}
        page = {c: p for c, t, p in state.pages if t == TOKENS}
        made[family] = Specimen(runtime, runtime.open_lane(), first, page, state.snapshot)
    return made


def take(lane: LlamaLane, specimen: Specimen, component: Component, page: memoryview) -> memoryview:
    """Import after the first page, and what the engine then says it holds."""
    lane.clear()
    lane.import_page(component, (0, 32), specimen.first[component])
    lane.import_page(component, TOKENS, page)
    back = room(len(page))
    lane.export_page(component, TOKENS, back)
    return back


CASES = [
    ("llama", Component.ATTENTION_KV),
    ("gemma3", Component.ATTENTION_KV),
    ("nemotron_h_moe+mtp", Component.ATTENTION_KV),
    ("nemotron_h_moe+mtp", Component.MTP_KV),
    ("qwen35+mtp", Component.ATTENTION_KV),
    ("qwen35+mtp", Component.MTP_KV),
]


@pytest.mark.parametrize(("family", "component"), CASES)
def test_a_good_page_passes_and_comes_back_the_same(
    family: str, component: Component, specimens: dict[str, Specimen]
) -> None:
    specimen = specimens[family]
    assert take(specimen.decoder, specimen, component, specimen.page[component]) == specimen.page[component]


def headers(specimen: Specimen, component: Component) -> list[int]:
    """Offsets of 32-bit words that differ from rows: those whose change the check notices, by brute force."""
    page, geometry = specimen.page[component], specimen.geometry(component)
    found = []
    for offset in range(0, len(page) - 3, 4):
        saved = bytes(page[offset : offset + 4])
        page[offset : offset + 4] = struct.pack("<I", struct.unpack("<I", saved)[0] ^ 0x40000000)
        try:
            blob.check_page(page, geometry, TOKENS, models.N_VOCAB)
        except EngineError:
            found.append(offset)
        page[offset : offset + 4] = saved
    return found


@pytest.mark.parametrize(("family", "component"), CASES)
def test_every_header_byte_is_accounted_for(family: str, component: Component, specimens: dict[str, Specimen]) -> None:
    """The bytes a change of which is noticed are all that are not rows: page size minus rows, by the formula."""
    specimen = specimens[family]
    spec = specimen.runtime.facts.schema.spec(component)
    assert spec is not None
    rows = (TOKENS[1] - TOKENS[0]) * sum(spec.layer_bytes)
    assert 4 * len(headers(specimen, component)) == len(specimen.page[component]) - rows


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize(("family", "component"), CASES)
def test_a_mutated_page_is_refused_or_means_what_it_says(
    family: str, component: Component, specimens: dict[str, Specimen], data: st.DataObject
) -> None:
    specimen = specimens[family]
    good = specimen.page[component]
    page = memoryview(bytearray(good))
    for _ in range(data.draw(st.integers(1, 3))):
        words = len(page) // 4
        word = 4 * data.draw(st.one_of(st.integers(0, min(110, words - 1)), st.integers(0, words - 1)))
        value = data.draw(st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFFFFFF)))
        page[word : word + 4] = struct.pack("<I", value)
    try:
        back = take(specimen.decoder, specimen, component, page)
    except EngineError as error:
        assert error.reason == "blob" and page != good
    else:
        assert back == page  # only rows (or an M-RoPE cell's token) differ: the engine holds exactly what was sent


@pytest.mark.parametrize(("family", "component"), CASES)
def test_a_page_truncated_or_extended_is_refused(
    family: str, component: Component, specimens: dict[str, Specimen]
) -> None:
    page, geometry = specimens[family].page[component], specimens[family].geometry(component)
    extended = memoryview(bytearray(page) + bytearray(4))
    cuts = [*range(0, 400), *range(400, len(page), 97)]
    for candidate in [page[:cut] for cut in cuts if cut < len(page)] + [extended, extended[: len(page) + 1]]:
        with pytest.raises(EngineError) as error:
            blob.check_page(candidate, geometry, TOKENS, models.N_VOCAB)
        assert error.value.reason == "blob"


@pytest.mark.parametrize("tokens", [(31, 54), (33, 56), (32, 54), (0, 23)])
@pytest.mark.parametrize(("family", "component"), CASES)
def test_a_page_of_other_tokens_is_refused(
    family: str, component: Component, tokens: tuple[int, int], specimens: dict[str, Specimen]
) -> None:
    """Same size, other positions: the engine would take it, and attend wrongly."""
    specimen = specimens[family]
    with pytest.raises(EngineError) as error:
        blob.check_page(specimen.page[component], specimen.geometry(component), tokens, models.N_VOCAB)
    assert error.value.reason == "blob"


def test_a_page_of_the_other_context_is_refused(specimens: dict[str, Specimen]) -> None:
    specimen = specimens["nemotron_h_moe+mtp"]
    with pytest.raises(EngineError):
        blob.check_page(
            specimen.page[Component.MTP_KV], specimen.geometry(Component.ATTENTION_KV), TOKENS, models.N_VOCAB
        )


def test_a_page_of_another_family_is_refused(specimens: dict[str, Specimen]) -> None:
    for mine, mine_specimen in specimens.items():
        for other, other_specimen in specimens.items():
            if mine == other or Component.ATTENTION_KV not in mine_specimen.page:
                continue
            if page := other_specimen.page.get(Component.ATTENTION_KV):
                with pytest.raises(EngineError):
                    blob.check_page(
                        page, mine_specimen.geometry(Component.ATTENTION_KV), TOKENS, models.N_VOCAB
                    )  # fmt: skip


def test_a_page_made_with_the_other_flash_attention_setting_is_refused(open_runtime: OpenRuntime) -> None:
    """V is stored the other way round; both pages have the same size."""
    lanes = {}
    for flash in (True, False):
        runtime = open_runtime("llama", LlamaOptions(n_ctx=256, chunk_tokens=64, threads=1, flash_attention=flash))
        lanes[flash] = (runtime, runtime.open_lane())
        prefill(lanes[flash][1], runtime.facts, prompt(runtime.facts, 64))
    runtime, lane = lanes[True]
    page = page_room(runtime.facts, Component.ATTENTION_KV, (0, 64))
    lane.export_page(Component.ATTENTION_KV, (0, 64), page)
    other_runtime, other = lanes[False]
    assert len(page) == len(page_room(other_runtime.facts, Component.ATTENTION_KV, (0, 64)))
    other.clear()
    with pytest.raises(EngineError, match="V layout 0, this engine's is 1"):
        other.import_page(Component.ATTENTION_KV, (0, 64), page)


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h_moe+mtp", "qwen35+mtp"])
def test_every_snapshot_header_byte_is_accounted_for(family: str, specimens: dict[str, Specimen]) -> None:
    specimen = specimens[family]
    snapshot, geometry = specimen.snapshot, specimen.geometry(Component.RECURRENT)
    assert snapshot is not None
    schema = specimen.runtime.facts.schema
    rows = sum(sum(s.layer_bytes) for c in (Component.CONVOLUTION, Component.RECURRENT) if (s := schema.spec(c)))
    noticed = 0
    for offset in range(0, len(snapshot), 4):
        saved = bytes(snapshot[offset : offset + 4])
        snapshot[offset : offset + 4] = struct.pack("<I", struct.unpack("<I", saved)[0] ^ 1)
        try:
            blob.check_snapshot(snapshot, geometry, FIRST_LIVE_SEQUENCE, N)
        except EngineError as error:
            assert error.reason == "blob"
            noticed += 4
        snapshot[offset : offset + 4] = saved
    assert noticed == len(snapshot) - rows
    for cut in (0, 3, 27, 28, 40, len(snapshot) - 1):
        with pytest.raises(EngineError):
            blob.check_snapshot(snapshot[:cut], geometry, FIRST_LIVE_SEQUENCE, N)
    with pytest.raises(EngineError):
        blob.check_snapshot(snapshot, geometry, FIRST_LIVE_SEQUENCE, N + 1)


def test_the_importer_writes_the_prefix_itself(specimens: dict[str, Specimen]) -> None:
    """What stands there was left by whoever had the slab before."""
    specimen = specimens["mamba2"]
    assert specimen.snapshot is not None
    received = memoryview(bytearray(specimen.snapshot))
    prefix = specimen.runtime.facts.schema.snapshot_prefix
    received[:prefix] = b"\xff" * prefix
    specimen.decoder.clear()
    specimen.decoder.import_snapshot(received, N)
    back = room(len(received))
    specimen.decoder.export_snapshot(back)
    assert back == specimen.snapshot == received


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("family", ["mamba2", "nemotron_h_moe+mtp"])
def test_a_mutated_snapshot_is_refused_or_means_what_it_says(
    family: str, specimens: dict[str, Specimen], data: st.DataObject
) -> None:
    specimen = specimens[family]
    assert specimen.snapshot is not None
    received = memoryview(bytearray(specimen.snapshot))
    prefix, words = specimen.runtime.facts.schema.snapshot_prefix, len(received) // 4
    rows = [prefix + 4 * i for i in range(3)]  # the first layer's row header
    offset = data.draw(st.one_of(st.sampled_from(rows), st.integers(0, words - 1).map(lambda w: 4 * w)))
    value = data.draw(st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFFFFFF)))
    received[offset : offset + 4] = struct.pack("<I", value)
    lane = specimen.decoder
    lane.clear()
    if page := specimen.page.get(Component.ATTENTION_KV):
        lane.import_page(Component.ATTENTION_KV, (0, 32), specimen.first[Component.ATTENTION_KV])
        lane.import_page(Component.ATTENTION_KV, TOKENS, page)
    try:
        lane.import_snapshot(received, N)
    except EngineError as error:
        assert error.reason == "blob" and received != specimen.snapshot
        return
    back = room(len(received))
    lane.export_snapshot(back)
    assert back == received


def test_discovery_refuses_bytes_that_do_not_add_up(specimens: dict[str, Specimen]) -> None:
    lane = specimens["nemotron_h_moe+mtp"].runtime.open_lane()
    lane.prefill([1, 2, 3], 0)
    full = lane._target.full_state(lane.sequence)
    right = {"kv_caches": 1, "recurrent": True, "m_rope": False}
    found = blob.discover(memoryview(full), lane.sequence, **right)  # type: ignore[arg-type]
    assert found == lane._m.geometries[Component.ATTENTION_KV]
    for wrong in ({"kv_caches": 2}, {"kv_caches": 0}, {"recurrent": False}, {"m_rope": True}):
        with pytest.raises(EngineError) as error:
            blob.discover(memoryview(full), lane.sequence, **(right | wrong))  # type: ignore[arg-type]
        assert error.value.reason == "blob"
    recurrent = lane._m.geometries[Component.RECURRENT].recurrent
    assert recurrent is not None
    one_row_less = len(full) - 12 - recurrent.state[-1].bytes
    for cut in (0, 7, 20, len(full) - 1, one_row_less):
        with pytest.raises(EngineError):
            blob.discover(memoryview(full)[:cut], lane.sequence, **right)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "component"), CASES)
def test_a_blank_page_is_a_page(family: str, component: Component, specimens: dict[str, Specimen]) -> None:
    specimen = specimens[family]
    blank = room(len(specimen.page[component]))
    blob.write_blank_page(blank, specimen.geometry(component), TOKENS)
    assert take(specimen.decoder, specimen, component, blank) == blank


def test_size_formula_of_a_plain_model_by_hand() -> None:
    """llama-runtime.md: 16 + 12n + 16 + layers x (12 + n K) + layers x (12 + n V)."""
    cache = blob.KvCache(k=(blob.Row(1, 64),) * 4, v=(blob.Row(1, 32),) * 4, v_element=0, rotations=(0, 0))
    geometry = blob.Geometry((cache,), None, False)
    spec = blob.page_spec(geometry, Component.ATTENTION_KV)
    assert spec.page_bytes((0, 4), (5, 15)) == 16 + 12 * 10 + 16 + 4 * (12 + 640) + 4 * (12 + 320)
    assert blob.full_bytes(geometry, 10) == spec.page_bytes((0, 4), (0, 10))


assert TINY.page_tokens == 32  # `first` and TOKENS above are its first two pages
