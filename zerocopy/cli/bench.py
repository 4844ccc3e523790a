"""`zc-handoff bench`: the commands that measure, their options, tables and files. What is measured is in `bench_*`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import psutil
import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from zerocopy.cli.ending import temporary_folder, told_once
from zerocopy.cli.screen import CliError, ExitCode, bytes_text, pairs, show, show_json, table
from zerocopy.cli.workload import Arrival, Profile, TraceError, read_trace
from zerocopy.config import Placement

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure this machine and its links, and servers under load.",
)
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def _plot_file(path: Path | None) -> Path | None:
    """Before anything is measured: a minute's sweep is not to end with a file that nobody can read or write."""
    if path is not None and path.suffix.lower() != ".svg":
        raise CliError(f"--plot {path}: it draws SVG only: call the file {path.with_suffix('.svg')}", ExitCode.USAGE)
    if path is not None and not path.absolute().parent.is_dir():
        raise CliError(f"--plot {path}: there is no folder {path.parent}: make it first", ExitCode.USAGE)
    return path


Plot = Annotated[Path | None, typer.Option(help="Also draw it, as SVG.", metavar="FILE.svg", callback=_plot_file)]

_LINK_HELP: Final = """Measure how fast pages move, over streams x record size x page size, encrypted as in service.

With neither --listen nor --connect, both ends are on this machine. Between two machines that trust each other's keys:
run it with --listen on one, and what that prints on the other.
"""


def _numbers(text: str, unit: int = 1) -> list[int]:
    try:
        numbers = [int(float(part) * unit) for part in text.split(",")]
    except (ValueError, OverflowError):  # the latter of `inf`
        numbers = []
    if not numbers or min(numbers) < 0:
        raise CliError(f"`{text}` is no list of numbers such as 1,2,4", ExitCode.USAGE)
    return numbers


@app.command("link", help=_LINK_HELP)
def link(
    context: typer.Context,
    listen: Annotated[
        str | None, typer.Option(help="Be the landing end, and print what to run on the other.", metavar="HOST:PORT")
    ] = None,
    connect: Annotated[str | None, typer.Option(help="Be the sending end.", metavar="HOST:PORT")] = None,
    peer: Annotated[
        str | None, typer.Option(help="With --connect: the name this host trusts that key under.", metavar="NAME")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Key directory, as for the daemon.", metavar="DIR", show_default=False)
    ] = None,
    streams: Annotated[
        str | None, typer.Option(help="Bulk connections; else 1 to 3 and what a daemon takes here.", metavar="N,...")
    ] = None,
    record_kib: Annotated[str, typer.Option(help="Record sizes.", metavar="KIB,...")] = "256,1024,2048",
    page_kib: Annotated[str, typer.Option(help="Page sizes.", metavar="KIB,...")] = "1024,8192",
    codec: Annotated[str, typer.Option(help="Of none, lz4, shuffle+lz4.", metavar="NAME,...")] = "none,lz4,shuffle+lz4",
    rate_cap_gbps: Annotated[str, typer.Option(help="Pace to these rates; 0 is no cap.", metavar="GBPS,...")] = "0",
    seconds: Annotated[float, typer.Option(help="Of each measurement.", min=0.05, max=600)] = 0.8,
    rounds: Annotated[int, typer.Option(help="Interleaved; medians are shown.", min=1, max=100)] = 3,
    transport: Annotated[
        Literal["tcp", "quic"], typer.Option(help="Over QUIC: no streams, records and codecs, but --datagram.")
    ] = "tcp",
    datagram: Annotated[str, typer.Option(help="QUIC datagram sizes.", metavar="BYTES,...")] = "1452,8900",
    plot: Plot = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
    json: Json = False,
) -> None:
    from zerocopy.cli import bench_link as b
    from zerocopy.cli.keys import open_store

    if listen and connect:
        raise CliError("give --listen or --connect, not both: each is one end", ExitCode.USAGE)
    _take_all(context, listen=bool(listen), connect=bool(connect), transport=transport)
    if listen:
        b.listen(open_store(keys).directory, listen, lambda commands: _announce(commands), with_parent=with_parent)
        return
    if connect and not peer:
        raise CliError("--connect needs --peer NAME: the name of its key in `zc-handoff keys list`", ExitCode.USAGE)
    plan = b.Plan(
        _numbers(streams) if streams else b.Plan().streams, _numbers(record_kib, 1024), _numbers(page_kib, 1024),
        _codecs(codec), _numbers(rate_cap_gbps, 10**9), seconds, rounds,
    )  # fmt: skip
    if transport == "quic":
        plan = msgspec.structs.replace(plan, codecs=(), datagram_bytes=_numbers(datagram))
    b.check(plan)
    with contextlib.ExitStack() as stack:
        if connect and peer:
            target, references = b.Target(open_store(keys).directory, peer, connect), None
        else:
            folder = stack.enter_context(temporary_folder("zc-bench-"))
            stack.enter_context(told_once(_end_children))
            target = stack.enter_context(b.other_end_here(folder))
            references = b.references(plan, target, folder)
        step = stack.enter_context(_progress(plan.steps))
        report = b.sweep(plan, target, step, references)
    if plot is not None:
        _write(plot, b.draw(report))
    show_json(report) if json else show(_link_table(report))


