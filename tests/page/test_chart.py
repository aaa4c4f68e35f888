"""Charts as SVG."""

import re
from xml.etree import ElementTree

import pytest

from megatron_terapipe.page.chart import (
    HEIGHT,
    WIDTH,
    Axis,
    Chart,
    Curve,
    Level,
    chart_figure,
    chart_picture,
    colour_of,
    round_values,
    thinning_note,
    value_text,
)

CHART = Chart(
    title="Loss <of> a run",
    curves=[
        Curve("training", [(1.0, 4.0), (2.0, 3.0), (3.0, 2.0)]),
        Curve("validation", [(1.0, 3.5), (3.0, 2.5)], 1, dotted=True),
    ],
    levels=[Level("promised", 2.5, 2.2, 2.8)],
    marks=[2.0],
    shaded=[(1.0, 1.5)],
)


def numbers(path: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+\.?\d*", path)]


def test_a_picture_is_well_formed_and_says_what_it_shows() -> None:
    root = ElementTree.fromstring(chart_picture(CHART))
    space = {"s": "http://www.w3.org/2000/svg"}
    assert root.findtext("s:title", namespaces=space) == "Loss <of> a run"
    assert root.get("aria-label") == (
        "training: from 4 to 2 over 1 to 3, least 2, most 4. validation: from 3.5 to 2.5 over 1 to 3, least 2.5, most "
        "3.5. promised: 2.5."
    )
    texts = [each.text for each in root.iterfind(".//s:text", space)]
    assert {"training", "validation", "promised"} <= set(texts)


def test_a_curve_falls_where_its_values_do() -> None:
    root = ElementTree.fromstring(chart_picture(CHART))
    (line,) = (
        each.get("d", "")
        for each in root.iter("{http://www.w3.org/2000/svg}path")
        if each.get("stroke") == colour_of(0) and each.get("stroke-linejoin")
    )
    places = numbers(line)
    assert places[0::2] == sorted(places[0::2]) and places[1::2] == sorted(places[1::2])
    assert all(0 <= x <= WIDTH for x in places[0::2]) and all(0 <= y <= HEIGHT for y in places[1::2])


def test_curves_differ_in_dashes_too() -> None:
    curves = [Curve(f"run {number}", [(0.0, 1.0), (1.0, 2.0)], number) for number in range(4)]
    drawn = chart_figure(Chart(title="Loss", curves=curves))
    assert len(set(re.findall(r'stroke-linejoin="round"( stroke-dasharray="[^"]+")?', drawn))) == 4


def test_a_thinned_curve_says_so() -> None:
    few, many = ([(float(x), float(x % 7)) for x in range(count)] for count in (100, 3000))
    assert thinning_note([Chart(title="Loss", curves=[Curve("", few)])]) == ""
    charts = [Chart(title="Loss", curves=[Curve("", points)]) for points in (few, many)]
    assert thinning_note(charts).startswith("Lines are means of up to 10 iterations")


def test_what_is_above_the_top_is_marked_there() -> None:
    curve = Curve("", [(1.0, 1.0), (2.0, 90.0), (3.0, 1.0)])
    drawn = chart_figure(Chart(title="Time", curves=[curve], top=3.0, from_zero=True))
    assert "90 at 2" in drawn and "triangles" in drawn
    assert "triangles" not in chart_figure(Chart(title="Time", curves=[curve], from_zero=True))


def test_nothing_is_drawn_of_nothing() -> None:
    assert "nothing recorded" in chart_figure(Chart(title="Loss", curves=[Curve("", [])]))
    chart_figure(Chart(title="Loss", curves=[Curve("", [(5.0, 0.0)])]))


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.25, "0.25"), (12_000.0, "12k"), (1.5e6, "1.5M"), (3e-5, "3e-5"), (-2e9, "-2G")]
)
def test_values_on_axes(value: float, text: str) -> None:
    assert value_text(value) == text


def test_round_values_are_in_range() -> None:
    assert round_values(0.0, 1.0, 5) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert round_values(17.0, 93.0, 4) == [20.0, 40.0, 60.0, 80.0]
    assert Axis(0.01, 100.0, 0.0, 1.0, logarithmic=True).round_values(5) == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert Axis(0.01, 100.0, 0.0, 1.0, logarithmic=True).at(1.0) == pytest.approx(0.5)


def luminance(colour: str) -> float:
    """Relative luminance of sRGB, as the contrast of WCAG 2.2 counts it."""
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_curves_stand_out_from_light_and_dark_pages(page: str) -> None:
    for number in range(6):
        darker, lighter = sorted((luminance(colour_of(number)), luminance(page)))
        assert (lighter + 0.05) / (darker + 0.05) >= 3  # WCAG 2.2, 1.4.11
