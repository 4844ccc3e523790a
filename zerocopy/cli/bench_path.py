"""`zc-handoff bench path`: worker to worker, through both rings, with checksums, credit and commit, on this machine.

Two daemons with the synthetic runtime, which has the exact state of Nemotron 3 Super. First as fast as it goes, until
so many GiB of state have passed: throughput beside that of the bare link in the same run, and how much memory each
process needed beyond its rings. Then one prompt at a set compute speed: how much of the KV was on the other side when
prefill ended, and the tail beside what a model of it says. What a figure means is in docs/benchmarks.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from transport.tcp import DEFAULT_RECORD_BYTES, stream_count
from zerocopy.cli import bench_link
from zerocopy.cli.hosts import Host, Hosts
from zerocopy.cli.measuring import GIB, gbps, median
from zerocopy.cli.screen import CliError
from zerocopy.daemon.trace import KEPT, KEPT_SPANS
from zerocopy.handoff.components import Component, StateSchema
from zerocopy.runtime.synthetic import GEOMETRIES, SUFFIX, Descriptor, GeometryName, state_schema, write_descriptor

MIB: Final = 1 << 20
WARM_UP_TOKENS: Final = 64
# A prompt of any ids does; the same ones every time.
_IDS: Final = random.Random(1)
KV: Final = (Component.ATTENTION_KV.label, Component.MTP_KV.label)


class PathPlan(msgspec.Struct, frozen=True):
    """What to pass, and how the hosts are set up."""

    gib: float = 8.0
    prompt_tokens: int = 131_072  # of each handoff of the throughput pass
    overlap_tokens: int = 32_768
    prefill_tokens_per_s: float = 8192.0  # of the overlap pass
    geometry: GeometryName = "nemotron-3-super"
    chunk_tokens: int = 1024
    page_tokens: int = 0  # chosen
    ring_mib: int = 64
    link_seconds: float = 1.5

    @property
    def schema(self) -> StateSchema:
        return state_schema(self.geometry, GEOMETRIES[self.geometry])

    @property
    def handoffs(self) -> int:
        """As many as it takes, at least one."""
        one = sum(
            spec.page_bytes((0, spec.layers), (0, self.prompt_tokens if spec.per_token else 1))
            for spec in self.schema.components
        )
        return max(1, math.ceil(self.gib * GIB / one))

    @property
    def steps(self) -> int:
        return self.handoffs + 4


class ProcessCost(msgspec.Struct, frozen=True):
    idle_mib: float  # resident after a first handoff; rings and slabs are mapped whole by then
    rings_mib: float  # of that, rings and slabs
    peak_mib: float
    cpu_s_per_gib: float

    @property
    def over_mib(self) -> float:
        return round(self.peak_mib - self.idle_mib, 2)


class PathReport(msgspec.Struct, frozen=True):
    gbps: float
    ratio_to_link: float
    memory_over_rings_mib: dict[str, float]  # peak over idle: what the transfer itself needed
    kv_overlap_fraction: float
    tail_s: float
    tail_model_s: float
    gib: float
    handoffs: int
    link_gbps: float
    cpu_s_per_gib: float  # all four processes
    link_cpu_s_per_gib: float
    processes: dict[str, ProcessCost]
    tail: dict[str, float]  # the model's terms


class _Pass(msgspec.Struct, frozen=True):
    """The throughput pass."""

    nbytes: int
    seconds: float
    processes: dict[str, ProcessCost]
    links: list[bench_link.Row]

    @property
    def gbps(self) -> float:
        return gbps(self.nbytes, self.seconds)


def measure(plan: PathPlan, folder: Path, step: Callable[[str], None]) -> PathReport:
    """Runs everything; `step` is told what begins, `PathPlan.steps` times."""
    if plan.handoffs > KEPT:
        raise CliError(f"{plan.handoffs} handoffs are more than a host remembers, {KEPT}: raise --prompt-tokens")
    if plan.page_tokens and 2 * plan.handoffs * plan.prompt_tokens // plan.page_tokens > KEPT_SPANS:
        raise CliError(_forgotten(plan.handoffs))  # a page is a span of the wire and one of the import
    passed = _pass(plan, folder, step)
    link = [median([getattr(row, field) for row in passed.links]) for field in ("gbps", "cpu_s_per_gib")]
    return PathReport(
        gbps=round(passed.gbps, 3),
        ratio_to_link=round(passed.gbps / link[0], 3),
        memory_over_rings_mib={name: cost.over_mib for name, cost in passed.processes.items()},
        gib=round(passed.nbytes / GIB, 3),
        handoffs=plan.handoffs,
        link_gbps=link[0],
        cpu_s_per_gib=round(sum(cost.cpu_s_per_gib for cost in passed.processes.values()), 4),
        link_cpu_s_per_gib=link[1],
        processes=passed.processes,
        **_overlap(plan, folder, passed.gbps, step),
    )


def _pass(plan: PathPlan, folder: Path, step: Callable[[str], None]) -> _Pass:
    """The bare link before, halfway and after: it is compared with a path that ran between."""
    links = [_link(plan, folder / "link-0", step)]
    with Hosts(folder / "fast") as hosts:
        source, sink = _pair(hosts, folder / f"fast{SUFFIX}", Descriptor(plan.geometry), plan, plan.prompt_tokens)
        _hand_off(sink, WARM_UP_TOKENS)
        processes = _processes(source, sink)
        idle = {name: _memory(process) for name, process in processes.items()}
        cpu = _cpu(processes)
        _forget_peaks(processes.values())
        for number in range(plan.handoffs):
            step(f"handoff {number + 1} of {plan.handoffs}")
            _hand_off(sink, plan.prompt_tokens)
            if number + 1 == -(-plan.handoffs // 2):
                links.append(_link(plan, folder / "link-1", step))
        used = {name: after - cpu[name] for name, after in _cpu(processes).items()}
        peaks = {name: _peak(process) for name, process in processes.items()}  # before status: its JSON takes memory
        nbytes, seconds = _passed(sink.status()["recent_handoffs"][-plan.handoffs :])
        costs = {
            name: ProcessCost(
                idle_mib=round(idle[name] / MIB, 2),
                rings_mib=round(_rings(process) / MIB, 2),
                peak_mib=round(peaks[name] / MIB, 2),
                cpu_s_per_gib=round(used[name] / (nbytes / GIB), 4),
            )
            for name, process in processes.items()
        }
    links.append(_link(plan, folder / "link-2", step))
    return _Pass(nbytes, seconds, costs, links)


def _link(plan: PathPlan, folder: Path, step: Callable[[str], None]) -> bench_link.Row:
    """The link's default setting, alone."""
    step("link")
    ours = bench_link.Plan(
        streams=(stream_count().count,), record_bytes=(DEFAULT_RECORD_BYTES,),
        page_bytes=(bench_link.DEFAULT_PAGE_BYTES,), codecs=("none",),
        seconds=plan.link_seconds, rounds=1, ceilings=False,
    )  # fmt: skip
    with bench_link.other_end_here(folder) as target:
        return bench_link.sweep(ours, target, lambda _: None).rows[0]


