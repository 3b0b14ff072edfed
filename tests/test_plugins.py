"""Plug-ins: third-party components are available to every command and process, and their errors are contained.

``tests/plugin`` is a small third-party package, installed here as by pip.
"""

import csv
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import upgd.data.registry
import upgd.experiments as ex
import upgd.experiments.execution.jobs
import upgd.methods
import upgd.networks
import upgd.population.diagnostics
import upgd.streams.registry
from upgd import plugins
from upgd.experiments.execution.workers import in_processes
from upgd.networks import reset
from upgd.population import Learner, Population
from upgd.population.torch_backend import TorchBackend
from upgd.store import Store

PACKAGE = Path(__file__).parent / "plugin"
SOURCE = Path(plugins.__file__).parents[1]

GOOD = """
import upgd.methods

@upgd.methods.register
class Mine(upgd.methods.Method):
    name, label = "mine", "Mine"
    def update(self, w, g, h): return w - h.lr * g
"""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Simulate a process that has loaded nothing, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_discovered", False)
    for state in ("_ORIGINS", "_SOURCES", "_LOADED", "_DISTRIBUTIONS"):
        monkeypatch.setattr(plugins, state, {})
    for module in (upgd.data.registry, upgd.methods.registry, upgd.networks, upgd.population.diagnostics):
        monkeypatch.setattr(module, "_REGISTERED", dict(module._REGISTERED))
    monkeypatch.setattr(upgd.streams.registry, "_FACTORIES", dict(upgd.streams.registry._FACTORIES))
    before = set(sys.modules)
    plugins._distribution.cache_clear()
    yield tmp_path
    plugins._distribution.cache_clear()
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith((str(tmp_path), str(PACKAGE))):
            del sys.modules[name]


def digest(source):
    return hashlib.sha256(source.encode()).hexdigest()[:8]


# -------------------------------------------------------------------------------------------------------------- loading


def test_a_setting_that_shares_its_name_with_another_methods(tmp_path):
    (tmp_path / "my_method.py").write_text(
        GOOD + '    tau = upgd.methods.Setting("slow", choices=("slow", "fast"), help="How it hurries.")\n'
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = ["--plugin", "my_method", "run", "output-permuted-digits"]
    text = " ".join(upgd_command([*command, "--help"], tmp_path, environment).replace("│", " ").split())
    assert "For mine: How it hurries." in text
    small = ["--lr", "0.1", "--seeds", "1", "--steps", "40", "--quiet", "--backend", "torch"]
    assert "fast" in upgd_command([*command, "--method", "mine", "--tau", "fast", *small], tmp_path, environment)
    upgd_command([*command, "--method", "redo", "--tau", "0.2", *small], tmp_path, environment)


def test_a_module_of_this_folder(fresh):
    (fresh / "my_method.py").write_text(GOOD)
    plugins.load("my_method")
    assert upgd.methods.get("mine").label == "Mine"
    assert plugins.modules() == ("my_method",)
    assert plugins.versions([("method", "mine"), ("method", "sgd")]) == {"my_method": f"source {digest(GOOD)}"}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('two\\nlines')", r"the plugin my_method cannot be loaded \(RuntimeError: two lines\)"),
        ("import sys; sys.exit(3)", r"my_method cannot be loaded \(SystemExit: 3\)"),
        (
            "import nowhere_at_all",
            r"my_method cannot be loaded \(ModuleNotFoundError: No module named 'nowhere_at_all'\)",
        ),
        ("a b", "my_method cannot be loaded .SyntaxError"),
        (GOOD.replace("g, h", "g, h, wish"), r"Mine.update has the argument 'wish', which does not exist"),
        (GOOD.replace('"mine"', '"sgd"'), "a method named 'sgd' already exists"),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_reason(fresh, code, words):
    (fresh / "my_method.py").write_text(code)
    with pytest.raises(plugins.PluginError, match=words):
        plugins.load("my_method")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere_at_all", "no module 'nowhere_at_all' in this folder or among the installed packages"),
        ("my_method.py", "a plugin is the name of a module, such as my_method for my_method.py, not 'my_method.py'"),
    ],
)
def test_a_wrong_name(fresh, name, words):
    with pytest.raises(plugins.PluginError, match=words):
        plugins.load(name)