def _take_all(context: typer.Context, *, listen: bool, connect: bool, transport: str) -> None:
    """No option is ignored. The landing end serves whatever the other one measures."""
    if listen:
        _take_no(context, "--listen", set(context.params) - {"listen", "keys", "with_parent"}, "with --connect")
        return
    if not connect:
        _take_no(context, "a sweep on this machine", {"peer", "keys"}, "with --connect")
    if transport == "quic":
        _take_no(context, "--transport quic", {"streams", "record_kib"}, "without it")
    else:
        _take_no(context, "--transport tcp", {"datagram"}, "with --transport quic")


def _take_no(context: typer.Context, what: str, names: set[str], instead: str) -> None:
    sources = {name: context.get_parameter_source(name) for name in names}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    if given:
        flags = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in given))
        raise CliError(f"{what} takes no {flags}: give that {instead}", ExitCode.USAGE)


@app.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="An OpenAI endpoint, ours or another.")] = "http://127.0.0.1:8080",
    rate: Annotated[float, typer.Option(help="Requests a second, Poisson.", min=0.001)] = 1.0,
    seconds: Annotated[float, typer.Option(help="Of arrivals; answers may take longer.", min=0.1)] = 30.0,
    requests: Annotated[int, typer.Option(help="At most.", min=1)] = 10_000,
    profile: Annotated[Profile, typer.Option(help="Lengths of prompts and answers.")] = "fixed",
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals and lengths of an Azure (.csv) or Mooncake (.jsonl) trace instead.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="With --profile fixed.", min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(help="With --profile fixed.", min=1)] = 64,
    shared: Annotated[float, typer.Option(help="Part of prompts whose first half is the same.", min=0, max=1)] = 0.0,
    longest: Annotated[int, typer.Option(help="Context of the server: lengths are cut to fit.", min=2)] = 4096,
    words: Annotated[int, typer.Option(help="Prompts are token ids below this.", min=1)] = 100,
    placement: Annotated[Placement | None, typer.Option(help="Sent as x-zc-placement.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Of the server.", envvar="ZC_API_KEY", show_envvar=False)] = None,
    slo_ttft: Annotated[float, typer.Option(help="Seconds to the first token that goodput allows.", min=0)] = 2.0,
    slo_tpot: Annotated[float, typer.Option(help="Seconds per further token that goodput allows.", min=0)] = 0.1,
    seed: Annotated[int, typer.Option(help="Same seed, same load.")] = 0,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Put open-loop load on an OpenAI endpoint: requests come when they come, answered or not."""
    import asyncio

    from zerocopy.cli import bench_serve as b
    from zerocopy.cli import workload as w

    arrivals = iter(_trace(trace)) if trace else w.generated(
        profile, rate, seed, prompt_tokens=prompt_tokens, output_tokens=output_tokens, shared=shared
    )  # fmt: skip
    load = w.limited(arrivals, seconds=seconds, requests=requests, longest=longest)
    if not load:
        raise CliError(f"nobody arrives within {seconds:g} s: raise --seconds or --rate", ExitCode.USAGE)
    base = url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients write it
    target = b.Target(base, api_key, {"x-zc-placement": placement} if placement else {}, words)
    slo = b.Slo(slo_ttft, slo_tpot)
    with _progress(len(load)) as step:
        seen = asyncio.run(b.open_loop(target, load, step))
    if plot is not None:
        _write(plot, b.draw(seen, slo))
    result = b.report(seen, slo)
    show_json(result) if json else show(pairs(b.table_rows(result)))
    if not result.completed:
        nobody = set(result.failed) == {"connection"}
        hint = "is a server there?" if nobody else "`failed` says why"
        sentence = f"none of {result.requests} requests to {base} was completed: {hint}"
        raise CliError(sentence, ExitCode.UNAVAILABLE if nobody else ExitCode.FAILED)


def _trace(path: Path) -> list[Arrival]:
    try:
        return read_trace(path)
    except TraceError as error:
        raise CliError(str(error), ExitCode.USAGE) from None


@app.command("path")
def path(
    gib: Annotated[float, typer.Option(help="State to pass, in GiB.", min=0.001, max=1024)] = 8.0,
    prompt_tokens: Annotated[int, typer.Option(help="Of each handoff that passes it.", min=2)] = 131_072,
    overlap_tokens: Annotated[int, typer.Option(help="Prompt of the overlap measurement.", min=2)] = 32_768,
    prefill_speed: Annotated[float, typer.Option(help="Of that measurement, tokens a second.", min=1)] = 8192.0,
    geometry: Annotated[Literal["nemotron-3-super", "small"], typer.Option(help="Whose state.")] = "nemotron-3-super",
    chunk_tokens: Annotated[int, typer.Option(help="Prompt tokens per engine call.", min=4)] = 1024,
    page_tokens: Annotated[int, typer.Option(help="Most tokens per page; 0: as a daemon chooses.", min=0)] = 0,
    ring_mib: Annotated[int, typer.Option(help="Size of each ring.", min=1)] = 64,
    link_seconds: Annotated[float, typer.Option(help="Of each measurement of the bare link.", min=0.05)] = 1.5,
    json: Json = False,
) -> None:
    """Measure the whole path here: worker to ring to wire to ring to worker, with synthetic state.

    Two hosts, checksums, credit and commit as in service. Throughput beside the bare link's in the same run, memory
    beyond the rings, KV overlap at a set prefill speed, and the tail beside its model.
    """
    from zerocopy.cli import bench_path as b

    plan = b.PathPlan(
        gib, prompt_tokens, overlap_tokens, prefill_speed, geometry, chunk_tokens, page_tokens, ring_mib, link_seconds
    )
    with temporary_folder("zc-bench-") as folder, _progress(plan.steps) as step:
        report = b.measure(plan, folder, step)
    show_json(report) if json else show(_path_table(report))


@app.command("ring")
def ring(json: Json = False) -> None:
    """Measure what the shared-memory ring itself costs: claim and commit, read and release, the doorbell's wake-up."""
    from zerocopy.cli import bench_ring as b

    report = b.measure()
    if json:
        show_json(report)
        return
    rows = table("", "p50", "p90", "p99", right=frozenset({1, 2, 3}))
    for name, what in {
        "claim_commit_ns": "claim + commit, C from Python, ns",
        "slot_ns": "claim + commit, Python objects, ns",
        "record_ns": "read + release, Python objects, ns",
        "wake_up_us": "doorbell wakes a sleeper, µs",
    }.items():
        figures = getattr(report, name)
        rows.add_row(what, *(f"{value:.1f}" for value in (figures.p50, figures.p90, figures.p99)))
    show(rows)


