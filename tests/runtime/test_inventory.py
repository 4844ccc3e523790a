"""The formula that sizes every buffer, against the engine's own count at the lengths people ask about (S9)."""

from __future__ import annotations

import pytest

from tests.runtime.conftest import OpenRuntime
from zerocopy.runtime import models
from zerocopy.runtime.base import EngineError
from zerocopy.runtime.llama.engine import LlamaOptions
from zerocopy.runtime.llama.inventory import take_inventory

LENGTHS = (1000, 8192, 1, 16384)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_formula_and_engine_agree_at_every_length(family: str, open_runtime: OpenRuntime) -> None:
    runtime = open_runtime(family, LlamaOptions(n_ctx=16384, threads=1))
    rows = take_inventory(runtime, LENGTHS)
    assert [row for row in rows if row.formula_bytes != row.engine_bytes] == []
    assert all(row.engine_bytes > 0 for row in rows)
    seen = {(row.component, row.tokens) for row in rows}
    assert len(seen) == len(rows) == len(LENGTHS) * len({component for component, _ in seen})
    labels = {s.component.label for s in runtime.facts.schema.components} - {"token history", "continuation probe"}
    assert {part for component, _ in seen for part in component.split(" and ")} == labels


def test_only_what_grows_grows(open_runtime: OpenRuntime) -> None:
    rows = take_inventory(open_runtime("nemotron_h_moe+mtp", LlamaOptions(n_ctx=2048, threads=1)), (512, 1024))
    sizes = {(row.component, row.tokens): row.engine_bytes for row in rows}
    for component in ("attention KV", "MTP KV"):
        assert sizes[component, 1024] == 2 * sizes[component, 512]  # whole pages both
    for component in ("convolution state and recurrent state", "MTP hidden row"):
        assert sizes[component, 1024] == sizes[component, 512]


@pytest.mark.parametrize("lengths", [(), (0,), (10, 513)])
def test_lengths_that_do_not_fit_are_refused(lengths: tuple[int, ...], open_runtime: OpenRuntime) -> None:
    with pytest.raises(EngineError, match="larger n_ctx"):
        take_inventory(open_runtime("llama"), lengths)
