"""Codecs give back what they took, and what they cost and save is told apart from the wire."""

from __future__ import annotations

import numpy as np
import pytest

from zerocopy.cli.bench_codec import CODECS, CodecCost, codec_rows, decode, encode, kv_like, shuffled, unshuffled


@pytest.mark.parametrize("name", CODECS[1:])
def test_a_codec_gives_back_what_it_took(name: str) -> None:
    for raw in (kv_like(1 << 16), np.zeros(1 << 16, np.uint8)):
        assert np.array_equal(decode(name, encode(name, raw)), raw)


def test_shuffling_puts_like_bytes_together() -> None:
    raw = np.array([1, 2, 3, 4, 5, 6], np.uint8)
    assert shuffled(raw).tolist() == [1, 3, 5, 2, 4, 6]
    assert unshuffled(shuffled(raw)).tolist() == raw.tolist()


def test_the_buffer_is_like_kv_channels_of_different_scale_and_no_two_rows_alike() -> None:
    rows = kv_like(1 << 20).view(np.float16).reshape(-1, 512).astype(np.float32)
    assert np.isfinite(rows).all() and len(np.unique(rows[:, 0])) > len(rows) // 2
    deviations = rows.std(axis=0)
    assert deviations.max() > 5 * deviations.min()


def test_a_codec_pays_only_where_it_saves_and_below_the_speed_it_encodes_at() -> None:
    assert CodecCost("lz4", 1, encode_gbps=3.0, cpu_s_per_gib=1.0, ratio=1.5).pays_below_gbps == 3.0
    assert CodecCost("lz4", 1, encode_gbps=3.0, cpu_s_per_gib=1.0, ratio=0.99).pays_below_gbps == 0.0


def test_each_codec_is_one_row() -> None:
    steps: list[str] = []
    (row,) = codec_rows(["lz4"], steps.append)
    assert row.name == "lz4" and row.encode_gbps > 0 and row.cpu_s_per_gib > 0 and 0.9 < row.ratio < 10
    assert steps == ["codec lz4"]
