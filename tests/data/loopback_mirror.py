"""A local web server that simulates mirrors."""

import base64
import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Mirror:
    """A web server with one folder per kind of behaviour: ``/<behaviour>/<file>``."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.release = threading.Event()
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _, behaviour, name = self.path.split("/")
                mirror.requests.append((behaviour, self.headers.get("Range")))
                content = mirror.files.get(name)
                getattr(mirror, "do_" + behaviour.replace("-", "_"))(self, content)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, behaviour: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{behaviour}/"

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    @staticmethod
    def _head(handler, content: bytes, start: int = 0, **headers: str) -> None:
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.send_header("Content-Length", str(len(content) - start))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()

    @staticmethod
    def _start(handler) -> int:
        wanted = handler.headers.get("Range")
        return int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0

    def do_ok(self, handler, content: bytes) -> None:
        start = self._start(handler)
        self._head(handler, content, start)
        handler.wfile.write(content[start:])

    def do_missing(self, handler, content: bytes) -> None:
        handler.send_error(404)

    def do_broken(self, handler, content: bytes) -> None:
        handler.send_error(503)

    def do_wrong(self, handler, content: bytes) -> None:
        self.do_ok(handler, bytes(len(content)))

    def do_half(self, handler, content: bytes) -> None:
        """Disconnects after half of the requested bytes."""
        start = self._start(handler)
        self._head(handler, content, start)
        handler.wfile.write(content[start : start + (len(content) - start + 1) // 2])

    def do_half_then_gone(self, handler, content: bytes) -> None:
        """Disconnects in the middle and does not recover."""
        if self._start(handler):
            handler.send_error(404)
        else:
            self.do_half(handler, content)

    def do_deaf(self, handler, content: bytes) -> None:
        """Does not support range requests."""
        self._head(handler, content)
        handler.wfile.write(content)

    def do_slow(self, handler, content: bytes) -> None:
        start = self._start(handler)
        self._head(handler, content, start)
        for k in range(start, len(content), 4096):
            handler.wfile.write(content[k : k + 4096])
            time.sleep(0.002)

    def do_stalled(self, handler, content: bytes) -> None:
        """Sends a few bytes and then nothing, with the connection open."""
        start = self._start(handler)
        self._head(handler, content, start)
        handler.wfile.write(content[start : start + 40_000])
        self.release.wait(30)

    def do_drip(self, handler, content: bytes) -> None:
        """Sends a byte from time to time, so that no read of a socket times out."""
        self._head(handler, content, self._start(handler))
        self._drip(handler, content[self._start(handler) :])

    def do_drip_headers(self, handler, content: bytes) -> None:
        """The same, in the headers."""
        self._drip(handler, b"HTTP/1.0 200 OK\r\nServer: " + b"x" * 60_000)

    def _drip(self, handler, content: bytes) -> None:
        with contextlib.suppress(OSError):
            for k in range(len(content)):
                handler.wfile.write(content[k : k + 1])
                handler.wfile.flush()
                if self.release.wait(0.02):
                    return

    def do_secret(self, handler, content: bytes) -> None:
        """Serves the file only with the password."""
        expected = "Basic " + base64.b64encode(b"me:secret").decode()
        if handler.headers.get("Authorization") == expected:
            self.do_ok(handler, content)
        else:
            handler.send_error(401)

    def do_portal(self, handler, content: bytes) -> None:
        """Answers every request with an HTML page."""
        self._head(handler, b"<html>Please log in</html>")
        handler.wfile.write(b"<html>Please log in</html>")

    def do_endless(self, handler, content: bytes) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not self.release.is_set():
                handler.wfile.write(bytes(1 << 16))
        except OSError:
            pass

    def do_encoded(self, handler, content: bytes) -> None:
        """Serves a .gz file with ``Content-Encoding: gzip``, as some servers do."""
        self._head(handler, content, Content_Encoding="gzip")
        handler.wfile.write(content)
