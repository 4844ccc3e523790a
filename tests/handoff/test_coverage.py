"""Coverage of a rectangle, held against a plain set of cells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerocopy.handoff.coverage import Coverage, Range, Rectangle

LAYERS, TOKENS = 6, 9


def ranges(end: int) -> st.SearchStrategy[Range]:
    return st.tuples(st.integers(0, end - 1), st.integers(1, end)).filter(lambda r: r[0] < r[1])


def cells(layers: Range, tokens: Range) -> set[tuple[int, int]]:
    return {(layer, token) for layer in range(*layers) for token in range(*tokens)}


@given(st.lists(st.tuples(ranges(LAYERS), ranges(TOKENS)), max_size=25))
def test_it_agrees_with_a_set_of_cells(rectangles: list[tuple[Range, Range]]) -> None:
    coverage, covered = Coverage(LAYERS, TOKENS), set[tuple[int, int]]()
    for layers, tokens in rectangles:
        wanted = cells(layers, tokens)
        hit = coverage.overlap(layers, tokens)
        assert (hit is not None) == bool(wanted & covered)
        if hit is None:
            coverage.add(layers, tokens)
            covered |= wanted
        else:
            assert cells(*hit) <= wanted & covered, "what is named as covered already is so"
        everything = cells((0, LAYERS), (0, TOKENS))
        assert coverage.complete == (covered == everything)
        gaps = [cells(*gap) for gap in coverage.gaps()]
        assert set().union(*gaps) == everything - covered
        assert sum(map(len, gaps)) == len(everything - covered), "gaps do not overlap"


def test_a_new_rectangle_is_one_gap() -> None:
    assert Coverage(2, 5).gaps() == [Rectangle((0, 2), (0, 5))]


def test_gaps_name_layers_and_tokens() -> None:
    coverage = Coverage(4, 10)
    coverage.add((0, 4), (0, 3))
    coverage.add((2, 4), (3, 10))
    coverage.add((0, 2), (5, 10))
    assert coverage.gaps() == [Rectangle((0, 2), (3, 5))]
    coverage.add((0, 2), (3, 5))
    assert coverage.complete
    assert coverage.gaps() == []


def test_pages_of_all_layers_keep_one_span_whatever_their_order() -> None:
    """A 128K prompt is 512 pages: what is kept must not grow with them."""
    for order in (range(512), reversed(range(512))):
        coverage = Coverage(93, 512 * 256)
        for page in order:
            coverage.add((0, 93), (page * 256, page * 256 + 256))
        assert coverage.complete
        assert len(coverage._bands) == 1
        assert len(coverage._bands[0].spans) == 1


def test_layers_that_come_one_by_one_are_covered_one_by_one() -> None:
    coverage = Coverage(3, 1)
    for layer in (2, 0, 1):
        assert coverage.overlap((layer, layer + 1), (0, 1)) is None
        coverage.add((layer, layer + 1), (0, 1))
        assert coverage.overlap((0, 3), (0, 1)) is not None
    assert coverage.complete
