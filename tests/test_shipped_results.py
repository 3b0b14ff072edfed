"""The result pages: all numbers recomputed from the shipped files, and the pages regenerated from them."""

import csv
import gzip
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

RESULTS = Path(__file__).parents[1] / "docs" / "results"
NOTES = sorted(RESULTS.glob("*.notes.md"))
PAGES = sorted(page for page in RESULTS.glob("*.md") if "| row − column |" in page.read_text(encoding="utf-8"))
LABELS = {
    "SGD": "sgd",
    "SGDW": "sgdw",
    "PGD": "pgd",
    "Shrink & Perturb": "shrink-and-perturb",
    "AdamW": "adamw",
    "UPGD": "upgd",
    "UPGD, non-protecting": "upgd-nonprotecting",
}
SYMBOLS = {"lr": "lr", "β": "beta_utility", "σ": "sigma", "wd": "weight_decay", "ε": "eps", "β₁β₂": "betas"}
#: The final runs: seed 0 was the search, 1 to 3 the shortlist.
FIRST = 4


@pytest.fixture(scope="module")
def shipped():
    """The rows of a problem, by method and settings, then by seed."""
    found = {}

    def of(problem):
        if problem not in found:
            with gzip.open(RESULTS / "data" / f"{problem}.csv.gz", "rt", newline="") as file:
                found[problem] = list(csv.DictReader(file))
        return found[problem]

    return of


def _panels(text):
    """Problem, steps, table and matrix of every panel of a page."""
    for part in text.split("\n## ")[1:]:
        where = re.search(r"over all steps; ([\w-]+), network ([\w:-]+), ([\d,]+) steps:", part)
        if where:
            lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line]
            tables = [line for line in lines if not line[0].startswith("---") and line[0] != "method"]
            border = next(i for i, line in enumerate(tables) if line[0] == "row − column")
            yield where[1], where[2], int(where[3].replace(",", "")), tables[:border], tables[border:]


def _settings(text):
    pairs = (part.rsplit(" ", 1) for part in text.replace("\\*", "").split(", "))
    return {SYMBOLS[name]: [float(v) for v in value.split("/")] for name, value in pairs}


def _chosen(rows, line, network, steps):
    """The final runs of a line of the table, by seed."""
    wanted, method = _settings(line[1]), LABELS[line[0].split(". ", 1)[1]]
    found = {}
    for row in rows:
        if (row["method"], row["network"], int(row["steps"])) != (method, network, steps) or int(row["seed"]) < FIRST:
            continue
        own = json.loads(row["settings"])
        if own.get("granularity", own.get("wise", "weight")) != "weight" or own.get("scaling", "global") != "global":
            continue
        if all(np.allclose(own[name], values) for name, values in wanted.items()):
            found[int(row["seed"])] = row
    return found


def _quarter(row, which, metric="accuracy"):
    """The mean over a quarter of the steps, of windows that end with it."""
    curve = np.array(row[f"{metric}_curve"].split(), float)
    assert len(curve) % 4 == 0
    return curve[: len(curve) // 4].mean() if which == "first" else curve[-len(curve) // 4 :].mean()


def _interval(values):
    stats = pytest.importorskip("scipy.stats", reason="an independent t distribution")
    return stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))


