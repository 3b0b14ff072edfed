"""The result pages: all numbers recomputed from the shipped files, and pages and figures regenerated from them."""

import csv
import gzip
import itertools
import json
import math
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from upgd.experiments.paper.catalogue import settings_of
from upgd.methods import METHODS
from upgd.population import Learner
from upgd.streams import registry

RESULTS = Path(__file__).parents[1] / "docs" / "results"
NOTES = sorted(RESULTS.glob("*.notes.md"))
#: Pages whose results are shipped: all but utility quality, which is not a sweep.
PAGES = [
    pytest.param(page, id=page.stem)
    for page in sorted(RESULTS.glob("*.md"))
    if re.search("^(Computed|Not computed)[,:]", page.read_text(encoding="utf-8"), re.MULTILINE)
]
SYMBOLS = {"lr": "lr", "β": "beta_utility", "σ": "sigma", "wd": "weight_decay", "ε": "eps", "β₁β₂": "betas"}
PAPERS = ", paper's grid"


def test_every_page_of_a_sweep_is_checked():
    written = {page.stem for page in RESULTS.glob("*.md") if "Written by `upgd reproduce" in page.read_text("utf-8")}
    assert written - {page.id for page in PAGES} == {"utility-quality"}


@dataclass(frozen=True)
class Line:
    """A line of a table, and its runs in the shipped files."""

    name: str
    arm: object
    settings: dict
    cells: list
    runs: dict  #: the rows of the final runs, by seed


@dataclass(frozen=True)
class Panel:
    """A panel of a page, with its search in the shipped files."""

    metric: str
    text: str
    lines: list
    matrix: dict  #: (row, column) → the difference between two lines
    searches: dict  #: arm → the rows of its search, by learner


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory):
    """A function of a page: the folder in which its command wrote it again from the files alone, and its plan."""
    from upgd.cli import main
    from upgd.experiments.analysis import figures
    from upgd.experiments.paper import pages

    written, saved, done = pages.write_page, figures.write, {}

    def again(page):
        if page in done:
            return done[page]
        folder, found = tmp_path_factory.mktemp(page.stem), []
        shutil.copytree(RESULTS / "data", folder / "out" / "data")
        if (notes := page.with_suffix(".notes.md")).exists():
            shutil.copy(notes, folder / "out")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.delenv("UPGD_STORE", raising=False)
            patch.setenv("UPGD_DATA", str(folder / "no-data"))
            patch.setattr(pages, "write_page", lambda *args: [found.append(args[0]), written(*args)][1])
            # Only SVGs are shipped.
            patch.setattr(figures, "write", lambda *args: saved(*args) if args[-1] == "svg" else None)
            with pytest.raises(SystemExit) as exit_:
                main([*shlex.split(_command(page)), "--write-only", "--output", "out"])
        assert exit_.value.code == 0
        done[page] = folder / "out", found[0].plan
        return done[page]

    return again


@pytest.fixture(scope="module")
def shipped():
    """A function of a problem: its rows."""
    found = {}

    def of(problem):
        if problem not in found:
            with gzip.open(RESULTS / "data" / f"{problem}.csv.gz", "rt", newline="") as file:
                found[problem] = list(csv.DictReader(file))
            for row in found[problem]:
                settings = json.loads(row["settings"])
                row["learner"] = Learner(method=row["method"], seed=int(row["seed"]), **settings)
        return found[problem]

    return of


@pytest.fixture(scope="module")
def panels(regenerated, shipped):
    """A function of a page: its panels that have a table."""
    found = {}

    def of(page):
        if page not in found:
            found[page] = list(_panels(page.read_text(encoding="utf-8"), regenerated(page)[1], shipped))
        return found[page]

    return of


def _command(page):
    return re.search(r"<!-- Written by `upgd (.*?)`\.", page.read_text(encoding="utf-8"))[1]


