"""Files that appear whole or not at all, and where the user's cache is."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/kos``, or ``~/.cache/kos``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kos"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file to a temporary name, fsync it, and rename it.  A failure leaves what was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        temporary.write_bytes(content)
        sync(temporary)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
