"""UPGD as in the authors' public code, compared with a loop written from that rule."""

import pytest
import torch
from by_hand import PROBLEMS, assert_learned, learned_by_hand, population_of
from torch import nn

from upgd.population import Learner


class ByHand:
    def __init__(self, settings: dict, protects: bool) -> None:
        self.settings, self.protects, self.utility = settings, protects, {}

    def __call__(self, model: nn.Module, t: int) -> None:
        beta, lr = self.settings["beta_utility"], self.settings["lr"]
        for name, w in model.named_parameters():
            self.utility[name] = beta * self.utility.get(name, 0) - (1 - beta) * w.grad * w
        largest = max(u.max() for u in self.utility.values())
        for name, w in model.named_parameters():
            corrected = self.utility[name] / (1 - beta**t)
            scaled = corrected / largest
            if self.settings.get("scaling") == "local":
                scaled = torch.nn.functional.normalize(corrected, dim=-1)
            kept = 1 - torch.sigmoid(scaled) if self.protects else 1
            w.copy_(w * (1 - lr * self.settings.get("weight_decay", 0)) - lr * w.grad * kept)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("scaling", ["global", "local"])
@pytest.mark.parametrize("method", ["upgd", "upgd-nonprotecting"])
def test_the_authors_profile_is_the_authors_rule(method: str, scaling: str, problem: str) -> None:
    common = {"sigma": 0.0, "scaling": scaling, "profile": "authors"}
    settings = [
        {"lr": 0.05, "beta_utility": 0.9, **common},
        {"lr": 0.02, "beta_utility": 0.999, "weight_decay": 0.1, **common},
    ]
    population = population_of(problem, method, settings)
    for seed, own in enumerate(settings):
        assert_learned(population, seed, learned_by_hand(problem, seed, ByHand(own, method == "upgd")))


def test_the_profiles_differ_in_the_maximum() -> None:
    settings = {"lr": 0.05, "beta_utility": 0.99, "sigma": 0.0}
    paper, authors = (
        population_of("classes", "upgd", [settings | {"profile": profile}]).parameters(0)
        for profile in ("paper", "authors")
    )
    assert any((paper[name] - authors[name]).abs().max() > 1e-3 for name in paper)


def test_the_papers_profile_leaves_no_trace() -> None:
    """The default profile does not change keys of stores or the kind of computation."""
    plain = Learner(method="upgd", lr=0.1)
    assert plain == Learner(method="upgd", lr=0.1, profile="paper")
    assert "profile" not in plain.settings()
    assert not plain.kind.others
    assert plain.but(profile="authors").kind.others


def _even(profile: str, granularity: str) -> dict[str, torch.Tensor]:
    settings = {"lr": 0.5, "sigma": 0.02, "granularity": granularity, "profile": profile}
    return population_of("classes", "ups-even", [settings]).parameters(0)


def test_the_authors_control_of_ups_perturbs_the_output_layer_too() -> None:
    """Feature-wise, it then moves like the weight-wise control, which does not learn; the hidden layers are the same."""
    ours, theirs, everything = _even("paper", "feature"), _even("authors", "feature"), _even("paper", "weight")
    assert theirs.keys() == everything.keys()
    for name in theirs:
        torch.testing.assert_close(theirs[name], everything[name])
    *_, weight, bias = ours
    assert (ours[weight] - theirs[weight]).abs().max() > 1e-3
    assert (ours[bias] - theirs[bias]).abs().max() > 1e-3


def test_upgds_output_layer_learns_by_its_gradient_in_both_profiles() -> None:
    settings = {"lr": 0.05, "beta_utility": 0.0, "sigma": 0.02, "granularity": "feature"}
    one, other = (
        population_of("classes", "upgd", [settings | {"profile": profile}]).parameters(0)
        for profile in ("paper", "authors")
    )
    for name in one:  # without memory, corrected and uncorrected maxima are the same
        torch.testing.assert_close(one[name], other[name])
