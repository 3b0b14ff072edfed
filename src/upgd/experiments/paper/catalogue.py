"""Every experiment of the paper as data: the curves of each figure, and three scales to run them at."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from upgd.experiments.analysis.variants import label
from upgd.experiments.paper import best_known
from upgd.experiments.spec import defaults
from upgd.experiments.spec.declare import listed

__all__ = ["GRIDS", "SCALES", "STUDIES", "UTILITY_QUALITY", "Arm", "GridName", "Panel", "Scale", "Study", "settings_of"]

GridName = Literal["paper", "extended", "star", "climb", "coarse", "tiny"]

#: Which settings are tried.
GRIDS: dict[GridName, str] = {
    "paper": "all combinations of the paper's values",
    "extended": "all combinations of the paper's values, of those half a decade between them for the learning rate and σ, "
    "and of the β and σ of all best known settings",
    "star": "the best setting known beforehand, and all that differ from it in one hyperparameter",
    "climb": "the best setting known beforehand, all that differ from it in one hyperparameter, and so on around the best of "
    "them until nothing is better",
    "coarse": "a handful of combinations of the paper's values",
    "tiny": "two learning rates",
}

#: The study that is not a sweep: it measures approximations, see :mod:`upgd.experiments.paper.utility_quality`.
UTILITY_QUALITY = "utility-quality"


#: Colours of curves that share a panel with another curve of the same method.
_COLOURS = {
    "linear layer": "#999933",
    "SGD, half steps": "#999933",
    "UPGD, σ 0": "#AA4499",
    "UPS, local": "#44AA99",
    "even search, authors' code": "#AA4499",
}


@dataclass(frozen=True)
class Arm:
    """One curve: a method with its switches on a problem, whose hyperparameters are searched.

    Attributes:
        problem, network, method: see :class:`upgd.experiments.Experiment`.
        fixed: settings that belong to the figure rather than to the search: name, values to try.
        label: the name of the curve. Default: the method's label.
    """

    problem: str
    network: str
    method: str
    fixed: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the curve in its panel."""
        order = ", 2nd order" if ("order", (2,)) in self.fixed else ""
        return (self.label or label(self.method)) + order

    @property
    def colour(self) -> str | None:
        """The curve's own colour, if that of the method is taken."""
        return _COLOURS.get(self.label)


@dataclass(frozen=True)
class Panel:
    """Curves that are drawn together."""

    key: str
    title: str
    arms: tuple[Arm, ...]


@dataclass(frozen=True)
class Study:
    """A figure of the paper, or two that share their learners.

    Attributes:
        name, title, about: its name, title and description.
        panels: its panels.
        options: options of its problems.
    """

    name: str
    title: str
    about: str
    panels: tuple[Panel, ...]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def arms(self, panels: Iterable[str] = ()) -> list[Arm]:
        """Return the curves of some panels, or of all, without duplicates."""
        wanted = set(panels)
        return list(
            dict.fromkeys(arm for panel in self.panels if not wanted or panel.key in wanted for arm in panel.arms)
        )

    def problems(self) -> list[str]:
        """Return the problems of its curves, without duplicates."""
        return list(dict.fromkeys(arm.problem for arm in self.arms()))


@dataclass(frozen=True)
class Scale:
    """The scale of an experiment.

    Attributes:
        sweep_seeds: number of seeds per setting in the search.
        shortlist: number of best settings that are run again on fresh seeds; 0 for none.
        shortlist_seeds: number of seeds for each of them, which choose the best.
        final_seeds: number of seeds for each best setting, different from the others; None for as many as in the paper.
        grid: the settings to try.
        steps: number of steps by prefix of a problem's name; otherwise as in the paper.
        options: options of the problem.
        network: replaces the paper's network.
        data: substitutes for data sets.
    """

    name: str
    words: str
    sweep_seeds: int
    final_seeds: int | None
    grid: GridName
    steps: Mapping[str, int]
    options: Mapping[str, Any]
    network: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    shortlist: int = 0
    shortlist_seeds: int = 3

    def length(self, problem: str) -> int:
        """Return the number of steps of a learner."""
        known = [steps for beginning, steps in self.steps.items() if problem.startswith(beginning)]
        return known[0] if known else defaults.defaults(problem).steps


