"""Rings for tests, and the build of the C that can be killed between two stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from native.build_ring import builder
from native.ring import Ring

ROOT = Path(__file__).parents[2]
Spawn = Callable[..., "subprocess.Popen[bytes]"]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def pair() -> Iterator[tuple[Ring, Ring]]:
    """Producer's and consumer's view of one small ring; nothing of it is left afterwards."""
    before = open_descriptors()
    producer = Ring.create(16384, "test")
    consumer = Ring.attach(producer.handle.duplicate())
    yield producer, consumer
    producer.close()
    consumer.close()
    assert open_descriptors() <= before  # less when garbage of an earlier test, views of its memory, goes meanwhile


@pytest.fixture(scope="session")
def killable(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a `native._ring` built with kill steps."""
    return str(builder(ROOT, kill_steps=True).compile(tmpdir=str(tmp_path_factory.mktemp("killable"))))


@pytest.fixture
def spawn(killable: str) -> Iterator[Spawn]:
    """`spawn(role, handle, **options)` runs one role of peer.py in another process."""
    started: list[subprocess.Popen[bytes]] = []

    def start(role: str, handle: tuple[int, ...], **options: object) -> subprocess.Popen[bytes]:
        capacity, fds = handle[-1], handle[:-1]
        order = {"role": role, "fds": fds, "capacity": capacity, "module": killable, **options}
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), json.dumps(order)]
        started.append(subprocess.Popen(command, pass_fds=fds, env={**os.environ, "PYTHONPATH": str(ROOT)}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
