"""Files that appear whole or must stay as they are, the user's cache, checks of output files, closed output pipes.

Also the palette of pictures.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import resource
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kos.errors import BackendUnavailable, InvalidArgument, install

PICTURES = (".png", ".svg")
PALETTE = ("#0b6fb8", "#c2410c", "#2f7d32", "#7c3aed", "#a16207", "#be185d", "#0e7490", "#6b3a1e", "#7b8794", "#1f2933")
"""The colours of all pictures of kos, in the order in which a picture uses them: dark enough for text on white."""
PALETTE_LIGHT = ("#7dbdec", "#f5b08a", "#94cc97")
"""The first three, light enough for black text: variants of what the dark ones show."""
_drafts = itertools.count()


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/kos``, or ``~/.cache/kos``: a path that is not absolute is ignored, as XDG demands."""
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


class OpenFile:
    """A file that is read at any place, by any thread, and must stay as it is.

    If another program changes it meanwhile, an OSError names it. It is not memory-mapped, because a mapped file that
    becomes shorter ends the process by SIGBUS, without a message.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._handle = path, _open(path)
        weakref.finalize(self, os.close, self._handle)
        self._size, self._time = self._state()

    def read(self, at: int, memory: memoryview) -> None:
        """Fill ``memory``, of bytes, with those from ``at`` on.  Raises OSError."""
        while memory:
            size, time = self._state()
            got = os.preadv(self._handle, [memory], at)
            if not got or (size, time) != (self._size, self._time):
                got_now = f"{size:,} bytes" if size != self._size else "one that was written to since"
                text = f"expected the file as it was opened, of {self._size:,} bytes, got {got_now}"
                raise OSError(errno.ESTALE, text, str(self.path))
            memory, at = memory[got:], at + got

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns


def _open(path: Path) -> int:
    """A handle to read a file; raises the soft limit of open files if that is reached."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE or not allow_files():
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def allow_files() -> bool:
    """Raise the soft limit of open files to the hard one.  Returns whether it was lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft != hard


def lacks_files(error: BaseException) -> bool:
    """Whether the error says that this process, or this host, has no file descriptor or memory for another socket."""
    return isinstance(error, OSError) and error.errno in (
        errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM
    )  # fmt: skip


def lack_of_files(error: OSError) -> str:
    """The text of an error about a lack of file descriptors.  It does not name the file that was to be opened."""
    text = os.strerror(error.errno or 0)
    if error.errno != errno.EMFILE:
        return text
    return f"{text} (the hard limit of this process, ulimit -Hn, is {resource.getrlimit(resource.RLIMIT_NOFILE)[1]:,})"


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