def _pair(hosts: Hosts, model: Path, descriptor: Descriptor, plan: PathPlan, tokens: int) -> tuple[Host, Host]:
    """A prefiller and a decoder that are up and joined."""
    write_descriptor(model, descriptor)
    n_ctx = max(plan.chunk_tokens, tokens + 1 + WARM_UP_TOKENS)
    flags = [
        "--model", str(model), "--n-ctx", str(n_ctx), "--chunk-tokens", str(plan.chunk_tokens),
        "--page-tokens", str(plan.page_tokens), "--ring-mib", str(plan.ring_mib), "--rings", "1", "--transfer-s", "600",
    ]  # fmt: skip
    source = hosts.add("prefiller", ["--role", "prefill", *flags])
    sink = hosts.add("decoder", ["--role", "decode", *flags], peers=[source])
    for host in (source, sink):
        host.start()
    source.wait_ready()
    sink.wait_ready([source.name])
    return source, sink


def _hand_off(sink: Host, tokens: int) -> str:
    """Returns its id."""
    prompt = [_IDS.randrange(256) for _ in range(tokens)]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = sink.complete(body, {"x-zc-placement": "disaggregated", "x-zc-fallback": "deny"})
    if answer.status != 200:
        raise CliError(f"a handoff of {tokens} tokens failed with {answer.status}: {answer.body.get('error')}")
    return str(answer.body["timings"]["handoff"]["id"])


# -- throughput and memory ---------------------------------------------------------------------------------------------


