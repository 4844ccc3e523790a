"""The wire has not changed: golden vectors in both directions."""

from __future__ import annotations

import pytest

from tests.handoff import vectors
from tests.handoff.scene import pages
from zerocopy.handoff.components import PageHeader
from zerocopy.handoff.messages import decode

FILES = sorted(path.name for path in vectors.FOLDER.iterdir())


def test_every_vector_has_its_file_and_every_file_its_vector() -> None:
    assert sorted(vectors.encoded()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_what_this_build_writes_is_what_the_vector_says(name: str) -> None:
    expected = (vectors.FOLDER / name).read_bytes()
    assert vectors.encoded()[name] == expected, f"the wire format changed in {name}"


@pytest.mark.parametrize("name", sorted(vectors.MESSAGES))
def test_what_the_vector_says_is_what_this_build_reads(name: str) -> None:
    assert decode((vectors.FOLDER / f"{name}.bin").read_bytes()) == vectors.MESSAGES[name]


def test_the_header_vector_is_read_as_the_page_it_was_written_for() -> None:
    assert PageHeader.unpack((vectors.FOLDER / "page-header.bin").read_bytes()) == pages()[2][0]
