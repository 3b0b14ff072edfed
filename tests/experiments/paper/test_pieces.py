"""A study in pieces, each on a machine that has only the files of the others."""

import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from upgd.experiments.analysis import portable
from upgd.experiments.execution import time_limit
from upgd.experiments.execution.running import Options, TimeUp, run
from upgd.experiments.paper.pieces import piece, shipped
from upgd.experiments.paper.reproduce import plan

SMALL = {"panels": ["weight-white"], "steps": 80, "final_seeds": 2, "shortlist": 2, "shortlist_seeds": 2}


def _study():
    return plan("ups-stationary-mnist", "smoke", **SMALL)


def _scores(found):
    return {panel.key: [(name, row.mean) for name, row in found.rows(panel)] for panel in found.plan.panels}


def test_pieces_give_the_results_of_a_whole_study(tmp_path, monkeypatch):
    whole, finished = piece(_study(), tmp_path / "whole", Options(backend="torch"))
    assert finished
    ticks = itertools.count()
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    stopped = 0
    for _ in range(100):  # each has its own store, and stops during about its third job
        found, finished = piece(_study(), tmp_path / "data", Options(backend="torch", stop_after=20, job_size=2))
        if finished:
            break
        stopped += 1
    assert finished
    assert stopped > 1
    names = os.listdir(tmp_path / "data")
    assert names == ["stationary-digits.csv.gz"]
    pieces, at_once = (portable.read(tmp_path / where / names[0]) for where in ("data", "whole"))
    assert [(one.key, one.loss.tolist()) for one in pieces] == [(one.key, one.loss.tolist()) for one in at_once]
    assert _scores(shipped(_study(), tmp_path / "data")) == _scores(shipped(_study(), tmp_path / "whole"))
    assert _scores(found) == _scores(whole)
    again, _ = piece(_study(), tmp_path / "third", Options(), resume_from=[tmp_path / "data"])
    assert again.missing == again.unsearched == 0
    assert (tmp_path / "third" / names[0]).read_bytes() == (tmp_path / "data" / names[0]).read_bytes()


def test_runs_of_the_search_are_summaries(tmp_path):
    piece(_study(), tmp_path, Options(backend="torch"))
    records = portable.read(tmp_path / "stationary-digits.csv.gz")
    lengths = {len(one.loss) for one in records if one.key.seed == 0}
    assert lengths == {2}  # two tasks; longer runs have four quarters
    study = plan("ups-stationary-mnist", "smoke", **SMALL | {"steps": 400})
    piece(study, tmp_path, Options(backend="torch"))
    long = [one for one in portable.read(tmp_path / "stationary-digits.csv.gz") if one.key.steps == 400]
    assert {len(one.loss) for one in long if one.key.seed == 0} == {4}
    assert {len(one.loss) for one in long if one.key.seed > 0} == {10}
    assert len(long) < len(portable.read(tmp_path / "stationary-digits.csv.gz"))  # the others are still there


def test_after_the_time_limit_the_same_call_resumes(tmp_path):
    what = {"seeds": 2, "steps": 40, "options": {"task_length": 20}, "backend": "torch", "store": tmp_path / "upgd.db"}
    with pytest.raises(TimeUp):
        run("output-permuted-digits", {"sgd": {"lr": 0.03}}, **what, stop_after=0)
    assert any((tmp_path / "upgd.db.checkpoints").iterdir())
    assert len(run("output-permuted-digits", {"sgd": {"lr": 0.03}}, **what)) == 2


def test_a_killed_piece_loses_nothing(tmp_path):
    words = (
        "reproduce ups-stationary-mnist --scale smoke --panels weight-white --steps 1000 --final-seeds 99 --job-size 1"
    )
    command = [sys.executable, "-m", "upgd", *words.split(), "--backend", "torch", "--workers", "1", "--quiet"]
    store = tmp_path / "upgd.db"
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        while not (store.exists() and _learners(store) >= 2):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "repeat the command to continue" in said
    shipped_ones = portable.read(tmp_path / "reproduced" / "data" / "stationary-digits.csv.gz")
    assert len(shipped_ones) == _learners(store) >= 2


def test_a_machine_that_is_taken_away_loses_only_the_stage_that_it_computes(tmp_path):
    def say(stage):
        if stage.startswith("final runs"):
            raise SystemError("taken away")

    with pytest.raises(SystemError):
        piece(_study(), tmp_path, Options(backend="torch"), say=say)
    found = shipped(_study(), tmp_path)
    assert found.unsearched == found.unlisted == 0
    assert found.missing == sum(len(_study().seeds(arm)) for arm in _study().arms())


def _learners(path):
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
        try:
            return connection.execute("SELECT count(*) FROM runs").fetchone()[0]
        except sqlite3.OperationalError:
            return 0  # it is being created
