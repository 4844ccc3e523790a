"""Two hosts that trust each other, and what the tests ask of them.

Real daemons with real engines on tiny models; everything goes over their HTTP front doors. Owns no processes: those
belong to `Hosts`.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zerocopy.cli.hosts import Answer, Host, Hosts
from zerocopy.runtime import models

CHUNK: Final = 64
PAGE: Final = 32
N_CTX: Final = 1024
# Small rings, so that credit and wrap-around take part in every longer prompt.
ENGINE: Final = (
    "--n-ctx", str(N_CTX), "--chunk-tokens", str(CHUNK), "--page-tokens", str(PAGE), "--threads", "1",
    "--rings", "2", "--ring-mib", "1", "--allow-proofs", "--log-level", "info",
)  # fmt: skip
OUTPUT: Final = 8


@dataclass
class Pair:
    """`decoder` dials `prefiller`. `plan` is the file a planted worker reads before each prompt, if there is one."""

    prefiller: Host
    decoder: Host
    plan: Path
    transport: str

    def start(self) -> None:
        self.prefiller.start()
        self.decoder.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        self.prefiller.wait_ready()
        self.decoder.wait_ready(connected_to=[self.prefiller.name])

    def scheme(self, **plan: object) -> None:
        """What the planted worker does from the next prompt on; how fast, from the next chunk on."""
        fresh = self.plan.with_suffix(".new")
        fresh.write_text(json.dumps(plan))
        fresh.replace(self.plan)


def make_pair(
    hosts: Hosts,
    model: Path,
    folder: Path,
    *,
    prefill_role: str = "prefill",
    decode_role: str = "decode",
    prefill_flags: Iterable[str] = (),
    decode_flags: Iterable[str] = (),
    planted: Sequence[str] = (),
    transport: str = "tcp",
    engine: Iterable[str] = ENGINE,
) -> Pair:
    """Not started yet. `planted` are the words of `tests.e2e.host` that make the prefiller a test build."""
    plan = folder / "plan.json"
    plan.write_text("{}")
    common = ["--model", str(model), *engine]
    command = (sys.executable, "-m", "tests.e2e.host", str(plan), *planted) if planted else None
    prefiller = hosts.add("prefiller", ["--role", prefill_role, *common, *prefill_flags], command=command)
    flags = ["--role", decode_role, *common, *decode_flags]
    decoder = hosts.add("decoder", flags, peers=[prefiller], transport=transport)
    return Pair(prefiller, decoder, plan, transport)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of token ids for the tiny models, which have no words; different for every seed, at every position."""
    return [(7 * i + i // 11 + 31 * seed + seed * i) % models.N_VOCAB for i in range(length)]


def new_key() -> str:
    return secrets.token_hex(32)


def ask(
    host: Host,
    prompt: str | list[int],
    mode: str,
    *,
    fallback: str = "deny",
    key: str | None = None,
    tokens: int = OUTPUT,
    **more: object,
) -> Answer:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    return host.complete(body, headers(mode, fallback, key))


def headers(mode: str, fallback: str = "deny", key: str | None = None) -> dict[str, str]:
    wanted = {"x-zc-placement": mode, "x-zc-fallback": fallback}
    return wanted if key is None else wanted | {"x-zc-proof": key}


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return str(answer.body["choices"][0]["text"])


def proof_of(answer: Answer) -> dict[str, Any]:
    """The digests, after a look that there are as many as there should be: an empty proof proves nothing."""
    assert answer.status == 200, answer.body
    proof: dict[str, Any] = answer.body["zc_proof"]
    assert len(proof["logits"]) == answer.body["usage"]["completion_tokens"] > 0
    assert all(proof["logits"]) and proof["tokens"] and proof["state"] and proof["final_state"]
    return proof


def error_of(answer: Answer) -> tuple[str, str]:
    """(code, message) of a typed error."""
    assert answer.status >= 400, answer.body
    return answer.body["error"]["code"], answer.body["error"]["message"]


def assert_disaggregated(answer: Answer) -> None:
    assert answer.status == 200, answer.body
    assert answer.headers["x-zc-placement"] == "disaggregated"
    assert "x-zc-fallback" not in answer.headers


def assert_still_exact(pair: Pair, length: int = 100) -> None:
    """The pair serves a disaggregated request, equal to a local one; nothing is held afterwards."""
    key = new_key()
    local, moved = (ask(pair.decoder, prompt_of(length), mode, key=key) for mode in ("local", "disaggregated"))
    assert_disaggregated(moved)
    assert moved.body["timings"]["handoff"]["transport"] == pair.transport
    assert proof_of(local) == proof_of(moved)
    assert_nothing_held(pair.prefiller, pair.decoder)


def metric(host: Host, name: str, labels: Mapping[str, str] | None = None) -> float:
    """Sum over the series of one metric that carry these labels."""
    with urllib.request.urlopen(f"{host.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    wanted = {f'{key}="{value}"' for key, value in (labels or {}).items()}
    return sum(float(value) for series, value in found if wanted <= set(series.split(",")))


def assert_nothing_held(*hosts: Host, within_s: float = 20.0) -> None:
    """No host holds memory for a handoff, or runs one (field report: leak on cancel)."""
    for host in hosts:
        wait_until(lambda host=host: _idle(host), f"{host.name} to hold nothing", within_s)  # type: ignore[misc]


def _idle(host: Host) -> bool:
    status = host.status()
    held = status["reserved_bytes"], status["handoffs_in"], status["handoffs_out"]
    return held == (0, 0, 0) and metric(host, "zc_reserved_bytes") == 0 == metric(host, "zc_requests_active")


def wait_until(happened: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
        time.sleep(0.02)


def send_only(host: Host, body: Mapping[str, object], wanted: Mapping[str, str]) -> socket.socket:
    """A request whose answer nobody reads yet: close the socket and the client is gone."""
    data = json.dumps(body).encode()
    lines = [f"{name}: {value}" for name, value in wanted.items()]
    head = ["POST /v1/completions HTTP/1.1", f"host: {host.name}", f"content-length: {len(data)}", *lines, "", ""]
    sock = socket.create_connection(("127.0.0.1", host.http_port), timeout=30)
    sock.sendall("\r\n".join(head).encode() + data)
    return sock
