"""`zc-handoff keys`: this host's key and the peers it trusts. A thin screen over `transport.keys.KeyStore`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from transport.keys import MAX_PEM, KeyStore
from zerocopy.cli.screen import CliError, ExitCode, pairs, show, show_json, table
from zerocopy.config import CONFIG_DIR

app = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="""This host's key, and the peers whose keys it trusts.

A peer is trusted by its exact certificate, in both directions: on each host run [bold]keys new[/bold] once, give the
output of [bold]keys show[/bold] to the other, and [bold]keys trust[/bold] it there under the name used in --peer.
""",
)

Directory = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help=f"Key directory. [dim]\\[default: $ZC_KEYS or {CONFIG_DIR}/keys][/dim]"),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def open_store(directory: Path | None) -> KeyStore:
    """The same directory that the daemon would use, from flag or environment."""
    return KeyStore((directory or Path(os.environ.get("ZC_KEYS") or f"{CONFIG_DIR}/keys")).expanduser())


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="A name for this host, such as its host name.")],
    keys: Directory = None,
    json: Json = False,
) -> None:
    """Make this host's key. Never overwrites one."""
    store = open_store(keys)
    fingerprint = store.new(name)
    if json:
        show_json({"name": name, "fingerprint": fingerprint, "directory": str(store.directory)})
        return
    show(pairs({"name": name, "fingerprint": fingerprint, "directory": str(store.directory)}))
    flag = "" if keys is None else f" --keys {shlex.quote(str(keys))}"
    print(f"\nNext: zc-handoff keys show{flag} > {name}.pem, copy it to the other host, and there:")
    print(f"      zc-handoff keys trust {name} {name}.pem")


@app.command("show")
def show_certificate(keys: Directory = None, json: Json = False) -> None:
    """Print this host's certificate: what peers need to trust it. It holds no secret."""
    store = open_store(keys)
    pem, fingerprint = store.show()
    if json:
        show_json({"name": store.name(), "fingerprint": fingerprint, "certificate": pem})
    else:
        sys.stdout.write(pem)


@app.command("trust")
def trust(
    name: Annotated[str, typer.Argument(help="The peer's name on this host, as in --peer NAME=HOST:PORT.")],
    certificate: Annotated[str, typer.Argument(help="File with the peer's `keys show`, or - for stdin.")],
    keys: Directory = None,
    json: Json = False,
) -> None:
    """Trust a peer's certificate. Running daemons take it up at once."""
    fingerprint = open_store(keys).trust(name, _read(certificate))
    if json:
        show_json({"name": name, "fingerprint": fingerprint})
    else:
        print(f"{name} is trusted: {fingerprint}")


@app.command("list")
def list_trusted(keys: Directory = None, json: Json = False) -> None:
    """The peers this host trusts."""
    store = open_store(keys)
    trusted = store.trusted()
    if json:
        show_json({"directory": str(store.directory), "trusted": trusted})
        return
    if not trusted:
        print(f"nobody is trusted in {store.directory}: zc-handoff keys trust NAME FILE")
        return
    rows = table("peer", "fingerprint")
    for name, fingerprint in trusted.items():
        rows.add_row(name, fingerprint)
    show(rows)


@app.command("forget")
def forget(
    name: Annotated[str, typer.Argument(help="The peer's name on this host.")],
    keys: Directory = None,
    json: Json = False,
) -> None:
    """Trust a peer no longer. New links with it are refused at once."""
    open_store(keys).forget(name)
    if json:
        show_json({"name": name, "forgotten": True})
    else:
        print(f"{name} is no longer trusted")


def _read(source: str) -> str:
    try:
        if source == "-":
            data = sys.stdin.buffer.read(MAX_PEM + 1)
        else:
            with open(source, "rb") as file:
                data = file.read(MAX_PEM + 1)
    except OSError as error:
        sentence = f"cannot read {source}: {error.strerror}: give the output of keys show"
        raise CliError(sentence, ExitCode.USAGE) from error
    return data.decode("ascii", "replace")
