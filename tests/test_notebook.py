"""The notebook in examples/ runs from top to bottom, and shows what it computed."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "compare.ipynb"


def shown(notebook):
    """What the cells show: tables and figures by type, and text."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    data = [output.data for output in outputs if output.output_type in ("execute_result", "display_data")]
    return data, "".join(output.get("text", "") for output in outputs)


def check(notebook):
    data, text = shown(notebook)
    tables = [one["text/html"] for one in data if "text/html" in one]
    assert len(tables) == 2
    assert all(f">{method}</td>" in table for table in tables for method in ("upgd", "sgd", "adamw"))
    assert "on fresh seeds" in tables[1]
    assert any("image/png" in one for one in data)
    assert "upgd {'beta_utility'" in text


def test_the_notebook_runs(monkeypatch, tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:  # the same, only shorter
        cell.source = cell.source.replace("seeds=3", "seeds=2").replace("steps=10_000", "steps=500")
        cell.source = cell.source.replace("seeds=10", "seeds=2")
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check(notebook)


def test_the_notebook_is_stored_with_its_outputs():
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    check(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))  # run once, from top to bottom
