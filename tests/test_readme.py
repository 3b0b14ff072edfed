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
