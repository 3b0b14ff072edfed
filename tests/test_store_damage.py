"""A damaged store is reported or has no effect; it never gives different results or a traceback."""

import gc
import os
import random
import re
import sqlite3
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from upgd.store import DamagedStoreWarning, Store, StoreError, repair

sys.path.insert(0, str(Path(__file__).parent / "experiments"))
from made_records import record, seeds

PAGE = 4096


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Return a store with overflowing rows, NULLs and several pages of everything: its path and its bytes."""
    path = tmp_path_factory.mktemp("sound") / "sound.db"
    same = {"finished": "2026-01-01T00:00:00+00:00", "package": "0.1.0", "torch": "2.6.0"}
    with Store.write(path) as store:
        for method in ("sgd", "upgd", "adamw"):
            store.add(seeds(12, method, level=0.4, **same))
        store.add(seeds(3, "sgd", problem="toy-changing-inputs", regression=True, **same))
        store.add([record("pgd", seed=1, diverged_at=15, **same)])
        store.add([record("upgd", windows=1_500, diagnostics=looks(), **same)])
        store.add(seeds(12, "ups", windows=200, options={"task_length": 7}, **same))
    return path


def looks():
    return {"step": [10, 20], "gate": [0.5, None], "histogram": [[1, 2], [3, 4]]}


def damaged_by(bits, content):
    changed = bytearray(content)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def everything(path):
    """Return everything that a store contains, in a form that can be compared."""
    with Store.read(path) as store:
        filters = ({}, {"problem": "toy-changing-inputs"}, {"network": "100-50"}, {"methods": ["upgd"]}, {"seeds": [3]})
        found = [[comparable(one) for one in store.records(**wanted)] for wanted in filters]
        return len(store), sorted(store.digests()), found


def comparable(one):
    curves = (one.loss.tobytes(), None if one.accuracy is None else one.accuracy.tobytes())
    return repr(replace(one, loss=np.zeros_like(one.loss), accuracy=None)), curves


def reported(path):
    """Return whether reading or writing reports damage; if neither does, the content must be unchanged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = everything(path)
        except StoreError:
            return True, None
    assert all(one.category is DamagedStoreWarning for one in caught)
    return bool(caught), found


