"""The code and commands in the documentation work.

The Python snippets of a page run from top to bottom in one namespace, as for a person who pastes them one after the other.
Commands are parsed by the command line itself.
"""

import doctest
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import runpy
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import upgd
import upgd.curvature._registry as curvature
import upgd.data.registry as data_sets
import upgd.experiments.paper.pieces as pieces
import upgd.experiments.paper.reproduce as reproduce
import upgd.methods.registry as methods
import upgd.networks as networks
import upgd.population.diagnostics as diagnostics
import upgd.streams.registry as streams
from upgd.data import cache
from upgd.experiments import load
from upgd.experiments.paper.reproduce import Plan
from upgd.population import METHODS

ROOT = Path(__file__).parent.parent
OWN_METHOD = ROOT / "docs" / "your-own-method.md"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page != OWN_METHOD),
    *TUTORIALS,
]


def snippets(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The fenced blocks of these languages, each with the line it begins at."""
    text = page.read_text()
    return [
        (text.count("\n", 0, found.start()) + 2, found[2])
        for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.S | re.M)
        if found[1] in languages
    ]


def shortened(code: str) -> str:
    """The same with few seeds and steps."""
    limits = {"seeds": 2, "steps": 2_000, "sweep_steps": 100}
    return re.sub(
        rf"\b({'|'.join(limits)})=([\d_]+)", lambda found: f"{found[1]}={min(int(found[2]), limits[found[1]])}", code
    )


def with_page(pages: list[Path], *languages: str) -> list[object]:
    return [pytest.param(page, id=f"{page.parent.name}-{page.name}") for page in pages if snippets(page, *languages)]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Prepare an empty folder, substitutes for downloads, and the environment of a cluster of one process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("UPGD_DATA", str(tmp_path / "cache"))
    for name in ("mnist", "emnist"):
        arrays = {f"{split}-images": np.zeros((20, 28, 28), np.uint8) for split in ("train", "test")}
        arrays |= {f"{split}-labels": np.arange(20, dtype=np.uint8) % 10 for split in ("train", "test")}
        with cache.locked(name):
            cache.store(cache.Manifest(name, 10, 255, name == "emnist", True, str(datetime.now(UTC)), []), arrays)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        registries = (module._REGISTERED for module in (data_sets, diagnostics, methods, networks))
        for registry in (curvature.LAYERS, curvature.LOSSES, streams._FACTORIES, *registries):
            stack.enter_context(mock.patch.dict(registry))
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", with_page([page for page in PAGES[1:] if page.name != "integrations.md"], "python"))
def test_the_snippets_of_a_page_run_from_top_to_bottom(page, desk, monkeypatch):
    planned = []
    monkeypatch.setattr(reproduce, "reproduce", lambda plan, run, say=None: planned.append(plan))  # it takes hours
    monkeypatch.setattr(pieces, "piece", lambda plan, *_, **__: (planned.append(plan) or mock.Mock(), False))
    namespace = {"__name__": "__main__"}
    for line, code in snippets(page, "python"):
        if code.startswith(">>>"):
            session = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line)
            assert doctest.DocTestRunner(verbose=False).run(session, clear_globs=False).failed == 0
        else:
            exec(compile("\n" * (line - 1) + shortened(code), str(page), "exec"), namespace)
    assert all(isinstance(plan, Plan) for plan in planned)


@pytest.mark.parametrize("page", with_page(PAGES, "toml"))
def test_declared_experiments_can_be_loaded(page, tmp_path):
    for _, text in snippets(page, "toml"):
        (tmp_path / "experiment.toml").write_text(text)
        assert load(tmp_path / "experiment.toml").learners()


def follow(page: Path, folder: Path, *languages: str) -> None:
    """Follow a page in an empty folder, with fewer seeds, steps and values."""
    kept = os.environ.get("PYTHONPATH")
    source = str(Path(upgd.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source, kept))), "OMP_NUM_THREADS": "1"}
    limits = {"seeds": 2, "steps": 200, "look-every": 100}
    for _, block in snippets(page, *languages):
        if found := re.match(r"# (\w+)\.py\n", block):
            (folder / f"{found[1]}.py").write_text(block)
            continue
        lines = [line.removeprefix("$ ") for line in block.splitlines()] if block.startswith("$") else [block]
        for line in lines:
            command = [sys.executable, "-c", shortened(line)]
            if line.startswith("upgd "):
                short = re.sub(
                    r"--(seeds|steps|look-every) (\d+)(?![\d,])",
                    lambda m: f"--{m[1]} {min(int(m[2]), limits[m[1]])}",
                    line,
                )
                short += " --lr 0.03 --quiet" * (short.startswith("upgd sweep") and "--lr" not in short)
                command[2:] = ["from upgd.cli import main; main()", *shlex.split(short)[1:]]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}: {done.stderr}"


@pytest.mark.slow
def test_the_page_leads_from_an_empty_folder_to_a_report(tmp_path):
    follow(OWN_METHOD, tmp_path, "python", "console")
    page = (tmp_path / "report.html").read_text()
    assert "Anchor" in page
    assert "Strength of the pull (λ)" in page


@pytest.mark.slow
@pytest.mark.parametrize("page", with_page(TUTORIALS, "console"))
def test_the_commands_of_a_tutorial_run(page, tmp_path):
    follow(page, tmp_path, "console")


@pytest.mark.parametrize(
    ("shown", "file"), [("anchor", "method"), ("blobs", "stream"), ("residual", "network"), ("distance", "diagnostic")]
)
def test_the_page_shows_the_package_that_the_tests_install(shown, file):
    (block,) = (text for _, text in snippets(OWN_METHOD, "python") if text.startswith(f"# {shown}.py\n"))
    written = (ROOT / "tests" / "plugin" / "upgd_anchor" / f"{file}.py").read_text()
    assert written.endswith(block.partition("\n")[2])


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    return generate


def test_generated_pages_are_current():
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    for page, text in generator().PAGES.items():
        if page == "commands.md" and f"cyclopts=={version('cyclopts')}" not in pinned:
            continue  # its versions write help differently
        current = (ROOT / "docs" / page).read_text(encoding="utf-8") == text()
        assert current, f"docs/{page} differs from what the code says; run `python docs/generate.py`"


#: Internal modules.
INTERNAL = {"cli", "kernels", "normalization", "plugins", "writing", "optim"}


def test_every_public_name_is_in_the_reference():
    modules = {module.name for module in pkgutil.iter_modules(upgd.__path__) if not module.name.startswith("_")}
    documented = {name.split(".")[1] for name in generator().MODULES if name != "upgd"}
    assert documented == modules - INTERNAL
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    for name in generator().MODULES:
        module = importlib.import_module(name)
        for one in {*module.__all__} - {"MIGRATIONS", "__version__", "utility"}:
            assert f"::: {name}.{one}\n" in text or f"#{name}.{one} }}" in text, f"{name}.{one} is not documented"
    for name in upgd.optim.__all__:
        assert f"::: upgd.{name}\n" in text


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "upgd": ["UPGD", "AdaUPGD", "FeatureUPGD", "HesScale", "Monitor", "open", "record"],
        "upgd.experiments": ["run", "confirm", "load", "Experiment", "Results"],
        "upgd.data": ["load", "register", "fetch", "from_arrays", "Dataset"],
    }.items(),
)
def test_names_that_users_type_are_documented_with_their_arguments(module, names):
    page = (ROOT / "docs" / "reference" / f"{module.removeprefix('upgd.')}.md").read_text(encoding="utf-8")
    for name in names:
        assert f"::: {module}.{name}\n" in page
        one = getattr(importlib.import_module(module), name)
        text = inspect.getdoc(one)
        code = one.__init__ if inspect.isclass(one) else one
        wanted = set(inspect.signature(code).parameters) - {"self", "params", "args", "kwargs"}
        if "All other arguments are those of" in text:
            continue
        missing = {parameter for parameter in wanted if not re.search(rf"\b{parameter}\b", text)}
        assert not missing, f"{module}.{name} does not document {missing}"


def test_problems_methods_and_commands_are_listed():
    listed = (ROOT / "docs" / "problems.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in listed for name in (*streams.names(), *METHODS))
    explained = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    built_in = [name for name, method in METHODS.items() if method.__module__.startswith("upgd.methods.")]
    assert all(f": `{name}`\n" in explained for name in built_in)
    from upgd.cli import app

    listed = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for name in (name for name in app if not name.startswith("-")):
        assert f"\n## upgd {name}\n" in listed
        for part in (part for part in app[name] if not part.startswith("-")):
            assert f"\n### upgd {name} {part}\n" in listed


@pytest.mark.slow
def test_the_figures_of_the_landing_page_are_drawn(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("svg")
    monkeypatch.chdir(tmp_path)
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    monkeypatch.setitem(figures["_save"].__globals__, "IMAGES", tmp_path)
    monkeypatch.setitem(figures["STREAM"], "steps", 20_000)
    figures["lost"]()
    figures["gate"]()
    for name in ("lost", "gate"):
        assert (tmp_path / f"{name}.svg").read_text().count("<path") > 20
    shown = re.findall(r"images/(\w+)\.svg", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert shown == ["lost", "gate", "result"]
    assert all(name in figures for name in shown)


def commands(page: Path) -> list[tuple[int, str]]:
    """Return the `upgd` commands of a page, in blocks and in its text."""
    found = []
    for line, block in snippets(page, "console", "sh", "bash"):
        for number, text in enumerate(block.replace("\\\n", "  ").splitlines(), line):
            parts = re.split(r"&&|[|;&]", re.sub(r"^\w*\$ +", "", text))
            found += [(number, part.strip()) for part in parts if part.strip().startswith("upgd ")]
    found += [(0, one) for one in re.findall(r"^    (upgd .*)$", page.read_text(), re.M)]
    prose = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.S | re.M)
    inline = re.finditer(r"`(upgd [^`]+)`", prose)
    return found + [(prose.count("\n", 0, one.start()) + 1, one[1]) for one in inline if "…" not in one[1]]


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=f"{page.parent.name}-{page.name}") for page in PAGES if commands(page)]
)
def test_commands_are_understood(page):
    from cyclopts import CycloptsError, MissingArgumentError

    from upgd.cli import app

    for line, command in commands(page):
        try:
            words = shlex.split(re.sub(r" --plugin \S+", "", command), comments=True)[1:]  # which main loads first
            app.parse_args(words, exit_on_error=False, print_error=False)
        except MissingArgumentError:
            continue  # only its name, as in: "`upgd run` prints a table"
        except (CycloptsError, ValueError) as error:
            pytest.fail(f"{page.name}, line {line}: {command}: {error}")
