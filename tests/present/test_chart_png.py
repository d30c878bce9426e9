"""Every mark as matplotlib draws it: places, colours, axes and panels."""

import sys

import numpy as np
import pytest

from atoll.core.errors import ConfigError
from atoll.present.chart import (
    DASHED,
    GREY,
    RED,
    Area,
    Axis,
    Bars,
    Chart,
    Dots,
    Heat,
    Line,
    Panels,
    Rule,
    Texts,
    in_rows,
    named,
)
from atoll.present.chart_png import COLOURS, figure, image

pytest.importorskip("matplotlib")
X, Y = Axis("round"), Axis("score, %")


def drawn(*marks, x=X, y=Y, **options):
    (axes, *_) = figure(Chart("a title", x, y, marks, **options)).axes
    return axes


def test_lines_bands_and_the_legend() -> None:
    line = Line([1, 2], [3, 5], RED, "ours", [2, 4], [4, 6], DASHED)
    axes = drawn(line, Line([1, 2], [0, 0], GREY), legend="inside")
    assert axes.lines[0].get_ydata().tolist() == [3, 5]
    assert axes.lines[0].get_color() == COLOURS[RED]
    assert axes.lines[0].get_linestyle() == "--"
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (2, 6)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ours"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "score, %")
    assert axes.get_title(loc="left") == "a title"


def test_bars_stand_on_their_start_and_have_whiskers() -> None:
    axes = drawn(Bars([0, 1], [2, 3], [1, 1], spread=[0.5, 0.25]))
    assert [(b.get_y(), b.get_height()) for b in axes.patches] == [(1, 2), (1, 3)]
    ends = axes.collections[0].get_segments()
    np.testing.assert_allclose([s[:, 1] for s in ends], [[2.5, 3.5], [3.75, 4.25]])
    across = drawn(Bars([0], [4], across=True, hatched=True, spread=[1.0]))
    assert across.patches[0].get_width() == 4
    np.testing.assert_allclose(across.collections[0].get_segments()[0][:, 0], [3, 5])


def test_dots_areas_rules_and_words() -> None:
    axes = drawn(
        Rule(1.5, text="ε1"),
        Rule(3, upright=True, to=4),
        Area([0, 1], [0, 0], [1, 2]),
        Dots([1], [2], shape="ring", spread=[0.5]),
        Texts([1], [2], ["here"], "right"),
    )
    assert axes.lines[0].get_ydata() == [1.5, 1.5]
    assert [text.get_text() for text in axes.texts] == [" ε1", "here"]
    assert axes.collections[1].get_offsets().tolist() == [[1, 2]]
    assert len(axes.patches) == 1


def test_a_heat_map_has_numbers_a_frame_a_scale_and_grey_gaps() -> None:
    values = np.array([[1.0, np.nan], [2.0, 3.0]])
    words = np.array([["1", "–"], ["2", "3"]])
    heat = Heat(values, words, low=1.0, frame=(1, 0, 1, 2), scale="nodes", scale_form="{x:.1f}")
    made = figure(Chart("", named("class", "ab"), named("client", "cd", down=True), (heat,)))
    axes, scale = made.axes
    assert axes.images[0].get_clim() == (1, 3)
    assert axes.images[0].get_array().mask.tolist() == [[False, True], [False, False]]
    assert [text.get_text() for text in axes.texts] == ["1", "–", "2", "3"]
    assert axes.texts[3].get_color() == "white"
    assert axes.patches[0].get_bbox().bounds == (-0.5, 0.5, 2, 1)
    assert axes.get_ylim() == (1.5, -0.5)
    assert scale.get_ylabel() == "nodes"
    large = drawn(Heat(np.zeros((3, 30)), np.full((3, 30), "0")))
    assert not large.texts  # there is no room for numbers


def test_axes_follow_their_values() -> None:
    ticks = [(1.0, "one"), (100.0, "many")]
    axes = drawn(Line([1, 100], [1, 2]), x=Axis(log=True, ticks=ticks), y=Axis("", 0.0, 9.0))
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["one", "many"]
    assert axes.get_ylim() == (0, 9)
    log = drawn(Line([1, 2], [0.1, 1]), y=Axis(log=True))
    assert 0.2 in log.get_yticks().round(3)
    whole = drawn(Line([1, 2], [0, 1]), x=Axis(whole=True))
    assert all(tick == int(tick) for tick in whole.get_xticks())


def test_panels_share_axes_and_a_legend() -> None:
    charts = [
        Chart(name, X, Y, (Line([0, 1], [0, top], name="a"),)) for name, top in (("p", 1), ("q", 5))
    ]
    made = figure(Panels("all", in_rows(charts), (6, 3), shared="xy", legend=True, x="rounds"))
    first, second = made.axes
    assert first.get_ylim() == second.get_ylim()
    assert [axes.get_title() for axes in made.axes] == ["p", "q"]
    assert len(made.legends) == 1
    assert made.get_supxlabel() == "rounds"
    rows = ((charts[0], charts[1]), (charts[0],))
    top, _, below = figure(Panels("", rows, (6, 6), heights=(1.0, 2.0))).axes
    made.canvas.draw()
    assert below.get_subplotspec().colspan == range(2)
    assert top.get_subplotspec().colspan == range(1)


def test_files_are_the_same_each_time() -> None:
    chart = Chart("", X, Y, (Line([1, 2], [3, 4]),))
    assert image(chart, "png")[:4] == b"\x89PNG"
    assert image(chart, "svg").startswith(b"<?xml")
    assert image(chart, "svg") == image(chart, "svg")


def test_without_matplotlib_the_error_names_the_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'atoll-fgl\[report\]'"):
        image(Chart("", X, Y, ()), "png")
