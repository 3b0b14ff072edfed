"""Export results as CSV or Parquet."""

import csv
from pathlib import Path
from typing import TextIO

from upgd import writing
from upgd.experiments.analysis.results import Results

__all__ = ["write_csv", "write_parquet"]


def write_csv(results: Results, stream: TextIO, *, curves: bool = False, looks: bool = False) -> None:
    """Write one line per learner, per window or per diagnostics snapshot; settings that a method lacks are empty."""
    columns = results.columns(curves=curves, looks=looks)
    writer = csv.writer(stream)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))


def write_parquet(results: Results, path: Path, *, curves: bool = False, looks: bool = False) -> None:
    """Write the same as a Parquet file; needs pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError("Parquet needs pyarrow: run pip install pyarrow, or use --format csv") from None
    with writing.output(path) as file:
        pyarrow.parquet.write_table(pyarrow.table(results.columns(curves=curves, looks=looks)), file)
