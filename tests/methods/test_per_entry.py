"""Weight-wise methods, each compared with a loop written from its formula."""

from collections import defaultdict

import pytest
import torch
from by_hand import PROBLEMS, assert_learned, learned_by_hand, population_of
from torch import Tensor, nn

from upgd.population import Learner, Population

#: Two settings of every method, different for each learner, so that mix-ups are detected.
SETTINGS: dict[str, list[dict]] = {
    "momentum": [{"lr": 0.02, "momentum": 0.9}, {"lr": 0.05, "momentum": 0.5}],
    "adam": [{"lr": 0.01}, {"lr": 0.003, "betas": (0.0, 0.99), "eps": 1e-4}],
    "rmsprop": [{"lr": 0.003}, {"lr": 0.001, "beta_square": 0.9, "eps": 1e-3}],
    "l2-init": [{"lr": 0.05, "regularization": 0.3}, {"lr": 0.02, "regularization": 0.01}],
    "l2-init, adam": [
        {"lr": 0.01, "regularization": 0.3, "optimizer": "adam"},
        {"lr": 0.003, "regularization": 0.1, "optimizer": "adam", "betas": (0.5, 0.9), "eps": 1e-3},
    ],
    "weight-clipping": [{"lr": 0.1, "clip": 1.0}, {"lr": 0.05, "clip": 1.2}],
    "weight-clipping, adam": [{"lr": 0.01, "clip": 1.0, "optimizer": "adam"}, {"lr": 0.03, "optimizer": "adam"}],
    "obgd": [{"lr": 0.5}, {"lr": 0.05, "overshoot": 1.0}],
    "shrink-and-perturb-init": [
        {"lr": 0.05, "sigma": 0.0, "weight_decay": 0.1},
        {"lr": 0.02, "sigma": 0.0, "weight_decay": 0.3},
    ],
    "s-ewc": [{"lr": 0.03, "kappa": 1.0}, {"lr": 0.02, "kappa": 5.0, "beta_importance": 0.9, "beta_weights": 0.99}],
    "s-mas": [{"lr": 0.03, "kappa": 1.0}, {"lr": 0.02, "kappa": 5.0, "beta_importance": 0.9, "beta_weights": 0.99}],
    "s-si": [{"lr": 0.03, "kappa": 1.0}, {"lr": 0.02, "kappa": 0.5, "beta_importance": 0.9, "damping": 1e-2}],
    "s-rwalk": [{"lr": 0.03, "kappa": 1.0}, {"lr": 0.02, "kappa": 0.5, "beta_importance": 0.9, "damping": 1e-2}],
}


