"""Arrows point down only, without a circle, and the handoff core does no I/O (architecture.md).

Imports are read from the source, not from a running interpreter, so one inside a function counts like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
FLOORS: Final = ("native", "transport", "planner", "zerocopy")

# Who may import whom. A name covers all below it; the longest that fits a module is its own rule.
ARROWS: Final[dict[str, tuple[str, ...]]] = {
    "native": ("native",),
    "transport": ("transport", "native"),
    "planner": ("planner",),
    "zerocopy.handoff": ("zerocopy.handoff",),
    "zerocopy.runtime": (
        "zerocopy.runtime", "zerocopy.handoff.components", "zerocopy.handoff.errors", "native.cores",
    ),
    "zerocopy.worker": ("zerocopy.worker", "zerocopy.runtime", "zerocopy.handoff", "native"),
    "zerocopy.config": ("zerocopy.config", "transport", "native"),
    "zerocopy.daemon": (
        "zerocopy.daemon", "zerocopy.config", "zerocopy.worker", "zerocopy.runtime", "zerocopy.handoff",
        "planner", "transport", "native",
    ),
    "zerocopy.cli": ("zerocopy", "planner", "transport", "native"),
    "zerocopy.__main__": ("zerocopy.cli",),
    "zerocopy": (),  # the package itself: a version, and everybody below it may read that
}  # fmt: skip

# What a sans-IO core may use of the standard library: nothing that can wait, read, write or tell the time.
PURE: Final = frozenset({
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "itertools", "math",
    "operator", "struct", "types", "typing", "xml.sax.saxutils",
})  # fmt: skip
PURE_PACKAGES: Final = frozenset({"msgspec", "xxhash"})

NEVER: Final = frozenset({"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})


def sources(root: Path, folders: Iterable[str]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def modules(root: Path) -> dict[str, Path]:
    """Every module of ours by its name."""
    found = {}
    for path in sources(root, FLOORS):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, root: Path) -> set[str]:
    """Every module (or name in a module) that a file imports, wherever in the file."""
    found = set()
    package = list(path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def covers(rule: str, module: str) -> bool:
    return module == rule or module.startswith(f"{rule}.")


def upward(root: Path) -> list[str]:
    """Imports that the arrows do not allow, as `file: name`."""
    wrong, paths = [], modules(root)
    for module, path in paths.items():
        rule = max((r for r in ARROWS if covers(r, module)), key=len)
        for name in sorted(imported(path, root)):
            ours = name.split(".")[0] in FLOORS and owner(name, paths) != "zerocopy"
            if ours and not any(covers(allowed, name) for allowed in ARROWS[rule]):
                wrong.append(f"{path.relative_to(root)}: {name}")
    return wrong


def circles(root: Path) -> list[list[str]]:
    """Modules that import each other, directly or not."""
    paths = modules(root)
    graph = {m: {t for name in imported(p, root) if (t := owner(name, paths)) and t != m} for m, p in paths.items()}
    found, done = list[list[str]](), set[str]()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append([*trail[trail.index(module) :], module])
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def owner(name: str, paths: dict[str, Path]) -> str | None:
    """The module of ours that an imported name comes from."""
    while name and name not in paths:
        name = name.rpartition(".")[0]
    return name or None


def impure(root: Path) -> list[str]:
    """What the handoff core imports or calls that could do I/O or read a clock."""
    wrong = []
    for path in sources(root, ["zerocopy/handoff"]):
        for name in sorted(imported(path, root)):
            first = name.split(".")[0]
            known = first == "zerocopy" or first in PURE_PACKAGES
            if not known and not any(covers(pure, name) for pure in PURE):
                wrong.append(f"{path.name}: {name}")
        wrong += [f"{path.name}:{line}: open()" for name, line in calls(path) if name in ("open", "input")]
    return wrong


def calls(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text(), path)
    return [(n.func.id, n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]


def forbidden(root: Path, folders: Iterable[str]) -> list[str]:
    """Code that lets bytes become code."""
    wrong = []
    for path in sources(root, folders):
        where = path.relative_to(root)
        wrong += [f"{where}: {n}" for n in sorted(imported(path, root)) if n.split(".")[0] in NEVER]
        wrong += [f"{where}:{line}: {name}()" for name, line in calls(path) if name in ("eval", "exec")]
        for node in ast.walk(ast.parse(path.read_text(), path)):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                wrong.append(f"{where}:{node.value.lineno}: allow_pickle")
    return wrong


def test_arrows_point_down_only() -> None:
    assert upward(ROOT) == []


def test_there_is_no_circle_of_imports() -> None:
    assert circles(ROOT) == []


def test_the_handoff_core_does_no_io() -> None:
    assert impure(ROOT) == []


def test_no_code_comes_off_the_wire() -> None:
    """Pickle on the wire was remote code execution elsewhere (field reports)."""
    assert forbidden(ROOT, [*FLOORS, "tests", "benches", "scripts"]) == []


def test_every_floor_and_room_has_a_rule() -> None:
    rooms = {f"zerocopy.{p.name}" for p in (ROOT / "zerocopy").iterdir() if (p / "__init__.py").exists()}
    assert rooms | set(FLOORS) <= set(ARROWS)


# -- the rules themselves, on trees that break them ------------------------------------------------------------------


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("native/ring.py", "import transport.link"),
        ("transport/tcp.py", "from zerocopy.handoff import messages"),
        ("planner/links.py", "import native.ring"),
        ("zerocopy/handoff/sink.py", "from zerocopy.runtime.base import Lane"),
        ("zerocopy/handoff/sink.py", "def f():\n    import zerocopy.daemon"),
        ("zerocopy/handoff/sink.py", "from ..daemon import peers"),
        ("zerocopy/handoff/sink.py", "from transport.link import Link"),
        ("zerocopy/runtime/base.py", "from zerocopy.handoff.messages import Hello"),
        ("zerocopy/runtime/llama/abi.py", "import zerocopy.worker.loop"),
        ("zerocopy/worker/loop.py", "from zerocopy.daemon import main"),
        ("zerocopy/worker/loop.py", "from transport import link"),
        ("zerocopy/daemon/main.py", "import zerocopy.cli"),
        ("zerocopy/__init__.py", "import transport"),
        ("zerocopy/__main__.py", "from zerocopy.daemon import main"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, file: str, text: str) -> None:
    assert len(upward(plant(tmp_path, {file: text}))) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("zerocopy/cli/main.py", "import zerocopy.daemon.main, planner.links"),
        ("zerocopy/daemon/main.py", "from zerocopy.worker.loop import x; import transport.tcp, native.ring"),
        ("zerocopy/worker/loop.py", "from zerocopy.runtime import base; from zerocopy.handoff import components"),
        ("zerocopy/runtime/base.py", "from zerocopy.handoff.components import Component"),
        ("zerocopy/handoff/sink.py", "from .ledger import Ledger; import msgspec"),
        ("zerocopy/daemon/__init__.py", "from .core import x; from ..worker import loop"),
    ],
)
def test_a_downward_import_is_allowed(tmp_path: Path, file: str, text: str) -> None:
    assert upward(plant(tmp_path, {file: text})) == []


def test_circles_are_found_however_they_are_written(tmp_path: Path) -> None:
    plant(tmp_path, {
        "planner/__init__.py": "", "planner/a.py": "from planner import b", "planner/b.py": "from .c import x",
        "planner/c.py": "def f():\n    import planner.a", "planner/d.py": "import planner.a",
    })  # fmt: skip
    assert circles(tmp_path) == [["planner.a", "planner.b", "planner.c", "planner.a"]]


@pytest.mark.parametrize(
    "text",
    [
        "import socket", "import os", "import time", "from asyncio import sleep", "import threading", "import io",
        "from pathlib import Path", "import ssl, selectors", "import secrets", "import random", "import datetime",
        "import logging", "open('x')", "import numpy",
    ],
)  # fmt: skip
def test_io_in_the_core_is_found(tmp_path: Path, text: str) -> None:
    assert impure(plant(tmp_path, {"zerocopy/handoff/sink.py": text})) != []


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from marshal import loads", "import joblib as j", "eval('1')", "x = exec('1')",
     "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_code_from_bytes_is_found(tmp_path: Path, text: str) -> None:
    assert len(forbidden(plant(tmp_path, {"transport/tcp.py": text}), ["transport"])) == 1


def test_these_rules_know_the_modules_of_the_standard_library() -> None:
    assert {name.split(".")[0] for name in PURE} <= set(sys.stdlib_module_names)
