"""A test build of a host: `python -m tests.e2e.host PLAN [WORD...] daemon FLAG...`.

The daemon is the real one with the real flags; its worker is `tests.e2e.planted_worker`, which reads the JSON file
PLAN before every prompt. Words make the daemon's own end of a handoff worse:

    credulous   it sends whatever the exporter gave it, and its manifest says so
    odd         RESERVE carries another identity or schema than HELLO did, as PLAN says
    unmatched   it does not compare identities before it offers
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import zerocopy.daemon.main as daemon
import zerocopy.daemon.outgoing as outgoing
import zerocopy.handoff.source as source
from tests.e2e.seams import replace
from zerocopy.cli.main import run
from zerocopy.handoff.components import Identity, PageHeader, StateSchema
from zerocopy.handoff.coverage import Coverage, Range
from zerocopy.handoff.ledger import Ledger, _Tally
from zerocopy.handoff.messages import Prefill
from zerocopy.handoff.source import SourceHandoff


class _Nowhere(Coverage):
    def add(self, layers: Range, tokens: Range) -> None:
        """Whatever it is, and wherever."""


class Credulous(Ledger):
    """Counts what it is given, so that the manifest agrees with it, and objects to nothing."""

    def claim(self, header: PageHeader) -> None:
        self._parts[header.component].tallies.setdefault(header.source, _Tally())
        self._next[header.source] += 1
        self.pages += 1

    def land(self, header: PageHeader) -> None:
        part = self._parts[header.component]
        part.landed = _Nowhere(part.spec.layers, 1)
        super().land(header)

    def check_complete(self) -> None:
        pass


class OddSource(SourceHandoff):
    """Offers another identity or schema than the engine's, as the plan says."""

    def __init__(self, plan: Path, prefill: Prefill, identity: Identity, schema: StateSchema, **more: Any) -> None:
        wanted = json.loads(plan.read_text())
        identity = msgspec.structs.replace(identity, **wanted.get("identity", {}))
        super().__init__(prefill, identity, _odd(schema, wanted), **more)
        if not wanted.get("announces_all", True):
            self.required = self.required[1:]


def _odd(schema: StateSchema, wanted: dict[str, Any]) -> StateSchema:
    schema = msgspec.structs.replace(schema, **wanted.get("schema", {}))
    if label := wanted.get("wider"):
        components = tuple(
            msgspec.structs.replace(spec, layer_bytes=tuple(2 * n for n in spec.layer_bytes))
            if spec.component.label == label
            else spec
            for spec in schema.components
        )
        schema = msgspec.structs.replace(schema, components=components)
    if label := wanted.get("without"):
        components = tuple(spec for spec in schema.components if spec.component.label != label)
        schema = msgspec.structs.replace(schema, components=components)
    return schema


def _no_mismatch(decoder: Identity, prefiller: Identity) -> None:
    return None


def main() -> int:
    plan = Path(sys.argv[1])
    at = sys.argv.index("daemon")
    words, sys.argv[1:] = set(sys.argv[2:at]), sys.argv[at:]
    if "credulous" in words:
        replace(source, "Ledger", Credulous)
    if "odd" in words:
        replace(outgoing, "SourceHandoff", partial(OddSource, plan))
    if "unmatched" in words:
        replace(source, "identity_mismatch", _no_mismatch)
    worker = (sys.executable, "-m", "tests.e2e.planted_worker", str(plan))
    replace(daemon, "run", partial(daemon.run, worker_command=worker))
    return run()


if __name__ == "__main__":
    sys.exit(main())
