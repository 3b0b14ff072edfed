"""Downloads from a mirror on this machine that behaves well, badly or not at all."""

import gzip
import os
from dataclasses import replace

import pytest
from made_files import sha256

from upgd.data import DataError, transfer
from upgd.data.sources import OFFICIAL, Download
from upgd.data.transfer import download

CONTENT = os.urandom(300_000)


@pytest.fixture
def wanted(mirror):
    mirror.files["file.gz"] = CONTENT
    return Download("file.gz", len(CONTENT), sha256(CONTENT), ())


def from_mirrors(mirror, wanted, *behaviours):
    return replace(wanted, mirrors=tuple(mirror.url(b) + "file.gz" for b in behaviours))


def test_a_download_leaves_only_the_file(mirror, wanted, tmp_path):
    seen = []
    url = download(from_mirrors(mirror, wanted, "ok"), tmp_path, lambda *told: seen.append(told))
    assert url == mirror.url("ok") + "file.gz"
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert os.listdir(tmp_path) == ["file.gz"]
    assert seen[-1] == ("file.gz", len(CONTENT), len(CONTENT))
    assert [here for _, here, _ in seen] == sorted(here for _, here, _ in seen)


def test_an_existing_file_is_not_downloaded_again(mirror, wanted, tmp_path):
    for _ in range(2):
        download(from_mirrors(mirror, wanted, "ok"), tmp_path)
    assert len(mirror.requests) == 1


def test_one_that_is_there_but_wrong_is_replaced(mirror, wanted, tmp_path):
    (tmp_path / "file.gz").write_bytes(b"something else")
    download(from_mirrors(mirror, wanted, "ok"), tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == CONTENT


def test_a_wrong_checksum_is_an_error_and_leaves_nothing(mirror, wanted, tmp_path):
    with pytest.raises(DataError, match=r"/wrong/file.gz: wrong checksum"):
        download(from_mirrors(mirror, wanted, "wrong"), tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ("missing", "responded 404 Not Found"),
        ("broken", "responded 503 Service Unavailable"),
        ("portal", "offers 26 bytes instead of 300,000"),
        ("endless", "sends more than the expected 300,000 bytes"),
        ("wrong", "wrong checksum"),
    ],
)
def test_a_bad_mirror_is_named_and_the_next_one_is_taken(mirror, wanted, tmp_path, behaviour, says):
    with pytest.raises(DataError, match=says):
        download(from_mirrors(mirror, wanted, behaviour), tmp_path)
    assert download(from_mirrors(mirror, wanted, behaviour, "ok"), tmp_path) == mirror.url("ok") + "file.gz"
    assert (tmp_path / "file.gz").read_bytes() == CONTENT


