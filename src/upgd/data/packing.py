"""gzip and xz, unpacked within limits: of what comes out, and of the memory that it takes."""

import gzip
import io
import lzma
import zlib

from upgd.data.dataset import DataError

__all__ = ["RATIO", "is_packed", "most_unpacked", "peek", "unpack"]

#: What an xz file may ask for while it is unpacked; `xz -9` asks for 65 MiB.
XZ_MEMORY = 128 << 20

#: How many times its size a file may unpack to. Photographs and letters shrink to a fifth; bombs to a thousandth.
RATIO = 100
#: What any file may unpack to, however small it is: blank images shrink as much as bombs do.
_FREE = 64 << 20

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_CHUNK = 1 << 20


def is_packed(data: bytes) -> bool:
    """Whether these are the first bytes of a gzip or xz file."""
    return data.startswith((_GZIP, _XZ))


def peek(data: bytes, count: int) -> bytes:
    """The first ``count`` bytes of what is packed in ``data``; fewer if it is short or damaged."""
    try:
        if data.startswith(_GZIP):
            return zlib.decompressobj(wbits=31).decompress(data, count)
        if data.startswith(_XZ):
            return lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY).decompress(data, count)
    except (zlib.error, lzma.LZMAError):
        return b""
    return data[:count]


def most_unpacked(size: int) -> int:
    """The most bytes that a file of this size may unpack to."""
    return _FREE + RATIO * size


def unpack(data: bytes, name: str, limit: int) -> bytes:
    """All that is packed in ``data``, which must be ``limit`` bytes at most, and no bomb."""
    most = min(limit, most_unpacked(len(data)))
    if data.startswith(_GZIP):
        content = _unpack_gzip(data, name, most)
    elif data.startswith(_XZ):
        content = _unpack_xz(data, name, most)
    else:
        content = data
    if len(content) > most < limit:
        raise DataError(f"{name} unpacks to more than {RATIO} times its size, as no images do.")
    if len(content) > limit:
        raise DataError(f"{name} holds more than the {limit:,} bytes that it should.")
    return content


def _unpack_gzip(data: bytes, name: str, limit: int) -> bytes:
    content = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while len(content) <= limit and (chunk := file.read(min(_CHUNK, limit + 1 - len(content)))):
                content += chunk
    except EOFError:
        raise DataError(f"{name} is cut off: its gzip data has no end.") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{name} is damaged: {error}.") from None
    return bytes(content)


def _unpack_xz(data: bytes, name: str, limit: int) -> bytes:
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY)
    try:
        content = decompressor.decompress(data, limit + 1)
    except lzma.LZMAError as error:
        raise DataError(f"{name} is damaged or no xz file that unpacks in reasonable memory: {error}.") from None
    if len(content) <= limit and not decompressor.eof:
        raise DataError(f"{name} is cut off: its xz data has no end.")
    if decompressor.unused_data.strip(b"\0"):
        raise DataError(f"{name} is damaged: something follows the end of its xz data.")
    return content
