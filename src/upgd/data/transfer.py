"""Downloads that are verified, try one mirror after the other, and continue where they were broken off.

pooch checks the checksum and gives a file its name only after that. But pooch begins every download anew, and these files
have up to half a gigabyte; so it gets a downloader of our own, which keeps what came in a ``.part`` file and asks for the
rest with an HTTP range request. It does not matter that the rest may come from another mirror, or a day later: the checksum
of the whole decides.
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

#: Called with the file's name, the bytes that are here, and the bytes in all.
Progress = Callable[[str, int, int], None]

#: Seconds without a single byte after which a connection counts as dead.
TIMEOUT = 30.0
#: How often a mirror may break off, each time a little further on, and how long to wait before asking it again.
ATTEMPTS, PAUSE = 50, 1.0
#: A mirror that sends less than this many bytes in this many seconds is left. So no file takes longer than its size says.
LEAST, PATIENCE = 480 << 10, 60.0
_CHUNK = 1 << 15


class _Unusable(Exception):
    """This mirror does not have the file, whatever we do."""


def download(wanted: Download, target: Path, progress: Progress | None = None, mirror: str | None = None) -> str:
    """Get a file into the folder ``target`` unless it is there already.

    Args:
        wanted: The file.
        target: The folder; a download that was broken off leaves ``<name>.part`` there and continues from it.
        progress: Told about the bytes as they come.
        mirror: The address of a web folder with a file of that name, to be tried first.

    Returns:
        The address that the file came from, without the user and the password that it may have.
    """
    try:
        import pooch
    except ModuleNotFoundError:
        raise DataError("downloading needs pooch: pip install 'upgd[run]'.") from None

    pooch.get_logger().setLevel("WARNING")
    part = target / f"{wanted.name}.part"
    failures = []
    for url in _addresses(wanted, mirror):
        # What an earlier attempt left may be the fault: so a wrong checksum after a resumed download means to try anew.
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
                failures.append(f"{_without_password(url)}: the checksum of what came is wrong")
    raise DataError(f"{wanted.name} could not be downloaded ({'; '.join(failures)}){_hint(part)}")


def _addresses(wanted: Download, mirror: str | None) -> list[str]:
    if mirror is None:
        return list(wanted.mirrors)
    if not mirror.startswith(("http://", "https://")):
        shown = _without_password(mirror)
        raise DataError(f"mirror must be an address that begins with http:// or https://, not {shown!r}.")
    return [f"{mirror.rstrip('/')}/{wanted.name}", *wanted.mirrors]


def _without_password(address: str) -> str:
    """An address that may be shown and kept: https://me:secret@host/folder becomes https://host/folder."""
    return re.sub(r"^([A-Za-z][\w+.-]*://)?[^/?#]*@", r"\1", address)


def _hint(part: Path) -> str:
    if part.exists() and part.stat().st_size:
        return f"; {part.stat().st_size:,} bytes are kept and the same command continues from there."
    return "; try again later, or take files that you have with --from FOLDER."


class _Transfer:
    """A downloader for pooch that continues a broken-off download."""

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
            raise _Unusable(f"it broke off {ATTEMPTS} times")
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
            """The response, and then its bytes as they are stored: a server that marks a .gz file as "Content-Encoding: gzip"
            must not get it unpacked."""
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
                raise _Unusable(f"it answers {response.status_code} {response.reason}")
            self._receive(response, pieces, mode, here)

    def _receive(self, response: Any, chunks: Iterator[bytes], mode: str, here: int) -> None:
        size = self._wanted.size
        offered = response.headers.get("Content-Length", "")
        if offered.isdigit() and here + int(offered) != size:
            raise _Unusable(f"it offers {here + int(offered):,} bytes instead of {size:,}")
        with self._part.open(mode) as file:
            for chunk in chunks:
                here += len(chunk)
                if here > size:
                    file.truncate(0)
                    raise _Unusable(f"it sends more than the {size:,} bytes that the file has")
                file.write(chunk)
                if self._progress is not None:
                    self._progress(self._wanted.name, here, size)


def _in_time(answer: Callable[[], Generator[Any, None, None]]) -> Generator[Any, None, None]:
    """What a server answers, piece by piece, as long as it comes fast enough.

    A timeout of a socket begins anew with every byte, and a read waits until its buffer is full: a server that sends a byte
    now and then would hold it up for days. So a thread reads, and we wait for it as long as we have patience.
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
                    raise _Unusable(f"it sends less than {LEAST:,} bytes in {PATIENCE:g} seconds") from None
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
        while not pieces.empty():  # or the thread would wait for room, for ever
            pieces.get_nowait()


def _range_start(response: Any) -> int:
    """Where the answer to a range request begins, from ``Content-Range: bytes 100-199/200``."""
    start = response.headers.get("Content-Range", "").removeprefix("bytes ").split("-")[0]
    return int(start) if start.isdigit() else -1


def _reason(trouble: Exception | None) -> str:
    if trouble is None:
        return "it breaks off"
    import requests

    if isinstance(trouble, requests.Timeout) or "timed out" in str(trouble).lower():
        return f"no answer within {TIMEOUT:g} seconds"
    if isinstance(trouble, requests.ConnectionError):
        return "no connection"
    return "it breaks off"
