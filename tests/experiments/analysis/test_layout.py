"""Tables in terminals of any width."""

import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upgd.experiments import Results
from upgd.experiments.analysis.layout import laid_out, number_format, number_text, p_text, terminal_width, wrapped
from upgd.experiments.spec.engine import ENGINE
from upgd.store import Key, Record

SETTINGS = {
    "upgd": {"lr": 0.03, "beta_utility": 0.9, "sigma": 0.001, "weight_decay": 0.0},
    "adamw": {"lr": 0.003, "betas": [0.0, 0.9999], "weight_decay": 0.01, "eps": 1e-8},
    "shrink-and-perturb": {"lr": 0.03, "sigma": 0.1, "weight_decay": 0.0001},
}
#: The columns of numbers, and how their names begin where they are folded.
NUMBERS = {
    "mean ± s.e.": "mean ± s.e.",
    "first quarter": "first",
    "last quarter": "last",
    "vs. best": "vs.",
    "p (Holm)": "p",
    "seeds": "seeds",
    "learner-steps": "learner-",
}


@pytest.fixture(scope="module")
def table():
    """Three methods on one problem, five seeds each."""
    levels = np.random.default_rng(0)
    found = [
        Record(
            Key(
                problem="output-permuted-digits",
                options={"task_length": 500},
                network="100-50",
                method=method,
                settings=settings,
                seed=seed,
                steps=30_000,
                engine=ENGINE,
            ),
            window=500,
            loss=np.ones(60, np.float32),
            accuracy=levels.random(60, np.float32),
        )
        for method, settings in SETTINGS.items()
        for seed in range(5)
    ]
    return Results(found).table()


@pytest.mark.parametrize(
    ("width", "left_out", "beneath"),
    [
        (None, [], False),
        (160, [], False),
        (120, ["learner-steps"], False),
        (80, ["learner-steps"], True),
        (60, ["learner-steps", "p (Holm)", "first quarter"], True),
        (50, ["learner-steps", "p (Holm)", "first quarter", "seeds", "vs. best"], True),
    ],
)
def test_columns_that_fit_a_width(table, width, left_out, beneath):
    text = table.text(width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= (width or 999)
    head = text[text.index("online accuracy") : text.index("─")]
    shown = [name for name, begins in NUMBERS.items() if re.search(rf"(?<!\w){begins}(?!\w)|{begins}steps", head)]
    assert shown == [name for name in NUMBERS if name not in left_out]
    assert " ".join(lines).endswith(f"(no room for {', '.join(left_out)})") == bool(left_out)
    assert ("\n  lr 0.003, wd 0.01, β₁β₂ 0/0.9999, ε 1e-08\n" in text) == beneath
    for method in SETTINGS:
        (line,) = (line for line in lines if line.startswith(f"{method} "))
        assert "±" in line


def test_files_get_all_columns(table):
    assert str(table) == table.text() == repr(table)
    title, names, rule, *rows = str(table).splitlines()
    assert title == "output-permuted-digits, task_length 500, network 100-50, 30,000 steps: online accuracy"
    assert re.split(r" {2,}", names) == ["method", "settings", *NUMBERS]
    assert len(rows) == 3
    assert {len(line) for line in (names, rule, *rows)} == {len(rule)}


def test_the_prompt_of_a_narrow_terminal(table, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    assert repr(table) == table.text(60)
    assert str(table) == table.text()


def test_only_a_terminal_has_a_width(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal_width() is None
    monkeypatch.setattr("sys.stdout", Terminal())
    assert terminal_width() == 72


def test_settings_are_broken_between_them_and_not_within():
    text = "  lr 0.01, β 0.9999, σ 0.001, wise feature, scaling local"
    assert wrapped(text, 30, indent="  ", breaks=", ") == "  lr 0.01, β 0.9999, σ 0.001,\n  wise feature, scaling local"
    assert wrapped(text, None) == wrapped(text, len(text)) == text


names = st.text("abcdefgh ,.-", min_size=1, max_size=12).map(str.strip).filter(bool)


@given(st.lists(st.tuples(names, names, names, names), min_size=1, max_size=5), st.integers(1, 90))
def test_tables_respect_the_width(cells, width):
    rows = [("method", "settings", "mean ± s.e.", "p (Holm)"), *cells]
    text, left_out = laid_out(rows, width)
    whole, none = laid_out(rows, None)
    least = 12 + 2 + 12  # a method, a gap and a mean are always shown
    assert max(map(len, text.splitlines())) <= max(width, least + 2)
    if max(map(len, whole.splitlines())) <= width:
        assert (text, left_out) == (whole, none)
    assert all(re.search(re.escape(method), text) for method, *_ in cells)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.892214, 0.773, 0.1], ["0.8922", "0.7730", "0.1000"]),
        ([0.0977, 0.5], ["0.0977", "0.5000"]),
        ([0.00234, 1.0], ["0.00234", "1.00000"]),
        ([101.9, 0.2921], ["101.9000", "0.2921"]),
        ([101.94, 12.3456], ["101.94", "12.35"]),
        ([3e-12, 0.5], ["3.000e-12", "5.000e-01"]),
        ([3e9, 0.5], ["3.000e+09", "5.000e-01"]),
        ([0.0, 0.25], ["0.0000", "0.2500"]),
    ],
)
def test_numbers_of_a_column_share_a_format(values, texts):
    spec = number_format([*values, None, float("nan")])
    assert [format(value, spec) for value in values] == texts


def test_no_numbers_have_a_format_too():
    assert format(0.0, number_format([None])) == "0.0000"


def test_only_the_sign_of_a_number_is_typeset():
    assert [number_text(value, ".1e") for value in (-1.5e-7, 1.5e-7, None)] == ["−1.5e-07", "1.5e-07", "–"]


def test_p_has_three_decimals():
    assert [p_text(p) for p in (None, 0.00036, 0.0026, 0.5)] == ["–", "< 0.001", "0.003", "0.500"]
