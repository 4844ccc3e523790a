"""Tiny models: the same bytes every time, other bytes for another seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerocopy.runtime import models


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_model_is_the_same_bytes_every_time(family: str, tmp_path: Path) -> None:
    one, again, other, wide = (tmp_path / name for name in "abcd")
    assert models.make(family, one) == one
    models.make(family, again)
    models.make(family, other, seed=1)
    models.make(family, wide, scale=2)
    assert one.read_bytes() == again.read_bytes() != other.read_bytes()
    assert one.stat().st_size == other.stat().st_size < 2 << 20 < 2 * wide.stat().st_size


def test_there_are_seven_families() -> None:
    assert models.FAMILIES == (
        "llama", "gemma3", "mamba2", "nemotron_h", "nemotron_h_moe", "nemotron_h_moe+mtp", "qwen35+mtp",
    )  # fmt: skip


def test_unknown_families_and_scales_are_refused_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tiny model of family gpt2: choose one of llama, gemma3"):
        models.make("gpt2", tmp_path / "m")
    for scale in (0, 17):
        with pytest.raises(ValueError, match=f"scale {scale} is outside 1 to 16"):
            models.make("llama", tmp_path / "m", scale=scale)
    assert not (tmp_path / "m").exists()
