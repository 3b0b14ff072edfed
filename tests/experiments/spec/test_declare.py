"""Declaring experiments, in Python and in TOML."""

import math
import os
import re

import numpy as np
import pytest

from upgd import networks, plugins
from upgd.experiments import Experiment, load
from upgd.experiments.paper import best_known
from upgd.experiments.spec import architecture, defaults, grids
from upgd.experiments.spec.settings import hyperparameters, known, ordered
from upgd.methods import METHODS
from upgd.population import Learner
from upgd.streams import make, names


def test_settings_are_those_of_all_methods():
    assert set(known()) == {name for method in METHODS.values() for name in method.settings}
    assert ordered(["strange", "eps", "lr"]) == ["lr", "eps", "strange"]
    assert hyperparameters(Learner(method="upgd", lr=0.1).settings()) == ["lr", "beta_utility", "sigma", "weight_decay"]


def test_every_listed_problem_has_defaults_of_its_own():
    studies = ("utility-quality", "utility-quality-weights", "utility-quality-features")
    listed = [name for name in names() if not plugins.versions([("stream", name)])]
    assert set(listed) - set(studies) == set(defaults.PROBLEMS)
    convolutions = {name for name, usual in defaults.PROBLEMS.items() if usual.network == "conv"}
    assert convolutions == {
        f"{family}-cifar10" for family in ("stationary", "output-permuted", "random-label", "class-pairs")
    }


def test_every_combination_once():
    experiment = Experiment(
        "output-permuted-digits",
        {"upgd": {"lr": [0.1, 0.01], "sigma": 0.1}, "sgd": {"lr": [0.1, 0.1]}},
        seeds=[3, 4, 3],
        steps=7,
    )
    upgd = [Learner(method="upgd", lr=lr, sigma=0.1, seed=seed) for lr in (0.1, 0.01) for seed in (3, 4)]
    assert experiment.learners() == (*upgd, *(Learner(method="sgd", lr=0.1, seed=seed) for seed in (3, 4)))
    assert experiment.learner_steps == 6 * 7


def test_learners_are_made_once():
    experiment = Experiment("output-permuted-digits", ["upgd"], seeds=3)
    assert experiment.learners() is experiment.learners()


def test_arrays_and_integers_of_numpy_are_as_good_as_lists_and_ints():
    given = Experiment(
        "output-permuted-digits",
        {"sgd": {"lr": np.array([0.5, 0.25])}, "pgd": {"lr": np.float32(0.5), "sigma": 0.25}},
        seeds=np.arange(2),
        steps=np.int64(7),
    )
    plain = Experiment(
        "output-permuted-digits", {"sgd": {"lr": [0.5, 0.25]}, "pgd": {"lr": 0.5, "sigma": 0.25}}, seeds=2, steps=7
    )
    assert given == plain
    assert {type(seed) for seed in given.seeds} == {type(given.steps)} == {int}
    assert Experiment("output-permuted-digits", {"sgd": {"lr": 0.1}}, seeds=np.int64(3), steps=7).seeds == (0, 1, 2)


@pytest.mark.parametrize("seeds", [0, -3, True, 2.0, [], [0, 1.5], [True]])
def test_seeds_are_a_number_or_a_list_of_integers(seeds):
    message = re.escape(f"seeds must be a number of at least 1, or a list of seeds, not {seeds!r}")
    with pytest.raises(ValueError, match=message):
        Experiment("output-permuted-digits", {"sgd": {"lr": 0.1}}, seeds=seeds, steps=7)


@pytest.mark.parametrize("network", [100, (100, 50), [100, 50]])
def test_the_network_is_a_string(network):
    with pytest.raises(TypeError, match=re.escape(f"network must be a string such as '300-150', not {network!r}")):
        Experiment("output-permuted-digits", {"sgd": {"lr": 0.1}}, network=network)


def test_settings_have_names():
    with pytest.raises(TypeError, match=r"methods must give 'upgd' settings by name, such as .*, not 0.1"):
        Experiment("output-permuted-digits", {"upgd": 0.1})


def test_a_shared_grid_goes_to_the_methods_that_have_the_setting():
    grid = {"lr": [0.1, 0.01], "sigma": [0.1, 1.0]}
    experiment = Experiment(
        "output-permuted-digits", {"sgd": {}, "upgd": {"sigma": 0.5}, "pgd": {}}, grid=grid, seeds=1
    )
    assert experiment.methods["sgd"] == {"lr": (0.1, 0.01)}
    assert experiment.methods["upgd"] == {"lr": (0.1, 0.01), "sigma": (0.5,)}
    assert experiment.methods["pgd"] == {"lr": (0.1, 0.01), "sigma": (0.1, 1.0)}