def test_the_variable_is_read_when_a_name_is_not_known_and_broken_modules_are_left_out(fresh, monkeypatch, caplog):
    (fresh / "my_method.py").write_text(GOOD)
    (fresh / "my_broken.py").write_text("1 / 0")
    monkeypatch.setenv(plugins.VARIABLE, "my_broken, my_method")
    assert upgd.methods.get("sgd").name == "sgd"
    assert not caplog.records
    assert "mine" in upgd.methods.METHODS
    (said,) = caplog.records
    assert said.getMessage() == (
        "upgd: the plugin my_broken cannot be loaded (ZeroDivisionError: division by zero), so it is skipped "
        "(UPGD_PLUGINS=my_broken)"
    )
    assert plugins.modules() == ("my_method",)


def test_results_of_a_former_source_are_reused_with_a_warning(fresh, caplog):
    def run():
        small = {"seeds": 2, "steps": 4, "network": "4", "backend": "torch"}
        ex.run("stationary-digits", {"mine": {"lr": 0.1}}, **small, store="upgd.db")

    def edit(source):
        (fresh / "my_method.py").write_text(source)
        importlib.invalidate_caches()
        sys.modules.pop("my_method", None)
        plugins.load("my_method")

    edit(GOOD)
    run()
    run()
    assert not caplog.records
    edit(GOOD.replace("h.lr * g", "0.5 * h.lr * g"))
    run()
    (said,) = caplog.records
    assert said.getMessage() == (
        "upgd: reused 2 results of an earlier source or version of my_method; to compute them again, delete them with "
        "`upgd runs delete --problem stationary-digits --network 4 --steps 4 --methods mine --store upgd.db`"
    )


def test_an_entry_point_of_a_class_needs_no_decorator(fresh, monkeypatch):
    (fresh / "their_method.py").write_text(GOOD.replace("@upgd.methods.register", ""))
    about = fresh / "theirs-2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 2.0\n")
    (about / "entry_points.txt").write_text("[upgd.methods]\nmine = their_method:Mine\n")
    monkeypatch.syspath_prepend(str(fresh))
    assert Learner(method="mine", lr=0.1).variant.label == "Mine"
    (version,) = plugins.versions([("method", "mine")]).values()
    assert version.startswith("theirs 2.0, source ")


def test_a_broken_entry_point_breaks_no_worker(fresh, monkeypatch, caplog):
    (fresh / "their_broken.py").write_text("1 / 0")
    about = fresh / "theirs-2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 2.0\n")
    (about / "entry_points.txt").write_text("[upgd.plugins]\nbroken = their_broken\n")
    monkeypatch.syspath_prepend(str(fresh))
    assert len(upgd.methods.METHODS) > 5
    assert "the plugin their_broken cannot be loaded" in caplog.text
    assert plugins.modules() == ()  # what workers import


def test_built_in_objects_registered_by_a_plugin_belong_to_it(fresh):
    plugins.remember("stream", "digits-again", partial(upgd.methods.Method))
    assert plugins.versions([("stream", "digits-again")]) == {
        __name__: f"source {digest(Path(__file__).read_text(encoding='utf-8'))}"
    }