def _panels(text, plan, shipped):
    parts = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    for panel in plan.panels:
        part = parts[panel.title]
        if not (metric := re.search(r"^Online (accuracy|loss) over all steps; ", part, re.MULTILINE)):
            assert "Not computed." in part or "not computed" in part
            continue
        arms = {arm.name: arm for arm in panel.arms if arm in plan.arms()}
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line]
        tables = [row for row in rows if not row[0].startswith("---")]
        border = next((i for i, row in enumerate(tables) if row[0] == "row − column"), len(tables))
        searches = {arm: _search(plan, arm, shipped) for arm in arms.values()}
        lines = []
        for row in tables[1:border]:
            name = row[0].split(". ", 1)[1]
            arm = arms[name.removesuffix(PAPERS)]
            said = _numbers(row[1])
            (settings,) = (
                one
                for one in plan.settings(arm)
                if all(np.allclose(one[key], value, atol=0) for key, value in said.items())
            )
            lines.append(Line(name, arm, settings, row, _runs(plan, arm, settings, plan.seeds(arm), shipped)))
        yield Panel(metric[1], part, lines, _matrix(tables[border:]), searches)


def _matrix(rows):
    """The cells of tables of differences, by the positions of the lines that they compare."""
    cells = {}
    for row in rows:
        if row[0] == "row − column":
            columns = [int(number) - 1 for number in row[1:]]
        else:
            line = int(row[0].partition(".")[0]) - 1
            cells |= {(line, column): cell for column, cell in zip(columns, row[1:], strict=True)}
    return cells


def _same_grid(first, second, lines):
    """Whether two lines are both the best settings of all, or both the best in the paper's grid."""
    names = {line.name for line in lines}
    papers = [line.name.endswith(PAPERS) or line.name + PAPERS not in names for line in (first, second)]
    return all(papers) or not any(line.name.endswith(PAPERS) for line in (first, second))


def _numbers(text):
    pairs = (part.rsplit(" ", 1) for part in text.replace("\\*", "").split(", "))
    return {SYMBOLS[name]: [float(v) for v in value.split("/")] for name, value in pairs if name in SYMBOLS}


def _rows(plan, arm, shipped, *, searching=False):
    """The shipped rows of an arm's problem, network and length, by learner."""
    place = plan.place(arm, searching=searching)
    options = {**plan.study.options, **plan.scale.options}
    wanted = (place.network, str(place.steps), arm.method)
    return {
        row["learner"]: row
        for row in shipped(place.problem)
        if (row["network"], row["steps"], row["method"]) == wanted and json.loads(row["options"]) == options
    }


def _runs(plan, arm, settings, seeds, shipped):
    rows = _rows(plan, arm, shipped)
    learners = {seed: Learner(method=arm.method, seed=seed, **settings) for seed in seeds}
    return {seed: rows[one] for seed, one in learners.items() if one in rows}


def _search(plan, arm, shipped):
    rows = _rows(plan, arm, shipped, searching=True)
    wanted = [
        Learner(method=arm.method, seed=seed, **one) for one in _pool(plan, arm) for seed in range(plan.sweep_seeds)
    ]
    return {one: rows[one] for one in wanted if one in rows}


def _pool(plan, arm):
    """The settings of an arm's search, without those that were dropped after the screening."""
    wanted = {Learner(method=arm.method, **one) for one in plan.swept(arm)}
    return [one for one in plan.settings(arm) if Learner(method=arm.method, **one) in wanted]


def _screening(plan, arm, shipped):
    """The rank, smallest for the best, of each setting of an arm's screening; empty if it is not complete."""
    place, metric = plan.place(arm), "loss" if arm.problem.startswith("toy") else "accuracy"
    options = {**plan.study.options, **plan.scale.options}
    wanted = (place.network, str(plan.screen.get(arm.problem)), arm.method)
    ranks = {}
    for row in shipped(place.problem):
        same = (row["network"], row["steps"], row["method"]) == wanted and json.loads(row["options"]) == options
        if same and int(row["seed"]) < plan.sweep_seeds:
            score = -_score(row, metric) if metric == "accuracy" else _score(row, metric)
            ranks.setdefault(row["learner"].but(seed=0), []).append(1e6 if math.isnan(score) else score)
    own = {Learner(method=arm.method, **one): one for one in plan.screened(arm)}
    complete = own and all(len(ranks.get(one, ())) == plan.sweep_seeds for one in own)
    return {one: np.mean(ranks[one]) for one in own} if complete else {}


