"""How much memory there is, by the files of Linux's control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from native.memory import available_bytes

MIB = 1 << 20


def group(folder: Path, limit: str, used: int = 0, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\nactive_file {cached}\ninactive_file 0\n")


def own(folder: Path, text: str) -> Path:
    (folder / "own").write_text(text)
    return folder / "own"


def test_a_container_has_what_its_group_may_take(tmp_path: Path) -> None:
    group(tmp_path, str(64 * MIB), used=50 * MIB, cached=20 * MIB)
    assert available_bytes(tmp_path, own(tmp_path, "0::/\n")) == 34 * MIB


def test_a_group_has_no_more_than_those_above_it(tmp_path: Path) -> None:
    group(tmp_path / "a/b/c", "max")
    group(tmp_path / "a/b", str(9 * MIB), used=2 * MIB)
    group(tmp_path / "a", str(30 * MIB), used=28 * MIB)
    group(tmp_path.parent, "1")  # no group: it is above them all
    assert available_bytes(tmp_path, own(tmp_path, "4:memory:/x\n0::/a/b/c\n")) == 2 * MIB


def test_a_group_that_has_passed_its_limit_has_nothing_left(tmp_path: Path) -> None:
    group(tmp_path / "a", str(MIB), used=3 * MIB)
    assert available_bytes(tmp_path, own(tmp_path, "0::/a\n")) == 0


@pytest.mark.parametrize("text", ["0::/\n", "0::/absent/group\n", "4:memory:/x\n", ""])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, text: str) -> None:
    machines = psutil.virtual_memory()
    for found in (available_bytes(tmp_path, own(tmp_path, text)), available_bytes(tmp_path, tmp_path / "absent")):
        assert machines.available // 2 < found <= machines.total