def test_a_download_that_breaks_off_again_and_again_continues_each_time(mirror, wanted, tmp_path):
    download(from_mirrors(mirror, wanted, "half"), tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert mirror.requests[:3] == [("half", None), ("half", "bytes=150000-"), ("half", "bytes=225000-")]


def test_a_download_broken_off_for_good_continues_the_next_time(mirror, wanted, tmp_path):
    with pytest.raises(DataError, match="150,000 bytes were kept, and the same command resumes from there"):
        download(from_mirrors(mirror, wanted, "half-then-gone"), tmp_path)
    assert os.listdir(tmp_path) == ["file.gz.part"]
    mirror.requests.clear()
    seen = []
    download(from_mirrors(mirror, wanted, "ok"), tmp_path, lambda *told: seen.append(told))
    assert mirror.requests == [("ok", "bytes=150000-")]
    assert seen[0][1] > 150_000
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert os.listdir(tmp_path) == ["file.gz"]


def test_one_mirror_resumes_the_download_of_another(mirror, wanted, tmp_path):
    assert "/ok/" in download(from_mirrors(mirror, wanted, "half-then-gone", "ok"), tmp_path)
    assert mirror.requests[-1] == ("ok", "bytes=150000-")
    assert (tmp_path / "file.gz").read_bytes() == CONTENT


def test_a_mirror_without_ranges_restarts(mirror, wanted, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1000])
    download(from_mirrors(mirror, wanted, "deaf"), tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == CONTENT


@pytest.mark.parametrize("rubbish", [b"rubbish", bytes(len(CONTENT)), bytes(len(CONTENT) + 1)])
def test_leftovers_of_an_earlier_attempt_are_harmless(mirror, wanted, tmp_path, rubbish):
    (tmp_path / "file.gz.part").write_bytes(rubbish)
    download(from_mirrors(mirror, wanted, "ok"), tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert os.listdir(tmp_path) == ["file.gz"]


def test_a_complete_partial_file_is_not_downloaded_again(mirror, wanted, tmp_path):
    (tmp_path / "file.gz.part").write_bytes(CONTENT)
    download(from_mirrors(mirror, wanted, "ok"), tmp_path)
    assert mirror.requests == []


def test_a_slow_mirror_is_used_while_it_sends_data(mirror, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "TIMEOUT", 5.0)
    download(from_mirrors(mirror, wanted, "slow"), tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert len(mirror.requests) == 1


def test_a_stalled_mirror_is_abandoned(mirror, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "TIMEOUT", 0.3)
    monkeypatch.setattr(transfer, "ATTEMPTS", 3)
    with pytest.raises(DataError, match="disconnected 3 times"):
        download(from_mirrors(mirror, wanted, "stalled"), tmp_path)
    assert "/ok/" in download(from_mirrors(mirror, wanted, "stalled", "ok"), tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == CONTENT


@pytest.mark.parametrize("behaviour", ["drip", "drip-headers"])
def test_a_mirror_that_trickles_bytes_is_abandoned(mirror, wanted, tmp_path, monkeypatch, behaviour):
    monkeypatch.setattr(transfer, "PATIENCE", 0.5)
    with pytest.raises(DataError, match=r"sends less than 491,520 bytes in 0.5 seconds"):
        download(from_mirrors(mirror, wanted, behaviour), tmp_path)


def test_a_slow_mirror_is_kept_while_it_sends_enough(mirror, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "PATIENCE", 0.02)
    monkeypatch.setattr(transfer, "LEAST", 0)
    download(from_mirrors(mirror, wanted, "slow"), tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert len(mirror.requests) == 1


def test_a_password_is_used_and_shown_nowhere(mirror, wanted, tmp_path):
    with_password = mirror.url("secret").replace("//", "//me:secret@")
    assert download(wanted, tmp_path, mirror=with_password) == mirror.url("secret") + "file.gz"
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    for address in (with_password.replace("/secret/", "/missing/"), "ftp://me:secret@host/", "me:secret@host/folder"):
        with pytest.raises(DataError) as refused:
            download(wanted, tmp_path / "x", mirror=address)
        assert "@" not in str(refused.value)
        assert "me:" not in str(refused.value)


def test_no_server_at_all(mirror, wanted, tmp_path):
    mirror.close()
    with pytest.raises(DataError, match=r"file.gz could not be downloaded .* no connection.* --from FOLDER"):
        download(from_mirrors(mirror, wanted, "ok"), tmp_path)


def test_content_encoding_of_the_server_is_ignored(mirror, tmp_path):
    packed = gzip.compress(CONTENT)
    mirror.files["file.gz"] = packed
    wanted = Download("file.gz", len(packed), sha256(packed), (mirror.url("encoded") + "file.gz",))
    download(wanted, tmp_path)
    assert (tmp_path / "file.gz").read_bytes() == packed


def test_a_custom_mirror_is_tried_first(mirror, wanted, tmp_path):
    url = download(from_mirrors(mirror, wanted, "missing"), tmp_path, mirror=mirror.url("ok").rstrip("/"))
    assert url == mirror.url("ok") + "file.gz"
    with pytest.raises(DataError, match="mirror must be a URL that starts with http"):
        download(wanted, tmp_path / "x", mirror="file:///etc")


def test_the_public_mirrors_are_well_formed():
    for source in OFFICIAL.values():
        for file in source.downloads:
            assert len(set(file.mirrors)) == len(file.mirrors) >= 2
            assert all(url.startswith("https://") and url.endswith("/" + file.name) for url in file.mirrors)
            assert len(file.sha256) == 64
            int(file.sha256, 16)
        checksums = [checksum for part in source.parts for checksum in part.checksums]
        assert len(set(checksums)) == len(checksums)
        assert all(len(checksum) == 64 and int(checksum, 16) for checksum in checksums)
