"""The package as a whole: what importing it costs and needs, and the examples in its docstrings."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch

import upgd
import upgd.optim

HEAVY = ["scipy", "numba", "cyclopts", "rich", "pooch", "matplotlib", "plotly", "ray", "pandas"]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_needs_torch_and_numpy_alone() -> None:
    before = "import sys, torch; before = set(sys.modules)"
    loaded = run(f"{before}; import upgd; print([m for m in {HEAVY} if m in set(sys.modules) - before])")
    assert loaded.strip() == "[]"


def test_public_names_exist() -> None:
    for name in upgd.__all__:
        assert hasattr(upgd, name)


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert upgd.__version__ == version("upgd")


MODULES = sorted(m.name for m in pkgutil.walk_packages(upgd.__path__, "upgd.") if "__main__" not in m.name)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    tests = doctest.DocTestFinder(exclude_empty=True).find(
        importlib.import_module(module), extraglobs={"upgd": upgd, "torch": torch}
    )
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert runner.run(test).failed == 0, test.name
