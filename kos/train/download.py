"""Public texts that are downloaded once to the user's cache and checked by length and SHA-256."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from kos.errors import DataError
from kos.files import cache_folder, replace_file

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

    def fault(self, content: bytes) -> str | None:
        """What is wrong with ``content``, if anything."""
        if len(content) != self.size:
            got = f"more than {self.size}" if len(content) > self.size else len(content)
            return f"expected {self.size} bytes, got {got}"
        digest = hashlib.sha256(content).hexdigest()
        return None if digest == self.sha256 else f"expected sha256 {self.sha256}, got {digest}"

    def is_at(self, path: Path) -> bool:
        return path.exists() and self.fault(path.read_bytes()) is None


TINYSHAKESPEARE = Download(
    name="tinyshakespeare",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    variable="KOS_TINYSHAKESPEARE_URL",
    size=1_115_394,
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)


def cached(download: Download, folder: Path | None = None) -> Path:
    """The path of the file, which is downloaded if the cache has no good one.

    Processes of one host take turns: the first downloads, the others find its file.

    Raises:
        DataError: no network, not the expected content, or a cache that cannot be used.
    """
    folder = folder or cache_folder()
    path = folder / f"{download.name}.txt"
    try:
        if not download.is_at(path):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{download.name}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not download.is_at(path):
                    replace_file(path, _fetch(download))
    except OSError as error:
        raise DataError(f"--data {download.name}: expected a cache that can be written, got {error}") from None
    return path


def _fetch(download: Download) -> bytes:
    url = os.environ.get(download.variable) or download.url
    deadline = time.monotonic() + TOTAL_SECONDS
    content = b""
    try:
        with urllib.request.urlopen(url, timeout=SOCKET_SECONDS) as response:
            while len(content) <= download.size and (chunk := response.read1(CHUNK)):
                content += chunk
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(content)} bytes after {TOTAL_SECONDS:g} s")
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(
            f"--data {download.name}: expected to download it from {url}, got {' '.join(str(error).split())}; "
            "without a network, give a text of your own by --data PATH"
        ) from None
    if fault := download.fault(content):
        raise DataError(f"--data {download.name}: {fault} from {url}")
    return content
