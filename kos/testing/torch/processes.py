"""``spawn``: ranks of torch.distributed as forked processes, their results and their errors."""

from __future__ import annotations

import ast
import io
import json
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import torch

from kos.comm import timeouts
from kos.comm.arguments import check_bool, check_timeout, number_in
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument, RankLost
from kos.testing import Deadlock, Fault, _check_function, _host_names
from kos.testing.faults import FaultPlan
from kos.testing.torch.findings import differing, place
from kos.testing.torch.monitor import Job, Mistake
from kos.testing.torch.supervisor import GRACE_SECONDS, supervise

_imported_by_ranks = set[str]()
"""Modules of torch."""


def spawn(
    fn: Callable[..., Any] | str | Path | Sequence[Any],
    world_size: int,
    timeout: float = 60.0,
    *,
    backend: str = "kos",
    init: bool = True,
    hosts: Sequence[int] = (),
    faults: Sequence[Fault] = (),
    env: Mapping[str, str] | None = None,
    check_deadlock: bool = True,
    check_messages: bool = True,
    check_tensors: bool = True,
    strict: bool = True,
) -> list[Any]:
    """Run ``fn(rank)``, or ``fn()``, on ``world_size`` ranks that are processes; their results by rank.

    The ranks are forked from this process: ``fn`` may be any function, and finds the modules that are imported here.
    The default process group exists when ``fn`` begins.  With ``init=False`` ``fn`` makes it itself: its
    ``init_process_group``, for whatever backend and address, makes a group of kos.  RANK, LOCAL_RANK and WORLD_SIZE are
    set.  ``fn`` may also be the path of a script, or a list of such a path and its arguments; ``init`` is then False.

    Results are made of tensors, arrays, numbers, texts, lists, tuples and dicts.  If a rank raises, the others raise
    from their waits, and the first error is raised here with a note that names the rank.  What a rank prints is printed
    here, with its rank, when all have ended.  After ``timeout`` seconds all ranks, and what they have started, are
    killed, and CollectiveTimeout names the line of each.

    ``backend`` "gloo" runs the same without the checks and faults below, which are those of groups of kos.  ``hosts``,
    ``faults`` and ``check_deadlock`` are as in ``kos.testing.spawn``: a rank that crashes is killed, and one that
    stalls is stopped, by signals.  ``Fault.call`` is the name in torch.distributed.  ``env`` are variables for the
    ranks.  Each of these checks raises at the line of the program:

    - ``check_deadlock``: Deadlock if ranks wait and can never continue, also because a rank has returned
    - ``check_messages``: Mistake for a message that was sent and never received
    - ``check_tensors``: Mistake for a tensor of a call with ``async_op`` that changes before the call is waited for
    - ``strict``: Mistake for a Work that was never waited for, and for two groups that ranks use in different orders

    Raises InvalidArgument for wrong arguments, for faults that never happened, and where CUDA has begun in this
    process, which a forked process cannot use.

        assert spawn(lambda rank: rank, 3) == [0, 1, 2]
    """
    __tracebackhide__ = True
    given: Any = [fn] if isinstance(fn, str | Path) else fn
    if script := isinstance(given, Sequence):
        if not given or not Path(given[0]).is_file():
            raise InvalidArgument(f"fn: expected a function or the path of a script, got {fn!r}")
        given = list(given)
    else:
        _check_function(given)
    world_size, timeout = number_in("world_size", world_size, 1, 1 << 12), check_timeout(timeout)
    if torch.cuda.is_initialized():
        raise InvalidArgument("spawn: expected a process that has not used CUDA, from which ranks can be forked")
    checks = check_deadlock, check_messages, check_tensors, strict
    for name, value in zip(("check_deadlock", "check_messages", "check_tensors", "strict"), checks, strict=True):
        check_bool(name, value)
    names, plan = _host_names(hosts, world_size), FaultPlan(faults or (), world_size)
    init, store = check_bool("init", init) and not script, os.memfd_create("kos-testing-store")
    job = Job(given, world_size, timeout, backend, init, names, plan, dict(env or {}), *checks, store)
    try:
        return _Run(job).result()
    finally:
        os.close(store)


