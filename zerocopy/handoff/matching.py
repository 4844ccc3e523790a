"""Whether two hosts may hand state to each other (S8), and if not, a sentence that names both values and the remedy."""

from __future__ import annotations

from typing import Final

from zerocopy.handoff.components import Identity, StateSchema
from zerocopy.handoff.errors import RemoteProtocolError

_REMEDY: Final = {
    "model": ("model digest", "give both hosts the same model file"),
    "tokenizer": ("tokenizer digest", "give both hosts the same model file"),
    "architecture": ("architecture", "give both hosts the same model file"),
    "kv_type": ("KV type", "start both with the same --kv-type"),
    "flash_attention": ("flash attention", "start both with the same --flash-attention"),
    "engine": ("engine", "install the same zc-handoff and xllamacpp version on both"),
    "schema": (
        "state schema",
        "install the same zc-handoff version and give both the same model, --mtp and context options",
    ),
}


class Mismatch(RemoteProtocolError):
    """Why a handoff between two hosts is refused; `have` is the decoder's value, `want` the prefiller's."""

    def __init__(self, message: str, have: str, want: str, reason: str = "identity-mismatch") -> None:
        super().__init__(reason, message[:1024])
        self.have = have[:512]
        self.want = want[:512]


def identity_mismatch(decoder: Identity, prefiller: Identity) -> Mismatch | None:
    """The first difference that forbids a handoff, None when there is none."""
    for field, have, want in decoder.differences(prefiller):
        name, remedy = _REMEDY[field]
        more = len(decoder.differences(prefiller)) - 1
        rest = f" ({more} more differ{'' if more > 1 else 's'})" if more else ""
        return Mismatch(f"decoder has {name} {have}, prefiller {want}: {remedy}{rest}", have, want)
    return None


def schema_mismatch(decoder: StateSchema, prefiller: StateSchema) -> Mismatch | None:
    """The first difference of two state schemas. Equal identities promise equal schemas; this checks the promise."""
    for field in StateSchema.__struct_fields__:
        have, want = getattr(decoder, field), getattr(prefiller, field)
        if have == want:
            continue
        if field == "components":
            return _component_mismatch(decoder, prefiller)
        return Mismatch(f"state schema: decoder has {field} {have}, prefiller {want}: {_REMEDY['schema'][1]}",
                        str(have), str(want))  # fmt: skip
    return None


def _component_mismatch(decoder: StateSchema, prefiller: StateSchema) -> Mismatch:
    ours = {s.component: s for s in decoder.components}
    theirs = {s.component: s for s in prefiller.components}
    for component in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(component), theirs.get(component)
        if a is None or b is None:
            have, want = ("present" if spec else "absent" for spec in (a, b))
            return Mismatch(f"{component.label} is {have} on the decoder, {want} on the prefiller", have, want)
        for field in a.__struct_fields__:
            if (mine := getattr(a, field)) != (other := getattr(b, field)):
                have, want = _short(mine), _short(other)
                return Mismatch(f"{component.label}: decoder has {field} {have}, prefiller {want}", have, want)
    return Mismatch("state schemas list their components in different order", "ordered", "reordered")


def _short(value: object) -> str:
    """Per-layer sizes of a large model are a long tuple: name their number and total."""
    if isinstance(value, tuple):
        return f"{len(value)} layers of {sum(value)} bytes ({', '.join(map(str, value[:4]))}...)"
    return str(value)
