"""Families whose state this program has proven it can move (S10), and how each one's state is built.

A family outside this table is refused: an engine would load it, and a part of its state nobody knows of could stay
behind. A row is added together with its tests.
"""

from __future__ import annotations

from typing import Final

import msgspec

from zerocopy.runtime.base import EngineError
from zerocopy.runtime.gguf_header import GgufHeader


class Layout(msgspec.Struct, frozen=True):
    """Shape of a family's state blob, as far as its own bytes do not say."""

    kv_caches: int  # 0 without attention, 2 for sliding-window models (full cache, then window cache)
    recurrent: bool
    m_rope: bool = False  # cells carry 12 more bytes: two positions and the token
    mtp: bool = False  # whether the MTP head's state has been proven


LAYOUTS: Final = {
    "llama": Layout(kv_caches=1, recurrent=False),
    "gemma3": Layout(kv_caches=2, recurrent=False),
    "mamba2": Layout(kv_caches=0, recurrent=True),
    "nemotron_h": Layout(kv_caches=1, recurrent=True),
    "nemotron_h_moe": Layout(kv_caches=1, recurrent=True, mtp=True),
    "qwen35": Layout(kv_caches=1, recurrent=True, m_rope=True, mtp=True),
}


# Not "longrope": the engine has other factors in a context longer than the one the model was made for, so two hosts of
# one identity but another n_ctx would give positions another meaning.
ROPE_SCALINGS: Final = ("none", "linear", "yarn")


class Family(msgspec.Struct, frozen=True):
    name: str  # "nemotron_h_moe+mtp"
    layout: Layout
    mtp: bool


def family_of(header: GgufHeader, *, mtp: bool) -> Family:
    """The certified family of a model file. `mtp` asks for the MTP head to be tracked where there is one."""
    layout = LAYOUTS.get(header.architecture)
    if layout is None:
        raise EngineError(
            "family",
            f"architecture {header.architecture or 'unknown'} is not certified for exact handoff; "
            f"certified are {', '.join(LAYOUTS)}",
        )
    if header.rope_scaling not in ROPE_SCALINGS:
        raise EngineError(
            "family",
            f"{header.architecture} with rope scaling {header.rope_scaling} is not certified for exact handoff: its "
            f"state may depend on the context's length; certified are {', '.join(ROPE_SCALINGS)}",
        )
    tracked = mtp and header.mtp_layers > 0
    if tracked and (header.mtp_layers > 1 or not layout.mtp):
        raise EngineError(
            "family",
            f"{header.architecture} with {header.mtp_layers} MTP layers is not certified; start with --mtp off",
        )
    return Family(f"{header.architecture}+mtp" if tracked else header.architecture, layout, tracked)
