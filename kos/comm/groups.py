"""Groups of a communicator's ranks: split, grid, duplicate, and shrink after a loss."""

from __future__ import annotations

import itertools
import math
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, Self, overload

import numpy as np

from kos.comm.arguments import check_int, check_ranks, check_shape, check_timeout, number_in
from kos.comm.backend import SHRINKS, UNMADE, Probe
from kos.comm.collectives import Operations
from kos.comm.control.base import Rendezvous
from kos.comm.gpu.nccl_options import NCCLOptions, check_nccl
from kos.comm.operation import Operation
from kos.comm.recorder import Group, Recorder
from kos.comm.records import again
from kos.errors import CollectiveError, InvalidArgument, RendezvousError


class Groups(Operations):
    """What makes communicators of the ranks of this one, and compares the calls that do."""

    name: str
    backend_name: str
    rendezvous: Rendezvous
    probes: Mapping[str, Probe]
    recorder: Recorder
    timeout: Any
    _splits: itertools.count[int]
    _groups: weakref.WeakSet[Any]
    """Those split from this one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host for all operations."""

    @abstractmethod
    def _signal_end(self, reason: str) -> None: ...

    @abstractmethod
    def _abort_groups(self, reason: str) -> None: ...

    @abstractmethod
    def _end(self, reason: str) -> None: ...

    @overload
    def split(self, color: Literal["host"], key: int = ..., *, nccl: NCCLOptions | None = ...) -> Self: ...
    @overload
    def split(self, color: int | None, key: int = ..., *, nccl: NCCLOptions | None = ...) -> Self | None: ...
    def split(
        self, color: int | Literal["host"] | None, key: int = 0, *, nccl: NCCLOptions | None = None
    ) -> Self | None:
        """The communicator of the ranks that passed the same ``color``, ranked by (key, rank).

        Collective.  ``color`` is from 0 to 2,147,483,647, ``key`` any C int.  A rank with color None participates and
        gets None.  On all ranks ``color`` may be "host": a communicator for each host.  ``nccl`` are options of NCCL
        for the new communicators, the same on all ranks; others are inherited.  Waits for the operations in flight.
        Raises InvalidArgument, CollectiveMismatch, CollectiveTimeout, RankLost.

            pair = comm.split(comm.rank // 2)
        """
        largest = (1 << 31) - 1  # a C int, for MPI
        key = number_in("key", key, -largest - 1, largest)
        if isinstance(color, str) and color == "host":
            host = self.node[0]
            return self._split(host, key, f"host{host}", "each host", nccl)
        color = None if color is None else number_in("color", color, 0, largest, ' or None or "host"')
        return self._split(color, key, str(color), nccl=nccl)

    def group(self, ranks: Sequence[int], *, nccl: NCCLOptions | None = None) -> Self | None:
        """The communicator of these ranks, in this order; other ranks get None.

        Collective: all ranks of this communicator call it, with the same ``ranks`` and ``nccl``, as in ``split``.
        Raises InvalidArgument unless ``ranks`` are different ranks of this communicator, and the errors of ``split``.

            evens = comm.group(range(0, comm.size, 2))
        """
        members = check_ranks("ranks", ranks, self.size)
        color, key = (0, members.index(self.rank)) if self.rank in members else (None, 0)
        return self._split(color, key, "group", f"group {members}", nccl)

    def grid(self, shape: Sequence[int], *, nccl: NCCLOptions | None = None) -> tuple[Self, ...]:
        """A communicator for each axis of a grid of all ranks, whose last axis varies fastest.

        ``shape`` are the sizes of the axes, with a product of ``size``.  One of them may be -1: it is inferred, as in
        NumPy's reshape.  The communicator of axis ``a`` holds the ranks whose coordinates differ from this rank's along
        ``a`` alone; its ``rank`` is this rank's coordinate.
        Collective, with the same ``shape`` and ``nccl`` on all ranks, as in ``split``.  Raises InvalidArgument if the
        product is not ``size``, and the errors of ``split``.

            column, row = comm.grid((2, -1))           # of 8 ranks: column.size == 2, row.size == 4
        """
        sizes = _grid_sizes(shape, self.size)
        place, axes = np.unravel_index(self.rank, sizes), []
        for axis in range(len(sizes)):
            first = np.ravel_multi_index([0 if a == axis else at for a, at in enumerate(place)], sizes)
            group = self._split(int(first), self.rank, f"axis{axis}-{first}", f"grid {sizes}", nccl)
            assert group is not None
            axes.append(group)
        return tuple(axes)

    @property
    def node(self) -> list[int]:
        """The ranks of this communicator on this rank's host, ascending."""
        return self.rendezvous.local_ranks

    def duplicate(self) -> Self:
        """Another communicator over the same ranks, whose operations never match this one's.  Collective.

        A library uses a duplicate for its own operations.  Raises CollectiveMismatch, CollectiveTimeout, RankLost.

            mine = comm.duplicate()
        """
        duplicate = self._split(0, self.rank, "duplicate", call="duplicate")
        assert duplicate is not None
        return duplicate

    def _split(
        self, color: int | None, key: int, label: str, purpose: str = "", nccl: NCCLOptions | None = None,
        call: str = "split",
    ) -> Self | None:  # fmt: skip
        """``purpose``, which errors name after the call, must be equal on all ranks, as the options of NCCL must."""
        options = self._nccl_options(nccl)
        if nccl is not None:
            purpose = ", ".join(filter(None, (purpose, f"nccl {options}")))
        self._check_open()
        self.synchronize()
        operation = Operation(call, self.rank, replace(self._defaults, purpose=purpose))
        self._agree(operation, f"{call} for {purpose}" if purpose else call, 4)
        name = f"{self.name}.{next(self._splits)}"  # the same on all ranks
        with self._exchange(call):
            rendezvous = self.rendezvous.split(color, key)
            if rendezvous is not None:
                rendezvous.nccl = options
            group = self._descendant(f"{name}:{label}", rendezvous, color, key)
            if group is not None:
                self._groups.add(group)
            return group

    def _nccl_options(self, given: NCCLOptions | None) -> dict[str, Any]:
        """Those of this communicator, replaced by those given."""
        options = check_nccl(given)
        if options and "nccl" not in self.backend_name.split("+"):
            raise InvalidArgument(f"nccl: expected None without the backend nccl, got {options} on {self.backend_name}")
        return {**self.rendezvous.nccl, **options}

    def _agree(self, control: Operation, call: str, depth: int) -> None:
        """Compare a control-plane call, made ``depth`` frames up, with the other ranks' calls."""
        if self.backend.carries_host:
            work = self._prepare(control)
            work.prepared.start(self, work, depth=depth - 1)
        else:
            with self._exchange(call):
                self.rendezvous.barrier()

    def shrink(self) -> Self:
        """The communicator of the surviving ranks, in their order, after some were lost; all survivors call it.

        This communicator and the groups split from it are aborted.  Ranks that still wait in one of their operations
        raise RankLost.  Split the result to have the groups again.  The launcher must let survivors live (mpirun:
        ``--with-ft ulfm``); ranks of MPI continue over tcp.  Raises BackendUnavailable under mpirun on hosts that do
        not reach each other by TCP, RendezvousError if a survivor does not call it within the timeout.  An unreachable
        rank counts as lost: if a network partitions, both groups continue.

            try:
                comm.all_reduce(x)
            except RankLost:
                comm = comm.shrink()
        """
        self._check_open()
        self.rendezvous.check_shrink()
        with self.rendezvous.failures.status.held():
            reason = str(self.rendezvous.failures.first or SHRINKS)
            self._signal_end(reason)
            self._abort_groups(reason)
            self._end(reason)
            with self._exchange("shrink"):
                rendezvous = self.rendezvous.shrink()
                rendezvous.nccl = self.rendezvous.nccl
                # The name has no number: a split in which a rank was lost has advanced the count on some ranks only.
                group = self._descendant(f"{self.name}:shrunk", rendezvous, 0, rendezvous.rank)
                assert group is not None
                return group

    @contextmanager
    def _exchange(self, call: str, timeout: float | None = None) -> Iterator[None]:
        """A context whose rendezvous exchanges belong to ``call``; their errors break this communicator."""
        rendezvous = self.rendezvous
        usual = rendezvous.call, rendezvous.timeout
        rendezvous.call, rendezvous.timeout = call, usual[1] if timeout is None else check_timeout(timeout)
        rendezvous.usual = usual[1]
        try:
            with self.backend.engine.paused():
                yield
        except (CollectiveError, RendezvousError) as error:
            rendezvous.failures.status.post_failure(error)
            text = f"{self.name}: {error}"
            if rendezvous.failures.over is not None and rendezvous.failures.first is None:
                rendezvous.failures.first = again(error, text)
            raise again(error, text) from error  # not by a name, which would hold this frame
        finally:
            rendezvous.call, rendezvous.timeout = usual
            rendezvous.usual = None

    def _descendant(self, name: str, rendezvous: Rendezvous | None, color: int | None, key: int) -> Self | None:
        """The communicator of the group of ``rendezvous``; an error frees what was made of it.  Called on every rank.

        Returns None if ``rendezvous`` is None.
        """
        if rendezvous is None:
            self.backend.split(None, color, key)
            return None
        with ExitStack() as undo:
            undo.callback(rendezvous.abort, None)
            with rendezvous.reporting():
                backend = self.backend.split(rendezvous, color, key)
            assert backend is not None
            undo.callback(backend.abort, UNMADE)
            backend.gpu_array_hint = self.backend.gpu_array_hint
            group = Group(self.recorder, name, rendezvous.failures.world, rendezvous.rank, backend.name)
            kind: Any = type(self)
            made: Self = kind(backend, rendezvous, self.probes, self.timeout, group)
            undo.pop_all()
        return made


def _grid_sizes(shape: Any, ranks: int) -> tuple[int, ...]:
    """The sizes of the axes of a grid of all ranks; a -1 is inferred from the product, ``ranks``."""
    given = tuple(check_int("shape", size) for size in (shape if isinstance(shape, tuple | list) else (shape,)))
    known = math.prod(check_shape([size for size in given if size != -1]))
    if given.count(-1) > 1:
        raise InvalidArgument(f"shape: expected at most one -1, got {given}")
    sizes = tuple(ranks // (known or 1) if size == -1 else size for size in given)
    if math.prod(sizes) != ranks:
        raise InvalidArgument(f"shape: expected a product of {ranks}, the number of ranks, got {given}")
    return sizes