class _Run:
    """The processes of one ``spawn``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        for name in _imported_by_ranks:  # once here, and not by each rank
            with suppress(Exception):
                import_module(name)
        _imported_by_ranks.clear()
        sys.stdout.flush()
        sys.stderr.flush()
        self._outputs, self._results = ([os.memfd_create(f"kos-testing-{kind}") for _ in range(job.size)]
                                        for kind in ("output", "result"))  # fmt: skip
        self._socket, theirs = socket.socketpair()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until ``_wait`` handles them
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process may have threads
            self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            supervise(job, theirs, self._outputs, self._results)
        theirs.close()

    def result(self) -> list[Any]:
        """The results by rank.  Raises the error of the run."""
        __tracebackhide__ = True
        try:
            report = self._wait()
            _imported_by_ranks.update(name for _, state in report["ranks"] for name in state.get("modules", ()))
            for rank, descriptor in enumerate(self._outputs):
                with open(f"/proc/self/fd/{descriptor}", errors="backslashreplace") as file:
                    sys.stdout.writelines(f"[rank {rank}] {line.rstrip()}\n" for line in file)
            if error := self._error(report):
                raise error
            ended = [status for status, _ in report["ranks"]]
            return [self._load(rank) if status == "returned" else None for rank, status in enumerate(ended)]
        finally:
            for descriptor in (*self._outputs, *self._results):
                os.close(descriptor)

    def _wait(self) -> dict[str, Any]:
        """The report.  If this is interrupted, all processes end."""
        data = b""
        limit = time.monotonic() + self.job.timeout + 10 * GRACE_SECONDS
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            while select.select([self._socket], [], [], max(0.0, limit - time.monotonic()))[0]:
                if not (more := self._socket.recv(1 << 20)):
                    break
                data += more
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # such as a second Ctrl-C
            self._socket.close()  # the supervisor then kills the ranks
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
                with suppress(ProcessLookupError):
                    os.killpg(self._pid, signal.SIGKILL)  # what is left if the supervisor was killed itself
                os.waitpid(self._pid, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        report: dict[str, Any] = json.loads(data or "{}")
        if "errors" not in report:
            raise CollectiveError(f"spawn: {report.get('failure', 'the process that watches the ranks was killed')}")
        return report

    def _load(self, rank: int) -> Any:
        data = Path(f"/proc/self/fd/{self._results[rank]}").read_bytes()
        try:
            with torch.serialization.safe_globals(_numpy_globals()):
                return torch.load(io.BytesIO(data), weights_only=True) if data else None
        except Exception as error:
            wanted = "expected tensors, arrays, numbers, texts, lists, tuples and dicts"
            raise InvalidArgument(f"fn: result of rank {rank}: {wanted}, got another object: {error}") from None

    def _error(self, report: Mapping[str, Any]) -> BaseException | None:
        verdict, size = report["verdict"], self.job.size
        kind, text, ranks = verdict.get("kind"), verdict.get("text", ""), verdict.get("ranks", ())
        for rank, record in report["errors"]:
            if kind is None or (kind == "lost" and not record["lost"]):
                return self._of_rank(rank, record, [state for _, state in report["ranks"]])
        pending = {fault for status, state in report["ranks"] if status == "returned" for fault in state["pending"]}
        if kind is None and pending:
            return InvalidArgument(f"faults: expected all to happen, got none of {', '.join(sorted(pending))}")
        if kind == "deadlock":
            culprits = [rank for rank, (status, _) in enumerate(report["ranks"]) if status in ("stall", "crash")]
            return Deadlock(f"spawn: {text}", ranks=culprits)
        if kind == "lost":
            return RankLost(f"spawn: rank {ranks[0]} of {size} is gone: {text}", ranks=ranks)
        if kind == "timeout":
            places = [f"\n  rank {rank} is at {place(where)}" for rank, where in verdict["places"].items()]
            late = timeouts.running(ranks, size, self.job.timeout)
            return CollectiveTimeout(f"spawn: {late}{''.join(places)}", ranks=ranks)
        return Mistake(f"spawn: {text}") if kind else None

    def _of_rank(self, rank: int, record: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> BaseException:
        error = rebuilt(record)
        mismatch = next((state["mismatch"] for state in states if state.get("mismatch")), None)
        if mismatch is not None and (lines := differing(mismatch, states)):
            error.add_note("\n".join(lines))
        error.add_note(f"raised on rank {rank} of {self.job.size}")
        return error


def rebuilt(record: Mapping[str, Any]) -> BaseException:
    """The exception that a rank has described, with its traceback.

    If its class is not found here, or refuses, it is a RuntimeError that names the class.
    """
    kinds: list[type[BaseException]] = [BaseException]
    for kind in kinds:  # all classes of exceptions, also those of functions
        kinds += kind.__subclasses__()
    same = [kind for kind in kinds if [kind.__module__, kind.__qualname__] == [record["module"], record["class"]]]
    error: Any = RuntimeError(f"{record['class']}: {record['text']}")
    with suppress(Exception):
        found: Any = same[-1].__new__(same[-1], *record["args"])
        found.args = tuple(record["args"])
        found.__dict__.update(record["state"])
        error = found
    for note in record["notes"]:
        error.add_note(note)
    if record["cause"]:
        error.__cause__ = rebuilt(record["cause"])
    return error.with_traceback(_traceback(record["frames"]))


def _traceback(frames: Sequence[Sequence[Any]]) -> TracebackType | None:
    """A traceback of these frames: file, line, function and the function's first line."""
    trace: TracebackType | None = None
    for file, line, name, first in reversed(frames):
        number = max(line - first + 1, 1)
        at = {"lineno": number, "col_offset": -1, "end_lineno": number, "end_col_offset": -1}
        tree = ast.Module([ast.Raise(ast.Name("Exception", ast.Load(), **at), None, **at)], [])
        code: CodeType = compile(tree, file, "exec").replace(co_name=name, co_qualname=name, co_firstlineno=first)
        try:
            exec(code, {"__name__": "kos.rank", "__file__": file})
        except Exception as error:
            inner = error.__traceback__ and error.__traceback__.tb_next
            assert inner is not None
            trace = TracebackType(trace, inner.tb_frame, inner.tb_lasti, line)
    return trace


def _numpy_globals() -> list[Any]:
    """What torch must allow to load arrays of NumPy."""
    import numpy as np
    from numpy._core import multiarray

    kinds = {type(np.dtype(each)) for each in np.typecodes["All"]}
    return [np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar, *kinds]
