"""Screening: settings outside the paper's grid run briefly, and only the best of them are searched."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks import screening
from benchmarks.screening import Curve, _score, table
from made_records import record, results

from upgd.experiments import Results
from upgd.experiments.analysis import portable
from upgd.experiments.analysis.compare import edges
from upgd.experiments.execution import time_limit
from upgd.experiments.execution.jobs import whole
from upgd.experiments.execution.running import Options
from upgd.experiments.paper.catalogue import settings_of
from upgd.experiments.paper.pages import _at_edge, _computed, _how, _panel, _tried, write_page
from upgd.experiments.paper.pieces import piece, shipped
from upgd.experiments.paper.remaining import Remaining
from upgd.experiments.paper.reproduce import plan, reproduce, stored
from upgd.experiments.paper.statistics import resolution, survivors
from upgd.store import Store

SMALL = {"panels": ["weight-global"], "grid": "extended", "steps": 400, "shortlist": 2, "final_seeds": 2}
WITHOUT = plan("input-permuted-mnist", **SMALL)
PLAN = plan("input-permuted-mnist", **SMALL, screen=100)
UPGD = next(arm for arm in PLAN.arms() if arm.method == "upgd")
KEPT = 72  # a quarter of 375 − 90, rounded up


def level(one):
    """The best lr, 0.003, is between two values of the paper; of the others, larger is better."""
    return 0.5 - 10 * abs(one.lr - 0.003) - abs((one.sigma or 0.1) - 0.1) / 100


def compute(experiment):
    return results(experiment, level=level)


def settings_at(found, steps):
    """The settings of UPGD that ran for so many steps, as tuples."""
    return {
        tuple(sorted((name, str(value)) for name, value in one.key.settings.items()))
        for one in found.records
        if (one.key.method, one.key.seed, one.key.steps) == (UPGD.method, 0, steps)
        and one.key.network == PLAN.place(UPGD).network
    }


class TestPlan:
    def test_the_papers_settings_are_not_screened(self):
        papers = settings_of(UPGD, "paper")
        assert len(PLAN.settings(UPGD)) == len(WITHOUT.settings(UPGD)) == 375
        assert [one for one in PLAN.settings(UPGD) if one not in papers] == PLAN.screened(UPGD)
        assert PLAN.swept(UPGD) == papers  # until the screening is complete
        assert len(PLAN.expected().swept(UPGD)) == len(papers) + KEPT
        assert [experiment.steps for experiment in PLAN.screening()] == [100]
        assert {learner.seed for experiment in PLAN.screening() for learner in experiment.learners()} == {0}
        assert WITHOUT.screening() == []
        assert WITHOUT.swept(UPGD) == WITHOUT.settings(UPGD)

    @pytest.mark.parametrize(
        ("keep", "shortlist", "kept"),
        [(0.25, 5, 72), (0.2, 5, 57), (0.01, 5, 5), (0.01, 0, 3), (0.001, 0, 1), (0.07, 0, 20)],
    )
    def test_the_fraction_is_rounded_up_and_not_less_than_the_shortlist(self, keep, shortlist, kept):
        chosen = plan("input-permuted-mnist", **SMALL | {"shortlist": shortlist}, screen=100, keep=keep)
        assert len(chosen.expected().swept(UPGD)) == 90 + kept

    def test_a_product_that_is_a_whole_number_is_not_rounded_up(self):
        assert 0.07 * 100 > 7
        chosen = replace(PLAN, keep=0.07, shortlist=0)
        assert len(chosen.after_screening({UPGD: [{}] * 100}).kept[UPGD]) == 7

    def test_curves_that_would_keep_everything_are_not_screened(self):
        everything = plan("input-permuted-mnist", **SMALL, screen=100, keep=1)
        assert everything.screening() == []
        assert everything.swept(UPGD) == WITHOUT.settings(UPGD)
        toy = plan("toy-changing-inputs", grid="extended", screen=100)
        assert {arm.method for arm in toy.arms() if not toy.screened(arm)} == {
            "sgd"
        }  # three values of lr, shortlist of 5

    def test_lengths_by_problem(self):
        chosen = plan("ablation", grid="extended", screen={"output-permuted-cifar10": 1_000})
        assert {(one.problem, one.steps) for one in chosen.screening()} == {("output-permuted-cifar10", 1_000)}
        for arm in chosen.arms():
            assert bool(chosen.screened(arm)) <= (arm.problem == "output-permuted-cifar10")

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (
                {"grid": "paper", "screen": 9},
                "screen applies to the grid 'extended' only, not to 'paper'; choose that",
            ),
            (
                {"grid": "star", "screen": 9},
                "the grid 'extended' only, not to 'star'; choose that grid, or leave screen out",
            ),
            ({"screen": 9}, "screen applies to the grid 'extended' only, not to 'paper'"),
            ({"grid": "extended", "keep": 0.5}, "keep=0.5 applies to screened settings only; remove it, or set screen"),
            (
                {"grid": "extended", "screen": 9, "keep": 0},
                "keep must be a number above 0 and at most 1, not 0; use 0.25",
            ),
            ({"grid": "extended", "screen": 9, "keep": 1.5}, "keep must be a number above 0 and at most 1, not 1.5"),
            ({"grid": "extended", "screen": 9, "keep": float("nan")}, "keep must be a number above 0 .*, not nan"),
            ({"grid": "extended", "screen": 9, "keep": "a"}, "keep must be a number above 0 and at most 1, not 'a'"),
            ({"grid": "extended", "screen": 0}, "screen must be an integer of at least 1, not 0"),
            ({"grid": "extended", "screen": {"cifar10": 9}}, "screen: ablation has no problem 'cifar10'; choose among"),
            (
                {"grid": "extended", "screen": 1_000_000},
                "must be less than the 1,000,000 steps of the search on input-permuted-mnist, not 1,000,000; use fewer",
            ),
            (
                {"grid": "extended", "screen": {"output-permuted-cifar10": 200}, "sweep_steps": 100},
                "less than the 100 steps of the search on output-permuted-cifar10, not 200",
            ),
        ],
    )
    def test_mistakes_get_a_sentence(self, given, words):
        with pytest.raises(ValueError, match=words):
            plan("ablation", **given)


def test_the_best_of_the_screened_settings_are_searched():
    found = reproduce(PLAN, compute)
    assert (found.unscreened, found.unsearched, found.unlisted, found.missing) == (0, 0, 0, 0)
    screened, searched = settings_at(found, 100), settings_at(found, 400)
    assert (len(screened), len(searched), len(screened & searched)) == (285, 90 + KEPT, KEPT)
    assert {one["lr"] for one in found.plan.kept[UPGD]} == {0.003}  # 75 settings have it
    finding = found.findings[UPGD]
    assert finding.entry.settings["lr"] == finding.screened.entry.settings["lr"] == 0.003
    assert finding.papers.entry.settings["lr"] == 0.001
    assert finding.papers.screened is None
    assert (finding.tried, finding.best.tried, finding.papers.tried) == (375, 90 + KEPT, 90)
    assert all(found.searched(arm) for arm in PLAN.arms())
    assert len(survivors(found, UPGD)) == 90 + KEPT


def test_short_runs_decide_and_diverged_ones_are_last():
    def misleading(experiment):  # lr 0.0003 is best early, if σ is small; 0.003 is best late
        if experiment.steps == 400:
            return compute(experiment)
        diverged = {"diverged_at": lambda one: 50 if one.sigma and one.sigma > 0.1 else None}
        return results(experiment, level=lambda one: 0.9 if one.lr == 0.0003 else 0.1, **diverged)

    found = reproduce(PLAN, misleading)
    kept = found.plan.kept[UPGD]
    assert len(kept) == KEPT
    assert all(one["sigma"] <= 0.1 for one in kept)
    assert sum(one["lr"] == 0.0003 for one in kept) == 3 * 3 * 5  # β, σ up to 0.1, weight decay
    assert sorted({one["lr"] for one in kept}) == [0.0001, 0.0003, 0.001]  # equal scores: smaller lr first
    assert found.findings[UPGD].papers is None  # lr 0.003 was dropped
    assert found.searched(UPGD)


def test_all_stages_use_their_seeds_and_nothing_is_computed_twice():
    asked = []

    def watched(experiment):
        asked.extend((experiment.steps, learner) for learner in experiment.learners())
        return compute(experiment)

    said = []
    reproduce(PLAN, watched, said.append)
    assert len(asked) == len(set(asked))
    assert {one.seed for steps, one in asked if steps == 100} == {0}
    stages = [text.split(": ")[0] for text in said]
    assert stages == ["screening", "search", "best settings on fresh seeds", "final runs"]


class TestResuming:
    @pytest.fixture
    def store(self):
        with Store.write(":memory:") as store:
            yield store

    def test_nothing_is_chosen_from_a_part_of_the_screening(self, store):
        """Of UPGD's screening one run is missing; the others go on, and the paper's settings are shown."""
        everything = reproduce(PLAN, compute).records
        lost = next(one for one in everything if one.key.method == "upgd" and one.key.steps == 100)
        store.add(one for one in everything if one is not lost)
        found = reproduce(PLAN, stored(store))
        assert (found.unscreened, found.unsearched) == (1, KEPT)
        assert UPGD not in found.plan.kept
        assert found.plan.kept.keys() | {UPGD} == {arm for arm in PLAN.arms() if PLAN.screened(arm)}
        finding = found.findings[UPGD]
        assert finding.settings["lr"] == 0.001
        assert finding.tried == 90
        assert not found.searched(UPGD)
        assert sum(found.searched(arm) for arm in PLAN.arms()) == len(PLAN.arms()) - 1
        assert _tried(found, PLAN.panels[0])["UPGD"] == "90 of 375"
        assert "UPGD (" not in _at_edge(found).replace("UPGD, non-protecting (", "")
        lines = "\n".join(_how(found, "…"))
        assert "Not finished: 1 learners of the screening are missing" in lines
        assert f"Not finished: {KEPT} learners of the search are missing" in lines
        rest = Remaining(PLAN, store)
        counts = {name: (rest.stage(name).learners, rest.stage(name).wanted) for name in rest.stages}
        assert counts["screening"][0] == 1
        assert counts["search"][0] == KEPT
        store.add([lost])
        assert reproduce(PLAN, stored(store)).plan == reproduce(PLAN, compute).plan
        rest = Remaining(PLAN, store)
        assert [rest.stage(name).learners for name in rest.stages] == [0, 0, 0, 0]

    def test_what_is_left_before_the_first_run(self, store):
        nothing = reproduce(PLAN, stored(store))
        screened = sum(len(PLAN.screened(arm)) for arm in PLAN.arms())
        searched = sum(len(PLAN.expected().swept(arm)) for arm in PLAN.arms())
        assert (nothing.unscreened, nothing.unsearched, nothing.findings) == (screened, searched, {})
        rest = Remaining(PLAN, store)
        assert rest.stages == ("screening", "search", "shortlist", "final runs")
        assert [rest.stage(name).learner_steps for name in rest.stages[:2]] == [screened * 100, searched * 400]
        assert Remaining(WITHOUT, store).stages == ("search", "shortlist", "final runs")

    def test_a_plan_without_screening_is_unaffected(self, store):
        store.add(reproduce(PLAN, compute).records)
        without = reproduce(WITHOUT, stored(store))
        assert {one.key.steps for one in without.records} == {400}
        dropped = sum(reproduce(PLAN, compute).plan.dropped(arm) for arm in PLAN.arms())
        assert (without.unscreened, without.unsearched) == (0, dropped)
        whole_search = reproduce(WITHOUT, compute)
        store.add(whole_search.records)
        complete, compared = reproduce(WITHOUT, stored(store)), whole_search.findings[UPGD]
        assert complete.findings[UPGD].best.neighbours == compared.best.neighbours
        assert complete.findings[UPGD].tried == 375

    def test_full_runs_of_dropped_settings_are_not_results(self, store):
        """Another plan computed them; the results do not depend on what else is in the store."""
        store.add(reproduce(WITHOUT, compute).records)
        store.add(reproduce(PLAN, compute).records)
        found = reproduce(PLAN, stored(store))
        assert found.findings[UPGD].best.tried == 90 + KEPT
        assert found.unsearched == found.missing == 0

    def test_a_grid_without_the_papers_values_waits_for_its_screening(self, store):
        study = plan("input-permuted-mnist", **SMALL, only={"lr": [0.003]}, methods=["pgd"], screen=100)
        (arm,) = study.arms()
        assert study.swept(arm) == []
        calls = []

        def nothing(experiment):
            calls.append(len(experiment.learners()))
            return Results([])

        found = reproduce(study, nothing)
        assert calls == [5]  # no empty search
        assert (found.unscreened, found.unsearched, found.findings) == (5, 2, {})
        assert reproduce(study, compute).findings[arm].tried == 5


class TestRealRuns:
    """PGD on the embedded digits: 43 of 63 settings are screened."""

    STUDY = plan(
        *("upgd-stationary-mnist", "smoke"),
        **{"panels": ["weight-global"], "methods": ["pgd"], "grid": "extended", "screen": 40, "steps": 80},
        **{"shortlist": 2, "shortlist_seeds": 2},
    )

    def test_pieces_from_files_alone_give_the_results_of_a_whole_study(self, tmp_path, monkeypatch):
        (arm,) = self.STUDY.arms()
        at_once, finished = piece(self.STUDY, tmp_path / "whole", Options(backend="torch"))
        assert finished
        assert (at_once.unscreened, at_once.unsearched, at_once.missing) == (0, 0, 0)
        assert (at_once.findings[arm].tried, at_once.findings[arm].best.tried) == (63, 20 + 11)
        ticks = itertools.count()
        monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
        states = []
        for _ in range(100):  # each has its own store, and stops after a few jobs
            found, finished = piece(self.STUDY, tmp_path / "data", Options(backend="torch", stop_after=20, job_size=8))
            states.append((found.unscreened, found.unsearched))
            if finished:
                break
        assert finished
        assert sum(unscreened > 0 for unscreened, _ in states) > 0  # stopped during the screening
        assert (
            sum(unscreened == 0 < unsearched for unscreened, unsearched in states) > 0
        )  # stopped before the search ended
        assert found.plan == at_once.plan == shipped(self.STUDY, tmp_path / "data").plan
        name = "stationary-digits.csv.gz"
        assert (tmp_path / "data" / name).exists()
        pieces, whole_study = (portable.read(tmp_path / where / name) for where in ("data", "whole"))
        assert [(one.key, one.loss.tolist()) for one in pieces] == [(one.key, one.loss.tolist()) for one in whole_study]
        assert {one.key.steps for one in pieces} == {40, 80}

    def test_interrupted_between_screening_and_search(self, tmp_path):
        screening = whole(self.STUDY.screening()[0])
        at_once, _ = piece(self.STUDY, tmp_path / "whole", Options(backend="torch"))
        only = [one for one in at_once.records if one.key.digest in screening.digests]
        (tmp_path / "data").mkdir()
        portable.write(tmp_path / "data" / "stationary-digits.csv.gz", only)
        halfway = shipped(self.STUDY, tmp_path / "data")
        assert (halfway.unscreened, halfway.unsearched, halfway.findings) == (0, 20 + 11, {})
        assert halfway.plan == at_once.plan
        found, finished = piece(self.STUDY, tmp_path / "data", Options(backend="torch"))
        assert finished
        (arm,) = self.STUDY.arms()
        for seed, one in found.findings[arm].entry.records.items():
            np.testing.assert_array_equal(one.loss, at_once.findings[arm].entry.records[seed].loss)


class TestPages:
    def test_all_settings_count_as_tried_and_the_screening_is_a_sentence(self, tmp_path):
        found = reproduce(PLAN, compute)
        every = sum(len(PLAN.settings(arm)) for arm in PLAN.arms())
        screened = sum(len(PLAN.screened(arm)) for arm in PLAN.arms())
        kept = sum(map(len, found.plan.kept.values()))
        lines = "\n".join(_how(found, "…"))
        assert f"Search: {every:,} settings, 1 run each." in lines
        assert (
            f" {screened:,} of the settings, all outside the paper's grid, were screened in runs of 100 steps: the best 25% "
            f"of each curve (at least 2) then ran at full length, and the other {screened - kept:,} did not. The best 2 "
            "and the best 2 in the paper's grid were run again on fresh seeds"
        ) in lines
        assert "Not finished" not in lines
        assert _tried(found, PLAN.panels[0])["UPGD"] == "375"
        assert _computed(found).startswith(f"Computed: weight-wise, global: {every:,} settings, ")
        searched = sum(len(found.plan.swept(arm)) for arm in PLAN.arms())
        assert f"None of the {searched:,} runs of the search diverged." in _panel(found, PLAN.panels[0])
        page = write_page(found, tmp_path, "…").read_text(encoding="utf-8")
        assert "Neighbours may have run in the screening only" in page
        assert "screen" not in "\n".join(_how(reproduce(WITHOUT, compute), "…"))

    def test_lengths_by_problem(self):
        problems = {"input-permuted-mnist": 20, "output-permuted-cifar10": 40}
        study = plan(
            *("ablation", "smoke"),
            **{"panels": ["mnist-no-decay", "cifar10-no-decay"], "grid": "extended", "screen": problems, "steps": 80},
        )
        lines = "\n".join(_how(reproduce(study, compute), "…"))
        assert (
            "in runs of 20 steps on input-permuted-mnist and 40 steps on output-permuted-cifar10: the best 25%" in lines
        )

    def test_values_that_were_only_screened_are_not_beyond_the_edge(self):
        """On EMNIST the extended grid has a σ of 0.001, below the paper's; all settings with it are dropped."""
        study = plan(
            *("output-permuted-emnist", "paper"),
            **SMALL | {"methods": ["pgd"], "shortlist": 0},
            **{"data": {"emnist": "digits"}, "screen": 100},
        )
        (arm,) = study.arms()
        sigmas = sorted({one["sigma"] for one in study.settings(arm)})
        smallest = min(one["sigma"] for one in settings_of(arm, "paper"))
        assert sigmas[0] < smallest

        def larger(experiment):  # the paper's smallest σ is best late; early, large ones are
            sign = 1 if experiment.steps == 100 else -1
            return results(experiment, level=lambda one: 0.5 + sign * one.sigma / 10 - abs(one.lr - 0.003))

        found = reproduce(study, larger)
        finding = found.findings[arm]
        assert finding.settings["sigma"] == smallest
        assert "sigma" in finding.best.edges
        assert "sigma" not in edges(finding.settings, study.settings(arm))
        assert "σ" not in _at_edge(found)
        assert f"σ {smallest:g}\\*" not in _panel(found, study.panels[0])

    def test_the_resolution_uses_neighbours_of_the_screening(self):
        found = reproduce(PLAN, compute)
        finding = found.findings[UPGD]
        best, screened = finding.best, finding.screened
        assert screened.neighbours.keys() >= {"sigma"}
        assert resolution(best, screened) >= max(resolution(best), resolution(screened))
        alone = replace(best, score=0.5, neighbours={"lr": {0.1: 0.4}})
        early = replace(best, score=0.3, neighbours={"lr": {0.1: 0.28}, "sigma": {1.0: 0.26}})
        assert resolution(alone, early) == pytest.approx(0.1 / 8 + 0.04 / 8)


