"""`docs/attacks.md` names tests; they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_threat_document_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/attacks.md").read_text()))
    here = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert {name for name in named if f"def {name}(" not in here} == set()
