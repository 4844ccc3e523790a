from __future__ import annotations

import numpy as np
import pytest

from native.memory import NativeError
from tests.worker.conftest import OpenStage
from tests.worker.stage import EPOCH, HANDOFF, SEED, Page, prompt, run, step
from zerocopy.handoff.components import Component, PageHeader
from zerocopy.runtime.base import EngineError
from zerocopy.runtime.pages import most_page_bytes
from zerocopy.worker import prefill_job
from zerocopy.worker import protocol as p

EVERYTHING = "nemotron_h_moe+mtp"
FAMILIES = ("llama", "gemma3", "mamba2", "nemotron_h", EVERYTHING, "qwen35+mtp")


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_are_numbered_without_gaps_and_cover_every_component_once(stage: OpenStage, family: str) -> None:
    """S1, S2, S3, S6, H1."""
    play = stage(family)
    pages = play.exported(prompt(77))
    assert [page.header.sequence for page in pages] == list(range(len(pages)))
    assert play.outbox.one(p.Prefilled).pages == len(pages)
    for spec in play.facts.schema.components:
        mine = [page.header for page in pages if page.header.component == spec.component]
        if spec.per_token and spec.component is not Component.TOKENS:
            assert [h.tokens for h in mine] == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 76)]
        else:
            assert [h.tokens for h in mine] == [(0, 76)] * len(mine)
            assert [h.layers[0] for h in mine] == [0, *(h.layers[1] for h in mine[:-1])]
        assert [h.final for h in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].layers[1] == spec.layers


