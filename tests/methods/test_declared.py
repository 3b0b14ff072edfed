"""The checks of what a method declares."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from upgd.cli import running
from upgd.cli.options import Execution, _Declared
from upgd.methods import METHODS, Method, Setting, from_torch, optimizer, register
from upgd.methods._declared import TAKEN
from upgd.methods._scalars import Scalars
from upgd.methods.method import PHASES
from upgd.optim import choosing
from upgd.optim.from_method import MethodOptimizer
from upgd.optim.unit_method import UnitMethodOptimizer
from upgd.population import Learner


def plain(self, w, g, h):
    return w - h.lr * g


def noisy(self, w, g, h, noise):
    return w - h.lr * (g + noise)


def made(**attributes: Any) -> type[Method]:
    return type("Made", (Method,), {"name": "made", "update": plain, **attributes})


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t", "rules already have in h"),
        ("step", "rules already have in h"),
        ("resolve", "rules already have in h"),
        ("expression", "rules already have in h"),
        ("_x", "begins with an underscore"),
        ("gated", "has another meaning in the engine"),
        ("order", "has another meaning in the engine"),
        ("seed", "learners use"),
        ("kind", "learners use"),
        ("fused", "optimizers use"),
        ("maximize", "optimizers use"),
        ("params", "optimizers use"),
        ("bound", "optimizers use"),
        ("workers", "commands use"),
        ("rule", "is an attribute of every method"),
        ("state", "is an attribute of every method"),
        ("reset_units", "is an attribute of every method"),
    ],
)
def test_a_setting_with_a_name_of_the_engine_is_refused(name: str, reason: str) -> None:
    words = f"^Made has a setting '{name}', a name that {reason}; give it another name$"
    with pytest.raises(ValueError, match=words):
        made(**{name: Setting(0.1)})


def test_the_names_in_a_rule_of_a_setting_of_two_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match="has a setting 't', a name that rules already have in h"):
        made(decays=Setting((0.1, 0.2), pair=("t", "u")))
    with pytest.raises(
        ValueError, match=r"^Made has two settings with the name h\.u in rules; give one of them another name$"
    ):
        made(decays=Setting((0.1, 0.2), pair=("v", "u")), u=Setting(0.1))


def test_the_names_that_settings_cannot_have_are_those_in_the_code() -> None:
    def public(names) -> set[str]:
        return {name for name in names if not name.startswith("_")}

    def parameters(function) -> list[str]:
        known = inspect.signature(function).parameters.values()
        return [one.name for one in known if one.kind is not one.VAR_KEYWORD]

    derived = MethodOptimizer([torch.nn.Parameter(torch.ones(1))], METHODS["sgd"], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(derived, lambda _: 1.0)  # adds an option
    used = {
        "learners use": {*public(dir(Learner)), *parameters(Learner)},
        "commands use": {
            *("help", "version", "plugin", "json"),  # options of every command
            *public(vars(_Declared)),
            *(one.name for options in (_Declared, Execution) for one in dataclasses.fields(options)),
            *(name for command in (running.run, running.sweep) for name in parameters(command)),
        }
        - {"declaration", "execution"},
        "rules already have in h": {"t", *public(dir(Scalars({}, lambda scalar: torch.ones(1))))},
        "optimizers use": {
            *("param_names", "differentiable"),  # which torch adds to groups of parameters
            *(name for cls in (MethodOptimizer, UnitMethodOptimizer) for name in parameters(cls)),
            *(*parameters(optimizer), *choosing._OPTIONS, *choosing._OF_UNITS, *derived.param_groups[0]),
        }
        - {"lr", "name"},
    }
    for user, names in used.items():
        assert names == {*TAKEN[user]}, user


@pytest.mark.parametrize("name", [*PHASES, *(name for name in vars(Method) if not name.startswith("_"))])
def test_attributes_of_methods_are_not_settings(name: str) -> None:
    if name in ("lr", "normalize"):
        assert made(**{name: Setting(0.1)}).settings[name].default == 0.1
    else:
        with pytest.raises(ValueError, match="a name that is an attribute of every method; give it another name"):
            made(**{name: Setting(0.1)})


def test_a_former_name_of_a_setting_is_refused(registered) -> None:
    with pytest.raises(
        ValueError, match=r"^Made has a setting 'wise', the former name of 'granularity'; give it another"
    ):
        register(made(wise=Setting(0.1)))


def test_names_with_a_meaning_are_settings_of_that_meaning() -> None:
    assert "gated" in made(gated=METHODS["upgd"].settings["gated"]).settings
    assert "order" in made(order=METHODS["upgd"].settings["order"]).settings
    assert "noise" in made(noise=Setting("a", choices=("a", "b"))).settings  # the rule does not take noise
    assert made(noise="anticorrelated", update=noisy).noise == "anticorrelated"
    with pytest.raises(ValueError, match="has a setting 'noise', a name that has another meaning in the engine"):
        made(noise=Setting("a", choices=("a", "b")), update=noisy)
    with pytest.raises(ValueError, match=r"^Made\.noise must be 'white' or 'anticorrelated', not 'pink'$"):
        made(noise="pink", update=noisy)


def test_a_torch_optimizer_may_have_options_that_our_optimizers_have(registered) -> None:
    method = from_torch(torch.optim.SGD, "sgd-maximizing", settings={"maximize": False, "momentum": 0.9})
    assert {"maximize", "momentum"} <= {*method.settings}


# --------------------------------------------------------------------------------------------------- state and reductions


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"state": {"m": "ones"}}, r"^Made\.state\['m'\] must be 'zeros' or 'parameter', not 'ones'$"),
        ({"state": {"m": "layer"}}, r"^Made\.state\['m'\] must be 'zeros' or 'parameter', not 'layer'$"),
        ({"unit_state": {"m": 0}}, r"^Made\.unit_state\['m'\] must be 'zeros' or 'parameter' or 'layer', not 0$"),
        ({"state": ["m"]}, r"^Made\.state must be a dictionary, not \['m'\]$"),
        ({"state": {"parameters": "zeros"}}, r"^Made\.state\['parameters'\] has a name that the engine uses; give it"),
        (
            {"reductions": {"r": ("median", "learner")}},
            r"^Made\.reductions\['r'\] must be 'max' or .* over .* 'unit', such as \('max', 'learner'\), not \('median'",
        ),
        ({"reductions": {"r": ("max", "network")}}, r"^Made\.reductions\['r'\] must be .*, not \('max', 'network'\)$"),
        ({"reductions": {"r": "max"}}, r"^Made\.reductions\['r'\] must be .*, not 'max'$"),
        ({"unit_reductions": {"r": ("max", "unit")}}, r"^Made\.unit_reductions\['r'\] must be .* 'layer', such as"),
    ],
)
def test_state_and_reductions_that_do_not_exist_are_refused(attributes, words) -> None:
    with pytest.raises(ValueError, match=words):
        made(**attributes)


def test_those_of_a_variant_are_refused_when_a_learner_needs_them(registered) -> None:
    class Varying(Method):
        name = "varying"
        begins = Setting("zeros", choices=("zeros", "ones"))

        @property
        def state(self) -> Mapping[str, str]:  # type: ignore[override]
            return {"m": self.begins}

        update = plain

    register(Varying)
    assert Learner(method="varying", lr=0.1).kind.rule == "varying"
    with pytest.raises(ValueError, match=r"^Varying\.state\['m'\] must be 'zeros' or 'parameter', not 'ones'$"):
        _ = Learner(method="varying", lr=0.1, begins="ones").kind


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (Setting("c", choices=("a", "b")), "mode must be 'a' or 'b', not 'c'"),
        (Setting(2.0, below=1), "mode must be a number below 1, not 2.0"),
        (Setting(0.5, least=0, grid=(0.1, -0.1)), "mode must be a finite number of at least 0, not -0.1"),
    ],
)
def test_a_default_or_a_grid_that_is_not_allowed_is_refused(setting: Setting, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^Made has a default or a grid that it does not allow: {reason}"):
        made(mode=setting)
