"""What every script of `benches/peer` shares: a figure is of bytes that were moved while it was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benches import peers

# Two processes with one file: whoever moves copies into it. Argument 4 of the sending end says how often it does.
SCRIPT = """
import mmap, os, sys
from both_ends import answer, run

SIZE = 1 << 20
fd = os.open(os.environ["LANDED"], os.O_RDWR)
landed = memoryview(mmap.mmap(fd, SIZE))
left = int(os.environ["MOVES"])

def receive(block):
    print("{}", flush=True)
    answer(landed)

def prepare(setup, source, block):
    def once():
        global left
        if left:
            landed[:] = source
        left -= 1
    return once

run(receive, prepare, SIZE)
"""


@pytest.mark.parametrize(("moves", "found"), [(2, True), (1, False)])
def test_a_measurement_that_moves_nothing_after_the_warm_up_is_none(tmp_path: Path, moves: int, found: bool) -> None:
    """The warm-up had left the right bytes there, and the checksum at the end was of those."""
    script, landed = tmp_path / "script.py", tmp_path / "landed"
    script.write_text(SCRIPT)
    landed.write_bytes(bytes(1 << 20))
    environment = {"PYTHONPATH": str(peers.SCRIPTS), "LANDED": str(landed), "MOVES": str(moves)}
    command = [sys.executable, str(script), "1", "64"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30)
    if found:
        assert json.loads(done.stdout)["gbps"] > 0
    else:
        assert (done.stdout, done.stderr) == ("", "what arrived is not what was sent\n")
