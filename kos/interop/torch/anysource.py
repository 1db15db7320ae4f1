"""Receives from any rank, in host memory: one receive from each rank, of which the first to complete counts.

The others stay posted, for no message may be lost.  A later receive with that tag takes them, so that the messages of
one tag must have one size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import kos
from kos.comm import timeouts
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument
from kos.interop.torch.launch import set_call_site
from kos.interop.torch.tensors import Arrays, Tensor, as_array
from kos.interop.torch.works import POLL_SECONDS, HostWork

_ENDLESS = 1e6  # seconds: the deadline is the work's


class AnySource:
    """The receives that are posted on a communicator, by rank and tag."""

    def __init__(self, comm: kos.Communicator) -> None:
        self._comm = comm
        self._posted: dict[tuple[int, int], tuple[kos.Work[Any], Tensor]] = {}

    def take(self, src: int, tag: int, tensor: Tensor, arrays: Arrays) -> kos.Work[Any] | None:
        """The receive that is posted for the next message of that rank, if any; its result is copied to ``tensor``."""
        work, temporary = self._posted.pop((src, tag), (None, tensor))
        if work is not None:
            self._copy_to(tensor, temporary, arrays)
        return work

    def poll(self, tag: int, tensor: Tensor, arrays: Arrays) -> tuple[int, kos.Work[Any]] | None:
        """A rank whose message has arrived, and its receive; None if there is none yet."""
        for src in range(self._comm.size):
            if src != self._comm.rank and (src, tag) not in self._posted:
                temporary = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                work = self._comm.recv(as_array(temporary), src, tag, async_op=True, timeout=_ENDLESS)
                set_call_site(self._comm, self._comm.recorder.count - 1)
                self._posted[src, tag] = work, temporary
        for (src, its_tag), (work, temporary) in list(self._posted.items()):
            if its_tag == tag and work.done():
                del self._posted[src, tag]
                self._copy_to(tensor, temporary, arrays)
                return src, work
        return None

    def _copy_to(self, tensor: Tensor, temporary: Tensor, arrays: Arrays) -> None:
        if (tensor.dtype, tensor.numel()) != (temporary.dtype, temporary.numel()):
            expected = f"{temporary.numel()} elements of {temporary.dtype}, as in an earlier receive from any rank"
            raise InvalidArgument(f"recv: expected {expected}, got {tensor.numel()} of {tensor.dtype}")
        arrays.add_copy(tensor, temporary.view(tensor.shape))

    def close(self) -> None:
        """Cancel what is posted."""
        for work, _ in self._posted.values():
            work.cancel(CollectiveError("recv: the process group was closed"))
        self._posted.clear()


class AnySourceWork(HostWork):
    """A receive from any rank."""

    def __init__(self, group: Any, source: AnySource, tensors: Sequence[Tensor], tag: int, seconds: float) -> None:
        super().__init__(group, [], Arrays(), tensors)
        self._any, self._tag, self._seconds, self._source = source, tag, seconds, -1
        self.is_completed()  # posts the receives

    def _done(self) -> bool:
        if self._source < 0 and (found := self._any.poll(self._tag, self.tensors[0], self._arrays)) is not None:
            self._source, self._works = found[0], [found[1]]
        return self._source >= 0

    def _finish(self, seconds: float) -> None:
        seconds = seconds or self._seconds
        deadline = time.monotonic() + seconds
        while not self._done():
            if time.monotonic() > deadline:
                what = f"recv from any rank with tag {self._tag}"
                raise CollectiveTimeout(f"{what}: {timeouts.incomplete(seconds)}")
            time.sleep(POLL_SECONDS)
        super()._finish(seconds)

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank
