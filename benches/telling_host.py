"""A prefilling host whose worker tells what it exported: `python -m benches.telling_host FOLDER KEY daemon FLAG...`.

Before a prompt's state is declared complete, its digests under KEY (hex) go into FOLDER, one JSON file a handoff,
named by the keyed digest of the prompt's tokens. Everything else is the product's own daemon and worker. Only for a
check that compares states: digests under a key known to others link requests.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

import zerocopy.daemon.main as daemon
import zerocopy.worker.loop as loop
from zerocopy.cli.main import run
from zerocopy.worker.main import main as work
from zerocopy.worker.prefill_job import PrefillJob


def prompt_name(tokens: Sequence[int], key: bytes) -> str:
    return hashlib.blake2b(np.asarray(tokens, "<u4").tobytes(), key=key, digest_size=16).hexdigest()


class TellingJob(PrefillJob):
    folder: ClassVar[Path]
    key: ClassVar[bytes]

    def _finish(self) -> None:
        told = self.folder / prompt_name(self._message.tokens, self.key)
        told.with_suffix(".new").write_text(json.dumps(self.lane.state_digests(self.key)))
        told.with_suffix(".new").rename(told.with_suffix(".json"))
        super()._finish()


def main() -> int:
    """As host: replace the worker's command. As that worker: replace the job."""
    folder, key, role, *rest = sys.argv[1:]
    if role == "worker":
        TellingJob.folder, TellingJob.key = Path(folder), bytes.fromhex(key)
        loop.PrefillJob = TellingJob  # type: ignore[misc]
        return work([sys.argv[0], *rest])
    sys.argv[1:] = [role, *rest]
    command = (sys.executable, "-m", "benches.telling_host", folder, key, "worker")
    daemon.run = partial(daemon.run, worker_command=command)
    return run()


if __name__ == "__main__":
    sys.exit(main())
