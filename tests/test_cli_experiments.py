"""`upgd run`, `sweep`, `best`, `table`, `export`, `runs`, `demo`, `bench` as a user types them."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from upgd.experiments import Experiment
from upgd.experiments import demo as demo_module
from upgd.experiments.execution import bench
from upgd.experiments.paper import best_known
from upgd.experiments.spec import grids
from upgd.store import Key, Record, Store
from upgd.streams import make

SMALL = ("--seeds", "2", "--steps", "40", "--network", "8", "--option", "task_length=20", "--backend", "torch")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UPGD_STORE", raising=False)
    return tmp_path


@pytest.fixture
def filled(upgd):
    """A store with two methods, two settings each."""
    code, *_ = upgd("sweep", "output-permuted-digits", "--methods", "sgd,upgd", "--lr", "0.1,0.01", *SMALL)
    assert code == 0
    return upgd


def test_run_prints_a_table_and_keeps_the_results(upgd, folder):
    arguments = ("run", "output-permuted-digits", "--method", "upgd", "--lr", "0.03", "--sigma", "0.01", *SMALL)
    code, out, err = upgd(*arguments)
    assert code == 0
    assert "output-permuted-digits, task_length 20, network 8, 40 steps: online accuracy" in out
    assert "lr 0.03, β 0.99, σ 0.01" in out
    assert "2 learners stored" in err.splitlines()[-1]
    with Store.read(folder / "upgd.db") as store:
        records = store.records()
    assert [r.key.seed for r in records] == [0, 1]
    assert records[0].key.settings["sigma"] == 0.01
    again = upgd(*arguments)
    assert again[:2] == (0, out)
    assert again[2] == "100%, nothing left to compute, 2 learners stored\n"


def test_quiet_and_json(upgd):
    arguments = ("run", "output-permuted-digits", "--method", "sgd", "--lr", "0.03", *SMALL, "--quiet", "--json")
    code, out, err = upgd(*arguments)
    assert (code, err) == (0, "")
    (line,) = json.loads(out)
    assert (line["method"], line["seeds"], line["metric"], line["learner_steps"]) == ("sgd", 2, "accuracy", 80)


@pytest.mark.parametrize("command", [("run", "--method"), ("sweep", "--methods")])
def test_at_the_time_limit_json_lists_what_is_finished(upgd, command):
    name, option = command
    arguments = (name, "output-permuted-digits", option, "sgd", "--lr", "0.1", *SMALL[2:], "--quiet")
    stopped = ("--stop-after", "0", "--json")
    assert upgd(*arguments, "--seeds", "2", *stopped)[:2] == (0, "[]\n")
    upgd(*arguments, "--seeds", "1")
    code, out, err = upgd(*arguments, "--seeds", "3", *stopped)
    assert (code, [(line["method"], line["seeds"]) for line in json.loads(out)]) == (0, [("sgd", 1)])
    assert "repeat the command to continue" in err
    assert upgd(*arguments, "--seeds", "3", "--stop-after", "0")[:2] == (0, "")


def test_the_studies_of_utility_take_no_method_and_leave_a_figure(upgd, folder):
    few = ("--seeds", "2", "--steps", "20")
    code, out, _ = upgd("run", "utility-quality-weights", *few)
    assert code == 0
    assert "| ReLU | global |" in out
    assert (folder / "utility-quality-weights.png").stat().st_size > 10_000
    code, out, _ = upgd("run", "utility-quality-features", *few, "--json")
    correlations = json.loads(out)["tanh"]["local"]
    assert (code, correlations["second order"] > 0.5) == (0, True)
    assert abs(correlations["random"]) < 0.3
    code, _, err = upgd("run", "utility-quality-weights", "--lr", "0.1")
    assert code == 2
    assert "takes --seeds and --steps only; leave out --lr\n" in err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--store", "x.db", "--device", "cuda"], "--device and --store"),
        (["--workers", "2", "--ray", "auto", "--backend", "torch"], "--backend, --ray and --workers"),
        (["--look-every", "5", "--checkpoint-every", "1"], "--checkpoint-every and --look-every"),
        (["--method", "sgd", "--lr", "0.1", "--option", "task_length=5"], "--lr, --method and --option"),
        (["--network", "8"], "--network"),
    ],
)
def test_a_study_of_utility_refuses_other_options(upgd, folder, monkeypatch, options, named):
    monkeypatch.setenv("UPGD_STORE", "./mine.db")  # is for all commands
    code, out, err = upgd("run", "utility-quality-weights", "--seeds", "1", "--steps", "1", *options)
    assert (code, out) == (2, "")
    assert err == f"upgd: utility-quality-weights takes --seeds and --steps only; leave out {named}\n"
    assert upgd("run", "utility-quality-weights", "--seeds", "1", "--steps", "1", "--json", "--quiet")[0] == 0
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("how", [[], ["--methods", "sgd", "--lr", "0.1"], ["--methods", "sgd", "--grid", "paper"]])
def test_a_study_of_utility_is_no_sweep(upgd, how):
    code, out, err = upgd("sweep", "utility-quality-weights", *how, "--dry-run")
    assert (code, out) == (2, "")
    assert "use `upgd run utility-quality-weights`, without a method" in err


def test_a_study_of_utility_is_no_sweep_in_a_file_either(upgd, folder):
    (folder / "e.toml").write_text('problem = "utility-quality-features"\n[methods.sgd]\nlr = 0.1\n')
    code, out, err = upgd("sweep", "e.toml", "--dry-run")
    assert (code, out) == (2, "")
    assert "use `upgd run utility-quality-features`, without a method" in err


def test_a_cluster_reports_the_number_of_jobs(upgd):
    for command in (
        ("run", "output-permuted-digits", "--method", "sgd", "--lr", "1"),
        ("reproduce", "toy-changing-inputs", "--scale", "smoke"),
    ):
        code, _, err = upgd(*command, "--ray", "nowhere:1", "--workers", "3")
        assert (code, err.count("\n")) == (2, 1)
        assert "--workers 3 cannot be combined with --ray nowhere:1" in err
        assert "remove one of them" in err


def test_run_needs_a_method(upgd):
    code, _, err = upgd("run", "output-permuted-digits", "--lr", "0.1")
    assert code == 2
    assert "--method upgd" in err


def test_seeds_may_be_named(upgd, folder):
    upgd("run", "output-permuted-digits", "--method", "sgd", "--lr", "0.03", "--seeds", "3,7", *SMALL[2:])
    with Store.read(folder / "upgd.db") as store:
        assert [r.key.seed for r in store.records()] == [3, 7]


def test_no_seeds_are_not_all_seeds(filled):
    for command in ("best", "table", "export", "runs", "runs delete --yes"):
        for nothing in ("0", "-1", ",", ""):
            code, out, err = filled(*command.split(), f"--seeds={nothing}")
            assert (code, out) == (2, "")
            assert "--seeds takes a number of at least 1 (20), or seeds separated by commas (0,5,7; " in err
            assert err.endswith(f"not {nothing!r}\n")
    assert len(json.loads(filled("runs", "--json")[1])) == 8
    assert {run["seed"] for run in json.loads(filled("runs", "--seeds", "0,", "--json")[1])} == {0}


def test_the_store_can_be_elsewhere(upgd, folder, monkeypatch):
    monkeypatch.setenv("UPGD_STORE", str(folder / "a.db"))
    arguments = ("run", "output-permuted-digits", "--method", "sgd", "--lr", "0.03", *SMALL)
    upgd(*arguments)
    upgd(*arguments, "--store", "b.db")
    assert (folder / "a.db").exists()
    assert (folder / "b.db").exists()
    assert not (folder / "upgd.db").exists()


def test_betas_and_switches_are_read(upgd, folder):
    upgd("run", "output-permuted-digits", "--method", "adamw", "--lr", "0.03", "--betas", "0/0.99", *SMALL)
    upgd(
        "run", "output-permuted-digits", "--method", "upgd", "--lr", "0.1", "--scaling", "local", "--order", "2", *SMALL
    )
    with Store.read(folder / "upgd.db") as store:
        adamw, _, local, _ = store.records()
    assert adamw.key.settings["betas"] == [0.0, 0.99]
    assert (local.key.settings["scaling"], local.key.settings["order"]) == ("local", 2)


def test_a_dry_run_computes_nothing(upgd, folder):
    arguments = ("sweep", "output-permuted-digits", "--methods", "sgd,upgd", "--lr", "0.1,0.01", *SMALL, "--dry-run")
    code, out, _ = upgd(*arguments)
    assert code == 0
    assert "0 of 8 learners are in upgd.db already" in out
    assert "to do: 320 learner-steps" in out
    assert "measured on this machine now" in out
    assert not (folder / "upgd.db").exists()
    upgd(*arguments[:-1])
    facts = json.loads(upgd(*arguments, "--json")[1])
    assert (facts["learners"], facts["stored"], facts["learner_steps"], facts["seconds"]) == (8, 8, 0, 0.0)


def test_a_single_run_has_a_dry_run_too(upgd, folder):
    code, out, _ = upgd(
        "run", "output-permuted-digits", "--method", "sgd", "--lr", "0.1", *SMALL, "--dry-run", "--json"
    )
    assert code == 0
    assert json.loads(out)["methods"] == {"sgd": 2}
    assert not (folder / "upgd.db").exists()
    code, _, err = upgd("run", "utility-quality-weights", "--dry-run")
    assert (code, "has no --dry-run" in err) == (2, True)


def test_the_papers_grid_with_a_part_replaced(upgd):
    code, out, _ = upgd(
        *("sweep", "output-permuted-digits", "--methods", "sgd,pgd", "--grid", "paper", "--lr", "0.1", *SMALL),
        *("--dry-run", "--json"),
    )
    assert code == 0
    assert json.loads(out)["methods"] == {"sgd": 2, "pgd": 2 * 3}


def test_every_method_has_a_grid_of_its_own_unless_values_are_given(upgd):
    sweep = ("sweep", "output-permuted-digits", "--methods", "sgd,adamw,pgd", *SMALL, "--dry-run", "--json")

    def learners(*options):
        return json.loads(upgd(*sweep, *options)[1])["methods"]

    assert learners() == learners("--grid", "short") == {"sgd": 2 * 6, "adamw": 2 * 24, "pgd": 2 * 24}
    assert learners("--lr", "0.1") == {"sgd": 2, "adamw": 2, "pgd": 2 * 4}  # PGD has no default for σ
    assert learners("--sigma", "0.1") == {
        "sgd": 2 * 6,
        "adamw": 2 * 6,
        "pgd": 2 * 6,
    }  # no learning rate is good for all
    assert learners("--grid", "short", "--lr", "0.1,0.2") == {"sgd": 2 * 2, "adamw": 2 * 8, "pgd": 2 * 8}


def test_table_best_and_report_mark_edges(upgd, folder):
    def stored(method, scores):
        return [
            Record(Key(problem="p", network="8", method=method, settings={"lr": lr}, seed=0, steps=1), 1, [1], [score])
            for lr, score in scores.items()
        ]

    with Store.write(folder / "upgd.db") as store:
        store.add(stored("sgd", {0.1: 0.5, 0.03: 0.6, 0.01: 0.5}) + stored("adamw", {0.03: 0.2, 0.01: 0.5}))
    out = upgd("table")[1]
    assert "adamw   lr 0.01*" in out
    assert "sgd     lr 0.03  " in out
    assert out.endswith("\n* the smallest or largest value tried: a wider grid may be better\n")
    lines = {line["method"]: line for line in json.loads(upgd("table", "--json")[1])}
    assert (lines["adamw"]["edges"], lines["adamw"]["tried"]) == (["lr"], 2)
    assert (lines["sgd"]["edges"], lines["sgd"]["tried"]) == ([], 3)
    assert "*" not in upgd("table", "--all")[1] + upgd("table", "--methods", "sgd")[1]
    assert "lr at the edge of the grid" in upgd("best")[1]
    assert upgd("report")[0] == 0
    page = (folder / "report.html").read_text()
    assert "<td>lr 0.01*</td>" in page
    assert "<td>lr 0.03</td>" in page
    assert "* the smallest or largest value tried" in page


def test_a_file_declares_everything(upgd, folder):
    (folder / "e.toml").write_text(
        'problem = "output-permuted-digits"\nsteps = 40\nseeds = 1\nnetwork = "8"\n[methods.sgd]\nlr = [0.1, 0.2]\n'
    )
    code, out, _ = upgd("sweep", "e.toml", "--backend", "torch", "--json")
    assert code == 0
    assert json.loads(out)[0]["method"] == "sgd"
    code, _, err = upgd("sweep", "e.toml", "--lr", "0.1")
    assert code == 2
    assert "e.toml declares the whole experiment; leave out --lr\n" in err
    (folder / "e.toml").write_text("problem = 3\n")
    code, _, err = upgd("sweep", "e.toml")
    assert code == 1
    assert "e.toml: problem must be a string in quotes, not 3" in err


def test_best(filled):
    code, out, _ = filled("best")
    assert code == 0
    assert "2 settings tried" in out
    found = json.loads(filled("best", "--json")[1])
    assert [b["method"] for b in found] == ["sgd", "upgd"]
    assert all(b["seeds"] == [0, 1] for b in found)
    assert [b["method"] for b in json.loads(filled("best", "--methods", "upgd", "--json")[1])] == ["upgd"]


@pytest.mark.parametrize("command", ["best", "table", "export", "runs", "runs delete --yes"])
def test_method_lists_allow_blanks_and_reject_unknown_names(upgd, folder, command):
    settings = {"sgd": {"lr": 0.1}, "pgd": {"lr": 0.1, "sigma": 0.1}, "my-own": {"lr": 0.1}}
    keys = [
        Key(problem="p", network="8", method=method, settings=values, seed=0, steps=1)
        for method, values in settings.items()
    ]
    with Store.write(folder / "upgd.db") as store:
        store.add([Record(key, 1, [0.5]) for key in keys])
    code, out, err = upgd(*command.split(), "--methods", "sgd, pdg ,adamm")
    assert (code, out) == (1, "")
    assert "--methods sgd, pdg ,adamm: there is no method 'pdg' and no method 'adamm'; choose from upgd, " in err
    code, out, err = upgd(*command.split(), "--methods", "sgd, pgd ,adamw,my-own")
    assert code == 0
    if command == "runs delete --yes":
        assert out == "3 learners deleted from upgd.db\n"
    else:
        assert all(name in out for name in ("sgd", "pgd", "my-own"))


def test_variants_that_were_asked_for_have_lines_of_their_own(upgd):
    arguments = ("output-permuted-digits", "--methods", "upgd", "--lr", "0.1,0.01", "--wise", "weight,feature")
    shown = upgd("sweep", *arguments, *SMALL, "--json")[1]
    for lines in (shown, upgd("table", "--json")[1], upgd("best", "--json")[1]):
        assert sorted(line["settings"]["granularity"] for line in json.loads(lines)) == ["feature", "weight"]
    assert "granularity feature" in upgd("table")[1]


def test_unknown_ids_are_reported_and_nothing_is_deleted(filled):
    (first, *_) = json.loads(filled("runs", "--json")[1])
    code, _, err = filled("runs", "delete", str(first["id"]), "777", "--yes")
    assert code == 1
    assert "upgd.db has no learner 777" in err
    assert first in json.loads(filled("runs", "--json")[1])


def test_a_list_distinguishes_options(filled):
    assert "output-permuted-digits, task_length 20  8  sgd" in filled("runs")[1]


def test_best_reports_skipped_and_diverged_settings(upgd, folder):
    keys = [
        Key(problem="p", network="8", method="sgd", settings={"lr": lr}, seed=seed, steps=1)
        for lr, seed in ((0.1, 0), (1.0, 0), (0.01, 7))
    ]
    with Store.write(folder / "upgd.db") as store:
        store.add([Record(key, 1, [float("nan")], diverged_at=0) for key in keys])
    out = upgd("best")[1]
    assert "diverged with 1 seed; 2 settings tried" in out
    assert "1 setting skipped, without a common seed" in out
    (found,) = json.loads(upgd("best", "--json")[1])
    assert (found["tried"], found["left_out"]) == (2, 1)


def test_diverged_learners_are_null_in_json(upgd, folder):
    good, bad = (Key(problem="p", network="8", method="sgd", settings={"lr": lr}, seed=0, steps=1) for lr in (0.1, 1.0))
    with Store.write(folder / "upgd.db") as store:
        store.add([Record(good, 1, [0.5]), Record(bad, 1, [float("nan")], diverged_at=0)])
    code, out, _ = upgd("best", "--json")
    (found,) = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (code, found["neighbours"]) == (0, {"lr": [{"value": 1.0, "score": None}]})


def test_table(filled):
    assert len(json.loads(filled("table", "--json")[1])) == 2
    assert len(json.loads(filled("table", "--all", "--json")[1])) == 4
    (line,) = json.loads(filled("table", "--methods", "sgd", "--seeds", "1", "--json")[1])
    assert (line["seeds"], line["standard_error"]) == (1, None)
    code, _, err = filled("table", "--problem", "nothing")
    assert code == 1
    assert "upgd.db has no matching results" in err


def test_an_empty_store(upgd, folder):
    Store.write(folder / "upgd.db").close()
    for command in ("table", "best", "plot", "confirm"):
        code, _, err = upgd(command)
        assert (code, err) == (1, "upgd: upgd.db has no results yet; run `upgd run` or `upgd sweep` first\n")


def test_missing_data_leaves_no_store(upgd, folder, monkeypatch):
    monkeypatch.setenv("UPGD_DATA", str(folder / "data"))
    code, _, err = upgd("run", "input-permuted-mnist", "--method", "sgd", "--lr", "0.1", "--quiet")
    assert (code, "download it with `upgd data fetch mnist`" in err) == (1, True)
    assert not (folder / "upgd.db").exists()


def test_a_narrow_terminal_gets_lines_that_fit_and_a_pipe_gets_everything(filled, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    commands = (["table"], ["table", "--all"], ["best"], ["runs"])
    piped = [filled(*command)[1] for command in commands]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    fitted = [filled(*command)[1] for command in commands]
    assert all(max(map(len, text.splitlines())) > 80 for text in piped)
    assert all(max(map(len, text.splitlines())) <= 60 for text in fitted)
    assert "learner-steps" in piped[0].splitlines()[1]


def test_export(filled, folder):
    rows = list(csv.DictReader(filled("export")[1].splitlines()))
    assert len(rows) == 8
    assert {row["lr"] for row in rows} == {"0.1", "0.01"}
    assert {row["sigma"] for row in rows if row["method"] == "sgd"} == {""}
    code, out, err = filled("export", "curves.csv", "--curves")
    assert (code, out) == (0, "")
    assert "8 learners → curves.csv" in err
    with (folder / "curves.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 16


def test_export_to_parquet(filled, folder):
    code, _, err = filled("export", "--format", "parquet")
    assert code == 2
    assert "needs an output file" in err
    from pyarrow import parquet

    assert filled("export", "r.parquet")[0] == 0
    assert parquet.read_table(folder / "r.parquet").num_rows == 8


def test_parquet_without_its_package_is_a_sentence(filled, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    code, _, err = filled("export", "r.parquet")
    assert code == 1
    assert "pip install pyarrow" in err


def test_runs_are_listed_and_deleted(filled):
    code, out, err = filled("runs")
    assert code == 0
    assert len(out.splitlines()) == 8
    assert "8 learners in upgd.db" in err
    listed = json.loads(filled("runs", "--methods", "upgd", "--json")[1])
    assert [r["id"] for r in listed] == [5, 6, 7, 8]
    code, _, err = filled("runs", "delete")
    assert code == 2
    assert "give what to delete" in err
    code, _, err = filled("runs", "delete", "1", "2")  # no terminal
    assert code == 2
    assert "--yes" in err
    code, _, err = filled("runs", "delete", "1,x", "--yes")
    assert (code, err) == (2, "upgd: an id is a whole number, such as 12, not 'x'; `upgd runs` lists them\n")
    for unset in (["", "--yes"], ["", "--methods", "upgd", "--yes"]):  # "$IDS" of a variable that is not set
        assert filled("runs", "delete", *unset)[0] == 2
    assert filled("runs", "delete", "1,2", "--yes")[1] == "2 learners deleted from upgd.db\n"
    assert filled("runs", "delete", "--methods", "upgd", "-y")[1] == "4 learners deleted from upgd.db\n"
    for empty in ("--problem", "--methods", "--network"):  # "$NAME" of a variable that is not set
        assert filled("runs", "delete", empty, "", "-y")[1] == "0 learners deleted from upgd.db\n"
    assert len(json.loads(filled("runs", "--json")[1])) == 2
    assert filled("runs", "delete", "3", "--yes")[1] == "1 learner deleted from upgd.db\n"
    assert filled("runs")[2] == "1 learner in upgd.db\n"


def test_stores_are_put_together(filled, folder):
    arguments = (
        "sweep",
        "output-permuted-digits",
        "--methods",
        "sgd",
        "--lr",
        "0.1,0.03",
        *SMALL,
        "--store",
        "other.db",
    )
    assert filled(*arguments)[0] == 0
    before = (folder / "other.db").read_bytes()
    (folder / "broken.db").write_text("This is no store.")
    code, out, err = filled("runs", "merge", "other.db", "broken.db")
    assert (code, out) == (1, "")
    assert "broken.db" in err
    code, out, _ = filled("runs", "merge", "other.db", "upgd.db")
    assert (code, out) == (
        0,
        "2 learners of 4 in other.db added to upgd.db\n0 learners of 8 in upgd.db added to upgd.db\n",
    )
    assert (folder / "other.db").read_bytes() == before
    # Merged results are not computed again, and keep their numbers.
    assert "nothing left to compute" in filled(*arguments[:-2])[2]
    with Store.read("upgd.db") as own, Store.read("other.db") as other:
        (ours, theirs) = ({r.key.digest: r for r in store.records(methods=["sgd"])} for store in (own, other))
    for digest, record in theirs.items():
        assert list(ours[digest].accuracy) == list(record.accuracy)
    code, _, err = filled("runs", "merge")
    assert code == 2
    assert "upgd runs merge OTHER.db" in err
    assert filled("runs", "merge", "nowhere.db")[0] == 1
    assert not (folder / "nowhere.db").exists()


@pytest.mark.parametrize("title", demo_module.EXPERIMENTS)
def test_the_demo_gives_every_method_a_setting_of_its_own_grid(title):
    for method, settings in demo_module.EXPERIMENTS[title].methods.items():
        assert settings.keys() == grids.short(method).keys()
        for name, values in settings.items():
            assert set(values) <= set(grids.short(method)[name]), f"{name} of {method}"


def test_demo_makes_a_table_and_a_page(upgd, folder, monkeypatch):
    small = Experiment(
        *("output-permuted-digits", {"sgd": {"lr": 0.03}, "upgd": {"lr": 0.03}}),
        **{"seeds": 2, "steps": 40, "network": "8", "options": {"task_length": 20}},
    )
    monkeypatch.setattr(demo_module, "EXPERIMENTS", {"Small & quick": small})
    monkeypatch.setattr(demo_module, "run", partial(demo_module.run, backend="torch"))
    code, out, _ = upgd("demo", "--output", "shown", "--quiet")
    assert code == 0
    assert "online accuracy" in out
    assert out.endswith("Open shown/demo.html in a browser; shown/report.html is an interactive report.\n")
    assert "output-permuted-digits" in (folder / "shown" / "report.html").read_text()
    page = (folder / "shown" / "demo.html").read_text()
    assert "Small &amp; quick" in page
    assert "</svg>" in page
    assert (folder / "shown" / "demo.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "output-permuted-digits", "--lr", "0.1"], 2, "--method"),
        (["run", "output-permuted-digits", "--method", "sgd,upgd", "--lr", "0.1"], 2, "takes one method"),
        (["run", "output-permuted-digits", "--method", "sgd"], 1, "method 'sgd' needs lr"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "fast"], 2, "--lr takes numbers"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "０.１"], 2, "--lr takes numbers"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "1", "--steps", "１０"], 2, "--steps"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "1", "--seeds", "２"], 2, "--seeds takes"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "-1"], 1, "lr must be a finite number"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "1", "--steps", "x"], 2, "--steps"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "1", "--seeds", "x"], 2, "--seeds takes"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "1", "--option", "x"], 2, "NAME=VALUE"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "1", "--option", "x=1"], 1, "its options are"),
        (["run", "output-permuted-digit", "--method", "sgd", "--lr", "1"], 1, "digit"),
        (["run", "nonsense", "--method", "sgd", "--lr", "1"], 1, "there is no problem 'nonsense'"),
        (["run", "output-permuted-digits", "--method", "sgd", "--lr", "1", "--workers", "0"], 2, "--workers must be"),
        (
            ["run", "output-permuted-digits", "--method", "sgd", "--lr", "1", "--store", "a/b/c.db"],
            1,
            "the folder a/b of the store",
        ),
        (["run", "output-permuted-digits", "--method", "adamw", "--lr", "1", "--betas", "0.9"], 2, "--betas takes two"),
        (["sweep", "output-permuted-digits"], 2, "choose the methods"),
        (["run"], 2, "`upgd run` needs PROBLEM; `upgd problems` lists them"),
        (["store", "repair", "a.db"], 2, "`upgd store repair` needs NEW; see `upgd store repair --help`"),
        (["table", "--metric"], 2, "--metric requires an argument"),
        (["run", "bit-fliping"], 1, "there is no problem 'bit-fliping'; did you mean 'bit-flipping'?"),
        (["run", "bit-fliping", "--method", "sgd"], 1, "there is no problem 'bit-fliping'"),
        (["sweep", "bit-fliping"], 1, "there is no problem 'bit-fliping'"),
        (["run", "output-permuted-digit"], 1, "there is no data set 'digit' (did you mean 'digits'?)"),
        (["run", "output-permuted-digit", "--method", "upgd"], 1, "there is no data set 'digit'"),
        (["sweep", "output-permuted-digit"], 1, "there is no data set 'digit'"),
        (
            ["sweep", "output-permuted-digits", "--methods", "sgd", "--lr", "1", "--dry-run", "--workers", "0"],
            *(2, "--workers must be"),
        ),
        (["sweep", "output-permuted-digits", "--methods", "sgd", "--grid", "big"], 2, 'Choose from: "short", "paper"'),
        (["sweep", "output-permuted-digits", "--methods", "sgdd", "--grid", "paper"], 1, "there is no method 'sgdd'"),
        (["sweep", "nothing.toml"], 1, "there is no file nothing.toml; check the path, or name a problem"),
        (["best"], 1, "there is no store upgd.db"),
        (["table", "--store", "elsewhere.db"], 1, "there is no store elsewhere.db"),
        (
            ["bench", "--device", "abacus"],
            1,
            "device='abacus' cannot be used; use 'auto'",
        ),
        (["run", "mine.toml"], 2, "`upgd sweep mine.toml`"),
        (["reproduce", "toy-changing-inputs", "--dry-run", "--ray", "auto"], 2, "leave out --ray"),
        (
            ["reproduce", "toy-changing-inputs", "--dry-run", "--resume-from", "elsewhere"],
            *(2, "--resume-from elsewhere: there are no results (*.csv.gz); name the subfolder data"),
        ),
        (
            ["run", "stationary-digits", "--method", "sgd", "--lr", "1", "--dry-run", "--ray", "auto"],
            2,
            "leave out --ray",
        ),
    ],
)
def test_a_mistake_gets_one_sentence_and_an_exit_code(upgd, arguments, code, says):
    exit_code, out, err = upgd(*arguments)
    last = err.splitlines()[-1]
    assert (exit_code, out) == (code, "")
    assert last.startswith("upgd: ")
    assert says in last
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("kill", "workers", "nohup"),
    [(signal.SIGINT, 1, False), (signal.SIGTERM, 1, False), (signal.SIGINT, 2, False), (signal.SIGTERM, 1, True)],
)
def test_a_stopped_sweep_explains_how_to_continue(folder, kill, workers, nohup):
    """As by Ctrl-C in a terminal, which every process of the command gets; or by a kill, in the background as well."""
    command = [
        *(["sh", "-c", 'trap "" INT; exec "$@"', "sh"] if nohup else []),
        *(sys.executable, "-c", "from upgd.cli import main; main()", "run", "output-permuted-digits"),
        *("--method", "upgd", "--lr", "0.03", "--seeds", "2", "--steps", "1_000_000", "--network", "8"),
        *("--backend", "torch", "--workers", str(workers), "--checkpoint-every", "0.1"),
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert "0%" in process.stderr.readline()
    deadline = time.monotonic() + 120
    while len(list(folder.glob("upgd.db.checkpoints/*.pt"))) < workers and time.monotonic() < deadline:
        time.sleep(0.05)
    if kill == signal.SIGINT:
        os.killpg(process.pid, kill)
    else:
        process.send_signal(kill)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "stopped; unfinished runs are saved" in err
    assert "repeat the command to continue" in err
    there = [path.suffix for path in (folder / "upgd.db.checkpoints").iterdir()]
    assert {suffix: there.count(suffix) for suffix in (".json", ".pt")} == {".json": workers, ".pt": workers}
    assert set(there) <= {".json", ".pt", ".previous"}


AT_WORK = """
import sys
from upgd.cli import main
from upgd.experiments.execution.progress import Progress

