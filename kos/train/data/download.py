"""tinyshakespeare, downloaded once to the user's cache and checked by length and SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kos.errors import DataError
from kos.files import cache_folder, replace_file

NAME = "tinyshakespeare"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SIZE = 1_115_394
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SOCKET_SECONDS = 10.0


def tinyshakespeare() -> Path:
    """The path of the file, which is downloaded if the cache has no valid copy.

    DataError: no network, not the expected content, or a cache that cannot be used.
    """
    path = cache_folder() / f"{NAME}.txt"
    try:
        if not path.exists() or _fault(path.read_bytes()):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, _fetch())
    except OSError as error:
        raise DataError(f"--data {NAME}: expected a cache that can be written, got {error}") from None
    return path


def _fault(content: bytes) -> str | None:
    """The fault of ``content``, or None."""
    if len(content) != SIZE:
        return f"expected {SIZE} bytes, got {f'more than {SIZE}' if len(content) > SIZE else len(content)}"
    digest = hashlib.sha256(content).hexdigest()
    return None if digest == SHA256 else f"expected sha256 {SHA256}, got {digest}"


def _fetch() -> bytes:
    import urllib.request
    from http.client import HTTPException

    try:
        with urllib.request.urlopen(URL, timeout=SOCKET_SECONDS) as response:
            content = bytes(response.read(SIZE + 1))
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(
            f"--data {NAME}: expected to download it from {URL}, got {' '.join(str(error).split())}; "
            "without a network, give a text of your own by --data PATH"
        ) from None
    if fault := _fault(content):
        raise DataError(f"--data {NAME}: {fault} from {URL}")
    return content
