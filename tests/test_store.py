"""The file of results: results are never lost, and errors are one sentence."""

import hashlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upgd.store import Key, Record, Store, StoreError, file, schema
from upgd.store.records import COLUMNS, SUMMED, row_of


def key(**changes) -> Key:
    plain = {"problem": "p", "network": "n", "method": "upgd", "settings": {"lr": 0.1}, "seed": 0, "steps": 5}
    return Key(**(plain | changes))


def record(windows=3, **changes) -> Record:
    loss = np.arange(windows, dtype=np.float32) + changes.get("seed", 0)
    return Record(key(steps=2 * windows - 1, **changes), window=2, loss=loss, accuracy=loss / 10, diverged_at=None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.db"


def same(a: Record, b: Record) -> bool:
    plain = [replace(r, loss=np.zeros_like(r.loss), accuracy=None, id=None) for r in (a, b)]
    curves = ((a.loss, b.loss), (a.accuracy, b.accuracy))
    return repr(plain[0]) == repr(plain[1]) and all(
        (x is None) == (y is None) and (x is None or np.array_equal(x, y, equal_nan=True)) for x, y in curves
    )


def test_records_round_trip(path):
    diverged = Record(
        key(method="pgd", settings={"lr": 1.0, "sigma": 0.1}, options={"task_length": 2}, steps=4),
        window=2,
        loss=np.array([0.5, np.nan], np.float32),
        diverged_at=3,
        device="cuda:0",
        backend="kernel",
        seconds=1.5,
    )
    with Store.write(path) as store:
        assert store.add([record(), diverged]) == 2
    with Store.read(path) as store:
        out = store.records()
    assert [r.id for r in out] == [1, 2]
    assert same(out[0], replace(record(), finished=out[0].finished))
    assert same(out[1], diverged)
    assert out[0].ends.tolist() == [2, 4, 5]
    assert out[0].lengths.tolist() == [2, 2, 1]


def test_a_record_has_a_mean_for_every_window():
    with pytest.raises(ValueError, match="5 steps in windows of 2 need 3 means, not"):
        Record(key(steps=5), window=2, loss=np.zeros(2, np.float32))


def test_adding_again_changes_nothing(path):
    with Store.write(path) as store:
        assert store.add([record(seed=s) for s in range(3)]) == 3
        assert store.add([replace(record(seed=s), seconds=99.0) for s in range(4)]) == 1
        assert [r.seconds for r in store.records()] == [0.0, 0.0, 0.0, 99.0]


@given(
    st.dictionaries(st.sampled_from("abc"), st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3)),
    st.permutations("abc"),
)
def test_the_key_depends_on_what_is_in_it_and_not_on_its_order(chosen, order):
    shuffled = {name: chosen[name] for name in order if name in chosen}
    assert key(settings=chosen).digest == key(settings=shuffled).digest
    for changed in ({"seed": 1}, {"steps": 6}, {"method": "x"}, {"engine": 2}, {"options": {"o": 1}}, {"network": "m"}):
        assert key(settings=chosen, **changed).digest != key(settings=chosen).digest
    assert key(settings={**chosen, "d": 1}).digest != key(settings=chosen).digest


def test_digests_are_the_same_everywhere():
    assert key().digest == "cbfebc4506c425d595e2c4079a8745553cb370574b2f3a9ea68e30a0a127b112"


def test_records_are_filtered(path):
    with Store.write(path) as store:
        store.add([record(method=m, problem=p, seed=s) for m in ("a", "b") for p in ("p", "q") for s in range(3)])
        assert len(store) == len(store.records()) == 12
        assert len(store.records(problem="q")) == 6
        assert {r.key.seed for r in store.records(problem="q", methods=["a"], seeds=[0, 2])} == {0, 2}
        assert store.records(steps=99) == []
        assert store.records(digests=["nobody's"]) == []
        assert len(store.records(digests=[record(method="a").key.digest])) == 1


def test_an_empty_list_matches_nothing(path):
    with Store.write(path) as store:
        store.add([record()])
        for nothing in (
            {"methods": []},
            {"seeds": []},
            {"digests": []},
            {"problem": ""},
            {"network": ""},
            {"steps": 0},
        ):
            assert store.records(**nothing) == []


