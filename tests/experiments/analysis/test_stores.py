"""Stores from Python: reading, recording results of custom loops, comparing several."""

import csv
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_records import record as made
from made_records import seeds

import upgd
from upgd.experiments import Results
from upgd.report import write
from upgd.report.content import sections
from upgd.store import Record, Store

OWN = {"problem": "my-stream", "method": "mine", "seed": 0}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UPGD_STORE", raising=False)
    return tmp_path


@pytest.fixture
def command(request):
    """The command line; its own name is the package's here."""
    return request.getfixturevalue("upgd")


def filled(path, records):
    with Store.write(path) as store:
        store.add(records)
    return path


def read(path="mine.db") -> list[Record]:
    with Store.read(path) as store:
        return store.records()


def test_open_reads_everything_and_leaves_the_store_free():
    filled("a.db", [*seeds(3, "sgd"), *seeds(2, "upgd", problem="other")])
    results = upgd.open("a.db")
    assert isinstance(results, Results)
    assert len(results) == 5
    assert {r.source for r in results.records} == {""}
    with Store.write("a.db"):  # no file stays open
        assert len(upgd.open(Path("a.db"), problem="other")) == 2
    assert [r.key.seed for r in upgd.open("a.db", methods="sgd", seeds=[0, 2]).records] == [0, 2]
    assert len(upgd.open("a.db").select(methods=["upgd"], steps=40, network="100-50", seeds=[1])) == 1
    assert len(upgd.open("a.db").select(problem="nothing")) == 0
    for select in (results.select, partial(upgd.open, "a.db")):
        with pytest.raises(TypeError, match=r"seeds must be a list of seeds, such as range\(3\), not 3"):
            select(seeds=3)
    with pytest.raises(OSError, match="there is no store nowhere"):
        upgd.open("nowhere.db")
    with pytest.raises(TypeError, match=r"'upgd\.db'"):
        upgd.open()


def test_two_stores_are_compared_and_not_pooled():
    filled("a.db", seeds(3, "sgd", level=0.5))
    filled("b.db", seeds(3, "sgd", level=0.7))
    results = upgd.open("a.db", "b.db")
    best, other = results.table().lines
    assert (best["source"], other["source"]) == ("b.db", "a.db")
    assert (best["seeds"], other["seeds"]) == (3, 3)
    assert best["mean"] - other["mean"] == pytest.approx(-other["difference"])
    assert "sgd (b.db)" in str(results.table())
    assert results.columns()["source"] == ["a.db"] * 3 + ["b.db"] * 3
    axes = results.plot()
    assert {"SGD (a)", "SGD (b)"} <= {text.get_text() for text in axes.texts}
    assert len({line.get_linestyle() for line in axes.lines}) == 2


def test_the_report_compares_two_stores(command, folder):
    filled("a.db", seeds(3, "sgd", level=0.5))
    filled("b.db", seeds(3, "sgd", level=0.7))
    code, _, err = command("report", "a.db", "b.db")
    assert (code, err) == (0, "wrote report.html\n")
    page = Path("report.html").read_text()
    assert "<h1>a.db and b.db</h1>" in page
    assert "SGD (b) has the highest accuracy" in page
    assert "--store a.db" in page
    assert "--store b.db" in page
    write(["a.db"], "one.html", title="Mine & yours")
    assert "<title>Mine &amp; yours</title>" in Path("one.html").read_text()
    assert command("report", "a.db", "--title", "Digits", "-o", "two.html")[0] == 0
    assert "<h1>Digits</h1>" in Path("two.html").read_text()
    assert command("report", "--store", "a.db")[0] == 0
    code, _, err = command("report", "a.db", "--store", "b.db")
    assert (code, "two stores are named" in err) == (2, True)


def test_tables_take_stores_by_name(command, monkeypatch):
    filled("a.db", seeds(3, "sgd", level=0.5))
    filled("b.db", seeds(3, "sgd", level=0.7))
    for name in ("table", "best"):
        named = command(name, "a.db", "--json")
        assert named == command(name, "--store", "a.db", "--json")
        assert len(json.loads(named[1])) == 1
        assert len(json.loads(command(name, "a.db", "b.db", "--json")[1])) == 2
        assert command(name, "a.db", "--store", "b.db")[0] == 2
    monkeypatch.setenv("UPGD_STORE", "b.db")
    assert command("table", "a.db", "--json")[1] == command("table", "--store", "a.db", "--json")[1]
    code, _, err = command("table", "a.db", "b.db", "--problem", "nothing")
    assert (code, "a.db and b.db have no matching results" in err) == (1, True)


