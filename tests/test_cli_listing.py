"""`upgd methods` and `upgd problems`."""

import json

import pytest

from upgd.experiments.execution import estimate
from upgd.methods import METHODS
from upgd.streams import names


def test_methods_are_listed(upgd):
    code, out, _ = upgd("methods")
    assert code == 0
    assert [line for line in out.splitlines() if line and not line.startswith((" ", "`"))] == list(METHODS)
    assert ":class:" not in out


def test_problems_are_listed_once(upgd):
    code, out, _ = upgd("problems")
    listed = [name for line in out.splitlines() if not line.startswith((" ", "`")) for name in line.split(", ") if name]
    assert (code, sorted(listed)) == (0, sorted(names()))


def test_a_method_shows_its_settings(upgd):
    code, out, _ = upgd("methods", "shrink-and-perturb")
    assert code == 0
    assert "shrink-and-perturb (Shrink & Perturb)" in out
    assert "--sigma  required; ≥ 0" in out
    assert "upgd run output-permuted-digits --method shrink-and-perturb --lr 0.01 --sigma" in out
    assert "--betas  default 0.9/0.999; ≥ 0; < 1" in upgd("methods", "adamw")[1]
    assert "--scaling  default global; global or local" in upgd("methods", "upgd")[1]


def test_the_details_of_a_method_fit_the_terminal(upgd, monkeypatch):
    monkeypatch.setattr("upgd.experiments.analysis.layout.terminal_width", lambda: 60)
    _, out, _ = upgd("methods", "self-normalized-resets")
    details = out.partition("Settings:")[0].splitlines()
    assert all(len(line) <= 60 for line in details if not line.startswith("    "))
    assert "    M = (m + steps until it last fired)/(1 + how often it fired),     P(A > a) = (1 − 1/M)ᵃ" in details


@pytest.mark.parametrize("name", METHODS)
def test_the_example_of_every_method_is_valid(upgd, name, monkeypatch):
    monkeypatch.setattr(estimate, "estimate", lambda *_: 0.0)
    _, out, _ = upgd("methods", name)
    command, *arguments = out.splitlines()[-1].split()
    code, _, err = upgd(*arguments, "--steps", "1", "--seeds", "1", "--dry-run")
    assert (command, code, err) == ("upgd", 0, "")


def test_a_problem_shows_its_options(upgd):
    _, out, _ = upgd("problems", "output-permuted-digits")
    assert "--option task_length=1000\n  --option drift=0\n" in out
    assert "--network 100-50 --steps 30000 --seeds 20" in out
    assert "--option folder=…  (required)" in upgd("problems", "label-permuted-features")[1]
    assert "--option examples=…  (the default depends on the data set)" in upgd("problems", "random-label-mnist")[1]


def test_json(upgd):
    methods = json.loads(upgd("methods", "--json")[1])
    assert [method["name"] for method in methods] == list(METHODS)
    adamw = json.loads(upgd("methods", "adamw", "--json")[1])
    assert adamw["settings"]["betas"]["default"] == [0.9, 0.999]
    assert adamw["settings"]["lr"]["required"]
    assert adamw in methods
    problems = json.loads(upgd("problems", "--json")[1])
    assert [problem["name"] for problem in problems] == names()
    bits = json.loads(upgd("problems", "bit-flipping", "--json")[1])
    assert bits["options"]["beta"] == {"default": 0.7}
    assert bits["network"] == "5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("methods", "upgdd"), "there is no method 'upgdd'; did you mean 'upgd'?"),
        (("problems", "bit-fliping"), "there is no problem 'bit-fliping'; did you mean 'bit-flipping'?"),
        (("problems", "output-permuted-digitz"), "there is no data set 'digitz' (did you mean 'digits'?)"),
    ],
)
def test_unknown_names(upgd, arguments, message):
    code, out, err = upgd(*arguments)
    assert (code, out) == (1, "")
    assert message in err