def _path_table(report: Any) -> RenderableType:
    rows = table("process", "peak over idle", "idle", "of it rings", "CPU-s/GiB", right=frozenset({1, 2, 3, 4}))
    for name, cost in report.processes.items():
        over = f"{report.memory_over_rings_mib[name]:.1f} MiB"
        rows.add_row(name, over, f"{cost.idle_mib:.0f} MiB", f"{cost.rings_mib:.0f} MiB", f"{cost.cpu_s_per_gib:.2f}")
    facts = {
        "path": f"{report.gbps:.2f} Gb/s over {report.gib:.1f} GiB in {report.handoffs} handoffs",
        "link": f"{report.link_gbps:.2f} Gb/s; the path reaches {report.ratio_to_link:.2f} of it",
        "CPU-s/GiB": f"path {report.cpu_s_per_gib:.2f}, link {report.link_cpu_s_per_gib:.2f}",
        "KV over when prefill ended": f"{report.kv_overlap_fraction:.1%}",
        "tail": f"{1e3 * report.tail_s:.0f} ms; model {1e3 * report.tail_model_s:.0f} ms "
        f"({report.tail['remaining_mib']:.0f} MiB, import {1e3 * report.tail['import_s']:.0f} ms)",
    }
    return Group(pairs(facts), Text(""), rows)


