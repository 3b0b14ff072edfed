"""Write the generated pages: commands, problems, methods, reference, and the results table of the README.

They come from the help of the command line, the registries and docstrings. `make docs` runs this script, and a test checks
that the pages are current.
"""

import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

from upgd.cli import app
from upgd.data.sources import OFFICIAL
from upgd.experiments.paper.reproduce import PAPERS
from upgd.experiments.spec import describe, grids
from upgd.experiments.spec.settings import known
from upgd.methods import METHODS, Setting
from upgd.networks import ACTIVATIONS, BUILT_IN
from upgd.streams import registry

DOCS = Path(__file__).parent


def commands() -> str:
    """The page of commands: the command line's own help."""
    with mock.patch.object(sys, "argv", ["upgd"]):  # or usage would name the program that runs this one
        text = app.generate_docs(output_format="markdown")
    text = text[text.index("**Run experiments**:") :].replace("```console", "```text")
    text = re.sub(r"\*\*Options\*\*:\n\n(\* `--.*\n)+\n", "", text)  # --help and --version
    text = re.sub(r"(?:^    upgd .*\n\n?)+", _examples, text, flags=re.MULTILINE)
    return (
        "# Commands\n\n"
        "The help of each command, as shown by its option `--help`. [Experiments](experiments.md) explains how the "
        "commands work together. Every command also takes `--plugin MODULE`, a module that registers methods, streams, "
        "networks, data sets or diagnostics; it can be repeated. See [Your own method](your-own-method.md).\n\n"
        + text.strip()
        + "\n"
    )


def _examples(found: re.Match[str]) -> str:
    """Indented commands as one block, whose lines can wrap."""
    return "```sh\n" + "".join(f"{line.strip()}\n" for line in found[0].splitlines() if line) + "```\n\n"


def problems() -> str:
    """The page of problems, methods, networks and data sets: the registries."""
    return "\n".join(
        [
            "# Problems and methods",
            "",
            "The names that `upgd run`, `upgd sweep` and `upgd.experiments` accept.",
            "",
            "## Problems",
            "",
            f"{_code(f'{family}-DATA' for family in registry.FAMILIES)} exist for every data set, including your own. "
            "Network, steps and seeds are the defaults of an experiment. [Streams](streams.md) explains the problems.",
            "",
            *_kinds_of_problems(),
            "",
            *_table(
                ["problem", "task length", "options", "network", "steps", "seeds"],
                [_problem(name) for name in registry.names()],
            ),
            "",
            "## Methods",
            "",
            "A setting without a value is required. Settings that tables omit at their defaults (`normalize`, `gated`, "
            "`profile`, and `betas` and `eps` of methods with `optimizer`) are not listed; `upgd methods NAME` shows all "
            "settings of a method, and its rule. [Methods](methods.md) has the rules of all.",
            "",
            *_table(
                ["method", "label", "settings and defaults"],
                [_method(name) for name in METHODS],
            ),
            "",
            "## Settings",
            "",
            *_table(
                ["setting", "symbol", "what it is", "values"],
                [_setting(name, setting) for name, setting in known().items()],
            ),
            "",
            "## Short grids",
            "",
            "The values that a sweep tries if none are given (`--grid short`). Other settings keep their defaults.",
            "",
            *_table(
                ["method", "settings", "values to try"],
                [
                    [
                        f"`{name}`",
                        str(prod(map(len, grid.values()))),
                        "; ".join(f"`{one}` {_list(grid[one])}" for one in grid),
                    ]
                    for name, grid in ((name, grids.short(name)) for name in METHODS)
                ],
            ),
            "",
            "## Networks",
            "",
            f"{_code(BUILT_IN)}, or the sizes of the hidden layers, such as `300-150`. An activation may "
            f"follow a colon, as in `300-150:tanh`: {_code(ACTIVATIONS)}. `300-150:layernorm` and `300-150:tanh:layernorm` "
            "have an `nn.LayerNorm` before each activation. `upgd.networks.register` adds any other module.",
            "",
            "## Data sets",
            "",
            f"`digits` is part of the package. `upgd data fetch` downloads {_code(OFFICIAL)}. [Data](data.md) explains how "
            "to add your own.",
            "",
        ]
    )