def test_there_are_pages():
    assert len(PAGES) >= 2


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_every_number_of_a_table_follows_from_the_rows(page, shipped):
    for problem, network, steps, table, matrix in _panels(page.read_text(encoding="utf-8")):
        runs = [_chosen(shipped(problem), line, network, steps) for line in table]
        for line, own in zip(table, runs, strict=True):
            scores = [float(row["accuracy"]) for row in own.values()]
            assert line[3] == f"{np.mean(scores):.4f} ± {_interval(scores):.4f} ({len(own)})", line[0]
            for cell, which in ((line[4], "first"), (line[5], "last")):
                assert float(cell) == pytest.approx(np.mean([_quarter(row, which) for row in own.values()]), abs=6e-5)
            assert line[6] == f"{sum(row['diverged_at'] != '' for row in own.values())} of {len(own)}"
            method = LABELS[line[0].split(". ", 1)[1]]
            searched = {row["settings"] for row in shipped(problem) if row["method"] == method and row["seed"] == "0"}
            assert line[2].split()[0] == str(len(searched))
        for i, line in enumerate(matrix[1:]):
            for j, cell in enumerate(line[1:], 1):
                if j <= i:
                    assert cell == ""
                    continue
                common = sorted(runs[i].keys() & runs[j].keys())
                paired = [float(runs[i][s]["accuracy"]) - float(runs[j][s]["accuracy"]) for s in common]
                said = re.search(r"([+−][\d.]+) ± ([\d.]+)", cell)
                assert float(said[1].replace("−", "-")) == pytest.approx(np.mean(paired), abs=6e-5)
                assert float(said[2]) == pytest.approx(_interval(paired), abs=6e-5)


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_what_is_bold_is_significant_and_what_is_level_is_within_the_grid(page, shipped):
    stats = pytest.importorskip("scipy.stats", reason="an independent t-test")
    for problem, network, steps, table, matrix in _panels(page.read_text(encoding="utf-8")):
        runs = [_chosen(shipped(problem), line, network, steps) for line in table]
        promised = [_promised(shipped(problem), own) for own in runs]
        cells, p_values, paired = [], [], []
        for i, line in enumerate(matrix[1:]):
            for j in range(i + 1, len(runs)):
                common = sorted(runs[i].keys() & runs[j].keys())
                ours, theirs = ([float(own[seed]["accuracy"]) for seed in common] for own in (runs[i], runs[j]))
                cells.append(line[j])
                p_values.append(stats.ttest_rel(ours, theirs).pvalue)
                paired.append((np.mean(ours) - np.mean(theirs), promised[i], promised[j]))
        order = np.argsort(p_values)
        corrected = np.empty(len(order))
        corrected[order] = np.maximum.accumulate(np.array(p_values)[order] * np.arange(len(order), 0, -1)).clip(max=1)
        for cell, p, (difference, first, second) in zip(cells, corrected, paired, strict=True):
            assert cell.startswith("**") == (p < 0.05), cell
            assert cell.endswith("=") == (p >= 0.05 or abs(difference) <= (second if difference > 0 else first)), cell


def _promised(rows, chosen):
    """Estimate the improvement between settings of the grid, by parabolas through the chosen one and its neighbours."""
    own = next(iter(chosen.values()))
    best, height = json.loads(own["settings"]), 0.0
    search = [(json.loads(r["settings"]), float(r["accuracy"] or "nan")) for r in rows if _is_search(r, own)]
    (score,) = (score for settings, score in search if settings == best)
    for name in best:
        line = sorted((s[name], score) for s, score in search if {**s, name: 0} == {**best, name: 0})
        at = [value for value, _ in line].index(best[name])
        steps = [abs(score - line[i][1]) for i in (at - 1, at + 1) if 0 <= i < len(line) and not math.isnan(line[i][1])]
        both = len(steps) == 2 and sum(steps) > 0
        height += (steps[0] - steps[1]) ** 2 / (8 * sum(steps)) if both else sum(steps) / 8
    return height


def _is_search(row, like):
    return row["seed"] == "0" and all(row[name] == like[name] for name in ("method", "network", "steps"))


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_the_runs_of_the_search_that_diverged(page, shipped):
    text = page.read_text(encoding="utf-8")
    for problem, network, steps, _, _ in _panels(text):
        wanted, total = {}, 0
        for label in LABELS:  # a method that is searched in part has no line in the table yet
            like = {"method": LABELS[label], "network": network, "steps": str(steps)}
            search = [row for row in shipped(problem) if _is_search(row, like)]
            total += len(search)
            if lost := sum(row["diverged_at"] != "" for row in search):
                wanted[label] = f"{label} {lost} of {len(search)}"
        said = re.search(r"^([\d,]+) of ([\d,]+) runs of the search diverged \((.*)\):$", text, re.MULTILINE)
        assert int(said[2].replace(",", "")) == total
        assert said[3].count(" of ") == len(wanted)
        assert all(one in said[3] for one in wanted.values())
        assert int(said[1]) == sum(int(one.split()[-3]) for one in wanted.values())
        assert f"{total} settings" in text or f"{total} of " in text


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_who_was_chosen_did_best_in_the_shortlist(page, shipped):
    """Of the five best of the search, on three fresh seeds."""
    for problem, network, steps, table, _ in _panels(page.read_text(encoding="utf-8")):
        for line in table:
            method = LABELS[line[0].split(". ", 1)[1]]
            rows = [row for row in shipped(problem) if row["method"] == method and row["network"] == network]
            again = {}
            for row in rows:
                if 1 <= int(row["seed"]) < FIRST:
                    again.setdefault(row["settings"], []).append(float(row["accuracy"] or "nan"))
            searched = sorted(
                (row for row in rows if row["seed"] == "0" and row["accuracy"]), key=lambda r: -float(r["accuracy"])
            )
            assert set(again) == {row["settings"] for row in searched[:5]}
            assert {len(scores) for scores in again.values()} == {3}
            best = max(again, key=lambda settings: np.mean(again[settings]))
            chosen = _chosen(rows, line, network, steps)
            assert {row["settings"] for row in chosen.values()} == {best}


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_the_page_can_be_written_from_the_files_alone(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    from upgd.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UPGD_STORE", raising=False)
    monkeypatch.setenv("UPGD_DATA", str(tmp_path / "no-data"))
    shutil.copytree(RESULTS / "data", "out/data")
    shutil.copy(page.with_suffix(".notes.md"), "out")
    text = page.read_text(encoding="utf-8")
    command = shlex.split(re.search(r"<!-- Written by `upgd (.*?)`\.", text)[1])
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--write-only", "--output", "out"])
    assert exit_.value.code == 0, capsys.readouterr().err

    def without_data(page):  # whose checksums need the data
        return [line for line in page.splitlines() if not line.startswith("- Data: ")]

    assert without_data(Path("out", page.name).read_text(encoding="utf-8")) == without_data(text)


def _from_its_tables(notes, page, titles):
    """The notes of a page with the numbers of its tables, found by the title of the panel, the method and the column."""
    columns = {"": 0, "first quarter": 1, "last quarter": 2}
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}

    def number(match):
        panel, curve, which = ([part.strip() for part in match[1].split("|")] + [""])[:3]
        row = re.search(rf"^\| (?:\d\. )?{re.escape(curve)} \| .*$", parts[titles[panel]], re.MULTILINE)
        return re.findall(r"\| (\d\.\d{4})\b", row[0])[columns[which]]

    return re.sub(r"\{\{([^}]*)\}\}", number, notes)


