"""Portable results as compressed CSV."""

import contextlib
import csv
import gzip
import io
import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import record

from upgd.experiments.analysis import portable
from upgd.experiments.analysis.bands import of_seeds
from upgd.experiments.analysis.compare import comparisons
from upgd.experiments.analysis.metrics import area, quarter
from upgd.store import Key, Record

_values = st.one_of(
    st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5), st.booleans()
)
_settings = st.dictionaries(
    st.text(min_size=1, max_size=6), st.one_of(_values, st.lists(_values, max_size=2)), max_size=3
)


@st.composite
def records(draw):
    steps, window = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    windows = -(-steps // window)
    curve = st.lists(st.floats(0, 1e6, width=32), min_size=windows, max_size=windows)
    loss = np.array(draw(curve))
    accuracy = draw(st.one_of(st.none(), curve.map(np.array)))
    diverged_at = draw(st.one_of(st.none(), st.integers(0, steps - 1)))
    if diverged_at is not None:
        loss[diverged_at // window :] = np.nan
        if accuracy is not None:
            accuracy[diverged_at // window :] = np.nan
    key = Key(
        problem=draw(st.text(max_size=8)),
        options=draw(_settings),
        network="5",
        method="mine",
        settings=draw(_settings),
        seed=draw(st.integers(0, 2**31)),
        steps=steps,
        engine=draw(st.integers(1, 3)),
    )
    rest = {
        "torch": "2.6",
        "package": "1",
        "seconds": draw(st.floats(0, 1e6)),
        "plugins": draw(st.one_of(st.none(), st.just({"a.b": "c, 1"}))),
    }
    return Record(key, window=window, loss=loss, accuracy=accuracy, diverged_at=diverged_at, **rest)


@given(st.lists(records(), max_size=4, unique_by=lambda record: record.key.digest))
def test_files_round_trip(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("portable") / "results.csv.gz"
    portable.write(path, written)
    content = path.read_bytes()
    found = {one.key.digest: one for one in portable.read(path)}
    assert found.keys() == {one.key.digest for one in written}
    for one in written:
        other = found[one.key.digest]
        np.testing.assert_allclose(other.loss, one.loss, rtol=1e-5)
        if one.accuracy is None:
            assert other.accuracy is None
        else:
            np.testing.assert_allclose(other.accuracy, one.accuracy, rtol=1e-5)
        for name in ("window", "diverged_at", "device", "backend", "package", "torch", "finished", "plugins"):
            assert getattr(other, name) == getattr(one, name)
    portable.write(path, reversed(found.values()))
    assert path.read_bytes() == content


def test_a_file_can_be_read_with_the_standard_library(tmp_path):
    path = tmp_path / "results.csv.gz"
    portable.write(path, [record("upgd", {"lr": 0.25}, seed=seed) for seed in (1, 0)])
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0", "1"]
    assert json.loads(rows[0]["settings"])["lr"] == 0.25
    assert rows[1]["accuracy"] == f"{area(record(seed=1), 'accuracy'):.6g}" == "0.385"
    assert rows[1]["accuracy_curve"] == "0.26 0.343333 0.426667 0.51"


@pytest.mark.parametrize("compressed", [True, False])
def test_no_damage_goes_unnoticed(tmp_path, compressed):
    path = tmp_path / ("results.csv.gz" if compressed else "results.csv")
    portable.write(path, [record(), record("sgd", seed=1, diverged_at=15)])
    content = path.read_bytes()
    before = _facts(portable.read(path))
    draws = np.random.default_rng(0)
    for place in draws.integers(0, len(content), 300):
        damaged = bytearray(content)
        damaged[place] ^= 1 << draws.integers(8)
        path.write_bytes(damaged)
        _refused_or_the_same(path, before)
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged or not a file of results"):
            portable.read(path)


def _refused_or_the_same(path, before):
    """Some bits of a gzip header do not affect the content."""
    with contextlib.suppress(ValueError):
        assert _facts(portable.read(path)) == before
        return
    with pytest.raises(ValueError, match="is damaged or not a file of results"):
        portable.read(path)


def _facts(records):
    return [(one.key.digest, one.loss.tobytes(), one.diverged_at, one.seconds) for one in records]


def test_a_learner_twice_is_damage(tmp_path):
    path = tmp_path / "results.csv"
    portable.write(path, [record()])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(ValueError, match="a learner occurs twice"):
        portable.read(path)


def test_no_foreign_file_is_replaced(tmp_path):
    path = tmp_path / "mine.csv.gz"
    path.write_bytes(gzip.compress(b"mine"))
    with pytest.raises(ValueError, match="which is never overwritten"):
        portable.write(path, [record()])
    assert gzip.decompress(path.read_bytes()) == b"mine"


def test_joined_windows_have_the_same_means():
    one = record(windows=10, window=7, steps=66)
    joined = portable.coarsened(one, portable.SUMMARY)
    assert (joined.window, len(joined.loss)) == (21, 4)
    assert area(joined, "accuracy") == pytest.approx(area(one, "accuracy"), rel=1e-6)
    whole = record(windows=8, window=5)
    quarters = portable.coarsened(whole, portable.SUMMARY)
    for which in ("first", "last"):
        assert quarter(quarters, "loss", which) == pytest.approx(quarter(whole, "loss", which), rel=1e-6)
    late = portable.coarsened(record(windows=8, window=5, diverged_at=22), 4)
    assert np.isnan(late.loss).tolist() == [False, False, True, True]


def test_of_two_the_longer_curves_are_kept(tmp_path):
    path = tmp_path / "results.csv.gz"
    one, other = record(windows=8, window=5), record(windows=8, window=5, seed=1)
    assert portable.merge(path, [one]) == 1
    assert portable.merge(path, [portable.coarsened(one, 2), portable.coarsened(other, 2)]) == 2
    assert [len(found.loss) for found in portable.read(path)] == [8, 2]


def test_a_file_that_has_all_records_is_left_alone(tmp_path):
    path = tmp_path / "results.csv.gz"
    one, other = record(windows=8, window=5), record(windows=8, window=5, seed=1)
    portable.write(path, [one, other])
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 1))  # as by another version of zlib
    os.utime(path, ns=(10**18, 10**18))
    content = path.read_bytes()
    assert portable.merge(path, [portable.coarsened(one, 2), other]) == 2
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (content, 10**18)
    assert portable.merge(path, [record(windows=20, window=2)]) == 2
    assert [len(found.loss) for found in portable.read(path)] == [20, 8]


def test_curves_of_different_windows_are_drawn_together():
    few = portable.coarsened(record(seed=0, windows=9, window=5), 3)
    (comparison,) = comparisons([few, record(seed=1, windows=9, window=5)])
    ends, values = of_seeds(comparison.entries[0], "accuracy", 80)
    assert ends.tolist() == [15, 30, 45]
    np.testing.assert_allclose(values[1] - values[0], 0.01, atol=1e-6)  # what a seed adds to the curve


def test_commands(tmp_path, monkeypatch, capsys):
    from upgd.cli import main
    from upgd.store import Store

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UPGD_STORE", raising=False)

    def type_(line):
        with pytest.raises(SystemExit) as exit_:
            main(line.split())
        return exit_.value.code, capsys.readouterr()

    with Store.write("upgd.db") as store:
        store.add([record(seed=seed, windows=8, window=5) for seed in range(3)])
    assert type_("export r.csv.gz --portable --windows 4")[1].err == "3 learners → r.csv.gz\n"
    assert type_("import r.csv.gz --store new.db")[1].out == "3 learners of 3 in r.csv.gz added to new.db\n"
    assert type_("import r.csv.gz --store new.db")[1].out == "0 learners of 3 in r.csv.gz added to new.db\n"
    assert type_("export again.csv.gz --portable --store new.db")[0] == 0
    assert (tmp_path / "again.csv.gz").read_bytes() == (tmp_path / "r.csv.gz").read_bytes()
    (tmp_path / "r.csv.gz").write_bytes((tmp_path / "r.csv.gz").read_bytes()[:-9])
    code, said = type_("import again.csv.gz r.csv.gz --store third.db")
    assert (code, (tmp_path / "third.db").exists()) == (1, False)
    assert "r.csv.gz is damaged" in said.err
    assert type_("export --portable")[0] == type_("export x.csv --windows 3")[0] == type_("import")[0] == 2
    rows = csv.reader(io.StringIO(gzip.decompress((tmp_path / "again.csv.gz").read_bytes()).decode()))
    assert tuple(next(rows)) == portable.COLUMNS
