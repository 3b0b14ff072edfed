"""The notebooks in examples/ run from top to bottom, install their requirements, and are stored with outputs."""

import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    import nbformat

    return nbformat.read(path, as_version=4)


def check(notebook, name):
    """Check that nothing failed or warned, and that there are outputs."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    data = [output.data for output in outputs if output.output_type in ("execute_result", "display_data")]
    assert any("image/png" in one for one in data)
    if name == "compare":
        tables = [one["text/html"] for one in data if "text/html" in one]
        assert len(tables) == 2
        assert all(f">{method}</td>" in table for table in tables for method in ("upgd", "sgd", "adamw"))
        assert "on fresh seeds" in tables[1]
        assert "upgd {'beta_utility'" in "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
@every
def test_the_notebook_runs(path, monkeypatch, tmp_path):
    import nbclient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(path)
    limits = {"seeds": 2, "steps": 500, "look_every": 100}
    for cell in notebook.cells:  # the same, but shorter
        cell.source = re.sub(
            r"\b(seeds|steps|look_every)=([\d_]+)\b",
            lambda found: f"{found[1]}={min(int(found[2]), limits[found[1]])}",
            cell.source.replace("TASK, TASKS = 500, 20", "TASK, TASKS = 20, 6"),
        )
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check(notebook, path.stem)


@every
def test_the_notebook_is_stored_with_its_outputs(path):
    notebook = read(path)
    check(notebook, path.stem)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))  # run once, from top to bottom


@every
def test_the_first_cell_installs_the_package_where_it_is_missing(path):
    first = next(cell.source for cell in read(path).cells if cell.cell_type == "code")
    assert '%pip install --quiet "upgd[run,report]"' in first


@every
def test_the_notebook_has_no_local_paths_and_only_installed_imports(path):
    """It runs unchanged in Colab, where only the package and its requirements are installed."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.:/])/(tmp|home|root|work|Users|content)/", text)
    sources = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "code")
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", sources, re.M))
    assert imported <= {"upgd", "torch", "matplotlib"}