def _kinds_of_problems() -> list[str]:
    """What changes in the problems, once for those that differ only in the data set."""
    alike: dict[str, list[str]] = {}
    for name in registry.names():
        alike.setdefault(describe.about_problem(name), []).append(name)
    return [f"- {_code(names)}: {about}" for about, names in alike.items()]


def _problem(name: str) -> list[str]:
    facts = describe.problem(name)
    run = [f"`{facts['network']}`", f"{facts['steps']:,}", str(facts["seeds"])] if "network" in facts else ["–"] * 3
    return [f"`{name}`", f"{facts['task_length']:,}", _code(facts["options"]), *run]


def _method(name: str) -> list[str]:
    method = METHODS[name]
    settings = {one: setting.default for one, setting in method.settings.items() if not setting.quiet}
    words = [f"`{one}`" if value is ... else f"`{one}` {_value(value)}" for one, value in settings.items()]
    return [f"`{name}`", method.label, ", ".join(words)]


def _setting(name: str, setting: Setting) -> list[str]:
    if setting.choices:
        values = " or ".join(f"`{choice}`" for choice in setting.choices)
    elif setting.text:
        values = "text"
    else:
        low = "" if setting.least is None else f"≥ {setting.least:g}"
        high = "" if setting.below is None else f"< {setting.below:g}"
        values = ", ".join(filter(None, (low, high)))
    return [f"`{name}`", setting.symbol or "–", setting.help, values]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(_value, values))


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_value, value))
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def methods() -> str:
    """The page of methods by family: what their classes say."""
    lines = [
        "# Methods",
        "",
        "Every method is one class in `upgd.methods`, with its formula and source. Tests compare it with a float64 loop "
        "written from the published formula. w is a weight, g its gradient, ξ normal noise, t the step from 1. "
        "[Problems and methods](problems.md) lists settings and grids; [Your own method](your-own-method.md) explains how to "
        "add a method.",
    ]
    families: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        if method.__module__.startswith("upgd.methods."):  # not those of plug-ins
            families.setdefault(method.__module__, []).append(name)
    for module, names in families.items():
        about = inspect.getdoc(sys.modules[module]) or ""
        title, _, rest = about.partition("\n\n")
        lines += ["", f"## {' '.join(title.split()).rstrip('.')}", *(["", _markdown(rest)] if rest else [])]
        for name in names:
            lines += ["", f"### {METHODS[name].label}: `{name}`", "", _markdown(inspect.getdoc(METHODS[name]) or "")]
    return "\n".join([*lines, ""])


def _markdown(text: str) -> str:
    """A docstring as Markdown: code in single backticks, literal blocks fenced."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text.replace("``", "`"))
    parts = re.split(r"(?m)(?<=::)\n\n((?:    .*\n?|\n)+)", text + "\n")
    for i in range(1, len(parts), 2):
        before = parts[i - 1].removesuffix("::")
        parts[i - 1] = before.rstrip() if not before or before.endswith("\n") else f"{before}:"
        parts[i] = f"\n\n```text\n{inspect.cleandoc(parts[i])}\n```\n\n"
    return "".join(parts).strip()


#: The problems and methods of the README's table, and the columns' labels.
_SHOWN = ("output-permuted-emnist", "output-permuted-cifar10", "input-permuted-mnist")
_COLUMNS = ("UPGD", "Shrink & Perturb", "SGDW", "PGD", "AdamW")


def _results(name: str) -> list[list[str]]:
    """The rows of a study: the best settings in the paper's grid and, if it was searched, in the extended one."""
    page = (DOCS / "results" / f"{name}.md").read_text(encoding="utf-8")
    table = page.partition("## Weight-wise, global")[2].partition("\n## ")[0]
    best = dict(re.findall(r"^\| (?:\d+\. )?([^|]+?) \| (?:[^|]+ \| ){1,2}(0\.\d+) ±", table, re.M))
    grids = {"paper's": {method: best.get(method + PAPERS, best.get(method)) for method in _COLUMNS}}
    if re.search(r"Written by `[^`]* --grid extended", page):
        grids["extended"] = {method: best.get(method) for method in _COLUMNS}
    title = page.partition("\n")[0].removeprefix("# ")
    rows = []
    for grid, means in grids.items():
        most = max(mean for mean in means.values() if mean is not None)
        cells = ["–" if mean is None else _rounded(mean) for mean in means.values()]
        cells = [f"**{cell}**" if mean == most else cell for cell, mean in zip(cells, means.values(), strict=True)]
        rows.append([f"[{title}](docs/results/{name}.md)" if not rows else "", grid, *cells])
    return rows


