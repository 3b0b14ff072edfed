"""The base class of all methods."""

from collections.abc import Mapping
from typing import Any

import pytest

from upgd.methods import METHODS, Method, Setting, register
from upgd.methods.method import Reduction
from upgd.methods.streaming import StreamingEWC


def test_methods_with_code_of_their_own_are_never_computed_together() -> None:
    """Learners of one rule run in one batch, with the code of the first."""

    class Base(Method):
        def update(self, w, g, h):
            return w - h.lr * self.direction(g)

        def direction(self, g):
            return g

    class Plain(Base):
        name = "plain-one"

    class Signed(Plain):
        name = "signed-one"

        def direction(self, g):
            return g.sign()

    class Slower(Signed):
        name = "slower-one"
        normalize = 0.0

    assert (Plain.rule, Signed.rule, Slower.rule) == ("plain-one", "signed-one", "signed-one")
    by_rule: dict[str, set] = {}
    for method in METHODS.values():
        by_rule.setdefault(method.rule, set()).add(method.update)
    assert all(len(updates) == 1 for updates in by_rule.values())
    assert METHODS["s-ewc"].rule != METHODS["s-mas"].rule
    assert METHODS["adam"].rule == METHODS["adamw"].rule


def test_unknown_arguments_of_rules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"has the argument 'loss', which does not exist.*bound"):

        class Curious(Method):
            name = "curious"

            def update(self, w, g, loss):
                return w


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_description(name: str) -> None:
    method = METHODS[name]
    assert method.__doc__ is not None
    assert method.label
    assert method.colour
    assert method.dark_colour
    assert all(setting.help for setting in method.settings.values())
    assert all(isinstance(setting, Setting) for setting in method.settings.values())
    assert "normalize" in StreamingEWC.settings


# ------------------------------------------------------------------------------------------------------- shared batches


class _Plain(Method):
    name = "shared-plain"
    factor = 0.5
    strength = Setting(0.1)
    mode = Setting("a", choices=("a", "b"))
    state: Mapping[str, str] = {"kept": "zeros"}
    reductions: Mapping[str, Reduction] = {"largest": ("max", "learner")}

    @staticmethod
    def helper(g):
        return g

    def observe(self, g):
        return {}, {"largest": g.abs()}

    def update(self, w, g, s, h, r):
        kept = s.kept + self.factor * self.helper(g) / (r.largest + h.strength)
        return w - h.lr * kept, {"kept": kept}


class _Mixin:
    def update(self, w, g, h):
        return w - 2 * h.lr * g


DIFFERENT: dict[str, dict[str, Any]] = {
    "a function": {"update": lambda self, w, g, h: w},
    "an attribute": {"factor": 0.25},
    "a new attribute": {"other": 1},
    "a static method": {"helper": staticmethod(lambda g: -g)},
    "a class method": {"helper": classmethod(lambda cls, g: -g)},
    "the state": {"state": {"kept": "parameter"}},
    "a reduction": {"reductions": {"largest": ("norm", "layer")}},
    "a property": {"factor": property(lambda self: 0.25)},
    "an operator": {"__call__": lambda self, g: g},
    "a setting in place of an attribute": {"factor": Setting(0.25)},
    "a switch in place of a number": {"strength": Setting("a", choices=("a", "b"))},
    "a number in place of a switch": {"mode": Setting(0.1)},
    "another choice": {"mode": Setting("a", choices=("a", "b", "c"))},
    "a value that is not a choice": {"mode": "c"},
    "the noise, which the rule does not take": {"noise": "anticorrelated"},
}
ALIKE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "words": {"label": "Another", "colour": "#123456", "dark_colour": "#654321", "__doc__": "Another."},
    "a number": {"strength": 0.2},
    "the default of a number": {"strength": Setting(0.2, grid=(0.2, 0.3))},
    "the default of a switch": {"mode": Setting("b", choices=("a", "b"))},
    "the value of a switch": {"mode": "b"},
    "a new setting": {"another": Setting(1.0)},
    "another learning rate": {"lr": Method.lr.but(grid=(1.0,))},
}


@pytest.mark.parametrize("changed", DIFFERENT.values(), ids=DIFFERENT)
def test_a_class_that_changes_the_rule_has_its_own_batch(changed) -> None:
    other = type("Other", (_Plain,), {"name": "shared-other", **changed})
    assert other.rule == "shared-other"
    leaf = type("Leaf", (other,), {"name": "shared-leaf"})
    assert leaf.rule == "shared-other"


@pytest.mark.parametrize("changed", ALIKE.values(), ids=ALIKE)
def test_a_class_that_changes_only_numbers_switches_and_words_shares_the_batch(changed) -> None:
    assert type("Other", (_Plain,), {"name": "shared-other", **changed}).rule == "shared-plain"


def test_a_mixin_changes_the_rule() -> None:
    assert type("Other", (_Mixin, _Plain), {"name": "shared-other"}).rule == "shared-other"


def test_a_class_without_a_name_does_not_give_its_rule_the_name_of_its_base() -> None:
    helper = type("Helper", (_Plain,), {"factor": 0.25})
    assert helper.name == "shared-plain"
    assert type("Other", (helper,), {"name": "shared-other"}).rule == "shared-other"


@pytest.mark.parametrize("name", ["plain", "utility"])
def test_the_name_of_a_rule_is_not_that_of_another_method(name: str, registered) -> None:
    class Own(Method):
        def update(self, w, g, h):
            return w - h.lr * g

    with pytest.raises(ValueError, match=f"'{name}' is the name of the rule of the method '.*'; choose another name"):
        register(type("Named", (Own,), {"name": name}))


def test_a_base_may_be_registered_after_its_subclass(registered) -> None:
    first = type("First", (_Plain,), {"name": "shared-first"})
    assert register(first).rule == "shared-plain"
    assert register(_Plain) is _Plain
    assert register(_Plain) is _Plain


def test_a_class_may_be_executed_again_with_itself_as_base(registered) -> None:
    register(_Plain)
    again = type("_Plain", (_Plain,), {"factor": 0.25, "__module__": __name__, "__qualname__": "_Plain"})
    assert register(again).rule == "shared-plain"


def test_a_class_may_fix_a_setting_of_two_numbers() -> None:
    class Fixed(METHODS["adamw"]):
        name = "fixed-adamw"
        betas = (0.8, 0.9)

    class Free(Fixed):
        name = "free-adamw"
        betas = METHODS["adamw"].settings["betas"]

    assert "betas" not in Fixed.settings
    assert {name: Fixed.constants[name] for name in ("beta1", "beta2")} == {"beta1": 0.8, "beta2": 0.9}
    assert "betas" in Free.settings
    assert "beta1" not in Free.constants
