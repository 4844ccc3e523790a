"""Many requests at once, each answer checked: `python -m benches.many_exact`, JSON on stdout, status 1 if one is wrong.

Two hosts on this machine serve SmolLM2: prompts of 1 to 1,500 tokens, all sent at once, prefilled on one host and
decoded on a few sequences of the other. Then, in this process, each prompt is evaluated in a context where nothing
else ever was, with the hosts' engine settings, and its answer is fed in (teacher forcing):

    worst_gap           how far below the highest logit an answer's token was, at most; not_argmax counts those
    states_compared     handoffs whose state bytes the decoder re-exported at commit and digested; each must equal
                        what the prefiller digested (states_unlike_prefiller) and the lone context (states_unlike_lone)

Digests are keyed by this run. A prompt of one token has no state to hand over and is decoded where it was asked.
Owns the hosts and a folder for their keys.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from benches.telling_host import prompt_name
from zerocopy.cli.ending import temporary_folder
from zerocopy.cli.hosts import Answer, Host, Hosts, smollm2
from zerocopy.runtime.base import Lane
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime

LONGEST: Final = 1500
WORDS: Final = range(100, 40_000)  # token ids of SmolLM2's vocabulary that are text
TOLERANCE: Final = 1e-3  # of a logit
RING_MIB: Final = 16


class Load(msgspec.Struct, frozen=True):
    requests: int = 32
    sequences: int = 4
    longest: int = LONGEST
    output: int = 8
    batch_invariant: bool = True
    seed: int = 1

    def prompts(self) -> list[list[int]]:
        """Lengths in equal ratios from 1 to the longest, in random order."""
        draw = random.Random(self.seed)
        step = self.longest ** (1 / max(1, self.requests - 1))
        lengths = [round(step**n) for n in range(self.requests)]
        draw.shuffle(lengths)
        return [draw.choices(WORDS, k=length) for length in lengths]

    def engine(self) -> LlamaOptions:
        """What the hosts' flags say."""
        return LlamaOptions(
            n_ctx=self.longest + self.output, sequences=self.sequences, threads=1, batch_invariant=self.batch_invariant
        )

    def flags(self) -> list[str]:
        flags = ["--model", str(smollm2()), "--n-ctx", str(self.longest + self.output), "--threads", "1",
                 "--sequences", str(self.sequences), "--rings", str(self.sequences), "--ring-mib", str(RING_MIB),
                 "--tenant-requests", str(self.requests), "--queue-s", "600", "--allow-proofs"]  # fmt: skip
        return [*flags, "--batch-invariant"] if self.batch_invariant else flags


def serve(load: Load, folder: Path, key: bytes) -> list[Answer]:
    """Every request at once; the prefiller leaves its digests in `folder`."""
    teller = (sys.executable, "-m", "benches.telling_host", str(folder), key.hex())
    with Hosts(folder / "hosts") as hosts:
        prefiller = hosts.add("prefiller", ["--role", "prefill", *load.flags()], command=teller)
        decoder = hosts.add("decoder", ["--role", "decode", *load.flags()], peers=[prefiller])
        for host in (prefiller, decoder):
            host.start()
        prefiller.wait_ready()
        decoder.wait_ready(connected_to=["prefiller"])
        with ThreadPoolExecutor(load.requests) as pool:
            return list(pool.map(lambda prompt: _ask(decoder, prompt, load.output, key), load.prompts()))


def _ask(host: Host, prompt: list[int], output: int, key: bytes) -> Answer:
    body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "return_tokens": True}
    moved = {"x-zc-placement": "disaggregated", "x-zc-fallback": "deny"} if len(prompt) > 1 else {}
    return host.complete(body, {"x-zc-proof": key.hex(), **moved})


def evaluate_alone(lane: Lane, prompt: Sequence[int], chunk: int) -> None:
    """All but the last token, cut as a host cuts it."""
    history = prompt[:-1]
    for start in range(0, len(history), chunk):
        lane.prefill(history[start : start + chunk], start)


def forced_gaps(lane: Lane, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Of each token of the answer: the highest logit less its own, everything before it given."""
    gaps, last = [], prompt[-1]
    for position, token in enumerate(answer, len(prompt) - 1):
        logits = lane.evaluate(last, position)
        gaps.append(float(logits.max() - logits[token]))
        last = token
    return gaps


def incomplete(answer: Answer, output: int) -> bool:
    """It has no token, or fewer than were asked for although it says that it ended for their number."""
    (choice,) = answer.body["choices"]
    tokens = len(choice["tokens"])
    return not tokens or (choice["finish_reason"] == "length" and tokens < output)


def check(load: Load, answers: Sequence[Answer], folder: Path, key: bytes) -> dict[str, Any]:
    failed = Counter(str(a.body["error"]["code"]) for a in answers if a.status != 200)
    gaps, unlike, compared, cut = list[float](), Counter[str](), 0, 0
    runtime = LlamaRuntime(smollm2(), load.engine())
    for prompt, answer in zip(load.prompts(), answers, strict=True):
        if answer.status != 200:
            continue
        lane = runtime.open_lane()
        evaluate_alone(lane, prompt, runtime.facts.chunk_tokens)
        alone, served = lane.state_digests(key), answer.body["zc_proof"]["state"]
        if answer.headers["x-zc-placement"] == "disaggregated":
            told = json.loads((folder / f"{prompt_name(prompt, key)}.json").read_text())
            compared += 1
            unlike["prefiller"] += served != told
        unlike["lone"] += served != alone
        cut += incomplete(answer, load.output)
        gaps += forced_gaps(lane, prompt, answer.body["choices"][0]["tokens"])
        lane.close()
    runtime.close()
    return {
        "failed": dict(failed),
        "incomplete": cut,
        "tokens": len(gaps),
        "not_argmax": sum(gap > 0 for gap in gaps),
        "worst_gap": max(gaps, default=None),
        "states_compared": compared,
        "states_unlike_prefiller": unlike["prefiller"],
        "states_unlike_lone": unlike["lone"],
    }


def run(load: Load) -> dict[str, Any]:
    """The figures, and `met`: nothing failed or was cut short, every token within the tolerance, every handoff's state
    equal."""
    key = secrets.token_bytes(32)
    with temporary_folder("zc-exact-") as folder:
        began = time.monotonic()
        answers = serve(load, folder, key)
        served_s = time.monotonic() - began
        found = check(load, answers, folder, key)
    met = (
        not found["failed"]
        and not found["incomplete"]
        and found["worst_gap"] is not None
        and found["worst_gap"] <= TOLERANCE
        and found["states_compared"] == sum(len(prompt) > 1 for prompt in load.prompts())
        and not found["states_unlike_prefiller"]
    )
    return {**msgspec.to_builtins(load), **found, "served_s": round(served_s, 1), "met": met}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the longest prompt")
    parser.add_argument("--output", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fast-kernels", action="store_true", help="without --batch-invariant, to see what it is for")
    args = vars(parser.parse_args())
    found = run(Load(batch_invariant=not args.pop("fast_kernels"), **args))
    print(json.dumps(found, indent=2))
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
