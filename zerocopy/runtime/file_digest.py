"""sha256 of large files, remembered by path, size and times so that a model is hashed once.

Owns one small JSON file under the cache directory ($ZC_CACHE, else ~/.cache/zc-handoff), bounded to 64 entries. It
holds names and digests of weights and engine files only, never anything of a request.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec

_MAX_ENTRIES: Final = 64
_MAX_FILE_BYTES: Final = 1 << 20


def cache_directory() -> Path:
    configured = os.environ.get("ZC_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "zc-handoff"


def written(path: Path) -> tuple[int, int, int]:
    """What tells one state of a file from another. Size and mtime alone do not: two models of one shape have one size,
    and `cp -p`, `rsync -t` and `tar` set the mtime. Raises OSError."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def file_sha256(path: Path) -> str:
    """Hex sha256. A file that was written or replaced is hashed again; an unreadable cache only costs time."""
    resolved = path.resolve()
    key = "|".join(map(str, (resolved, *written(resolved))))
    store = cache_directory() / "sha256.json"
    known = _load(store)
    if key in known:
        return known[key]
    with resolved.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    entries = {k: v for k, v in known.items() if k.split("|")[0] != str(resolved)} | {key: digest}
    _save(store, dict(list(entries.items())[-_MAX_ENTRIES:]))
    return digest


def _load(store: Path) -> dict[str, str]:
    try:
        if store.stat().st_size > _MAX_FILE_BYTES:
            return {}
        return msgspec.json.decode(store.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _save(store: Path, entries: dict[str, str]) -> None:
    """Replace the file whole, so that two daemons starting at once never leave half of one. Best effort."""
    with contextlib.suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=store.parent) as folder:
            whole = Path(folder, store.name)
            whole.write_bytes(msgspec.json.encode(entries))
            whole.replace(store)
