"""The paper's experiments: complete, with a fair choice of settings, resumable, and with generated numbers."""

import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from made_records import results

from upgd.experiments import run
from upgd.experiments.execution.jobs import whole
from upgd.experiments.paper import best_known
from upgd.experiments.paper.catalogue import SCALES, STUDIES, Arm, settings_of
from upgd.experiments.paper.remaining import Remaining
from upgd.experiments.paper.reproduce import plan, reproduce, stored
from upgd.experiments.spec import defaults
from upgd.store import Store

SWEEPS = [name for name, study in STUDIES.items() if study.panels]
NOT_NEEDED = {"cyclopts", "matplotlib", "numba", "pandas", "plotly", "pooch", "ray", "rich", "scipy", "sklearn"}
SMALLEST = {"scale": "smoke", "panels": ["weight-white"], "steps": 40}


def test_every_experiment_of_the_paper_is_there():
    assert list(STUDIES) == [
        "utility-quality",
        "ups-stationary-mnist",
        "upgd-stationary-mnist",
        "toy-changing-inputs",
        "toy-changing-inputs-average",
        "toy-changing-outputs",
        "toy-changing-outputs-average",
        "input-permuted-mnist",
        "output-permuted-emnist",
        "output-permuted-cifar10",
        "output-permuted-cifar10-authors",
        "ablation",
        "perturbation",
    ]
    panels = {name: len(study.panels) for name, study in STUDIES.items()}
    assert panels == dict(zip(STUDIES, (0, 4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 6, 6), strict=True))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", SWEEPS)
def test_every_curve_has_settings_that_a_learner_can_have(name, scale):
    chosen = plan(name, scale)
    for arm in chosen.arms():
        tried = settings_of(arm, chosen.grid)
        assert len({repr(sorted(settings.items())) for settings in tried}) == len(tried) > 0
        for switch, values in arm.fixed:
            assert {settings[switch] for settings in tried} <= set(values)
    assert sum(len(experiment.learners()) for experiment in chosen.sweep()) > 0


@pytest.mark.parametrize(
    ("study", "method", "settings"),
    [  # products of the grids in the paper's appendix
        ("input-permuted-mnist", "upgd", 3 * 2 * 3 * 5),
        ("input-permuted-mnist", "sgdw", 3 * 5),
        ("input-permuted-mnist", "pgd", 3 * 3),
        ("input-permuted-mnist", "adamw", 3 * 5 * 6 * 3),
        ("toy-changing-inputs", "upgd", 4 * 4 * 5),
        ("ups-stationary-mnist", "ups", 5 * 5),
        ("ups-stationary-mnist", "ups-even", 5),
    ],
)
def test_the_papers_scale_has_the_papers_grid(study, method, settings):
    arm = next(arm for arm in STUDIES[study].arms() if arm.method == method)
    assert len(settings_of(arm, "paper")) == settings


@pytest.mark.parametrize("problem", best_known.BEST_KNOWN)
def test_the_coarse_grid_has_the_learning_rate_that_each_method_is_known_to_need(problem):
    for arm in STUDIES[problem].arms():
        best = best_known.BEST_KNOWN[problem][arm.method]
        assert best["lr"] in {settings["lr"] for settings in settings_of(arm, "coarse")}, arm.method


def test_the_ablation_splits_the_grid_by_weight_decay():
    for panel in STUDIES["ablation"].panels:
        for arm in panel.arms:
            decays = {settings.get("weight_decay", 0.0) for settings in settings_of(arm, "paper")}
            assert (0.0 in decays) == panel.key.endswith("no-decay")
            assert len(decays) == (1 if panel.key.endswith("no-decay") else 4)


@pytest.mark.parametrize("method", ["upgd", "upgd-nonprotecting", "adamw", "sgdw", "shrink-and-perturb"])
@pytest.mark.parametrize("problem", best_known.BEST_KNOWN)
def test_the_ablation_draws_from_the_pool_of_the_problems_own_study(problem, method):
    """With and without weight decay together, a method has the same settings and seeds as in its own study."""

    def runs(study, keys):
        chosen = plan(study, "paper", panels=keys)
        arms = [arm for arm in chosen.arms() if (arm.problem, arm.method) == (problem, method)]
        return {digest for experiment in chosen.sweep(arms) for digest in whole(experiment).digests}

    key = problem.rpartition("-")[2]
    ablation = runs("ablation", [f"{key}-decay", f"{key}-no-decay"])
    if method in ("sgdw", "shrink-and-perturb"):  # without decay they are called SGD and PGD
        assert ablation < runs(problem, ["weight-global"])
    else:
        assert ablation == runs(problem, ["weight-global"])


