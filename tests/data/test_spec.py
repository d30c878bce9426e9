import numpy as np
import pytest

from atoll.core.errors import ConfigError
from atoll.data.partition import divide
from atoll.data.spec import parse_recipe
from atoll.data.split import split
from atoll.data.synthetic import Lagoon, make_lagoon


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("louvain", ("louvain", {})),
        ("dirichlet:alpha=0.5,least=2", ("dirichlet", {"alpha": 0.5, "least": 2})),
        ("gcfl-oneds:overlap=true", ("gcfl-oneds", {"overlap": True})),
        ("stratified:ratios=0.1/0.4/0.5", ("stratified", {"ratios": (0.1, 0.4, 0.5)})),
        ("louvain-fedgta:compat=duplicates", ("louvain-fedgta", {"compat": "duplicates"})),
    ],
)
def test_a_recipe_is_a_name_and_options(text, expected):
    assert parse_recipe(text) == expected


@pytest.mark.parametrize("text", ["dirichlet:", "dirichlet:alpha", "dirichlet:=1", "x:a=1,,b=2"])
def test_broken_options_are_refused(text):
    with pytest.raises(ConfigError, match="key=value"):
        parse_recipe(text)


def test_options_in_the_name_equal_options_by_keyword():
    source = make_lagoon(Lagoon(nodes=400), 4, 0)
    by_name = divide(source, "dirichlet:alpha=0.3", 4, 1)
    by_keyword = divide(source, "dirichlet", 4, 1, alpha=0.3)
    assert by_name.sha1 == by_keyword.sha1 != divide(source, "dirichlet", 4, 1).sha1


def test_ratios_in_the_name():
    source = make_lagoon(Lagoon(nodes=400), 4, 0)
    parts = divide(source, "random", 2, 0).parts
    roles = np.concatenate(split(source, parts, "stratified:ratios=0.1/0.4/0.5"))
    assert abs((roles == 0).mean() - 0.1) < 0.02


def test_an_unknown_option_of_a_recipe_is_refused():
    source = make_lagoon(Lagoon(nodes=400), 4, 0)
    with pytest.raises(ConfigError, match="alfa"):
        divide(source, "dirichlet:alfa=0.3", 4, 1)
