"""Pages: all numbers are generated, and they state how much of the paper was run, and how."""

import re
from dataclasses import replace

import numpy as np
import pytest
from made_records import results

from upgd.data import load
from upgd.experiments import Results
from upgd.experiments.analysis.compare import holm
from upgd.experiments.paper.drawing import draw
from upgd.experiments.paper.notes import filled
from upgd.experiments.paper.pages import (
    _at_edge,
    _computed,
    _data,
    _devices,
    _differences,
    _how,
    _panel,
    _scale,
    _shorter_search,
    _tried,
    write_page,
)
from upgd.experiments.paper.reproduce import PAPERS, plan, reproduce
from upgd.experiments.paper.statistics import against_all
from upgd.store import Key, Record


def test_numbers_are_the_records(tmp_path):
    def compute(experiment):
        return results(experiment, level=lambda one: len(one.method) / 100, regression=lambda _: True)

    found = reproduce(plan("toy-changing-outputs", "smoke", panels=["weight-global"]), compute)
    (tmp_path / "toy-changing-outputs.notes.md").write_text("We agree.\n", encoding="utf-8")
    page = write_page(found, tmp_path, "upgd reproduce toy-changing-outputs --scale smoke").read_text(encoding="utf-8")
    for finding in found.findings.values():
        scores = [one.loss.astype(np.float64).mean() for one in finding.entry.records.values()]
        reach = 12.7062 * np.std(scores, ddof=1) / np.sqrt(2)  # t of one degree of freedom
        line = next(line for line in page.splitlines() if f". {finding.arm.name} | lr" in line)
        assert f"| {np.mean(scores):.4f} ± {reach:.4f} (2) |" in line
    assert "\nWe agree.\n" in page
    assert "Command: `upgd reproduce toy-changing-outputs --scale smoke`" in page
    for ending in ("png", "svg", "pdf"):
        assert (tmp_path / f"toy-changing-outputs-weight-global.{ending}").stat().st_size > 5_000


def test_p_is_corrected_for_the_number_of_tests():
    def compute(experiment):  # differences between methods that depend on the seed
        return results(experiment, level=lambda one: 0.5 + len(one.method) / 200 * (1 + one.seed % 2))

    found = reproduce(plan("upgd-stationary-mnist", "smoke", panels=["weight-global"], final_seeds=6), compute)
    every = against_all(found, found.plan.panels[0])
    assert len(every) == 15  # of six curves
    corrected = holm([one.pair.p for one in every])
    assert [one.pair.p_holm for one in every] == corrected
    assert any(one.pair.p < 0.01 < one.pair.p_holm for one in every)
    (matrix,) = _differences(found, found.plan.panels[0])
    for one in every:
        difference = f"{one.pair.difference:+.4f} ± {one.pair.reach:.4f}".replace("-", "−")
        insignificant = one.pair.p_holm >= 0.05
        cell = f"{difference} (p {one.pair.p_holm:.2f}) =" if insignificant else f"**{difference}**"
        assert cell in matrix