def _forgotten(handoffs: int) -> str:
    return (
        f"{handoffs} handoffs in pages so small have more of them than a host remembers, {KEPT_SPANS} spans: raise "
        "--page-tokens or lower the state to pass"
    )


def _passed(traces: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
    """(bytes, seconds) of all handoffs, each from its first page's beginning to its last page's landing: snapshot and
    probe are in it, the queue and the request before are not. Raises CliError if the host has forgotten any of them."""
    nbytes, seconds = 0, 0.0
    for trace in traces:
        spans = trace["wire"]
        if not spans:
            raise CliError(_forgotten(len(traces)))
        nbytes += sum(span[2] for span in spans)
        seconds += max(span[1] for span in spans) - min(span[0] for span in spans)
    return nbytes, seconds


def _processes(source: Host, sink: Host) -> dict[str, psutil.Process]:
    """Daemon and worker of both hosts."""
    found = {}
    for host in (source, sink):
        assert host.process is not None
        daemon = psutil.Process(host.process.pid)
        found[f"{host.name} daemon"] = daemon
        found[f"{host.name} worker"] = psutil.Process(int(host.status()["worker"]["pid"]))
    return found


def _memory(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def _cpu(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    times = {name: process.cpu_times() for name, process in processes.items()}
    return {name: time.user + time.system for name, time in times.items()}


def _forget_peaks(processes: Iterable[psutil.Process]) -> None:
    """Let the kernel's high-water mark start from what is resident now (Linux)."""
    for process in processes:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def _peak(process: psutil.Process) -> int:
    """The kernel's own high-water mark: a sample now and then would miss it."""
    return _status_bytes(process, "VmHWM:")


def _rings(process: psutil.Process) -> int:
    return _status_bytes(process, "RssShmem:")


def _status_bytes(process: psutil.Process, field: str) -> int:
    text = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(text.split(field)[1].split()[0])


# -- overlap and tail --------------------------------------------------------------------------------------------------


def _overlap(plan: PathPlan, folder: Path, path_gbps: float, step: Callable[[str], None]) -> dict[str, Any]:
    descriptor = Descriptor(plan.geometry, plan.prefill_tokens_per_s)
    with Hosts(folder / "paced") as hosts:
        source, sink = _pair(hosts, folder / f"paced{SUFFIX}", descriptor, plan, plan.overlap_tokens)
        _hand_off(sink, WARM_UP_TOKENS)
        step("overlap")
        (known,) = sink.status()["peers"][0]["paths"]
        handoff = _hand_off(sink, plan.overlap_tokens)
        there, here = (host.trace(handoff) for host in (source, sink))
        rtt_s = (sink.status()["peers"][0]["rtt_ms"] or 0.0) / 1e3
    figures = tail_figures(there, here, path_gbps, rtt_s)
    estimate = known["gbps"]  # None before a handoff or a probe was long enough to tell
    figures["tail"] |= {"bandwidth_gbps": round(path_gbps, 3), "host_estimate_gbps": estimate}
    return figures


def tail_figures(there: Mapping[str, Any], here: Mapping[str, Any], path_gbps: float, rtt_s: float) -> dict[str, Any]:
    """From the prefiller's and the decoder's trace of one handoff, on one clock: how much KV was over when prefill
    ended, how long the rest took to the commit, and what remaining bytes / bandwidth + 2 RTT + import says of that.
    Bandwidth is what handoffs between the two reached just before, engine and checksums in the way: see decisions."""
    ended = there["marks"]["prefilled"]
    kv = [span for span in there["wire"] if span[3] in KV]
    if not kv:
        raise CliError(_forgotten(1))
    over = sum(span[2] for span in kv if span[1] <= ended)
    remaining = sum(span[2] for span in there["wire"] if span[1] > ended)
    import_s = sum(span[1] - max(span[0], ended) for span in here["imports"] if span[1] > ended)
    wire_s = 8 * remaining / (path_gbps * 1e9)
    return {
        "kv_overlap_fraction": round(over / sum(span[2] for span in kv), 4),
        "tail_s": round(here["marks"]["committed"] - ended, 4),
        "tail_model_s": round(wire_s + 2 * rtt_s + import_s, 4),
        "tail": {
            "remaining_mib": round(remaining / MIB, 2),
            "wire_s": round(wire_s, 4),
            "two_rtt_s": round(2 * rtt_s, 5),
            "import_s": round(import_s, 4),
        },
    }
