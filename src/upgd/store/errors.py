"""What can be wrong with a file of results, and SQLite's errors in words."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SQLITE_ERRORS", "DamagedStoreWarning", "StoreError", "explained", "is_damage"]


class StoreError(OSError):
    """Something is wrong with the file of results; the message says what to do."""


class DamagedStoreWarning(UserWarning):
    """Part of a store is not as it was written, and is left out of what was read."""


#: What the module sqlite3 raises. A damaged length asks for more memory than there is; and a message that quotes a damaged
#: schema may be no text.
SQLITE_ERRORS = (sqlite3.Error, MemoryError, UnicodeDecodeError)


@contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Say in one sentence what SQLite's errors mean for the user."""
    try:
        yield
    except SQLITE_ERRORS as error:
        name = getattr(error, "sqlite_errorname", "")
        raise StoreError(_reason(str(path), name, error)) from error


def _reason(path: str, name: str, error: Exception) -> str:
    if name.startswith("SQLITE_BUSY") or name.startswith("SQLITE_LOCKED"):
        return f"another process is writing to {path}; wait for it, stop it, or choose another file"
    if name == "SQLITE_FULL":
        return f"no space is left for {path}; what was finished is kept: make room and run the same again"
    if is_damage(error):
        return (
            f"{path} is damaged or no store ({error}); put a copy in its place, or save what can be read with "
            f"`upgd store repair {path} NEW.db`"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
        return f"{path} cannot be opened ({error}); check the permissions of file and folder, or choose another file"
    return f"{path} cannot be used ({error}); what was finished is kept"


def is_damage(error: Exception) -> bool:
    named = getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
    return named or isinstance(error, UnicodeDecodeError | MemoryError)
