"""The page of a running sweep: served on this machine only, current, and stopped by Ctrl-C."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing, suppress

import pytest
from made_records import record, seeds

from upgd.experiments.execution.progress import ProgressFile
from upgd.report import Watch
from upgd.report import watch as watch_module
from upgd.store import DamagedStoreWarning, Store


@pytest.fixture
def watch(tmp_path):
    watch = Watch(tmp_path / "sweep.db")
    thread = watch.start()
    yield watch
    watch.stop()
    thread.join(10)
    assert not thread.is_alive()


def get(address, **headers):
    request = urllib.request.Request(address, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with closing(opener.open(request, timeout=10)) as answer:
        return answer.read().decode()


def test_a_store_that_does_not_exist_yet_is_awaited(watch):
    assert "There are no results yet" in get(watch.address)
    before = get(f"{watch.address}news")
    with Store.write(watch.store) as store:
        store.add(seeds(2, "sgd"))
        assert get(f"{watch.address}news") != before
        assert "2 learners" in get(f"{watch.address}content")
        middle = get(f"{watch.address}news")
        store.add([record("upgd", level=0.9)])
        assert get(f"{watch.address}news") != middle
        assert "UPGD has the highest accuracy" in get(f"{watch.address}content")


@pytest.mark.parametrize(("path", "host", "status"), [("", "evil.example:80", 403), ("../etc/passwd", None, 404)])
def test_other_hosts_and_files_are_refused(watch, path, host, status):
    with pytest.raises(urllib.error.HTTPError) as error:
        get(watch.address + path, **({"Host": host} if host else {}))
    assert error.value.code == status
    error.value.close()


def test_a_file_that_is_no_store_gets_a_sentence(watch):
    watch.store.write_bytes(b"no database" * 100)
    with pytest.raises(urllib.error.HTTPError) as error:
        get(watch.address)
    assert error.value.code == 503
    assert "not a store" in error.value.read().decode()


def connected(watch, count, **options):
    """Return clients that are connected at the same time and have not sent a request yet."""
    port = int(watch.address.rsplit(":", 1)[1].strip("/"))
    clients = []
    for _ in range(count):
        client = socket.socket()
        client.settimeout(60)
        for name, value in options.items():
            client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        client.connect(("127.0.0.1", port))
        clients.append(client)
    return clients


def ask(client, path):
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost:80\r\n\r\n".encode())


def everything(client):
    parts = []
    with closing(client), suppress(ConnectionResetError):
        while part := client.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def rendered(watch, monkeypatch):
    """How often the store has been read, and by which threads."""
    records, times = watch.records, []

    def counted():
        times.append(threading.current_thread())
        return records()

    monkeypatch.setattr(watch, "records", counted)
    return times


def test_many_clients_share_one_rendered_page(watch, rendered):
    with Store.write(watch.store) as store:
        store.add(seeds(2, "sgd"))
    before = threading.active_count()
    clients = connected(watch, 200)
    for client, path in zip(clients, itertools.cycle(("/", "/content")), strict=False):
        ask(client, path)
    assert threading.active_count() <= before + 1  # one that makes the page
    answers = [everything(client) for client in clients]
    assert all(answer.startswith(b"HTTP/1.1 200 ") and b"2 learners" in answer for answer in answers)
    assert len(set(answers)) == 2
    assert len(rendered) == 1


def test_the_page_is_made_again_when_the_store_changes(watch, rendered):
    with Store.write(watch.store) as store:
        for learners in (2, 3):
            store.add([record("sgd", seed=seed) for seed in range(learners)])
            clients = connected(watch, 20)
            for client in clients:
                ask(client, "/content")
            assert all(f"{learners} learners".encode() in everything(client) for client in clients)
    assert len(rendered) == 2


def test_clients_during_rendering_see_results_stored_by_then(watch, monkeypatch):
    records, begun, go_on, times = watch.records, threading.Event(), threading.Event(), []
    latest, asked = watch._latest, []

    def asking():
        asked.append(None)
        return latest()

    def slow():
        times.append(None)
        found = records()
        begun.set()
        assert go_on.wait(60)
        return found

    monkeypatch.setattr(watch, "_latest", asking)
    monkeypatch.setattr(watch, "records", slow)
    monkeypatch.setattr(watch, "news", map(str, itertools.count()).__next__)  # a store that changes all the time
    with Store.write(watch.store) as store:
        store.add(seeds(2, "sgd"))
        early, *late = connected(watch, 11)
        ask(early, "/content")
        assert begun.wait(60)
        store.add([record("sgd", seed=2)])
        for client in late:
            ask(client, "/content")
        wait_for(lambda: len(asked) == 11)
        go_on.set()
        assert b"2 learners" in everything(early)
        assert all(b"3 learners" in everything(client) for client in late)
    assert len(times) == 2


def test_pauses_are_proportional_to_rendering_time(watch, monkeypatch):
    records, times = watch.records, []

    def slow():
        begun = time.monotonic()
        time.sleep(0.1)
        times.append((begun, time.monotonic()))
        return records()

    monkeypatch.setattr(watch, "records", slow)
    monkeypatch.setattr(watch, "news", map(str, itertools.count()).__next__)  # a store that changes all the time
    for _ in range(3):
        get(f"{watch.address}content")
    assert len(times) == 3
    assert all(after[0] - end >= 4 * (end - begun) for (begun, end), after in itertools.pairwise(times))


def test_a_page_opened_between_renderings_is_the_last_one(watch, rendered):
    assert "There are no results yet" in get(watch.address)
    watch._rested = float("inf")
    with Store.write(watch.store) as store:
        store.add(seeds(2, "sgd"))
    page = get(watch.address)
    assert 'data-news=""' in page  # so that it polls for updates
    assert len(rendered) == 1


def test_slow_clients_are_disconnected_and_delay_no_others(watch, monkeypatch):
    monkeypatch.setattr(watch_module, "_PATIENCE_S", 2.0)
    length = 50_000_000  # more than the system buffers
    monkeypatch.setattr(watch_module, "content", lambda *_: "x" * length)
    talkers = connected(watch, 30)
    for client in talkers:
        client.sendall(b"GET / HTTP/1.1\r\nHo")  # without an end
    (reader,) = connected(watch, 1, SO_RCVBUF=4096)
    ask(reader, "/content")  # and does not read the answer
    assert get(f"{watch.address}news") == ""
    assert all(everything(client) == b"" for client in talkers)
    wait_for(lambda: watch._clients == 0)
    assert len(everything(reader)) < length


def test_errors_get_a_response(watch, monkeypatch):
    def fails():
        raise KeyError("step")

    monkeypatch.setattr(watch, "records", fails)
    with pytest.raises(urllib.error.HTTPError) as error:
        get(watch.address)
    assert error.value.code == 500
    assert error.value.read() == b"The page cannot be rendered (KeyError: 'step')."
    assert get(f"{watch.address}news") == ""


def test_the_page_reports_damage(watch):
    with Store.write(watch.store) as store:
        store.add(seeds(3, "sgd"))
        store._connection.execute("UPDATE runs SET seconds = 9 WHERE id = 2")
    with pytest.warns(DamagedStoreWarning):
        page = watch.page()
    assert "The store is damaged; the damaged part is not shown:</strong> row 2 is not as written." in page
    assert "2 learners" in page


def test_only_requests_to_read_are_answered(watch):
    for request, status in ((b"POST / HTTP/1.1\r\nHost: localhost:1", 405), (b"GET / HTTP/1.1", 403), (b"?", 403)):
        (client,) = connected(watch, 1)
        client.sendall(request + b"\r\n\r\n")
        assert everything(client).startswith(f"HTTP/1.1 {status} ".encode())
    (client,) = connected(watch, 1)
    with suppress(ConnectionError):
        client.sendall(b"GET /" + b"x" * 100_000)
    assert everything(client) == b""


def test_a_page_records_its_version_of_the_results(watch, open_page, monkeypatch):
    """Results stored between rendering and the first poll are shown as well."""
    records = watch.records

    def and_then_there_are_more():
        found = records()
        if not found:
            with Store.write(watch.store) as store:
                store.add(seeds(2, "sgd"))
        return found

    monkeypatch.setattr(watch, "records", and_then_there_are_more)
    page = open_page(watch.address)
    page.get_by_role("button", name="SGD", exact=True).wait_for(timeout=20_000)


def test_vanishing_files_are_not_a_change(watch, monkeypatch):
    monkeypatch.setattr(type(watch.store), "exists", lambda path: True)  # according to an older check
    assert watch.news() == ""


def test_the_open_page_outlives_a_store_that_cannot_be_read(watch, open_page):
    with Store.write(watch.store) as store:
        store.add(seeds(3, "sgd"))
    whole = watch.store.read_bytes()
    page = open_page(watch.address)
    news = page.locator("#news")
    news.filter(has_text="Live").wait_for(timeout=20_000)
    watch.store.write_bytes(b"no database" * 100)
    news.filter(has_text="not a store").wait_for(timeout=20_000)
    assert "3 learners" in page.locator("#page").inner_text()
    watch.store.write_bytes(whole)
    news.filter(has_text="Live").wait_for(timeout=20_000)


def test_a_port_in_use_gets_a_sentence(watch, tmp_path):
    port = int(watch.address.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(ValueError, match=f"port {port} cannot be used .*--port"):
        Watch(tmp_path / "other.db", port=port)


def test_the_open_page_updates_and_keeps_hidden_methods(watch, open_page):
    with Store.write(watch.store) as store:
        store.add([*seeds(3, "sgd", level=0.4), *seeds(3, "upgd", level=0.5)])
        page = open_page(watch.address)
        page.get_by_role("button", name="SGD", exact=True).click()
        store.add(seeds(3, "adamw", level=0.6))
        page.get_by_role("button", name="AdamW").wait_for(timeout=20_000)
        assert page.get_by_role("button", name="SGD", exact=True).get_attribute("aria-pressed") == "false"
        page.locator(".scatterlayer .trace").nth(3).wait_for(state="attached")
        assert page.locator(".scatterlayer .trace").count() == 4  # a line and a band for each of the other two
        assert {url.split("/")[2] for url in page.requests_made if url.startswith("http")} == {
            watch.address.split("/")[2]
        }
        assert page.complaints == []


def test_the_open_page_shows_the_progress(watch, open_page):
    page = open_page(watch.address)
    bar = page.locator("#sweep")
    assert bar.is_hidden()
    with Store.write(watch.store) as store:
        store.add(seeds(2, "sgd"))
    file = ProgressFile.beside(watch.store)
    file.path.write_text(json.dumps({"at": time.time(), "share": 0.256, "text": "1/4 jobs, 3 min 5 s left"}))
    bar.wait_for(state="visible", timeout=20_000)
    assert bar.inner_text() == "25%, 1/4 jobs, 3 min 5 s left."
    assert bar.locator("progress").evaluate("bar => bar.value") == pytest.approx(0.256)
    file.path.write_text(json.dumps({"at": time.time() - 600, "share": 0.5, "text": "2/4 jobs"}))
    bar.filter(has_text="No update from the sweep for 10 min; it may have been stopped.").wait_for(timeout=20_000)
    file.remove()
    bar.wait_for(state="hidden", timeout=20_000)
    assert page.complaints == []


def test_the_open_page_keeps_unfolded_tables_and_focus(watch, open_page):
    page = open_page(watch.address)
    with Store.write(watch.store) as store:
        store.add(seeds(2, "sgd"))
    commands = page.locator("summary", has_text="Commands")
    commands.click()
    commands.focus()
    with Store.write(watch.store) as store:
        store.add(seeds(2, "sgd", {"lr": 0.5}, diverged_at=15))  # two more things to unfold come before it
    page.locator("summary", has_text="All 2 settings").wait_for()
    assert page.locator("details[open] > summary").all_inner_texts() == ["Commands"]
    assert page.evaluate("document.activeElement.textContent") == "Commands"
    assert "Last update: " in page.locator("#news").inner_text()


def test_ctrl_c_ends_the_command_without_a_trace(tmp_path):
    with Store.write(tmp_path / "r.db") as store:
        store.add(seeds(1, "sgd"))
    command = [sys.executable, "-c", "from upgd.cli import main; main()", "watch", "r.db", "--no-browser"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = running.stdout.readline()
        address = next(word for word in line.split() if word.startswith("http"))
        assert "1 learner" in get(address)
        os.kill(running.pid, signal.SIGINT)
        rest, _ = running.communicate(timeout=30)
        assert "Traceback" not in rest
        assert running.returncode == 0
    finally:
        running.kill()
        running.wait()


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    from upgd.cli import main

    monkeypatch.chdir(tmp_path)
    with Store.write(tmp_path / "r.db") as store:
        store.add(seeds(1, "sgd"))
    with pytest.raises(SystemExit, match="0"):
        main(["report", "r.db", "-o", "page.html"])
    assert capsys.readouterr() == ("", "wrote page.html\n")
    assert "1 learner" in (tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="1"):
        main(["report", "not-there.db"])
    assert "there is no store not-there.db" in capsys.readouterr().err


def test_a_page_is_made_without_torch(tmp_path):
    with Store.write(tmp_path / "r.db") as store:
        store.add(seeds(2, "sgd"))
    code = "import sys; from upgd.report import write; write('r.db', 'page.html'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
