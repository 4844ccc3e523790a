"""The `zc-handoff` command: puts the subcommands together, runs them, turns expected failures into one line and a code.

Owns no logic of any subcommand. Heavy imports happen inside commands, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from transport.link import LinkError
from zerocopy import __version__
from zerocopy.cli import bench, daemon, demo, doctor, keys, model, status
from zerocopy.cli.screen import CliError, ExitCode, show_error
from zerocopy.config import ConfigError
from zerocopy.handoff.errors import HandoffError
from zerocopy.runtime.base import EngineError

app = typer.Typer(
    name="zc-handoff",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused or unavailable, 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"zc-handoff {__version__}")
        raise typer.Exit


@app.callback()
def _zc_handoff(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Prefill a prompt on one machine, continue it exactly on another.

    To try it on this machine: [bold]zc-handoff demo[/bold]

    To set up two hosts: [bold]zc-handoff keys new NAME[/bold] on both, [bold]keys trust[/bold] each other's
    certificate, then [bold]zc-handoff daemon[/bold] on both. [bold]zc-handoff doctor[/bold] says what is missing.
    """


daemon.register(app)
app.command("demo")(demo.demo)
app.command("status")(status.status)
app.add_typer(keys.app)
app.add_typer(model.app)
app.add_typer(bench.app)
app.command("doctor")(doctor.doctor)


# Typer exports no name for the base of its usage errors; BadParameter's base is it, in every version.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)


def run(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code. `argv` is without the program's name."""
    try:
        code = app(args=None if argv is None else list(argv), prog_name="zc-handoff", standalone_mode=False)
        sys.stdout.flush()  # not at exit, where nobody could say that it failed
        return code if isinstance(code, int) else ExitCode.OK
    except _UsageError as error:
        return _usage_error(error)
    except CliError as error:
        show_error(str(error))
        return error.code
    except ConfigError as error:
        show_error(str(error))
        return ExitCode.USAGE
    except (LinkError, HandoffError, EngineError) as error:
        show_error(str(error))
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python must not flush into it at exit
        if error.errno == errno.EPIPE:
            return ExitCode.OK  # the reader has what it wanted, like `head`
        show_error(f"the output cannot be written: {error.strerror}: free some room or write elsewhere")
        return ExitCode.FAILED


def _usage_error(error: Any) -> int:
    """One line, and where the right usage is. A group without a command has shown its help by now: nothing to add."""
    if type(error).__name__ != "NoArgsIsHelpError":
        command = error.ctx.command_path if error.ctx else "zc-handoff"
        message = str(error.format_message()).rstrip(".")
        show_error(f"{message[:1].lower()}{message[1:]}: see `{command} --help`")
    return ExitCode.USAGE