usual = Progress.update

def update(self, *news):
    usual(self, *news)
    if sum(steps > 0 for steps in self.done.values()) == 2:
        print("both are at work", file=sys.stderr, flush=True)
        Progress.update = usual

Progress.update = update
main()
"""


@contextlib.contextmanager
def _at_work(program, **streams):
    """Two workers in a process group of their own, which is killed in the end, even if the test fails."""
    command = [
        *(sys.executable, "-c", program, "sweep", "output-permuted-digits", "--methods", "sgd,pgd", "--lr", "0.03"),
        *("--sigma", "0.01", "--seeds", "1", "--steps", "1_000_000", "--network", "8", "--backend", "torch"),
        *("--workers", "2", "--checkpoint-every", "3600"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize("kill", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_workers_save_their_work_when_all_processes_are_told_to_stop(folder, kill):
    """A batch system sends SIGTERM to a whole job. The only snapshot is the one that a worker saves when it stops."""
    with _at_work(AT_WORK, stderr=subprocess.PIPE, text=True) as process:
        while (line := process.stderr.readline()) and "both are at work" not in line:
            pass
        os.killpg(process.pid, signal.Signals[kill])
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "unfinished runs are saved; repeat the command to continue" in err
    checkpoints = [path.suffix for path in (folder / "upgd.db.checkpoints").iterdir()]
    assert sorted(checkpoints) == [".json", ".json", ".pt", ".pt"]


IN_A_TERMINAL = f"""
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
{AT_WORK}
"""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
def test_work_is_saved_when_the_terminal_is_closed(folder):
    """Neither progress nor messages can be written to it any more."""
    ours, theirs = os.openpty()
    with _at_work(IN_A_TERMINAL, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"both are at work" not in shown:
            shown += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(timeout=60) == 130
    checkpoints = [path.suffix for path in (folder / "upgd.db.checkpoints").iterdir()]
    assert sorted(checkpoints) == [".json", ".json", ".pt", ".pt"]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_under_nohup_a_closed_terminal_changes_nothing():
    from upgd.cli.executing import terminable

    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, usual)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signal_handlers_are_restored(name):
    from upgd.cli.executing import terminable

    number = getattr(signal, name, None) or pytest.skip(f"needs {name}")
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), terminable():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_sweep_through_a_link_continues_the_one_under_the_other_name(folder):
    (folder / "results").mkdir()
    (folder / "link.db").symlink_to(folder / "results" / "upgd.db")
    from upgd.experiments.execution.jobs import Checkpoints

    assert Checkpoints.beside(folder / "link.db").folder == Checkpoints.beside(folder / "results" / "upgd.db").folder


def test_a_second_writer_is_refused(upgd, folder):
    with Store.write(folder / "upgd.db"):
        code, _, err = upgd("run", "output-permuted-digits", "--method", "sgd", "--lr", "0.1", *SMALL)
    assert code == 1
    assert "another process is writing to upgd.db" in err


def test_bench_measures(upgd, monkeypatch):
    real = bench.measure
    monkeypatch.setattr(bench, "measure", lambda device: real(device, seconds=0.01))
    monkeypatch.setattr(bench, "_METHODS", {"sgd": {"lr": 0.001}})
    monkeypatch.setattr(bench, "_problems", lambda: [("linear", make("toy-changing-outputs"))])
    monkeypatch.setattr(bench, "learner_steps_per_second", partial(bench.learner_steps_per_second, backend="torch"))
    (line,) = json.loads(upgd("bench", "--device", "cpu", "--json")[1])
    assert line["learner_steps_per_second"] > 0
    assert line["network"] == "Linear 16-1"
    assert "learner-steps/s" in upgd("bench", "--device", "cpu")[1]


def test_run_takes_a_published_setting(upgd, monkeypatch, tmp_path):
    setting = best_known.PUBLISHED["input-permuted-mnist"]["s-ewc"]
    monkeypatch.setitem(best_known.PUBLISHED, "input-permuted-digits", {"s-ewc": setting})
    monkeypatch.chdir(tmp_path)
    run = (
        "run",
        "input-permuted-digits",
        "--setting",
        "published",
        "--seeds",
        "1",
        "--steps",
        "20",
        "--backend",
        "torch",
    )
    status, printed, complaint = upgd(*run, "--method", "s-ewc", "--kappa", "0.5", "--json")
    assert status == 0, complaint
    assert '"kappa": 0.5' in printed
    assert '"beta_importance": 0.9999' in printed
    for problem, method, words in (
        ("input-permuted-digits", "sgd", "no setting of method='sgd' is published for input-permuted-digits"),
        ("stationary-digits", "upgd", "no setting is published for stationary-digits; there are some for"),
    ):
        status, _, complaint = upgd("run", problem, "--method", method, "--setting", "published")
        assert status > 0
        assert words in " ".join(complaint.split())


def test_a_sweep_compares_published_settings(upgd, monkeypatch, tmp_path):
    settings = best_known.PUBLISHED["input-permuted-mnist"]
    monkeypatch.setitem(best_known.PUBLISHED, "input-permuted-digits", settings)
    monkeypatch.chdir(tmp_path)
    sweep = ("sweep", "input-permuted-digits", "--grid", "published", "--lr", "0.02", "--seeds", "1", "--steps", "20")
    status, printed, complaint = upgd(*sweep, "--methods", "upgd,s-ewc", "--json")
    assert status == 0, complaint
    found = {row["method"]: row["settings"] for row in json.loads(printed)}
    assert found["upgd"] == found["upgd"] | settings["upgd"] | {"lr": 0.02}
    assert found["s-ewc"] == found["s-ewc"] | settings["s-ewc"] | {"lr": 0.02}
    status, _, complaint = upgd(*sweep, "--methods", "upgd,sgd")
    assert status > 0
    assert "no setting of method='sgd' is published" in " ".join(complaint.split())
