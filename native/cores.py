"""How many processors this process may keep busy."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from native.memory import GROUPS, OWN_GROUP, control_groups


def usable_cores(groups: Path = GROUPS, own: Path = OWN_GROUP) -> int:
    """Those it may run on or, where that is less, the time that its control group or one above it gets, in whole ones
    (cgroup v2). A container with two of a machine's 64 is such a group: 64 threads there would stand still most
    of the time."""
    may = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for group in control_groups(groups, own):
        with contextlib.suppress(OSError, ValueError):  # the group's limit is "max", or this is the root
            quota, period = map(int, (group / "cpu.max").read_text().split())
            may.append(max(1, -(-quota // period)))
    return min(may)
