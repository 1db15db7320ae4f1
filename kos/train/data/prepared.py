"""The result of reading data, kept beside the data: computed once on each machine, used by all later ranks and runs.

A folder under ``.kos`` beside the files (where that cannot be written, in the user's cache) is good as long as the
files have the sizes and times of change that they had.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kos.files import cache_folder, sync

FORMAT = 13
ABOUT = "about.json"
LEAST = 1 << 20  # bytes of files; less is read again faster than it is looked up


@contextmanager
def prepared(
    files: Sequence[Path], how: Any, make: Callable[[Path], dict[str, Any]], val_files: Sequence[Path] = ()
) -> Iterator[tuple[Path, Any]]:
    """The folder that ``make(folder)`` fills, and the JSON that it returns: kept for these files, read ``how``.

    It is kept beside ``files``, or beside ``val_files`` if ``files`` is empty.  Open its files before the context ends:
    a folder that cannot be kept is deleted then.
    """
    status = [file.stat() for file in (*files, *val_files)]
    state = [[each.st_size, each.st_mtime_ns] for each in status]
    places = _places(files, val_files, how) if status and sum(each.st_size for each in status) >= LEAST else []
    found = next((place for place in places if _state_of(place) == state), None)
    found = found or next((place for place in places if _keep(place, state, make)), None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = found or Path(temporary)
        yield folder, json.loads((folder / ABOUT).read_text())["about"] if found else make(folder)


def _state_of(place: Path) -> Any:
    """The sizes and times of the files that this was made of; None if it is missing or incomplete."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads((place / ABOUT).read_text())
        return kept["files"] if kept["sizes"] == _sizes(place) else None
    return None


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != ABOUT}


def _keep(place: Path, state: Any, make: Callable[[Path], dict[str, Any]]) -> bool:
    """Whether it is there now, whole: under a temporary name until then."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            about = make(made)
            (made / ABOUT).write_text(json.dumps({"about": about, "files": state, "sizes": _sizes(made)}))
            for path in made.iterdir():
                sync(path)
            with suppress(OSError):
                place.rename(Path(temporary, "old"))
            made.rename(place)
        return True
    return False


def _places(files: Sequence[Path], val_files: Sequence[Path], how: Any) -> list[Path]:
    """A folder beside the files, which may be moved together with them, and one in the user's cache."""
    home = Path(os.path.commonpath([file.absolute().parent for file in files or val_files]))
    names = [[os.path.relpath(file, home) for file in each] for each in (files, val_files)]
    key = hashlib.sha256(json.dumps([FORMAT, how, names]).encode()).hexdigest()[:24]
    return [home / ".kos" / key, cache_folder() / "data" / hashlib.sha256(os.fsencode(home)).hexdigest()[:24] / key]
