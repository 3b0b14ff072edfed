"""Rules of parameters as operations."""

from types import SimpleNamespace

import pytest
import torch

from upgd.methods import Method, Setting
from upgd.methods.tracing import CannotTrace, traced


def method(update, **attributes) -> Method:
    made = type(
        "Made",
        (Method,),
        {
            "name": "made",
            "p": Setting(0.5, least=0),
            "update": lambda self, w, g, s, h, t: update(w, g, s, h, t),
            **attributes,
        },
    )
    return made()


def kinds(update) -> list[str]:
    return [node[0] for node in traced(method(update)).nodes]


def test_comparisons_and_logical_operations_are_traced() -> None:
    found = kinds(lambda w, g, s, h, t: torch.where((g == 0) | (h.p != w) & ~(w > 3), w, g))
    assert {"eq", "ne", "or", "and", "not"} <= set(found)


def test_truth_values_in_sums_are_numbers() -> None:
    """In torch, ``0.1·(g == 0)`` is 0 or 0.1."""
    found = kinds(lambda w, g, s, h, t: w - h.lr * (g + 0.1 * (g == 0)))
    assert found.index("where") == found.index("eq") + 3  # after the constants 1 and 0


@pytest.mark.parametrize(
    ("update", "why"),
    [
        (lambda w, g, s, h, t: w - ((g > 0) + (w > 0)) * g, "arithmetic on truth values alone"),
        (lambda w, g, s, h, t: torch.where(g, w, g), "a number where torch needs true or false"),
        (lambda w, g, s, h, t: torch.where(g > 0, w > 0, g > 0), "chooses between truth values"),
        (lambda w, g, s, h, t: w & g, "a number where torch needs true or false"),
        (lambda w, g, s, h, t: w - g.abs() ** h.p, "the power <per learner: p>"),
        (lambda w, g, s, h, t: w - g % 1.0, "raises TypeError for symbols"),
        (lambda w, g, s, h, t: w - w[:, :1], "takes a part of a tensor"),
        (lambda w, g, s, h, t: w - torch.stack([g, g])[0], r"torch\.stack with a list"),
    ],
)
def test_what_cannot_be_traced_gives_a_reason(update, why: str) -> None:
    with pytest.raises(CannotTrace, match=why):
        traced(method(update))


def test_an_error_of_the_rule_is_left_to_tensors() -> None:
    def update(w, g, s, h, t):
        return w - SimpleNamespace().missing

    with pytest.raises(CannotTrace, match=r"AttributeError for symbols in place of tensors: .*missing"):
        traced(method(update))


def test_a_sign_and_factors_by_name_are_traced() -> None:
    assert "mul" in kinds(lambda w, g, s, h, t: torch.add(+w, g, alpha=-h.lr))
    assert "mul" not in kinds(lambda w, g, s, h, t: torch.add(w, g, alpha=1))
    assert {"max", "min"} <= set(kinds(lambda w, g, s, h, t: torch.clamp(g, min=-h.p, max=h.p)))


@pytest.mark.parametrize("phase", ["observe", "update"])
def test_a_state_that_is_not_declared_is_refused(phase: str) -> None:
    observing = {"observe": lambda self, g: {"v": g}} if phase == "observe" else {}
    made = method(lambda w, g, s, h, t: (w, {} if observing else {"v": g}), state={"m": "zeros"}, **observing)
    with pytest.raises(ValueError, match="made changes the state 'v', which it does not declare"):
        traced(made)


@pytest.mark.parametrize(
    ("update", "what"),
    [
        (lambda w, g, s, h, t: None, "NoneType"),
        (lambda w, g, s, h, t: (w, g), "Tensor, Tensor"),
        (lambda w, g, s, h, t: (w, {}, {}), "Tensor, dict, dict"),
    ],
)
def test_what_update_must_return(update, what: str) -> None:
    message = (
        "made.update must return the new parameter, or the new parameter and a dictionary of the changed state; "
        f"it returns {what}"
    )
    with pytest.raises(ValueError, match=message):
        traced(method(update))


@pytest.mark.parametrize("returned", [lambda self, g: None, lambda self, g: g, lambda self, g: ({}, g)])
def test_what_observe_must_return(returned) -> None:
    with pytest.raises(ValueError, match=r"made\.observe must return a dictionary of the changed state, or "):
        traced(method(lambda w, g, s, h, t: w, observe=returned))
