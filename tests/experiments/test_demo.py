"""The page of the demonstration: text that matches the numbers, and colours that follow the reader's theme."""

import re
from dataclasses import replace

import numpy as np
from made_records import seeds

from upgd.experiments import Results
from upgd.experiments.demo import Show, _drawing, _page, _words
from upgd.report import colours


def learners(method: str, curve: list[float], *, regression: bool = False) -> list:
    """Five seeds with one curve of four windows, one for each quarter."""
    made = seeds(5, method, regression=regression)
    value = {"loss": np.array(curve)} if regression else {"accuracy": np.array(curve)}
    return [replace(record, **value) for record in made]


def test_the_summary_names_the_best_method_and_its_trend():
    results = Results([*learners("upgd", [0.6, 0.8, 0.9, 0.9]), *learners("sgd", [0.5, 0.5, 0.5, 0.4])])
    assert _words(results) == (
        "UPGD has the highest accuracy over all steps, 80%; SGD follows with 48%. From the first quarter of the stream to "
        "the last, UPGD goes from 60% to 90%, SGD from 50% to 40%."
    )


def test_the_summary_mentions_a_method_that_ends_ahead():
    upgd = learners("upgd", [0.216, 0.25, 0.25, 0.247], regression=True)
    adamw = learners("adamw", [0.3, 0.28, 0.25, 0.234], regression=True)
    assert _words(Results([*upgd, *adamw])) == (
        "UPGD has the lowest squared error over all steps, 0.241; AdamW follows with 0.266. From the first quarter of the "
        "stream to the last, UPGD goes from 0.216 to 0.247. However, AdamW is best at the end: it goes from 0.3 to 0.234."
    )


def test_a_single_method_has_no_summary():
    assert _words(Results(learners("upgd", [0.5] * 4))) == ""


def test_on_a_dark_page_every_line_and_letter_is_visible():
    drawing = _drawing("A title", Results([*learners("upgd", [0.5] * 4), *learners("sgd", [0.4] * 4)]))
    used = set(re.findall(r"var\(--of-([0-9a-f]{6}), #\1\)", drawing))
    on_dark = dict(re.findall(r"--of-([0-9a-f]{6}): (#[0-9a-f]{6})", drawing))
    assert len(used) >= 4
    assert used == set(on_dark)
    grid = on_dark.pop("e6e6e6")
    assert 1.2 < colours.contrast(grid, "#12161c") < 2
    for colour in on_dark.values():
        assert colours.contrast(colour, "#12161c") >= 5.9  # 6, up to the rounding of the colour


def test_drawings_share_no_element_ids(tmp_path):
    results = Results([*learners("upgd", [0.5] * 4), *learners("sgd", [0.4] * 4)])
    one, other = (set(re.findall(r'<clipPath id="(\w+)"', _drawing(title, results))) for title in ("One", "Another"))
    assert one
    assert not one & other


def test_the_page_supports_both_themes_and_is_self_contained(tmp_path):
    results = Results([*learners("upgd", [0.5] * 4), *learners("sgd", [0.4] * 4)])
    page = _page(Show({"One & only": results}, tmp_path))
    assert '<meta name="color-scheme" content="light dark">' in page
    assert page.count("<svg ") == page.count("</svg>") == 1
    assert "<h2>One &amp; only</h2><p>UPGD has the highest accuracy" in page
    assert not re.search(r'(src|href)="(?!#)', page)
