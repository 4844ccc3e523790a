"""Two hosts that do not fit are told so with both values and the remedy (S8, acceptance 5 of issue 2)."""

from __future__ import annotations

import msgspec
import pytest

from tests.handoff.scene import IDENTITY, SCHEMA
from zerocopy.handoff.components import Component, Identity
from zerocopy.handoff.matching import identity_mismatch, schema_mismatch

REMEDIES = {
    "model": "same model file",
    "tokenizer": "same model file",
    "architecture": "same model file",
    "kv_type": "--kv-type",
    "flash_attention": "--flash-attention",
    "engine": "same zc-handoff and xllamacpp version",
    "schema": "same zc-handoff version",
}


def test_equal_hosts_fit() -> None:
    assert identity_mismatch(IDENTITY, IDENTITY) is None
    assert schema_mismatch(SCHEMA, SCHEMA) is None


def test_hosts_of_another_exactness_class_fit() -> None:
    assert identity_mismatch(IDENTITY, msgspec.structs.replace(IDENTITY, exactness="metal")) is None


@pytest.mark.parametrize("field", [f for f in Identity.__struct_fields__ if f != "exactness"])
def test_a_difference_is_refused_with_both_values_and_a_remedy(field: str) -> None:
    prefiller = msgspec.structs.replace(IDENTITY, **{field: "theirs"})
    mismatch = identity_mismatch(decoder=IDENTITY, prefiller=prefiller)
    assert mismatch is not None
    assert mismatch.reason == "identity-mismatch"
    assert (mismatch.have, mismatch.want) == (getattr(IDENTITY, field), "theirs")
    assert f"decoder has {'KV type' if field == 'kv_type' else ''}" in str(mismatch)
    assert getattr(IDENTITY, field) in str(mismatch)
    assert "prefiller theirs" in str(mismatch)
    assert REMEDIES[field] in str(mismatch)


def test_more_than_one_difference_is_counted() -> None:
    prefiller = msgspec.structs.replace(IDENTITY, kv_type="q8_0/q8_0", flash_attention="off", model="c")
    assert "(2 more differ)" in str(identity_mismatch(IDENTITY, prefiller))


def test_a_missing_component_is_named() -> None:
    """The kind of fault that ran 69 of 93 layers from zeroed state (field reports)."""
    kv_only = msgspec.structs.replace(SCHEMA, components=SCHEMA.components[:1])
    mismatch = schema_mismatch(decoder=SCHEMA, prefiller=kv_only)
    assert str(mismatch) == "recurrent state is present on the decoder, absent on the prefiller"
    other_way = schema_mismatch(decoder=kv_only, prefiller=SCHEMA)
    assert str(other_way) == "recurrent state is absent on the decoder, present on the prefiller"


@pytest.mark.parametrize("component", [s.component for s in SCHEMA.components])
def test_a_component_of_another_geometry_is_named(component: Component) -> None:
    """Silent dtype mismatch: half the bytes per row."""
    halved = tuple(
        msgspec.structs.replace(s, layer_bytes=tuple(b // 2 for b in s.layer_bytes)) if s.component is component else s
        for s in SCHEMA.components
    )
    mismatch = schema_mismatch(SCHEMA, msgspec.structs.replace(SCHEMA, components=halved))
    spec = SCHEMA.spec(component)
    assert spec is not None
    assert component.label in str(mismatch)
    assert f"layers of {sum(spec.layer_bytes)} bytes" in str(mismatch)
    assert f"layers of {sum(b // 2 for b in spec.layer_bytes)} bytes" in str(mismatch)


def test_page_sizes_that_differ_are_named() -> None:
    attention = msgspec.structs.replace(SCHEMA.components[0], max_page_tokens=32)
    other = msgspec.structs.replace(SCHEMA, components=(attention, *SCHEMA.components[1:]))
    assert "max_page_tokens 4, prefiller 32" in str(schema_mismatch(SCHEMA, other))


@pytest.mark.parametrize(("field", "value"), [("version", 2), ("position_planes", 4), ("family", "qwen35")])
def test_other_fields_of_the_schema_are_compared(field: str, value: object) -> None:
    mismatch = schema_mismatch(SCHEMA, msgspec.structs.replace(SCHEMA, **{field: value}))
    assert f"{field} {getattr(SCHEMA, field)}, prefiller {value}" in str(mismatch)


def test_components_in_another_order_do_not_fit() -> None:
    turned = msgspec.structs.replace(SCHEMA, components=SCHEMA.components[::-1])
    assert "different order" in str(schema_mismatch(SCHEMA, turned))


def test_values_of_a_peer_are_cut_to_what_a_message_holds() -> None:
    huge = msgspec.structs.replace(IDENTITY, engine="x" * 5000)
    mismatch = identity_mismatch(IDENTITY, huge)
    assert mismatch is not None
    assert len(str(mismatch)) <= 1024
    assert len(mismatch.want) <= 512
