"""A live report during a sweep, served on the local machine and refreshed automatically.

One thread handles all clients, and another renders the page once per change of the store rather than once per client, so
additional or slow clients cost only the bytes sent to them. During a sweep that writes continuously, larger stores are
rendered less often, so that rendering takes little processor time from the sweep.
"""

import asyncio
import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from upgd.experiments.execution.progress import ProgressFile
from upgd.report.page import content, page_around, plotly
from upgd.store import Record, Store, StoreError

__all__ = ["Watch"]

#: Limits on the clients waiting to be accepted and on the clients served at a time; others get an error and retry.
_BACKLOG = 256
_CLIENTS = 512

#: Minimum pause after rendering a page, as a multiple of the time it took.
_REST = 4.0

#: Seconds that a client has to send its request, and to receive each piece of the response.
_PATIENCE_S = 10.0
_PIECE = 64 * 1024
_LONGEST_REQUEST = 16 * 1024


@dataclass(frozen=True)
class _View:
    """One rendered state of the store.

    Attributes:
        begun: the time at which rendering started.
        news: the version of the store that it shows.
        page, content: the whole page, and the part of it that changes.
    """

    begun: float
    news: str
    page: bytes
    content: bytes


class Watch:
    """A web server for the report about a file of results. The file need not exist yet.

    Args:
        store: The file of results.
        port: The port; 0 selects a free one.
        problem: Restrict the report to this problem.

    Example:
        >>> watch = Watch("upgd.db")  # doctest: +SKIP
        >>> print(watch.address); watch.serve()  # doctest: +SKIP
    """

    def __init__(self, store: str | Path, port: int = 0, problem: str | None = None) -> None:
        self.store = Path(store)
        self.problem = problem
        try:
            self._socket = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"port {port} cannot be used ({error}); choose another with --port, or omit --port"
            ) from error
        self._address = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        self._stopped = threading.Event()
        self._clients = 0
        self._damage: list[str] = []
        self._view: _View | None = None
        self._rendering = asyncio.Lock()
        self._rested = 0.0

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return self._address

    def serve(self) -> None:
        """Serve until :meth:`stop` is called or Ctrl-C is pressed."""
        try:
            asyncio.run(self._serve())
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Stop :meth:`serve`, from another thread."""
        self._stopped.set()

    def start(self) -> threading.Thread:
        """Serve in a background thread."""
        thread = threading.Thread(target=self.serve, name="upgd-watch", daemon=True)
        thread.start()
        return thread

    def records(self) -> list[Record]:
        """Return the finished learners; empty if the store does not exist yet."""
        self._damage = []
        if not self.store.exists():
            return []
        with Store.read(self.store) as store:
            self._damage = store.damage
            return store.records(problem=self.problem)

    def page(self) -> str:
        """Render the whole page. Results stored during rendering count as news."""
        return self._render().page.decode()

    def news(self) -> str:
        """Return a text that changes whenever the store does."""
        marks = []
        for path in (self.store, Path(f"{self.store}-wal")):
            with suppress(FileNotFoundError):  # the -wal file is removed when its last writer closes
                mark = path.stat()
                if mark.st_size:  # readers may leave an empty file
                    marks.append(f"{mark.st_mtime_ns}/{mark.st_size}")
        return " ".join(marks)

    def progress(self) -> str:
        """Return the progress of the sweep as JSON, see :meth:`ProgressFile.read`; null if no sweep is running."""
        return json.dumps(ProgressFile.beside(self.store).read())

    def _render(self) -> _View:
        begun, news = time.monotonic(), self.news()
        records = self.records()
        inside = content(records, self.store, self._damage)
        return _View(begun, news, page_around(inside, self.store, news=news).encode(), inside.encode())

    async def _latest(self) -> _View:
        """Return a view of the store as of this call. Concurrent calls share one view."""
        asked = time.monotonic()
        async with self._rendering:
            if self._view is None or (self._view.begun < asked and self._view.news != self.news()):
                await asyncio.sleep(self._rested - time.monotonic())
                begun = time.monotonic()
                try:
                    self._view = await _in_thread(self._render)
                finally:
                    now = time.monotonic()
                    self._rested = now + _REST * (now - begun)
            return self._view

    async def _at_once(self) -> _View:
        """Return the last view if a new one would have to wait; the page then polls for updates itself."""
        return self._view if self._view and time.monotonic() < self._rested else await self._latest()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._talk, sock=self._socket, backlog=_BACKLOG, limit=_LONGEST_REQUEST)
        try:
            while not self._stopped.is_set():
                await asyncio.sleep(0.2)
        finally:
            server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, with a time limit."""
        self._clients += 1
        writer.transport.set_write_buffer_limits(high=0)  # so that drain() waits for the last bytes
        try:
            async with asyncio.timeout(_PATIENCE_S):
                request = await reader.readuntil(b"\r\n\r\n")
            status, kind, body = await self._answer(request.decode("latin-1"))
            writer.write(_head(status, kind, len(body)))
            for at in range(0, max(len(body), 1), _PIECE):
                writer.write(memoryview(body)[at : at + _PIECE])
                async with asyncio.timeout(_PATIENCE_S):
                    await writer.drain()
            writer.close()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # the client is too slow, disconnected, or sent no request
        finally:
            self._clients -= 1

    async def _answer(self, request: str) -> tuple[HTTPStatus, str, bytes]:
        first, *headers = request.split("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        named = [line.partition(":")[2].strip() for line in headers if line.lower().startswith("host:")]
        # Protects against DNS rebinding: a page of another site must not read results through its own host name.
        if [name.rpartition(":")[0] for name in named] not in (["127.0.0.1"], ["localhost"]):
            return HTTPStatus.FORBIDDEN, "text/plain", b"Open this page at 127.0.0.1 or localhost."
        if method != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"This server only supports GET."
        if self._clients > _CLIENTS:
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"Too many clients; try again."
        try:
            if path == "/":
                return HTTPStatus.OK, "text/html", (await self._at_once()).page
            if path == "/content":
                return HTTPStatus.OK, "text/html", (await self._latest()).content
            if path == "/news":
                return HTTPStatus.OK, "text/plain", self.news().encode()
            if path == "/progress":
                return HTTPStatus.OK, "application/json", self.progress().encode()
            if path == "/plotly.js":
                return HTTPStatus.OK, "text/javascript", plotly().encode()
        except StoreError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error).encode()
        except Exception as error:  # send the error to the client and keep serving
            text = f"The page cannot be rendered ({type(error).__name__}: {error})."
            return HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", text.encode(errors="replace")
        return HTTPStatus.NOT_FOUND, "text/plain", b"Not found; the results are at /."


def _head(status: HTTPStatus, kind: str, length: int) -> bytes:
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {kind}; charset=utf-8",
        f"Content-Length: {length}",
        "X-Content-Type-Options: nosniff",
        f"Cache-Control: {'max-age=3600' if kind == 'text/javascript' else 'no-store'}",
        "Connection: close",
    )
    return "\r\n".join([*lines, "", ""]).encode()


async def _in_thread(work: Callable[[], _View]) -> _View:
    """Run the work in a daemon thread; unlike asyncio's threads, it does not delay Ctrl-C."""
    future: concurrent.futures.Future[_View] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="upgd-watch-page", daemon=True).start()
    return await asyncio.wrap_future(future)
