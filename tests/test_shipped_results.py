"""Every number of the result pages, recomputed from the files beside them; and the pages, written again from these."""

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


def _quarter(row, which):
    """The mean over a quarter of the steps, of windows that end with it."""
    curve = np.array(row["accuracy_curve"].split(), float)
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
