"""The package as a whole: imports, requirements, and the examples in its docstrings."""

import ast
import doctest
import importlib
import pickle
import pkgutil
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import upgd
import upgd.optim
from upgd.store import Key, Record, Store

HEAVY = ["scipy", "numba", "cyclopts", "rich", "pooch", "matplotlib", "plotly", "ray", "pandas"]


def run(code: str, cwd: Path | None = None) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd).stdout


def test_public_names_need_only_torch_and_numpy() -> None:
    before = "import sys, torch; before = set(sys.modules)"
    loaded = run(f"{before}; from upgd import *; print([m for m in {HEAVY} if m in set(sys.modules) - before])")
    assert loaded.strip() == "[]"


def test_importing_loads_only_the_standard_library() -> None:
    loaded = run("import sys, upgd; print([m for m in ('torch', 'numpy', 'upgd.optim') if m in sys.modules])")
    assert loaded.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["data", "list"],
        ["runs"],
        ["best"],
        ["table"],
        ["export", "to.csv"],
    ],
    ids=" ".join,
)
def test_commands_that_compute_nothing_do_not_load_torch(arguments: list[str], tmp_path: Path) -> None:
    key = Key(problem="toy", network="linear", method="sgd", settings={"lr": 0.1}, seed=0, steps=4)
    with Store.write(tmp_path / "upgd.db") as store:
        store.add([Record(replace(key, seed=seed), window=2, loss=[0.5, 0.25]) for seed in range(3)])
    code = f"""
import sys
import tomllib
from upgd.cli import main
try:
    main({arguments})
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    assert run(code, cwd=tmp_path).splitlines()[-1] == "0 False"


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--version"], 0, f"{upgd.__version__}\n", ""),
        (["--help"], 0, "Usage: upgd COMMAND\n", ""),
        (["best"], 1, "", "upgd: the command line needs more packages: pip install 'upgd[run]'\n"),
    ],
)
def test_the_command_with_only_torch_and_numpy(arguments: list[str], code: int, out: str, err: str) -> None:
    blocked = f"import sys; sys.modules['cyclopts'] = None; sys.argv[1:] = {arguments}; import upgd.__main__"
    ended = subprocess.run([sys.executable, "-c", f"{blocked}; upgd.__main__.main()"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, err)
    assert ended.stdout.startswith(out)


def test_the_package_can_be_run() -> None:
    ended = subprocess.run([sys.executable, "-m", "upgd", "--version"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, f"{upgd.__version__}\n")


PUBLIC = [*upgd.__all__, "open", "curvature", "monitor", "noise", "optim", "rules"]


def test_a_public_name_is_there_when_it_is_asked_for() -> None:
    """… as the first use of the package, with each form of import."""
    run(f"""
import sys
import tomllib

def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "upgd"]:
        del sys.modules[name]

for name in {PUBLIC}:
    forget()
    import upgd
    assert name in dir(upgd)
    assert getattr(upgd, name) is getattr(upgd, name)
    forget()
    found = {{}}
    exec(f"from upgd import {{name}}; import upgd", found)
    assert found[name] is getattr(found["upgd"], name)
""")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'upgd' has no attribute 'SGD'"):
        upgd.SGD  # noqa: B018
    assert not hasattr(upgd, "__wrapped__")


def test_type_checkers_and_readers_of_the_source_see_the_same_names() -> None:
    """The names under TYPE_CHECKING equal those that are resolved."""
    tree = ast.parse(Path(upgd.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [(line.module, alias.name) for line in block.body for alias in line.names]
    hidden = {"open", "methods", "rules"}  # a star import must not replace built-in names
    assert {name for _, name in imports} | {"__version__"} == {*upgd.__all__, *hidden}
    for module, name in imports:
        assert getattr(upgd, name) is getattr(importlib.import_module(module), name)


def test_pickles_find_the_classes_in_a_fresh_interpreter(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = upgd.UPGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (tmp_path / "optimizer.pickle").write_bytes(pickle.dumps(optimizer))
    code = "import pickle; print(pickle.load(open('optimizer.pickle', 'rb')).gates().popitem()[1].numel())"
    assert run(code, cwd=tmp_path) == "1\n"


def test_the_version_is_in_one_place() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/upgd/__init__.py"


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert upgd.__version__ == version("upgd")


MODULES = sorted(m.name for m in pkgutil.walk_packages(upgd.__path__, "upgd.") if "__main__" not in m.name)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    tests = doctest.DocTestFinder(exclude_empty=True).find(
        importlib.import_module(module), extraglobs={"upgd": upgd, "torch": torch}
    )
    registries = [importlib.import_module(f"upgd.{name}")._REGISTERED for name in REGISTRIES]
    with ExitStack() as stack:
        for registry in registries:
            stack.enter_context(mock.patch.dict(registry))
        run_examples(tests)


#: Modules whose examples register something.
REGISTRIES = ("data.registry", "methods.registry", "networks", "population.diagnostics")


def run_examples(tests: list[doctest.DocTest]) -> None:
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert runner.run(test).failed == 0, test.name


def test_benchmarks_run_without_arguments() -> None:
    """``make bench`` runs all benchmarks, but not scripts that write pages or need arguments."""
    asked = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nonsense"], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert asked.returncode == 1
    assert asked.stderr.strip().endswith(
        "choose from curvature, defaults, gpu, optimizers, population, report, streams."
    )