SCALES = {
    "paper": Scale("paper", "the paper's length, grids and number of runs", 1, None, "paper", {}, {}, shortlist=5),
    "small": Scale(
        "small",
        "shorter runs, fewer seeds and a coarse grid; takes a few minutes on two cores and does not show differences that "
        "need long runs",
        *(1, 5, "coarse"),
        steps={"toy": 5_000, "output-permuted-cifar10": 2_500, "": 10_000},
        options={},
    ),
    "smoke": Scale(
        "smoke",
        "a few steps of tiny networks on the embedded digits, only to check that everything runs",
        *(1, 2, "tiny"),
        steps={"": 80},
        options={"task_length": 40},
        network="10-8",
        data={"mnist": "digits", "emnist": "digits", "cifar10": "digits"},
    ),
}


def settings_of(arm: Arm, grid: GridName, centres: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the settings to try for an arm; ``centres`` are those of a climb, in addition to the known setting."""
    fixed = dict(arm.fixed)
    values: dict[str, tuple[Any, ...]] = {
        name: tuple(value for value in choices if value in fixed[name]) or fixed[name] if name in fixed else choices
        for name, choices in defaults.grid(arm.problem, arm.method).items()
    }
    values |= {name: choices for name, choices in fixed.items() if name not in values}
    if grid == "extended":
        for name, also in {**dict.fromkeys(("lr", "sigma"), ()), **best_known.values_known(arm.problem)}.items():
            if name in values and name not in fixed:
                between = _half_decades(values[name]) if name in ("lr", "sigma") else ()
                values[name] = tuple(dict.fromkeys((*values[name], *between, *also)))
    known = best_known.known(arm.problem, arm.method, *fixed.get("granularity", ()))
    if grid in ("star", "climb") and known:
        for name, also in best_known.values_known(arm.problem).items():
            if name in values and name not in fixed:
                values[name] += tuple(value for value in also if value not in values[name])
        around = [settings for centre in (*known, *centres) for settings in _star(values, centre)]
        return [settings for i, settings in enumerate(around) if settings not in around[:i]]
    if grid in ("coarse", "tiny"):
        wanted = _COARSE | _COARSE_OF.get(arm.method, {})
        values = {name: _few(choices, wanted.get(name, ())) for name, choices in values.items()}
    if grid == "tiny":
        values = {name: choices[: 2 if name == "lr" else 1] for name, choices in values.items()}
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def _few(choices: tuple[Any, ...], wanted: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(choice for choice in choices if choice in wanted) or choices[:1]


#: Values of the coarse grid.
_COARSE: dict[str, tuple[Any, ...]] = {
    "lr": (1.0, 0.01, 0.005, 0.001, 0.0005),  # two of them for half the paper's steps
    "beta_utility": (0.999,),
    "sigma": (0.1, 0.01, 0.001),
    "weight_decay": (0.01, 0.001, 0.0),
    "betas": ((0.9, 0.999),),
    "eps": (1e-8,),
}
#: AdamW needs smaller learning rates than the others, and no momentum on changing streams; see its best known settings.
_COARSE_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    "adamw": {
        "lr": (0.01, 0.001, 0.0001),
        "betas": ((0.9, 0.999), (0.0, 0.9999)),
        "weight_decay": (0.01, 0.0),
    },
}


def _half_decades(values: tuple[float, ...]) -> tuple[float, ...]:
    """Return three times every value but the largest: 0.003 between 0.001 and 0.01."""
    return tuple(float(f"{3 * value:.1g}") for value in values if 0 < value < max(values))


def _star(values: Mapping[str, tuple[Any, ...]], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a known setting, completed from the grid, and all settings that differ from it in one hyperparameter."""
    centre = {name: known.get(name, choices[0]) for name, choices in values.items()}
    if "eps" in centre:
        centre["eps"] = known.get("eps", 1e-8)
    for name, choices in values.items():
        if centre[name] not in choices and name not in ("beta_utility", "sigma"):
            centre[name] = choices[0]  # the figure fixes another value, for example no weight decay
    others = (
        centre | {name: choice}
        for name, choices in values.items()
        for choice in listed(name, choices)
        if choice != centre[name]
    )
    return [centre, *others]


def _arm(problem: str, method: str, *, network: str | None = None, label: str = "", **fixed: Any) -> Arm:
    chosen = tuple((name, value if isinstance(value, tuple) else (value,)) for name, value in fixed.items())
    return Arm(problem, network or defaults.defaults(problem).network, method, chosen, label)


_WISE = {
    "weight-global": "Weight-wise, global",
    "feature-global": "Feature-wise, global",
    "weight-local": "Weight-wise, local",
    "feature-local": "Feature-wise, local",
}
_DECAYS = (0.1, 0.01, 0.001, 0.0001)


def _panels(
    problem: str, baselines: Iterable[Arm], keys: Iterable[str] = _WISE, network: str | None = None, **fixed: Any
) -> tuple[Panel, ...]:
    """Return the usual four panels: baselines and both UPGDs, weight- or feature-wise, global or local."""
    panels = []
    for key in keys:
        granularity, scaling = key.split("-")
        orders = fixed.get("order", (1,))
        ours = [
            _arm(
                problem,
                method,
                network=network,
                **fixed | {"granularity": granularity, "scaling": scaling, "order": order},
            )
            for method in ("upgd", "upgd-nonprotecting")
            for order in orders
        ]
        panels.append(Panel(key, _WISE[key], (*ours, *baselines)))
    return tuple(panels)


def _toys(problem: str, title: str, about: str) -> tuple[Study, Study]:
    """Return the studies with a = 1, as in the paper's text, and with a = ½, as in the labels of its figures and its code."""
    baselines = [_arm(problem, method) for method in ("sgd", "pgd", "shrink-and-perturb")]
    baselines.append(_arm(problem, "sgd", network="linear", label="linear layer"))
    panels = _panels(problem, baselines, order=(1, 2), weight_decay=0.0)
    half = about.replace("the sum", "the mean", 1)
    return (
        Study(problem, title, about, panels),
        Study(f"{problem}-average", f"{title}, average", half, panels, {"amplitude": 0.5}),
    )


def _permuted(
    problem: str,
    title: str,
    about: str,
    keys: Iterable[str] = _WISE,
    network: str | None = None,
    name: str | None = None,
) -> Study:
    baselines = [_arm(problem, method, network=network) for method in ("sgdw", "pgd", "shrink-and-perturb", "adamw")]
    return Study(name or problem, title, about, _panels(problem, baselines, keys, network))


def _search() -> Study:
    panels = []
    for noise, granularity in product(("anticorrelated", "white"), ("weight", "feature")):
        arms = [
            _arm(
                "stationary-mnist",
                "ups",
                label=f"UPS, {scaling}",
                noise=noise,
                granularity=granularity,
                scaling=scaling,
                order=order,
            )
            for scaling in ("global", "local")
            for order in (1, 2)
        ]
        control = {"noise": noise, "granularity": granularity}
        arms.append(_arm("stationary-mnist", "ups-even", **control))
        if granularity == "feature":
            label = "even search, authors' code"
            arms.append(_arm("stationary-mnist", "ups-even", label=label, profile="authors", **control))
        panels.append(Panel(f"{granularity}-{noise}", f"{granularity.capitalize()}-wise, {noise} noise", tuple(arms)))
    about = (
        "Search without gradients: the less useful a weight or feature is, the more it is perturbed. The control "
        "perturbs everything evenly. Feature-wise, the output layer has no features to search and learns by its gradient; "
        "in the authors' code, the output layer of the control is perturbed instead."
    )
    return Study("ups-stationary-mnist", "Utility-based search on stationary MNIST", about, tuple(panels))


#: The problems of studies with a panel for each problem: key and title of the panel.
_PROBLEMS = {
    "toy-changing-inputs": ("toy-inputs", "Toy, changing inputs"),
    "toy-changing-outputs": ("toy-outputs", "Toy, changing outputs"),
    "stationary-mnist": ("stationary", "Stationary MNIST"),
    "input-permuted-mnist": ("mnist", "MNIST"),
    "output-permuted-emnist": ("emnist", "EMNIST"),
    "output-permuted-cifar10": ("cifar10", "CIFAR-10"),
}


def _ablation() -> Study:
    panels = []
    for problem in ("input-permuted-mnist", "output-permuted-emnist", "output-permuted-cifar10"):
        key, title = _PROBLEMS[problem]
        both = ("upgd", "upgd-nonprotecting", "adamw")
        decayed = [_arm(problem, method, weight_decay=_DECAYS) for method in (*both, "sgdw", "shrink-and-perturb")]
        plain = [
            *(_arm(problem, method, weight_decay=0.0) for method in both),
            _arm(problem, "sgd"),
            _arm(problem, "pgd"),
        ]
        panels.append(Panel(f"{key}-decay", f"{title}, weight decay", tuple(decayed)))
        panels.append(Panel(f"{key}-no-decay", f"{title}, no decay", tuple(plain)))
    about = (
        "The effect of weight decay: the same methods with and without it. The settings are those of the study of each "
        "problem, so both studies share their runs."
    )
    return Study("ablation", "Weight decay against perturbation", about, tuple(panels))


def _perturbation() -> Study:
    panels = []
    for problem, (key, title) in _PROBLEMS.items():
        ours: dict[str, Any] = {"granularity": "weight", "scaling": "global", "order": 1}
        if "permuted" not in problem:
            ours["weight_decay"] = 0.0
        arms = [
            _arm(problem, "upgd", **ours),
            _arm(problem, "upgd", label="UPGD, σ 0", **ours | {"sigma": 0.0}),
            _arm(problem, "sgdw" if "permuted" in problem else "sgd"),
        ]
        panels.append(Panel(key, title, tuple(arms)))
    about = (
        "UPGD, and UPGD with σ = 0, which protects but does not perturb. The other settings are those of the study of each "
        "problem, so both studies share UPGD's runs."
    )
    return Study("perturbation", "What the perturbation contributes", about, tuple(panels))


def _stationary() -> Study:
    baselines = [_arm("stationary-mnist", method) for method in ("sgd", "pgd", "shrink-and-perturb")]
    halves = tuple(rate / 2 for rate in defaults.grid("stationary-mnist", "sgd")["lr"])
    baselines.append(_arm("stationary-mnist", "sgd", label="SGD, half steps", lr=halves))
    about = (
        "Does protecting useful weights cost anything on a stationary stream? If most gates are close to one half, UPGD "
        "takes half of SGD's steps, so SGD is also run with half the step sizes of the grid."
    )
    panels = _panels("stationary-mnist", baselines, weight_decay=0.0)
    return Study("upgd-stationary-mnist", "UPGD on stationary MNIST", about, panels)


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(UTILITY_QUALITY, "How well approximate utilities order weights and features", "", ()),
        _search(),
        _stationary(),
        *_toys(
            "toy-changing-inputs",
            "Toy problem, changing inputs",
            "The target is the sum of two of 16 inputs; every 200 steps, two others are chosen. Little that was learned "
            "remains useful.",
        ),
        *_toys(
            "toy-changing-outputs",
            "Toy problem, changing outputs",
            "The target is the sum of two inputs; its sign flips every 200 steps. Features remain useful.",
        ),
        _permuted(
            "input-permuted-mnist",
            "Input-permuted MNIST",
            "The pixels are permuted anew every 5,000 steps. Nothing that was learned remains useful; the ability to learn "
            "does.",
        ),
        _permuted(
            "output-permuted-emnist",
            "Output-permuted EMNIST",
            "The labels are permuted anew every 2,500 steps. Features remain useful, and methods that forget them do worse.",
        ),
        _permuted(
            "output-permuted-cifar10",
            "Output-permuted CIFAR-10",
            "The same as output-permuted EMNIST, with colour images and a convolutional network.",
            ("weight-global", "weight-local"),
        ),
        _permuted(
            "output-permuted-cifar10",
            "Output-permuted CIFAR-10, the authors' network",
            "The same as output-permuted EMNIST, with colour images and the convolutional network of the authors' code, "
            "which has no activation after its convolutions.",
            ("weight-global", "weight-local"),
            network="conv-authors",
            name="output-permuted-cifar10-authors",
        ),
        _ablation(),
        _perturbation(),
    )
}