def test_protection_without_perturbation_has_upgds_settings():
    for panel in STUDIES["perturbation"].panels:
        upgd, still, _ = (settings_of(arm, "paper") for arm in panel.arms)
        assert {one["sigma"] for one in still} == {0.0}
        assert len(still) == len({repr({**one, "sigma": 0.0}) for one in upgd})


def test_half_the_step_sizes_and_half_the_amplitude():
    (half,) = (arm for arm in STUDIES["upgd-stationary-mnist"].arms() if arm.label == "SGD, half steps")
    assert [one["lr"] for one in settings_of(half, "paper")] == [0.05, 0.005, 0.0005, 0.00005]
    (experiment, *_) = plan("toy-changing-inputs-average").sweep()
    assert experiment.options == {"amplitude": 0.5}
    assert (experiment.problem, experiment.steps) == ("toy-changing-inputs", 1_000_000)
    (experiment,) = plan("output-permuted-cifar10-authors").sweep()
    assert (experiment.problem, experiment.network) == ("output-permuted-cifar10", "conv-authors")


def test_a_star_differs_from_the_known_setting_in_one_place():
    arm = next(arm for arm in STUDIES["output-permuted-emnist"].arms() if arm.method == "upgd")
    known = best_known.BEST_KNOWN["output-permuted-emnist"]["upgd"]
    star = settings_of(arm, "star")
    assert {name: star[0][name] for name in known} == known
    for settings in star[1:]:
        assert sum(settings[name] != star[0][name] for name in settings) == 1
    assert len(star) == 1 + 2 + 2 + 3 + 4  # lr, β and σ (whose known values the grid lacks), weight decay


def test_features_have_a_star_around_their_own_best_too():
    weights, features = (
        settings_of(arm, "star")
        for wise in ("weight", "feature")
        for arm in STUDIES["output-permuted-emnist"].arms([f"{wise}-global"])
        if arm.method == "upgd"
    )
    own = best_known.FEATURES["output-permuted-emnist"]["upgd"]
    assert [settings | {"granularity": "feature"} for settings in weights] == features[: len(weights)]
    assert {name: features[len(weights)][name] for name in own} == own
    assert own not in [{name: settings[name] for name in own} for settings in weights]


@pytest.mark.parametrize("study", best_known.BEST_KNOWN)
@pytest.mark.parametrize("name", ["beta_utility", "sigma"])
def test_a_star_gives_every_method_the_values_of_all_known_settings(study, name):
    tried = {
        arm: {settings[name] for settings in settings_of(arm, "star")}
        for arm in STUDIES[study].arms()
        if name in settings_of(arm, "star")[0]
    }
    known = {settings[name] for settings in best_known.BEST_KNOWN[study].values() if name in settings}
    assert len({arm.method for arm in tried}) >= 2
    for values in tried.values():
        assert values == known | {*defaults.PROBLEMS[study].grid[name]}


