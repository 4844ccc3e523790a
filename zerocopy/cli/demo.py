"""`zc-handoff demo`: two hosts on this machine, one prefills and one decodes, compared bit by bit with a local run.

Part one continues a real text with a real model; part two moves every kind of state there is. Each part sends three
requests over HTTP: local, local again (the control) and disaggregated. The daemons answer with digests of logits and
state under a key that only this run knows; equal digests mean equal bytes. Owns nothing but the comparison and the
picture.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from transport.quic_choice import INSTALL, built
from zerocopy.cli.ending import temporary_folder
from zerocopy.cli.hosts import Answer, Host, Hosts, smollm2
from zerocopy.cli.screen import CliError, ExitCode, bytes_text, note, pairs, show, show_json, table
from zerocopy.cli.timeline import timeline

# Public domain: Lewis Carroll, Alice's Adventures in Wonderland (1865), its opening.
TEXT: Final = (Path(__file__).parent / "demo_text.txt").read_text(encoding="utf-8").strip()
# A prompt of token ids for the tiny model, which has no words: any fixed sequence does.
TINY_TOKENS: Final = 640
TINY_FAMILY: Final = "nemotron_h_moe+mtp"
OUTPUT_TOKENS: Final = 32
# Several chunks, so that there is something to overlap with; equal on both hosts, for bit-equality.
ENGINE_FLAGS: Final = ("--n-ctx", "2048", "--chunk-tokens", "128", "--page-tokens", "64", "--threads", "1")


class Part(msgspec.Struct, frozen=True):
    """One part's result; field names are the JSON's."""

    model: str
    family: str
    transport: str
    prompt_tokens: int
    output_tokens: int
    components: list[dict[str, Any]]
    logits_exact: bool
    tokens_exact: bool
    state_bytes_exact: bool
    control_exact: bool
    kv_bytes: int
    kv_bytes_sent_before_prefill_end: int
    overlap_fraction: float
    tail_ms: float
    ttft_ms: float
    ttft_local_ms: float
    prompt_tokens_evaluated_by_decoder: int
    probe: str
    phases_ms: dict[str, float | None]
    timeline: dict[str, list[list[float]]]  # seconds from the start of prefill: [began, ended]
    text: str | None

    @property
    def exact(self) -> bool:
        return self.logits_exact and self.tokens_exact and self.state_bytes_exact and self.control_exact


def demo(
    transport: Annotated[Literal["tcp", "quic"], typer.Option(help="How the state travels.")] = "tcp",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Run two hosts here: one reads the prompt, the other continues it. Shows what moved, when, and that it is exact.

    Exits with 1 unless logits, tokens and state are equal to those of a local run, bit for bit.
    """
    if transport == "quic" and not built():
        raise CliError(f"this host was built without QUIC: {INSTALL}")
    began = time.monotonic()
    with temporary_folder("zc-demo-") as folder:
        parts = [_real_text(folder, transport), _every_component(folder, transport)]
    exact = all(part.exact for part in parts)
    if json:
        show_json({"parts": parts, "exact": exact, "seconds": round(time.monotonic() - began, 2)})
    else:
        for number, part in enumerate(parts, 1):
            show(_picture(number, part))
        show(
            Text("Exact to the bit." if exact else "NOT EXACT: see above.", style="bold green" if exact else "bold red")
        )
    if not exact:
        raise typer.Exit(ExitCode.FAILED)


def _real_text(folder: Path, transport: str) -> Part:
    note("Part one: SmolLM2-135M, a real text")
    return _run_part(folder / "one", smollm2(), TEXT, transport)


