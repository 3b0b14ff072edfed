"""The code in the README runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert "5_000" in example
    exec(compile(example.replace("5_000", "1_000"), "README.md", "exec"), {})
    accuracy = float(capsys.readouterr().out.removeprefix("online accuracy: "))
    assert accuracy > 0.3  # chance is 0.1, which is also the accuracy at the start of the second task


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_results_are_those_of_the_pages() -> None:
    """Means to three digits, the highest in bold, of the weight-wise panel with global scaling."""
    table = re.search(r"<!-- results -->(.*?)<!-- end of results -->", README, re.S)
    assert table
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].strip().splitlines()]
    methods, panel = rows[0][2:], ""
    assert len(rows) == 7
    for name, grid, *means in rows[2:]:
        if link := re.search(r"\((.*)\)", name):
            panel = (ROOT / link[1]).read_text().split("\n## Weight-wise, global\n")[1].split("\n## ")[0]
        known = dict(re.findall(r"^\| \d+\. (.*?) \|.*? \| (0\.\d{4}) ±", panel, re.M))
        inside = {method: known[method] for method in methods}
        if grid == "paper's":
            inside |= {
                method: known[f"{method}, paper's grid"] for method in methods if f"{method}, paper's grid" in known
            }
        said = [float(mean.strip("*")) for mean in means]
        assert said == pytest.approx([float(one) for one in inside.values()], abs=5.1e-4), f"{name} {grid}"
        assert [mean.startswith("**") for mean in means] == [one == max(inside.values()) for one in inside.values()]