def test_the_papers_defaults():
    experiment = Experiment("input-permuted-mnist", "upgd", grid="paper")
    assert (experiment.network, experiment.steps, len(experiment.seeds)) == ("300-150", 1_000_000, 20)
    assert len(experiment.learners()) == 20 * 3 * 2 * 3 * 5
    assert Experiment("output-permuted-cifar10", "sgd", grid="paper").network == "conv"


@pytest.mark.parametrize(
    ("problem", "method", "settings"),
    [
        ("toy-changing-inputs", "sgd", 4),
        ("toy-changing-inputs", "sgdw", 4 * 3),
        ("toy-changing-outputs", "upgd", 4 * 4 * 5 * 4),
        ("stationary-mnist", "shrink-and-perturb", 4 * 5 * 3),
        ("stationary-mnist", "ups", 5 * 5),
        ("input-permuted-mnist", "sgdw", 3 * 5),
        ("output-permuted-emnist", "adamw", 3 * 5 * 2 * 3 * 3),
        ("output-permuted-cifar10", "upgd-nonprotecting", 3 * 2 * 3 * 5),
    ],
)
def test_the_papers_grids_have_the_papers_size(problem, method, settings):
    assert len(Experiment(problem, [method], grid="paper", seeds=1).learners()) == settings


def test_the_papers_values_one_by_one():
    """As printed in the paper and public sources; detects typing errors in the table."""
    toy = {"lr": (1e-1, 1e-2, 1e-3, 1e-4)}
    permuted = {"lr": (0.01, 0.001, 0.0001)}
    ups = {"lr": (1.0,), "sigma": (1e-1, 1e-2, 1e-3, 1e-4, 1e-5), "beta_utility": (0.0, 0.9, 0.99, 0.999, 0.9999)}
    toy_sigma = {"sigma": (1e0, 1e-1, 1e-2, 1e-3, 1e-4)}
    toy_utility = toy | toy_sigma | {"beta_utility": (0.0, 0.9, 0.99, 0.999)}
    toy_decay = {"weight_decay": (0.1, 0.01, 0.001)}
    permuted_sigma = {"sigma": (0.01, 0.1, 1.0)}
    permuted_utility = permuted | permuted_sigma | {"beta_utility": (0.999, 0.9999)}
    permuted_decay = {"weight_decay": (0.0, 0.1, 0.01, 0.001, 0.0001)}
    of_adamw = {
        "betas": ((0.0, 0.99), (0.0, 0.999), (0.0, 0.9999), (0.9, 0.99), (0.9, 0.999), (0.9, 0.9999)),
        "eps": (1e-4, 1e-8, 1e-16),
    }
    toy_grids = {
        "sgd": toy,
        "sgdw": toy | toy_decay,
        "pgd": toy | toy_sigma,
        "anti-pgd": toy | toy_sigma,
        "shrink-and-perturb": toy | toy_sigma | toy_decay,
        "adamw": toy | of_adamw | toy_decay,
        "upgd": toy_utility | {"weight_decay": (0.0, 0.1, 0.01, 0.001)},
        "upgd-nonprotecting": toy_utility | {"weight_decay": (0.0, 0.1, 0.01, 0.001)},
    }
    permuted_grids = {
        "sgd": permuted,
        "sgdw": permuted | permuted_decay,
        "pgd": permuted | permuted_sigma,
        "anti-pgd": permuted | permuted_sigma,
        "shrink-and-perturb": permuted | permuted_sigma | permuted_decay,
        "adamw": permuted | of_adamw | permuted_decay,
        "upgd": permuted_utility | permuted_decay,
        "upgd-nonprotecting": permuted_utility | permuted_decay,
    }
    searches = {"ups": ups, "ups-even": {name: ups[name] for name in ("lr", "sigma")}}
    experiments = {
        "toy-changing-inputs": ("300-150:identity", 1_000_000, 20, toy_grids),
        "toy-changing-outputs": ("300-150:identity", 1_000_000, 20, toy_grids),
        "stationary-mnist": ("300-150", 1_000_000, 20, toy_grids),
        "input-permuted-mnist": ("300-150", 1_000_000, 20, permuted_grids),
        "output-permuted-emnist": ("300-150", 1_000_000, 20, permuted_grids),
        "output-permuted-cifar10": ("conv", 1_000_000, 10, permuted_grids),
    }
    for problem, (network, steps, seeds, wanted) in experiments.items():
        usual = defaults.defaults(problem)
        assert (usual.network, usual.steps, usual.seeds) == (network, steps, seeds), problem
        of_the_paper = wanted | searches
        assert {method: defaults.grid(problem, method) for method in of_the_paper} == of_the_paper, problem