def _every_component(folder: Path, transport: str) -> Part:
    from zerocopy.runtime import models

    note(f"Part two: a tiny {TINY_FAMILY} with random weights, every kind of state")
    folder.joinpath("two").mkdir()
    model = models.make(TINY_FAMILY, folder / "two" / "tiny.gguf", scale=4)
    prompt = [(7 * i + i // 11) % models.N_VOCAB for i in range(TINY_TOKENS)]
    return _run_part(folder / "two", model, prompt, transport)


def _run_part(folder: Path, model: Path, prompt: str | list[int], transport: str) -> Part:
    flags = ["--model", str(model), *ENGINE_FLAGS, "--allow-proofs", "--log-level", "warning"]
    with Hosts(folder) as hosts:
        prefiller = hosts.add("prefiller", ["--role", "prefill", *flags])
        decoder = hosts.add("decoder", ["--role", "decode", *flags], peers=[prefiller], transport=transport)
        for host in (prefiller, decoder):
            host.start()
        prefiller.wait_ready()
        decoder.wait_ready(connected_to=["prefiller"])
        key = secrets.token_hex(32)
        _warm_up(decoder)
        local, control, moved = (_ask(decoder, prompt, mode, key) for mode in ("local", "local", "disaggregated"))
        handoff = moved.body["timings"]["handoff"]["id"]
        family = decoder.status()["engine"]["schema"].split("/")[0]
        part = _compare(local, control, moved, family, prefiller.trace(handoff), decoder.trace(handoff))
        if part.transport != transport:
            raise CliError(f"the state went over {part.transport}, not {transport}")
        return part


def _warm_up(decoder: Host) -> None:
    """The first requests touch memory for the first time on both hosts; that is not what the figures are about."""
    for mode in ("local", "disaggregated"):
        _ask(decoder, list(range(1, 65)), mode, secrets.token_hex(32), tokens=2)


def _ask(host: Host, prompt: str | list[int], mode: str, key: str, tokens: int = OUTPUT_TOKENS) -> Answer:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = host.complete(body, {"x-zc-placement": mode, "x-zc-fallback": "deny", "x-zc-proof": key})
    if answer.status != 200:
        raise CliError(f"the {mode} request failed with {answer.status}: {answer.body.get('error')}")
    return answer


# -- comparison ------------------------------------------------------------------------------------------------


def _compare(
    local: Answer, control: Answer, moved: Answer, family: str, there: dict[str, Any], here: dict[str, Any]
) -> Part:
    """`there` and `here` are the prefiller's and the decoder's trace of the handoff."""
    timings, handoff = moved.body["timings"], moved.body["timings"]["handoff"]
    a, b = local.body["zc_proof"], moved.body["zc_proof"]
    steps = moved.body["usage"]["completion_tokens"]
    phases = ("queue", "prefill", "export", "wire", "import", "commit", "probe", "probe_wait")
    return Part(
        model=moved.body["model"],
        family=family,
        transport=handoff["transport"],
        prompt_tokens=moved.body["usage"]["prompt_tokens"],
        output_tokens=steps,
        components=handoff["components"],
        # As many digests as tokens: an empty proof proves nothing.
        logits_exact=a["logits"] == b["logits"] and len(b["logits"]) == steps and a["mtp_logits"] == b["mtp_logits"],
        tokens_exact=a["tokens"] == b["tokens"] and _text(local) == _text(moved),
        state_bytes_exact=bool(b["state"]) and a["state"] == b["state"] and a["final_state"] == b["final_state"],
        control_exact=a == control.body["zc_proof"],
        kv_bytes=handoff["kv_bytes"],
        kv_bytes_sent_before_prefill_end=handoff["kv_bytes_sent_before_prefill_end"],
        overlap_fraction=handoff["overlap_fraction"],
        tail_ms=handoff["tail_ms"],
        ttft_ms=timings["ttft_ms"],
        ttft_local_ms=local.body["timings"]["ttft_ms"],
        prompt_tokens_evaluated_by_decoder=timings["prompt_tokens_evaluated_here"],
        probe=handoff["probe"],
        phases_ms={name: handoff[f"{name}_ms"] for name in phases},
        timeline=_spans(there, here),
        text=_text(moved),
    )


def _text(answer: Answer) -> str:
    return str(answer.body["choices"][0]["text"])


def _spans(there: dict[str, Any], here: dict[str, Any]) -> dict[str, list[list[float]]]:
    """What both hosts saw of one handoff. They share this machine's clock, so their times can be laid side by side."""
    zero = there["marks"]["started"]
    rows = {
        "prefill": there["chunks"],
        "export": there["exports"],
        "wire": here["wire"],
        "import": here["imports"],
        "probe": [(there["marks"]["probe_started"], there["marks"]["probe_ended"])],
        "commit": [(here["marks"]["state_complete"], here["marks"]["committed"])],
    }
    return {name: [[round(at - zero, 6) for at in span[:2]] for span in spans] for name, spans in rows.items()}


# -- picture ---------------------------------------------------------------------------------------------------


def _picture(number: int, part: Part) -> Group:
    sizes = table("component", "bytes", "pages", right=frozenset({1, 2}))
    for item in part.components:
        sizes.add_row(item["name"], bytes_text(item["bytes"]), str(item["pages"]))
    verdicts = {"logits": part.logits_exact, "tokens": part.tokens_exact, "state bytes": part.state_bytes_exact}
    facts = pairs(
        {
            "prompt": f"{part.prompt_tokens} tokens; the decoder evaluated {part.prompt_tokens_evaluated_by_decoder}",
            "overlap": f"{part.overlap_fraction:.0%} of {bytes_text(part.kv_bytes)} KV sent before prefill ended",
            "tail": f"{part.tail_ms:.1f} ms from the end of prefill to the commit",
            "first token": f"{part.ttft_ms:.0f} ms; prefilled and continued on one host: {part.ttft_local_ms:.0f} ms",
            "probe": part.probe,
            **{name: _verdict(good) for name, good in verdicts.items()},
            "control": _verdict(part.control_exact, "local run equals local run"),
        }
    )
    title = Text(f"\nPart {number}: {part.model} ({part.family}) over {part.transport}", style="bold")
    body: list[RenderableType] = [title, timeline(part.timeline), Text(""), sizes, Text(""), facts]
    if part.text and number == 1:
        body += [Text(""), Text(f"...{TEXT[-80:]}", style="dim"), Text(part.text.strip())]
    return Group(*body, Text(""))


def _verdict(good: bool, said: str = "equal to the local run, bit for bit") -> Text:
    return Text(said, style="green") if good else Text("DIFFERENT", style="bold red")