class TestNotes:
    @pytest.fixture
    def found(self):
        def compute(experiment):
            return results(experiment, level=lambda one: one.lr)

        settings = {"grid": "paper", "only": {"sigma": (0.01,), "beta_utility": (0.9,)}}
        return reproduce(plan("upgd-stationary-mnist", "smoke", panels=["weight-global"], **settings), compute)

    def test_name_numbers_of_the_table_and_of_the_search(self, found):
        row = dict(found.rows(found.plan.panels[0]))["UPGD"]
        text = filled(
            "UPGD {{weight-global | UPGD}}, at the end {{weight-global|UPGD|last quarter}}, {not this}", found
        )
        assert text == f"UPGD {row.mean:.4f}, at the end {row.last_quarter:.4f}, {{not this}}"
        assert row.entry.settings["lr"] == 0.1
        # Straight lines from half of lr to lr, and the search has seed 0.
        assert filled("{{weight-global | UPGD | lr 0.01}}", found) == "0.0075"

    @pytest.mark.parametrize("name", ["weight-locl | UPGD", "weight-global | UPGT", "weight-global | UPGD | lr 7"])
    def test_the_error_about_an_unknown_number_names_it(self, found, name):
        wrong = name.split(" | ")[-1]
        with pytest.raises(ValueError, match=rf"the notes refer to .*{wrong}.*; use one of "):
            filled(f"{{{{{name}}}}}", found)

    def test_differences_have_intervals(self, found):
        every = {(one.first, one.second): one.pair for one in against_all(found, found.plan.panels[0])}
        pair = every["UPGD", "SGD"] if ("UPGD", "SGD") in every else every["SGD", "UPGD"]
        text = filled("{{weight-global | SGD - UPGD}}", found)
        assert text.startswith(
            f"{-pair.difference if ('UPGD', 'SGD') in every else pair.difference:+.4f} ± ".replace("-", "−")
        )

    @pytest.mark.parametrize("inside", [True, False])
    def test_the_best_setting_of_the_papers_grid_has_a_name(self, inside):
        """Even if it is the best of all, and therefore has no row of its own."""

        def compute(experiment):  # 0.1 is in the paper's grid, 0.03 between its values
            return results(experiment, level=lambda one: 0.5 - abs(one.lr - (0.1 if inside else 0.03)))

        settings = {"grid": "extended", "only": {"sigma": (0.01,), "beta_utility": (0.9,)}}
        found = reproduce(plan("upgd-stationary-mnist", "smoke", panels=["weight-global"], **settings), compute)
        rows, text = dict(found.rows(found.plan.panels[0])), "{{weight-global | UPGD, paper's grid}}"
        assert ("UPGD, paper's grid" in rows) == (not inside)
        assert filled(text, found) == f"{rows['UPGD' if inside else text[18:-2]].mean:.4f}"
        assert filled("{{weight-global | SGD - UPGD, paper's grid}}", found).count("±") == 1
        if not inside:  # 0.01 is the best of the paper's grid, and has a neighbour in the extended one
            assert filled("{{weight-global | UPGD, paper's grid | lr 0.03}}", found) == "0.3750"
            assert _tried(found, found.plan.panels[0])["UPGD, paper's grid"] == "4"

    @pytest.fixture
    def extended(self):
        """UPGD's best setting is outside the paper's grid, those of the other methods are in it."""

        def compute(experiment):
            return results(experiment, level=lambda one: 0.5 - abs(one.lr - (0.03 if one.method == "upgd" else 0.1)))

        settings = {"grid": "extended", "only": {"sigma": (0.01,), "beta_utility": (0.9,)}, "panels": ["weight-global"]}
        return reproduce(plan("upgd-stationary-mnist", "smoke", **settings), compute)

    def test_differences_are_between_settings_of_the_same_grid(self, extended):
        (panel,) = extended.plan.panels
        rows = [f"{number}. {name}" for number, (name, _) in enumerate(extended.rows(panel), 1)]
        best, papers = _differences(extended, panel)
        assert best.startswith("Differences between the best of all settings (bold: significant; =: level; ")
        assert papers.startswith("Differences between the best settings in the paper's grid (bold: ")
        outside, inside = (next(row for row in rows if row.endswith(f". UPGD{which}")) for which in ("", PAPERS))
        for table, left_out in ((best, inside), (papers, outside)):
            shown = [row for row in rows if row != left_out]
            head, _, *lines = (line.strip("|").split("|") for line in table.splitlines()[2:])
            assert [cell.strip() for cell in head[1:]] == [row.partition(".")[0] for row in shown[1:]]
            assert [line[0].strip() for line in lines] == shown[:-1]
            for number, line in enumerate(lines):
                assert [not cell.strip() for cell in line[1:]] == [column < number for column in range(len(shown) - 1)]

    def test_the_best_setting_of_the_papers_grid_is_a_thin_line_without_a_name(self, extended):
        (axes,) = draw(extended)["weight-global"].axes
        lines = {line.get_label(): line for line in axes.lines}
        thin, wide = lines["UPGD, paper's grid"], lines["UPGD"]
        assert thin.get_linewidth() < wide.get_linewidth()
        assert thin.get_color() == wide.get_color()
        assert [name for name in lines if name.endswith("paper's grid")] == ["UPGD, paper's grid"]
        assert {text.get_text() for text in axes.texts} >= {"UPGD", "SGD"}
        assert "UPGD, paper's grid" not in {text.get_text() for text in axes.texts}
        low, high = axes.get_ylim()
        assert low < min(thin.get_ydata()) < max(thin.get_ydata()) < high

    def test_paragraphs_without_their_numbers_are_left_out(self, found):
        one, *_ = found.plan.arms()
        partial = replace(found, findings={arm: own for arm, own in found.findings.items() if arm != one})
        assert one.name == "UPGD"
        assert filled("First.\n\nUPGD {{weight-global | UPGD}}.\n\nLast.", partial) == "First.\n\nLast."