@given(
    problem=st.none() | st.sampled_from("pqr"),
    methods=st.none() | st.lists(st.sampled_from("abc")),
    seeds=st.none() | st.lists(st.integers(0, 3)),
    every=st.none() | st.integers(1, 4),
)
def test_filters_are_those_of_a_plain_loop(problem, methods, seeds, every):
    records = [record(problem=p, method=m, seed=s) for s in (1, 0, 2) for p in "pq" for m in "ab"]
    digests = None if every is None else [r.key.digest for r in reversed(records[::every])]
    expected = [
        r.key
        for r in records
        if (problem is None or r.key.problem == problem)
        and (methods is None or r.key.method in methods)
        and (seeds is None or r.key.seed in seeds)
        and (digests is None or r.key.digest in digests)
    ]
    with Store.write(":memory:") as store:
        store.add(records)
        found = store.records(problem=problem, methods=methods, seeds=seeds, digests=digests)
    assert [r.key for r in found] == expected


def test_more_digests_than_sqlite_has_variables(path):
    others = [f"{i:064x}" for i in range(300_000)]
    with Store.write(path) as store:
        store.add([record(seed=s) for s in range(4)])
        mine = [record(seed=s).key.digest for s in (3, 1)]
        assert [r.key.seed for r in store.records(digests=[*others, *mine])] == [1, 3]


def test_only_requested_rows_are_read(path):
    """SQLite counts its instructions: those for one learner of 1000 are few."""
    with Store.write(path) as store:
        store.add([record(problem=f"p{s % 10}", seed=s) for s in range(1000)])

        def instructions(**wanted):
            count = 0

            def one_more():
                nonlocal count
                count += 1

            store._connection.set_progress_handler(one_more, 1)
            store.records(**wanted)
            return count

        everything = instructions()
        assert instructions(digests={record(problem="p3", seed=3).key.digest}) < everything / 50
        assert instructions(problem="p3", methods=["upgd"]) < everything / 5


def test_delete(path):
    with Store.write(path) as store:
        store.add([record(seed=s) for s in range(5)])
        assert store.delete([1, 3, 99]) == 2
        assert [r.key.seed for r in store.records()] == [1, 3, 4]
        assert store.add([record(seed=0)]) == 1


def test_readers_look_on_while_one_writes(path):
    with Store.write(path) as writer:
        writer.add([record(seed=0)])
        with Store.read(path) as reader:
            assert len(reader) == 1
            writer.add([record(seed=1)])
            assert len(reader) == 2


def test_reading_leaves_no_files_behind(path):
    with Store.write(path) as store:
        store.add([record()])
    before = path.read_bytes()
    with Store.read(path) as one, Store.read(path) as other:
        assert len(one) == len(other) == 1
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            one._connection.execute("DELETE FROM runs")
    assert {file.name for file in path.parent.iterdir()} == {"results.db", "results.db.lock"}
    assert path.read_bytes() == before


def test_a_second_writer_is_refused(path):
    with Store.write(path), pytest.raises(StoreError, match=r"another process is writing to .*results.db"):
        Store.write(path)
    Store.write(path).close()


def test_a_second_writer_is_refused_whichever_link_leads_to_the_store(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path)
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(path)
    for first, second in ((path, link), (link, path), (path, tmp_path / "folder" / path.name)):
        with Store.write(first), pytest.raises(StoreError, match="another process is writing to"):
            Store.write(second)
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["link.db"]


def test_a_store_with_two_names_is_read_and_not_written(path, tmp_path):
    """SQLite keeps a journal for each name, so two writers would not see each other's changes."""
    with Store.write(path) as store:
        store.add([record()])
    (tmp_path / "second.db").hardlink_to(path)
    for name in (path, tmp_path / "second.db"):
        with Store.read(name) as store:
            assert len(store) == 1
        with pytest.raises(StoreError, match=rf"{name.name} has 2 names \(hard links\)"):
            Store.write(name)
    path.unlink()
    Store.write(tmp_path / "second.db").close()


WRITER = """
    import sys, time
    from upgd.store import Store
    with Store.write(sys.argv[1]):
        print("open", flush=True)
        time.sleep(60)
"""


def test_a_writer_that_is_killed_leaves_no_lock(path):
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"open\n"
    with pytest.raises(StoreError, match="another process"):
        Store.write(path)
    process.kill()
    process.wait()
    process.stdout.close()
    Store.write(path).close()


def test_a_transaction_is_all_or_nothing(path):
    def broken():
        yield record(seed=1)
        raise KeyboardInterrupt

    with Store.write(path) as store:
        store.add([record(seed=0)])
        with pytest.raises(KeyboardInterrupt):
            store.add(broken())
        assert len(store) == 1
        assert store.add([record(seed=1)]) == 1


