"""Where compiled kernels are kept between processes."""

import os
from pathlib import Path

__all__ = ["kernels"]


def kernels() -> Path:
    """The folder for generated and compiled kernels in the user's cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache", "upgd", "kernels")