class TestClimb:
    """Scores with a maximum two steps away from the known setting."""

    PLAN = plan(
        *("output-permuted-emnist", "paper"),
        **{"panels": ["weight-local"], "grid": "climb", "data": {"emnist": "digits"}},
        **{"sweep_seeds": 1, "final_seeds": 2, "steps": 80},
    )

    @staticmethod
    def level(one):
        if one.method != "upgd":
            return 0.1
        right = (one.weight_decay == 0.001) + (one.beta_utility == 0.9999) * (1 + (one.weight_decay == 0.001))
        return 0.2 + 0.1 * right - (one.lr != 0.01) * 0.1

    @pytest.fixture
    def computed(self):
        """Return a function that computes, and the list of its requests."""
        asked = []

        def compute(experiment):
            asked.extend((experiment.steps, learner) for learner in experiment.learners())
            return results(experiment, level=self.level)

        return compute, asked

    def test_a_climb_continues_until_nothing_is_better(self, computed):
        compute, _ = computed
        found = reproduce(self.PLAN, compute)
        (upgd,) = (arm for arm in self.PLAN.arms() if arm.method == "upgd")
        best = found.findings[upgd].best
        assert (best.entry.settings["weight_decay"], best.entry.settings["beta_utility"]) == (0.001, 0.9999)
        star = reproduce(replace(self.PLAN, grid="star"), compute).findings[upgd].best
        assert (star.entry.settings["weight_decay"], star.entry.settings["beta_utility"]) != (0.001, 0.9999)
        assert star.tried == len(settings_of(upgd, "star")) < best.tried == len(found.plan.settings(upgd))
        assert found.unsearched == found.missing == 0

    def test_nothing_is_computed_twice(self, computed):
        compute, asked = computed
        reproduce(self.PLAN, compute)
        assert len(asked) == len(set(asked))

    def test_a_store_resolves_its_path(self, computed, tmp_path):
        compute, _ = computed
        found = reproduce(self.PLAN, compute)
        with Store.write(tmp_path / "upgd.db") as store:
            first = [r for r in found.records if r.key.digest in whole(self.PLAN.sweep()[0]).digests]
            store.add(first[:-1])
            # The direction of the climb is known after the first star.
            assert reproduce(self.PLAN, stored(store)).plan == self.PLAN
            assert sum(len(job.learners) for job in Remaining(self.PLAN, store).stage("search").missing) == 1
            store.add(first)
            assert sum(len(job.learners) for job in Remaining(self.PLAN, store).stage("search").missing) > 1
            store.add(found.records)
            assert _left(self.PLAN, store) == [0, 0]
            assert reproduce(self.PLAN, stored(store)).plan == found.plan


def test_stand_ins_replace_only_their_data_set():
    chosen = plan("ablation", "small", data={"emnist": "my-letters"})
    problems = {experiment.problem for experiment in chosen.sweep()}
    assert problems == {"input-permuted-mnist", "output-permuted-my-letters", "output-permuted-cifar10"}


def test_only_some_values_are_tried():
    whole = plan("toy-changing-inputs", panels=["weight-global"])
    some = plan("toy-changing-inputs", panels=["weight-global"], only={"lr": [0.01], "sigma": (0.1, 0.01)})
    for arm in whole.arms():
        wanted = [
            settings
            for settings in whole.settings(arm)
            if settings["lr"] == 0.01 and settings.get("sigma", 0.1) in (0.1, 0.01)
        ]
        assert some.settings(arm) == wanted != []
    with pytest.raises(
        ValueError, match=r"only lr=0.02 leaves no setting of 'UPGD', which tries lr=0.0001,0.001,0.01,0.1"
    ):
        plan("toy-changing-inputs", panels=["weight-global"], only={"lr": [0.02]}).sweep()


def test_the_error_about_excluded_curves_suggests_values_that_work():
    def with_rates(*rates):
        return plan("upgd-stationary-mnist", panels=["weight-global"], only={"lr": rates, "sigma": [0.01]}).sweep()

    with pytest.raises(
        ValueError, match=r"of 'SGD, half steps', which tries lr=.*; name values of every curve"
    ) as raised:
        with_rates(0.01)
    (suggested,) = re.findall(r"such as lr=(\S+) sigma=0.01$", str(raised.value))
    rates = [float(rate) for rate in suggested.split(",")]
    assert rates[0] == 0.01
    assert with_rates(*rates)


def planted(experiment, seeds_seen):
    """Learners whose score depends only on their settings: the best lr is 0.001, the best σ 0.01."""
    seeds_seen.append({learner.seed for learner in experiment.learners()})
    return results(experiment, level=lambda one: 0.5 - 10 * abs(one.lr - 0.001) - abs((one.sigma or 0.01) - 0.01))


def test_the_best_setting_is_rerun_on_fresh_seeds():
    seeds_seen = []
    chosen = plan("input-permuted-mnist", "paper", steps=400, panels=["weight-global"], final_seeds=4)
    found = reproduce(chosen, partial(planted, seeds_seen=seeds_seen))
    assert seeds_seen == [{0}, {1, 2, 3}, {4, 5, 6, 7}]  # search, shortlist, final runs
    assert found.missing == 0
    for arm, finding in found.findings.items():
        assert finding.best.tried == len(settings_of(arm, "paper"))
        assert finding.entry.settings["lr"] == 0.001
        assert finding.entry.settings.get("sigma", 0.01) == 0.01
        assert sorted(finding.entry.records) == [4, 5, 6, 7]


