"""`upgd confirm`, and tables after it, as a user types them."""

import json

import pytest

from upgd.experiments import confirm
from upgd.experiments.analysis.compare import OWN_LOOP
from upgd.experiments.execution import running
from upgd.experiments.execution.time_limit import TimeLimit
from upgd.store import Key, Record, Store

SMALL = ("--steps", "40", "--network", "8", "--option", "task_length=20", "--backend", "torch", "--quiet")
SWEEP = ("sweep", "output-permuted-digits", "--methods", "sgd,upgd", "--lr", "0.1,0.01", "--seeds", "2", *SMALL)
CONFIRM = ("confirm", "--backend", "torch", "--quiet")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UPGD_STORE", raising=False)
    return tmp_path


@pytest.fixture
def swept(upgd):
    assert upgd(*SWEEP)[0] == 0
    return upgd


def seeds_of(method="sgd", lr=0.1, store="upgd.db"):
    with Store.read(store) as opened:
        return [r.key.seed for r in opened.records(methods=[method]) if r.key.settings["lr"] == lr]


def best_lr(upgd):
    return {one["method"]: one["settings"]["lr"] for one in json.loads(upgd("best", "--json")[1])}


def test_the_best_settings_run_on_seeds_that_the_search_has_not_seen(swept):
    chosen = best_lr(swept)
    code, out, _ = swept(*CONFIRM, "--seeds", "3", "--json")
    assert code == 0
    lines = json.loads(out)
    assert {(line["method"], line["settings"]["lr"], line["seeds"], line["evaluation"]) for line in lines} == {
        (method, lr, 3, "fresh") for method, lr in chosen.items()
    }
    for method, lr in chosen.items():
        assert seeds_of(method, lr) == [0, 1, 2, 3, 4]
    with Store.read("upgd.db") as store:
        assert len(store) == 8 + 6
    assert best_lr(swept) == chosen
    assert "online accuracy, on fresh seeds\n" in swept("table")[1]


def test_a_confirmation_resumes_and_can_be_extended(swept):
    swept(*CONFIRM, "--seeds", "2")
    with Store.write("upgd.db") as store:
        (one,) = (r for r in store.records(methods=["upgd"]) if r.key.seed == 3)
        store.delete([one.id])
    (facts,) = json.loads(swept(*CONFIRM, "--seeds", "2", "--dry-run", "--json")[1])
    assert (facts["learners"], facts["stored"], facts["learner_steps"]) == (4, 3, 40)
    swept(*CONFIRM, "--seeds", "2")
    with Store.read("upgd.db") as store:
        (again,) = (r for r in store.records(methods=["upgd"]) if r.key.seed == 3)
    assert list(again.accuracy) == list(one.accuracy)
    lines = json.loads(swept(*CONFIRM, "--seeds", "4", "--json")[1])
    assert [line["seeds"] for line in lines] == [4, 4]


def test_the_store_may_be_named_in_either_way_but_once(swept, monkeypatch, folder):
    (folder / "upgd.db").rename(folder / "a.db")
    assert swept(*CONFIRM, "a.db", "--seeds", "1")[0] == 0
    assert swept(*CONFIRM, "--store", "a.db", "--seeds", "1")[0] == 0
    code, _, err = swept(*CONFIRM, "a.db", "--store", "b.db")
    assert (code, "two stores are named, a.db and --store b.db" in err) == (2, True)
    monkeypatch.setenv("UPGD_STORE", "b.db")
    assert swept(*CONFIRM, "a.db", "--seeds", "1")[0] == 0


def test_seeds_of_the_search_are_refused(swept):
    code, _, err = swept(*CONFIRM, "--seeds", "1,7")
    assert code == 1
    assert "the settings were chosen on 1 seed of these (1); use others, such as 2 and above" in err
    assert swept(*CONFIRM, "--seeds", "9,7")[0] == 0
    assert seeds_of(lr=best_lr(swept)["sgd"])[2:] == [9, 7]


def test_nothing_to_confirm_is_an_error(upgd):
    upgd("run", "output-permuted-digits", "--method", "sgd", "--lr", "0.1", "--seeds", "2", *SMALL)
    code, _, err = upgd(*CONFIRM)
    assert code == 1
    assert "there is nothing to confirm: every method has only one setting" in err
    assert upgd(*CONFIRM, "--store", "nowhere.db")[0] == 1