def test_the_page_states_how_much_is_computed():
    study = plan("upgd-stationary-mnist", "smoke", panels=["weight-global", "weight-local"])
    assert _computed(reproduce(study, lambda _: Results([]))) == (
        "Not computed: weight-wise, global; weight-wise, local. "
    )

    def some(experiment):  # nothing of UPGD, and one run of SGD's search
        everything = results(experiment).records
        own = [one for one in everything if one.key.method != "upgd"]
        return Results([one for one in own if one.key.method != "sgd" or one.key.settings["lr"] == 0.01])

    assert _computed(reproduce(replace(study, panels=study.panels[:1]), some)) == (
        "Computed: weight-wise, global: 7 of 12 settings, 8 of 12 final runs "
        "(settings of UPGD: 0 of 2; SGD: 1 of 2; SGD, half steps: 0 of 2). "
    )

    def others(experiment):
        return Results([one for one in results(experiment).records if not one.key.method.startswith("upgd")])

    found = reproduce(replace(study, panels=study.panels[:1]), others)
    assert _computed(found) == "Not computed: weight-wise, global. "
    assert found.panel(study.panels[0]) == (None, [])
    only = plan("upgd-stationary-mnist", "smoke", panels=["weight-global"], methods=["sgd"])
    assert _computed(reproduce(only, results)) == "Computed: weight-wise, global: 4 settings, 4 final runs. "
    both = plan("upgd-stationary-mnist", "smoke", panels=["weight-global", "weight-local"], methods=["sgd"])
    assert _computed(reproduce(both, results)) == "Computed, for each panel: 4 settings, 4 final runs. "

    def less(experiment):  # one learning rate with local scaling
        own = [(one, one.key.settings) for one in results(experiment).records]
        return Results([one for one, settings in own if settings.get("scaling") != "local" or settings["lr"] == 0.01])

    assert _computed(reproduce(study, less)) == (
        "Computed:\n\n- weight-wise, global: 12 settings, 12 final runs\n"
        "- weight-wise, local: 10 of 12 settings, 12 final runs (settings of UPGD: 1 of 2; UPGD, non-protecting: 1 of 2)\n\n"
    )


