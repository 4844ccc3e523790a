"""docs/wire.md says what the code does: reasons, message types, header offsets, bounds."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from tests.handoff import test_components, vectors
from zerocopy.handoff import messages as m
from zerocopy.handoff.components import Component

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "docs" / "wire.md").read_text()
REASONS_TABLE: Final = TEXT.split("## Reasons")[1]


def raised() -> set[str]:
    """Every reason in the source: first argument of an error, of fail or reject, or a `reason` given or defaulted."""
    found = set[str]()
    for path in (ROOT / "zerocopy" / "handoff").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found |= {r.value for r in reasons(node) if isinstance(r, ast.Constant) and isinstance(r.value, str)}
    return found


def reasons(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.arguments):
        defaults = zip(node.args[len(node.args) - len(node.defaults) :], node.defaults, strict=True)
        return [value for argument, value in defaults if argument.arg == "reason"]
    if not isinstance(node, ast.Call):
        return []
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    first = node.args[:1] if name in ("LocalProtocolError", "RemoteProtocolError", "error", "fail", "reject") else []
    return [*first, *(k.value for k in node.keywords if k.arg == "reason")]


def test_every_reason_is_documented_and_every_documented_one_exists() -> None:
    documented = set(re.findall(r"`([a-z-]+)`", "".join(line.split("|")[1] for line in REASONS_TABLE.splitlines()
                                                         if line.startswith("| `"))))  # fmt: skip
    assert raised() == documented


@pytest.mark.parametrize("message", list(vectors.MESSAGES.values()), ids=list(vectors.MESSAGES))
def test_every_message_type_and_field_is_documented(message: m.AnyMessage) -> None:
    assert f"`{type(message).__struct_config__.tag}`" in TEXT
    row = next(line for line in TEXT.splitlines() if f"`{type(message).__struct_config__.tag}`" in line)
    if not row.startswith("| GENERATE"):
        assert all(field in row for field in message.__struct_fields__)


@pytest.mark.parametrize(("name", "offset", "width"), [*test_components.FIELDS[:6], *test_components.UNBOUNDED])
def test_header_offsets_are_documented(name: str, offset: int, width: int) -> None:
    assert f"| {offset} | {width} | {name} |" in TEXT


@pytest.mark.parametrize("component", list(Component))
def test_every_component_number_is_documented(component: Component) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| 8 | 1 | component |"))
    assert f"{component.value} {component.label.removesuffix(' state').removeprefix('continuation ')}" in row


def test_bounds_in_the_document_are_those_of_the_code() -> None:
    assert m.MAX_MESSAGE == 8 << 20
    assert "At most 8 MiB" in TEXT
    assert m.MAX_PROMPT_TOKENS == 1 << 20
    assert m.MAX_PAGES == 1 << 17
    assert m.MAX_PAYLOAD == 4 << 20
