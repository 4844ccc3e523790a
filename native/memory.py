"""Shared memory and doorbells as file descriptors, and one mapping of such memory into this process.

Memory has no name that outlives its creation: memfd on Linux, POSIX shared memory unlinked at once elsewhere. It is
pre-faulted in every process that maps it, kept out of core dumps where the kernel can, and never remapped. Size and
number are the caller's to bound. Owns no layout: `native.ring` and `native.slab` do.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import mmap
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

PAGE: Final = mmap.PAGESIZE
GROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUP: Final = Path("/proc/self/cgroup")
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module does not name it yet


class NativeError(Exception):
    """A ring or slab was used in a way it does not allow. `reason` is a stable slug."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def available_bytes(groups: Path = GROUPS, own: Path = OWN_GROUP) -> int:
    """Memory that this process can still have: what the machine has left or, where that is less, its control group or
    one above it (cgroup v2). A container is such a group."""
    left = [int(psutil.virtual_memory().available)]
    for group in control_groups(groups, own):
        with contextlib.suppress(OSError, ValueError):  # the group's limit is "max", or this is the root
            left.append(_left(group))
    return max(0, min(left))


def control_groups(groups: Path, own: Path) -> list[Path]:
    """This process's (cgroup v2) and those above it; none where the kernel has none."""
    try:
        (name,) = (line[len("0::/") :] for line in own.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, ValueError):
        return []
    group = groups / name
    return [group, *group.parents[: len(Path(name).parts)]]


def _left(group: Path) -> int:
    limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    counts = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    # The kernel takes back what it only keeps of files: most of a model's is such memory.
    return limit - used + sum(int(count) for name, count in counts if name in ("active_file", "inactive_file"))


def create_memory(label: str, nbytes: int) -> int:
    """A descriptor of `nbytes` zero bytes of shared memory, close-on-exec; `label` is for people reading /proc."""
    if sys.platform == "linux":
        with closed_if_raises(os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
            os.ftruncate(fd, nbytes)
            # A peer that shrinks the file would make the other side die of SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return fd
    return create_posix_memory(nbytes)


def create_posix_memory(nbytes: int) -> int:
    """The same from POSIX shared memory, for systems without memfd."""
    shm = importlib.import_module("_posixshmem")  # what multiprocessing.shared_memory uses; absent on Windows only
    name = f"/zc-{secrets.token_hex(8)}"  # macOS allows 31 characters
    with closed_if_raises(int(shm.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600))) as fd:
        shm.shm_unlink(name)
        os.ftruncate(fd, nbytes)
        return fd


@contextlib.contextmanager
def closed_if_raises(fd: int) -> Iterator[int]:
    """For what is opened one after another: of a few descriptors none is left."""
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise


def create_bell() -> int:
    """A descriptor that both sides can ring and wait on: an eventfd, or a FIFO where there is none."""
    if sys.platform == "linux":
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    return create_fifo_bell()


def create_fifo_bell() -> int:
    """A nameless FIFO, open for reading and writing: one descriptor like an eventfd, which a pipe is not."""
    with tempfile.TemporaryDirectory(prefix="zc-bell-") as folder:
        path = os.path.join(folder, "bell")
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Mapping:
    """`nbytes` of shared memory at `fd`, mapped once. Takes over `fd`, also when it raises. A view may outlive
    `close`: the memory stays mapped until the last view is gone, so a stale view reads old bytes and never faults."""

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            available = os.fstat(fd).st_size
            if available < nbytes:
                raise NativeError("memory-size", f"shared memory has {available} bytes, {nbytes} were announced")
            self.memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.writable = memoryview(self.memory)
        self.readonly = self.writable.toreadonly()
        if sys.platform == "linux":
            self.memory.madvise(mmap.MADV_DONTDUMP)
        self._prefault()

    def _prefault(self) -> None:
        try:
            self.memory.madvise(_POPULATE_WRITE)
        except (OSError, ValueError):
            sum(self.readonly[::PAGE])  # older kernels and macOS: a read of each page maps it, content untouched

    def close(self) -> None:
        """Drop this mapping and its descriptor; idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.readonly.release()
        self.writable.release()
        with contextlib.suppress(BufferError):  # a caller still has a view: it unmaps when that goes
            self.memory.close()