def _score(row, metric):
    return float("nan") if row["diverged_at"] else float(row[metric])


def _alive(runs, metric):
    return [_score(row, metric) for row in runs.values() if not row["diverged_at"]]


def _quarter(row, which, metric):
    """The mean over a quarter of the steps, of windows that end with it."""
    curve = np.array(row[f"{metric}_curve"].split(), float)
    assert len(curve) % 4 == 0
    return curve[: len(curve) // 4].mean() if which == "first" else curve[-len(curve) // 4 :].mean()


def _interval(values):
    return stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))


def _close(value):
    """Four digits after the point; the page has them from curves, which the files have with six digits."""
    return pytest.approx(value, rel=1e-4, abs=8e-5)


def _paired(first, second, metric):
    common = sorted(first.runs.keys() & second.runs.keys())
    differences = [_score(first.runs[seed], metric) - _score(second.runs[seed], metric) for seed in common]
    return [one for one in differences if not math.isnan(one)]


def test_there_are_pages():
    assert len(PAGES) >= 2


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_a_table_follows_from_the_rows(page, panels, regenerated, shipped):
    plan = regenerated(page)[1]
    for panel in panels(page):
        metric = panel.metric
        for line in panel.lines:
            scores, cells = _alive(line.runs, metric), line.cells
            said = re.fullmatch(r"(?:([\d.]+)|–)(?: ± ([\d.]+))? \((\d+)\)", cells[3])
            assert said[3] == str(len(scores)), line.name
            assert (said[1] is None and not scores) or float(said[1]) == _close(np.mean(scores))
            assert (said[2] is None and len(scores) < 2) or float(said[2]) == _close(_interval(scores))
            for cell, which in ((cells[4], "first"), (cells[5], "last")):
                quarters = [_quarter(row, which, metric) for row in line.runs.values() if not row["diverged_at"]]
                assert (cell == "–" and not quarters) or float(cell) == _close(np.mean(quarters))
            assert cells[6] == f"{len(line.runs) - len(scores)} of {len(line.runs)}"
            tried = {one.but(seed=0) for one in panel.searches[line.arm]}
            ranks = _screening(plan, line.arm, shipped)
            passing = max(math.ceil(round(plan.keep * len(ranks), 9)), plan.shortlist)
            # Settings that are better than the last that passed have to be searched; of equal ones, any may have passed.
            last = sorted(ranks.values())[min(passing, len(ranks)) - 1] if ranks else math.inf
            least, most = (
                tried | {one for one, score in ranks.items() if score > last + margin * abs(last)}
                for margin in (1e-5, -1e-5)
            )
            if line.name.endswith(PAPERS):
                papers = {Learner(method=line.arm.method, **one) for one in settings_of(line.arm, "paper")}
                least, most = least & papers, most & papers
            assert len(least) <= int(cells[2].split()[0].replace(",", "")) <= len(most)
        above = {place for place, cell in panel.matrix.items() if cell}
        pairs = itertools.combinations(range(len(panel.lines)), 2)
        assert above == {(i, j) for i, j in pairs if _same_grid(panel.lines[i], panel.lines[j], panel.lines)}
        for i, j in above:
            paired = _paired(panel.lines[i], panel.lines[j], metric)
            if len(paired) > 1:
                said = re.search(r"([+−][\d.]+) ± ([\d.]+)", panel.matrix[i, j])
                assert float(said[1].replace("−", "-")) == _close(np.mean(paired))
                assert float(said[2]) == _close(_interval(paired))


