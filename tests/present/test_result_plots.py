from dataclasses import replace

import numpy as np
import pytest

import atoll
from atoll.core.errors import ConfigError

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def result():
    return atoll.run("fedavg", "lagoon:nodes=160", clients=3, rounds=3, seeds=2, set={"hidden": 8})


def test_convergence_is_the_mean_over_seeds_with_their_band(result):
    axes = result.plot().axes[0]
    test, validation, local = axes.lines
    np.testing.assert_allclose(test.get_ydata(), 100 * result.curve().mean(0))
    np.testing.assert_allclose(validation.get_ydata(), 100 * result.curve(role="val").mean(0))
    np.testing.assert_allclose(local.get_ydata(), 100 * result.curve(scored="local").mean(0))
    assert test.get_xdata().tolist() == [1, 2, 3]
    assert len(axes.collections) == 3  # a band each
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(100 * result.curve().min(), abs=1e-6)


@pytest.mark.parametrize("kind", ["convergence", "traffic"])
def test_ticks_of_rounds_are_whole_numbers(result, kind):
    axes = result.plot(kind).axes[0]
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert shown == [1, 2, 3]


def test_the_curve_is_what_the_result_reports(result):
    found = result.metrics()
    last = [curve[-1] for curve in result.curve()]
    assert found["last_test_accuracy"]["per_seed"] == pytest.approx(last)
    best = [np.max(curve) for curve in result.curve(role="val")]
    assert found["val_accuracy"]["per_seed"] == pytest.approx(best)


def test_clients_are_dots_at_the_picked_round(result):
    axes = result.plot("clients").axes[0]
    dots = [c.get_offsets()[:, 1] for c in axes.collections]
    np.testing.assert_allclose(np.stack(dots), 100 * result.of_clients())


def test_named_clients_stand_above_their_names(result):
    named = replace(result, federation={"client_names": ["north", "south", "west"]})
    axes = named.plot("clients").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["north", "south", "west"]
    dots = [c.get_offsets()[:, 1] for c in axes.collections]
    np.testing.assert_allclose(np.stack(dots), 100 * result.of_clients().T)


def test_traffic_adds_up(result):
    axes = result.plot("traffic").axes[0]
    top = max(c.get_paths()[0].vertices[:, 1].max() for c in axes.collections)
    assert top == pytest.approx(sum(result.bytes().values()) / 6 / 1e6)


def test_figures_can_be_saved_and_other_kinds_are_refused(result, tmp_path):
    result.plot("clients").savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match="did you mean 'clients'"):
        result.plot("client")
