"""LibraryBackend: runs the operations of a group on GPU memory with its ``library``, a ``contract.Backend``.

The library exchanges messages, and may also have calls of its own for whole operations.  Between two exchanges, kernels
of kos reduce in rank order (``ordered_sum``) or compress.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kos.comm import watchdog
from kos.comm.contract import Backend, Message
from kos.comm.control.base import Rendezvous
from kos.comm.gpu.backend import DeviceBackend
from kos.comm.gpu.compressed import CompressedOperation
from kos.comm.gpu.memory import Piece, exchange_of
from kos.comm.gpu.ordered_sum import OrderedReduction
from kos.comm.gpu.routes import Route, nothing
from kos.comm.group_backend import UNMADE, GroupBackend
from kos.comm.operation import AUTO, Operation
from kos.comm.tuning import for_group
from kos.comm.work import Work
from kos.cuda.kernels import resolved
from kos.errors import InvalidArgument, KosError
from kos.memory import Buffer
from kos.memory.array import Array, Shape
from kos.memory.windows import Run

Make = Callable[..., Backend]
"""A function that makes the library of a group from its rendezvous, engine and device."""


class LibraryBackend(DeviceBackend):
    """Runs the operations of a group on GPU memory with the library that ``make`` returns."""

    marks = 16

    def __init__(
        self, rendezvous: Rendezvous, make: Make, device: int | None = None, host: GroupBackend | None = None
    ) -> None:
        super().__init__(rendezvous, device, host)
        self._aborted = False
        self._together: dict[int, tuple[list[Message], list[Message]]] | None = None  # messages of a batch, by stream
        try:
            self.library = make(rendezvous, self.engine, self.device)
        except BaseException:
            self.shared.report_end(UNMADE)
            self.shared.close()
            raise
        self.failures.links.append(self.library)
        self.name = self.library.name
        self.library.wait_until = self._wait_until  # type: ignore[method-assign]
        watchdog.add(self)

    def split(
        self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0, host: GroupBackend | None = None
    ) -> LibraryBackend | None:
        if rendezvous is None:
            return None
        made = LibraryBackend(rendezvous, self.library.successor(rendezvous), self.device, host)
        made.table = None if self.table is None else for_group(rendezvous, self.device)
        return made

    # The operations.

    def resolve(self, o: Operation) -> Route:
        if o.options.algorithm != AUTO:
            raise InvalidArgument(f"algorithm: expected 'auto' on {self.name}, got {o.options.algorithm!r}")
        return self.in_windows(self._launch_of(o), o), None, True

    def _launch_of(self, o: Operation) -> Run:
        if o.options.compress:
            return CompressedOperation(self, o)
        ordered = o.options.deterministic and o.reduction is not None
        if not ordered and (launch := self.library.native_on_gpu(o)) is not None:
            return launch
        if o.name == "barrier":
            return self._barrier
        if o.reduction is not None:
            return OrderedReduction(self, o) if o.send is not None and o.send.count else nothing
        return partial(self.exchange, *exchange_of(o, self.rank, self.size))

    def _barrier(self, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue a barrier, in which each rank sends one byte to every rank."""
        token = self.scratch(1 + self.size, stream)
        self.library.collect(token, token + 1, 1, stream)

    def queue(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Queue the collectives of a batch, then its messages in one exchange per stream.

        The order must be the same on all ranks: the library matches the messages of two ranks by their order.
        """
        messages = [work for work in works if not work.collective]
        super().queue([work for work in works if work.collective], stream)
        if not messages:
            return
        together = self._together = defaultdict[int, tuple[list[Message], list[Message]]](lambda: ([], []))
        try:
            super().queue(messages, stream)
        finally:
            self._together = None
        for each, (sends, recvs) in together.items():
            self.library.exchange(sends, recvs, each)

    def exchange(self, sends: Sequence[Piece], recvs: Sequence[Piece], stream: int, *arrays: int) -> None:
        both = _messages(sends, arrays), _messages(recvs, arrays)
        if self._together is None:
            self.library.exchange(*both, stream)
        else:
            for messages, more in zip(self._together[stream], both, strict=True):
                messages += more

    def collect(self, send: Any, recv: Any, nbytes: int, stream: int, *arrays: int) -> None:
        self.library.collect(resolved(send, arrays), resolved(recv, arrays), nbytes, stream)

    def allocate(self, shape: Shape, dtype: Any) -> Array:
        return Array.empty(shape, dtype, self.device)

    def register(self, buffer: Buffer) -> Array:
        registered: Array = self.library.register(buffer)
        self.forget_routes()
        return registered

    def views(self, x: Buffer) -> list[Any]:
        return self.library.views(x)

    # Failures and teardown.

    def _wait_until(self, over: Callable[[], bool]) -> None:
        last = self._last
        assert last is not None  # a call is in progress, because only calls use ``exchange``
        self.wait_on_host(last, over, last.operation.options.timeout)

    def inspect(self, o: Work[Any]) -> None:
        if (failure := self.library.find_failure()) is not None:
            raise failure

    def to_error(self, work: Work[Any], error: Exception) -> KosError:
        return super().to_error(work, self.library.explain(work, error))

    def signal_abort(self) -> None:
        super().signal_abort()
        if not self._aborted:
            self._aborted = True
            self.library.abort(str(self.failures.first or UNMADE))

    def close(self) -> None:
        self.unwatch()
        if self.library in self.failures.links:
            self.failures.links.remove(self.library)
        try:
            self.library.close(0 if self.shared.calls is None else self.shared.calls.begun)
        finally:
            super().close()


def _messages(pieces: Sequence[Piece], arrays: Sequence[int]) -> list[Message]:
    return [(rank, resolved(place, arrays), nbytes) for rank, (place, nbytes) in enumerate(pieces) if nbytes]

