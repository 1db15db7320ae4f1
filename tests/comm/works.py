"""Works that were never started, for tests of the code that describes, compares and records calls."""

from types import SimpleNamespace
from typing import Any

from kos.comm.operation import Operation
from kos.comm.prepared import Prepared
from kos.comm.recorder import Group
from kos.comm.work import Work, record_start


def work_of(name: str, backend: Any = None, sequence: int = -1, group: Group | None = None, **fields: Any) -> Work[Any]:
    """A start of that operation, whose ``fields`` are those of Operation."""
    if backend is None:
        backend = SimpleNamespace(name="mock", work=Work, rank=0, group_suffix="")
    prepared = Prepared(Operation(name, backend.rank, **fields), backend, lambda work: None)
    prepared.fingerprint = 1
    if group is not None:
        prepared.description = group, prepared.operation
    work: Work[Any] = Work(prepared)
    work.sequence = sequence
    return work


def recorded(work: Work[Any]) -> Work[Any]:
    """``work``, recorded as its next call by the caller."""
    recorder, numbers = work.prepared.description[0].recorder, iter([work.sequence])
    caller: Any = SimpleNamespace(_collectives=numbers, _messages=numbers, recorder=recorder)
    record_start(caller, work)
    return work