@pytest.mark.parametrize("page", PAGES)
def test_what_is_bold_is_significant_and_what_is_level_is_within_the_grid(page, panels, regenerated, shipped):
    plan = regenerated(page)[1]
    for panel in panels(page):
        lines, sign = panel.lines, 1 if panel.metric == "accuracy" else -1
        promised = [_promised(_means(plan, panel, one, shipped), one, sign) for one in lines]
        cells, p_values, paired = [], [], []
        for i, j in itertools.combinations(range(len(lines)), 2):
            differences = _paired(lines[i], lines[j], panel.metric)
            if len(differences) > 1:
                cells.append(panel.matrix.get((i, j)))
                p_values.append(stats.ttest_1samp(differences, 0).pvalue if any(differences) else 1.0)
                paired.append((sign * np.mean(differences), promised[i], promised[j]))
        order = np.argsort(p_values)
        corrected = np.empty(len(order))
        corrected[order] = np.maximum.accumulate(np.array(p_values)[order] * np.arange(len(order), 0, -1)).clip(max=1)
        for cell, p, (ahead, first, second) in zip(cells, corrected, paired, strict=True):
            if cell is None:  # of different grids: not shown, but corrected for
                continue
            assert cell.startswith("**") == (p < 0.05), cell
            assert cell.endswith("=") == (p >= 0.05 or abs(ahead) <= (second if ahead > 0 else first)), cell


def _means(plan, panel, line, shipped):
    """The score of every setting of the search, and of every setting of the screening if the chosen one is among them."""
    scores = {}
    for learner, row in panel.searches[line.arm].items():
        scores.setdefault(learner.but(seed=0), []).append(_score(row, panel.metric))
    means = {learner: np.mean(own) if np.isnan(own).all() else np.nanmean(own) for learner, own in scores.items()}
    sign = -1 if panel.metric == "accuracy" else 1
    ranks = _screening(plan, line.arm, shipped)
    screened = {one: math.nan if rank > 1e5 else sign * rank for one, rank in ranks.items()}
    return [means, screened] if Learner(method=line.arm.method, **line.settings) in screened else [means]


def _promised(stages, line, sign):
    """Estimate the improvement between settings of the grid, by parabolas through the chosen one and its neighbours."""
    return sum(max(_height(means, line, name, sign) for means in stages) for name in line.settings)


def _height(means, line, name, sign):
    """The estimate for one hyperparameter: by a fit, and the maximum found by trying many points."""
    best, value = Learner(method=line.arm.method, **line.settings), line.settings[name]
    near = sorted(
        (_order(dict(one.values)[name]), mean) for one, mean in means.items() if one.but(**{name: value}) == best
    )
    at = [value for value, _ in near].index(_order(dict(best.values)[name]))
    sides = [i for i in (at - 1, at + 1) if 0 <= i < len(near) and not math.isnan(near[i][1])]
    gains = [sign * (near[i][1] - means[best]) for i in sides]
    if len(gains) < 2:
        return max([0.0, *(gain if gain > 0 else -gain / 8 for gain in gains)])
    left, middle, right = (_axis(name, near[i][0]) for i in (at - 1, at, at + 1))
    if None in (left, middle, right):
        left, middle, right = -1, 0, 1
    between = np.linspace(left, right, 100_001)
    return max(np.polyval(np.polyfit([left, middle, right], [gains[0], 0, gains[1]], 2), between))


def _axis(name, value):
    """The place of a value on a logarithmic axis, by the number of decades; None if it has none."""
    if isinstance(value, tuple) or (value == 0 and name != "beta_utility"):
        return None
    return -math.log10(1 - value) if name == "beta_utility" else math.log10(value)


def _order(value):
    """A sort key of values; words do not have an order, but their arms fix them."""
    return value if isinstance(value, float | tuple) else 0


