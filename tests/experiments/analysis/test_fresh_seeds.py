"""Seeds of a search and fresh seeds are kept separate, and tests are corrected for their number."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import record
from scipy.stats import ttest_rel

from upgd.experiments import Results
from upgd.experiments.analysis.compare import area, best, comparisons, holm, pairs, rows
from upgd.experiments.analysis.tables import CAVEAT
from upgd.experiments.analysis.variants import Variant, best_of_variants, evaluated, table_rows
from upgd.experiments.analysis.wording import best_text
from upgd.report.content import sections
from upgd.report.page import content


def searched(method="sgd", *, seeds=(0, 1, 2), fresh=(), lrs=(0.1, 0.01), levels=(0.6, 0.5), fresh_level=0.3, **rest):
    """A search that the first lr wins, and further seeds of that lr on which it does worse."""
    found = [
        record(method, {"lr": lr}, seed=s, level=level, **rest)
        for lr, level in zip(lrs, levels, strict=True)
        for s in seeds
    ]
    return found + [record(method, {"lr": lrs[0]}, seed=s, level=fresh_level, **rest) for s in fresh]


def only(records):
    (comparison,) = comparisons(records)
    return comparison


def mean(records):
    return np.mean([area(r, "accuracy") for r in records])


def test_seeds_that_no_other_setting_has_are_fresh():
    chosen = best(only(searched(fresh=(7, 5))), "sgd")
    assert (chosen.search_seeds, chosen.fresh_seeds) == ((0, 1, 2), (5, 7))
    assert list(chosen.shown.records) == [5, 7]
    assert sorted(chosen.entry.records) == [0, 1, 2, 5, 7]


def test_a_single_setting_was_not_searched_for():
    chosen = best(only([record(seed=seed) for seed in range(3)]), "sgd")
    assert (chosen.search_seeds, chosen.fresh_seeds) == ((), ())
    assert list(chosen.shown.records) == [0, 1, 2]


def test_a_learner_that_is_not_finished_does_not_make_its_seed_fresh():
    records = searched(lrs=(0.1, 0.01, 0.001), levels=(0.6, 0.5, 0.4))[:-2]  # lr 0.001 has seed 0 alone so far
    chosen = best(only(records), "sgd")
    assert (chosen.seeds, chosen.search_seeds, chosen.fresh_seeds) == ((0,), (0, 1, 2), ())


def test_two_settings_that_were_confirmed_one_after_the_other_keep_their_fresh_seeds():
    records = searched(lrs=(0.1, 0.01, 0.001, 1.0), levels=(0.6, 0.5, 0.4, 0.3), fresh=(5, 6))
    records += [record("sgd", {"lr": 0.01}, seed=seed) for seed in (5, 6)]
    assert best(only(records), "sgd").fresh_seeds == (5, 6)


def test_a_table_never_pools_search_and_confirmation():
    records = searched(fresh=(5, 6)) + searched("adamw")
    fresh, search = Results(records).table().lines
    assert (fresh["method"], fresh["evaluation"], fresh["seeds"]) == ("sgd", "fresh", 2)
    assert fresh["mean"] == pytest.approx(mean(records[6:8]))
    assert (search["method"], search["evaluation"], search["seeds"]) == ("adamw", "search", 3)
    assert search["mean"] == pytest.approx(mean(records[8:11]))
    assert fresh["difference"] is search["difference"] is None  # they have no seed in common
    text = str(Results(records).table())
    assert ": online accuracy, on fresh seeds\n" in text
    assert ": online accuracy, on the seeds of the search\n" in text


def test_all_settings_are_shown_on_the_seeds_of_the_search():
    records = searched(fresh=(5, 6, 7, 8))
    lines = Results(records).table(all_settings=True).lines
    assert [(line["evaluation"], line["settings"]["lr"], line["seeds"]) for line in lines] == [
        ("fresh", 0.1, 4),
        ("search", 0.1, 3),
        ("search", 0.01, 3),
    ]
    assert lines[1]["mean"] == pytest.approx(mean(records[:3]))


def test_a_method_with_one_setting_is_compared_on_the_seeds_that_are_fresh_for_the_others():
    records = searched(fresh=range(3, 9)) + [record("adamw", seed=seed, level=0.2) for seed in range(9)]
    first, second = Results(records).table().lines
    assert [line["evaluation"] for line in (first, second)] == ["fresh", "fresh"]
    scores = {(r.key.method, r.key.seed): area(r, "accuracy") for r in records if r.key.settings["lr"] == 0.1}
    expected = np.mean([scores["adamw", seed] - scores["sgd", seed] for seed in range(3, 9)])
    assert second["difference"] == pytest.approx(expected)


def test_figures_and_the_report_show_only_fresh_seeds():
    records = searched(fresh=(5, 6, 7)) + searched("adamw", fresh=(5, 6, 7), fresh_level=0.2)
    (section,) = sections(records)
    assert [row.evaluation for row in section.rows] == ["fresh", "fresh"]
    drawn = {method["name"]: method["y"] for method in section.chart()["methods"]}
    expected = np.mean([r.accuracy for r in records[6:9]], 0)
    assert drawn["SGD"] == pytest.approx(expected, abs=1e-4)
    axes = Results(records).plot()
    assert axes.lines[0].get_ydata() == pytest.approx(expected)
    assert "online accuracy, mean and 95% band of 3 fresh seeds" in {text.get_text() for text in axes.texts}
    assert [setting.seeds for setting in section.settings] == [3, 3, 3, 3]  # those of the search
    assert ">3 fresh</td>" in content(records, Path("x.db"))
    assert CAVEAT.split(";")[0] not in content(records, Path("x.db"))


def test_a_divergence_on_a_fresh_seed_is_reported():
    records = [*searched(fresh=(5, 6)), record("sgd", {"lr": 0.1}, seed=7, diverged_at=3)]
    assert "1 of 9 learners" in content(records, Path("x.db"))
    assert Results(records).table().lines[0]["diverged"] == 1


def test_tests_after_a_search_carry_a_caveat():
    records = searched() + searched("adamw", levels=(0.58, 0.5))
    records[0] = record("sgd", {"lr": 0.1}, seed=0, level=0.62)
    table = Results(records).table()
    assert CAVEAT in str(table)
    marked = CAVEAT.replace("`upgd confirm`", "<code>upgd confirm</code>")
    assert marked in table._repr_html_()
    assert CAVEAT in str(Results(records).pairs())
    assert sections(records)[0].caveat == CAVEAT
    assert marked in content(records, Path("x.db"))
    unsearched = [record(m, seed=s, level=0.5 + s * (m == "sgd") / 9) for m in ("sgd", "adamw") for s in range(3)]
    assert CAVEAT not in str(Results(unsearched).table())


def test_best_shows_the_score_on_fresh_seeds():
    records = searched(fresh=(5, 6))
    comparison = only(records)
    text = best_text([(comparison, one) for one in best_of_variants(comparison).values()])
    assert f"on 2 fresh seeds: accuracy {mean(records[6:]):.4g}" in text


def noisy(method, level, seed):
    return record(method, seed=seed, level=level + float(np.random.default_rng([seed, len(method)]).normal(0, 0.02)))


LEVELS = {"sgd": 0.5, "sgdw": 0.52, "adamw": 0.51, "pgd": 0.4}


def test_the_leader_is_compared_as_one_of_all_pairs():
    records = [noisy(method, level, seed) for method, level in LEVELS.items() for seed in range(6)]
    comparison = only(records)
    found = rows(comparison, comparison.entries)
    every = pairs(comparison, [row.entry for row in found])
    assert len(every) == 6
    assert [row.p_holm for row in found[1:]] == [pair.p_holm for pair in every[:3]]
    scores = {e.method: [area(r, "accuracy") for r in e.records.values()] for e in comparison.entries}
    for pair in every:
        expected = ttest_rel(scores[pair.first.method], scores[pair.second.method])
        assert pair.p == pytest.approx(expected.pvalue)
        assert pair.seeds == 6
    assert [pair.p_holm for pair in every] == holm([pair.p for pair in every])


def test_a_reference_is_compared_with_each_other_method():
    records = [noisy(method, level, seed) for method, level in LEVELS.items() for seed in range(6)]
    found = table_rows(only(records), against="sgd")
    others = [row for row in found if row.entry.method != "sgd"]
    (own,) = (row for row in found if row.entry.method == "sgd")
    assert own.difference is own.p is None
    for row in others:
        assert row.difference == pytest.approx(row.mean - own.mean)
    assert [row.p_holm for row in others] == holm([row.p for row in others])
    text = str(Results(records).table(against="sgd"))
    assert "compared with sgd" in text
    assert "vs. reference" in text


def test_an_unknown_or_ambiguous_reference_is_an_error():
    records = [record("upgd"), record("upgd", {"scaling": "local"}), record("sgd")]
    with pytest.raises(
        ValueError, match="there is no method 'adamw' to compare with; choose among UPGD; UPGD, local; sgd"
    ):
        Results(records).table(against="adamw")
    assert Results(records).table(against="UPGD, local").lines[0]["against"] == "UPGD, local"
    with pytest.raises(
        ValueError, match="there are several methods 'upgd' to compare with; choose among UPGD; UPGD, local"
    ):
        Results(records).table(against="upgd")


chances = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8)


@given(chances)
def test_holm_against_its_definition(given_):
    """The smallest of m is multiplied by m, the next by m − 1, …; a larger p never gets a smaller corrected one."""
    tests = sorted(p for p in given_ if p is not None)
    for p, corrected in zip(given_, holm(given_), strict=True):
        if p is None:
            assert corrected is None
        else:
            below = [min(1.0, (len(tests) - i) * q) for i, q in enumerate(tests) if q <= p]
            assert corrected == max(below)


def test_groups_are_never_empty_and_have_every_variant_once():
    records = searched(fresh=(5,)) + searched("adamw") + [record("pgd", seed=5)]
    groups = evaluated(only(records))
    assert [(evaluation, [entry.method for entry in entries]) for evaluation, entries in groups] == [
        ("fresh", ["sgd", "pgd"]),
        ("search", ["adamw"]),
    ]
    assert set(best_of_variants(only(records))) == {Variant("sgd"), Variant("adamw"), Variant("pgd")}
    assert not any(math.isnan(row.mean) for row in table_rows(only(records)))
