"""Files that appear whole or not at all, the user's cache, checks of output files, and closed output pipes."""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kos.errors import BackendUnavailable, InvalidArgument, install

PICTURES = (".png", ".svg")
_drafts = itertools.count()


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/kos``, or ``~/.cache/kos``: a path that is not absolute counts for none, as XDG wants it."""
    named = environ.get("XDG_CACHE_HOME", "")
    home = Path(environ.get("HOME") or Path.home())
    return (Path(named) if os.path.isabs(named) else home / ".cache") / "kos"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file to a temporary name, fsync it, and rename it.  A failure leaves the former file."""
    # A name of its own and no lock: a signal may ask for the same file in the midst of this.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_drafts)}.tmp")
    folder = os.open(path.parent, os.O_RDONLY)  # who sees the file may rename the folder at once
    try:
        temporary.write_bytes(content)
        sync(temporary)
        os.replace(temporary, path)
        os.fsync(folder)
    finally:
        os.close(folder)
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def printing() -> Iterator[None]:
    """Print the output of a command within the block, and flush it at the end.

    A character that the output cannot encode is replaced.  A reader that closes the pipe early, such as ``head``, is no
    error.  If the output cannot be written, the process ends with one line on stderr and exit status 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # it flushes what was printed before; the flush at the end fails too
            sys.stdout.reconfigure(errors="replace")
    try:
        yield
        if sys.stdout is not None:  # else it was closed before
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in its buffer
        if not isinstance(error, BrokenPipeError):
            print(f"kos: error: expected to write the output, got {error}", file=sys.stderr)
            raise SystemExit(2) from None


def check_writable(path: Path) -> None:
    """Raise InvalidArgument, saying why, where a file cannot be written; its folder must be there."""
    folder = path.absolute().parent
    if (taken := os.path.isdir(path)) or not os.path.isdir(folder):
        raise InvalidArgument(f"{path}: expected a file to write, got {'a' if taken else 'no such'} folder")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise InvalidArgument(f"{path}: expected a file to write, got no permission to")


def check_picture(path: Path) -> None:
    """Raise where ``matplotlib`` cannot write a picture: BackendUnavailable without it, else InvalidArgument."""
    if path.suffix not in PICTURES:
        raise InvalidArgument(f"{path}: expected a picture's name that ends in {' or '.join(PICTURES)}")
    check_writable(path)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(f"a picture needs matplotlib: {install('plot')}") from error
