"""The page while a sweep runs: served on this machine alone, refreshed by itself."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from upgd.experiments.progress import ProgressFile
from upgd.report.page import content, plotly, render
from upgd.store import Record, Store, StoreError

__all__ = ["Watch"]


class Watch:
    """A server of the page about a file of results, which need not be there yet.

    Args:
        store: the file of results.
        port: where; 0 takes any that is free.
        problem: only the results of this problem.

    Example:
        >>> watch = Watch("upgd.db")  # doctest: +SKIP
        >>> print(watch.address); watch.serve()  # doctest: +SKIP
    """

    def __init__(self, store: str | Path, port: int = 0, problem: str | None = None) -> None:
        self.store = Path(store)
        self.problem = problem
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"port {port} cannot be used ({error}); choose another with --port, or leave it out"
            ) from error
        self._server.daemon_threads = True

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def serve(self) -> None:
        """Answer until :meth:`stop` is called, or Ctrl-C."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()

    def stop(self) -> None:
        """End :meth:`serve`, from another thread."""
        self._server.shutdown()

    def start(self) -> threading.Thread:
        """Serve in a thread of its own."""
        thread = threading.Thread(target=self.serve, name="upgd-watch", daemon=True)
        thread.start()
        return thread

    def records(self) -> list[Record]:
        """What has been finished so far; a store that is not there yet has nothing."""
        if not self.store.exists():
            return []
        with Store.read(self.store) as store:
            return store.records(problem=self.problem)

    def page(self) -> str:
        """The whole page. What is stored while it is being made is news."""
        news = self.news()
        return render(self.records(), self.store, news=news)

    def news(self) -> str:
        """A text that is another one when there is something new."""
        marks = []
        for path in (self.store, Path(f"{self.store}-wal")):
            with suppress(FileNotFoundError):  # a writer that ends takes the second away
                mark = path.stat()
                marks.append(f"{mark.st_mtime_ns}/{mark.st_size}")
        return " ".join(marks)

    def progress(self) -> str:
        """How far the sweep is, as JSON: see :meth:`ProgressFile.read`; null where none runs."""
        return json.dumps(ProgressFile.beside(self.store).read())


def _handler(watch: Watch) -> type[BaseHTTPRequestHandler]:
    pages: dict[str, tuple[str, Callable[[], str]]] = {
        "/": ("text/html", watch.page),
        "/content": ("text/html", lambda: content(watch.records(), watch.store)),
        "/news": ("text/plain", watch.news),
        "/progress": ("application/json", watch.progress),
        "/plotly.js": ("text/javascript", plotly),
    }

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "upgd", ""

        def do_GET(self) -> None:
            # Another site's page must not read results by giving this machine a name of its own.
            if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                return self._answer(403, "text/plain", "Open this page at 127.0.0.1 or localhost.")
            kind, page = pages.get(self.path.partition("?")[0], ("", None))
            if page is None:
                return self._answer(404, "text/plain", "There is no such page; the results are at /.")
            try:
                return self._answer(200, kind, page())
            except StoreError as error:
                return self._answer(503, "text/plain", str(error))

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "max-age=3600" if kind == "text/javascript" else "no-store")
            self.end_headers()
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the reader has gone

        def log_message(self, *_: Any) -> None:
            """Nobody wants a line for every look."""

    return Handler
