"""`zc-handoff doctor`: checks what a host needs, and says how to get what is missing. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import typer
from rich.text import Text

from native.memory import available_bytes
from transport.address import parse
from transport.link import LinkError
from transport.quic_choice import INSTALL, INSTALL_AEAD, built
from zerocopy.cli.keys import Directory, open_store
from zerocopy.cli.screen import ExitCode, Rows, bytes_text, show, show_json, table
from zerocopy.config import DaemonConfig

# `AESGCM.encrypt_into` and OpenSSL 4's speed arrived with it; the data plane is built on both.
CRYPTOGRAPHY_MAJOR: Final = 50

State = Literal["ok", "absent", "warning", "failed"]  # absent: optional, and not there


class Check(msgspec.Struct, frozen=True):
    """One line: what was found, and for anything but ok, what to do."""

    name: str
    state: State
    found: str
    next_step: str | None = None


def doctor(
    keys: Directory = None, json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False
) -> None:
    """Check this machine: Python, engine, compiled ring, crypto, keys, memory, ports, QUIC.

    Exits with 1 if something that a daemon needs is missing; warnings do not count.
    """
    checks = run_checks(keys)
    failed = any(check.state == "failed" for check in checks)
    if json:
        show_json({"ok": not failed, "checks": checks})
    else:
        show(_render(checks))
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def run_checks(keys: Path | None) -> list[Check]:
    steps: list[Callable[[], Check]] = [_python, _engine, _ring, _cryptography, lambda: _keys(keys), _memory]
    defaults = DaemonConfig()
    steps += [lambda: _port("peer port", defaults.listen), lambda: _port("HTTP port", defaults.http), _quic]
    return [step() for step in steps]


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("Python", "ok", found)


def _engine() -> Check:
    from zerocopy.runtime.base import EngineError
    from zerocopy.runtime.llama.abi import PACKAGE, PACKAGE_VERSION, open_library

    try:
        open_library()
        version = importlib.metadata.version(PACKAGE)
    except EngineError as error:
        return Check("engine", "failed", error.reason, str(error))
    except (OSError, importlib.metadata.PackageNotFoundError) as error:
        return Check("engine", "failed", str(error), f"pip install {PACKAGE}=={PACKAGE_VERSION}")
    return Check("engine", "ok", f"{PACKAGE} {version}, ABI known")


def _ring() -> Check:
    try:
        import native._ring
    except ImportError as error:
        return Check("compiled ring", "failed", str(error), "build it: pip install -e . (needs a C compiler)")
    return Check("compiled ring", "ok", Path(native._ring.__file__ or "").name)


def _cryptography() -> Check:
    version = importlib.metadata.version("cryptography")
    from cryptography.hazmat.backends.openssl import backend

    found = f"cryptography {version}, {backend.openssl_version_text()}"
    if int(version.split(".")[0]) < CRYPTOGRAPHY_MAJOR:
        return Check("crypto", "failed", found, f"pip install 'cryptography>={CRYPTOGRAPHY_MAJOR}'")
    return Check("crypto", "ok", found)


def _keys(directory: Path | None) -> Check:
    store = open_store(directory)
    try:
        if not store.exists():
            return Check("keys", "warning", f"none in {store.directory}", "zc-handoff keys new NAME")
        trusted = len(store.trusted())
        found = f"{store.show()[1][:16]}…, {trusted} trusted"
    except LinkError as error:
        return Check("keys", "failed", error.reason, str(error))
    if not trusted:
        return Check("keys", "warning", found, "zc-handoff keys trust NAME FILE, to hand off to or from a peer")
    return Check("keys", "ok", found)


def _memory() -> Check:
    available = available_bytes()
    defaults = DaemonConfig()
    rings = (2 * defaults.rings * defaults.ring_mib) << 20  # export and landing
    found = f"{bytes_text(available)} available, rings take {bytes_text(rings)} with the defaults"
    if available < 2 * rings:
        return Check("memory", "warning", found, "start the daemon with a smaller --ring-mib or --rings")
    return Check("memory", "ok", found)


def _port(name: str, address: str) -> Check:
    at = parse(address)
    try:
        with socket.create_server((at.host, at.port)):
            pass
    except OSError as error:
        return Check(
            name, "warning", f"{address}: {os.strerror(error.errno or 0)}", "a daemon may be running: zc-handoff status"
        )
    return Check(name, "ok", f"{address} is free")


def _quic() -> Check:
    try:
        from transport.quic_engine import engine_name
    except ImportError as error:
        found = "not built" if not built() else f"does not load: {error}"
        return Check("QUIC", "absent", f"{found}: links use TCP", INSTALL)
    name = engine_name()
    slow = "GnuTLS" in name and "ipsec-mb" not in name and (sys.platform, platform.machine()) == ("linux", "x86_64")
    return Check("QUIC", "ok", name, f"for a fifth less CPU: {INSTALL_AEAD}" if slow else None)


def _render(checks: list[Check]) -> Rows:
    rows = table("", "check", "found", "next step")
    marks = {
        "ok": Text("ok", "green"),
        "absent": Text("-", "dim"),
        "warning": Text("!", "bold yellow"),
        "failed": Text("failed", "bold red"),
    }
    for check in checks:
        rows.add_row(marks[check.state], check.name, check.found, check.next_step or "")
    return rows
