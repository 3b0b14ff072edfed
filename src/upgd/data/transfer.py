"""Verified downloads that try several mirrors and resume after an interruption.

pooch verifies the checksum before it gives a file its final name, but it restarts interrupted downloads from the
beginning, and these files have up to half a gigabyte. It is therefore used with a custom downloader, which keeps received
data in a ``.part`` file and requests the rest with an HTTP range request. The rest may come from another mirror or at a
later time, because the checksum covers the whole file.
"""

import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from upgd.data.dataset import DataError
from upgd.data.sources import Download

__all__ = ["Progress", "download"]

#: Called with the file's name, the number of bytes received, and the total number of bytes.
Progress = Callable[[str, int, int], None]

#: Seconds without data after which a connection is considered dead.
TIMEOUT = 30.0
#: Number of times a mirror may disconnect, having made progress each time, and the pause before reconnecting.
ATTEMPTS, PAUSE = 50, 1.0
#: A mirror that sends fewer bytes than this in this many seconds is abandoned, which bounds the time per file.
LEAST, PATIENCE = 480 << 10, 60.0
_CHUNK = 1 << 15


class _Unusable(Exception):
    """The mirror cannot provide the file."""


def download(wanted: Download, target: Path, progress: Progress | None = None, mirror: str | None = None) -> str:
    """Download a file to the folder ``target`` unless it is already there.

    Args:
        wanted: The file.
        target: The folder. An interrupted download leaves ``<name>.part`` there and is resumed from it.
        progress: Called as data is received.
        mirror: URL of a folder with a file of that name; tried first.

    Returns:
        The URL that the file was downloaded from, without user name and password.
    """
    try:
        import pooch
    except ModuleNotFoundError:
        raise DataError("downloading needs pooch; run pip install 'upgd[run]'") from None

    pooch.get_logger().setLevel("WARNING")
    part = target / f"{wanted.name}.part"
    failures = []
    for url in _addresses(wanted, mirror):
        # The partial file may be corrupt, so a wrong checksum after a resumed download leads to a second, full download.
        for resumed in (True, False) if part.exists() else (False,):
            if not resumed:
                part.unlink(missing_ok=True)
            transfer = _Transfer(wanted, part, progress)
            try:
                pooch.retrieve(url, f"sha256:{wanted.sha256}", wanted.name, target, downloader=transfer)
                return _without_password(url)
            except _Unusable as error:
                failures.append(f"{_without_password(url)}: {error}")
                break
            except ValueError:
                failures.append(f"{_without_password(url)}: wrong checksum")
    raise DataError(f"{wanted.name} could not be downloaded ({'; '.join(failures)}){_hint(part)}")


def _addresses(wanted: Download, mirror: str | None) -> list[str]:
    if mirror is None:
        return list(wanted.mirrors)
    if not mirror.startswith(("http://", "https://")):
        shown = _without_password(mirror)
        raise DataError(f"mirror must be a URL that starts with http:// or https://, not {shown!r}")
    return [f"{mirror.rstrip('/')}/{wanted.name}", *wanted.mirrors]


def _without_password(address: str) -> str:
    """Remove credentials from a URL: https://me:secret@host/folder becomes https://host/folder."""
    return re.sub(r"^([A-Za-z][\w+.-]*://)?[^/?#]*@", r"\1", address)


def _hint(part: Path) -> str:
    if part.exists() and part.stat().st_size:
        return f"; {part.stat().st_size:,} bytes were kept, and the same command resumes from there"
    return "; try again later, or use local files with --from FOLDER"


