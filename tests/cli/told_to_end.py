"""A command with two hosts and a folder that is told to end, again and again: `python -m tests.cli.told_to_end FOLDER`.

First SIGTERM and SIGINT come together, once in each run of it, at every STEPth line of Python that runs: before there
is a folder, until after the end. Then, a few times, both are sent all the time from when its hosts run. Prints one JSON
object: the number of lines, and after which runs something was left, processes or files in FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

import zerocopy.cli.ending
import zerocopy.cli.hosts
from zerocopy.cli.ending import temporary_folder
from zerocopy.cli.hosts import Hosts

STEP = 13
PESTERED = 8
COMMAND = ("sh", "-c", "exec sleep 60")
MARK = "TOLD_TO_END"  # in the environment of what a command starts
SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCHED = {each.__file__ for each in (contextlib, shutil, zerocopy.cli.ending, zerocopy.cli.hosts)} | {__file__}


def command(running: Callable[[], None] = lambda: None) -> None:
    with temporary_folder("zc-told-") as folder, Hosts(folder, COMMAND) as hosts:
        for name in "ab":
            hosts.add(name, []).start()
        running()


class Tracer:
    """Sends the signals when so many lines have run, and says so on a descriptor."""

    def __init__(self, line: int, told: int) -> None:
        self._left = line
        self._told = told

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        self._left -= event in ("call", "line")
        if self._left < 0:
            sys.settrace(None)
            os.write(self._told, b"!")
            for number in random.sample(SIGNALS, 2):
                signal.raise_signal(number)
        return self


def told_at(line: int) -> bool:
    """False when there are fewer lines."""
    came, told = os.pipe()
    pid = os.fork()
    if not pid:
        sys.settrace(Tracer(line, told))
        command()
        sys.exit()
    os.close(told)
    os.waitpid(pid, 0)
    with open(came, "rb") as reader:
        return bool(reader.read())


def pestered() -> None:
    running, runs = os.pipe()
    pid = os.fork()
    if not pid:
        command(lambda: (os.write(runs, b"!"), time.sleep(60)))  # type: ignore[func-returns-value]
        sys.exit()
    os.read(running, 1)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        os.kill(pid, random.choice(SIGNALS))
        time.sleep(0.002 * random.random())


def left(folder: Path) -> list[str]:
    marked = [process for process in psutil.process_iter() if is_marked(process)]
    names = [*(process.name() for process in marked), *(path.name for path in folder.iterdir())]
    for process in marked:
        process.kill()
    for path in folder.iterdir():
        shutil.rmtree(path)
    return names


def is_marked(process: psutil.Process) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(MARK) == str(os.getpid())
    except psutil.Error:
        return False


def main() -> None:
    folder = Path(sys.argv[1])
    tempfile.tempdir = str(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    os.environ[MARK] = str(os.getpid())
    line, found = 0, dict[str, list[str]]()
    while told_at(line):
        if remains := left(folder):
            found[f"line {line}"] = remains
        line += STEP
    for number in range(PESTERED):
        pestered()
        if remains := left(folder):
            found[f"pestered {number}"] = remains
    print(json.dumps({"lines": line, "left": found}))


if __name__ == "__main__":
    main()
