"""`zc-handoff status`: asks a running daemon what it is doing, over HTTP; shows whatever /v1/status says."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from zerocopy.cli.screen import CliError, ExitCode, bytes_text, pairs, show, show_json, table
from zerocopy.config import DaemonConfig

TIMEOUT_S: Final = 5.0
MAX_BYTES: Final = 8 << 20
_DEFAULT_URL: Final = f"http://{DaemonConfig().http}"


def status(
    url: Annotated[str, typer.Argument(help="HTTP address of the daemon.", metavar="URL")] = _DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(envvar="ZC_API_KEY", help="The daemon's API key, if it has one.", metavar="KEY")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what a running daemon is doing: engine, peers, reservations, recent handoffs.

    Exits with 3 if it cannot be reached or cannot serve.

    zc-handoff status http://10.0.0.2:8080
    """
    report = fetch(url, api_key)
    if json:
        show_json(report)
    else:
        show(render(report))
    if not report.get("serving"):
        raise typer.Exit(ExitCode.UNAVAILABLE)


def fetch(url: str, api_key: str | None) -> dict[str, Any]:
    """The daemon's /v1/status. Raises CliError with exit code 3 when there is none."""
    base = (url if "://" in url else f"http://{url}").rstrip("/")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{base}/v1/status", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(MAX_BYTES), type=dict[str, Any])
    except urllib.error.HTTPError as error:
        hint = "give its key with --api-key" if error.code == 401 else "is it a zc-handoff daemon?"
        raise CliError(f"{base} answered {error.code}: {hint}", ExitCode.UNAVAILABLE) from error
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        text = getattr(why, "strerror", None) or str(why)
        raise CliError(
            f"no daemon at {base}: {text}: start one with zc-handoff daemon, or give its --http address: "
            "zc-handoff status HOST:PORT",
            ExitCode.UNAVAILABLE,
        ) from error
    except ValueError as error:
        raise CliError(f"{base} is not a zc-handoff daemon: {error}", ExitCode.UNAVAILABLE) from error


def render(report: dict[str, Any]) -> RenderableType:
    """Plain values first, then a section for each nested one."""
    serving = report.get("serving")
    state = Text("serving", "bold green") if serving else Text(f"not serving: {report.get('reason')}", "bold red")
    top = {"state": state} | {k: v for k, v in report.items() if k not in ("serving", "reason")}
    return _section(top)


def _section(values: dict[str, Any]) -> RenderableType:
    flat = {_words(k): _value(k, v) for k, v in values.items() if not _nested(v)}
    parts: list[RenderableType] = [pairs(flat)] if flat else []
    for name, value in values.items():
        if not (_nested(value) and value):
            continue
        rows = [_handoff(item) for item in value] if name == "recent_handoffs" else value
        parts += [Text(""), Text(_words(name), "bold"), _rows(rows) if isinstance(rows, list) else _section(rows)]
    return Group(*parts)


def _handoff(trace: dict[str, Any]) -> dict[str, Any]:
    """The parts of a trace that a person compares, in short; all of it is in --json."""
    marks, outcome, reason = trace.get("marks", {}), trace.get("outcome"), trace.get("reason")
    row = {
        "handoff": str(trace.get("handoff", ""))[:8],
        "role": trace.get("role"),
        "peer": trace.get("peer"),
        "over": trace.get("transport"),
        "tokens": trace.get("prompt_tokens"),
        "outcome": outcome if reason in (None, outcome) else f"{outcome}: {reason}",
    }
    if "prefilled" in marks and "committed" in marks:
        row["tail_ms"] = 1e3 * (marks["committed"] - marks["prefilled"])
    return {**row, "state": bytes_text(sum(trace.get("component_bytes", {}).values()))}


def _nested(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict | list) for item in value))


def _rows(items: list[dict[str, Any]]) -> RenderableType:
    """A table of what its rows have in common that fits in a cell: no nested values, no columns of nothing."""
    names = [n for n in items[0] if not any(_nested(i.get(n)) for i in items)]
    names = [n for n in names if any(i.get(n) not in (None, "", [], {}) for i in items)]
    numbers = frozenset(index for index, n in enumerate(names) if all(_is_number(i.get(n)) for i in items))
    result = table(*(_words(n) for n in names), right=numbers)
    for item in items:
        result.add_row(*(_value(n, item.get(n)) for n in names))
    return result


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(name: str, value: object) -> str | Text:
    if isinstance(value, Text):
        return value
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("bytes") and isinstance(value, int):
        return bytes_text(value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