def test_a_custom_loop_is_recorded():
    assert upgd.record("mine.db", **OWN, loss=[3.0, 1.0, 2.0], accuracy=[0, 1, 1], settings={"lr": np.float32(0.5)})
    assert not upgd.record("mine.db", **OWN, loss=[9.0, 9.0, 9.0], accuracy=[0, 0, 0], settings={"lr": 0.5})
    (one,) = read()
    assert (one.key.problem, one.key.method, one.key.steps, one.window) == ("my-stream", "mine", 3, 1)
    assert one.key.settings == {"lr": 0.5}
    assert one.loss.tolist() == [3.0, 1.0, 2.0]
    assert one.accuracy.tolist() == [0, 1, 1]
    assert one.diverged_at is None


def test_tensors_and_long_runs_are_averaged_over_windows():
    losses = torch.arange(2500.0)
    upgd.record("mine.db", **OWN, loss=losses)
    (one,) = read()
    assert one.window == 3
    assert len(one.loss) == 834
    assert one.loss[:2].tolist() == [1.0, 4.0]
    assert one.loss[-1] == 2499.0  # a window of one step
    upgd.record("mine.db", **OWN | {"problem": "b"}, loss=losses, window=1000)
    assert read()[1].loss.tolist() == [499.5, 1499.5, 2249.5]


def test_means_over_windows_may_be_given():
    upgd.record("mine.db", **OWN, loss=[2.0, 1.0, 0.5], steps=25, window=10)
    (one,) = read()
    assert (one.key.steps, one.window, one.loss.tolist()) == (25, 10, [2.0, 1.0, 0.5])
    with pytest.raises(
        ValueError, match=r"loss has 4 values; it must have one for each of 25 steps, or one .* 3 windows"
    ):
        upgd.record("mine.db", **OWN | {"seed": 1}, loss=[2.0, 1.0, 0.5, 1], steps=25, window=10)


def test_the_first_loss_that_is_not_finite_is_where_it_diverged():
    upgd.record("mine.db", **OWN, loss=[1.0, 2.0, 3.0, np.inf, 5.0, 6.0], accuracy=[1, 1, 1, 0, 0, 0], window=2)
    upgd.record("mine.db", **OWN | {"seed": 1}, loss=[1.0, np.nan, 3.0], accuracy=[1, 1, 1], steps=6, window=2)
    first, second = read()
    assert (first.diverged_at, second.diverged_at) == (3, 2)
    for one in (first, second):
        assert np.isfinite(one.loss).tolist() == [True, False, False]
        assert np.isfinite(one.accuracy).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"loss": []}, "loss must be one number for each step"),
        ({"loss": [[1.0]]}, "loss must be one number for each step"),
        ({"loss": "abc"}, "loss must be one number for each step, in a list or an array of one dimension, not 'abc'"),
        ({"loss": [1.0, 2.0], "accuracy": [1.0]}, "accuracy has 1 values"),
        ({"loss": [1.0], "window": 0}, "steps and window must be integers of at least 1"),
        ({"loss": [1.0], "settings": {"net": object()}}, r"settings\['net'\] must be a finite number, a string"),
        (
            {"loss": [1.0], "looks": {1: {"a": [1]}, 2: {"a": [1, 2]}}},
            r"looks: 'a' must have the same number of values",
        ),
        ({"loss": [np.nan, np.inf]}, "loss has no finite value"),
        *(({"loss": [1.0], "seed": seed}, "seed must be an integer from 0") for seed in (-1, 2**63, 1.0, True)),
        ({"loss": [1.0], "settings": {"lr": float("inf")}}, r"settings\['lr'\] must be a finite number"),
    ],
)
def test_invalid_arguments_of_record_are_named(wrong, says):
    with pytest.raises(ValueError, match=says):
        upgd.record("mine.db", **OWN | wrong)
    assert not Path("mine.db").exists()


def test_incomparable_records_are_refused():
    upgd.record("mine.db", **OWN, loss=np.ones(100), window=10)
    with pytest.raises(ValueError, match=r"window=20 differs from that of the other seeds of mine .* give window=10"):
        upgd.record("mine.db", **OWN | {"seed": 1}, loss=np.ones(100), window=20)
    with pytest.raises(ValueError, match="this run has accuracy, but those in the store on my-stream"):
        upgd.record("mine.db", **OWN | {"seed": 1}, loss=np.ones(100), accuracy=np.ones(100), window=10)
    assert len(read()) == 1


def own_results(path="mine.db"):
    kinds = [{"inertia": 0.9, "kind": "fast"}, {"inertia": 0.5, "kind": "slow", "warm": None}]
    for settings in kinds:
        for seed in range(3):
            upgd.record(
                path,
                **OWN | {"seed": seed},
                loss=np.linspace(1, settings["inertia"], 40) + seed / 100,
                settings=settings,
                looks={10: {"weight_l2": 1.0, "gate_histogram/0": [0.5, 0.5]}, 20: {"weight_l2": np.nan}},
            )
    return upgd.open(path)