def candidates(content, count, seed):
    """Bits to flip: anywhere, and in the header and at the start of pages, which matter most."""
    rng = random.Random(seed)
    pages = len(content) // PAGE
    anywhere = [rng.randrange(len(content) * 8) for _ in range(count // 2)]
    header = [rng.randrange(100 * 8) for _ in range(count // 4)]
    begins = [rng.randrange(pages) * PAGE * 8 + rng.randrange(100 * 8) for _ in range(count - count // 2 - count // 4)]
    return anywhere + header + begins


def check_flips(sound, path, count, seed):
    content, expected = sound.read_bytes(), everything(sound)
    unnoticed = []
    for bit in candidates(content, count, seed):
        path.write_bytes(damaged_by([bit], content))
        told, found = reported(path)
        if not told and found != expected:
            unnoticed.append(bit)
        check_writing(path, told, expected, bit)
        for beside in path.parent.glob(f"{path.name}-*"):
            beside.unlink()
    assert unnoticed == []


def check_writing(path, told, expected, bit):
    """Writing to a store that is reported as damaged is refused; to any other store, it works."""
    before = path.read_bytes()
    try:
        with Store.write(path) as store:
            assert store.add([record("new")]) == 1
    except StoreError:
        assert path.read_bytes() == before
    else:
        assert not told, bit
        assert everything(path)[2][0][:-1] == expected[2][0], bit


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_bit_is_reported_or_changes_nothing(sound, tmp_path, seed):
    check_flips(sound, tmp_path / "flipped.db", 60, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 105))
def test_many_flipped_bits_are_reported_or_change_nothing(sound, tmp_path, seed):
    check_flips(sound, tmp_path / "flipped.db", 1_000, seed)


def test_a_store_cut_off_anywhere_is_reported(sound, tmp_path):
    content = sound.read_bytes()
    rng = random.Random(0)
    lengths = [1, 100, 511, *range(PAGE, len(content), PAGE), *(rng.randrange(1, len(content)) for _ in range(20))]
    for length in [*lengths, len(content) - 1]:
        (tmp_path / "cut.db").write_bytes(content[:length])
        assert reported(tmp_path / "cut.db")[0], length


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc/self/fd")
def test_a_store_that_cannot_be_opened_is_closed_at_once(sound, tmp_path):
    path = tmp_path / "r.db"
    path.write_bytes(damaged_by([35], sound.read_bytes()))
    gc.disable()  # the garbage collector would close it later
    try:
        for way in (Store.read, Store.write, lambda path: repair(path, tmp_path / "new.db")):
            with pytest.raises(StoreError, match="not a database"):
                way(path)
        found = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
        assert [name for name in found if name.startswith(str(path))] == []
    finally:
        gc.enable()


def _is_open(name):
    return os.path.lexists(f"/proc/self/fd/{name}")  # that of the listing itself does not matter


def where(content, text):
    """The first bit of a text in a file."""
    assert content.count(text) >= 1
    return content.index(text) * 8


def damaged_row(sound, path):
    """A copy in which one curve differs by one bit; the number of its row."""
    with Store.read(sound) as store:
        victim = store.records()[40]
    content = sound.read_bytes()
    path.write_bytes(damaged_by([where(content, victim.loss.tobytes()[:40]) + 3], content))
    return victim.id


def test_a_damaged_row_is_named_and_left_out(sound, tmp_path):
    path = tmp_path / "r.db"
    number = damaged_row(sound, path)
    with pytest.warns(
        DamagedStoreWarning, match=rf"r.db is damaged: row {number} is not as written; .*skipped"
    ) as told:
        store = Store.read(path)
    with store, Store.read(sound) as whole:
        assert len(told) == 1
        assert len(store) == len(whole) - 1
        lost = {one.key.digest for one in whole.records() if one.id == number}
        assert store.digests() == whole.digests() - lost
        assert [one.id for one in store.records()] == [one.id for one in whole.records() if one.id != number]
    with pytest.raises(StoreError, match=rf"row {number} is not as written; nothing was written. `upgd store repair"):
        Store.write(path)


@pytest.mark.filterwarnings("ignore::upgd.store.DamagedStoreWarning")
def test_a_damaged_index_is_not_asked(sound, tmp_path):
    content, expected = sound.read_bytes(), everything(sound)
    digest = expected[1][20].encode()
    places = [match.start() for match in re.finditer(digest, content)]
    assert len(places) == 2  # the row, and the index
    intact = []
    for place in places:
        (tmp_path / "r.db").write_bytes(damaged_by([place * 8], content))
        told, found = reported(tmp_path / "r.db")
        assert told
        assert found[0] == len(found[1]) == len(found[2][0])
        with Store.read(tmp_path / "r.db") as store:
            assert len(store.records(digests=[digest.decode()])) == (found == expected)
        intact.append(found == expected)
    assert sorted(intact) == [False, True]


def test_invalid_unicode_damages_only_its_row(sound, tmp_path):
    content = sound.read_bytes()
    (tmp_path / "r.db").write_bytes(damaged_by([where(content, b"task_length") + 7], content))
    told, found = reported(tmp_path / "r.db")
    assert told
    assert found[0] == everything(sound)[0] - 1


def test_repair_copies_what_is_intact(sound, tmp_path):
    number = damaged_row(sound, tmp_path / "r.db")
    before = (tmp_path / "r.db").read_bytes()
    whole = everything(sound)
    assert repair(tmp_path / "r.db", tmp_path / "new.db") == (whole[0] - 1, [number])
    assert (tmp_path / "r.db").read_bytes() == before
    told, found = reported(tmp_path / "new.db")
    assert not told
    assert [curves for _, curves in found[2][0]] == [c for i, (_, c) in enumerate(whole[2][0], 1) if i != number]
    with pytest.raises(StoreError, match=r"new.db exists, but repair needs a new file"):
        repair(tmp_path / "r.db", tmp_path / "new.db")


def test_repair_reads_around_pages_that_cannot_be_read(sound, tmp_path):
    content = sound.read_bytes()
    whole = everything(sound)[0]
    with Store.read(sound) as store:
        roots = {root for (root,) in store._connection.execute("SELECT rootpage FROM sqlite_master")}
    for page in set(range(1, len(content) // PAGE)) - {root - 1 for root in roots}:
        (tmp_path / "r.db").write_bytes(content[: page * PAGE] + b"\0" * PAGE + content[(page + 1) * PAGE :])
        saved, lost = repair(tmp_path / "r.db", tmp_path / f"{page}.db")
        assert saved + len(lost) == whole, page  # the indexes reveal the lost rows
        assert saved > whole / 2
    (tmp_path / "r.db").write_bytes(content[:-PAGE])
    assert repair(tmp_path / "r.db", tmp_path / "cut.db")[0] > whole / 2


@pytest.mark.parametrize(
    "command",
    [
        ("table", "--json"),
        ("best",),
        ("runs", "--json"),
        ("export",),
        ("report",),
        ("store", "check"),
        ("runs", "merge"),
    ],
    ids=" ".join,
)
def test_commands_report_it_with_their_exit_status(sound, tmp_path, monkeypatch, upgd, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    number = damaged_row(sound, Path("r.db"))
    files = ["r.db"] if command[0] in ("report", "store") or "merge" in command else []
    monkeypatch.setenv("UPGD_STORE", "merged.db" if "merge" in command else "r.db")
    code, out, err = upgd(*command, *files)
    assert code == 3
    assert out or command[0] == "report"
    assert err.startswith(f"upgd: r.db is damaged: row {number} is not as written; the damaged part is skipped.")
    if command[0] == "report":
        assert f"row {number} is not as written" in Path("report.html").read_text()


def test_the_commands_check_and_repair(sound, tmp_path, monkeypatch, upgd):
    monkeypatch.chdir(tmp_path)
    whole = everything(sound)[0]
    assert upgd("store", "check", str(sound)) == (0, f"{whole} learners in {sound} are intact\n", "")
    number = damaged_row(sound, Path("r.db"))
    code, out, _ = upgd("store", "check", "r.db")
    assert (code, out) == (3, f"row {number} is not as written\n{whole - 1} learners in r.db are intact\n")
    code, out, err = upgd("store", "repair", "r.db", "new.db")
    assert (code, out) == (0, f"{whole - 1} learners of r.db saved to new.db\n")
    assert err.startswith(f"upgd: row {number} of r.db could not be saved;")
    assert upgd("store", "check", "new.db")[0] == 0
    assert upgd("store", "repair", "r.db", "new.db")[0] == 1


def check_commands(sound, upgd, count, seed):
    """In the current folder."""
    content = sound.read_bytes()
    Path("r.db").write_bytes(content)
    commands = [("table", "--json", "--store"), ("runs", "--store"), ("best", "--json", "--store"), ("store", "check")]
    whole = {command: upgd(*command, "r.db") for command in commands}
    for bit in candidates(content, count, seed):
        for command in commands:
            Path("r.db").write_bytes(damaged_by([bit], content))
            found = upgd(*command, "r.db")
            assert found == whole[command] or (found[0] in (1, 3) and found[2].startswith("upgd: r.db ")), bit
        for beside in Path().glob("r.db-*"):
            beside.unlink()


def test_commands_on_flipped_bits(sound, tmp_path, monkeypatch, upgd):
    monkeypatch.chdir(tmp_path)
    check_commands(sound, upgd, 24, 7)


@pytest.mark.slow
def test_commands_on_many_flipped_bits(sound, tmp_path, monkeypatch, upgd):
    monkeypatch.chdir(tmp_path)
    check_commands(sound, upgd, 1_000, 8)


def without_checksums(sound, path):
    """The same store as a version without checksums wrote it."""
    path.write_bytes(sound.read_bytes())
    old = sqlite3.connect(path, isolation_level=None)
    old.execute("ALTER TABLE runs DROP COLUMN checksum")
    old.execute("ALTER TABLE runs DROP COLUMN plugins")
    old.execute("DELETE FROM migrations WHERE version >= 3")
    old.close()


def test_an_old_store_is_readable_and_gets_checksums_when_written(sound, tmp_path):
    path = tmp_path / "old.db"
    without_checksums(sound, path)
    before = path.read_bytes()
    assert reported(path) == (False, everything(sound))
    assert path.read_bytes() == before
    Store.write(path).close()
    assert reported(path) == (False, everything(sound))
    content = path.read_bytes()
    path.write_bytes(damaged_by([where(content, sound_curve(sound)) + 3], content))
    assert reported(path)[0]


def sound_curve(sound):
    with Store.read(sound) as store:
        return store.records()[40].loss.tobytes()[:40]


def test_damage_of_rows_without_checksum_is_detected_if_possible(sound, tmp_path):
    path = tmp_path / "old.db"
    for change in (
        "settings = replace(settings, '0', '9')",
        "options = '{'",
        "loss = substr(loss, 2)",
        "window = 0",
        "finished = 'one day'",
        "seconds = 'long'",
        "diagnostics = '{\"step\":'",
    ):
        without_checksums(sound, path)
        old = sqlite3.connect(path, isolation_level=None)
        old.execute(f"UPDATE runs SET {change} WHERE id = 7")
        old.close()
        with pytest.warns(DamagedStoreWarning, match="row 7 is not as written"):
            everything(path)


def test_an_unchanged_file_is_not_checked_again(tmp_path, monkeypatch):
    path, check, times = tmp_path / "r.db", Store.check, []

    def counted(store):
        times.append(store)
        return check(store)

    monkeypatch.setattr(Store, "check", counted)
    for seed in range(5):
        with Store.write(path) as store:
            store.add([record("sgd", seed=seed)])
    assert len(times) == 1  # when the file was new
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("UPDATE runs SET seconds = 9 WHERE id = 2")
    other.close()
    with pytest.raises(StoreError, match="row 2 is not as written; nothing was written"):
        Store.write(path)
