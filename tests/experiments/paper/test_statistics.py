"""The resolution of the grid, and survival curves, by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import results

from upgd.experiments.paper.reproduce import plan, reproduce
from upgd.experiments.paper.statistics import against_all, resolution, survival, survivors

CHOSEN = {"lr": 0.01, "sigma": 0.01, "beta_utility": 0.99, "betas": (0.9, 0.99), "weight_decay": 0.001}


def _best(score, **neighbours):
    return SimpleNamespace(score=score, neighbours=neighbours, entry=SimpleNamespace(settings=CHOSEN))


@given(st.floats(-0.49, 0.49), st.floats(0.01, 2.0))
def test_a_parabola_is_found_between_its_points(vertex, height):
    """The true maximum of a parabola whose vertex is nearest to the middle one of three settings."""
    scores = [0.7 - height * (x - vertex) ** 2 for x in (-1, 0, 1)]
    found = resolution(_best(scores[1], lr={0.001: scores[0], 0.1: scores[2]}))
    assert found == pytest.approx(0.7 - scores[1], abs=1e-9)


@given(st.floats(-0.9, 0.4), st.floats(0.01, 2.0), st.booleans())
def test_neighbours_may_be_at_different_distances(vertex, height, higher):
    """A decade below and half a decade above: the true maximum, also if it is nearer to a neighbour, which is then better."""
    half = math.log10(0.03 / 0.01)
    below, best, above = (0.7 - height * (x - vertex) ** 2 for x in (-1, 0, half))
    sign = 1 if higher else -1
    for name, near in {"lr": (0.001, 0.03), "beta_utility": (1 - 0.1, 1 - 0.01 / 3)}.items():
        tried = {near[0]: sign * below, near[1]: sign * above}
        assert resolution(_best(sign * best, **{name: tried}), higher=higher) == pytest.approx(0.7 - best, abs=1e-9)


def test_resolutions_of_hyperparameters_are_added():
    lr = {0.1: 0.5, 0.001: 0.6}  # steps of 0.2 and 0.1
    assert resolution(_best(0.7, lr=lr)) == pytest.approx(0.1**2 / (8 * 0.3))
    assert resolution(_best(0.7, sigma={0.1: 0.62})) == pytest.approx(0.01)
    assert resolution(_best(0.7, sigma={0.1: 0.62, 0.001: float("nan")})) == pytest.approx(0.01)
    assert resolution(_best(0.7, lr=lr, sigma={0.1: 0.62})) == pytest.approx(0.01 + 0.1**2 / (8 * 0.3))
    assert resolution(_best(0.7, lr={0.1: 0.7, 0.01: 0.7})) == resolution(_best(0.7)) == 0


def test_values_without_a_logarithm_are_at_equal_distances():
    steps = pytest.approx(0.1**2 / (8 * 0.3))
    assert resolution(_best(0.7, weight_decay={0.0: 0.5, 0.01: 0.6})) == steps
    assert resolution(_best(0.7, betas={(0.0, 0.99): 0.5, (0.9, 0.999): 0.6})) == steps


def test_a_better_neighbour_is_at_least_its_lead_away():
    assert resolution(_best(0.7, lr={0.1: 0.72})) == pytest.approx(0.02)
    assert resolution(_best(0.7, lr={0.1: 0.72, 0.001: 0.71})) == pytest.approx(0.02)
    assert resolution(_best(0.7, lr={0.001: 0.6, 0.1: 0.78})) == pytest.approx(0.08)  # the vertex is beyond
    assert resolution(_best(0.7, lr={0.1: 0.62}), higher=False) == pytest.approx(0.08)


@pytest.mark.parametrize(("gap", "level"), [(0.002, True), (0.01, False)])
def test_what_a_finer_grid_may_reverse_is_level(gap, level):
    """SGD is behind by the gap; its neighbours are 0.06 and 0.02 below, an estimated gain of 0.0025; noise is far smaller."""

    def score(one):
        if one.method == "sgd":
            return 0.6 - gap - {0.1: 0.06, 0.01: 0.0, 0.001: 0.02}.get(one.lr, 0.3)  # 0.3: the curve of half steps
        return 0.6 + 1e-6 * one.seed**2

    steps = (0.1, 0.05, 0.01, 0.005, 0.001, 0.0005)
    settings = {"grid": "paper", "only": {"lr": steps}, "methods": ["sgd", "pgd"], "final_seeds": 5}
    study = plan("upgd-stationary-mnist", "smoke", panels=["weight-global"], **settings)
    # A curve rises in a straight line from half of its level, so that scores and steps are three quarters of the levels.
    one, *_ = against_all(reproduce(study, lambda e: results(e, level=score)), study.panels[0])
    assert (one.first, one.second) == ("PGD", "SGD")
    assert one.pair.p_holm < 1e-6
    assert one.pair.difference == pytest.approx(0.75 * gap, abs=1e-4)
    assert one.level == level == (gap <= 0.04**2 / (8 * 0.08))


def test_when_runs_of_the_search_diverged():
    study = plan("upgd-stationary-mnist", "smoke", panels=["weight-global"])

    def some(experiment):
        return results(experiment, diverged_at=lambda one: 30 if one.lr == 0.01 and one.method == "pgd" else None)

    found = reproduce(study, some)
    when = {arm.method: sorted(survivors(found, arm).tolist()) for arm in study.arms()}
    assert when["sgd"] == [-1, -1]
    assert when["pgd"] == [-1, 30]
    steps, share = survival(np.array(when["pgd"]), 80)
    assert (steps.tolist(), share.tolist()) == ([0, 30, 80], [1.0, 0.5, 0.5])
    assert survival(np.array([-1, -1]), 80)[1].tolist() == [1.0, 1.0]