def test_custom_results_have_tables_figures_and_a_report():
    results = own_results()
    (line,) = results.table().lines
    assert line["settings"]["inertia"] == 0.5
    assert "inertia 0.5*, kind slow, warm –" in str(results.table())
    assert len(results.plot().lines) == 1
    (section,) = sections(results.records)
    assert section.commands("mine.db") == []  # they cannot be rerun
    write("mine.db", "report.html")
    assert "inertia 0.5*, kind slow, warm –" in Path("report.html").read_text()


def test_custom_settings_and_diagnostics_are_exported(command):
    results = own_results()
    columns = results.columns()
    assert columns["inertia"] == [0.9] * 3 + [0.5] * 3
    assert columns["kind"] == ["fast"] * 3 + ["slow"] * 3
    looks = results.columns(looks=True)
    assert looks["step"] == [10, 20] * 6
    assert looks["weight_l2"] == [1.0, None] * 6
    assert looks["gate_histogram/0[1]"] == [0.5, None] * 6
    code, out, _ = command("export", "--store", "mine.db", "--looks")
    rows = list(csv.DictReader(out.splitlines()))
    assert (code, len(rows), rows[0]["gate_histogram/0[0]"], rows[1]["weight_l2"]) == (0, 12, "0.5", "")
    assert command("export", "--store", "mine.db", "--looks", "--curves")[0] == 2


def test_all_diagnostics_are_exported(command, folder):
    arguments = ("--lr", "0.1", "--seeds", "2", "--steps", "40", "--network", "8", "--backend", "torch", "--quiet")
    command("run", "output-permuted-digits", "--method", "upgd", *arguments, "--look-every", "20")
    assert command("export", "looks.csv", "--looks")[0] == 0
    with Path("looks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["step"]) for row in rows] == [("0", "20"), ("0", "40"), ("1", "20"), ("1", "40")]
    for record in read("upgd.db"):
        own = [row for row in rows if row["seed"] == str(record.key.seed)]
        for name, values in record.diagnostics.items():
            for row, value in zip(own, values, strict=True):
                flat = (
                    {name: value} if not isinstance(value, list) else {f"{name}[{i}]": v for i, v in enumerate(value)}
                )
                for column, number in flat.items():
                    assert row[column] == ("" if number is None else str(number))
    command("run", "output-permuted-digits", "--method", "sgd", *arguments, "--store", "blind.db")
    code, _, err = command("export", "--store", "blind.db", "--looks")
    assert (code, "--look-every" in err) == (1, True)


def test_looks_are_a_frame_with_pandas(monkeypatch):
    results = own_results()
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert results.looks() == results.columns(looks=True)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("frame", columns)))
    assert results.looks() == ("frame", results.columns(looks=True))
    with pytest.raises(ValueError, match="choose one of them"):
        results.columns(curves=True, looks=True)


def test_a_setting_with_the_name_of_a_column_does_not_replace_it():
    upgd.record("mine.db", **OWN, loss=[1.0], settings={"seed": 7, "problem": "x"})
    columns = upgd.open("mine.db").columns()
    assert (columns["seed"], columns["setting_seed"]) == ([0], [7])
    assert (columns["problem"], columns["setting_problem"]) == (["my-stream"], ["x"])


def test_a_custom_method_is_compared_with_built_in_ones():
    records = list(seeds(3, "sgd", level=0.5))
    filled("mine.db", records)
    for seed in range(3):
        upgd.record(
            "mine.db",
            **{"problem": "output-permuted-digits", "network": "100-50", "method": "mine", "seed": seed},
            loss=np.ones(40),
            accuracy=np.full(40, 0.9),
        )
    lines = upgd.open("mine.db").table().lines
    assert [line["method"] for line in lines] == ["mine", "sgd"]
    assert lines[1]["difference"] is not None


def test_a_look_at_a_record_that_was_made_elsewhere():
    assert Results([made()]).columns(looks=True) == {}


def test_default_options_are_left_out_as_in_runs():
    plain = {"seeds": 1, "steps": 4, "network": "4", "backend": "torch"}
    upgd.experiments.run("toy-changing-inputs", {"sgd": {"lr": 0.01}}, store="mine.db", **plain)
    own = {"problem": "toy-changing-inputs", "method": "mine", "seed": 0, "network": "4", "loss": [1.0] * 4}
    for options in ({"amplitude": 1.0}, {"task_length": 100}):
        upgd.record("mine.db", **own, options=options)
    found = [sorted(entry.method for entry in one.entries) for one in upgd.open("mine.db").comparisons()]
    assert sorted(found) == [["mine"], ["mine", "sgd"]]
