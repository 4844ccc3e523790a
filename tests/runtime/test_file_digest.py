"""Weights are hashed once, and a changed file is never taken for the old one (S8)."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from pathlib import Path

import pytest

from zerocopy.runtime import file_digest
from zerocopy.runtime.file_digest import cache_directory, file_sha256


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sha256.json"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(b"one")
    return tmp_path / "weights"


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often a file is really read."""
    calls: list[int] = []
    real = hashlib.file_digest
    monkeypatch.setattr(file_digest.hashlib, "file_digest", lambda *a: (calls.append(1), real(*a))[1])
    return calls


def test_a_file_is_hashed_once(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hashed(monkeypatch)
    assert file_sha256(file) == file_sha256(file) == hashlib.sha256(b"one").hexdigest()
    assert len(calls) == 1 and cache.exists()


def test_a_cache_that_the_disk_does_not_take_leaves_nothing(file: Path, cache: Path) -> None:
    """Each start left a piece of one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        assert file_sha256(file) == hashlib.sha256(b"one").hexdigest()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(cache.parent.iterdir()) == []


def test_a_changed_file_is_hashed_again(file: Path) -> None:
    file_sha256(file)
    file.write_bytes(b"other")
    assert file_sha256(file) == hashlib.sha256(b"other").hexdigest()
    file.write_bytes(b"three")  # the same size, another time
    os.utime(file, ns=(1, 1))
    assert file_sha256(file) == hashlib.sha256(b"three").hexdigest()


def test_a_file_of_the_same_size_and_mtime_is_another_one(file: Path) -> None:
    """S8. Models of one shape have one size, and `cp -p` keeps the mtime: new weights had the old digest."""
    file_sha256(file)
    stat = file.stat()
    other = file.with_name("other")
    other.write_bytes(b"two")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)
    assert file_sha256(file) == hashlib.sha256(b"two").hexdigest()
    file.write_bytes(b"six")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_sha256(file) == hashlib.sha256(b"six").hexdigest()


def test_a_link_shares_its_targets_entry(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    calls = hashed(monkeypatch)
    assert file_sha256(link) == file_sha256(file)
    assert len(calls) == 1


@pytest.mark.parametrize("content", [b"", b"not json", b"[1]", b'{"a": 1}', b"\xff" * 10])
def test_a_damaged_cache_only_costs_time(content: bytes, file: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert file_sha256(file) == hashlib.sha256(b"one").hexdigest()
    assert file_sha256(file) == hashlib.sha256(b"one").hexdigest()


def test_a_cache_that_cannot_be_written_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZC_CACHE", str(file / "below a file"))
    assert file_sha256(file) == hashlib.sha256(b"one").hexdigest()


def test_the_cache_is_bounded_and_keeps_one_entry_a_file(file: Path, cache: Path) -> None:
    for i in range(80):
        other = file.with_name(f"w{i}")
        other.write_bytes(b"%d" % i)
        file_sha256(other)
    for i in range(3):
        os.utime(file, ns=(i, i))
        file_sha256(file)
    text = cache.read_text()
    assert len(json.loads(text)) == 64 and text.count(f"{file}|") == 1


def test_the_cache_is_under_the_home_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZC_CACHE")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/.cache/zc-handoff")
