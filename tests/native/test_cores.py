"""Cores are those that a container is given, not those of the machine it is on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from native.cores import usable_cores

MINE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def group(folder: Path, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{limit}\n")


def own(folder: Path, text: str) -> Path:
    (folder / "own").write_text(text)
    return folder / "own"


@pytest.mark.parametrize(
    ("limit", "cores"), [("100000 100000", 1), ("20000 100000", 1), ("150000 100000", 2), ("100000 50000", 2)]
)
def test_a_container_has_as_many_cores_as_its_group_gets_time(limit: str, cores: int, tmp_path: Path) -> None:
    group(tmp_path, limit)
    assert usable_cores(tmp_path, own(tmp_path, "0::/\n")) == min(MINE, cores)


def test_a_group_has_no_more_than_those_above_it(tmp_path: Path) -> None:
    group(tmp_path / "a/b/c", "max 100000")
    group(tmp_path / "a/b", "900000 100000")
    group(tmp_path / "a", "100000 100000")
    assert usable_cores(tmp_path, own(tmp_path, "4:memory:/x\n0::/a/b/c\n")) == 1


@pytest.mark.parametrize("text", ["0::/\n", "0::/absent/group\n", "4:memory:/x\n", ""])
def test_without_a_limit_they_are_those_it_may_run_on(tmp_path: Path, text: str) -> None:
    group(tmp_path, "max 100000")
    assert usable_cores(tmp_path, own(tmp_path, text)) == usable_cores(tmp_path, tmp_path / "absent") == MINE