def test_the_shortlist_overrules_a_lucky_seed():
    """lr 0.01 is best on the seed of the search, 0.001 on all others."""

    def compute(experiment):
        return results(experiment, level=lambda one: 0.5 - 10 * abs(one.lr - (0.01 if one.seed == 0 else 0.001)))

    where = {"panels": ["weight-global"], "steps": 400, "final_seeds": 2}
    for shortlist, lr in ((0, 0.01), (1, 0.01), (40, 0.001)):
        found = reproduce(plan("input-permuted-mnist", **where, shortlist=shortlist, shortlist_seeds=2), compute)
        upgd = next(finding for arm, finding in found.findings.items() if arm.method == "upgd")
        assert upgd.entry.settings["lr"] == upgd.best.entry.settings["lr"] == lr
        assert sorted(upgd.entry.records) == ([1, 2] if shortlist == 0 else [3, 4])


def test_an_extended_grid_shows_the_best_inside_the_papers_too():
    """The best lr, 0.003, is between two values of the paper."""

    def compute(experiment):
        return results(experiment, level=lambda one: 0.5 - 10 * abs(one.lr - 0.003))

    chosen = plan("input-permuted-mnist", panels=["weight-global"], steps=400, grid="extended", final_seeds=2)
    arm = next(arm for arm in chosen.arms() if arm.method == "upgd")
    tried = chosen.settings(arm)
    assert {settings["lr"] for settings in tried} == {0.01, 0.003, 0.001, 0.0003, 0.0001}
    assert {settings["sigma"] for settings in tried} == {0.01, 0.03, 0.1, 0.3, 1.0}
    assert {settings["beta_utility"] for settings in tried} == {0.9, 0.999, 0.9999}
    assert all(settings in tried for settings in settings_of(arm, "paper"))
    found = reproduce(chosen, compute)
    finding = found.findings[arm]
    assert finding.entry.settings["lr"] == 0.003
    assert finding.papers.entry.settings["lr"] == 0.001
    assert sorted(finding.papers.entry.records) == sorted(finding.entry.records) == [4, 5]
    assert {"UPGD", "UPGD, paper's grid"} <= {name for name, _ in found.rows(chosen.panels[0])}
    assert found.missing == 0
    again = [learner for experiment in chosen.again({arm: tried[:2]}) for learner in experiment.learners()]
    assert {learner.seed for learner in again} == {1, 2, 3}


def test_the_best_of_all_may_come_from_the_shortlist_of_the_papers_grid():
    """The five settings with the best score on the seed of the search have lr 0.003; on other seeds 0.001 is best."""

    def compute(experiment):
        return results(experiment, level=lambda one: 0.5 - 10 * abs(one.lr - (0.003 if one.seed == 0 else 0.001)))

    chosen = plan("input-permuted-mnist", panels=["weight-global"], steps=400, grid="extended", final_seeds=2)
    found = reproduce(chosen, compute)
    finding = next(finding for arm, finding in found.findings.items() if arm.method == "upgd")
    assert finding.entry.settings["lr"] == 0.001
    assert finding.papers is None
    assert (finding.tried, finding.best.tried) == (375, 375)


def _left(chosen, store):
    """The learner-steps that are left of the search, and of the other stages."""
    rest = Remaining(chosen, store)
    search, *others = (rest.stage(name).learner_steps for name in rest.stages)
    return [search, sum(others)]