def readme(repository: str | None = None) -> str:
    """README.md with its badges, its links to Colab, and the results, which come from the first table of each page."""
    repository = repository or _repository()
    rows = [row for name in _SHOWN for row in _results(name)]
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    text = _between(text, "badges", " ".join(_badges(repository)))
    text = _between(text, "notebooks", "\n".join(_notebooks(repository)))
    return _between(text, "results", "\n".join(_table(["problem", "grid", *_COLUMNS], rows)))


def _between(text: str, name: str, content: str) -> str:
    """The text with other content between two comments."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"README.md must have the comments {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{content}{end}{after}"


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def _repository() -> str | None:
    """The address of the repository, which is written in pyproject.toml only."""
    address: str | None = _project()["urls"].get("Repository")
    return address and address.rstrip("/")


def _badges(repository: str | None) -> list[str]:
    project = _project()
    pythons = [one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)]
    torch = next(one.removeprefix("torch>=") for one in project["dependencies"] if one.startswith("torch>="))
    shields = "https://img.shields.io/badge"
    badges = [
        f"![Python {pythons[0]}–{pythons[-1]}]({shields}/python-{pythons[0]}–{pythons[-1]}-blue)",
        f"![PyTorch {torch}+]({shields}/pytorch-{torch}%2B-ee4c2c)",
        f"![{project['license']} licence]({shields}/licence-{project['license']}-green)",
    ]
    if repository:
        runs = f"{repository}/actions/workflows/ci.yml"
        badges[:0] = [
            f"[![CI]({runs}/badge.svg)]({runs})",
            f"[![PyPI](https://img.shields.io/pypi/v/{project['name']})](https://pypi.org/project/{project['name']}/)",
        ]
    return badges


#: The notebooks in examples/ and their subjects.
_NOTEBOOKS = {
    "optimizer": "UPGD instead of AdamW in a training loop",
    "compare": "search settings, compare methods, confirm the result on fresh seeds",
    "look_inside": "plasticity, dormant units and utility of a network",
}


def _notebooks(repository: str | None) -> list[str]:
    """A list of the notebooks; with links to Colab if the repository is on GitHub."""
    github = "https://github.com/"
    lines = []
    for name, about in _NOTEBOOKS.items():
        colab = f"https://colab.research.google.com/github/{(repository or '').removeprefix(github)}"
        path = f"examples/{name}.ipynb"
        link = f" ([open in Colab]({colab}/blob/main/{path}))" if (repository or "").startswith(github) else ""
        lines.append(f"- [`{name}.ipynb`]({path}): {about}{link}")
    return lines


def settings_of_site(repository: str | None = None) -> str:
    """mkdocs.yml with the address of the repository."""
    return _with_line("mkdocs.yml", "site_description", "repo_url", repository or _repository())


def citation(repository: str | None = None) -> str:
    """CITATION.cff with the address of the repository."""
    return _with_line("CITATION.cff", "license", "repository-code", repository or _repository())


def _with_line(file: str, after: str, key: str, value: str | None) -> str:
    """A file of YAML with one key set, or without it if there is no value."""
    lines = (DOCS.parent / file).read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith(f"{key}:")]
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{after}:")) + 1
    return "\n".join([*lines[:at], *([f"{key}: {value}"] if value else []), *lines[at:], ""])


def _rounded(number: str) -> str:
    return str(Decimal(number).quantize(Decimal("0.001"), ROUND_HALF_UP))


#: The modules with public names, in the order of the reference.
MODULES = {
    "upgd": "Optimizers, curvature, monitor, and access to stored results.",
    "upgd.experiments": "Declare, run and compare experiments.",
    "upgd.report": "The HTML report and the live page.",
    "upgd.streams": "Non-stationary problems as functions of (seed, step).",
    "upgd.data": "Data sets: load, download, register.",
    "upgd.population": "Train many independent online learners at once.",
    "upgd.population.diagnostics": "Figures about learners of a population, and how to add your own.",
    "upgd.population.backend": "The interface of backends.",
    "upgd.methods": "Learning methods: one class each.",
    "upgd.methods.units": "What methods that act on hidden units receive and return.",
    "upgd.networks": "Networks by name, with initial weights as a function of the seed.",
    "upgd.activations": "Activation modules that torch does not have.",
    "upgd.curvature": "HesScale and the rules for layers and losses.",
    "upgd.utility": "True utility, approximations, rank correlation.",
    "upgd.monitor": "Figures about a network that learns.",
    "upgd.rules": "The mathematics of UPGD as pure functions.",
    "upgd.noise": "Counter-based random numbers.",
    "upgd.store": "Results in one SQLite file.",
}


#: Descriptions of public constants, which have no docstrings.
CONSTANTS = {
    "upgd.population.METHODS": "All registered methods by name.",
    "upgd.methods.METHODS": "All registered methods by name.",
    "upgd.networks.ACTIVATIONS": "The activation functions by the name that networks use, such as `300-150:tanh`.",
    "upgd.population.backend.Loss": "The losses: `cross_entropy` and `mse`.",
}


#: What optimizers have beyond the methods of torch's.
INHERITED = {
    **dict.fromkeys(["upgd.AdaUPGD", "upgd.UPGD", "upgd.UPS"], "[gates]"),
    **dict.fromkeys(["upgd.FeatureUPGD", "upgd.FeatureUPS"], "[features, gates, remove]"),
}


def public(module: str) -> list[str]:
    """The public names of a module, submodules aside, classes and functions before constants."""
    found = import_module(module)
    names = [*found.__all__, *(["open"] if module == "upgd" else [])]
    names = [name for name in names if not name.startswith("_") and not inspect.ismodule(getattr(found, name))]
    return sorted(set(names) - {"MIGRATIONS"}, key=str.lower)


def reference(module: str) -> str:
    """The page of a module: all its public names, by their docstrings."""
    parts = [f"# {module}", MODULES[module]]
    for name in public(module):
        constant = CONSTANTS.get(f"{module}.{name}")
        if constant:
            parts.append(f"## `{module}.{name}` {{: #{module}.{name} }}\n\n{constant}")
        elif inherited := INHERITED.get(f"{module}.{name}"):
            parts.append(f"::: {module}.{name}\n    options:\n      inherited_members: {inherited}")
        else:
            parts.append(f"::: {module}.{name}")
    return "\n\n".join(parts) + "\n"


def reference_index() -> str:
    """The page that lists all public names."""
    lines = ["# Public names", "", "Every public name, by module. [Commands](../commands.md) lists the command line."]
    for module, about in MODULES.items():
        rows = [[f"[`{name}`]({_file(module)}#{module}.{name})", _summary(module, name)] for name in public(module)]
        lines += ["", f"## [{module}]({_file(module)})", "", about, "", *_table(["name", "what it is"], rows)]
    return "\n".join([*lines, ""])


def _summary(module: str, name: str) -> str:
    """The first sentence of a docstring."""
    text = inspect.getdoc(getattr(import_module(module), name)) or ""
    text = CONSTANTS.get(f"{module}.{name}", text.partition("\n\n")[0])
    return " ".join(_markdown(text).split())


def _file(module: str) -> str:
    return f"{module.removeprefix('upgd.')}.md"


PAGES: dict[str, Callable[[], str]] = {
    "reference/index.md": reference_index,
    **{f"reference/{_file(module)}": partial(reference, module) for module in MODULES},
    "methods.md": methods,
    "commands.md": commands,
    "problems.md": problems,
    "../README.md": readme,
    "../mkdocs.yml": settings_of_site,
    "../CITATION.cff": citation,
}

if __name__ == "__main__":
    for page, text in PAGES.items():
        (DOCS / page).parent.mkdir(exist_ok=True)
        (DOCS / page).write_text(text(), encoding="utf-8")
