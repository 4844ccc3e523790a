"""`zc-handoff model`: writes tiny models to try things with, and shows what a model's state is made of (S9, U3)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.console import Group
from rich.text import Text

from zerocopy.cli.screen import CliError, ExitCode, bytes_text, note, pairs, show, show_json, table
from zerocopy.handoff.components import Identity
from zerocopy.runtime.base import EngineFacts
from zerocopy.runtime.pages import span, state_bytes

if TYPE_CHECKING:  # it brings the engine's library along
    from zerocopy.runtime.llama.inventory import StateSize

LENGTHS: Final = (1024, 8192, 32768, 65536, 131072)
_IDENTITY: Final = {"model": "weights sha256", "tokenizer": "tokenizer sha256", "kv_type": "KV type K/V"}

app = typer.Typer(name="model", no_args_is_help=True, help="Make tiny models; inspect the state of any model.")
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command("make")
def make(
    family: Annotated[
        str, typer.Argument(help="llama, gemma3, mamba2, nemotron_h, nemotron_h_moe+mtp, qwen35+mtp ... or synthetic")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")],
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.", min=0)] = 0,
    scale: Annotated[int, typer.Option(help="Widen the model, to have more state.", min=1, max=16)] = 1,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    json: Json = False,
) -> None:
    """Write a tiny model with random weights. It talks nonsense, but its state has every part of its family's.

    zc-handoff model make nemotron_h_moe+mtp -o tiny.gguf

    [bold]synthetic[/bold] has no weights: state of Nemotron 3 Super's exact size, at a speed that the file says.

    zc-handoff model make synthetic -o super.synthetic.json
    """
    if output.exists() and not force:
        raise CliError(f"{output} exists: choose another name or give --force", ExitCode.USAGE)
    try:
        # Whole or not at all: half a file would be in the way of the next try, or in the place of one that was good.
        with tempfile.TemporaryDirectory(prefix=".zc-model-", dir=output.parent) as folder:
            _write(family, Path(folder, output.name), seed, scale)
            Path(folder, output.name).replace(output)
    except ValueError as error:
        raise CliError(str(error), ExitCode.USAGE) from error
    except OSError as error:  # numpy names no errno where a disk is full
        raise CliError(
            f"cannot write {output}: {error.strerror or error}: free some room or choose another file"
        ) from error
    size = output.stat().st_size
    if json:
        show_json({"family": family, "file": str(output), "bytes": size})
    else:
        print(f"{output}: {family}, {bytes_text(size)}")


def _write(family: str, output: Path, seed: int, scale: int) -> None:
    if family == "synthetic":
        from zerocopy.runtime import synthetic

        speeds = (synthetic.GB10_PREFILL, synthetic.GB10_DECODE)
        synthetic.write_descriptor(output, synthetic.Descriptor("nemotron-3-super", *speeds))
    else:
        from zerocopy.runtime import models

        models.make(family, output, seed=seed, scale=scale)


@app.command("show")
def show_model(
    file: Annotated[Path, typer.Argument(help="GGUF file, or a synthetic model.", metavar="FILE")],
    kv_type: Annotated[str, typer.Option(help="Number type of the KV cache.")] = "f16",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also have the engine count: needs the memory of 128K tokens, and half a minute."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show a model's family, identity and state, with the exact bytes that a handoff moves at several prompt lengths.

    The sizes follow from the state's layout as the engine has it, so this loads the model.
    """
    facts, counted = _facts(file, kv_type, measure)
    report = describe(facts) | ({"measured": counted} if measure else {})
    if json:
        show_json(report)
    else:
        identity = {
            _IDENTITY.get(n, n.replace("_", " ")): getattr(facts.identity, n) for n in Identity.__struct_fields__
        }
        top = pairs({"name": facts.model_name, "family": facts.schema.family, "MTP": facts.mtp, **identity})
        show(Group(top, Text(""), _inventory(facts), *([Text(""), _measured(counted)] if measure else [])))
    for row in counted:
        if row.engine_bytes != row.formula_bytes:
            raise CliError(
                f"{row.component} at {row.tokens} tokens: the engine counts {row.engine_bytes} bytes, a handoff would "
                f"move {row.formula_bytes}: this model cannot be handed over"
            )


def describe(facts: EngineFacts) -> dict[str, Any]:
    """JSON form of `model show`."""
    return {
        "model": facts.model_name,
        "family": facts.schema.family,
        "mtp": facts.mtp,
        "page_tokens": facts.page_tokens,
        "identity": facts.identity,
        "components": [
            {
                "name": spec.component.label,
                "per_token": spec.per_token,
                "layers": spec.layers,
                "bytes": {str(n): state_bytes(spec, n, span(spec, facts)) for n in LENGTHS},
            }
            for spec in facts.schema.components
        ],
    }


def _facts(file: Path, kv_type: str, measure: bool) -> tuple[EngineFacts, list[StateSize]]:
    """And the engine's counts, if it is to `measure`."""
    from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime
    from zerocopy.runtime.llama.inventory import take_inventory
    from zerocopy.worker.main import WorkerOptions, open_runtime

    note(f"loading {file} ...")
    options = LlamaOptions(kv_type_k=kv_type, kv_type_v=kv_type)
    if measure:
        options = msgspec.structs.replace(options, n_ctx=LENGTHS[-1])
    runtime = open_runtime(WorkerOptions(str(file), (), options))
    try:
        if measure and not isinstance(runtime, LlamaRuntime):
            raise CliError(f"{file} has no engine that could count: leave out --measure", ExitCode.USAGE)
        return runtime.facts, take_inventory(runtime, LENGTHS) if isinstance(runtime, LlamaRuntime) and measure else []
    finally:
        runtime.close()


def _inventory(facts: EngineFacts) -> Any:
    columns = ["state", "layers", "grows", *(f"{n // 1024}K" for n in LENGTHS)]
    rows = table(*columns, right=frozenset(range(3, len(columns))) | {1})
    totals = [0] * len(LENGTHS)
    for spec in facts.schema.components:
        sizes = [state_bytes(spec, n, span(spec, facts)) for n in LENGTHS]
        totals = [a + b for a, b in zip(totals, sizes, strict=True)]
        grows = "per token" if spec.per_token else "fixed"
        rows.add_row(spec.component.label, str(spec.layers), grows, *map(bytes_text, sizes))
    rows.add_row(Text("all", "bold"), "", "", *(Text(bytes_text(total), "bold") for total in totals))
    return rows


def _measured(counted: Sequence[StateSize]) -> Any:
    """The engine's counts as they are, so that they can be compared to the byte."""
    rows = table(
        "counted by the engine", *(f"{n // 1024}K" for n in LENGTHS), right=frozenset(range(1, 1 + len(LENGTHS)))
    )
    for component in dict.fromkeys(row.component for row in counted):
        rows.add_row(component, *(f"{row.engine_bytes:,}" for row in counted if row.component == component))
    return rows