def test_methods_that_cannot_be_run_are_skipped_with_a_message(swept):
    with Store.read("upgd.db") as store:
        key = store.records()[0].key
    own = [
        Record(
            Key(**{**vars_of(key), "method": "mine", "settings": {"lr": lr}, "seed": seed}),
            window=20,
            loss=[0.5, 0.5],
            accuracy=[0.5, 0.6],
            backend=OWN_LOOP,
        )
        for lr in (0.1, 0.2)
        for seed in range(2)
    ]
    with Store.write("upgd.db") as store:
        store.add(own)
    code, _, err = swept(*CONFIRM, "--seeds", "1")
    assert code == 0
    assert err.startswith("upgd: mine is skipped: its results were recorded by your own loop")


def vars_of(key):
    return {name: getattr(key, name) for name in ("problem", "options", "network", "steps")}


def test_confirm_in_python(swept):
    results = confirm("upgd.db", seeds=2, backend="torch", methods=["sgd"])
    assert {r.key.method for r in results.records} == {"sgd"}
    (line,) = results.table().lines
    assert (line["evaluation"], line["seeds"]) == ("fresh", 2)


def test_a_table_can_compare_all_pairs_or_with_a_reference(upgd, folder):
    arguments = ("sweep", "output-permuted-digits", "--methods", "sgd,upgd,pgd", "--lr", "0.1", "--sigma", "0.01")
    upgd(*arguments, "--seeds", "3", *SMALL)
    lines = json.loads(upgd("table", "--pairs", "--json")[1])
    assert [(line["method"], line["other"]) for line in lines] == [("sgd", "upgd"), ("sgd", "pgd"), ("upgd", "pgd")]
    assert all(line["p_holm"] >= line["p"] for line in lines)
    lines = json.loads(upgd("table", "--against", "pgd", "--json")[1])
    assert {line["method"] for line in lines if line["difference"] is None} == {"pgd"}
    for wrong in ("--all", "--against=sgd"):
        code, _, err = upgd("table", "--pairs", wrong)
        assert (code, wrong.split("=")[0] in err) == (2, True)
    code, _, err = upgd("table", "--against", "adamw")
    assert (code, "choose among sgd; upgd; pgd" in err) == (1, True)


def test_pairs_print_labels_and_have_registered_names_in_json(upgd):
    arguments = ("sweep", "output-permuted-digits", "--methods", "upgd", "--wise", "weight,feature", "--lr", "0.1")
    upgd(*arguments, "--seeds", "3", *SMALL)
    out = upgd("table", "--pairs")[1]
    assert "UPGD  " in out
    assert "UPGD, feature-wise" in out
    (line,) = json.loads(upgd("table", "--pairs", "--json")[1])
    assert (line["method"], line["other"], line["source"], line["other_source"]) == ("upgd", "upgd", None, None)
    assert (line["settings"]["granularity"], line["other_settings"]["granularity"]) == ("weight", "feature")
    lines = json.loads(upgd("table", "upgd.db", "./upgd.db", "--pairs", "--json")[1])
    assert {line["source"] for line in lines} <= {"upgd.db", "./upgd.db"}


def test_the_time_limit_is_for_all_problems_together(swept, monkeypatch):
    swept(*(word if word != "40" else "60" for word in SWEEP))
    limits = []
    monkeypatch.setattr(running, "TimeLimit", lambda seconds: limits.append(seconds) or TimeLimit(seconds))
    code, out, _ = swept(*CONFIRM, "--seeds", "1", "--stop-after", "1000", "--json")
    assert (code, {line["steps"] for line in json.loads(out)}) == (0, {40, 60})
    assert limits == [1000]


def test_at_the_time_limit_json_lists_what_is_finished(swept):
    stopped = (*CONFIRM, "--seeds", "2", "--stop-after", "0")
    assert swept(*stopped)[:2] == (0, "")
    assert swept(*stopped, "--json")[:2] == (0, "[]\n")
    swept(*CONFIRM, "--seeds", "2", "--methods", "sgd")
    code, out, err = swept(*stopped, "--json")
    assert (code, [(line["method"], line["seeds"]) for line in json.loads(out)]) == (0, [("sgd", 2)])
    assert "repeat the command to continue" in err
