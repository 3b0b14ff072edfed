"""The specification of a learner."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from upgd.methods import Method, Setting, register
from upgd.methods.method import Reduction
from upgd.networks import MLP
from upgd.population import METHODS, Learner, Population
from upgd.population.backend import Kind
from upgd.population.spec import groups
from upgd.streams import make

SOME = {"lr": 0.1, "sigma": 0.1, "weight_decay": 0.1}


def learner(method: str, **settings) -> Learner:
    """Return a learner of the method with its required settings."""
    needed = {name: 0.1 for name, setting in METHODS[method].settings.items() if setting.default is ...}
    return Learner(**{"method": method, "lr": 0.1, **needed, **settings})


def test_omitted_settings_have_the_methods_defaults():
    assert learner("upgd").settings() == {
        "lr": 0.1, "beta_utility": 0.99, "granularity": "weight", "scaling": "global", "order": 1, "sigma": 1e-3,
        "noise": "white", "weight_decay": 0.0,
    }  # fmt: skip
    assert learner("adamw").settings() == {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    assert learner("sgd").settings() == {"lr": 0.1}


def test_learners_are_equal_if_they_compute_the_same():
    assert learner("upgd", lr=1) == learner("upgd", lr=1.0, sigma=1e-3, order=1, wise="weight")
    assert learner("sgd") == learner("sgd", sigma=0.0, weight_decay=0, wise="weight", noise="white")
    assert learner("anti-pgd") == learner("anti-pgd", noise="anticorrelated")
    assert learner("adamw", betas=[0, 0.9]) == learner("adamw", betas=(0.0, 0.9))
    assert len({learner("sgd"), learner("sgd", sigma=0), learner("sgd", seed=1)}) == 2
    # Also as text, which stores use.
    assert repr(learner("upgd", lr=1, order=2.0, betas=None)) == repr(learner("upgd", lr=1.0, order=2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "upgdd"}, "did you mean 'upgd'"),
        ({"method": "lion"}, "choose one of upgd, .*sgd, sgdw"),
        ({"method": "sgd", "sigma": 0.1}, "sigma=0.1 does not apply to method='sgd'.*method='pgd'"),
        ({"method": "sgd", "weight_decay": 0.1}, "method='sgdw'"),
        ({"method": "pgd", "sigma": 0.1, "noise": "anticorrelated"}, "method='anti-pgd'"),
        ({"method": "anti-pgd", "sigma": 0.1, "noise": "white"}, "noise='white' does not apply"),
        ({"method": "ups", "weight_decay": 0.1}, "weight_decay=0.1 does not apply to method='ups'"),
        ({"method": "pgd", "sigma": 0.1, "wise": "feature"}, "wise='feature' does not apply.*method='upgd'"),
        ({"method": "upgd", "betas": (0.9, 0.9)}, "betas=.* does not apply.*method='adamw'"),
        ({"method": "pgd"}, "method='pgd' needs sigma"),
        ({"method": "sgdw"}, "method='sgdw' needs weight_decay"),
        ({"method": "sgd", "lr": -1}, "lr must be a finite number of at least 0, not -1"),
        ({"method": "sgd", "lr": math.inf}, "lr must be a finite number"),
        ({"method": "sgd", "lr": "0.1"}, "lr must be a finite number"),
        ({"method": "sgd", "seed": -1}, "seed must be an integer from 0"),
        ({"method": "sgd", "seed": 1.5}, "seed must be an integer from 0"),
        ({"method": "upgd", "beta_utility": 1.0}, r"beta_utility must be in \[0, 1\), not 1.0"),
        ({"method": "upgd", "order": 3}, "order must be 1 or 2, not 3"),
        ({"method": "upgd", "wise": "unit"}, "wise must be 'weight' or 'feature', not 'unit'"),
        ({"method": "adamw", "betas": 0.9}, "betas must be two numbers"),
        ({"method": "adamw", "betas": (0.9, 1.0)}, "betas must be in"),
    ],
)
def test_a_mistake_gets_one_sentence(settings, words):
    with pytest.raises(ValueError, match=words):
        Learner(**{"lr": 0.1, **settings})


def test_the_kind_depends_on_what_the_computation_needs():
    assert learner("sgd").kind == learner("sgdw").kind == Kind("plain")
    assert learner("pgd").kind == learner("shrink-and-perturb").kind == Kind("plain", noise="white")
    assert learner("anti-pgd").kind == Kind("plain", noise="anticorrelated")
    assert learner("pgd", sigma=0).kind == Kind("plain")
    assert learner("adamw").kind == Kind("adamw")
    assert learner("upgd").kind == learner("ups").kind == Kind("utility", noise="white")
    assert learner("upgd", sigma=0, noise="anticorrelated", order=2).kind == Kind("utility", order=2)
    every = {"granularity": "feature", "scaling": "local", "order": 2, "noise": "anticorrelated"}
    assert learner("upgd-nonprotecting", **every).kind == Kind("utility", **every)


@given(st.lists(st.tuples(st.sampled_from(list(METHODS)), st.floats(0, 1), st.integers(0, 2**63 - 1)), min_size=1))
def test_groups_hold_every_learner_once_with_its_own_numbers(drawn):
    learners = [learner(method, lr=lr, seed=seed) for method, lr, seed in drawn]
    places = []
    for group, own in groups(learners, rows=range(len(learners))):
        places += own
        assert group.rows.tolist() == own
        for i, place in enumerate(own):
            mine = learners[place]
            constants = METHODS[mine.method].constants
            assert mine.kind == group.kind
            assert (group.value("lr")[i], group.seeds[i]) == (mine.lr, mine.seed)
            assert [group.value(name)[i] for name in "cpq"] == [constants.get(name, 0) for name in "cpq"]
            assert group.value("sigma")[i] == (mine.sigma or 0)
            assert group.value("beta2")[i] == (mine.betas[1] if mine.betas else 0)
    assert sorted(places) == list(range(len(learners)))
    assert len(groups(learners, [0] * len(learners))) == len({own.kind for own in learners})


def test_replacing_the_seed_equals_constructing_with_it():
    learner = Learner(method="upgd", lr=0.1, sigma=0.2, seed=1)
    other = learner.but(seed=2)
    made = Learner(method="upgd", lr=0.1, sigma=0.2, seed=2)
    assert (other, hash(other), repr(other), other.kind) == (made, hash(made), repr(made), made.kind)
    assert other.lr == 0.1
    with pytest.raises(ValueError, match="seed must be"):
        learner.but(seed=-1)


# ------------------------------------------------------------------------------------------- what decides about the batch


def final(learners, backend="torch"):
    """Return the final weights of learners that are computed together."""
    population = Population(MLP((64, 8, 10)), learners, backend=backend)
    population.run(make("output-permuted-digits", task_length=20), 30)
    return [torch.cat([p.flatten() for p in population.parameters(i).values()]) for i in range(len(learners))]


def differ_and_are_as_alone(*learners):
    together, alone = final(learners), [final([one])[0] for one in learners]
    return all(map(torch.equal, together, alone)) and not torch.equal(*together)


class Scaled(Method):
    name = "scaled"
    factor = 0.5
    reductions: Mapping[str, Reduction] = {"size": ("max", "learner")}

    def observe(self, g):
        return {}, {"size": g.abs()}

    def update(self, w, g, h, r):
        return w - h.lr * self.factor * g / (r.size + 0.1)


@pytest.mark.parametrize("changed", [{"reductions": {"size": ("norm", "layer")}}, {"factor": 0.25}])
def test_a_subclass_with_another_rule_is_computed_by_that_rule(registered, changed):
    register(Scaled)
    register(type("Other", (Scaled,), {"name": "scaled-otherwise", **changed}))
    assert differ_and_are_as_alone(learner("scaled"), learner("scaled-otherwise"))


@pytest.mark.parametrize("backend", ["torch", "kernel"])
@pytest.mark.parametrize(
    "fixed",
    [{"scaling": "local"}, {"granularity": "feature"}, {"order": 2}, {"gated": "hidden"}, {"profile": "authors"}],
)
def test_a_switch_that_the_class_fixes_equals_one_that_the_user_sets(registered, backend, fixed):
    register(type("Fixed", (METHODS["upgd"],), {"name": "fixed-upgd", **fixed}))
    own, usual = learner("fixed-upgd"), learner("upgd", **fixed)
    assert own.kind == usual.kind != learner("upgd").kind
    assert torch.equal(*final([own], backend), *final([usual], backend))


def test_the_default_of_a_quiet_switch_is_part_of_the_kind(registered):
    profile = METHODS["upgd"].settings["profile"].but(default="authors")
    register(type("Authors", (METHODS["upgd"],), {"name": "upgd-authors", "profile": profile}))
    assert learner("upgd-authors").kind == learner("upgd", profile="authors").kind


def decaying(name, factor, base=Method):
    def update(self, w, g, h):
        return w - h.lr * g - factor * w

    return type("Decaying", (base,), {"name": name, "update": update})


def test_a_class_that_is_defined_again_does_not_change_its_former_subclasses(registered):
    former = register(decaying("decaying", 0.0))
    register(type("Half", (former,), {"name": "half"}))
    register(decaying("decaying", 0.1))
    assert differ_and_are_as_alone(learner("decaying"), learner("half"))


def test_a_base_that_is_not_registered_has_a_rule_of_its_own(registered):
    base = decaying("decaying", 0.0)
    register(decaying("decaying", 0.1))
    register(type("Half", (base,), {"name": "half"}))
    assert differ_and_are_as_alone(learner("decaying"), learner("half"))


def test_a_quiet_switch_that_is_disabled_by_another_value_is_another_variant(registered):
    class Signed(Method):
        name = "signed"
        way = Setting("down", choices=("down", "up"), quiet=True, off="down")

        def update(self, w, g, h):
            return w - h.lr * g if self.way == "down" else w + h.lr * g

    register(Signed)
    up = Signed.settings["way"].but(default="up", off="up")
    register(type("Upward", (Signed,), {"name": "upward", "way": up}))
    assert differ_and_are_as_alone(learner("signed"), learner("upward"))


@pytest.mark.parametrize("choices", [(0.5, 1.0), ((0.5, 1), (1.0, 1)), (None, "slow"), (False, True)])
@pytest.mark.parametrize("name", ["scale", "noise", "others", "scaling", "granularity"])
def test_every_choice_is_a_variant(registered, name, choices):
    def update(self, w, g, h):
        return w - h.lr * g * (0.5 if getattr(self, name) == choices[0] else 1.0)

    setting = Setting(choices[0], choices=choices)
    register(type("Chosen", (Method,), {"name": "chosen", name: setting, "update": update}))
    assert learner("chosen", **{name: choices[0]}).kind != learner("chosen", **{name: choices[1]}).kind
    assert differ_and_are_as_alone(*(learner("chosen", **{name: choice}) for choice in choices))


def test_a_class_may_fix_the_normalization(registered):
    register(type("Never", (Scaled,), {"name": "never", "normalize": 0.0}))
    register(type("Always", (Scaled,), {"name": "always", "normalize": 0.9}))
    assert [learner(name).kind.normalize for name in ("never", "always")] == [False, True]
    assert differ_and_are_as_alone(learner("never"), learner("always"))
