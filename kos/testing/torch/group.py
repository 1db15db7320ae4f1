"""The process group of a rank under test: kos's, with a record of each call, checks of its tensors, and faults."""

from __future__ import annotations

import functools
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import tree_map

from kos.errors import CollectiveMismatch
from kos.interop.torch import dynamo
from kos.interop.torch.group import ProcessGroupKos
from kos.interop.torch.launch import Recording, run
from kos.interop.torch.operations import Operations
from kos.interop.torch.tensors import Tensor, check_dense
from kos.interop.torch.works import NONE, HostWork
from kos.testing.torch.monitor import Call, Mistake, Monitor

ACKNOWLEDGED = 1 << 19
"""Added to the tag of a message: the tag of the empty message by which its receiver says that it receives."""
_PUBLIC = {
    "allreduce": "all_reduce", "all_gather_single": "all_gather_into_tensor", "allgather": "all_gather",
    "reduce_scatter_single": "reduce_scatter_tensor", "alltoall": "all_to_all", "gather_single": "gather",
}  # fmt: skip


class Copies:
    """Copies of the tensors of one call, on which it runs, so that a write to the originals is seen."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor, int]] = {}  # by identity: original, copy, checksum at the start

    def of(self, x: Any) -> Any:
        """The copy of a tensor of host memory; anything else as it is."""
        if type(x) not in (Tensor, torch.nn.Parameter) or x.device.type != "cpu" or x.layout is not torch.strided:
            return x
        if torch._debug_has_internal_overlap(x) == 1:  # of its elements, which its copy would not have
            return x
        if id(x) not in self.kept:
            self.kept[id(x)] = x, x.detach().clone(), _checksum(x)
        return self.kept[id(x)][1]

    def settle(self, call: Call) -> None:
        """Write the results to the originals.  Raises Mistake if one was changed while the call was in flight."""
        alive = [each for each in self.kept.values() if each[0].untyped_storage().size()]
        if any(_checksum(original) != before for original, _, before in alive):
            raise Mistake(f"a tensor was changed while {call} was in flight: wait for its Work first")
        for original, copy, before in alive:
            if _checksum(copy) != before:
                original.detach().copy_(copy)


def _checksum(x: Tensor) -> int:
    x = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return zlib.crc32(np.asarray(x.view(torch.uint8)).data) if x.numel() else 0


def _on_copies(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run an operation with ``async_op`` on copies of its tensors."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        values = [*args, *keywords.values()]
        waits = any(getattr(value, "asyncOp", True) is False for value in values) and self._coalesced is None
        if waits or self.copies is not None or not self.monitor.job.tensors:
            return method(self, *args, **keywords)
        self.local.copies = copies = Copies()
        try:
            args, keywords = tree_map(copies.of, (args, keywords))
            return method(self, *args, **keywords)
        finally:
            self.local.copies = None

    return call


class CheckedWork(HostWork):
    """A HostWork that says what it waits for, and whether it was waited for."""

    def __init__(self, group: Any, works: Any, arrays: Any, tensors: Sequence[Tensor], call: Call) -> None:
        super().__init__(group, works, arrays, tensors)
        self._call, self._copies = call, group.copies
        if self._copies is not None:
            originals = {id(copy): original for original, copy, _ in self._copies.kept.values()}
            self.tensors = [originals.get(id(x), x) for x in tensors]

    def wait(self, timeout: timedelta = NONE) -> bool:
        self._call.waited = True
        seconds = timeout.total_seconds() if timeout > NONE else self._group._timeout
        with self._group.monitor.waiting([self._call], seconds):
            return super().wait(timeout)

    def _finish(self, seconds: float) -> None:
        super()._finish(seconds)
        with self._lock:
            copies, self._copies, first, self._call.complete = self._copies, None, not self._call.complete, True
        if copies is not None:
            copies.settle(self._call)
        if first and " recv -1 " in self._call.key:
            self._group.acknowledge(self.source_rank(), int(self._call.key.split()[-1]), from_any=True)

    def get_future(self) -> Any:
        self._call.waited = True
        return super().get_future()


class CheckedGroup(ProcessGroupKos):
    """A group of kos whose calls are recorded and checked.  ``monitor`` is that of this process."""

    monitor: ClassVar[Monitor]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.local = threading.local()
        self._message: tuple[int, int] = -1, 0  # of the send or receive that is launched: the other rank, and the tag
        super().__init__(*args, **keywords)
        self.monitor.groups.append(self)

    @property
    def copies(self) -> Copies | None:
        """Those of the call that this thread makes."""
        return getattr(self.local, "copies", None)

    def _connect(self, backend: str, purpose: str, seconds: float | None = None, **keywords: Any) -> Any:
        call = self.monitor.called("group", "making a process group", "", self._ranks)
        with self.monitor.waiting([call], seconds or self._timeout):
            return super()._connect(backend, purpose, seconds, **keywords)

    def translated(self, error: Exception) -> Exception:
        if isinstance(error, CollectiveMismatch):
            self.monitor.mismatched(self._name, error)
        return error if isinstance(error, Mistake) else super().translated(error)

    def _launch_on_host(
        self, call: Any, tensors: Sequence[Tensor], overlap: bool, timeout: Any, what: str, batch: bool
    ) -> Any:
        check_dense(tensors, what)
        self.check_connected()
        name, kind, (peer, tag) = _PUBLIC.get(what, what), "collective", self._message
        drop, x = self.monitor.inject(name), tensors[0]
        if what in ("send", "recv"):
            kind = what
        other = self._ranks[peer] if peer >= 0 else -1
        text = name if what == "barrier" else f"{name} of {str(x.dtype).removeprefix('torch.')}{[*x.shape]}"
        if isinstance(call, list):  # the reduction, or the root
            text += "".join(f", {getattr(each, 'name', each)}" for each in call[0][1][1:] if not torch.is_tensor(each))
        made = self.monitor.called(kind, text, self._name, self._ranks, other, tag)
        if drop:
            made.what += " (lost, as the test's plan says)"
            self.monitor.counts[made.key] -= 1
        waits = not overlap and self._coalesced is None
        with self._host.backend.engine.paused() if waits else nullcontext():
            with self.lock:
                self._begin()
                lost, options = Recording(self._host, {}), self._options(timeout)
                launch = lost if drop else run(call, self._host, options, True, batch)
                if launch.works and kind == "send":  # it ends when received, as with gloo and NCCL: kos would buffer it
                    signal = np.empty(0, np.uint8)
                    launch.works.append(self._host.recv(signal, peer, tag + ACKNOWLEDGED, async_op=True))
                elif kind == "recv" and peer >= 0:
                    self.acknowledge(peer, tag)
            made.sequence = launch.works[0].sequence if launch.works else -1
            work = CheckedWork(self, launch.works, launch, tensors, made)
            if waits:
                work.wait()
            else:
                made.waited = self._coalesced is not None or not made.direct
        return work

    def acknowledge(self, peer: int, tag: int, from_any: bool = False) -> None:
        """Tell the sender of a message that this rank receives it."""
        self._host.send(np.empty(0, np.uint8), peer, tag + ACKNOWLEDGED, async_op=True)
        if from_any:
            for key in (f"recv {self._ranks[peer]} {self.monitor.rank} {tag}", f"any {self.monitor.rank} {tag}"):
                self.monitor.counts[f"{self._name} {key}"] += 1

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:
        self._message = dstRank, tag
        return super().send(tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int | None, tag: int = 0) -> Any:
        self._message = -1 if srcRank is None else srcRank, tag
        return super().recv(tensors, srcRank, tag)

    def shutdown(self) -> None:
        calls = [call for call in self.monitor.calls if call.group == self._name and not call.complete]
        with self.monitor.waiting(calls, self._timeout):
            super().shutdown()
        self.monitor.groups.remove(self)


_OWN = {name: getattr(CheckedGroup, name) for name in vars(Operations) if name not in ("barrier", "monitored_barrier")}
for _name, _method in _OWN.items():
    if callable(_method) and not _name.startswith("__"):
        setattr(CheckedGroup, _name, _on_copies(_method))
dynamo.disable(sys.modules[__name__])
