"""Serving beside llama.cpp's own server, in one run: `python benches/serve_peers.py`, JSON on stdout.

Three servers with one model, one engine build and as many threads: this program with local prompts, this program with
prompts handed over between two hosts that share this machine's cores, and the server inside the `xllamacpp` wheel, each
with its own defaults otherwise. The same requests at the same concurrency are asked of one after the other, in rounds
that begin with each in turn.
Prompts alone give the prefill rate, answers to short prompts the decode rate, both together first-token times and gaps.
Rates and first-token times are medians of the rounds; the gaps of all rounds are one sample, of which p99 is taken.
Rounds go on until each server has `--gaps` of them: a p99 of fewer than a hundred is their largest, that of 500 has
five above it; and five at least, for rates of single rounds differ by a tenth and more. A round takes 15, 45 and 90 s
at concurrency 1, 4 and 8 on two cores, and 11, 5 and 5 of them are needed.
Owns the servers' processes and a folder for their keys.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from zerocopy.cli.bench_serve import Seen, Target, closed_loop
from zerocopy.cli.ending import temporary_folder
from zerocopy.cli.hosts import Hosts, smollm2
from zerocopy.cli.measuring import median, quantiles
from zerocopy.cli.workload import Arrival

PROMPT: Final = 384
OUTPUT: Final = 48
WORDS: Final = 40_000  # below SmolLM2's vocabulary
N_CTX: Final = 1024
ROUNDS: Final = 5  # at least
DECODES: Final = 4  # a round
PEER_NAME: Final = "llama-server"
RATES: Final = ("prefill_tokens_per_s", "decode_tokens_per_s", "answer_tokens_per_s")

PEER: Final = """
import os, sys, time
import xllamacpp as x
model, threads, slots, chunk = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
p = x.CommonParams()
p.model.path = model
p.n_parallel, p.n_ctx, p.n_batch, p.n_ubatch = slots, slots * 1024, chunk, chunk
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
p.n_gpu_layers, p.cache_ram_mib, p.port, p.hostnames = 0, 0, 0, ["127.0.0.1"]
server = x.Server(p)
print("LISTENING", server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextlib.contextmanager
def peer(threads: int, slots: int, chunk: int) -> Iterator[str]:
    """llama.cpp's server; yields its address."""
    command = [sys.executable, "-c", PEER, str(smollm2()), str(threads), str(slots), str(chunk)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin and process.stdout
    try:
        for line in process.stdout:
            if line.startswith("LISTENING "):
                yield line.split(" ", 1)[1].strip().rstrip("/")
                return
        raise SystemExit("llama.cpp's server did not start")
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            process.kill()  # one that does not hear of it; nothing to one that has ended


def ask_all(target: Target, concurrency: int, prompt: int, output: int) -> tuple[list[Seen], float]:
    """A request of every client, and the seconds that all of them took."""
    load = [Arrival(0.0, prompt, output)] * concurrency
    seen = asyncio.run(closed_loop(target, load, concurrency))
    failed = {one.failure for one in seen if one.failure}
    if failed:
        raise SystemExit(f"{target.url} failed: {', '.join(sorted(failed))}")
    return seen, max(one.ended for one in seen) - min(one.sent for one in seen)


def decode_rate(seen: Sequence[Seen]) -> float:
    """Tokens a second while every one of these answers is being written, so that no prompt is in it."""
    first, last = max(one.pieces[0] for one in seen), min(one.pieces[-1] for one in seen)
    if last <= first:
        raise SystemExit("the answers were not written at the same time: raise the output length")
    return sum(first < at <= last for one in seen for at in one.pieces) / (last - first)


class Round(NamedTuple):
    """What one server did in one round."""

    figures: dict[str, float]
    gaps: list[float]


def ask_each(targets: Mapping[str, Target], concurrency: int) -> dict[str, Round]:
    """A round: each kind of request is asked of one server after the other, so that what is compared lies seconds
    apart. Answers to short prompts are asked for `DECODES` times: once takes a third of a second at concurrency 1."""
    kinds = [(PROMPT, 1), *[(8, OUTPUT)] * DECODES, (PROMPT, OUTPUT)]
    answers = [{name: ask_all(each, concurrency, *kind) for name, each in targets.items()} for kind in kinds]
    return {name: _figures([answer[name] for answer in answers]) for name in targets}


def _figures(answers: Sequence[tuple[list[Seen], float]]) -> Round:
    (prefilled, prefill_s), *decodes, (mixed, _) = answers
    figures = {
        "prefill_tokens_per_s": sum(one.prompt_tokens for one in prefilled) / prefill_s,
        "decode_tokens_per_s": median([decode_rate(seen) for seen, _ in decodes]),
        "answer_tokens_per_s": median([sum(one.output_tokens for one in seen) / took for seen, took in decodes]),
        "ttft_p50_s": median([one.ttft_s for one in mixed]),
    }
    return Round(figures, [b - a for one in mixed for a, b in pairwise(one.pieces)])


def enough(rounds: Sequence[Round], gaps: int) -> bool:
    return len(rounds) >= ROUNDS and sum(len(one.gaps) for one in rounds) >= gaps


def row(server: str, concurrency: int, rounds: Sequence[Round]) -> dict[str, Any]:
    gaps = quantiles([gap for one in rounds for gap in one.gaps], 5)
    assert gaps
    figures = {key: round(median([one.figures[key] for one in rounds]), 4) for key in rounds[0].figures}
    sampled = {"gap_p50_s": gaps.p50, "gap_p99_s": gaps.p99, "gaps": sum(len(one.gaps) for one in rounds)}
    return {"server": server, "concurrency": concurrency, **figures, **sampled, "rounds": len(rounds)}


def spread(ours: Sequence[Round], theirs: Sequence[Round]) -> dict[str, list[float]]:
    """Smallest and largest ratio to llama.cpp's server within one round: what of a difference is noise."""
    within = {key: [a.figures[key] / b.figures[key] for a, b in zip(ours, theirs, strict=True)] for key in RATES}
    return {key: [round(min(each), 3), round(max(each), 3)] for key, each in within.items()}


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of this program to llama.cpp's server at the same concurrency; `spread` is of rounds."""
    theirs = {row["concurrency"]: row for row in rows if row["server"] == PEER_NAME}
    keys = (*RATES, "ttft_p50_s", "gap_p99_s")
    return [
        {
            "server": row["server"],
            "concurrency": row["concurrency"],
            **{key: round(row[key] / theirs[row["concurrency"]][key], 3) for key in keys},
            "spread": row["spread"],
        }
        for row in rows
        if row["server"] != PEER_NAME
    ]


def servers(stack: contextlib.ExitStack, threads: int, slots: int, chunk: int) -> dict[str, Target]:
    hosts = stack.enter_context(Hosts(stack.enter_context(temporary_folder("zc-peers-"))))
    flags = ["--model", str(smollm2()), "--n-ctx", str(N_CTX), "--threads", str(threads), "--chunk-tokens", str(chunk),
             "--sequences", str(slots), "--kv-tokens", str(slots * N_CTX), "--rings", str(max(2, slots))]  # fmt: skip
    prefiller = hosts.add("prefiller", ["--role", "prefill", *flags])
    decoder = hosts.add("decoder", ["--role", "decode", *flags], peers=[prefiller])
    alone = hosts.add("alone", ["--role", "decode", "--cores", "own", *flags])
    for host in (prefiller, decoder, alone):
        host.start()
    for host in (prefiller, alone):
        host.wait_ready()
    decoder.wait_ready(connected_to=["prefiller"])
    moved = {"x-zc-placement": "disaggregated", "x-zc-fallback": "deny"}
    return {
        "zc-handoff-local": Target(alone.url, headers={"x-zc-placement": "local"}, words=WORDS),
        "zc-handoff-disaggregated": Target(decoder.url, headers=moved, words=WORDS),
        PEER_NAME: Target(stack.enter_context(peer(threads, slots, chunk)), words=WORDS),
    }


def run(concurrencies: Sequence[int], gaps: int, threads: int, chunk: int) -> dict[str, Any]:
    rows = []
    with contextlib.ExitStack() as stack:
        targets = servers(stack, threads, max(concurrencies), chunk)
        for target in targets.values():
            ask_all(target, 1, 16, 2)  # warm
        for concurrency in concurrencies:
            seen: dict[str, list[Round]] = {name: [] for name in targets}
            order = deque(targets)
            while not all(enough(many, gaps) for many in seen.values()):
                for name, one in ask_each({name: targets[name] for name in order}, concurrency).items():
                    seen[name].append(one)
                    print(f"{name} {one.figures}", file=sys.stderr)
                order.rotate(-1)  # a machine that becomes slower meanwhile is not always the same server's loss
            for name, many in seen.items():
                rows.append(row(name, concurrency, many) | {"spread": spread(many, seen[PEER_NAME])})
                print(rows[-1], file=sys.stderr)
    machine = {"threads": threads, "chunk_tokens": chunk, "load": os.getloadavg()[0]}
    return {"rows": rows, "ratios": ratios(rows), **machine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,4,8", help="comma separated")
    parser.add_argument("--gaps", type=int, default=500, help="between tokens, of each server, at least (default: 500)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk-tokens", type=int, default=256, help="of an engine call, for all servers")
    args = parser.parse_args()
    concurrencies = [int(part) for part in args.concurrency.split(",")]
    print(json.dumps(run(concurrencies, args.gaps, args.threads, args.chunk_tokens), indent=2))


if __name__ == "__main__":
    main()
