"""A sweep that is killed and restarted gives the results of an uninterrupted one: nothing lost, nothing repeated.

Forked from a process that has imported everything, so that a start costs little; the slow test kills the command itself.
"""

import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from upgd.experiments import Experiment
from upgd.experiments.execution.jobs import Checkpoints
from upgd.experiments.execution.running import execute
from upgd.experiments.execution.workers import Settings, in_process
from upgd.store import Store

FACTS = "digest, problem, options, network, method, settings, seed, steps, engine, window, loss, accuracy, diverged_at"


def sweep(path: Path) -> None:
    """Return a sweep of a few seconds that saves checkpoints continuously."""
    import torch

    torch.set_num_threads(1)
    experiment = Experiment(
        "output-permuted-digits",
        {
            "sgd": {"lr": [0.01, 1e9]},  # the second diverges
            "upgd": {"lr": 0.03, "sigma": [0.01, 0.001]},
            "adamw": {"lr": 0.001},
        },
        seeds=2,
        steps=400,
        network="16:identity",
        options={"task_length": 50},
    )
    checkpoints = Checkpoints.beside(path)
    settings = Settings(backend="torch", checkpoints=checkpoints, every=0.02)
    with Store.write(path) as store:
        execute(experiment, store, in_process(settings), workers=3, device="cpu", checkpoints=checkpoints)


def facts(path: Path) -> list[tuple]:
    connection = sqlite3.connect(path)
    rows = connection.execute(f"SELECT {FACTS} FROM runs ORDER BY digest").fetchall()
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    return rows


@pytest.fixture(scope="module")
def start():
    """Start a sweep in a separate process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["upgd.experiments", "upgd.population.torch_backend"])

    def begin(path: Path):
        process = context.Process(target=sweep, args=(path,))
        process.start()
        return process

    warm = context.Process(target=time.time)  # the first waits for the imports
    warm.start()
    warm.join()
    return begin


def test_a_sweep_killed_again_and_again(tmp_path, start):
    began = time.monotonic()
    undisturbed = start(tmp_path / "whole.db")
    undisturbed.join()
    assert undisturbed.exitcode == 0
    length = time.monotonic() - began

    moments = random.Random(7)
    killed = 0
    for _ in range(6):
        process = start(tmp_path / "killed.db")
        process.join(moments.uniform(0.05, 0.35) * length)
        if process.is_alive():
            process.kill()
            process.join()
        killed += process.exitcode == -signal.SIGKILL
    last = start(tmp_path / "killed.db")
    last.join()
    assert last.exitcode == 0
    assert killed >= 2
    rows = facts(tmp_path / "whole.db")
    assert len(rows) == 10
    assert sum(row[-1] is not None for row in rows) == 2
    assert facts(tmp_path / "killed.db") == rows
    assert sorted(p.name for p in tmp_path.iterdir()) == ["killed.db", "killed.db.lock", "whole.db", "whole.db.lock"]


COMMAND = [
    *(sys.executable, "-c", "from upgd.cli import main; main()", "sweep", "output-permuted-digits"),
    *(
        "--methods",
        "sgd,upgd,adamw",
        "--lr",
        "0.1,0.03,0.01,0.001",
        "--seeds",
        "3",
        "--steps",
        "20_000",
        "--workers",
        "2",
    ),
    *("--checkpoint-every", "1", "--quiet"),
]


@pytest.mark.slow
def test_the_command_killed_fifty_times(tmp_path):
    """With two worker processes, which must detect that their parent is gone."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("UPGD_STORE", None)
    began = time.monotonic()
    subprocess.run(COMMAND, cwd=tmp_path / "whole", env=environment, check=True)
    length = time.monotonic() - began
    moments = random.Random(1)
    killed = 0
    for _ in range(50):
        process = subprocess.Popen(COMMAND, cwd=tmp_path / "killed", env=environment)
        try:
            process.wait(moments.uniform(0.05, 0.8) * length)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    subprocess.run(COMMAND, cwd=tmp_path / "killed", env=environment, check=True)
    assert killed >= 10
    assert facts(tmp_path / "killed" / "upgd.db") == facts(tmp_path / "whole" / "upgd.db")
    assert len(facts(tmp_path / "whole" / "upgd.db")) == 36
