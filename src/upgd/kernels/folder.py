"""The folder of compiled kernels."""

import os
from pathlib import Path

__all__ = ["kernels"]


def kernels() -> Path:
    """Return the folder for generated and compiled kernels in the user's cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache", "upgd", "kernels")
