"""Exceptions of stores, and readable messages for SQLite's errors."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SQLITE_ERRORS", "DamagedStoreWarning", "StoreError", "explained", "is_damage"]


class StoreError(OSError):
    """The file of results cannot be used; the message names the remedy."""


class DamagedStoreWarning(UserWarning):
    """Part of a store is damaged and was skipped."""


#: Exceptions that sqlite3 raises. A damaged length can request more memory than there is, and a message that quotes a damaged
#: schema may not be valid text.
SQLITE_ERRORS = (sqlite3.Error, MemoryError, UnicodeDecodeError)


@contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Context manager that explains SQLite's errors in one sentence."""
    try:
        yield
    except SQLITE_ERRORS as error:
        name = getattr(error, "sqlite_errorname", "")
        raise StoreError(_reason(str(path), name, error)) from error


def _reason(path: str, name: str, error: Exception) -> str:
    if name.startswith("SQLITE_BUSY") or name.startswith("SQLITE_LOCKED"):
        return f"another process is writing to {path}; wait for it, stop it, or choose another file"
    if name == "SQLITE_FULL":
        return f"no space is left for {path}; finished results are kept: free some space and run the same command again"
    if is_damage(error):
        return (
            f"{path} is damaged or not a store ({error}); restore it from a copy, or save the readable part with "
            f"`upgd store repair {path} NEW.db`"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
        return f"{path} cannot be opened ({error}); check the permissions of file and folder, or choose another file"
    return f"{path} cannot be used ({error}); finished results are kept"


def is_damage(error: Exception) -> bool:
    named = getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
    return named or isinstance(error, UnicodeDecodeError | MemoryError)
