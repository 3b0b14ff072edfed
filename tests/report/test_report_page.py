"""The page as text: complete, escaped and correct."""

import hashlib
import json
import math
import re
import shlex
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import record, seeds

from upgd.methods import METHODS
from upgd.report import write
from upgd.report.colours import colours, contrast
from upgd.report.content import _rounded, sections
from upgd.report.page import content, plotly, render
from upgd.store import Store

EVIL = '<script>alert("1")</script>'
STORE = Path("some folder/my results.db")


def data_of(html):
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL).group(1))


class Tags(HTMLParser):
    """Which elements a page has, and whether they nest."""

    def __init__(self, html):
        super().__init__()
        self.seen, self.attributes, self._open = [], [], []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.attributes.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br", "line"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def test_the_numbers_in_the_chart_are_the_records():
    records = [*seeds(3, "sgd", level=0.5), *seeds(3, "upgd", level=0.7)]
    chart = data_of(content(records, STORE))["comparison-1"]
    assert [method["name"] for method in chart["methods"]] == ["UPGD", "SGD"]  # the best first
    upgd = chart["methods"][0]
    curves = np.array([r.accuracy for r in records[3:]], np.float64)
    np.testing.assert_allclose(upgd["y"], curves.mean(0), rtol=1e-4)
    reach = 4.303 * curves.std(0, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(np.subtract(upgd["high"], upgd["y"]), reach, atol=1e-4)
    assert upgd["x"] == [10, 20, 30, 40]


def test_a_table_has_what_the_chart_shows():
    html = content([*seeds(3, "sgd", level=0.5), *seeds(3, "upgd", level=0.7)], STORE)
    scores = {name: np.linspace(level / 2, level, 4).mean() + 0.01 for name, level in (("SGD", 0.5), ("UPGD", 0.7))}
    for name, score in scores.items():
        assert re.search(rf'<th scope="row"><span[^>]*></span>{name}</th>.*?{score:.4f} ± ', html)


def test_the_numbers_of_a_column_have_one_number_of_decimals():
    records = [*seeds(3, "sgd", level=0.1), *seeds(3, "sgd", {"lr": 0.5}, level=0.123456), *seeds(3, "upgd", level=0.7)]
    html = content(records, STORE)
    for table in re.findall(r"<tbody>(.*?)</tbody>", html, re.DOTALL)[:2]:
        rows = [re.findall(r'<td class="number">(.*?)</td>', row) for row in table.split("</tr>")[:-1]]
        assert len(rows) >= 2
        for column in zip(*rows, strict=True):
            numbers = [number for cell in column for number in re.findall(r"[\d.]+", cell)]
            assert len({len(number.partition(".")[2]) for number in numbers}) <= 1, column


def test_names_from_the_store_stay_text():
    records = [
        record(EVIL, {"lr": 0.1, EVIL: EVIL}, problem=EVIL, network=EVIL, device=EVIL, seed=0),
        record("sgd", problem=EVIL, network=EVIL, device=EVIL, diverged_at=5),
    ]
    html = render(records, Path(f"{EVIL}.db".replace("/", "")))
    assert "<script>alert" not in html
    assert html.count("<script") == html.count("</script>") == 3  # plotly, the page's own, its data
    assert data_of(html)["comparison-1"]["methods"][0]["name"] == EVIL


class Cells(HTMLParser):
    """The text of every table cell, as a browser shows it."""

    def __init__(self, html):
        super().__init__()
        self.headings, self.cells, self._cell = [], [], None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag in ("th", "td"):
            self._cell = ""

    def handle_data(self, text):
        if self._cell is not None:
            self._cell += text

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            (self.headings if tag == "th" else self.cells).append(self._cell)
            self._cell = None


def test_hostile_text_that_a_table_shows_stays_text():
    """Unlike a setting of an unknown name, the value of a known one, a method and a figure stand in cells of their own."""
    looked = {"step": [40], EVIL: [0.5]}
    records = [
        record("unknown", {"lr": EVIL}, diagnostics=looked),
        record(EVIL, {"lr": 0.1}, diagnostics=looked),
        record("unknown", {"lr": f"{EVIL}2"}, diverged_at=5),
    ]
    shown = Cells(content(records, STORE))
    assert shown.cells.count(f"lr {EVIL}") == 2  # the best settings and all settings
    assert shown.cells.count(f"lr {EVIL}2") == 2  # all settings and those that diverged
    assert shown.headings.count(EVIL) == 3  # a method in a row and above a column, and a figure


def test_the_page_is_whole_and_has_landmarks_and_captions():
    records = [record("upgd", {"lr": lr, "sigma": s}, seed=0) for lr in (0.1, 0.01) for s in (0.1, 0.01)]
    html = content([*records, record("sgd", diverged_at=20), record("sgd", problem="other")], STORE)
    tags = Tags(html)
    assert {"header", "nav", "main", "footer", "section", "h1", "h2", "h3", "caption", "figcaption"} <= set(tags.seen)
    assert tags.seen.count("h1") == 1
    assert tags.seen.count("table") == tags.seen.count("caption")
    ids = [attributes["id"] for _, attributes in tags.attributes if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in tags.attributes:
        assert tag != "th" or attributes["scope"] in ("row", "col")
        assert "on" not in {name[:2] for name in attributes}, "no program in an attribute"


def test_divergences_are_reported():
    records = [record("sgd", seed=0), record("sgd", seed=1, diverged_at=15), record("sgd", seed=2, diverged_at=31)]
    html = content(records, STORE)
    assert "2 of 3 learners diverged, in 1 setting." in html
    assert re.search(r"2 of 3</td><td[^>]*>15</td>", html)


def test_the_verdict_prefers_fewer_divergences():
    steady = [record("sgd", level=0.7, seed=seed) for seed in range(5)]
    wild = [record("pgd", level=0.9, seed=seed, diverged_at=None if seed == 4 else 5) for seed in range(5)]
    verdict = sections(steady + wild)[0].verdict()
    assert verdict.startswith("SGD diverges least often, with an accuracy of 0.5450 ± 0.0071 over all steps (5 seeds).")
    assert verdict.endswith("PGD follows, 0.1500 ahead, but 4 of 5 diverged.")
    assert sections(wild)[0].verdict() == "PGD has an accuracy of 0.7150 over all steps (1 seed, 4 diverged)."


def test_a_result_may_consist_of_diverged_learners():
    html = content([record("sgd", diverged_at=5)], STORE)
    assert "Every learner diverged." in html
    assert data_of(html)["comparison-1"]["methods"][0]["y"] == []


def test_no_results_is_no_error():
    assert "There are no results yet" in content([], STORE)


def test_the_commands_run_the_same_learners():
    """A command of the page has the same keys as the records that it was generated from."""
    from upgd.cli import app

    records = [
        record("adamw", {"lr": lr, "betas": (0.9, beta)}, seed=seed)
        for lr in (0.1, 0.001)
        for beta in (0.99, 0.999)
        for seed in (0, 1)
    ]
    (section,) = sections(records)
    _, (_, sweep) = section.commands(str(STORE))
    words = shlex.split(sweep)
    assert words[0] == "upgd"
    function, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    assert function.__name__ == "sweep"
    given = bound.arguments
    settings, rest = given["declaration"].settings(), given["declaration"].rest()
    from upgd.experiments import Experiment
    from upgd.experiments.execution.jobs import whole

    experiment = Experiment(given["problem"], given["methods"].split(","), grid=settings, **rest)
    assert whole(experiment).digests == {r.key.digest for r in records}
    assert given["execution"].store == STORE


def test_the_command_for_all_settings_states_how_many_it_adds():
    star = [{"lr": 0.1, "sigma": 0.1}, {"lr": 0.01, "sigma": 0.1}, {"lr": 0.1, "sigma": 0.01}]
    records = [record("pgd", settings, seed=0, level=0.5) for settings in star[1:]]
    records += [record("pgd", star[0], seed=seed, level=0.9) for seed in (0, 1, 2)]
    (section,) = sections(records)
    (_, best), (what, every) = section.commands(str(STORE))
    assert what == "PGD, all 3 settings, and 1 more combinations of their values"
    assert "--seeds 1 " in every
    assert "--seeds 3 " in best


def test_write_creates_one_self_contained_file(tmp_path):
    with Store.write(tmp_path / "r.db") as store:
        store.add(seeds(2, "sgd"))
    path = write(tmp_path / "r.db", tmp_path / "report.html")
    html = path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.glob("*.html")] == ["report.html"]
    head = html[: html.index("<style>")]
    assert "default-src 'none'" in head
    assert not re.search(r'<(script|img|link|iframe)[^>]+(src|href)="(?!data:)', html)


@pytest.mark.parametrize(("problem", "folder"), [("nothing-of-this-name", "."), (None, "not-there")])
def test_mistakes_get_a_sentence(tmp_path, problem, folder):
    with Store.write(tmp_path / "r.db") as store:
        store.add(seeds(1, "sgd"))
    with pytest.raises(ValueError, match=problem or folder):
        write(tmp_path / "r.db", tmp_path / folder / "report.html", problem=problem)


def test_colours_can_be_seen_on_both_pages():
    for pair in colours([*METHODS, "mine", "yours"]).values():
        assert contrast(pair.light, "#ffffff") >= 2
        assert contrast(pair.dark, "#12161c") >= 5
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_numbers_are_rounded_to_five_digits(values):
    for value, short in zip(values, _rounded(values), strict=True):
        if math.isfinite(value):
            assert short == pytest.approx(value, rel=0.5001e-4)
            if 1e-15 < abs(value) < 1e15:
                assert float(f"{short:.5g}") == short  # JSON has no more than these digits
        else:
            assert short is None


def test_plotly_matches_the_published_checksum():
    """The npm package plotly.js-basic-dist-min, version 4.1.1; update the checksum for a new version."""
    bundle = (files("upgd.report") / "plotly/plotly-basic.min.js").read_bytes()
    assert hashlib.sha256(bundle).hexdigest() == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert "</script" not in plotly()


def test_the_page_never_replaces_results_or_a_folder(tmp_path):
    with Store.write(tmp_path / "r.db") as store:
        store.add(seeds(2, "sgd"))
    before = (tmp_path / "r.db").read_bytes()
    (tmp_path / "link.html").symlink_to(tmp_path / "r.db")
    for target in ("r.db", "link.html"):
        with pytest.raises(ValueError, match="is a store, or another SQLite database, which is never overwritten"):
            write(tmp_path / "r.db", tmp_path / target)
    (tmp_path / "pages").mkdir()
    with pytest.raises(ValueError, match="pages is a folder; the output must be a file"):
        write(tmp_path / "r.db", tmp_path / "pages")
    assert (tmp_path / "r.db").read_bytes() == before
    assert not list(tmp_path.glob(".*.partial"))