def test_problems_that_the_paper_does_not_have_suit_their_data():
    def usual(problem):
        one = defaults.defaults(problem)
        return one.network, one.steps, one.seeds

    for kind in ("stationary", "input-permuted", "output-permuted", "random-label", "class-pairs"):
        assert usual(f"{kind}-digits") == ("100-50", 30_000, 20)
    assert usual("stationary-cifar10") == usual("class-pairs-cifar10") == ("conv", 1_000_000, 10)
    assert defaults.grid("stationary-cifar10", "upgd") == defaults.grid("stationary-mnist", "upgd")
    assert usual("input-permuted-cifar10") == usual("input-permuted-mnist")  # pixels have no neighbours


def test_the_best_settings_known_one_by_one():
    lr_decay, lr_sigma = ("lr", "weight_decay"), ("lr", "sigma")
    shrinking, adam = ("lr", "sigma", "weight_decay"), ("lr", "betas", "weight_decay")
    utility = ("lr", "sigma", "beta_utility", "weight_decay")
    problems = ("input-permuted-mnist", "output-permuted-emnist", "output-permuted-cifar10")
    table = {
        "sgdw": (lr_decay, (1e-3, 1e-3), (0.01, 1e-4), (0.01, 1e-3)),
        "pgd": (lr_sigma, (1e-3, 0.1), (0.01, 0.01), (1e-3, 0.01)),
        "shrink-and-perturb": (shrinking, (1e-3, 0.1, 0.01), (0.01, 0.01, 1e-3), (0.01, 0.01, 1e-3)),
        "adamw": (adam, (1e-4, (0.0, 0.99), 0.0), (1e-4, (0.0, 0.9999), 0.1), (1e-3, (0.0, 0.9999), 0.01)),
        "upgd": (utility, (0.01, 0.1, 0.9999, 0.01), (0.01, 0.001, 0.9, 0.0), (0.01, 0.001, 0.999, 0.0)),
        "upgd-nonprotecting": (
            *(utility, (1e-3, 0.1, 0.9, 0.01), (0.01, 0.01, 0.9999, 1e-3), (0.01, 0.01, 0.99, 1e-3)),
        ),
    }
    assert {
        problem: {method: dict(zip(names, best[i], strict=True)) for method, (names, *best) in table.items()}
        for i, problem in enumerate(problems)
    } == best_known.BEST_KNOWN


@pytest.mark.parametrize("problem", defaults.PROBLEMS)
def test_every_method_has_a_grid_for_every_problem(problem):
    assert Experiment(problem, list(METHODS), grid="paper", seeds=1).learners()


@pytest.mark.parametrize("method", METHODS)
def test_methods_without_values_try_their_own_short_grid(method):
    short = Experiment("bit-flipping", method, seeds=1)
    assert short == Experiment("bit-flipping", {method: {}}, grid="short", seeds=1)
    assert short.methods[method] == grids.short(method)
    for name, values in short.methods[method].items():
        assert len(set(values)) == len(values)
        assert len(values) != 2, f"of two values of {name} the best is always at an edge"


@pytest.mark.parametrize("method", METHODS)
def test_a_short_grid_has_the_default_among_its_values(method):
    for name, values in grids.short(method).items():
        default = METHODS[method].settings[name].default
        assert default is ... or default in values, name


def test_short_grids_give_rivals_the_same_number_of_settings():
    tried = {method: math.prod(map(len, grids.short(method).values())) for method in ("upgd", "adamw")}
    assert len(set(tried.values())) == 1


def test_the_settings_of_adam_are_not_searched_where_adam_is_an_option():
    grid = defaults.grid("input-permuted-mnist", "continual-backprop")
    assert grid == {"lr": (0.01, 0.001, 0.0001), "replacement_rate": (1e-3, 1e-4, 1e-5)}


def test_required_settings_missing_from_a_shared_grid_use_the_short_grid():
    methods = Experiment("bit-flipping", ["adamw", "pgd"], grid={"sigma": 0.5}, seeds=1).methods
    assert methods == {
        "adamw": {"lr": grids.short("adamw")["lr"]},
        "pgd": {"lr": grids.short("pgd")["lr"], "sigma": (0.5,)},
    }