class TestUnfinished:
    PLAN = plan("upgd-stationary-mnist", "smoke", panels=["weight-global"])

    def test_a_panel_without_final_runs_shows_its_search(self):
        def search(experiment):
            return Results([one for one in results(experiment, level=lambda one: one.lr).records if one.key.seed == 0])

        text = _panel(reproduce(self.PLAN, search), self.PLAN.panels[0])
        assert "The search is finished, and the final runs are not computed." in text
        assert "by online accuracy over all steps, one run each; stationary-digits, task_length 40, " in text
        # Straight lines from half of lr to lr.
        assert "| UPGD | lr 0.01\\*, β 0.999, σ 0.1, wd 0 | 2 | 0.0075 |" in text
        assert ".svg" not in text

        def part(experiment):
            return Results([one for one in search(experiment).records if one.key.method not in ("sgd", "upgd")])

        text = _panel(reproduce(self.PLAN, part), self.PLAN.panels[0])
        missing = "UPGD 0 of 2, SGD 0 of 2, SGD, half steps 0 of 2"
        assert f"The search is unfinished (settings of {missing}), and the final runs are not computed." in text

    def test_curves_without_final_runs_are_named(self):
        def some(experiment):
            return Results([one for one in results(experiment).records if one.key.seed == 0 or one.key.method != "pgd"])

        text = _panel(reproduce(self.PLAN, some), self.PLAN.panels[0])
        assert (
            "Not in the table, because their final runs are not computed: PGD (best of 2 settings in the search: lr 0.001, "
            "σ 0.1)." in text
        )
        assert "Not in the table" not in _panel(reproduce(self.PLAN, results), self.PLAN.panels[0])

    def test_a_choice_among_too_few_runs_is_named(self):
        study = plan("upgd-stationary-mnist", "smoke", panels=["weight-global"], shortlist=2, shortlist_seeds=2)

        def some(experiment):  # of the shortlist of PGD, seeds 1 and 2 of two settings, one run is missing
            lost = ("pgd", 2, 0.01)
            every = [(one, one.key) for one in results(experiment).records]
            return Results([one for one, key in every if (key.method, key.seed, key.settings["lr"]) != lost])

        found = reproduce(study, some)
        assert (found.unsearched, found.unlisted, found.missing) == (0, 1, 0)
        said = "Not finished: the shortlist on fresh seeds lacks 1 run; another setting may be chosen."
        assert said in _how(found, "…")
        assert reproduce(study, results).unlisted == reproduce(self.PLAN, results).unlisted == 0


def test_the_page_compares_its_scale_with_the_paper():
    assert _scale(plan("toy-changing-inputs")) == (
        "Scale: 20 runs of 1,000,000 steps for each curve (as in the paper). "
        "Settings tried: all combinations of the paper's values."
    )
    less = _scale(plan("toy-changing-inputs", steps=100_000, final_seeds=10, grid="coarse"))
    assert "10 runs of 100,000 steps for each curve (in the paper 20 of 1,000,000)" in less
    assert less.endswith("Settings tried: a handful of combinations of the paper's values.")
    assert _scale(plan("ablation")).startswith(
        "Scale: 20 runs of 1,000,000 steps for each curve on input-permuted-mnist and output-permuted-emnist (as in the "
        "paper); 10 runs of 1,000,000 steps for each curve on output-permuted-cifar10 (as in the paper). "
    )
    some = _scale(plan("toy-changing-inputs", only={"sigma": (0.1, 0.01)}))
    assert some.endswith("values, limited to σ 0.1, σ 0.01.")


def test_learners_that_all_diverged_have_no_numbers(tmp_path):

    def compute(experiment):
        return results(experiment, diverged_at=lambda one: 30 if one.method == "pgd" else None)

    found = reproduce(plan("upgd-stationary-mnist", "smoke", panels=["weight-global"]), compute)
    page = write_page(found, tmp_path, "…").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("| 6. PGD |"))
    assert line.endswith("| – (0) | – | – | 2 of 2 |")
    assert "2 of 12 runs of the search diverged (PGD 2 of 2):" in page
    assert (tmp_path / "upgd-stationary-mnist-weight-global-survival.svg").exists()


def test_the_page_lists_values_at_the_edge():
    def compute(experiment):  # the larger σ, the better, except for what is scaled locally; the step size in the middle
        def level(one):
            return (1 - abs(one.lr - 0.01)) * (0.5 if one.scaling == "local" else 0.5 + 0.1 * (one.sigma or 0))

        return results(experiment, level=level)

    panels = {"panels": ["weight-global", "weight-local"], "grid": "paper", "only": {"beta_utility": (0.9,)}}
    at_edge = _at_edge(reproduce(plan("upgd-stationary-mnist", "smoke", **panels), compute))
    everywhere, in_one_panel = at_edge.split("; weight-wise, global: ")
    assert "PGD (σ)" in everywhere
    assert "weight-wise" not in everywhere
    assert in_one_panel.startswith("UPGD (σ), UPGD, non-protecting (σ)")
    assert "lr" not in at_edge


