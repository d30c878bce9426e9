"""The chart model: axes, ticks and compound marks by hand."""

import numpy as np
import pytest

from atoll.present.chart import (
    Area,
    Axis,
    Bars,
    Chart,
    Line,
    box,
    in_rows,
    named,
    nice_ticks,
    number_words,
    numbers_axis,
    steps,
    violin,
)


def test_ticks_are_round_numbers_inside_the_interval() -> None:
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(41.3, 43.7) == [41.5, 42, 42.5, 43, 43.5]
    assert nice_ticks(0, 40, 4) == [0, 10, 20, 30, 40]
    assert nice_ticks(78.2, 83.9, 4) == [80, 82]
    assert nice_ticks(5, 5) == [5]
    assert nice_ticks(85.5, 94.5, 4) == [86, 88, 90, 92, 94]  # one tick would show no scale


def test_numbers_that_are_far_apart_get_a_logarithmic_axis() -> None:
    log = numbers_axis("lr", [1e-5, 1e-1])
    assert log.log
    assert log.ticks is not None
    assert [text for _, text in log.ticks] == ["1e-5", "0.0001", "0.001", "0.01", "0.1"]
    assert log.percent(1e-3) == pytest.approx(50)
    assert (log.percent(1e-9), log.percent(5)) == (0, 100)
    plain = numbers_axis("trial", [0.0, 3.0], room=0.03, whole=True)
    assert plain.ticks == [(0, "0"), (1, "1"), (2, "2"), (3, "3")]
    assert numbers_axis("x", [0.0, 10.0]).ticks[0] == (0.0, "0")
    assert numbers_axis("x", [3.0, 3.0]).percent(3.0) == pytest.approx(50)


def test_an_axis_of_words_shows_every_few_of_many() -> None:
    assert named("net", ["gcn", "sage"]).percent(0) == 25
    many = named("client", range(60), down=True)
    assert (many.low, many.high) == (59.5, -0.5)
    assert many.ticks is not None
    assert [text for _, text in many.ticks[:3]] == ["0", "3", "6"]


def test_steps_hold_each_value_until_the_next_place() -> None:
    x, y = steps([0, 2, 5], [1, 4, 3])
    assert x.tolist() == [0, 2, 2, 5, 5]
    assert y.tolist() == [1, 1, 4, 4, 3]


def test_rows_are_filled_with_empty_places() -> None:
    charts = [Chart(str(i), Axis(), Axis(), ()) for i in range(4)]
    rows = in_rows(charts)
    assert [len(row) for row in rows] == [3, 3]
    assert rows[1] == (charts[3], None, None)


def test_a_box_by_hand() -> None:
    body, lower, upper, median = box(np.array([0.0, 1, 2, 3, 4, 100]), 7)
    assert isinstance(body, Bars)
    assert (body.start, body.length) == ([1.25], [2.5])
    for line, ends in ((lower, [0, 1.25]), (upper, [4, 3.75]), (median, [2.5, 2.5])):
        assert isinstance(line, Line)
        assert list(line.y) == ends  # 100 lies beyond 1.5 box lengths


def test_a_violin_is_widest_where_the_values_are() -> None:
    (shape,) = violin(np.array([0.0, 0, 0, 0, 1]), 3, colour="c0", side=1)
    assert isinstance(shape, Area)
    right = np.asarray(shape.high)
    assert right[0] == pytest.approx(3.4, abs=0.02)
    assert right[0] > right[-1]
    assert np.all(np.asarray(shape.low) == 3)  # only the right half
    assert violin(np.ones(4), 0, colour="c0") == ()  # no spread, no shape


def test_undefined_numbers_are_dashes() -> None:
    assert number_words(np.array([[0.125, np.nan]]), 2).tolist() == [["0.12", "–"]]
