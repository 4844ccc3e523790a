"""What `--cores` says reaches the engine's threads, and two hosts on one machine that were not told are warned."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ModelFile
from tests.e2e.pair import ENGINE
from zerocopy.cli.hosts import Hosts

OPENMP_SAYS_WHAT_IT_READ = ("env", "OMP_DISPLAY_ENV=verbose", sys.executable, "-m", "zerocopy")
WARNING = "cores are shared"


@pytest.mark.skipif(platform.system() != "Linux", reason="OpenMP is libgomp on Linux")
def test_engine_threads_wait_as_the_cores_are_and_neighbours_are_warned(model_file: ModelFile, tmp_path: Path) -> None:
    """U2. Of OpenMP's own report in each worker."""
    with Hosts(tmp_path, OPENMP_SAYS_WHAT_IT_READ) as hosts:
        common = ["--model", str(model_file("llama")), *ENGINE]
        prefiller = hosts.add("prefiller", ["--role", "prefill", "--cores", "own", *common])
        dialling = hosts.add("dialling", ["--role", "decode", "--cores", "own", *common], peers=[prefiller])
        told = hosts.add("told", ["--role", "decode", *common], peers=[prefiller])
        alone = hosts.add("alone", ["--role", "decode", "--cores", "own", *common])
        for host in (prefiller, dialling, told, alone):
            host.start()
        for host in (prefiller, dialling, told, alone):
            host.wait_ready()
        seen = {}
        for host in (prefiller, dialling, told, alone):
            log = host.log_path.read_text()
            (spins,) = {line.split("'")[1] for line in log.splitlines() if "GOMP_SPINCOUNT" in line}
            seen[host.name] = (spins, WARNING in log and "--cores shared" in log)
    assert seen == {
        "prefiller": ("7000", True),
        "dialling": ("7000", True),
        "told": ("400", False),
        "alone": ("7000", False),
    }