@pytest.mark.parametrize("family", ["llama", EVERYTHING])
def test_every_page_carries_its_handoff_and_a_true_checksum(stage: OpenStage, family: str) -> None:
    """H1, X2."""
    play = stage(family)
    for page in play.exported(prompt(50)):
        header = page.header
        assert (header.handoff_id, header.epoch) == (HANDOFF, EPOCH)
        assert header.identity == play.facts.identity.digest()
        assert header.payload_bytes == len(page.payload)
        assert header.position_planes == play.facts.schema.position_planes
        assert page.intact()
        page.payload[len(page.payload) // 2] ^= 1
        assert not page.intact()


def test_all_components_of_a_token_range_come_before_the_next_range(stage: OpenStage) -> None:
    """So that a decoder's MTP state never lags behind its target's by more than a page."""
    pages = stage(EVERYTHING).exported(prompt(40))
    order = [(h.component, h.tokens[0]) for h in (page.header for page in pages) if h.component in (1, 4)]
    assert order == [(c, start) for start in (0, 16, 32) for c in (Component.ATTENTION_KV, Component.MTP_KV)]


def test_a_page_of_several_ranges_leaves_with_the_last_of_them(
    stage: OpenStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_job, "span", lambda spec, _: {Component.MTP_KV: 32}.get(spec.component, 16))
    pages = stage(EVERYTHING).exported(prompt(41))
    order = [(h.component.label, *h.tokens) for h in (page.header for page in pages) if h.component in (1, 4)]
    kv, mtp = Component.ATTENTION_KV.label, Component.MTP_KV.label
    assert order == [(kv, 0, 16), (kv, 16, 32), (mtp, 0, 32), (kv, 32, 40), (mtp, 32, 40)]


def test_the_probe_comes_last_and_holds_one_row_per_head(stage: OpenStage) -> None:
    play = stage(EVERYTHING)
    last = play.exported(prompt(40))[-1]
    assert last.header.component is Component.PROBE
    rows = np.frombuffer(last.payload, np.float32).reshape(2, play.facts.n_vocab)
    target = play.source.evaluate(prompt(40)[-1], 39)
    assert np.array_equal(rows[0].view(np.uint32), target.view(np.uint32))
    mtp = play.source.mtp_logits()
    assert mtp is not None
    assert np.array_equal(rows[1].view(np.uint32), mtp.view(np.uint32))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_leaves_the_state_untouched(stage: OpenStage, family: str) -> None:
    with_probe, without = stage(family), stage(family)
    a, b = with_probe.exported(prompt(45)), without.exported(prompt(45), probe=False)
    assert a[-1].header.component is Component.PROBE
    assert [page.payload for page in a[:-1]] == [page.payload for page in b]
    assert with_probe.source.state_digests(b"k" * 32) == without.source.state_digests(b"k" * 32)


def test_without_a_probe_nothing_of_the_last_token_is_evaluated(stage: OpenStage) -> None:
    play = stage("llama")
    pages = play.exported(prompt(45), probe=False)
    assert not [page for page in pages if page.header.component is Component.PROBE]
    assert "probe_started" not in play.outbox.one(p.Prefilled).marks


def test_the_last_prompt_token_is_not_part_of_the_exported_state(stage: OpenStage) -> None:
    one, other = stage("llama"), stage("llama")
    tokens = prompt(45)
    a, b = one.exported(tokens, probe=False), other.exported([*tokens[:-1], tokens[-1] ^ 1], probe=False)
    assert [page.payload for page in a] == [page.payload for page in b]


def test_positions_are_reported_as_the_engine_has_them(stage: OpenStage) -> None:
    play = stage(EVERYTHING)
    play.exported(prompt(45))
    done = play.outbox.one(p.Prefilled)
    assert (done.target_position, done.mtp_position) == (43, 43)
    assert len(done.exports) == done.pages - len(play.outbox.parts) + 1


def test_a_prompt_of_two_tokens_exports_one_page_of_one(stage: OpenStage) -> None:
    pages = stage(EVERYTHING).exported(prompt(2))
    assert [page.header.tokens for page in pages] == [(0, 1)] * len(pages)


# -- a full ring


def test_compute_does_not_wait_for_a_full_ring(stage: OpenStage) -> None:
    """T4, architecture: what does not fit stays in the engine and leaves after a later chunk."""
    play = stage("llama", ring_bytes=64 << 10)
    job = play.prefill(prompt(200))
    run(job)
    assert [chunk.tokens for chunk in play.outbox.all(p.ChunkDone)] == [32, 64, 96, 128, 160, 192, 199]
    assert not job.finished
    before = list(play.read_ring())
    assert 0 < len(before) < 13
    run(job)
    rest = list(play.read_ring())
    while not job.finished:
        run(job)
        rest += play.read_ring()
    numbers = [page.header.sequence for page in before + rest]
    assert numbers == list(range(play.outbox.one(p.Prefilled).pages))
    assert all(page.intact() for page in before + rest)


def test_a_page_exported_late_is_the_page_that_would_have_been_exported_in_time(stage: OpenStage) -> None:
    wide, narrow = stage("nemotron_h"), stage("nemotron_h", ring_bytes=32 << 10)
    in_time = wide.exported(prompt(200))
    job = narrow.prefill(prompt(200))
    run(job)
    assert len(narrow.outbox.all(p.ChunkDone)) == 7
    late: list[Page] = []
    while not job.finished:
        late += narrow.read_ring()
        step(job)
    late += [*narrow.read_ring(), *narrow.read_slab()]
    late.sort(key=lambda page: page.header.sequence)
    assert [(a.header, a.payload) for a in late] == [(b.header, b.payload) for b in in_time]


def test_what_gathers_behind_a_full_ring_leaves_in_pages_as_long_as_the_ring_takes(stage: OpenStage) -> None:
    """H5: each page costs both hosts the same however long it is, and these had to wait in any case."""
    play = stage(EVERYTHING, ring_bytes=96 << 10)
    pages = play.exported(prompt(400), late=True)
    assert all(page.intact() for page in pages)
    for component in (Component.ATTENTION_KV, Component.MTP_KV):
        spec = play.facts.schema.spec(component)
        assert spec is not None
        ranges = [page.header.tokens for page in pages if page.header.component is component]
        assert [start for start, _ in ranges] + [399] == [0] + [end for _, end in ranges]
        most = max(end - start for start, end in ranges)
        assert most > 32 and spec.page_bytes((0, spec.layers), (0, most)) <= most_page_bytes(96 << 10)
    assert pages[0].header.tokens == (0, 32)  # a chunk: nothing waited
    ends = {Component.ATTENTION_KV: 0, Component.MTP_KV: 0}
    for header in (page.header for page in pages if page.header.component in ends):
        ends[header.component] = header.tokens[1]
        assert ends[Component.MTP_KV] <= ends[Component.ATTENTION_KV]


def test_no_page_is_longer_than_the_decoder_takes(stage: OpenStage) -> None:
    """Neither what leaves in time nor what gathers behind a full ring."""
    play = stage(EVERYTHING, ring_bytes=96 << 10)
    spec = play.facts.schema.spec(Component.ATTENTION_KV)
    assert spec is not None and play.facts.page_tokens == 16
    longest = []
    for late in (False, True):
        pages = play.exported(prompt(400), late=late, largest_page=spec.page_bytes((0, spec.layers), (0, 12)))
        assert all(page.intact() for page in pages)
        ranges = [page.header.tokens for page in pages if page.header.component is Component.ATTENTION_KV]
        longest.append(max(end - start for start, end in ranges))
        play.outbox.messages.clear()
        play.source.clear()
    assert longest == [8, 12]


def test_a_model_that_overwrites_old_cells_waits_for_the_ring_before_its_next_chunk(stage: OpenStage) -> None:
    play = stage("llama", ring_bytes=64 << 10)
    job = play.prefill(prompt(200), facts={"export_before_next_chunk": True})
    run(job)
    evaluated = play.outbox.all(p.ChunkDone)[-1].tokens
    exported = max(page.header.tokens[1] for page in play.read_ring())
    assert exported < evaluated < 199
    while not job.finished:
        run(job)
        exported = max([exported, *(page.header.tokens[1] for page in play.read_ring())])
        assert play.outbox.all(p.ChunkDone)[-1].tokens - exported <= 32
    assert exported == 199


def test_a_ring_that_is_full_at_the_end_holds_up_only_the_export(stage: OpenStage) -> None:
    """Every one of hidden row, token history and probe waits its turn when the ring has no room."""
    play = stage(EVERYTHING, ring_bytes=24 << 10)
    job, components = play.prefill(prompt(100)), []
    while not job.finished:
        while step(job):
            pass
        if (record := play.export.read()) is not None:
            components.append(PageHeader.unpack(record.view[:128]).component)
            record.release()
    components += [page.header.component for page in play.read_ring()]
    assert components[-3:] == [Component.MTP_HIDDEN, Component.TOKENS, Component.PROBE]


# -- the snapshot


def test_snapshot_parts_are_groups_of_layers_no_larger_than_the_bound(
    stage: OpenStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_job, "SLAB_PART_BYTES", 40_000)  # two of mamba2's three layers, not three
    play = stage("mamba2")
    play.exported(prompt(40))
    parts = [page.header for page in play.read_slab()]
    recurrent = [h.layers for h in parts if h.component is Component.RECURRENT]
    assert recurrent == [(0, 2), (2, 3)]
    assert all(h.payload_bytes <= 40_000 for h in parts)


def test_a_layer_larger_than_the_bound_is_a_part_of_its_own(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_job, "SLAB_PART_BYTES", 1)
    play = stage("mamba2")
    play.exported(prompt(40))
    headers = [page.header for page in play.read_slab()]
    each = [(c, (n, n + 1)) for c in (Component.CONVOLUTION, Component.RECURRENT) for n in range(3)]
    assert [(h.component, h.layers) for h in headers] == each
    assert [h.final for h in headers] == [layers == (2, 3) for _, layers in each]


def test_snapshot_parts_tile_the_slab_behind_the_engines_prefix(
    stage: OpenStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_job, "SLAB_PART_BYTES", 20_000)
    play = stage("mamba2")
    play.exported(prompt(40))
    at = play.facts.schema.snapshot_prefix
    for part in play.outbox.parts:
        assert part.offset == at
        at += part.nbytes
    assert at == play.facts.schema.snapshot_bytes()


# -- endings


@pytest.mark.parametrize("steps", range(0, 14))
def test_a_job_can_be_closed_after_any_step_and_leaves_the_memory_free(stage: OpenStage, steps: int) -> None:
    """H7: no slot stays claimed, no view of the slab stays held."""
    play = stage(EVERYTHING, ring_bytes=24 << 10)
    job = play.prefill(prompt(120))
    for _ in range(steps):
        step(job)
    job.close()
    assert step(job) is False
    play.export.recycle()
    assert play.slabs["export"].release() >= 0


def test_a_page_that_cannot_be_exported_ends_the_job_and_gives_the_slot_back(stage: OpenStage) -> None:
    play = stage("llama")
    job = play.prefill(prompt(60))
    step(job)

    def refuse(component: Component, tokens: tuple[int, int], into: memoryview) -> None:
        held = np.frombuffer(into, np.uint8)  # an engine binding may still look at the page when it fails
        raise EngineError("export", f"no page today, {len(held)} bytes")

    play.source.export_page = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no page today"):
        step(job)
    play.export.recycle()


def test_a_page_larger_than_the_ring_takes_is_refused_with_both_sizes(stage: OpenStage) -> None:
    play = stage("llama", ring_bytes=4096)
    job = play.prefill(prompt(60))
    with pytest.raises(NativeError, match=r"record of 8640 bytes; this ring takes 1 to 960"):
        run(job)
    play.export.recycle()


def test_a_state_that_ends_at_the_wrong_position_is_never_called_exported(
    stage: OpenStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = stage("llama")
    job = play.prefill(prompt(20))
    step(job)
    found = play.source.positions()
    monkeypatch.setattr(play.source, "positions", lambda: type(found)(found.target - 1, found.mtp))
    with pytest.raises(EngineError) as refused:
        run(job)
    assert refused.value.reason == "position"
    assert not play.outbox.all(p.Prefilled)


def test_seed_and_epoch_are_those_of_the_grant(stage: OpenStage) -> None:
    play, other = stage("llama"), stage("llama")
    (a, *_), (b, *_) = play.exported(prompt(20)), other.exported(prompt(20), seed=SEED ^ 1, epoch=EPOCH + 1)
    assert a.payload == b.payload
    assert a.header.checksum != b.header.checksum
    assert (a.header.epoch, b.header.epoch) == (EPOCH, EPOCH + 1)


def test_a_snapshots_parts_may_leave_one_by_one(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is told before the last one's checksum is made: what is left of the snapshot is tail."""
    monkeypatch.setattr(prefill_job, "SLAB_PART_BYTES", 20_000)
    play = stage("mamba2")
    job = play.prefill(prompt(40))
    told = []
    while not job.finished:
        step(job)
        list(play.read_ring())
        told.append(len(play.outbox.parts))
    assert 0 < told.index(1) < told.index(2) and max(told) > 2