def test_shared_hyperparameters_have_the_same_values_for_all_methods():
    of_methods = [defaults.grid("input-permuted-mnist", method) for method in METHODS if not method.startswith("ups")]
    for name in ("lr", "sigma", "weight_decay"):
        assert len({grid[name] for grid in of_methods if name in grid}) == 1


@pytest.mark.parametrize("problem", best_known.BEST_KNOWN)
def test_best_known_settings_are_settings(problem):
    for method, settings in best_known.BEST_KNOWN[problem].items():
        assert Experiment(problem, {method: settings}, seeds=1).learners()


@pytest.mark.parametrize("problem", best_known.PUBLISHED)
def test_published_settings_are_settings(problem):
    for method, settings in best_known.PUBLISHED[problem].items():
        assert len(Experiment(problem, {method: settings}, seeds=1).learners()) == 1
    assert {"upgd", "shrink-and-perturb", "adamw", "s-ewc", "s-mas"} == set(best_known.PUBLISHED[problem])


def test_betas_are_one_value():
    assert Experiment("bit-flipping", {"adamw": {"lr": 0.1, "betas": (0.0, 0.9)}}).methods["adamw"]["betas"] == (
        (0.0, 0.9),
    )
    two = Experiment("bit-flipping", {"adamw": {"lr": 0.1, "betas": [[0.0, 0.9], [0.9, 0.99]]}})
    assert two.methods["adamw"]["betas"] == ((0.0, 0.9), (0.9, 0.99))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"methods": []}, "methods must be one or more of upgd"),
        ({"methods": ["sgdd"], "grid": "paper"}, "there is no method 'sgdd'; did you mean 'sgd'"),
        ({"methods": {"sgd": {}}}, "method 'sgd' needs lr"),
        ({"methods": {"sgd": {"lr": -1}}}, "lr must be a finite number of at least 0, not -1"),
        ({"methods": {"sgd": {"lr": []}}}, "lr needs at least one value"),
        ({"methods": {"sgd": {"lr": 1, "nesterov": 1}}}, r"there is no setting 'nesterov' \(of sgd\)"),
        ({"methods": {"sgd": {"lr": 1, "sigma": 1}}}, "sigma=1 does not apply to method='sgd'"),
        ({"methods": ["sgd"], "grid": {"lr": 1, "sigma": 1}}, "none of sgd has the setting 'sigma'"),
        ({"methods": ["sgd"], "grid": {"lr": 1, "rate": 1}}, "there is no setting 'rate'"),
        ({"methods": ["sgd"], "grid": "huge"}, "grid must be 'short', 'paper', or values"),
        ({"methods": {"sgd": {"lr": 1}}, "seeds": 0}, "seeds must be a number of at least 1"),
        ({"methods": {"sgd": {"lr": 1}}, "steps": 0}, "steps must be an integer of at least 1, not 0"),
        ({"methods": {"sgd": {"lr": 1}}, "network": "resnet"}, "network must be linear, conv"),
        (
            {"methods": {"sgd": {"lr": 1}}, "network": "30:swish"},
            "activation in network='30:swish' must be one of relu",
        ),
    ],
)
def test_a_mistake_gets_one_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        Experiment("output-permuted-digits", **arguments)


TOML = """
problem = "output-permuted-digits"
steps = 30_000
seeds = 2
network = "100-50"

[options]
task_length = 500

[grid]
lr = [0.1, 0.03]

[methods.sgd]
[methods.upgd]
beta_utility = 0.9
sigma = [0.01, 0.001]
[methods.adamw]
betas = [[0.0, 0.99], [0.9, 0.999]]
"""


def test_toml_equals_python(tmp_path):
    (tmp_path / "e.toml").write_text(TOML)
    methods = {
        "sgd": {},
        "upgd": {"beta_utility": 0.9, "sigma": [0.01, 0.001]},
        "adamw": {"betas": [(0.0, 0.99), (0.9, 0.999)]},
    }
    expected = Experiment(
        *("output-permuted-digits", methods),
        grid={"lr": [0.1, 0.03]},
        steps=30_000,
        seeds=2,
        network="100-50",
        options={"task_length": 500},
    )
    assert load(tmp_path / "e.toml") == expected


