"""`zc-handoff daemon`: one flag for each field of `DaemonConfig`, then the daemon.

The flags are made from the struct, so that a setting exists everywhere or nowhere. Parsing and checking of values is
`zerocopy.config`'s: flags arrive there as text, like environment variables.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from zerocopy.config import Setting, default_text, literal_choices, load, settings

_HELP = """Run one host: it serves the HTTP API, and prefills or decodes for its peers.

[dim]A host that prefills, and one that decodes; each trusts the other's key (zc-handoff keys):[/dim]

zc-handoff daemon --role prefill --model m.gguf --listen 10.0.0.1:7600

zc-handoff daemon --role decode --model m.gguf --listen 10.0.0.2:7600 \\
    --peer one=10.0.0.1:7600 --placement disaggregated

[dim]Then ask the second one:[/dim]

curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 32}'
"""


def register(app: typer.Typer) -> None:
    app.command("daemon", help=_HELP)(_command())


def _command() -> Any:
    """A function with the signature that typer makes flags of."""

    def daemon(config: Path | None = None, with_parent: bool = False, **flags: Any) -> None:
        given = {name: _text(value) for name, value in flags.items() if value not in (None, [], ())}
        settled = load(given, os.environ, config)
        from zerocopy.daemon.main import run

        code = run(settled, lifeline=sys.stdin if with_parent else None)
        if code:
            raise typer.Exit(code)

    config_help = "TOML file with any of the settings below. Default: ~/.config/zc-handoff/config.toml, if it exists."
    parameters = [_parameter("config", Path | None, typer.Option("--config", help=config_help, metavar="FILE"))]
    parameters += [_parameter("with_parent", bool, typer.Option("--with-parent", hidden=True), False)]
    parameters += [_flag(setting) for setting in settings()]
    daemon.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    daemon.__annotations__ = {p.name: p.annotation for p in parameters}
    return daemon


def _flag(setting: Setting) -> inspect.Parameter:
    choices = literal_choices(setting)
    words = f" [dim]\\[default: {default_text(setting)}][/dim]"
    option: dict[str, Any] = {"help": setting.text + words, "rich_help_panel": setting.group, "show_default": False}
    if isinstance(setting.default, bool):
        names = [f"{setting.flag}/--no-{setting.flag[2:]}"]
        return _parameter(setting.name, bool | None, typer.Option(*names, **option))
    option["metavar"] = "|".join(choices) if choices else setting.metavar
    kind = list[str] | None if isinstance(setting.default, dict) else str | None
    return _parameter(setting.name, kind, typer.Option(setting.flag, **option))


def _parameter(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _text(value: Any) -> Any:
    """As `zerocopy.config` takes flags: text, or a list of texts."""
    return str(value).lower() if isinstance(value, bool) else value
