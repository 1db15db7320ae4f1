"""The floor of a call of MPI: a loop in C (``loop.c``), built by the MPI library's own compiler."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kos.bench.cases import Case
from kos.bench.implementations import Call, Implementation
from kos.comm import Communicator
from kos.errors import BackendUnavailable

OPERATIONS = (
    "barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter",
    "send_recv", "all_gather_v", "reduce_scatter_v", "all_to_all_v", "gather_v", "scatter_v", "scan", "exscan",
)  # fmt: skip
"""In the order of ``loop.c``."""


def build(control: Communicator) -> ctypes.CDLL:
    """The loop, built by rank 0 and loaded by all.  Collective.  Raises BackendUnavailable, which says why not."""
    folder, problem = None, ""
    if control.rank == 0:
        beside = Path(sys.executable).with_name("mpicc")  # that of the wheel of Open MPI
        compiler = shutil.which("mpicc", path=str(beside.parent)) or shutil.which("mpicc")
        folder = tempfile.mkdtemp(prefix="kos-bench-")
        try:
            if compiler is None:
                raise OSError("no mpicc on the PATH")
            source, library = Path(__file__).with_name("loop.c"), f"{folder}/loop.so"
            command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", library]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            problem = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]
    places = control.all_gather_bytes(f"{problem}\n{folder}".encode())
    problem, where = places[0].decode().split("\n")
    try:
        if problem:
            raise BackendUnavailable(f"the loop in C was not built: {problem}")
        library = ctypes.CDLL(f"{where}/loop.so")
        if library.setup():
            raise BackendUnavailable("the loop in C was not built: MPI_Comm_dup failed")
        control.barrier()
        return library
    finally:
        if folder is not None:
            shutil.rmtree(folder)


class CLoop(Implementation):
    """The MPI library's blocking calls from C, on float32 by sum."""

    backend = "mpi-c"

    def __init__(self, control: Communicator) -> None:
        self._library, self.rank, self.size = build(control), control.rank, control.size

    def loop(self, case: Case, slots: Sequence[Any], calls: int) -> Call | None:
        """A function that makes ``calls`` calls on the slots in rotation; None for what C does not offer."""
        if case.op not in OPERATIONS or case.dtype.name != "float32" or case.redop not in ("sum", "none"):
            return None
        if case.in_place != (case.op == "broadcast"):
            return None
        sent, got = case.counts(self.rank)
        got = got or case.parts
        numbers = [(ctypes.c_int * self.size)(*row) for row in (sent or got, _starts(sent or got), got, _starts(got))]
        at = [(ctypes.c_void_p * len(slots))(*(array.ctypes.data for array in end)) for end in zip(*slots, strict=True)]
        ends = case.sends(self.rank), case.receives(self.rank)
        neighbours = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        op, keep = OPERATIONS.index(case.op), list(slots)

        def run() -> None:
            if self._library.loop(calls, len(keep), *at, op, *ends, *numbers, *neighbours):
                raise RuntimeError(f"MPI's {case.op} failed")

        return run

    def bind(self, case: Case, send: Any, recv: Any) -> Call | None:
        return None

    def close(self) -> None:
        self._library.teardown()


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]
