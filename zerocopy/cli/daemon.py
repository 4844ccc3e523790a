"""`zc-handoff daemon`: one flag for each field of `DaemonConfig`, then the daemon.

The flags are made from the struct, so that a setting exists everywhere or nowhere. Parsing and checking of values is
`zerocopy.config`'s: flags arrive there as text, like environment variables.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from zerocopy.cli.screen import CliError, ExitCode
from zerocopy.config import Setting, default_text, literal_choices, load, settings

_HELP = """Run one host: it serves the HTTP API, and prefills or decodes for its peers.

[dim]A host that prefills, and one that decodes; each trusts the other's key (zc-handoff keys):[/dim]

zc-handoff daemon --role prefill --model m.gguf --listen 10.0.0.1:7600

zc-handoff daemon --role decode --model m.gguf --listen 10.0.0.2:7600 \\
    --peer one=10.0.0.1:7600 --placement disaggregated

[dim]Then ask the second one:[/dim]

curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 32}'
"""

_NO: Final = "no_"  # before the name of a setting: its flag that says false


def register(app: typer.Typer) -> None:
    app.command("daemon", help=_HELP)(_command())


def _command() -> Any:
    """A function with the signature that typer makes flags of."""

    def daemon(config: Path | None = None, with_parent: bool = False, **flags: Any) -> None:
        given = {name: value for name, value in flags.items() if value not in (None, [], (), False)}
        off = {name.removeprefix(_NO): "false" for name in given if name.startswith(_NO)}
        if both := [name for name in off if name in given]:
            flag = both[0].replace("_", "-")
            raise CliError(f"give --{flag} or --no-{flag}, not both", ExitCode.USAGE)
        kept = {name: "true" if value is True else value for name, value in given.items() if not name.startswith(_NO)}
        settled = load(kept | off, os.environ, config)
        from zerocopy.daemon.main import run

        code = run(settled, lifeline=sys.stdin if with_parent else None)
        if code:
            raise typer.Exit(code)

    config_help = "TOML file with any of the settings below. Default: ~/.config/zc-handoff/config.toml, if it exists."
    parameters = [_parameter("config", Path | None, typer.Option("--config", help=config_help, metavar="FILE"))]
    parameters += [_parameter("with_parent", bool, typer.Option("--with-parent", hidden=True), False)]
    parameters += [parameter for setting in settings() for parameter in _flags(setting)]
    daemon.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    daemon.__annotations__ = {p.name: p.annotation for p in parameters}
    return daemon


def _flags(setting: Setting) -> list[inspect.Parameter]:
    """One; where there are two, a column of help for the second would leave none for the text at 80 columns."""
    no = f"--no-{setting.flag[2:]}"
    switch = isinstance(setting.default, bool)
    words = f" [dim]\\[default: {default_text(setting)}{f'; {no} for false' if switch else ''}][/dim]"
    option: dict[str, Any] = {"help": setting.text + words, "rich_help_panel": setting.group, "show_default": False}
    if switch:
        return [
            _parameter(setting.name, bool, typer.Option(setting.flag, **option), False),
            _parameter(_NO + setting.name, bool, typer.Option(no, hidden=True), False),
        ]
    choices = literal_choices(setting)
    option["metavar"] = "|".join(choices) if choices else setting.metavar
    kind = list[str] | None if isinstance(setting.default, dict) else str | None
    return [_parameter(setting.name, kind, typer.Option(setting.flag, **option))]


def _parameter(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