def test_a_full_disk_loses_nothing(path):
    with Store.write(path) as store:
        store.add([record(seed=0)])
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(StoreError, match=r"no space is left for .*; finished results are kept: free some space"):
            store.add([record(2_000, seed=s) for s in range(1, 9)])
        assert [r.key.seed for r in store.records()] == [0]
        store._connection.execute("PRAGMA max_page_count = 100000")
        assert store.add([record(2_000, seed=s) for s in range(1, 9)]) == 8


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_disk_that_is_really_full(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting a file system")
    try:
        with Store.write(small / "r.db") as store:
            store.add([record(seed=0)])
            with pytest.raises(StoreError, match=r"no space is left|cannot be used"):
                all(store.add([record(5_000, seed=seed)]) for seed in range(1, 99))
            kept = len(store)
        with Store.read(small / "r.db") as store:
            assert 1 <= len(store) == kept
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_damaged_file(path):
    with Store.write(path) as store:
        store.add([record(200, seed=s) for s in range(50)])
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is damaged or not a store"), Store.read(path) as store:
        store.records()


@pytest.mark.parametrize("open_", [Store.read, Store.write])
def test_a_file_that_is_no_store(path, open_):
    path.write_text("problem,method\n" * 100)
    with pytest.raises(StoreError, match="is damaged or not a store"):
        open_(path)
    assert path.read_text() == "problem,method\n" * 100
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(StoreError, match="of another program"):
        open_(path)


def test_a_store_of_a_newer_version_is_refused_and_unchanged(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, "ALTER TABLE runs ADD COLUMN mood TEXT;"])
        Store.write(path).close()
    before = path.read_bytes()
    for open_ in (Store.read, Store.write):
        with pytest.raises(StoreError, match=r"newer version of upgd \(schema 5; this version supports 4\)"):
            open_(path)
    assert path.read_bytes() == before


def test_an_old_store_is_migrated_when_written(path, monkeypatch):
    with Store.write(path) as store:
        store.add([record()])
    script = "ALTER TABLE runs ADD COLUMN mood TEXT;\nUPDATE runs SET mood = 'calm';"
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, script])
    with Store.read(path) as store:
        assert len(store.records()) == 1
        assert store._connection.execute("SELECT max(version) FROM migrations").fetchall() == [(4,)]
    with Store.write(path) as store:
        assert len(store.records()) == 1
        assert store._connection.execute("SELECT mood FROM runs").fetchall() == [("calm",)]
        assert store._connection.execute("SELECT version FROM migrations").fetchall() == [(1,), (2,), (3,), (4,), (5,)]


def test_plugins_are_stored_and_older_rows_have_none(path, monkeypatch):
    monkeypatch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:3])
    monkeypatch.setattr(file, "SUMMED", tuple(name for name in SUMMED if name != "plugins"))
    with Store.write(path) as store:  # as the version before wrote it
        store.add([record()])
    monkeypatch.undo()
    own = replace(record(seed=1), plugins={"my_method": "mine 1.0"})
    assert own.key.digest == record(seed=1).key.digest
    with Store.read(path) as store:
        assert [one.plugins for one in store.records()] == [None]
    with Store.write(path) as store:
        assert store.add([record(), own]) == 1
        assert [one.plugins for one in store.records()] == [None, {"my_method": "mine 1.0"}]
        assert store.check() == []


FIRST_SCHEMA = schema.MIGRATIONS[:1]


