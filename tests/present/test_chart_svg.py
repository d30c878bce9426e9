"""Charts on a page: places in percent, colours as classes, names for readers who cannot see."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from atoll.present.chart import (
    BLUE,
    DASHED,
    GREEN,
    SHADE,
    Area,
    Axis,
    Bars,
    Chart,
    Dots,
    Heat,
    Line,
    Rule,
    Texts,
    named,
    plain_axis,
)
from atoll.present.chart_svg import (
    chart_html,
    heat_html,
    json_text,
    key_html,
    line_numbers,
    scale_html,
    spark_svg,
    spread_out,
    strip_svg,
    swatches,
    thinned,
)

X, Y = plain_axis("round", 0.0, 10.0), plain_axis("score, %", 0.0, 100.0)


def elements(text: str, tag: str) -> list[dict[str, str]]:
    """Return the attributes of every element of one kind, from well-formed markup."""
    root = ElementTree.fromstring(f"<div>{text}</div>")
    return [found.attrib for found in root.iter(tag)]


def drawn(*marks, **options):
    return chart_html(Chart("a <title>", X, Y, marks, **options))


def test_lines_with_bands_have_labels_at_their_ends_and_data_for_a_tooltip():
    line = Line([0, 5, 10], [0, 50, 100], GREEN, "ours, too", [0, 40, 90], [0, 60, 100], DASHED)
    text = drawn(line, legend="ends", alt="Climbs from 0 to 100.")
    band, path = elements(text, "path")
    assert path == {"class": "line c2 d1", "d": "M0 1000L500 500L1000 0"}
    assert band["class"] == "surface band c2 d1"
    assert 'role="img" aria-label="Climbs from 0 to 100."' in text
    assert "a &lt;title&gt;" in text
    assert re.search('<span class="c2 d1" style="top:8px" title="ours, too">', text)
    (data,) = json.loads(re.search("<script[^>]*>(.*)</script>", text)[1])
    assert data == {
        "n": "ours, too",
        "c": "c2 d1",
        "x": [0, 5, 10],
        "y": [0, 50, 100],
        "l": [0, 40, 90],
        "h": [0, 60, 100],
    }


def test_a_line_without_names_needs_no_script_and_skips_what_is_undefined():
    text = drawn(Line([0, 5, 10], [0, np.nan, 100], width=3.0), Line([5], [50]))
    assert "<script" not in text
    first, point = elements(text, "path")
    assert first["d"] == "M0 1000L1000 0"
    assert first["style"] == "stroke-width:3"
    assert point["d"].endswith("h0")  # a round cap makes a point of it


@pytest.mark.parametrize("shape", ["dot", "ring", "box", "cross"])
def test_dots_keep_their_size_and_have_tooltips(shape):
    text = drawn(Dots([5], [25], shape=shape, size=8, opacity=0.5, tips=["a < b"]))
    (mark,) = [
        e for e in elements(text, "svg") + elements(text, "circle") if "mark" in e.get("class", "")
    ]
    assert mark["class"] == f"mark as-{shape} c0"
    assert mark["opacity"] == "0.5"
    assert (mark.get("cx") or mark["x"], mark.get("cy") or mark["y"]) == ("50.00%", "75.00%")
    assert "<title>a &lt; b</title>" in text


def test_bars_and_areas():
    bars = Bars([5], [50], [10], 2, BLUE)
    area = Area([0, 10], [0, 0], [50, 100], opacity=0.5)
    text = drawn(area, bars)
    (bar,) = elements(text, "rect")
    assert (bar["x"], bar["width"], bar["y"], bar["height"]) == (
        "40.00%",
        "20.00%",
        "40.00%",
        "50.00%",
    )
    assert elements(text, "path")[0]["d"] == "M0 500L1000 0L1000 1000L0 1000z"
    across = strip_svg("strip", X, [Bars([0.5], [4], [1], 0.5, across=True)])
    (rect,) = elements(across, "rect")
    assert (rect["x"], rect["width"], rect["y"]) == ("10.00%", "40.00%", "25.00%")


def test_a_stripe_reaches_into_the_rows_around():
    text = strip_svg("strip", X, [Rule(2, upright=True, to=4.0, colour=SHADE)])
    (stripe,) = elements(text, "rect")
    assert (stripe["x"], stripe["width"]) == ("20.00%", "20.00%")
    assert (stripe["y"], stripe["height"]) == ("-20.00%", "140.00%")


@pytest.mark.parametrize("mark", [Heat(np.zeros((2, 2))), Texts([5], [60], ["five"]), Rule(20)])
def test_a_mark_that_no_page_has_is_refused(mark):
    with pytest.raises(TypeError, match="no page draws"):
        drawn(mark)


def test_strips_share_the_scale_of_their_column():
    axis = Axis("", 0.0, 10.0, ticks=[(5.0, "5")])
    strip = strip_svg("strip", axis, [Line([2, 4], [0.5, 0.5])])
    grid, bar = elements(strip, "line")
    assert (grid["class"], grid["x1"], grid["y1"], grid["y2"]) == (
        "grid",
        "50.00%",
        "-40.00%",
        "140.00%",
    )
    assert (bar["class"], bar["x1"], bar["x2"], bar["y1"]) == (
        "bar c0",
        "20.00%",
        "40.00%",
        "50.00%",
    )
    assert '<span style="left:50.0%">5</span>' in scale_html(axis)
    assert 'aria-hidden="true"' in strip


def test_a_spark_line_and_keys():
    assert 'aria-label="falls"' in spark_svg(np.array([3.0, 1.0]), "falls")
    assert key_html([Dots((), (), name="best"), Dots((), ())]).count("<span>") == 1
    assert key_html([]) == ""
    assert swatches([Bars((), (), name="up", opacity=0.5)]).count("opacity:0.5") == 1


def test_labels_keep_apart_and_many_points_are_thinned():
    placed = spread_out([10, 11, 12, 99], 15, 100)
    assert np.diff(placed).min() >= 15 - 1e-9
    assert min(placed) >= 0
    assert max(placed) <= 100
    low, high = spread_out([50, 50], [15, 30], 100)  # a label of one line, and one of two
    assert abs(high - low) == 22.5
    assert thinned(1000)[[0, -1]].tolist() == [0, 999]
    assert len(thinned(1000)) <= 120


def test_the_numbers_of_lines_are_a_table():
    lines = [Line([1, 2, 3], [10, 20, 30], name="a"), Line([1, 2], [5, np.nan], name="b")]
    table = line_numbers("curves", lines, "round")
    assert [column.name for column in table.columns] == ["", "1", "2", "3"]
    assert [cell.text for cell in table.rows[1]] == ["b", "5.0", "–", "–"]
    assert table.title == "curves: means at some of the rounds"


def test_json_cannot_end_its_element():
    assert "</script>" not in json_text(["</script>"])
    assert json.loads(json_text(["</script>"])) == ["</script>"]


def heat_of(values, **options):
    heat = Heat(values, **options)
    return heat_html(Chart("a <map>", Axis("class"), Axis("client"), (heat,)), note="Mind this.")


def test_large_matrices_become_pictures():
    big = heat_of(np.random.default_rng(0).random((80, 80)))
    assert "<table" not in big
    assert "The first 60 of 80" in big
    assert 'data-rows="client" data-columns="class"' in big
    assert "Pale: 0.00, strong: 1.00. Mind this." in big


def test_rows_and_columns_have_names():
    heat = (Heat(np.eye(2)),)
    text = heat_html(
        Chart("map", named("class", ["late", "<b>"]), named("client", ["n", "s"]), heat)
    )
    assert '<th scope="col">late</th><th scope="col">&lt;b&gt;</th>' in text
    assert '<tr><th scope="row">s</th>' in text


def test_small_matrices_are_tables_with_their_numbers():
    small = heat_of(np.array([[np.nan, 0.5], [0.25, 1.0]]))
    assert "<table" in small
    assert ">.25<" in small
    assert '<td class="none">–</td>' in small
    assert '<td style="--v:0.50">.50</td>' in small
    assert "a &lt;map&gt;" in small
    assert "<map>" not in small


def test_words_replace_the_numbers():
    words = heat_of(np.array([[0.0, 1.0]]), words=np.array([["none", "a<b"]]))
    assert '<td style="--v:0.00">none</td><td style="--v:1.00">a&lt;b</td>' in words


@pytest.mark.parametrize("last", [1, 2, 3, 4, 7, 100])
def test_a_whole_axis_has_only_whole_ticks(last: int) -> None:
    words = [word for _, word in plain_axis("round", 1.0, float(last), whole=True).ticks or ()]
    assert words
    assert all(word.isdigit() for word in words)
    assert len(words) <= 6
