"""Diagnostics of learners: recorded, stored and shown."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from upgd.experiments import run
from upgd.population import Diagnostics, Learner, Population
from upgd.report import write
from upgd.report.page import content
from upgd.store import Store

WHAT = {"seeds": 2, "steps": 60, "network": "8", "options": {"task_length": 20}}
METHODS = {"upgd": {"lr": 0.05}, "sgd": {"lr": 0.05}}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("inside") / "r.db"
    run("output-permuted-digits", METHODS, store=path, look_every=30, **WHAT)
    return path


def records(store):
    with Store.read(store) as opened:
        return opened.records()


def test_diagnostics_are_restored_from_the_store(store):
    from upgd.networks import MLP
    from upgd.streams import make

    learner = Learner(method="upgd", lr=0.05, seed=1)
    population = Population(MLP((64, 8, 10)), [learner])
    seen = population.run(make("output-permuted-digits", task_length=20), 60, diagnostics=Diagnostics(every=30))
    one = next(record for record in records(store) if record.key.method == "upgd" and record.key.seed == 1)
    assert one.diagnostics["step"] == [30, 60]
    assert set(one.diagnostics) - {"step"} == set(seen.diagnostics)
    for name, figures in seen.diagnostics.items():
        np.testing.assert_allclose(one.diagnostics[name], figures[:, 0], rtol=2e-3, atol=1e-5, err_msg=name)


def test_diagnostics_do_not_affect_training_and_are_off_by_default(store):
    plain = run("output-permuted-digits", METHODS, **WHAT).records
    assert all(record.diagnostics is None for record in plain)
    for one, other in zip(plain, records(store), strict=True):
        assert one.key == other.key
        np.testing.assert_array_equal(one.loss, other.loss)


def test_a_learner_has_only_figures_that_it_has(store):
    of = {record.key.method: record.diagnostics for record in records(store)}
    assert any(name.startswith("gate_histogram") for name in of["upgd"])
    assert not any(name.startswith("gate_histogram") for name in of["sgd"])


def test_the_page_has_means_over_seeds_in_chart_and_table(store):
    html = content(records(store), Path("r.db"))
    chart = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL).group(1))["comparison-1"]
    own = next(method["inside"] for method in chart["methods"] if method["name"] == "UPGD")
    norms = [r.diagnostics["weight_l2"] for r in records(store) if r.key.method == "upgd"]
    np.testing.assert_allclose(own["weight_l2"], np.mean(norms, 0), rtol=1e-4)
    assert np.shape(own["gate_histogram/layers.0.weight"]) == (2, 10)
    assert f"{np.mean(norms, 0)[-1]:.4g}</td>" in html


def test_figures_and_histograms_are_drawn(store, open_page, tmp_path):
    page = open_page(write(store, tmp_path / "report.html").as_uri())
    looks = page.locator('[data-chart="looks"]')
    looks.scroll_into_view_if_needed()
    looks.locator(".scatterlayer .trace").nth(1).wait_for(state="attached")
    assert looks.locator(".scatterlayer .trace").count() == 2
    page.get_by_role("button", name="SGD", exact=True).click()
    looks.scroll_into_view_if_needed()
    looks.locator(".scatterlayer .trace").nth(1).wait_for(state="detached")
    assert looks.locator(".scatterlayer .trace").count() == 1
    looks.locator("select").first.select_option("gate histogram/layers.0.weight")
    looks.get_by_text("gate ū").wait_for(state="attached")
    inside = page.evaluate("JSON.parse(document.getElementById('data').textContent)['comparison-1'].methods")
    shares = np.array(next(one["inside"]["gate_histogram/layers.0.weight"] for one in inside if one["name"] == "UPGD"))
    occurring = [f"{i / 10:g}–{(i + 1) / 10:g}" for i in range(10) if shares[:, i].any()]
    assert len(occurring) > 1
    assert looks.locator(".legendtext").all_text_contents() == occurring[::-1]  # as they are stacked
    assert looks.locator(".scatterlayer .trace").count() == len(occurring)
    assert looks.locator("select").nth(1).locator("option").all_inner_texts() == ["UPGD"]
    chart, title = looks.locator(".chart").bounding_box(), looks.locator(".ytitle").bounding_box()
    assert chart["y"] < title["y"]
    assert title["y"] + title["height"] < chart["y"] + chart["height"]
    assert page.complaints == []
