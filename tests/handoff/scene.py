"""A small hybrid model with every component, one prompt, and its pages: what the tests of this package hand over.

The numbers are chosen so that no two sizes are equal: a page taken for another is never right by accident.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from zerocopy.handoff.components import (
    Component,
    ComponentSpec,
    Identity,
    PageHeader,
    StateSchema,
    page_checksum,
)
from zerocopy.handoff.messages import Prefill, pack_tokens

C: Final = Component
PAGE_TOKENS: Final = 4
PROMPT: Final = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43]
TOKENS: Final = len(PROMPT) - 1
HANDOFF: Final = bytes(range(16))
SEED: Final = 0xFEDC_BA98_7654_3210
EPOCH: Final = 3

SCHEMA: Final = StateSchema(
    family="nemotron_h_moe+mtp",
    components=(
        ComponentSpec(C.ATTENTION_KV, True, (24, 40), 24, 12, 32, max_page_tokens=4),
        ComponentSpec(C.RECURRENT, False, (96, 104, 112)),
        ComponentSpec(C.CONVOLUTION, False, (20, 28, 36)),
        ComponentSpec(C.MTP_KV, True, (16,), 24, 12, 32, max_page_tokens=4),
        ComponentSpec(C.MTP_HIDDEN, False, (64,)),
        ComponentSpec(C.TOKENS, True, (4,)),
        ComponentSpec(C.PROBE, False, (88,)),
    ),
    snapshot_prefix=48,
)  # fmt: skip
DENSE: Final = StateSchema("llama", tuple(s for s in SCHEMA.components if s.component in (C.ATTENTION_KV, C.TOKENS)))

IDENTITY: Final = Identity(
    model="a" * 64,
    tokenizer="b" * 64,
    architecture="nemotron_h_moe",
    kv_type="f16/f16",
    flash_attention="on",
    engine="xllamacpp 2026.10.11549 blob-1",
    schema=f"{SCHEMA.family}/{SCHEMA.version}/{SCHEMA.digest()}",
    exactness="x86-64-v3 sha256:1234",
)

Page = tuple[PageHeader, bytes]


def prefill(**changes: object) -> Prefill:
    fields: dict[str, object] = {
        "handoff_id": HANDOFF,
        "identity": IDENTITY,
        "prompt": pack_tokens(PROMPT),
        "tenant": "anna",
        "queue_deadline_s": 10.0,
        "probe": True,
        "largest_page": 16_777_024,
    }
    return Prefill(**{**fields, **changes})  # type: ignore[arg-type]


def addresses(
    schema: StateSchema, tokens: int
) -> Iterator[tuple[ComponentSpec, tuple[int, int], tuple[int, int], bool]]:
    """Every page of a whole state as an exporter makes it: spec, layers, tokens, final."""
    for component in (C.ATTENTION_KV, C.MTP_KV):
        if spec := schema.spec(component):
            for start in range(0, tokens, PAGE_TOKENS):
                end = min(start + PAGE_TOKENS, tokens)
                yield spec, (0, spec.layers), (start, end), end == tokens
    for component in (C.CONVOLUTION, C.RECURRENT):
        if spec := schema.spec(component):
            yield spec, (0, 2), (0, tokens), False
            yield spec, (2, 3), (0, tokens), True
    for component in (C.MTP_HIDDEN, C.TOKENS, C.PROBE):
        if spec := schema.spec(component):
            yield spec, (0, 1), (0, tokens), True


def content(
    component: Component, layers: tuple[int, int], tokens: tuple[int, int], size: int, prompt: list[int]
) -> bytes:
    """The one right payload at an address: of a causal model's state, decided by the tokens up to its end."""
    if component is C.TOKENS:
        return pack_tokens(prompt[tokens[0] : tokens[1]])
    # The probe is decided by the last prompt token too: it is the logits after it.
    history = prompt if component is C.PROBE else prompt[: tokens[1]]
    key = repr((int(component), layers, tokens, history)).encode()
    return hashlib.shake_128(key).digest(size)


def page(header: PageHeader, payload: bytes, seed: int = SEED) -> Page:
    """The same address with a checksum and size that fit this payload."""
    checksum = page_checksum(memoryview(payload), seed, header.component, header.layers, header.tokens)
    return replaced(header, payload_bytes=len(payload), checksum=checksum), payload


def replaced(header: PageHeader, **changes: object) -> PageHeader:
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    return PageHeader(**{**fields, **changes})


def pages(
    schema: StateSchema = SCHEMA,
    prompt: list[int] = PROMPT,
    *,
    handoff_id: bytes = HANDOFF,
    epoch: int = EPOCH,
    seed: int = SEED,
) -> list[Page]:
    """A whole state in sending order."""
    made = []
    for sequence, (spec, layers, tokens, final) in enumerate(addresses(schema, len(prompt) - 1)):
        header = PageHeader(
            handoff_id=handoff_id,
            identity=IDENTITY.digest(),
            epoch=epoch,
            sequence=sequence,
            component=spec.component,
            layers=layers,
            tokens=tokens,
            payload_bytes=0,
            checksum=0,
            final=final,
        )
        payload = content(spec.component, layers, tokens, spec.page_bytes(layers, tokens), prompt)
        made.append(page(header, payload, seed))
    return made


def renumbered(some: list[Page]) -> list[Page]:
    """The same pages with sequence numbers that have no gap."""
    return [(replaced(header, sequence=i), payload) for i, (header, payload) in enumerate(some)]
