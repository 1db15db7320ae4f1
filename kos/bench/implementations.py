"""The implementations under one interface: kos here, the peers in ``peers.py`` and ``peers_gpu.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import kos
from kos.bench.cases import ROOT, Case
from kos.comm.schedules import algorithms
from kos.dtypes import DType
from kos.errors import InvalidArgument

Call = Callable[[], Any]

OURS = {"mpi": "mpi", "tcp": "tcp", "kos-nccl": "nccl", "peer": "peer", "auto": "auto"}
"""Our rows' names, and what ``kos.init`` calls the backends; ``mock`` is given its communicator."""
GPU_BACKENDS = ("kos-nccl", "peer", "auto", "nccl", "nccl-window", "torch-nccl", "torch-symm")


def not_measurable(backends: Iterable[str], gpu: bool, no_gpu: str | None) -> dict[str, str]:
    """The backends that a job of processes cannot measure in this memory, with the reasons.

    ``no_gpu`` is the reason why there is no GPU.
    """
    reason = "it is for a host" if gpu else no_gpu or "it is for GPUs"
    threads = "its ranks are threads of one process (start without mpirun)"
    elsewhere = [name for name in backends if name == "mock" or (name in GPU_BACKENDS) != gpu]
    return {name: threads if name == "mock" else reason for name in elsewhere}


def choices(op: str) -> tuple[str, ...]:
    """What ``--algorithm`` may name for this operation."""
    if op not in ("all_reduce", "reduce_scatter", "all_gather"):
        return ("auto",)
    return ("auto", *algorithms(op), *(("deterministic",) if op != "all_gather" else ()))


class _Checked(Exception):
    """The arguments of a call are right."""


class Implementation:
    """A library that runs collectives, and one way to call it ("function" or "async")."""

    backend = ""
    algorithm = "auto"
    call = "function"
    space = "plain"
    """Implementations with the same space are measured on the same slots."""

    def allocate(self) -> Callable[[int, DType], Any] | None:
        """What makes the arrays of its space; None for plain memory."""
        return None

    def offers(self, case: Case) -> bool:
        """Whether slots in its space are worth making for ``case``."""
        return True

    def bind(self, case: Case, send: Any, recv: Any) -> Call | None:
        """A function that runs the operation once and returns when its caller could continue.

        None where the implementation has no such operation, type or place.
        """
        raise NotImplementedError

    def loop(self, case: Case, slots: Sequence[Any], calls: int) -> Call | None:
        """One function that makes ``calls`` calls on the slots in rotation; None: ``bind`` makes each."""
        return None

    def release(self) -> None:
        """The arrays of the case are no longer used."""

    def close(self) -> None:
        """Give back what it holds.  Collective."""

    def __str__(self) -> str:
        name = self.backend if self.algorithm == "auto" else f"{self.backend} {self.algorithm}"
        return name if self.call == "function" else f"{name} {self.call}"


class Ours(Implementation):
    """A Communicator of kos."""

    def __init__(self, comm: kos.Communicator, backend: str, algorithm: str = "auto", call: str = "function") -> None:
        self.comm, self.backend, self.algorithm, self.asked, self.call = comm, backend, algorithm, algorithm, call
        self._on_gpu = backend in GPU_BACKENDS

    def bind(self, case: Case, send: Any, recv: Any) -> Call | None:
        written = self._written(case, send, recv)
        if written is None:
            return None
        function, positional, keywords = written
        call = partial(function, *positional, **keywords)
        return call if self.call == "function" or self._on_gpu else lambda: call().wait()

    def loop(self, case: Case, slots: Sequence[Any], calls: int) -> Call | None:
        """The calls as a program writes them: a partial makes a dict of keywords each time, a lambda makes a frame."""
        written = [self._written(case, slot.send, slot.recv) for slot in slots]
        if self._on_gpu or None in written:
            return None
        rotation = [(each[0], *each[1], *each[2].values()) for each in written if each is not None]
        _, positional, keywords = written[0]  # type: ignore[misc]
        names = [f"x{i}" for i in range(len(positional))]
        given = ", ".join([*names, *(f"{name}={name}" for name in keywords)])
        waits = "" if self.call == "function" else ".wait()"
        text = f"for {', '.join(['call', *names, *keywords])}, in rotation: call({given}){waits}"
        made: dict[str, Any] = {"rotation": rotation * (calls // len(slots))}
        exec(f"def run():\n    {text}", made)
        run: Call = made["run"]
        return run

    def _written(self, case: Case, send: Any, recv: Any) -> tuple[Call, tuple[Any, ...], dict[str, Any]] | None:
        """A function and its arguments.  On a host its Work is waited for, unless ``call`` is function."""
        comm, op, parts = self.comm, case.function, case.parts
        out = None if case.in_place else recv
        redop: Any = kos.ReduceOp[case.redop.upper()] if case.redop != "none" else None
        named = {"auto": {}, "deterministic": {"deterministic": True}}
        chosen: Any = named.get(self.asked, {"algorithm": self.asked})
        at_root, left, right = comm.rank == ROOT, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        if self.asked not in choices(op):
            return None
        if op == "send_recv" and comm.size == 1:
            return None
        given: dict[str, tuple[Any, ...]] = {
            "barrier": (),
            "all_reduce": (send, redop),
            "reduce": (send, ROOT, redop),
            "broadcast": (send, ROOT),
            "reduce_scatter": (send, recv, redop),
            "gather": (send, ROOT, recv if at_root else None),
            "scatter": (send if at_root else None, recv, ROOT),
            "send_recv": (send, recv, right, left),
            "all_to_all_v": (send, *case.counts(comm.rank), recv),
            "all_gather_v": (send, parts, recv),
            "reduce_scatter_v": (send, parts, recv, redop),
            "gather_v": (send, parts, ROOT, recv if at_root else None),
            "scatter_v": (send if at_root else None, parts, recv, ROOT),
            "scan": (send, redop),
            "exscan": (send, redop),
        }
        if op in ("all_reduce", "reduce", "broadcast", "scan", "exscan"):
            chosen |= {"out": None if op == "reduce" and not at_root else out}
        if op == "barrier" and self._on_gpu:
            chosen |= {"stream": send.stream}
        arguments = given.get(op, (send, recv))
        if self.asked != "auto":
            try:  # refused on all ranks, before anything is sent
                with suppress(_Checked), comm.batch():
                    getattr(comm, op)(*arguments, **chosen)
                    raise _Checked  # a batch that raises starts nothing
            except InvalidArgument:
                return None
        if self.call == "async":
            chosen |= {"async_op": True}
        return getattr(comm, op), arguments, chosen

    def close(self) -> None:
        self.comm.close()


class OursInWindows(Ours):
    """Ours, on symmetric arrays from ``Communicator.allocate``."""

    def __init__(self, comm: kos.Communicator, backend: str, stream: Any, algorithm: str) -> None:
        super().__init__(comm, backend, algorithm)
        self.stream, self.space = stream, f"{backend} window"
        self.algorithm = "window" if algorithm == "auto" else f"window {algorithm}"

    def allocate(self) -> Callable[[int, DType], Any]:
        def allocate(count: int, dtype: DType) -> Any:
            array = self.comm.allocate(count, dtype)
            array.stream = self.stream
            return array

        return allocate

    def close(self) -> None:
        """The communicator is closed by the implementation that has it too."""
