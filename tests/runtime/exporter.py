"""The other process of `test_exactness`: prefill, write the state to a file, then report how it goes on locally."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from tests.runtime.conftest import TINY
from tests.runtime.handover import KEY, export_state, greedy, prefill, prompt
from zerocopy.runtime.llama.engine import LlamaRuntime

LENGTH = 230
STEPS = 13


def main(model: str, out: str) -> None:
    runtime = LlamaRuntime(model, TINY)
    lane = runtime.open_lane()
    tokens = prompt(runtime.facts, LENGTH)
    prefill(lane, runtime.facts, tokens[:-1])
    state = export_state(lane, runtime.facts, LENGTH - 1)
    with Path(out).open("wb") as file:
        for part in (*(page for _, _, page in state.pages), state.snapshot, state.hidden):
            if part is not None:
                file.write(part)
    digests = lane.state_digests(KEY)
    _, rows = greedy(lane, tokens[-1], LENGTH - 1, STEPS)
    report = {
        "length": LENGTH,
        "identity": msgspec.to_builtins(runtime.facts.identity),
        "state": digests,
        "logits": [[row.tobytes().hex() for row in step] for step in rows],
    }
    print(json.dumps(report))
    runtime.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