@pytest.mark.parametrize("page", PAGES)
def test_the_runs_of_the_search_that_diverged(page, panels):
    for panel in panels(page):
        lost = {
            arm.name: (sum(row["diverged_at"] != "" for row in search.values()), len(search))
            for arm, search in panel.searches.items()
        }
        diverged, total = (sum(counts) for counts in zip(*lost.values(), strict=True))
        each = ", ".join(f"{name} {own:,} of {count:,}" for name, (own, count) in lost.items() if own)
        some = f"\n{diverged:,} of {total:,} runs of the search diverged ({each}):\n"
        assert (some if diverged else f"\nNone of the {total:,} runs of the search diverged.") in panel.text


@pytest.mark.parametrize("page", PAGES)
def test_the_chosen_setting_was_best_in_the_shortlist(page, panels, regenerated, shipped):
    """Of the best few of the search, and of the best few in the paper's grid, on fresh seeds; scores that agree in six digits
    may be in any order.

    If the shortlist is not finished, the page says so.
    """
    plan, unfinished = regenerated(page)[1], "Not finished: the shortlist on fresh seeds lacks "
    again = range(plan.sweep_seeds, plan.sweep_seeds + plan.shortlist_seeds)
    for panel in panels(page):
        for line in panel.lines:
            pool = _pool(plan, line.arm)
            if line.name.endswith(PAPERS):
                pool = [one for one in pool if one in settings_of(line.arm, "paper")]

            def ranks(settings, seeds, rows, arm=line.arm, metric=panel.metric):
                """Number and rank, smallest for the best, of the settings that have all runs."""
                for number, one in enumerate(settings):
                    runs = [rows.get(Learner(method=arm.method, seed=seed, **one)) for seed in seeds]
                    if None not in runs:
                        scores = [_score(row, metric) for row in runs]
                        alive = [score for score in scores if not math.isnan(score)]
                        mean = np.mean(alive) if alive else 0.0
                        yield number, 1e6 * (len(scores) - len(alive)) + (-mean if metric == "accuracy" else mean)

            searched = dict(ranks(pool, range(plan.sweep_seeds), _rows(plan, line.arm, shipped, searching=True)))
            candidates = _best(searched, max(1, plan.shortlist))
            if plan.shortlist:
                own = dict(ranks(pool, again, _rows(plan, line.arm, shipped)))
                worst = sorted(searched.values())[: plan.shortlist][-1]
                lacking = {number for number, rank in searched.items() if rank < worst - 3e-6} - own.keys()
                assert not lacking or unfinished in page.read_text(encoding="utf-8"), line.name
                papers = settings_of(line.arm, "paper")
                inside = {number: rank for number, rank in searched.items() if pool[number] in papers}
                if plan.grid == "extended" and inside:
                    candidates += _best(inside, plan.shortlist)
                candidates = _best({number: own[number] for number in candidates if number in own}, 1)
            assert line.settings in [pool[number] for number in candidates]


def _best(ranks, count):
    """The best few, and those that agree with the last of them in six digits."""
    worst = sorted(ranks.values())[:count][-1]
    return [number for number, rank in ranks.items() if rank <= worst + 3e-6]


@pytest.mark.parametrize("page", PAGES)
def test_the_search_has_the_best_of_the_screened_settings(page, regenerated, shipped):
    plan = regenerated(page)[1]
    for arm in plan.arms():
        ranks = _screening(plan, arm, shipped)
        kept = {Learner(method=arm.method, **one) for one in plan.swept(arm)} & ranks.keys()
        assert len(kept) == (max(math.ceil(plan.keep * len(ranks)), plan.shortlist) if ranks else 0)
        assert (
            max((ranks[one] for one in kept), default=0)
            <= min((ranks[one] for one in ranks.keys() - kept), default=0) + 3e-6
        )


@pytest.mark.parametrize("page", PAGES)
def test_the_page_can_be_written_from_the_files_alone(page, regenerated):
    folder, _ = regenerated(page)

    def without_data(page):  # whose checksums need the data
        return [line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("- Data: ")]

    remedy = f"write it again: upgd {_command(page)} --write-only -o docs/results"
    assert without_data(folder / page.name) == without_data(page), remedy