def _announce(commands: Sequence[str]) -> None:
    print("\n".join(commands), flush=True)


def _codecs(text: str) -> list[str]:
    from zerocopy.cli.bench_codec import CODECS

    names = text.split(",")
    for name in names:
        if name not in CODECS:
            raise CliError(f"codec `{name}` is none of {', '.join(CODECS)}", ExitCode.USAGE)
    return names


def _link_table(report: Any) -> RenderableType:
    columns = ("streams", "record", "page", "cap", "Gb/s", "% of ceiling", "CPU-s/GiB", "page p50/p90/p99 ms",
               "control p50/p99 ms", "repeated")  # fmt: skip
    rows = table(*columns, right=frozenset(range(10)))
    codecs = table("codec", "ratio", "encode Gb/s, one core", "CPU-s/GiB", "pays below", right=frozenset({1, 2, 3, 4}))
    for row in report.rows:
        if row.transport == "memory":
            pays = f"{row.pays_below_gbps:g} Gb/s" if row.pays_below_gbps else "never"
            codecs.add_row(row.codec, f"{row.ratio:.2f}", f"{row.gbps:.1f}", f"{row.cpu_s_per_gib:.2f}", pays)
            continue
        mark = "bold" if row == report.best else ""
        rows.add_row(*(Text(cell, mark) for cell in _cells(row)))
    facts = {
        "default": f"{_named(report.default)}{_why(report)}" if report.default else "not in this sweep",
        "best": _named(report.best) if report.best else "none without a cap",
        "ceiling": f"plain TCP, one stream: {_speed(report.ceiling.plaintext_gbps)}; "
        f"iperf3 -P1: {_speed(report.ceiling.iperf3_gbps)}",
    }
    facts |= {"engine": report.quic_engine} if report.quic_engine else {}
    facts |= {name: _speed(speed) for name, speed in (report.ceiling.quic_gbps or {}).items()}
    facts |= {name: f"absent: {why}" for name, why in (report.ceiling.absent or {}).items()}
    shown = [rows, codecs] if codecs.row_count else [rows]
    return Group(*(part for one in shown for part in (one, Text(""))), pairs(facts))


def _cells(row: Any) -> list[str]:
    pages, loaded = row.page_ms, row.loaded_rtt_ms
    return [
        str(row.streams),
        f"{row.datagram_bytes} B" if row.datagram_bytes else bytes_text(row.record_bytes),
        bytes_text(row.page_bytes),
        f"{row.rate_cap_bps / 1e9:g}" if row.rate_cap_bps else "",
        f"{row.gbps:.2f}",
        "" if row.percent_of_ceiling is None else f"{row.percent_of_ceiling:.0f}",
        f"{row.cpu_s_per_gib:.2f}",
        f"{pages.p50:.1f}/{pages.p90:.1f}/{pages.p99:.1f}" if pages else "",
        f"{loaded.p50:.1f}/{loaded.p99:.1f}" if loaded else "",
        "" if row.segments_repeated is None else str(row.segments_repeated),
    ]


def _named(row: Any) -> str:
    cut = f"{row.datagram_bytes} B datagrams" if row.datagram_bytes else f"{bytes_text(row.record_bytes)} records"
    streams = "" if row.datagram_bytes else f"{row.streams} stream{'s' if row.streams > 1 else ''}, "
    sizes = f"{streams}{cut}, {bytes_text(row.page_bytes)} pages"
    if row.ratios:
        sizes += "".join(f", {ratio:.2f} x {name}" for name, ratio in row.ratios.items())
    return f"{row.gbps:.2f} Gb/s with {sizes}"


def _why(report: Any) -> str:
    return "" if report.default.transport == "quic" else f": {report.streams_reason}"


def _speed(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} Gb/s"


def _end_children() -> None:
    """A thread that waits for one, for minutes maybe, hears of no signal."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, for people only. Yields what to call as each of `steps` begins."""
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps, completed=-1, visible=False)

        def step(what: str) -> None:
            bar.update(task, advance=1, description=what, visible=True)

        yield step


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error
