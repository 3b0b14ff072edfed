"""Messages if the compiled loops are not available."""

import importlib
import logging
import subprocess
import sys

import pytest

from upgd.experiments.execution import workers
from upgd.networks import MLP
from upgd.population import Learner, Population, choose

WITHOUT_NUMBA = "numba is not installed (run pip install 'upgd[run]')"


@pytest.fixture
def without_kernel(monkeypatch):
    def use(error):
        def fail(name):
            raise error

        monkeypatch.setattr(importlib, "import_module", fail)

    choose.say_slow_backend.cache_clear()
    yield use
    choose.say_slow_backend.cache_clear()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'numba'", name="numba"), WITHOUT_NUMBA),
        (ImportError("Numba needs NumPy 9 or less"), "Numba needs NumPy 9 or less (run pip install"),
    ],
)
def test_the_warning_appears_once(without_kernel, caplog, error, reason):
    without_kernel(error)
    for _ in range(2):
        assert Population(MLP((4, 3, 2)), [Learner(method="sgd", lr=0.1)]).backends == ("torch",)
    (said,) = warnings(caplog)
    assert "many times slower than compiled loops, because " + reason in said


def test_an_explicit_backend_gives_no_warning_or_an_error(without_kernel, caplog):
    without_kernel(ModuleNotFoundError(name="numba"))
    learners = [Learner(method="sgd", lr=0.1)]
    Population(MLP((4, 3, 2)), learners, backend="torch")
    with pytest.raises(ValueError, match=r"backend='kernel' cannot be used, because numba is not installed \(run pip"):
        Population(MLP((4, 3, 2)), learners, backend="kernel")
    assert warnings(caplog) == []


def test_only_the_parent_of_workers_warns(without_kernel, caplog, monkeypatch):
    monkeypatch.setattr(workers, "find_spec", lambda name: None)
    for settings in (workers.Settings(), workers.Settings(), workers.Settings(backend="torch")):
        assert list(workers.in_processes(settings, 2)([], print)) == []
    (said,) = warnings(caplog)
    assert said.endswith(WITHOUT_NUMBA)


def test_the_command_warns_in_one_line(tmp_path):
    run = ["run", "output-permuted-digits", "--method", "sgd", "--lr", "0.1", "--steps", "5", "--network", "8"]
    code = f"""
import sys
if __name__ == "__main__":
    sys.modules["numba"] = None
    from upgd.cli import main
    main({[*run, "--seeds", "2", "--quiet"]!r})
"""
    (tmp_path / "script.py").write_text(code)
    ended = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    said = "upgd: learners run on the torch backend, many times slower than compiled loops, because "
    assert (ended.returncode, ended.stderr) == (0, f"{said}{WITHOUT_NUMBA}\n")