def written_by_the_first_version(path: Path, *records: Record) -> str:
    """A store of schema 1, made as that version made it, without a column for diagnostics; its SHA-256."""
    columns = [name for name in COLUMNS if name not in ("diagnostics", "plugins")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", FIRST_SCHEMA)
        with Store.write(path) as store:
            for one in records:
                values = row_of(one)
                marks = ", ".join("?" * (1 + len(columns)))
                store._connection.execute(
                    f"INSERT INTO runs (digest, {', '.join(columns)}) VALUES ({marks})",
                    [values[name] for name in ("digest", *columns)],
                )
    return sha256(path)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_reading_does_not_change_an_old_store(path, tmp_path, upgd):
    before = written_by_the_first_version(path, record(seed=0), record(seed=1))
    with Store.read(path) as store:
        assert len(store) == 2
        assert [(r.key.seed, r.diagnostics) for r in store.records(methods=["upgd"])] == [(0, None), (1, None)]
        assert same(store.records()[0], replace(record(seed=0), finished=store.records()[0].finished))
    assert upgd("table", "--store", str(path), "--json")[0] == 0
    code, said, _ = upgd("runs", "merge", str(path), "--store", str(tmp_path / "all.db"))
    assert (code, said) == (0, f"2 learners of 2 in {path} added to {tmp_path / 'all.db'}\n")
    assert sha256(path) == before
    with Store.write(path) as store:
        assert [r.diagnostics for r in store.records()] == [None, None]
        store.add([replace(record(seed=2), diagnostics={"step": [1]})])
    with Store.read(path) as store:
        assert store.records(seeds=[2])[0].diagnostics == {"step": [1]}


def test_an_empty_file_is_a_store_without_learners(path):
    path.touch()
    with Store.read(path) as store:
        assert (len(store), store.records(), store.digests()) == (0, [], set())
    assert path.read_bytes() == b""


def test_a_migration_that_fails_changes_nothing(path, monkeypatch):
    Store.write(path).close()
    script = "ALTER TABLE runs ADD COLUMN mood TEXT;\nUPDATE nothing SET mood = 'calm';"
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, script])
        with pytest.raises(StoreError):
            Store.write(path)
    with Store.write(path) as store:
        assert store.add([record()]) == 1


def test_a_missing_store_is_an_error(tmp_path):
    with pytest.raises(StoreError, match=r"there is no store .*nothing.db; create it with `upgd run`"):
        Store.read(tmp_path / "nothing.db")
    with pytest.raises(StoreError, match=r"the folder .*nowhere of the store .* does not exist"):
        Store.write(tmp_path / "nowhere" / "r.db")
    with pytest.raises(StoreError, match="is a folder"):
        Store.write(tmp_path)


READ_ONLY = """
    import os, sys
    from upgd.store import Store, StoreError
    if os.geteuid() == 0:
        os.setuid(65534)
    with Store.read(sys.argv[1]) as store:
        print(len(store.records()))
    try:
        Store.write(sys.argv[1])
    except StoreError as error:
        print(error)
"""


@pytest.mark.parametrize("schema", [1, len(schema.MIGRATIONS)])
def test_a_folder_that_cannot_be_written_to(schema):
    """Reading works, and writing gives a clear error. Root may write anywhere, so the test changes its user."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if schema == 1:
            written_by_the_first_version(folder / "r.db", record())
        else:
            with Store.write(folder / "r.db") as store:
                store.add([record()])
        (folder / "r.db.lock").unlink()
        (folder / "r.db").chmod(0o444)
        folder.chmod(0o555)
        command = [sys.executable, "-c", textwrap.dedent(READ_ONLY), str(folder / "r.db")]
        done = subprocess.run(command, capture_output=True, text=True)
        folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "1"
    assert "cannot be opened (unable to open database file); check the permissions" in done.stdout


def test_records_can_be_found_in_lists():
    """Records contain arrays, so they are equal only to themselves; compare keys instead."""
    one, other = (
        Record(Key(problem="p", network="8", method="sgd", settings={}, seed=0, steps=2), 1, [1, 2]) for _ in range(2)
    )
    assert one in [other, one]
    assert one != other
    assert one.key == other.key
    assert len({one, other}) == 2


@pytest.mark.parametrize("open_", [Store.read, Store.write])
def test_a_folder_is_no_store(tmp_path, open_):
    with pytest.raises(StoreError, match="is a folder; the store must be a file, such as"):
        open_(tmp_path)


def test_a_file_that_is_no_store_gets_no_lock(tmp_path):
    (tmp_path / "notes.txt").write_text("These are notes, and no store. " * 50)
    with pytest.raises(StoreError):
        Store.write(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("broken", [{"seconds": float("nan")}, {"device": None}])
def test_a_record_that_cannot_be_stored_is_an_error_and_nothing_is_stored(path, broken):
    with Store.write(path) as store:
        with pytest.raises(StoreError):
            store.add([record(), replace(record(seed=1), **broken)])
        assert len(store) == 0


def test_equal_options_have_one_spelling():
    assert key(options={"amplitude": 1.0, "noise": 0.5}).digest == key(options={"amplitude": 1, "noise": 0.5}).digest


@pytest.mark.parametrize("open_", [Store.read, Store.write])
def test_a_named_pipe_is_no_store(tmp_path, open_):
    os.mkfifo(tmp_path / "pipe.db")
    with pytest.raises(StoreError, match=r"pipe.db is not a regular file; choose another file for the store"):
        open_(tmp_path / "pipe.db")
    assert os.listdir(tmp_path) == ["pipe.db"]
