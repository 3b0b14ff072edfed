"""Arithmetic on settings and the step in a population, compared with plain numbers, one learner at a time."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from upgd.methods._scalars import Scalar, Scalars, evaluate

LR, P = (0.1, 0.02, -0.3), (0.5, 0.01, 0.2)
ROW = torch.tensor([-0.4, 0.0, 0.03, 2.0], dtype=torch.float64)

#: A rule with ``h.lr``, ``h.p`` and ``t``; and what it is for one learner, where these are tensors of no dimension.
RULES: dict[str, Callable] = {
    "clamp between settings": lambda w, h, t: torch.clamp(w, min=-h.p, max=h.p),
    "clamp by a setting and a number": lambda w, h, t: torch.clamp(w, min=-h.p, max=torch.full_like(h.p, 0.02)),
    "alpha": lambda w, h, t: w + h.lr * w,
    "value": lambda w, h, t: w - h.lr * w * w.abs(),
    "warm-up": lambda w, h, t: w * torch.clamp(t / 20, max=1.0),
    "choice of numbers": lambda w, h, t: w * (0.1 if t > 3 else 1.0),
    "choice of tensors": lambda w, h, t: torch.where(t % 2 != 0, w, 0.5 * w),
    "rounds": lambda w, h, t: w * 0.9 ** (t // 3) + 7 // t + 7 % t,
    "size": lambda w, h, t: w * abs(h.lr) + (+h.p),
    "root": lambda w, h, t: w * torch.sqrt(h.p),
    "both": lambda w, h, t: torch.where((t > 3) & (w > 0) | ~(t != 2), w, 0.5 * w),
}
#: How the same rules are written for a population, where that differs.
WRITTEN: dict[str, Callable] = {
    "clamp by a setting and a number": lambda w, h, t: w.clamp(-h.p, 0.02),
    "alpha": lambda w, h, t: torch.add(w, w, alpha=h.lr),
    "value": lambda w, h, t: torch.addcmul(w, w, w.abs(), value=-h.lr),
    "choice of numbers": lambda w, h, t: w * torch.where(t > 3, 0.1, 1.0),
}


class _Numbers:
    def __init__(self, lr: Tensor, p: Tensor) -> None:
        self.lr, self.p = lr, p


@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize("name", RULES)
def test_expressions_have_the_values_of_each_learner(name: str, step: int) -> None:
    values = {"lr": torch.tensor(LR, dtype=torch.float64), "p": torch.tensor(P, dtype=torch.float64)}
    now = {**values, "t": step}
    h = Scalars(values, lambda scalar: evaluate(scalar, now, values["lr"]))
    found = WRITTEN.get(name, RULES[name])(ROW.expand(3, -1), h, h.step)
    for i, row in enumerate(found):
        one = _Numbers(values["lr"][i], values["p"][i])
        torch.testing.assert_close(
            row, RULES[name](ROW, one, torch.tensor(step, dtype=torch.float64)), rtol=1e-14, atol=0
        )


def _scalar(function: Callable) -> Scalar:
    h = Scalars({"p": torch.zeros(1)}, lambda scalar: torch.zeros(1))
    found = function(h, h.step)
    assert isinstance(found, Scalar)
    return found


def test_expressions_have_the_values_of_each_step() -> None:
    """Kernels compute them for many steps at once."""
    steps = np.arange(1, 8, dtype=np.float64)
    scalar = _scalar(lambda h, t: t / 2 * torch.where(t > 3, 0.1, 1.0) * torch.clamp(t / 5, max=1.0) * h.p)
    wanted = [t / 2 * (0.1 if t > 3 else 1.0) * min(t / 5, 1.0) * 0.5 for t in steps]
    np.testing.assert_allclose(scalar.compute({"p": 0.5, "t": steps}), wanted, rtol=1e-15)
    assert scalar.changes


def test_keys_tell_keyword_arguments_apart() -> None:
    low, high = (_scalar(lambda h, t, name=name: torch.clamp(t / 20, **{name: 1.0})) for name in ("min", "max"))
    assert (low.key, high.key) == ("clamp(div(t, 20), min=1.0)", "clamp(div(t, 20), max=1.0)")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda w, h: torch.rsub(w, w, alpha=h.p),
            "torch.rsub needs a plain number where it is given p, which has one value",
        ),
        (lambda w, h: torch.nn.functional.elu(w, alpha=h.p), "torch.elu needs a plain number where it is given p"),
        (lambda w, h: torch.stack([h.p, h.p]), "torch.stack of a list of settings is not supported"),
    ],
)
def test_functions_that_need_one_number_for_all_learners_are_refused(function: Callable, message: str) -> None:
    values = {"p": torch.tensor(P, dtype=torch.float64)}
    with pytest.raises(TypeError, match=message):
        function(ROW.expand(3, -1), Scalars(values, lambda scalar: evaluate(scalar, values, values["p"])))
