"""The plot is well-formed SVG, has every series, level and tick, and copes with gaps and nothing."""

from __future__ import annotations

from xml.etree import ElementTree

from zerocopy.cli.plot import PANEL, TOP, Panel, _ceiling, svg

NAMES = {"s": "http://www.w3.org/2000/svg"}


def parsed(*panels: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(svg("a <title> & more", panels))


def test_every_series_level_and_tick_is_there() -> None:
    root = parsed(
        Panel("Gb/s", ["256 KiB", "1 MiB"], {"one <&>": [1.0, 2.0], "two": [3.0, None]}, {"iperf3": 2.5}),
        Panel("CPU", ["256 KiB", "1 MiB"], {"one <&>": [0.5, 0.4]}),
    )
    texts = [t.text for t in root.iterfind(".//s:text", NAMES)]
    for text in ("a <title> & more", "Gb/s", "CPU", "256 KiB", "1 MiB", "one <&>", "two", "iperf3 2.5"):
        assert text in texts
    assert len(root.findall(".//s:polyline", NAMES)) == 3
    assert len(root.findall(".//s:circle", NAMES)) == 5  # one value was not measured


def test_a_series_has_one_colour_in_all_panels() -> None:
    root = parsed(*(Panel(title, ["x"], {"b": [1.0], "a": [2.0]}) for title in ("1", "2")))
    colours = [line.get("stroke") for line in root.findall(".//s:polyline", NAMES)]
    assert colours[:2] == colours[2:] and colours[0] != colours[1]


def test_higher_values_are_drawn_higher_and_inside_the_panel() -> None:
    root = parsed(Panel("p", ["a", "b", "c"], {"s": [0.0, 5.0, 7.9]}))
    heights = [float(c.get("cy", "")) for c in root.findall(".//s:circle", NAMES)]
    assert heights == sorted(heights, reverse=True)
    assert all(TOP <= y <= TOP + PANEL + 16 for y in heights)


def test_nothing_measured_is_an_empty_chart() -> None:
    assert parsed(Panel("empty", [], {})).findall(".//s:circle", NAMES) == []


def test_the_axis_ends_at_a_short_number_at_or_above_the_highest_value() -> None:
    assert _ceiling(0.0) == 1.0  # a panel of nothing had an axis to 1e-10
    assert [_ceiling(v) for v in (0.03, 0.72, 1.0, 13.0, 41.0, 81.0)] == [0.04, 0.8, 1.0, 20.0, 80.0, 100.0]
