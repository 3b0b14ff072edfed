"""`upgd data …` as a user types it."""

import gzip
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from upgd import __version__
from upgd.data.sources import OFFICIAL, Download, Part


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("UPGD_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with four small files that the command takes for MNIST."""
    folder, parts, downloads = tmp_path / "files", [], []
    folder.mkdir()
    for split, count in (("train", 20), ("test", 10)):
        for content, shape in (("images", (count, 28, 28)), ("labels", (count,))):
            size = count * 784 if content == "images" else count
            header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
            packed = gzip.compress(header + bytes(k % 10 for k in range(size)))
            name, checksum = f"{split}-{content}.gz", hashlib.sha256(packed).hexdigest()
            (folder / name).write_bytes(packed)
            parts.append(Part(split, content, shape, frozenset({checksum})))
            downloads.append(Download(name, len(packed), checksum, ()))
    source = replace(OFFICIAL["mnist"], parts=tuple(parts), downloads=tuple(downloads))
    monkeypatch.setitem(OFFICIAL, "mnist", source)
    return folder


@pytest.fixture
def serve():
    """Serve a folder on this machine and give its address."""
    servers = []

    def start(folder):
        handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *arguments: None})
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_version_and_help(upgd):
    assert upgd("--version")[:2] == (0, f"{__version__}\n")
    assert "data" in upgd("--help")[1]
    code, out, _ = upgd("data", "fetch", "--help")
    assert code == 0
    assert all(option in out for option in ("--from", "--as", "--mirror", "mnist, emnist, cifar10"))


def test_fetch_downloads_and_list_shows_it(upgd, files, serve, cache_folder):
    url = serve(files)
    code, out, err = upgd("data", "fetch", "mnist", "--mirror", url)
    assert (code, out) == (0, "mnist: 20 train + 10 test images of 28×28, 10 classes (official, verified)\n")
    assert "train-images.gz" in err  # the progress bar
    code, out, _ = upgd("data", "list")
    assert code == 0
    assert f"Data sets in {cache_folder}" in out
    assert "1,797 train images of 8×8, 10 classes" in out
    assert f"from {url}" in out
    assert f"sha256 {hashlib.sha256((files / 'test-labels.gz').read_bytes()).hexdigest()}  test-labels.gz" in out
    assert "not downloaded; run: upgd data fetch cifar10" in out


def test_list_as_json(upgd, files, cache_folder):
    upgd("data", "fetch", "--from", str(files))
    code, out, _ = upgd("data", "list", "--json")
    listed = json.loads(out)
    assert code == 0
    assert listed["folder"] == str(cache_folder)
    sets = {row["name"]: row for row in listed["datasets"]}
    assert list(sets) == ["digits", "mnist", "emnist", "cifar10"]
    assert sets["digits"]["state"] == "embedded"
    assert sets["emnist"] == {"name": "emnist", "state": "absent"}
    assert sets["mnist"]["state"] == "present"
    assert sets["mnist"]["counts"] == {"train": 20, "test": 10}
    assert sets["mnist"]["files"][0] | {"sha256": ""} == {"name": "train-images.gz", "from": str(files), "sha256": ""}


def test_verify_finds_damage_and_fetch_repairs_it(upgd, files, cache_folder):
    upgd("data", "fetch", "--from", str(files))
    assert "intact" in upgd("data", "list", "--verify")[1]
    path = cache_folder / "mnist" / "train-labels.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert upgd("data", "list")[0] == 0
    code, out, _ = upgd("data", "list", "--verify")
    assert code == 1
    assert "DAMAGED: checksums of mnist have changed" in out
    assert upgd("data", "fetch", "mnist", "--from", str(files))[0] == 0
    assert upgd("data", "list", "--verify")[0] == 0
    os.truncate(path, 3)
    code, out, _ = upgd("data", "list", "--json")
    assert code == 1
    assert [row["state"] for row in json.loads(out)["datasets"]] == ["embedded", "damaged", "absent", "absent"]


@pytest.mark.parametrize("option", ["--as", "--subset"])
def test_custom_files_get_a_name(upgd, files, option):
    code, out, _ = upgd("data", "fetch", "--from", str(files), option, "emnist-subset", "--transposed")
    assert (code, out) == (0, "emnist-subset: 20 train + 10 test images of 28×28, 10 classes (your own files)\n")
    assert "your own files, not an official data set" in upgd("data", "list")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["fetch"], 2, "name the data sets to fetch: mnist, emnist, cifar10"),
        (["fetch", "imagenet"], 2, "imagenet"),
        (["fetch", "--nonsense"], 2, "--nonsense"),
        (["lst"], 2, "list"),
        (["fetch", "--as", "mine"], 2, "give their folder with --from FOLDER"),
        (["fetch", "--from", "x", "--mirror", "http://y"], 2, "mutually exclusive"),
        (["fetch", "mnist", "--from", "x", "--as", "mine"], 2, "leave out mnist"),
        (
            ["fetch", "--from", "x", "--transposed"],
            2,
            "--transposed and --replace apply only to files added with --as NAME",
        ),
        (["fetch", "--from", "does-not-exist"], 1, "there is no file or folder does-not-exist; check the path"),
        (["fetch", "--from", "does-not-exist", "--as", "mnist"], 1, "'mnist' is the name of an official data set"),
        (["fetch", "mnist", "--mirror", "ftp://x"], 1, "mirror must be a URL that starts with http"),
    ],
)
def test_a_mistake_gets_one_sentence_and_an_exit_code(upgd, arguments, code, says):
    exit_code, out, err = upgd("data", *arguments)
    last = err.splitlines()[-1]
    assert exit_code == code
    assert out == ""
    assert last.startswith("upgd: ")
    assert says in last
    assert "Traceback" not in err


def test_a_cache_that_cannot_be_written_gets_one_sentence(upgd, files, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("UPGD_DATA", str(tmp_path / "file" / "cache"))
    code, _, err = upgd("data", "fetch", "--from", str(files))
    assert code == 1
    assert err.splitlines()[-1].startswith("upgd: ")


def command(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", "from upgd.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_ctrl_c_stops_a_download_and_keeps_the_partial_file(cache_folder):
    """The true MNIST from a server that sends a little and then waits."""
    release = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "9912422")
            self.end_headers()
            self.wfile.write(bytes(1 << 20))
            release.wait(60)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    process = command("data", "fetch", "mnist", "--mirror", f"http://127.0.0.1:{server.server_port}/")
    part = cache_folder / ".downloads" / "train-images-idx3-ubyte.gz.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 500_000) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    release.set()
    server.shutdown()
    server.server_close()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert part.stat().st_size > 500_000
    assert not (cache_folder / "mnist").exists()


def test_a_closed_pipe_is_not_an_error():
    process = command("data", "list")
    process.stdout.close()
    assert process.wait(60) in (0, 1)
    assert process.stderr.read() == ""


def test_the_real_mnist_from_a_mirror(serve, cache_folder):
    """End to end, in a process of its own: download, verify, store, load."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "mnist"
    if not folder.is_dir():
        pytest.skip(f"the real data are not in {folder}")
    process = command("data", "fetch", "mnist", "--mirror", serve(folder))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == "mnist: 60,000 train + 10,000 test images of 28×28, 10 classes (official, verified)\n"
    assert sorted(os.listdir(cache_folder)) == [".mnist.lock", "mnist"]