class TestShorterSearch:
    def test_search_and_final_runs_have_their_lengths(self, tmp_path):
        chosen, path = plan("ups-stationary-mnist", **SMALLEST, sweep_steps=20), tmp_path / "r.db"
        with Store.write(":memory:") as store:
            search, final = _left(chosen, store)
        assert search == 5 * 20
        assert final == 5 * 2 * 40
        found = reproduce(chosen, partial(run, store=path))
        assert (found.unsearched, found.missing) == (0, 0)
        assert sorted(one.key.steps for one in found.records) == [20] * 5 + [40] * 10
        for finding in found.findings.values():
            assert {one.key.steps for one in finding.best.entry.records.values()} == {20}
            assert {one.key.steps for one in finding.entry.records.values()} == {40}
            assert finding.comparison.steps == 40
        with Store.read(path) as store:
            assert _left(chosen, store) == [0, 0]
            assert reproduce(chosen, stored(store)).missing == 0

    def test_the_best_early_is_chosen_although_another_is_better_late(self):
        """lr 0.01 is best in short runs, 0.001 in long ones: the short ones decide."""

        def compute(experiment):
            lr = 0.01 if experiment.steps == 100 else 0.001
            return results(experiment, level=lambda one: 0.5 - abs(one.lr - lr))

        where = {"panels": ["weight-global"], "steps": 400}
        for sweep_steps, lr in ((None, 0.001), (100, 0.01)):
            found = reproduce(plan("input-permuted-mnist", **where, sweep_steps=sweep_steps, shortlist=0), compute)
            assert {finding.entry.settings["lr"] for finding in found.findings.values()} == {lr}

    def test_the_search_is_never_longer_than_the_final_runs(self):
        chosen = plan("ablation", "small", sweep_steps=5_000)
        lengths = {experiment.problem: experiment.steps for experiment in chosen.sweep()}
        assert lengths["input-permuted-mnist"] == 5_000
        assert lengths["output-permuted-cifar10"] == chosen.scale.length("output-permuted-cifar10") == 2_500

    def test_one_problem_may_have_a_length_of_its_own(self):
        chosen = plan("ablation", sweep_steps={"output-permuted-emnist": 300_000}, data={"emnist": "my-letters"})
        assert {experiment.problem: experiment.steps for experiment in chosen.sweep()} == {
            "input-permuted-mnist": 1_000_000,
            "output-permuted-my-letters": 300_000,
            "output-permuted-cifar10": 1_000_000,
        }
        assert {chosen.place(arm).steps for arm in chosen.arms()} == {1_000_000}

    def test_a_number_is_for_all_problems(self):
        problems = ("input-permuted-mnist", "output-permuted-emnist", "output-permuted-cifar10")
        assert plan("ablation", sweep_steps=np.int64(20)) == plan("ablation", sweep_steps=dict.fromkeys(problems, 20))
        assert plan("ablation") == plan("ablation", sweep_steps={})

    def test_every_problem_is_chosen_by_runs_of_its_own_length(self):
        """At this scale EMNIST and CIFAR-10 are the same digits; the smaller lr is best in runs of 20 steps."""
        chosen = plan(
            "ablation",
            "smoke",
            panels=["emnist-decay", "cifar10-decay"],
            sweep_steps={"output-permuted-cifar10": 20},
        )
        with Store.write(":memory:") as store:

            def compute(experiment):
                sign = -1 if experiment.steps == 20 else 1
                made = results(experiment, level=lambda one: 0.5 + sign * one.lr)
                store.add(made.records)
                return made

            search, final = _left(chosen, store)
            assert search == 5 * 2 * (80 + 20)
            assert final == 5 * 2 * 80  # whose best settings are not known to differ
            found = reproduce(chosen, compute)
            assert _left(chosen, store) == [0, 0]
            again = reproduce(chosen, stored(store))
        for one in (found, again):
            assert (one.unsearched, one.missing) == (0, 0)
            for arm, finding in one.findings.items():
                short = arm.problem == "output-permuted-cifar10"
                assert {run.key.steps for run in finding.best.entry.records.values()} == {20 if short else 80}
                assert {run.key.steps for run in finding.entry.records.values()} == {80}
                assert finding.entry.settings["lr"] == (0.001 if short else 0.01)