@pytest.mark.parametrize("notes", [pytest.param(notes, id=notes.stem) for notes in NOTES])
def test_the_numbers_of_the_notes_are_those_of_the_tables(notes):
    """Also on pages that were written before results were shipped."""
    from upgd.experiments.paper.catalogue import STUDIES

    name = notes.name.removesuffix(".notes.md")
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    titles = {panel.key: panel.title for panel in STUDIES[name].panels}
    checked = 0
    for paragraph in notes.read_text(encoding="utf-8").strip().split("\n\n"):
        beyond = re.search(r"\{\{[^}]*( - | (lr|weight_decay|sigma|beta_utility) )[^}]*\}\}", paragraph)
        if not beyond:  # differences and neighbours are in the page that is written again
            assert _from_its_tables(paragraph, page, titles) in page
            checked += 1
    assert checked


@pytest.mark.parametrize(
    ("name", "problem", "metric"),
    [
        ("upgd-stationary-mnist", "stationary-mnist", "accuracy"),
        ("toy-changing-inputs", "toy-changing-inputs", "loss"),
        ("toy-changing-outputs", "toy-changing-outputs", "loss"),
    ],
)
def test_the_tables_of_the_notes_follow_from_the_rows(name, problem, metric, shipped):
    """Further runs, in tables of the notes: each row is a group of the shipped runs, and each group has its row."""
    notes = (RESULTS / f"{name}.notes.md").read_text(encoding="utf-8")
    said = [
        line for line in notes.splitlines() if line.startswith("| ") and "---" not in line and "| method" not in line
    ]
    groups = {}
    for row in shipped(problem):
        groups.setdefault((row["options"], row["method"], row["settings"]), []).append(row)
    wanted = [_line(own, metric, with_a=problem.startswith("toy")) for own in groups.values()]
    assert sorted(said) == sorted(wanted)


def _line(runs, metric, with_a):
    alive = [row for row in runs if not row["diverged_at"]]
    settings = json.loads(runs[0]["settings"])
    shown = ", ".join(f"{symbol} {settings[name]:g}" for symbol, name in SYMBOLS.items() if name in settings)
    label = next(label for label, method in LABELS.items() if method == runs[0]["method"])
    a = {1: "1", 0.5: "½"}[json.loads(runs[0]["options"])["amplitude"]] if with_a else None
    numbers = ["–"] * 3
    if alive:
        scores = [float(row[metric]) for row in alive]
        error = np.std(scores, ddof=1) / math.sqrt(len(scores))
        quarters = [np.mean([_quarter(row, which, metric) for row in alive]) for which in ("first", "last")]
        numbers = [f"{np.mean(scores):.4f} ± {error:.4f} ({len(scores)})", *(f"{value:.4f}" for value in quarters)]
    diverged = ", ".join(f"{int(row['diverged_at']):,}" for row in runs if row["diverged_at"]) or "–"
    return f"| {' | '.join(cell for cell in (a, label, shown, *numbers, diverged) if cell)} |"
