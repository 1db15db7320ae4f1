"""``metrics.jsonl``: one JSON object per step, appended during the run and truncated on resume.

A value that is not finite is written as null, because JSON has no such numbers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kos.errors import TrainingError, raised_as
from kos.files import replace_file

METRICS = "metrics.jsonl"  # in the folder of a run

_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends rows to ``path``, each on disk for other readers as soon as it is written.

    ``after_step`` keeps the rows up to that step of an earlier run (0: none), so that a resumed run
    leaves one row for each step, also if the earlier run was killed while it wrote a line.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self.path, self._unwritten, self._warned = path, b"", False
        with raised_as(TrainingError, f"{path}: expected to write metrics"):
            kept = [as_line(row) for row in read_metrics(path) if row["step"] <= after_step]
            replace_file(path, "".join(kept).encode())
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row.  If the disk refuses it, the run continues, and the row is written before the next one."""
        self._unwritten += as_line(row).encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._warned:
                _log.warning("%s: cannot write metrics, the run goes on and tries again: %s", self.path, error)
            self._warned = True

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the rows that were refused are reported
            self._file.close()


def as_line(row: Mapping[str, Any]) -> str:
    """A row as a line of the file."""
    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: str | bytes | os.PathLike[Any] | int, last: int = 0) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, or of that in the folder of a run: a dict for each step.

    ``path`` is what ``open`` takes: text, bytes, a path, or the descriptor of an open file, which is then closed.  An
    unfinished last line is left out.  A file that is missing has no rows.  ``last`` is a number of bytes at the end
    of the file, of which the rows are read; 0 reads all rows.
    """
    file: Any = path
    if not isinstance(path, int):
        file = Path(os.fsdecode(path), METRICS) if os.path.isdir(path) else Path(os.fsdecode(path))
        if not file.exists():
            return []
    with open(file, "rb") as opened:
        if last:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - last))
        text = opened.read().decode(errors="replace")
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
