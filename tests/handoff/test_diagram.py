"""The drawing in the docs is the table's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zerocopy.handoff import diagram
from zerocopy.handoff.states import TRANSITIONS, Event, Role, State

DOCS = Path(__file__).parents[2] / "docs"


def drawn() -> str:
    return "".join(ElementTree.fromstring(diagram.svg()).itertext())


def test_the_drawing_in_the_docs_is_current() -> None:
    command = "python -m zerocopy.handoff.diagram > docs/states.svg"
    assert (DOCS / "states.svg").read_text() == diagram.svg(), f"the table has changed: run {command}"


def test_the_command_of_the_docs_draws_it() -> None:
    run = subprocess.run([sys.executable, "-m", "zerocopy.handoff.diagram"], capture_output=True, text=True, check=True)
    assert run.stdout == diagram.svg()


def test_every_state_and_event_of_the_table_is_drawn() -> None:
    text = drawn()
    for role in Role:
        for state, events in TRANSITIONS[role].items():
            assert state.value.upper() in text
            assert all(event.value in text for event in events)


def test_a_changed_table_changes_the_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = diagram.svg()
    changed = {**TRANSITIONS[Role.SINK][State.STREAMING], Event.REJECT: State.ABORTED}
    monkeypatch.setitem(TRANSITIONS[Role.SINK], State.STREAMING, changed)
    assert diagram.svg() != before
