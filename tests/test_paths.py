"""How ``tests/paths.py`` follows a call, and the most files that an all_reduce passes on each backend."""

from __future__ import annotations

import numpy as np
import pytest

from kos._core import native
from kos.comm.arguments import in_and_out
from kos.dtypes import DTYPES
from tests import paths
from tests.launcher import needs_mpirun

MOST: dict[str, dict[str, tuple[int, int | None]]] = {
    "mock": {"miss": (9, 5), "hit": (7, 1)},  # of the rank that comes last, and computes
    "tcp": {"miss": (8, 6), "hit": (0, 0)},  # one file and two returns hold Ctrl-C back
    "mpi": {"miss": (8, 6), "hit": (0, 0)},
    "nccl": {"miss": (9, 10), "hit": (0, 0)},  # a miss describes the launch, and the core makes the hits
    "peer": {"miss": (11, 12), "hit": (0, 0)},
    "nccl+peer": {"miss": (11, 10), "hit": (0, 0)},  # contract.py: whether a route carries the operation
}
"""Files, and returns to one of them, with the compiled core; these numbers only go down."""
TIMES = 3 if native is None else 2
"""How often a call returns to any one file."""
if native is None:  # how often ranks return depends on their timing
    MOST["mock"] = {"miss": (10, 6), "hit": (8, 2)}
    MOST["tcp"] = MOST["mpi"] = {"miss": (16, None), "hit": (13, None)}
    MOST["nccl"] = {"miss": (9, 9), "hit": (5, 0)}
    MOST["peer"] = {"miss": (11, 10), "hit": (5, 0)}
    MOST["nccl+peer"] = {"miss": (11, 10), "hit": (6, 0)}


def test_the_path_of_a_trace() -> None:
    trace = [("", "a"), ("a", "b"), ("b", "b"), ("a", "b"), ("a", "a"), ("a", "c"), ("c", "b"), ("b", "a"), ("a", "c")]
    passed = paths.path(trace)
    assert passed == ["a", "b", "c", "b", "a", "c"]
    assert paths.files(passed) == ["a", "b", "c"] and paths.returns(passed) == ["b", "a", "c"]
    assert paths.shortest([passed, ["a", "b", "a"], ["a", "b"]]) == ["a", "b"]


def test_a_trace_follows_python_calls_of_kos() -> None:
    """Not those of other packages, and a generator where it begins alone."""
    assert paths.trace(lambda: [DTYPES["float32"], np.ones(3).mean()]) == []
    calls = paths.trace(lambda: in_and_out(np.ones(3), None, None))
    assert calls[0] == ("", "comm/arguments.py") and ("comm/arguments.py", "memory/buffer.py") in calls

    source = "def numbers():\n    yield 1\n    yield 2\n\ndef run():\n    return list(numbers())\n"
    exec(compile(source, f"{paths.KOS}of_a_test.py", "exec"), space := {})
    assert paths.trace(space["run"]) == [("", "of_a_test.py"), ("of_a_test.py", "of_a_test.py")]


# An id of "mpi" would be taken for the mark.
BACKENDS = [
    pytest.param(backend, marks=needs_mpirun, id="under mpirun") if backend == "mpi" else backend for backend in MOST
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_files_that_an_all_reduce_passes(backend: str) -> None:
    for kind, passed in paths.TRACED[backend]().items():
        most_files, most_returns = MOST[backend][kind]
        told = f"{backend}, {kind}: {passed}"
        assert len(paths.files(passed)) <= most_files, told
        back = paths.returns(passed)
        assert most_returns is None or len(back) <= most_returns, told
        assert most_returns is None or max(map(back.count, back), default=0) <= TIMES, told