def test_toml_takes_the_former_name_of_granularity(tmp_path):
    text = 'problem = "output-permuted-digits"\n[grid]\nlr = 0.1\n[methods.upgd]\n{} = "feature"\n'
    for name in ("wise", "granularity"):
        (tmp_path / f"{name}.toml").write_text(text.format(name))
    former = load(tmp_path / "wise.toml")
    assert former == load(tmp_path / "granularity.toml")
    assert {learner.granularity for learner in former.learners()} == {"feature"}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps = 30_000", "stepps = 30_000", r"there is no key 'stepps' \(= 30000\); did you mean 'steps'"),
        ("steps = 30_000", "steps = 1.5", "steps must be an integer of at least 1, not 1.5"),
        ("steps = 30_000", 'steps = "many"', "steps must be an integer of at least 1, not 'many'"),
        ("seeds = 2", "seeds = true", r"seeds must be a number of seeds \(20\) or a list"),
        ("seeds = 2", "seeds = [1, -1]", r"seeds must be a number of seeds .*, not \[1, -1\]"),
        ('network = "100-50"', "network = 100", "network must be a string in quotes, not 100"),
        ('network = "100-50"', 'network = "100x50"', "network must be linear, conv.*; not '100x50'"),
        ("task_length = 500", "task_lenght = 500", "no option 'task_lenght'.*task_length"),
        ("task_length = 500", "task_length = -3", "task_length must be a positive number of steps, not -3"),
        ("permuted-digits", "permutd-digits", "there is no problem 'output-permutd-digits'; did you mean"),
        ("[methods.sgd]", "[methods.sdg]", "no key 'methods.sdg' .*did you mean 'sgd"),
        (
            "beta_utility = 0.9",
            "beta_utility = 1.5",
            r"methods.upgd.beta_utility = 1.5: beta_utility must be in \[0, 1\)",
        ),
        ("beta_utility = 0.9", "beta = 0.9", r"no key 'methods.upgd.beta' \(= 0.9\)"),
        ("sigma = [0.01, 0.001]", 'sigma = ["x"]', r"methods.upgd.sigma = \['x'\]: sigma must be a finite number"),
        ("lr = [0.1, 0.03]", "lr = [0.1, -3]", r"grid.lr = \[0.1, -3\]: lr must be a finite number of at least 0"),
        ("[grid]", "grid = 3\n[griddle]", "no key 'griddle'"),
        ("seeds = 2", "seeds = ", "is not valid TOML: .*line 4"),
        ('problem = "output-permuted-digits"', "", "problem is missing"),
    ],
)
def test_a_mistake_in_toml_is_named_with_file_key_and_value(tmp_path, old, new, words):
    (tmp_path / "mine.toml").write_text(TOML.replace(old, new))
    with pytest.raises(ValueError, match=words) as raised:
        load(tmp_path / "mine.toml")
    assert str(tmp_path / "mine.toml") in str(raised.value)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*nothing"):
        load(tmp_path / "nothing.toml")


def test_a_network_may_be_registered_again_by_the_same_definition_only(monkeypatch):
    monkeypatch.setattr(networks, "_REGISTERED", {})
    for _ in range(2):

        @networks.register("mine")
        def mine(stream):
            return None

    with pytest.raises(ValueError, match="a network named 'mine' already exists"):
        networks.register("mine")(lambda stream: None)


def test_names_of_networks_with_layer_norm():
    stream = make("output-permuted-digits")
    layers = [str(architecture.network(name, stream).layers) for name in ("20-10:layernorm", "20-10:relu:layernorm")]
    assert layers[0] == layers[1]
    assert layers[0].count("LayerNorm") == 2
    assert "Tanh" in str(architecture.network("20:tanh:layernorm", stream))


@pytest.mark.parametrize(
    "name", ["20:layernorm:tanh", "20:tanh:relu", "linear:layernorm", "linear:relu", "conv:layernorm"]
)
def test_an_invalid_suffix_of_a_network_name(name):
    with pytest.raises(ValueError, match=f"activation in network={name!r} must be one of relu"):
        architecture.check(name)


def test_a_named_pipe_is_refused_as_toml(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ValueError, match=r"pipe.toml is not a regular file; give a TOML file"):
        load(tmp_path / "pipe.toml")


def test_options_that_only_equal_their_default_are_kept():
    """The stream rejects them, or they mean something else."""
    for problem, options in (("output-permuted-digits", {"drift": False}), ("bit-flipping", {"bits": 21, "length": 3})):
        assert Experiment(problem, {"sgd": {"lr": 0.1}}, options=options).options == options