class TestBenchmark:
    def test_ranks_after_the_first_quarter(self):
        loss = [record(level=level, windows=4, window=10, regression=True) for level in (0.2, 0.6)]
        assert _score(loss[0], "loss", 0.25) == pytest.approx(0.9)
        assert _score(loss[1], "loss", 0.25) == pytest.approx(0.7)
        accuracy = [record(level=level, windows=8, window=5) for level in (0.2, 0.6)]
        assert _score(accuracy[1], "accuracy", 0.25) < _score(accuracy[0], "accuracy", 0.25) < 0
        assert _score(record(diverged_at=9), "accuracy", 0.25) == math.inf
        assert _score(record(diverged_at=10), "accuracy", 0.25) == _score(record(), "accuracy", 0.25)

    def test_ranks_by_shorter_runs(self, monkeypatch):
        runs = [record(windows=4, seed=seed) for seed in range(2)]
        shorter = record(windows=1, seed=1)
        monkeypatch.setattr(screening, "_shipped", lambda problem: {shorter.key.digest: shorter})
        assert screening._of_length(runs, 10) == [shorter]
        assert screening._of_length(runs, 20) == []

    def test_what_a_screening_would_have_kept(self):
        curve = Curve("study", "curve", 40, [1, 11, 3, 10, 2])
        assert curve.share == 11 / 40
        assert curve.kept(0.25) == [True, False, True, True, True]
        assert curve.kept(0.26) == [True] * 5
        small = Curve("study", "small", 9, [5, 4, 3, 2, 1])
        assert all(small.kept(0.25))
        text = table([curve, small])
        assert (
            "1 curves with at least 40 settings: the best 5 rank among the best 27.5% after the first quarter." in text
        )
        assert "keeps all of them on 0 curves, and the best one on 1." in text
        assert "after 100 steps. A screening that keeps 30%" in table([curve], 0.3, "100 steps")
