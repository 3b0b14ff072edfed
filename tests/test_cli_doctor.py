"""`upgd doctor`: its output, the data that it does not disclose, and problems that it detects."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import upgd as package
from upgd import plugins
from upgd.cli import checkup
from upgd.data import cache
from upgd.kernels.folder import kernels


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Set separate caches and a separate current folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UPGD_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("UPGD_PLUGINS", raising=False)
    monkeypatch.setattr(plugins, "_ORIGINS", {})  # what other tests have registered
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_output_fits_one_screen(upgd, home):
    code, out, err = upgd("doctor")
    assert (code, err) == (0, "")
    assert f"torch {torch.__version__}, numpy {np.__version__}" in out
    assert out.startswith(f"upgd       {package.__version__}\n")
    assert "problems   none; `upgd demo` can run here\n" in out
    assert "digits (embedded)" in out
    assert out.count("\n") <= 24
    assert max(map(len, out.replace(str(home), "~").splitlines())) <= 120


def test_json_has_the_same(upgd):
    code, out, _ = upgd("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["packages"]["torch"] == torch.__version__
    assert found["kernels"]["CPU"]["available"] is True
    assert found["processor"]["cores"] == os.cpu_count()
    assert found["problems"] == []
    assert found["data"]["sets"] == {"digits": "embedded", "mnist": "absent", "emnist": "absent", "cifar10": "absent"}


def test_data_sets_and_the_sizes_of_caches(upgd):
    arrays = {"train-images": np.zeros((20, 8, 8), np.uint8), "train-labels": np.zeros(20, np.uint8)}
    with cache.locked("mine"):
        cache.store(cache.Manifest("mine", 10, 255, False, False, "2024-01-01", []), arrays)
    kernels().mkdir(parents=True)
    (kernels() / "one.cubin").write_bytes(bytes(3_000))
    found = json.loads(upgd("doctor", "--json")[1])
    assert found["data"]["sets"]["mine"] == "present"
    sizes = {one["what"]: one["bytes"] for one in found["caches"]}
    assert sizes["kernels"] == 3_000
    assert 20 * 64 < sizes["data sets"] < 20 * 64 + 20_000


def test_kernels_inside_the_data_folder_are_counted_once(monkeypatch, home):
    monkeypatch.setenv("UPGD_DATA", str(home / "cache" / "upgd"))
    kernels().mkdir(parents=True)
    (kernels() / "one.cubin").write_bytes(bytes(3_000))
    assert [one["bytes"] for one in checkup.examine()["caches"]] == [0, 3_000]


def test_paths_in_the_home_folder_do_not_name_the_user(monkeypatch, home, upgd):
    monkeypatch.setattr(Path, "home", lambda: home)
    out = upgd("doctor")[1]
    assert str(home) not in out
    assert str(Path("~", "cache", "upgd", "kernels")) in out


def test_environment_values_are_not_shown(monkeypatch, home, upgd):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hunter2")
    monkeypatch.setenv("UPGD_PLUGINS", "leaky_plugin")
    (home / "leaky_plugin.py").write_text("import os\nraise ValueError(os.environ['RAY_AUTH_TOKEN'])\n")
    monkeypatch.setattr("upgd.plugins._discovered", False)
    monkeypatch.setattr("upgd.plugins._FAILED", {})
    monkeypatch.syspath_prepend(home)
    for arguments in (["doctor"], ["doctor", "--json"]):
        code, out, _ = upgd(*arguments)  # the reason is a warning, as with every command
        assert code == 0
        assert "hunter2" not in out
        assert "leaky_plugin" in out


def test_loaded_plugins_are_named(monkeypatch, home, upgd):
    (home / "friendly_plugin.py").write_text("")
    monkeypatch.setenv("UPGD_PLUGINS", "friendly_plugin")
    monkeypatch.setattr("upgd.plugins._discovered", False)
    monkeypatch.setattr("upgd.plugins._LOADED", {})
    monkeypatch.syspath_prepend(home)
    assert "friendly_plugin" in json.loads(upgd("doctor", "--json")[1])["plugins"]["loaded"]


@pytest.mark.parametrize(
    ("package", "sentence"),
    [
        ("matplotlib", "matplotlib is not installed; run pip install 'upgd[report]'."),
        ("cyclopts", "cyclopts is not installed; run pip install 'upgd[run]'."),
        ("torch", "torch is not installed; run pip install 'upgd'."),
    ],
)
def test_missing_requirements_of_the_demo_are_one_sentence(package, sentence):
    """In a process of its own; without cyclopts, the command knows little else."""
    code = f"""
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name={package!r})

sys.meta_path.insert(0, Missing())
sys.argv[1:] = ["doctor"]
from upgd.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"problems   {sentence}"


def test_a_broken_installation_is_a_problem(monkeypatch):
    def broken(name):
        if name == "torch":
            raise OSError("libtorch_cpu.so: cannot open shared object file")
        return sys.modules.get(name)

    monkeypatch.setattr(checkup, "import_module", broken)
    assert "torch is installed but cannot be imported (OSError); reinstall it." in list(checkup._problems())


def test_without_numba_the_reason_is_given(monkeypatch):
    def without(name):
        if name == "upgd.population.kernel":
            raise ModuleNotFoundError("No module named 'numba'", name="numba")
        return sys.modules.get(name)

    monkeypatch.setattr(checkup, "import_module", without)
    assert checkup._cpu_kernel() == {
        "available": False,
        "reason": "numba is not installed; run pip install 'upgd[run]'",
    }
    assert list(checkup._problems()) == []
