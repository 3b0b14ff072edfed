"""Turn the source of a kernel into a module.

numba stores compiled code next to the source file, and Triton reads the source of its kernels, so the text is written to the
package's cache folder, under its digest, where later processes find it.
"""

import functools
import importlib.util
import os
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from upgd.kernels.folder import kernels

__all__ = ["module_of"]


@functools.cache
def module_of(text: str) -> ModuleType:
    """Return the module with this source, cached on disk if a folder is writable."""
    digest = sha256(text.encode()).hexdigest()[:24]
    path = _written(f"rule_{digest}.py", text)
    spec = importlib.util.spec_from_file_location(f"upgd_kernel_{digest}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _written(name: str, text: str) -> Path:
    for find in (_in_cache, _temporary):
        try:
            path = find() / name
            if not path.exists() or path.read_text() != text:  # never execute a file with other content
                with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
                    file.write(text)
                os.replace(file.name, path)
            return path
        except OSError:
            continue
    raise OSError("compiled kernels cannot be written to disk; set XDG_CACHE_HOME to a writable folder")


def _in_cache() -> Path:
    folder = kernels()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _temporary() -> Path:
    """Return a folder of this process, for when the cache cannot be written; it is created on first use."""
    return Path(tempfile.mkdtemp(prefix="upgd-kernels-"))
