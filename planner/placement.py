"""Where one request runs, and why (L5). Today by order; a cost model joins in a later issue.

Pure: takes what is known of the peers, returns a decision that explains itself. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Mode = Literal["local", "disaggregated"]

# The prefiller stops one token short of the prompt, so a prompt of one token has no state to hand off.
MIN_HANDOFF_TOKENS: Final = 2


@dataclass(frozen=True)
class Prefiller:
    """What this host knows of one peer. `obstacle` is a sentence when the peer cannot prefill for us now."""

    name: str
    obstacle: str | None
    queued: int = 0


@dataclass(frozen=True)
class Decision:
    """`prefiller` is set iff the placement is disaggregated. `fallback_reason` is set iff a request that should be
    runs here instead, `refused` iff it may not; `obstacle` is then the slug of either."""

    placement: Mode
    prefiller: str | None
    explanation: str
    fallback_reason: str | None = None
    refused: str | None = None
    obstacle: str | None = None


def choose(mode: Mode, prompt_tokens: int, prefillers: Sequence[Prefiller], *, allow_fallback: bool) -> Decision:
    """Decide for one request. With no usable prefiller a disaggregated request falls back to local if allowed,
    else it is refused; both name every peer's obstacle."""
    if mode == "local":
        return Decision("local", None, "local placement was asked for")
    if prompt_tokens < MIN_HANDOFF_TOKENS:
        return _fall_back(
            "prompt-too-short", f"a prompt of {prompt_tokens} token has no state to hand off", allow_fallback
        )
    usable = [p for p in prefillers if p.obstacle is None]
    if usable:
        best = min(usable, key=lambda p: (p.queued, p.name))
        return Decision("disaggregated", best.name, f"{best.name} is connected and matches this host's engine")
    obstacles = "; ".join(f"{p.name}: {p.obstacle}" for p in prefillers) or "no peer is configured"
    return _fall_back("no-prefiller", f"no usable prefiller ({obstacles})", allow_fallback)


def _fall_back(obstacle: str, why: str, allowed: bool) -> Decision:
    if allowed:
        return Decision("local", None, f"local because {why}", fallback_reason=why, obstacle=obstacle)
    return Decision("local", None, why, refused=why, obstacle=obstacle)