def test_values_are_at_the_edge_only_of_a_complete_search():
    def compute(experiment):  # lacks the settings of SGD with the largest learning rate
        found = results(experiment, level=lambda one: 0.5 + one.lr).records
        return Results([one for one in found if one.key.method != "sgd" or one.key.settings["lr"] < 0.1])

    found = reproduce(plan("toy-changing-inputs", "smoke", grid="paper", panels=["weight-global"]), compute)
    best = {arm.method: finding.best for arm, finding in found.findings.items()}
    assert "lr" in best["sgd"].edges
    assert "lr" in best["pgd"].edges
    assert "PGD (lr" in _at_edge(found)
    assert "SGD" not in _at_edge(found)
    table = _panel(found, found.plan.panels[0])
    assert re.search(r"\d\. PGD \| lr [\d.]+\\\*", table)
    assert re.search(r"\d\. SGD \| lr [\d.]+ \|", table)


def test_work_is_stated_by_device():
    def run(seed, device, seconds, diverged_at=None):
        key = Key(problem="p", network="8", method="sgd", settings={"lr": 0.1}, seed=seed, steps=1_000)
        return Record(key, 1_000, [1.0], device=device, seconds=seconds, diverged_at=diverged_at)

    runs = [run(0, "cpu", 90.0), run(1, "Fast", 2.0), run(2, "Fast", 3.0, diverged_at=500)]
    assert _devices(runs) == (
        "Fast: 2 runs, 1,500 learner-steps in 5 s; on CPU: 1 run, 1,000 learner-steps in 1 min 30 s, "
        "summed over all processes"
    )
    assert _devices([]) == "nothing yet"


def test_data_are_named_with_their_checksum():
    assert _data(["toy-changing-inputs"]) == []
    (line,) = _data(["stationary-digits", "input-permuted-digits"])
    assert f"{len(load('digits').labels):,} images, SHA-256" in line


class TestShorterSearch:
    def test_one_length(self):
        assert _shorter_search(plan("ablation")) == _shorter_search(plan("ablation", sweep_steps=2_000_000)) == ""
        assert _shorter_search(plan("ablation", sweep_steps=300_000)) == (
            " **Settings were chosen by runs of 300,000 steps instead of 1,000,000:** "
            "the best setting early need not be the best late."
        )

    def test_different_lengths_are_listed_by_problem(self):
        assert _shorter_search(plan("ablation", sweep_steps={"output-permuted-cifar10": 300_000})) == (
            " **Settings were chosen by runs of all 1,000,000 steps on input-permuted-mnist and output-permuted-emnist; of "
            "300,000 steps instead of 1,000,000 on output-permuted-cifar10:** the best setting early need not be the best "
            "late."
        )
        # the scale gives CIFAR-10 shorter runs, which the search does not shorten
        assert (
            "of 5,000 steps instead of 10,000 on input-permuted-mnist and output-permuted-emnist; of all 2,500 steps"
            in (_shorter_search(plan("ablation", "small", sweep_steps=5_000)))
        )

    def test_only_of_the_panels_that_are_shown(self):
        for panel, words in (("mnist-decay", ""), ("cifar10-decay", "runs of 300,000 steps instead of 1,000,000:")):
            said = _shorter_search(plan("ablation", panels=[panel], sweep_steps={"output-permuted-cifar10": 300_000}))
            assert words in said
            assert bool(words) == bool(said)

    def test_a_problem_keeps_its_name_with_substituted_data(self):
        """At this scale EMNIST and CIFAR-10 are the same digits, but not the same length."""
        said = _shorter_search(plan("ablation", "smoke", sweep_steps={"output-permuted-cifar10": 30}))
        assert (
            "of all 80 steps on input-permuted-mnist and output-permuted-emnist; of 30 steps instead of 80 on" in said
        )