@pytest.mark.parametrize("page", PAGES)
def test_the_figures_can_be_drawn_from_the_files_alone(page, regenerated):
    """Curves and survival curves, byte for byte."""
    import matplotlib

    folder, _ = regenerated(page)
    shown = re.findall(r"^!\[.*\]\((.*\.svg)\)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(path.name for path in folder.glob("*.svg"))
    for name in shown:
        figure = (RESULTS / name).read_text(encoding="utf-8")
        version = re.search(r"<dc:title>Matplotlib v([\d.]+)", figure)[1]
        if version != matplotlib.__version__:
            pytest.skip(f"{name} is from matplotlib {version}, and this is {matplotlib.__version__}")
        remedy = f"draw it again: upgd {_command(page)} --write-only -o docs/results"
        assert (folder / name).read_text(encoding="utf-8") == figure, remedy


@pytest.mark.parametrize("file", sorted((RESULTS / "data").glob("*.csv.gz")), ids=lambda file: file.name.split(".")[0])
def test_keys_leave_out_default_options(file):
    """So that equal runs are found under one key."""
    with gzip.open(file, "rt", newline="") as opened:
        found = {(row["problem"], row["options"]) for row in csv.DictReader(opened)}
    for problem, options in found:
        usual = registry.defaults(problem)
        assert [name for name, value in json.loads(options).items() if value == usual.get(name)] == []


def _from_its_tables(notes, page, titles):
    """The notes of a page with the numbers of its tables, found by the title of the panel, the method and the column."""
    columns = {"": 0, "first quarter": 1, "last quarter": 2}
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}

    def number(match):
        panel, curve, which = ([part.strip() for part in match[1].split("|")] + [""])[:3]
        row = re.search(rf"^\| (?:\d+\. )?{re.escape(curve)} \| .*$", parts[titles[panel]], re.MULTILINE)
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


@pytest.mark.parametrize("problem", ["toy-changing-inputs", "toy-changing-outputs"])
def test_the_tables_of_the_notes_follow_from_the_rows(problem, shipped):
    """Further runs, in tables of the notes: each line is about the first seeds of a setting."""
    notes = (RESULTS / f"{problem}.notes.md").read_text(encoding="utf-8")
    said = [
        line for line in notes.splitlines() if line.startswith("| ") and "---" not in line and "| method" not in line
    ]
    groups = {}
    for row in sorted(shipped(problem), key=lambda row: int(row["seed"])):
        group = tuple(row[name] for name in ("options", "network", "method", "settings", "steps"))
        groups.setdefault(group, []).append(row)
    known = {_line(own[:count]) for own in groups.values() for count in range(2, len(own) + 1)}
    assert set(said) <= known


def _line(runs):
    alive = [row for row in runs if not row["diverged_at"]]
    settings = json.loads(runs[0]["settings"])
    shown = ", ".join(f"{symbol} {settings[name]:g}" for symbol, name in SYMBOLS.items() if name in settings)
    label = METHODS[runs[0]["method"]].label
    a = {1: "1", 0.5: "½"}[json.loads(runs[0]["options"]).get("amplitude", 1)]
    numbers = ["–"] * 3
    if len(alive) > 1:
        scores = [float(row["loss"]) for row in alive]
        error = np.std(scores, ddof=1) / math.sqrt(len(scores))
        quarters = [np.mean([_quarter(row, which, "loss") for row in alive]) for which in ("first", "last")]
        numbers = [f"{np.mean(scores):.4f} ± {error:.4f} ({len(scores)})", *(f"{value:.4f}" for value in quarters)]
    diverged = ", ".join(f"{int(row['diverged_at']):,}" for row in runs if row["diverged_at"]) or "–"
    return f"| {' | '.join([a, label, shown, *numbers, diverged])} |"