def test_definitions_in_a_notebook_are_refused_in_other_processes(monkeypatch):
    monkeypatch.setitem(plugins._ORIGINS, ("method", "sgd"), "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    job = ex.execution.jobs.whole(ex.Experiment("output-permuted-digits", {"sgd": {"lr": 0.1}}, seeds=1, steps=5))
    with pytest.raises(
        ValueError, match="the method 'sgd' is defined in this program or notebook, which other processes"
    ):
        next(in_processes(ex.execution.workers.Settings(), 2)([job], lambda *_: None))


SCRIPT = """
import upgd.experiments as ex
import upgd.methods

def define(power):
    @upgd.methods.register
    class Local(upgd.methods.Method):
        name = f"local-{power}"
        def update(self, w, g, h): return w - h.lr * g * power

define(1)
if __name__ == "__main__":
    define(2)
    ex.run("output-permuted-digits", {"METHOD": {"lr": [0.1, 0.2]}}, seeds=2, steps=20, workers=WORKERS, network="8")
    print("done")
"""


@pytest.mark.parametrize(
    ("method", "workers", "words"),
    [
        ("local-1", 2, "done"),  # worker processes run the top level of the script
        ("local-2", 1, "done"),
        (
            "local-2",
            2,
            "ValueError: the method 'local-2' is registered by a function that other processes do not call; register it at "
            "the top level of a module, or use one worker",
        ),
    ],
)
def test_definitions_inside_a_function_are_refused_where_it_is_not_called(tmp_path, method, workers, words):
    (tmp_path / "script.py").write_text(SCRIPT.replace("WORKERS", str(workers)).replace("METHOD", method))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert words in (done.stdout + done.stderr).splitlines()


# ----------------------------------------------------------------------------------------- a package, installed, in use

SWEEP = [
    *("sweep", "jumping-blobs", "--methods", "anchor,sgd", "--lr", "0.05", "--strength", "0.1,0.01"),
    *("--network", "residual", "--seeds", "2", "--steps", "300", "--option", "task_length=50", "--look-every", "150"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a process in which the package is installed."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    shutil.copytree(PACKAGE / "upgd_anchor", site / "upgd_anchor")
    about = site / f"upgd_anchor-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [
        f"[{group}]\n{name} = {value}" for group, of in project["entry-points"].items() for name, value in of.items()
    ]
    (about / "entry_points.txt").write_text("\n".join(points))
    path = os.pathsep.join([str(site), str(SOURCE)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "UPGD_DATA": str(site)}


def started(arguments, folder, environment) -> subprocess.Popen:
    command = [sys.executable, "-c", "from upgd.cli import main; main()", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def upgd_command(arguments, folder, environment, code=0) -> str:
    process = started(arguments, folder, environment)
    said, complained = process.communicate(timeout=300)
    assert process.returncode == code, complained
    return complained if code else said


def facts(path) -> dict:
    with Store.read(path) as store:
        return {r.key.digest: (r.loss.tobytes(), r.diagnostics, r.plugins) for r in store.records()}


@pytest.fixture(scope="module")
def swept(environment, tmp_path_factory):
    """A folder with the results of an undisturbed sweep in one process."""
    folder = tmp_path_factory.mktemp("swept")
    upgd_command([*SWEEP, "--workers", "1", "--quiet"], folder, environment)
    return folder


def test_a_sweep_on_two_workers_is_killed_and_resumed(environment, swept, tmp_path):
    process = started([*SWEEP, "--workers", "2", "--checkpoint-every", "0", "--quiet"], tmp_path, environment)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("upgd.db.checkpoints/*.pt")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(facts(tmp_path / "upgd.db")) < 6
    table = upgd_command([*SWEEP, "--workers", "2", "--quiet"], tmp_path, environment)
    assert "anchor" in table
    assert "λ 0.1" in table
    assert facts(tmp_path / "upgd.db") == facts(swept / "upgd.db")


@pytest.mark.slow
def test_the_same_on_ray(environment, swept, tmp_path):
    upgd_command([*SWEEP, "--ray", "local", "--insecure", "--quiet"], tmp_path, environment)
    assert facts(tmp_path / "upgd.db") == facts(swept / "upgd.db")


def test_results_name_the_plugin_and_its_version(environment, swept):
    with Store.read(swept / "upgd.db") as store:
        of = {record.key.method: record.plugins for record in store.records()}
    parts = ("diagnostic", "method", "network", "stream")
    sources = {part: digest((PACKAGE / "upgd_anchor" / f"{part}.py").read_text(encoding="utf-8")) for part in parts}
    anchor = {f"upgd_anchor.{part}": f"upgd-anchor 0.3.1, source {source}" for part, source in sources.items()}
    assert of == {"sgd": {name: one for name, one in anchor.items() if "method" not in name}, "anchor": anchor}
    exported = csv.DictReader(upgd_command(["export"], swept, environment).splitlines())
    assert "upgd_anchor.method (upgd-anchor 0.3.1, source" in next(
        row["plugins"] for row in exported if row["method"] == "anchor"
    )
    looks = csv.DictReader(upgd_command(["export", "--looks"], swept, environment).splitlines())
    assert all(float(row["distance_from_start"]) > 0 for row in looks)


def test_the_report_has_its_label_colour_figure_and_words(environment, swept):
    upgd_command(["report", "--output", "report.html"], swept, environment)
    page = (swept / "report.html").read_text()
    for words in ("Anchor", "#117733", "distance_from_start", "Strength of the pull (λ)"):
        assert words in page, words


def test_commands_do_without_a_plugin_that_is_broken(environment, tmp_path):
    (tmp_path / "my_broken.py").write_text("1 / 0")
    process = started(["data", "list", "--json"], tmp_path, {**environment, "UPGD_PLUGINS": "my_broken"})
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(said)["datasets"]
    assert complained.startswith("upgd: the plugin my_broken cannot be loaded (ZeroDivisionError: division by zero)")
    assert complained.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["run", "jumping-blobs", "--method", "ancor", "--lr", "0.1"],
            "there is no method 'ancor'; did you mean 'anchor'?",
        ),
        (
            ["table", "--plugin", "my_broken"],
            "the plugin my_broken cannot be loaded (ZeroDivisionError: division by zero)",
        ),
        (
            ["run", "jumping-blobs", "--method", "bent", "--lr", "0.1", "--network", "residual", "--plugin=my_bent"],
            "network cannot be used with these learners, because bent with these settings needs curvature",
        ),
        (
            ["run", "toy-changing-inputs", "--method", "sgd", "--lr", "0.1", "--network", "none", "--plugin=my_none"],
            "the function of network='none' must return an nn.Module, not None",
        ),
    ],
)
def test_invalid_plugins_are_refused_in_one_sentence(environment, tmp_path, arguments, words):
    (tmp_path / "my_broken.py").write_text("1 / 0")
    (tmp_path / "my_none.py").write_text("import upgd.networks\nupgd.networks.register('none')(lambda stream: None)\n")
    (tmp_path / "my_bent.py").write_text(GOOD.replace('"mine"', '"bent"').replace("g, h)", "g, h, curvature)"))
    complained = upgd_command(arguments, tmp_path, environment, code=1)
    assert complained.startswith(f"upgd: {words}")
    assert complained.count("\n") == 1


@pytest.mark.parametrize(
    "request_unknown",
    [
        lambda: upgd.methods.get("unknown"),
        lambda: upgd.streams.make("unknown"),
        lambda: upgd.streams.make("stationary-unknown"),
        lambda: ex.Experiment("toy-changing-inputs", {"sgd": {"lr": 0.1}}, network="unknown"),
    ],
)
def test_unknown_names_may_be_those_of_a_plugin(fresh, request_unknown):
    with pytest.raises(ValueError, match=r"load the plug-in that registers it \(--plugin MODULE"):
        request_unknown()


def test_the_method_equals_a_plain_loop(fresh, monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGE))
    import upgd_anchor.network
    import upgd_anchor.stream
    from upgd_anchor import method

    assert upgd.methods.get("anchor") is method.Anchor
    stream = upgd_anchor.stream.JumpingBlobs(task_length=50)
    template = upgd_anchor.network.Residual(stream).double()
    learners = [Learner(method="anchor", lr=lr, strength=0.3, seed=seed) for seed, lr in ((0, 0.1), (1, 0.02))]
    population = Population(template, learners, backend="torch", dtype=torch.float64)
    population.run(stream, 200)
    for i, learner in enumerate(learners):
        network = reset(upgd_anchor.network.Residual(stream).double(), learner.seed)
        start = [p.detach().clone() for p in network.parameters()]
        chunk = stream.chunk([learner.seed], 0, 200)
        for x, target in zip(chunk.inputs()[0].double(), chunk.targets[0], strict=True):
            gradients = torch.autograd.grad(F.cross_entropy(network(x[None]), target[None]), list(network.parameters()))
            with torch.no_grad():
                for p, g, p0 in zip(network.parameters(), gradients, start, strict=True):
                    p -= learner.lr * (g + 0.3 * (p - p0))
        found = population.parameters(i)
        for name, p in network.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=0, atol=1e-10)


# ------------------------------------------------------------------------------------------------------- other backends


class Counted(TorchBackend):
    """A custom backend."""

    steps = 0

    def advance(self, chunk, loss, tally):
        Counted.steps += chunk.length
        super().advance(chunk, loss, tally)


@pytest.mark.parametrize("workers", [1, 2])
def test_experiments_take_a_custom_backend(fresh, workers):
    small = {"methods": {"sgd": {"lr": [0.1, 0.01]}}, "seeds": 1, "steps": 20, "network": "5"}
    Counted.steps = 0
    results = ex.run("output-permuted-digits", **small, backend=Counted, workers=workers)
    assert {(record.backend, *record.plugins) for record in results.records} == {("Counted", __name__)}
    assert Counted.steps == (20 if workers == 1 else 0)
    expected = ex.run("output-permuted-digits", **small, backend="torch")
    assert [r.loss.tobytes() for r in results.records] == [r.loss.tobytes() for r in expected.records]
