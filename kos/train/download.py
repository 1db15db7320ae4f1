"""Public texts that are downloaded once to the user's cache and checked by length and SHA-256."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from kos.errors import DataError

CHUNK = 1 << 16
SOCKET_SECONDS = 10.0
TOTAL_SECONDS = 120.0


@dataclass(frozen=True)
class Download:
    """A file and what it must be; the environment variable ``variable`` overrides ``url``."""

    name: str
    url: str
    variable: str
    size: int
    sha256: str


TINYSHAKESPEARE = Download(
    name="tinyshakespeare",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    variable="KOS_TINYSHAKESPEARE_URL",
    size=1_115_394,
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/kos``, or ``~/.cache/kos``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kos"


def cached(download: Download, folder: Path | None = None) -> Path:
    """The path of the file, which is downloaded if the cache has no good one.

    Processes of one host take turns: the first downloads, the others find its file.  The file appears
    under its name only when it is whole and right.

    Raises:
        DataError: no network, not the expected content, or a cache that cannot be written.
    """
    folder = folder or cache_folder()
    path = folder / f"{download.name}.txt"
    if _is_good(path, download):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{download.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_good(path, download):
                _store(path, _fetch(download))
    except OSError as error:
        raise DataError(
            f"--data {download.name}: expected a cache that can be written, got {error}"
        ) from None
    return path


def _is_good(path: Path, download: Download) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) == download.size and hashlib.sha256(content).hexdigest() == download.sha256


def _store(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _fetch(download: Download) -> bytes:
    url = os.environ.get(download.variable) or download.url
    deadline = time.monotonic() + TOTAL_SECONDS
    content = bytearray()
    try:
        with urllib.request.urlopen(url, timeout=SOCKET_SECONDS) as response:
            while len(content) <= download.size and (chunk := response.read1(CHUNK)):
                content += chunk
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(content)} bytes after {TOTAL_SECONDS:g} s")
    except (OSError, HTTPException, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", "") or error or type(error).__name__).split())
        code = f"{error.code} " if isinstance(error, urllib.error.HTTPError) else ""
        raise DataError(
            f"--data {download.name}: expected to download it from {url}, got {code}{reason}; "
            "without a network, give a text of your own by --data PATH"
        ) from None
    if len(content) != download.size:
        size = f"more than {download.size}" if len(content) > download.size else str(len(content))
        raise DataError(f"--data {download.name}: expected {download.size} bytes from {url}, got {size}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != download.sha256:
        raise DataError(f"--data {download.name}: expected sha256 {download.sha256} from {url}, got {digest}")
    return bytes(content)
