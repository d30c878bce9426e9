"""Heat maps on a page: tables with numbers, or pictures."""

import numpy as np

from atoll.present.chart import Axis, Chart, Heat, named
from atoll.present.heat_svg import heat_html


def drawn(values, **options):
    heat = Heat(values, **options)
    return heat_html(Chart("a <map>", Axis("class"), Axis("client"), (heat,)), note="Mind this.")


def test_large_matrices_become_pictures():
    big = drawn(np.random.default_rng(0).random((80, 80)))
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
    small = drawn(np.array([[np.nan, 0.5], [0.25, 1.0]]))
    assert "<table" in small
    assert ">.25<" in small
    assert '<td class="none">–</td>' in small
    assert '<td style="--v:0.50">.50</td>' in small
    assert "a &lt;map&gt;" in small
    assert "<map>" not in small


def test_words_replace_the_numbers():
    words = drawn(np.array([[0.0, 1.0]]), words=np.array([["none", "a<b"]]))
    assert '<td style="--v:0.00">none</td><td style="--v:1.00">a&lt;b</td>' in words
