"""Metrics other than online accuracy: derived by hand from curves and diagnostics, and shown in all outputs."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from made_records import record, seeds

from upgd.cli.options import Shown
from upgd.experiments import Results, run
from upgd.experiments.analysis.metrics import METRICS, Metric, area, quarter, series
from upgd.monitor import forgetting, loss_of_plasticity
from upgd.report import write
from upgd.store import Store

LOOKS = {
    "step": [10, 20, 40],
    "sample_plasticity": [0.5, 0.3, 0.1],
    "dormant_share/layers.1": [0.0, 0.25, 0.5],
    "dormant_share/layers.3": [0.5, 0.25, 1.0],
    "effective_rank/layers.1": [8.0, 6.0, 4.0],
    "effective_rank/layers.3": [4.0, 2.0, 2.0],
    "effective_rank/layers.0.weight": [50.0, 50.0, 50.0],  # of a matrix, a different diagnostic
    "weight_l2": [2.0, 3.0, 4.0],
    "weight_l2/layers.0.weight": [1.0, 1.0, 1.0],
}


def looked(**options):
    return record(diagnostics=LOOKS, **options)


@pytest.mark.parametrize(
    ("metric", "values", "number"),
    [
        # The snapshots cover 10, 10 and 20 steps.
        ("plasticity", [0.5, 0.3, 0.1], (10 * 0.5 + 10 * 0.3 + 20 * 0.1) / 40),
        ("loss-of-plasticity", [0.0, 0.2, 0.4], 0.4),
        ("dormant-units", [0.25, 0.25, 0.75], 0.5),
        ("effective-rank", [6.0, 4.0, 3.0], 4.0),
        ("weight-norm", [2.0, 3.0, 4.0], 3.25),
    ],
)
def test_metrics_of_looks(metric: Metric, values, number) -> None:
    found = series(looked(), metric)
    assert found.ends.tolist() == [10, 20, 40]
    assert found.values == pytest.approx(values)
    assert area(looked(), metric) == pytest.approx(number)
    assert quarter(looked(), metric, "first") == pytest.approx(values[0])
    assert quarter(looked(), metric, "last") == pytest.approx(values[-1])


def test_they_are_those_of_the_monitor() -> None:
    one = looked()
    falls = forgetting(torch.from_numpy(one.accuracy).double())
    assert series(one, "forgetting").values == pytest.approx(falls.numpy())
    assert area(one, "forgetting") == pytest.approx(float(falls.mean()))
    assert area(one, "forgetting") == pytest.approx((one.accuracy[0] - one.accuracy[-1]) / 3)
    lost = loss_of_plasticity(torch.tensor(LOOKS["sample_plasticity"]))
    assert area(one, "loss-of-plasticity") == pytest.approx(float(lost))


def test_in_regression_forgetting_is_a_loss_that_rises() -> None:
    one = record(regression=True)
    assert series(one, "forgetting").values == pytest.approx(np.diff(one.loss))


@pytest.mark.parametrize("metric", METRICS)
def test_a_diverged_learner_has_no_metric(metric: Metric) -> None:
    assert series(looked(diverged_at=35), metric) is None
    assert math.isnan(area(looked(diverged_at=35), metric))


def test_snapshots_of_non_finite_learners_are_ignored() -> None:
    looks = {**LOOKS, "weight_l2": [2.0, 3.0, None]}
    assert series(record(diagnostics=looks), "weight-norm") is None


def test_settings_are_always_chosen_by_the_online_metric() -> None:
    """The worse setting has the smaller weights."""
    small = {**LOOKS, "weight_l2": [1.0, 1.0, 1.0]}
    records = [*seeds(2, settings={"lr": 0.1}, level=0.8, diagnostics=LOOKS)]
    records += seeds(2, settings={"lr": 0.01}, level=0.4, diagnostics=small)
    results = Results(records)
    (best,) = results.best("weight-norm")
    assert best.entry.settings["lr"] == 0.1
    (line,) = results.table(metric="weight-norm").lines
    assert (line["metric"], line["mean"], line["settings"]["lr"]) == ("weight-norm", pytest.approx(3.25), 0.1)
    lines = results.table(metric="weight-norm", all_settings=True).lines
    assert [line["settings"]["lr"] for line in lines] == [0.01, 0.1]  # less is better
    lines = results.table(metric="effective-rank", all_settings=True).lines
    assert [line["mean"] for line in lines] == [4.0, 4.0]
    assert results.table(metric="loss").lines[0]["mean"] == pytest.approx(area(records[0], "loss") - 0.005)


def test_titles_name_the_metric() -> None:
    results = Results([looked()])
    assert "40 steps: weight-norm\n" in results.table(metric="weight-norm").text()
    assert "40 steps: online accuracy\n" in results.table().text()
    axes = results.plot(metric="dormant-units")
    assert any("share of dormant units" in text.get_text() for text in axes.texts)
    assert axes.lines[0].get_ydata() == pytest.approx([0.25, 0.25, 0.75])


def test_pairs_compare_the_metric() -> None:
    other = {**LOOKS, "weight_l2": [1.0, 1.0, 1.0]}
    records = [*seeds(2, diagnostics=LOOKS), *seeds(2, "upgd", diagnostics=other)]
    (pair,) = Results(records).pairs(metric="weight-norm").lines
    assert pair["difference"] == pytest.approx(2.25)


def test_frames_have_the_metrics_that_were_recorded() -> None:
    columns = Results([looked(), record(seed=1)]).columns()
    assert columns["dormant_units"] == [0.5, None]
    assert columns["loss_of_plasticity"] == [pytest.approx(0.4), None]
    assert all(value is not None for value in columns["forgetting"])


@pytest.mark.parametrize(
    ("metric", "made", "message"),
    [
        (
            "dormant-units",
            record(window=10_000, windows=3),
            "dormant-units was not recorded for .*, 30,000 steps; to record diagnostics, run the learners with "
            "--look-every 1500, into another store",
        ),
        (
            "loss-of-plasticity",
            record(diagnostics={"step": [40], "sample_plasticity": [0.5]}),
            "it needs two snapshots: .*",
        ),
        ("forgetting", record(windows=1), "it needs at least two task windows: run more steps"),
        ("accuracy", record(regression=True), "regression has only a loss: remove --metric"),
        ("speed", record(), "metric must be one of accuracy, loss, .*, not 'speed'"),
    ],
)
def test_missing_metrics_are_reported(metric, made, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Results([made]).table(metric=metric)


def test_a_table_notes_methods_without_the_metric() -> None:
    table = Results([looked(), record("upgd")]).table(metric="plasticity")
    assert [line["mean"] is None for line in table.lines] == [False, True]
    assert "–: plasticity was not recorded; to record diagnostics, run the learners with --look-every 2" in table.text()


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_in_tables_figures_and_pages(metric: Metric, tmp_path, upgd, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.write("a.db") as store:
        store.add([*seeds(3, diagnostics=LOOKS), *seeds(3, "upgd", diagnostics=LOOKS, level=0.7)])
    for command in ("table", "best"):
        code, out, _ = upgd(command, "a.db", "--metric", metric)
        assert code == 0
        assert metric in out
    code, *_ = upgd("plot", "a.db", "--metric", metric, "-o", "a.svg")
    assert (code, (tmp_path / "a.svg").stat().st_size > 1000) == (0, True)
    code, *_ = upgd("report", "a.db", "--metric", metric, "-o", "a.html")
    assert code == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert f'"metric":"{metric}"' in page.replace(": ", ":")
    assert METRICS[metric].noun.removeprefix("online ") in page


def test_the_command_line_has_all_of_them() -> None:
    (names, _) = get_args(Shown)
    assert get_args(names) == get_args(Metric) == tuple(METRICS)


def test_learners_record_them(tmp_path) -> None:
    """From a run to the table; every look is at the end of a window of this problem."""
    small = {"seeds": 2, "steps": 60, "network": "8", "options": {"task_length": 20}}
    results = run("input-permuted-digits", {"sgd": {"lr": [0.01]}}, store=tmp_path / "a.db", look_every=20, **small)
    for metric in METRICS:
        (line,) = results.table(metric=metric).lines
        assert line["mean"] is not None
        assert line["standard_error"] is not None
    assert write(tmp_path / "a.db", tmp_path / "a.html", metric="forgetting").exists()
