"""Packaging, continuous integration and citation files are consistent."""

import ast
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_every_python_that_is_promised_is_tested():
    promised = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert promised[0] == PROJECT["requires-python"].removeprefix(">=")
    assert read(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == promised


def test_the_oldest_torch_and_numpy_that_are_promised_are_tested():
    commands = " ".join(step.get("run", "") for step in read(".github/workflows/ci.yml")["jobs"]["oldest"]["steps"])
    for requirement in PROJECT["dependencies"]:
        assert f"'{requirement.replace('>=', '==')}.*'" in commands


@pytest.mark.parametrize("name", ["Entry", "Job", "Method", "Plan", "Setting"])
def test_one_class_has_the_name(name):
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    assert sum(len(re.findall(rf"^class {name}\b", text, re.M)) for text in sources) == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_read_permission_unless_a_job_overrides_it(path):
    workflow = read(str(path.relative_to(ROOT)))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job.get("permissions", {}) in ({}, {"id-token": "write"})
        for step in job.get("steps", []):
            assert re.search(r"@(v\d+|release/v\d+)$", step.get("uses", "@v1"))


def test_both_papers_are_cited_and_the_version_is_not_repeated():
    citation = read("CITATION.cff")
    papers = [citation["preferred-citation"], *citation["references"]]
    assert [paper["url"].rpartition("/")[2] for paper in papers] == ["2302.03281", "2404.00781"]
    assert "version" not in citation


def test_the_changelog_follows_its_format():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.split(r"^## ", text, flags=re.M)[1:]
    assert releases[0].startswith(("Unreleased\n", "[Unreleased]"))
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for release in releases:
        found = re.findall(r"^### (.*)$", release, re.M)
        assert found == [kind for kind in kinds if kind in found]


def test_the_address_of_the_repository_is_in_one_place_only():
    """The other files either do not have it, or are generated from pyproject.toml."""
    address = PROJECT["urls"].get("Repository")
    if address is None:
        for name in ("README.md", "mkdocs.yml", "CITATION.cff"):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert not re.search(r"github\.com|colab\.research|repo_url|repository-code", text)
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    readme = generate["readme"]("https://github.com/me/upgd")
    assert "[![CI](https://github.com/me/upgd/actions/workflows/ci.yml/badge.svg)]" in readme
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        path = f"examples/{notebook.name}"
        assert f"(https://colab.research.google.com/github/me/upgd/blob/main/{path})" in readme
    assert "colab.research" not in generate["readme"]("https://host/me/upgd")
    assert "\nrepo_url: https://host/me\n" in generate["settings_of_site"]("https://host/me")
    assert yaml.safe_load(generate["citation"]("https://host/me"))["repository-code"] == "https://host/me"


def test_links_of_the_readme_work_on_pypi():
    for_pypi = runpy.run_path(str(ROOT / "hatch_build.py"))["for_pypi"]
    text = "[a](b.md#c) ![d](e.svg) [f](https://g) ![h](https://i)"
    assert for_pypi(text, "https://host/me") == (
        "[a](https://host/me/blob/main/b.md#c) ![d](https://host/me/raw/main/e.svg) [f](https://g) ![h](https://i)"
    )
    assert for_pypi(text, None) == "a  [f](https://g) ![h](https://i)"


def _messages(path: Path):
    """The error messages that a module raises, with {} for their values."""

    def text(node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(words)):
                return words
            case ast.JoinedStr(values=parts):
                return "".join(map(text, parts))
            case ast.BinOp(left=left, right=right):
                return text(left) + text(right)
        return "{}"

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield text(node.exc.args[0])


def test_error_messages_of_one_sentence_have_no_full_stop():
    """As in Python and torch; the command line prints them after ``upgd:``."""
    messages = [one for path in (ROOT / "src").rglob("*.py") for one in _messages(path)]
    assert len(messages) > 400
    assert [one for one in messages if one.endswith(".") and not re.search(r"[.?] [A-Z`]|\.\.\.$", one)] == []
