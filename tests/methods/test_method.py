"""The base class of all methods."""

import pytest

from upgd.methods import METHODS, Method, Setting
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