class ByHand:
    """One step of each method, by parameter; its state is in ``self.kept[name]``."""

    def __init__(self, case: str, settings: dict) -> None:
        self.case = case
        self.lr = settings["lr"]
        self.settings = settings
        self.kept: dict[str, dict] = defaultdict(dict)

    def __call__(self, model: nn.Module, t: int) -> None:
        weights = dict(model.named_parameters())
        if self.case == "obgd":
            norm = sum(float(w.grad.abs().sum()) for w in weights.values())
            largest = self.lr * self.settings.get("overshoot", 2.0) * norm
            for w in weights.values():
                w -= min(self.lr, self.lr / largest) * w.grad
            return
        rule = getattr(self, self.case.partition(",")[0].replace("-", "_"))
        for name, w in weights.items():
            if not self.kept[name]:
                fan_in = weights[name.rpartition(".")[0] + ".weight"][0].numel()
                self.kept[name] |= {"begin": w.clone(), "before": w.clone(), "bound": fan_in**-0.5}
            new = rule(w.clone(), w.grad, self.kept[name], t)
            self.kept[name]["before"] = w.clone()
            w.copy_(new)

    def average(self, kept: dict, name: str, value: Tensor, beta: float, t: int) -> Tensor:
        """The mean of all values so far, weighted by β to the power of their age."""
        kept[name] = beta * kept.get(name, 0) + value
        kept[name + " weights"] = beta * kept.get(name + " weights", 0) + 1
        return kept[name] / kept[name + " weights"]

    def optimizer_step(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        if self.settings.get("optimizer", "sgd") == "sgd" and self.case != "adam":
            return w - self.lr * g
        beta1, beta2 = self.settings.get("betas", (0.9, 0.999))
        m, v = self.average(kept, "m", g, beta1, t), self.average(kept, "v", g**2, beta2, t)
        return w - self.lr * m / (v.sqrt() + self.settings.get("eps", 1e-8))

    adam = optimizer_step

    def momentum(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        kept["v"] = self.settings["momentum"] * kept.get("v", 0) + g
        return w - self.lr * kept["v"]

    def rmsprop(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        beta = self.settings.get("beta_square", 0.99)
        kept["v"] = beta * kept.get("v", 0) + (1 - beta) * g**2
        return w - self.lr * g / (kept["v"].sqrt() + self.settings.get("eps", 1e-8))

    def l2_init(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        return self.optimizer_step(w, g + self.settings["regularization"] * (w - kept["begin"]), kept, t)

    def weight_clipping(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        limit = self.settings.get("clip", 2.0) * kept["bound"]
        return self.optimizer_step(w, g, kept, t).clamp(-limit, limit)

    def shrink_and_perturb_init(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        return w - self.lr * (g + self.settings["weight_decay"] * w)

    def pulled(self, w: Tensor, g: Tensor, importance: Tensor, kept: dict, t: int) -> Tensor:
        average = self.average(kept, "weights", w, self.settings.get("beta_weights", 0.999), t)
        return w - self.lr * (g + self.settings["kappa"] * importance * (w - average))

    def important(self, kept: dict, name: str, value: Tensor, t: int) -> Tensor:
        return self.average(kept, name, value, self.settings.get("beta_importance", 0.999), t)

    def s_ewc(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        return self.pulled(w, g, self.important(kept, "fisher", g**2, t), kept, t)

    def s_mas(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        return self.pulled(w, g, self.important(kept, "size", g.abs(), t), kept, t)

    def s_si(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        delta = kept["before"] - w
        gained, gone = self.important(kept, "gained", g * delta, t), self.important(kept, "gone", delta, t)
        omega = gained / (gone**2 + self.settings.get("damping", 1e-3))
        return self.pulled(w, g, torch.where(omega > 0, omega, 0), kept, t)

    def s_rwalk(self, w: Tensor, g: Tensor, kept: dict, t: int) -> Tensor:
        delta = kept["before"] - w
        fisher = self.important(kept, "fisher", g**2, t)
        gained = torch.where(g * delta > 0, g * delta, 0)
        score = gained / (0.5 * fisher * delta**2 + self.settings.get("damping", 1e-3))
        return self.pulled(w, g, fisher + self.important(kept, "score", score, t), kept, t)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("case", SETTINGS)
def test_the_method_is_its_formula(case: str, problem: str) -> None:
    population = population_of(problem, case.partition(",")[0], SETTINGS[case])
    for seed, settings in enumerate(SETTINGS[case]):
        assert_learned(population, seed, learned_by_hand(problem, seed, ByHand(case, settings)))


@pytest.mark.parametrize("case", [case for case in SETTINGS if case != "adam"])
def test_the_settings_make_a_difference(case: str) -> None:
    """Otherwise, the comparison above would not test the difference from gradient descent."""
    first = population_of("classes", case.partition(",")[0], SETTINGS[case][:1]).parameters(0)
    rest = {"lr": SETTINGS[case][0]["lr"]}
    method = "adam" if case.endswith("adam") else "sgd"
    plain = population_of("classes", method, [rest]).parameters(0)
    assert any((first[name] - plain[name]).abs().max() > 1e-4 for name in first)


def test_perturbations_have_the_scale_of_the_initial_weights() -> None:
    """The noise of a layer is that of Shrink & Perturb, times the standard deviation of its initial weights."""
    settings = {"lr": 0.1, "sigma": 0.5, "weight_decay": 0.2}
    one = population_of("classes", "shrink-and-perturb", [settings], steps=1).parameters(0)
    other = population_of("classes", "shrink-and-perturb-init", [settings], steps=1).parameters(0)
    still = population_of("classes", "shrink-and-perturb-init", [settings | {"sigma": 0.0}], steps=1).parameters(0)
    for name, w in one.items():
        fan_in = one[name.rpartition(".")[0] + ".weight"].shape[1]
        deviation = (1 / (3 * fan_in)) ** 0.5
        torch.testing.assert_close(other[name] - still[name], (w - still[name]) * deviation, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["weight-clipping", "shrink-and-perturb-init"])
def test_a_network_without_initial_distribution_is_refused(method: str) -> None:
    network = nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, 3))
    settings = {"sigma": 0.1, "weight_decay": 0.1} if method.startswith("shrink") else {}
    stacked = {name: p.detach()[None] for name, p in network.named_parameters()}
    with pytest.raises(ValueError, match="PReLU"):
        Population(network, [Learner(method=method, lr=0.1, **settings)], backend="torch", parameters=stacked)