def test_several_studies_with_only_torch_and_numpy(tmp_path):
    """The documented call in a minimal installation: twice into one store; the second call computes nothing."""
    path = tmp_path / "upgd.db"
    script = f"""
import sys

class Absent:
    names = {sorted(NOT_NEEDED)!r}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())

from functools import partial
from upgd.experiments import run
from upgd.experiments.paper.reproduce import plan, reproduce

def main():
    for name in ("toy-changing-outputs", "ups-stationary-mnist"):
        panels = ["weight-global"] if name.startswith("toy") else ["weight-white"]
        chosen = plan(name, "smoke", panels=panels, sweep_steps=20)
        found = reproduce(chosen, partial(run, store={str(path)!r}, progress=True), say=print)
        print(name, found.unsearched, found.missing)

main()
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("toy-changing-outputs 0 0") == 2
    assert done.stdout.splitlines().count("ups-stationary-mnist 0 0") == 2
    with Store.read(path) as store:
        problems = {one.key.problem for one in store.records()}
    assert problems == {"toy-changing-outputs", "stationary-digits"}


def test_an_interrupted_reproduction_resumes(tmp_path):
    chosen, path = plan("ups-stationary-mnist", **SMALLEST), tmp_path / "r.db"
    calls = []

    def interrupted(experiment):
        calls.append(experiment)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(experiment, store=path)

    with pytest.raises(KeyboardInterrupt):
        reproduce(chosen, interrupted)
    with Store.read(path) as store:
        halfway = reproduce(chosen, stored(store))
        assert (halfway.unsearched, halfway.missing) == (0, 10)
        assert len(store) == 5
        search, final = _left(chosen, store)
    assert search == 0  # it is done
    assert final == 10 * 40
    first = reproduce(chosen, partial(run, store=path))
    with Store.read(path) as store:
        assert len(store) == 5 + 10
        assert _left(chosen, store) == [0, 0]
        again = reproduce(chosen, stored(store))
    assert again.missing == first.missing == 0
    for arm, finding in first.findings.items():
        for seed, one in finding.entry.records.items():
            np.testing.assert_array_equal(one.loss, again.findings[arm].entry.records[seed].loss)


def test_the_remaining_work_before_the_first_run():
    with Store.write(":memory:") as store:
        nothing = reproduce(plan("ups-stationary-mnist", **SMALLEST), stored(store))
        assert (nothing.unsearched, nothing.missing, nothing.findings) == (5, 10, {})
        search, final = _left(plan("ups-stationary-mnist", **SMALLEST), store)
    assert search == 5 * 40
    assert final == 5 * 2 * 40


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "anything"}, "there is no experiment 'anything'; choose one of"),
        ({"name": "input-permuted"}, "there is no experiment 'input-permuted'; did you mean 'input-permuted-mnist'?"),
        ({"name": "utility-quality"}, "there is no search in the study 'utility-quality'; choose one of ups-stat"),
        ({"name": "ablation", "scale": "huge"}, "scale must be one of paper, small, smoke, not 'huge'"),
        ({"name": "ablation", "grid": "fine"}, "grid must be one of"),
        ({"name": "ablation", "panels": ["left"]}, "ablation has no panel 'left'; choose among mnist-decay"),
        ({"name": "ablation", "steps": 0}, "steps must be an integer of at least 1, not 0"),
        ({"name": "ablation", "only": {"betas": [0.9]}}, "only must name one of lr, .*, not 'betas'"),
        ({"name": "ablation", "final_seeds": 1e6}, "final_seeds must be an integer of at least 1, not 1000000.0"),
        ({"name": "ablation", "sweep_steps": -5}, "sweep_steps must be an integer of at least 1, not -5"),
        ({"name": "ablation", "sweep_steps": "9"}, "sweep_steps must be an integer of at least 1, not '9'"),
        (
            {"name": "ablation", "sweep_steps": {"output-permuted-cifar10": 0}},
            "sweep_steps must be an integer of at least 1, not 0",
        ),
        (
            {"name": "ablation", "sweep_steps": {"cifar10": 10}},
            "sweep_steps: ablation has no problem 'cifar10'; choose among input-permuted-mnist, output-permuted-emnist, o",
        ),
        (
            {"name": "toy-changing-inputs", "sweep_steps": {"input-permuted-mnist": 10}},
            "sweep_steps: toy-changing-inputs has no problem 'input-permuted-mnist'; choose among toy-changing-inputs",
        ),
    ],
)
def test_mistakes_get_a_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        plan(**arguments)


def test_names_in_a_panel_are_different():
    for study in STUDIES.values():
        for panel in study.panels:
            names = [arm.name for arm in panel.arms]
            assert len(set(names)) == len(names)
            assert all(isinstance(arm, Arm) for arm in panel.arms)