class _Transfer:
    """A downloader for pooch that resumes interrupted downloads."""

    def __init__(self, wanted: Download, part: Path, progress: Progress | None) -> None:
        self._wanted, self._part, self._progress = wanted, part, progress

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        import requests
        from urllib3.exceptions import HTTPError

        trouble: Exception | None = None
        before = -1
        for _ in range(ATTEMPTS):
            here = self._here()
            if here >= self._wanted.size:
                break
            if here <= before:
                raise _Unusable(_reason(trouble)) from trouble
            if before >= 0:
                time.sleep(PAUSE)
            before = here
            try:
                self._continue(url)
            except (requests.RequestException, HTTPError) as error:
                trouble = error
        else:
            raise _Unusable(f"disconnected {ATTEMPTS} times")
        self._part.replace(output_file)

    def _here(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _continue(self, url: str) -> None:
        import requests

        here = self._here()
        headers = {"User-Agent": "upgd", "Accept-Encoding": "identity"}
        if here:
            headers["Range"] = f"bytes={here}-"

        def answer() -> Generator[Any, None, None]:
            """Yield the response, then its raw bytes; a .gz file served with "Content-Encoding: gzip" must stay packed."""
            with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
                yield response
                yield from response.raw.stream(_CHUNK, decode_content=False)

        with closing(_in_time(answer)) as pieces:
            response = next(pieces)
            if response.status_code == 206 and _range_start(response) == here:
                mode = "ab"
            elif response.status_code == 200:
                mode, here = "wb", 0
            else:
                raise _Unusable(f"responded {response.status_code} {response.reason}")
            self._receive(response, pieces, mode, here)

    def _receive(self, response: Any, chunks: Iterator[bytes], mode: str, here: int) -> None:
        size = self._wanted.size
        offered = response.headers.get("Content-Length", "")
        if offered.isdigit() and here + int(offered) != size:
            raise _Unusable(f"offers {here + int(offered):,} bytes instead of {size:,}")
        with self._part.open(mode) as file:
            for chunk in chunks:
                here += len(chunk)
                if here > size:
                    file.truncate(0)
                    raise _Unusable(f"sends more than the expected {size:,} bytes")
                file.write(chunk)
                if self._progress is not None:
                    self._progress(self._wanted.name, here, size)


def _in_time(answer: Callable[[], Generator[Any, None, None]]) -> Generator[Any, None, None]:
    """Yield the pieces of a server's response while it sends fast enough.

    A socket timeout restarts with every byte, and a read blocks until its buffer is full, so a server that sends one byte
    at a time could block for days. A thread therefore does the reading, and this function waits for it with a time limit.
    """
    pieces: queue.Queue[Any] = queue.Queue(maxsize=16)
    left = threading.Event()
    end = object()

    def read() -> None:
        last: Any = end
        try:
            with closing(answer()) as coming:
                for piece in coming:
                    pieces.put(piece)
                    if left.is_set():
                        return
        except Exception as error:
            last = error
        pieces.put(last)

    threading.Thread(target=read, name="upgd-download", daemon=True).start()
    came, until = 0, time.monotonic() + PATIENCE
    try:
        while True:
            try:
                piece = pieces.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                if came < LEAST:
                    raise _Unusable(f"sends less than {LEAST:,} bytes in {PATIENCE:g} seconds") from None
                came, until = 0, time.monotonic() + PATIENCE
                continue
            if piece is end:
                return
            if isinstance(piece, Exception):
                raise piece
            came += len(piece) if isinstance(piece, bytes) else 0
            yield piece
    finally:
        left.set()
        while not pieces.empty():  # otherwise the thread would block forever on a full queue
            pieces.get_nowait()


def _range_start(response: Any) -> int:
    """Return the start offset of a range response, from ``Content-Range: bytes 100-199/200``; −1 if there is none."""
    start = response.headers.get("Content-Range", "").removeprefix("bytes ").split("-")[0]
    return int(start) if start.isdigit() else -1


def _reason(trouble: Exception | None) -> str:
    if trouble is None:
        return "disconnected"
    import requests

    if isinstance(trouble, requests.Timeout) or "timed out" in str(trouble).lower():
        return f"no answer within {TIMEOUT:g} seconds"
    if isinstance(trouble, requests.ConnectionError):
        return "no connection"
    return "disconnected"
