"""Clients that disconnect at random points (issue 5, acceptance 7): python -m benches.leaving, JSON on stdout.

Requests of all lengths, streaming and not, local and handed over, at either host's front door, arrive a few at a time,
more of them than there are lanes. Each client leaves after a random time, so some while they queue, some while their
prompt is read or transferred, some between tokens; the decoder counts which. Then both hosts must hold nothing within
a second of the last, and one request must be answered to the bit as it was before: tokens, logits and state, under one
key.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import secrets
import sys
import urllib.request
from collections import Counter
from typing import Any, Final

import msgspec

from benches.two_hosts import MOVED, Two, two_hosts
from zerocopy.cli.hosts import Host
from zerocopy.cli.workload import Arrival, prompt_of

WORDS: Final = 40_000
LENGTHS: Final = (4, 60, 200, 450)
AT_ONCE: Final = 8  # clients; twice the lanes
FREE_S: Final = 1.0
MOST: Final = 20  # clients for one that leaves early; there are two at most where requests are served


class Client:
    """One request on a socket of its own, and what it had seen when it left."""

    def __init__(self, two: Two, number: int, rng: random.Random) -> None:
        self._port = rng.choice((two.decoder, two.decoder, two.prefiller)).http_port
        self.streams = rng.random() < 0.5
        self._mode = rng.choice(("disaggregated", "disaggregated", "local"))
        arrival = Arrival(0.0, rng.choice(LENGTHS), 0)
        self._body = {"prompt": prompt_of(arrival, number, WORDS), "max_tokens": 100, "stream": self.streams}
        self._stays_s = rng.choice((0.05, 0.5, 2.0, 6.0)) * rng.random()

    async def run(self) -> str:
        """Leaves after its time; returns where the request was."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        data = msgspec.json.encode(self._body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-zc-placement: {self._mode}\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stays_s):
                answer = await reader.readuntil(b"\r\n\r\n")
                if self.streams and b" 200 " in answer.splitlines()[0]:
                    await reader.readuntil(b"[DONE]")
                writer.close()
                return "answered"
        writer.transport.abort()
        return "left"


async def clients(two: Two, count: int, rng: random.Random) -> Counter[str]:
    """So many at once until `count` have left early; then all of the last ones leave or are answered."""
    seen, numbers = Counter[str](), itertools.count(1)

    async def one_after_another() -> None:
        while seen["left"] < count:
            if seen.total() > MOST * count:
                raise SystemExit(f"hardly anybody leaves early ({dict(seen)}): are requests refused at once?")
            seen[await Client(two, next(numbers), rng).run()] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_after_another())
    return seen


def exact(two: Two, key: str) -> dict[str, Any]:
    """One answer on idle hosts with digests of everything it was made from."""
    body = {"prompt": prompt_of(Arrival(0.0, 200, 8), 0, WORDS), "max_tokens": 16}
    answer = two.decoder.complete(body, MOVED | {"x-zc-proof": key})
    if answer.status != 200:
        raise SystemExit(f"a request on idle hosts failed: {answer.body}")
    return {"text": answer.body["choices"][0]["text"], "proof": answer.body["zc_proof"]}


def stages(host: Host) -> dict[str, float]:
    """How far the requests were that were given up, by the decoder's own count."""
    with urllib.request.urlopen(f"{host.url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()

    def count(metric: str, **labels: str) -> float:
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        found = (line for line in lines if line.startswith(metric) and all(part in line for part in wanted))
        return sum(float(line.rpartition(" ")[2]) for line in found)

    handed_over = count("zc_handoffs_total", role="decoder", reason="cancelled")
    before = count("zc_requests_total", outcome="cancelled", placement="none")
    return {
        "in_prefill_or_transfer": handed_over,
        "queued_or_in_local_prefill": before - handed_over,
        "in_decode": count("zc_requests_total", outcome="cancelled") - before,
    }


def run(count: int, seed: int) -> dict[str, Any]:
    flags = ["--n-ctx", "1024", "--threads", "1", "--chunk-tokens", "64", "--allow-proofs", "--log-level", "warning"]
    with two_hosts(flags) as two:
        key = secrets.token_hex(32)
        before = exact(two, key)
        seen = asyncio.run(clients(two, count, random.Random(seed)))
        free_s = two.free_after_s(30)
        return {
            "clients": dict(seen),
            "left_while": stages(two.decoder),
            "free_after_s": free_s and round(free_s, 3),
            "held_afterwards": two.held(),
            "next_is_exact": exact(two, key) == before,
            "faults": two.faults(),
            "load": os.getloadavg()[0],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, help="that leave before their answer is complete")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report = run(args.clients, args.seed)
    free_s = report["free_after_s"]
    holds = {
        "free_within_a_second": free_s is not None and free_s <= FREE_S,
        "next_is_exact": report["next_is_exact"],
        "no_fault": not report["faults"],
        "every_stage_was_left": all(report["left_while"].values()),
    }
    print(json.dumps({**report, "holds": holds}, indent=2))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
