"""The page of published numbers, recomputed from the shipped results."""

from benchmarks.public_numbers import CASES, DATA, RESULTS, table

from upgd.experiments.analysis import portable


def test_the_page_has_the_numbers_of_the_shipped_results() -> None:
    page = (RESULTS / "public-numbers.md").read_text(encoding="utf-8")
    assert table(portable.read(DATA)) in page


def test_a_setting_without_results_has_no_row() -> None:
    records = [record for record in portable.read(DATA) if record.key.method == "upgd"]
    rows = table(records).splitlines()[2:]
    assert len(rows) == sum(case.settings["method"] == "upgd" for case in CASES)
    assert all("UPGD" in row for row in rows)
