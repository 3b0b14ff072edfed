"""Selection and comparison, against numbers derived by hand and scipy."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student
from scipy.stats import ttest_rel

from upgd.experiments import Results
from upgd.experiments.analysis.compare import Entry, best, comparisons, edges, rows
from upgd.experiments.analysis.metrics import area, quarter
from upgd.experiments.analysis.student import p_value
from upgd.experiments.analysis.wording import best_text
from upgd.experiments.spec.engine import ENGINE
from upgd.store import Key, Record


def record(
    accuracy, *, method="upgd", seed=0, diverged_at=None, window=10, steps=None, problem="p", engine=ENGINE, **chosen
) -> Record:
    """A learner with this online accuracy: a number, or one for each window."""
    curve = np.atleast_1d(np.array(accuracy, np.float32))
    steps = steps or window * len(curve)
    settings = {"lr": 0.1, **chosen}
    key = Key(problem=problem, network="n", method=method, settings=settings, seed=seed, steps=steps, engine=engine)
    return Record(key, window=window, loss=1 - curve, accuracy=curve, diverged_at=diverged_at)


def only(records):
    (comparison,) = comparisons(records)
    return comparison


def test_area_is_the_mean_over_steps_not_over_windows():
    assert area(record([0.0, 1.0], window=10, steps=15), "accuracy") == pytest.approx(5 / 15)
    assert area(record([0.0, 1.0], window=10, steps=15), "loss") == pytest.approx(10 / 15)


def test_quarters_cut_through_windows():
    curve = record([0.0, 1.0, 0.5], window=10, steps=28)  # quarters have 7 steps; the last window has 8
    assert quarter(curve, "accuracy", "first") == 0.0
    assert quarter(curve, "accuracy", "last") == 0.5
    curve = record([0.0, 1.0], window=10)  # 5 steps
    assert quarter(curve, "accuracy", "last") == 1.0
    curve = record([0.2, 1.0, 0.6], window=2)
    assert quarter(curve, "accuracy", "first") == pytest.approx(0.2)
    assert quarter(curve, "accuracy", "last") == pytest.approx(0.6)


def test_one_window_has_no_quarters():
    """Its mean is that of all steps, so both quarters would equal it."""
    curve = record([0.3], window=10, steps=8)
    assert np.isnan([quarter(curve, "accuracy", which) for which in ("first", "last")]).all()
    assert area(curve, "accuracy") == pytest.approx(0.3)


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=9), st.integers(1, 7), st.data())
def test_quarters_against_a_plain_loop(curve, window, data):
    last = data.draw(st.integers(1, window))
    steps = window * (len(curve) - 1) + last
    whole = np.repeat(np.array(curve, np.float32), [window] * (len(curve) - 1) + [last]).astype(float)
    fine = np.repeat(whole, 4)  # a quarter of the steps may be a fraction of one
    r = record(curve, window=window, steps=steps)
    assert quarter(r, "accuracy", "first") == pytest.approx(fine[:steps].mean())
    assert quarter(r, "accuracy", "last") == pytest.approx(fine[-steps:].mean())
    assert area(r, "accuracy") == pytest.approx(whole.mean())


def test_a_diverged_learner_has_no_area():
    assert math.isnan(area(record([0.9, math.nan], diverged_at=12), "accuracy"))


def test_only_the_comparable_is_compared():
    records = [record(0.5), record(0.5, problem="q"), record([0.5, 0.5])]
    assert [c.problem for c in comparisons(records)] == ["p", "q", "p"]
    assert sorted(c.steps for c in comparisons(records)) == [10, 10, 20]


def test_the_best_by_the_mean_over_seeds():
    records = [
        *(record(a, seed=s, sigma=0.1) for s, a in enumerate([0.9, 0.1])),
        *(record(a, seed=s, sigma=0.2) for s, a in enumerate([0.6, 0.6])),
        *(record(a, seed=s, sigma=0.3) for s, a in enumerate([0.595, 0.595])),
    ]
    chosen = best(only(records), "upgd")
    assert chosen.entry.settings["sigma"] == 0.2
    assert chosen.score == pytest.approx(0.6)
    assert chosen.flat == pytest.approx(2 / 3)  # 0.595 is within 1%, 0.5 is not
    assert {v: pytest.approx(s) for v, s in chosen.neighbours["sigma"].items()} == {0.1: 0.5, 0.3: 0.595}
    assert chosen.edges == ()


def test_in_regression_the_smallest_loss_is_best():
    losses = {0.1: 0.5, 0.2: 0.3, 0.3: 0.4}
    records = [
        Record(
            Key(problem="p", network="n", method="sgd", settings={"lr": lr}, seed=0, steps=10),
            window=10,
            loss=np.array([loss], np.float32),
        )
        for lr, loss in losses.items()
    ]
    comparison = only(records)
    assert comparison.metric == "loss"
    assert best(comparison, "sgd").entry.settings == {"lr": 0.2}


def test_divergence_is_worse_than_any_score():
    records = [
        *(record(0.99, seed=s, sigma=0.1, diverged_at=3 if s == 1 else None) for s in range(3)),
        *(record(0.2, seed=s, sigma=0.2) for s in range(3)),
        *(record(0.99, seed=s, sigma=0.3, diverged_at=3) for s in range(3)),
    ]
    chosen = best(only(records), "upgd")
    assert chosen.entry.settings["sigma"] == 0.2
    assert (chosen.diverged, chosen.diverged_settings, chosen.tried) == (0, 2, 3)
    assert chosen.flat == pytest.approx(1 / 3)  # a setting that diverges is worse, regardless of its score
    chosen = best(only(records[:3] + records[6:]), "upgd")
    assert (chosen.entry.settings["sigma"], chosen.diverged, chosen.score) == (0.1, 1, pytest.approx(0.99))
    everything = best(only(records[6:]), "upgd")
    assert math.isnan(everything.score)


@given(st.permutations([(0.1, 0.3), (0.1, 0.2), (0.2, 0.1)]))
def test_ties_go_to_the_smaller_lr_then_to_the_smaller_rest(order):
    records = [
        Record(
            Key(problem="p", network="n", method="m", settings={"lr": lr, "sigma": sigma}, seed=0, steps=1),
            window=1,
            loss=np.zeros(1, np.float32),
            accuracy=np.full(1, 0.5, np.float32),
        )
        for lr, sigma in order
    ]
    assert best(only(records), "m").entry.settings == {"lr": 0.1, "sigma": 0.2}


def test_more_seeds_of_one_setting_do_not_change_the_choice():
    records = [
        *(record(0.60, seed=s, sigma=0.1) for s in range(3)),
        *(record(0.59, seed=s, sigma=0.2) for s in range(3)),
    ]
    more = [record(0.1, seed=s, sigma=0.1) for s in range(3, 20)]
    chosen = best(only(records + more), "upgd")
    assert (chosen.entry.settings["sigma"], chosen.seeds) == (0.1, (0, 1, 2))


def test_the_most_settings_that_share_a_seed_are_compared():
    alone = [record(0.1, seed=seed, sigma=0.1) for seed in range(10, 14)]
    together = [record(level, seed=seed, sigma=sigma) for sigma, level in ((0.2, 0.5), (0.3, 0.6)) for seed in range(3)]
    chosen = best(only(alone + together), "upgd")
    assert (chosen.entry.settings["sigma"], chosen.seeds, chosen.tried, chosen.left_out) == (0.3, (0, 1, 2), 2, 1)


def test_the_best_of_many_settings_is_found_without_comparing_each_with_each(monkeypatch):
    many = only([record(i / 300, lr=float(i), seed=seed) for i in range(300) for seed in range(1 + i % 3)])
    compared = []
    monkeypatch.setattr(Entry, "__eq__", lambda self, other: compared.append(other) or self is other)
    chosen = best(many, "upgd")
    assert (chosen.entry.settings["lr"], chosen.seeds, chosen.tried) == (299.0, (0,), 300)
    assert not compared


def test_an_edge_of_the_grid_is_reported():
    records = [record(sigma, sigma=sigma) for sigma in (0.1, 0.2, 0.3)]
    assert best(only(records), "upgd").edges == ("sigma",)


def test_an_edge_is_one_of_all_that_was_tried_also_off_the_lines_of_a_star():
    star = [
        {"lr": 0.01, "sigma": 0.1},
        {"lr": 0.1, "sigma": 0.1},
        {"lr": 0.01, "sigma": 0.2},
        {"lr": 0.01, "sigma": 0.0},
    ]
    scores = {(0.1, 0.1): 0.9}
    records = [record(scores.get((one["lr"], one["sigma"]), 0.5), **one) for one in star]
    assert best(only(records), "upgd").edges == ("lr",)
    scores = {(0.01, 0.0): 0.9}
    records = [record(scores.get((one["lr"], one["sigma"]), 0.5), **one) for one in star]
    assert best(only(records), "upgd").edges == ("lr",)  # 0 is where there is nothing beyond


def test_a_pair_is_at_the_edge_if_one_of_its_numbers_is():
    tried = [{"betas": [first, second]} for first in (0.0, 0.5, 0.9) for second in (0.9, 0.99, 0.999)]
    at_edge = {tuple(one["betas"]) for one in tried if edges(one, tried)}
    assert at_edge == {(0.0, 0.9), (0.0, 0.999), (0.5, 0.9), (0.5, 0.999), (0.9, 0.9), (0.9, 0.99), (0.9, 0.999)}
    assert edges(tried[0], tried[:1]) == ()
    assert edges({"sizes": [2.0]}, [{"sizes": [2.0]}, {"sizes": [1.0, 4.0]}]) == ("sizes",)


def test_steps_after_a_divergence_are_not_counted():
    comparison = only([record(0.5, seed=0), record(0.5, seed=1, diverged_at=3)])  # of ten steps
    (row,) = rows(comparison, comparison.entries)
    assert row.learner_steps == 13


def test_fewer_divergences_rank_first_in_a_table():
    records = [record(0.9, method="a", seed=s, diverged_at=5 if s else None) for s in range(4)]
    records += [record(0.5, method="b", seed=s, diverged_at=5 if s == 3 else None) for s in range(4)]
    records += [record(0.4, method="c", seed=s) for s in range(2)]
    comparison = only(records)
    assert [row.entry.method for row in rows(comparison, comparison.entries)] == ["c", "b", "a"]


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)), min_size=2, max_size=8))
def test_the_paired_test_is_scipys(pairs):
    a, b = (np.array(side, np.float64) for side in zip(*pairs, strict=True))
    if np.std(a - b) < 1e-9 or abs(a.mean() - b.mean()) < 1e-6:
        return
    records = [record(x, method="a", seed=s) for s, x in enumerate(a)]
    records += [record(x, method="b", seed=s) for s, x in enumerate(b)]
    comparison = only(records)
    first, second = rows(comparison, comparison.entries)
    assert first.entry.method == ("a" if a.mean() > b.mean() else "b")
    assert first.p is None
    assert second.difference == pytest.approx(-abs(a.mean() - b.mean()))
    assert second.p == pytest.approx(ttest_rel(a, b).pvalue)


def test_pairs_are_those_of_common_seeds_that_did_not_diverge():
    records = [record(0.9 + 0.01 * s, method="a", seed=s) for s in range(4)]
    records += [record(0.5, method="b", seed=s, diverged_at=5 if s == 3 else None) for s in range(2, 6)]
    comparison = only(records)
    _, row = rows(comparison, comparison.entries)
    assert row.difference == pytest.approx(0.5 - 0.92)  # seed 2 alone
    assert row.p is None
    assert (row.seeds, row.diverged) == (4, 1)


def test_identical_learners_do_not_differ():
    records = [record(0.5 + 0.1 * s, method=m, seed=s) for m in "ab" for s in range(3)]
    comparison = only(records)
    assert rows(comparison, comparison.entries)[1].p == 1.0


def test_a_table_by_hand():
    records = [record([0.4, 0.5, 0.5, 0.6], seed=0), record([0.6, 0.7, 0.7, 0.8], seed=1)]
    (line,) = Results(records).table().lines
    assert line["mean"] == pytest.approx(0.6)
    assert line["standard_error"] == pytest.approx(0.1)  # the means are 0.5 and 0.7
    assert line["first_quarter"] == pytest.approx(0.5)
    assert line["last_quarter"] == pytest.approx(0.7)
    assert line["learner_steps"] == 80
    text = str(Results(records).table())
    assert "p, network n, 40 steps: online accuracy" in text
    assert "0.6000 ± 0.1000" in text


def test_results_of_two_versions_of_the_engine_are_two_tables():
    old, new = (
        [record(level, seed=seed, engine=engine) for seed in (0, 1)] for level, engine in ((0.25, 1), (0.5, ENGINE))
    )
    results = Results([*old, *new])
    table = results.table()
    assert [line["engine"] for line in table.lines] == [1, ENGINE]
    first, second = str(table).split("\n\n")[:2]
    assert first.startswith("p, network n, 10 steps, engine version 1: online accuracy")
    assert second.startswith("p, network n, 10 steps: online accuracy")
    assert ("0.25" in first, "0.25" in second) == (True, False)
    assert "engine version 1" in best_text([(one, best(one, "upgd")) for one in results.comparisons()])


def test_a_table_shows_divergence_and_names_are_escaped():
    records = [record(0.5, seed=0), record(0.5, seed=1, diverged_at=2), record(0.4, method="<b>")]
    table = Results(records).table()
    assert "diverged" in str(table)
    assert "<b>" not in table._repr_html_()
    assert "&lt;b&gt;" in table._repr_html_()
    assert str(Results([]).table()) == "(nothing)"


def test_columns_have_a_row_for_each_learner_or_window():
    adamw = Record(
        Key(problem="p", network="n", method="adamw", settings={"lr": 0.1, "betas": [0.9, 0.99]}, seed=0, steps=3),
        window=2,
        loss=np.array([0.5, 0.25], np.float32),
    )
    results = Results([record([0.5, 1.0], sigma=0.2), adamw])
    columns = results.columns()
    assert columns["sigma"] == [0.2, None]
    assert (columns["beta1"], columns["beta2"]) == ([None, 0.9], [None, 0.99])
    assert columns["accuracy"][0] == 0.75
    assert columns["loss"][1] == pytest.approx((2 * 0.5 + 0.25) / 3)
    curves = results.columns(curves=True)
    assert curves["step"] == [10, 20, 2, 3]
    assert curves["loss"] == [0.5, 0.0, 0.5, 0.25]
    assert curves["accuracy"] == [0.5, 1.0, None, None]
    assert {len(column) for column in curves.values()} == {4}


def test_a_frame_uses_pandas_if_installed(monkeypatch):
    results = Results([record([0.5, 1.0])])
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert results.frame() == results.columns()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("frame", columns)))
    assert results.frame() == ("frame", results.columns())
    assert results.curves() == ("frame", results.columns(curves=True))


def test_plot_names_every_method_at_its_line():
    records = [record([0.1 * i, 0.5, 0.6], method=m, seed=i) for m in ("sgd", "upgd") for i in range(3)]
    axes = Results(records).plot()
    assert {text.get_text() for text in axes.texts} >= {"SGD", "UPGD"}
    assert len(axes.lines) == 2
    assert axes.lines[0].get_ydata() == pytest.approx([0.1, 0.5, 0.6])
    with pytest.raises(ValueError, match="nothing to plot"):
        Results([]).plot()


def test_results_at_a_prompt_are_a_line_and_not_all_their_numbers():
    curve = np.linspace(0, 1, 1000)
    found = Results([record(curve, seed=seed, window=1) for seed in range(20)])
    assert repr(found) == "<20 learners: p, network n, 1,000 steps>"
    assert repr(Results([])) == "<no learners>"
    assert repr(found.table()).startswith("p, network n, 1,000 steps: online accuracy\nmethod ")
    (chosen,) = found.best()
    assert "settings={'lr': 0.1}" in repr(chosen)
    assert len(repr(chosen)) < 500
    assert len(repr(found.comparisons())) < 500


def test_variants_are_curves_of_their_own_in_best_table_and_plot():
    switches = ({}, {"granularity": "feature"}, {"scaling": "local"}, {"order": 2}, {"noise": "anticorrelated"})
    records = [
        record(0.5 + i / 10 + lr / 10, seed=seed, lr=lr, **switch)
        for i, switch in enumerate(switches)
        for lr in (0.1, 0.2)
        for seed in range(2)
    ]
    found = Results([*records, record(0.1, method="sgd")])
    expected = [*({"lr": 0.2, **switch} for switch in switches), {"lr": 0.1}]
    assert [one.entry.settings for one in found.best()] == expected
    assert [line["settings"] for line in found.table().lines] == [*reversed(expected[:-1]), expected[-1]]
    labels = {text.get_text() for text in found.plot().texts}
    assert labels >= {"UPGD", "UPGD, feature-wise", "UPGD, local", "UPGD, 2nd order", "UPGD, anticorrelated", "SGD"}


def test_one_seed_and_one_setting_are_singular():
    one = only([record(0.5)])
    assert best_text([(one, best(one, "upgd"))]).endswith("mean of 1 seed; 1 setting tried")


# Below 1e-6 scipy itself is wrong in the ninth digit.
@given(st.just(0.0) | st.floats(1e-6, 1e4), st.integers(1, 400))
def test_students_t_is_scipys(statistic, freedom):
    expected = 2 * student.sf(statistic, freedom)
    assert p_value(statistic, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-300)
    assert p_value(-statistic, freedom) == p_value(statistic, freedom)
