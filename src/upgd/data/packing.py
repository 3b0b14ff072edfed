"""Unpack gzip and xz data, with limits on the output size and on memory."""

import gzip
import io
import lzma
import zlib

from upgd.data.dataset import DataError

__all__ = ["RATIO", "is_packed", "most_unpacked", "peek", "unpack"]

#: Memory limit for unpacking xz data; `xz -9` requires 65 MiB.
XZ_MEMORY = 128 << 20

#: Limit on the compression ratio. Images compress to about a fifth, decompression bombs to about a thousandth.
RATIO = 100
#: Size that any file may unpack to, regardless of the ratio: blank images compress as well as bombs.
_FREE = 64 << 20

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_CHUNK = 1 << 20


def is_packed(data: bytes) -> bool:
    """Return whether the data starts like a gzip or xz file."""
    return data.startswith((_GZIP, _XZ))


def peek(data: bytes, count: int) -> bytes:
    """Return the first ``count`` unpacked bytes of ``data``; fewer if it is short or damaged."""
    try:
        if data.startswith(_GZIP):
            return zlib.decompressobj(wbits=31).decompress(data, count)
        if data.startswith(_XZ):
            return lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY).decompress(data, count)
    except (zlib.error, lzma.LZMAError):
        return b""
    return data[:count]


def most_unpacked(size: int) -> int:
    """Return the maximum number of bytes that a file of this size may unpack to."""
    return _FREE + RATIO * size


def unpack(data: bytes, name: str, limit: int) -> bytes:
    """Unpack ``data``; raise DataError if the result exceeds ``limit`` bytes or the maximum compression ratio."""
    most = min(limit, most_unpacked(len(data)))
    if data.startswith(_GZIP):
        content = _unpack_gzip(data, name, most)
    elif data.startswith(_XZ):
        content = _unpack_xz(data, name, most)
    else:
        content = data
    if len(content) > most < limit:
        raise DataError(f"{name} unpacks to more than {RATIO} times its size, unlike any image data")
    if len(content) > limit:
        raise DataError(f"{name} contains more than the expected {limit:,} bytes")
    return content


def _unpack_gzip(data: bytes, name: str, limit: int) -> bytes:
    content = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while len(content) <= limit and (chunk := file.read(min(_CHUNK, limit + 1 - len(content)))):
                content += chunk
    except EOFError:
        raise DataError(f"{name} is truncated: its gzip data has no end") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{name} is damaged: {error}") from None
    return bytes(content)


def _unpack_xz(data: bytes, name: str, limit: int) -> bytes:
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY)
    try:
        content = decompressor.decompress(data, limit + 1)
    except lzma.LZMAError as error:
        raise DataError(f"{name} is damaged, or not an xz file within the memory limit: {error}") from None
    if len(content) <= limit and not decompressor.eof:
        raise DataError(f"{name} is truncated: its xz data has no end")
    if decompressor.unused_data.strip(b"\0"):
        raise DataError(f"{name} is damaged: there is data after the end of its xz stream")
    return content
