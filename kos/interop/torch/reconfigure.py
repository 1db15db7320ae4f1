"""New ranks for a process group: ``torch.distributed._reconfigure`` (torch 2.14), and what torchft needs.

Each rank has a handle.  The program passes the handles of all ranks, and a number that was not used before, to every
rank of the new group.  The ranks then connect through torch's Store.  Its server must outlive the ranks: run it in
another process, as torchrun and torchft do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from kos.errors import InvalidArgument, KosError
from kos.interop.torch.operations import Operations
from kos.interop.torch.works import CoalescedWork

REASON = "it reconfigures its process group"


class Reconfigurable(Operations):
    """A group whose ranks may change; ``ProcessGroupKos`` defines ``_connect`` and the attributes below."""

    # Of ProcessGroupKos.
    _host: Any
    _gpu: Any
    _ranks: list[int]
    device: Any
    _connect: Any
    _connect_gpu: Any
    _forget: Any
    translated: Any

    supports_reconfigure = True

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._handle = rank, size, f"kos:{rank:08}:{os.urandom(8).hex()}"
        self._uuid: int | None = None
        self.prefix = ""  # of the keys in the store, which belong to these ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # the names that torch's C++ calls

    def get_reconfigure_handle(self) -> str:
        """The name of this process in ``reconfigure``."""
        return self._handle

    def reconfigure(self, opts: Any) -> Any:
        """Make this the group of the processes ``opts.handles``; ``opts.uuid`` must be new.  Returns a completed Work.

        All of these processes call it.  A list gives their ranks by position; a set orders them by their first ranks.
        Operations in flight and connections to the former ranks are aborted.  Groups split from this one are not
        changed.  Raises InvalidArgument for a wrong argument, and DistBackendError, which names a rank that does not
        connect within ``opts.timeout``: the program may then call it again with another ``uuid``.
        """
        handles = list(opts.handles) if isinstance(opts.handles, Sequence) else sorted(opts.handles)
        if len({*handles}) < len(handles) or self._handle not in handles:
            raise InvalidArgument(f"handles: expected {self._handle}, which this rank has, and others, got {handles}")
        if opts.uuid == self._uuid:
            raise InvalidArgument(f"uuid: expected another one than in the last call, got {opts.uuid}")
        self.disconnect(REASON)
        self._uuid, self.prefix = opts.uuid, f"reconfigured/{opts.uuid}/"
        self._rank, self._size, self._ranks = handles.index(self._handle), len(handles), [*range(len(handles))]
        seconds = None if opts.timeout is None else opts.timeout.total_seconds()
        self.connect(seconds)
        try:
            uses = self._host.all_gather_bytes(b"1" if self.device is not None else b"", timeout=seconds)
        except KosError as error:
            raise self.translated(error) from error
        if all(uses):  # else the first operation on GPUs connects them: a newcomer may use host memory first
            self._connect_gpu(self.device, seconds)
        return CoalescedWork([])

    def connect(self, seconds: float | None = None) -> None:
        """Connect the ranks in host memory, within ``seconds``."""
        self._host = self._connect("tcp", "host", seconds, progress_thread=True)

    def disconnect(self, reason: str) -> None:
        """Abort all operations and connections; ranks that wait for this one raise.  Raises nothing."""
        for comm in filter(None, (self._gpu, self._host)):
            comm.abort(reason=reason)
        self._gpu = self._host = None
        self._forget()

    def check_connected(self) -> None:
        """Raise DistBackendError if the ranks are not connected yet."""
        if self._host is None:
            raise dist.DistBackendError("kos: expected a call of torch.distributed._reconfigure first, got none")

    def errored(self) -> Exception | None:
        """The failure after which this group must be reconfigured, if it has failed.  Does not wait."""
        failures = (comm.failure for comm in (self._gpu, self._host) if comm is not None)
        failure: KosError | None = next(filter(None, failures), None)
        return None if failure is None else self.translated(failure)
