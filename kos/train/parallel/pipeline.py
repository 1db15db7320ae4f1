"""Pipeline parallelism: the layers in stages on different ranks, and the micro-batches that pass through them.

What each rank does and in which order is a schedule (``kos.train.parallel.schedules``); here is what goes between the
stages: activations forward, their gradients backward. Each direction between two ranks is a communicator of its own,
so that no message waits behind another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from kos.train.ops import Array
from kos.train.parallel.mesh import Axis, DryCommunicator
from kos.train.parallel.schedules import Action, Place, Schedule

if TYPE_CHECKING:
    from kos.comm.communicator import Communicator
    from kos.comm.work import Work


@dataclass
class Buffer:
    """Memory for a message between two stages, and the send that may still read it."""

    array: Array
    sent: Work[None] | None = None

    def free(self) -> Buffer:
        if self.sent is not None:
            self.sent.wait()
        self.sent = None
        return self


class Pipeline:
    """The ranks of ``axis`` with the stages that ``schedule`` gives them. Collective."""

    def __init__(self, axis: Axis, schedule: Schedule) -> None:
        self.axis, self.schedule, self.actions = axis, schedule, schedule.actions[axis.rank]
        self._links: dict[tuple[int, int, bool], Communicator] = {}
        self.ends: Communicator | None = None
        """The ranks of the first and the last stage.  None if one rank has both, or if this rank has neither."""
        self._buffers: dict[bool, list[Buffer]] = {True: [], False: []}  # by direction: True for forwards
        if axis.size == 1:
            return
        ranks = [schedule.place(stage).rank for stage in range(schedule.stages)]
        for pair in dict.fromkeys(pairwise(ranks)):
            for sender, receiver, forward in ((*pair, True), (*pair[::-1], False)):
                if sender != receiver:
                    color = 0 if axis.rank in pair else None
                    link = axis.comm.split(color, int(axis.rank == receiver))
                    if link is not None:
                        self._links[sender, receiver, forward] = link
        if ranks[0] != ranks[-1]:
            self.ends = axis.comm.split(0 if axis.rank in (ranks[0], ranks[-1]) else None)

    def make_buffers(self, make: Callable[[], Array]) -> None:
        """Buffers for each direction: one to receive, one to compute, one to send. A single rank needs one in all."""
        sizes = {True: 3, False: 3} if self.axis.size > 1 else {True: 0, False: 1}
        self._buffers = {forward: [Buffer(make()) for _ in range(size)] for forward, size in sizes.items()}

    def buffer(self, forward: bool) -> Buffer:
        """The least recently used buffer, once no send reads it."""
        buffers = self._buffers[forward]
        buffers.append(buffers.pop(0))
        return buffers[-1].free()

    def free_buffers(self) -> None:
        """Wait until no send reads a buffer."""
        for buffer in (*self._buffers[True], *self._buffers[False]):
            buffer.free()

    def connect(self, rows: int) -> None:
        """Send a message of this number of rows in each direction, in the same order on all ranks.

        In its first call of a size, NCCL connects two ranks and waits on the host. Within a schedule, ranks could wait
        for each other in this way. Messages are asynchronous as in a schedule, so that the same kernels are loaded.
        """
        x = self.buffer(forward=True).array[:rows]
        for (sender, _, _), link in self._links.items():
            (link.send(x, 1, async_op=True) if sender == self.axis.rank else link.recv(x, 0, async_op=True)).wait()

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """A context for a step that loads all kernels. No messages are sent between stages.

        CUDA loads a kernel only after all running kernels of the process have ended. A kernel that sends or receives a
        message ends only after the other rank has received or sent it. Two ranks that loaded kernels in the middle of
        a schedule could therefore wait for each other.
        """
        links, dry = self._links, cast("Communicator", DryCommunicator(self.axis.rank, self.axis.size))
        self._links = dict.fromkeys(links, dry)
        try:
            yield
        finally:
            self._links = links

    def inputs(
        self, actions: Sequence[Action] | None = None, rows: Sequence[int] = ()
    ) -> Iterator[tuple[Action, Buffer | None]]:
        """Each action (default: of the schedule) and its input from another rank. The next input arrives meanwhile.

        ``rows`` of each micro-batch's messages: if not given, those of the buffers.
        """

        def begin(action: Action) -> tuple[Buffer, Work[Array]] | None:
            if (link := self._incoming(action)) is None:
                return None
            buffer = self.buffer(action.kind == "F")
            array = buffer.array[: rows[action.micro_batch]] if rows else buffer.array
            return buffer, link.recv(array, 0, async_op=True)

        actions = self.actions if actions is None else actions
        coming = begin(actions[0])
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            here, coming = coming, begin(following) if following is not None else None
            if here is not None:
                here[1].wait()
            yield action, here[0] if here is not None else None

    def receive(self, action: Action, make: Callable[[], Array]) -> Buffer | None:
        """The input of ``action``, if it comes from another rank, in memory that ``make`` takes."""
        if (link := self._incoming(action)) is None:
            return None
        link.recv((buffer := Buffer(make())).array, 0)
        return buffer

    def _incoming(self, action: Action) -> Communicator | None:
        sender = self._other(self.schedule.source(self.axis.rank, action))
        return None if sender is None else self._links[sender, self.axis.rank, action.kind == "F"]

    def send(self, action: Action, x: Array) -> Work[None] | None:
        """Begin to send the output of ``action`` if another rank needs it."""
        receiver = self._other(self.schedule.destination(self.axis.rank, action))
        if receiver is None:
            return None
        return self._links[self.axis.rank, receiver, action.kind == "F"].send(x, 1, async_op=True)

    def _other(self, place: Place | None) -> int | None:
        return None if place is None or place.rank == self.axis.rank else place.rank

    def own_destination(self, action: Action) -> int | None:
        """This rank's own chunk that takes the output of ``action``, where a V turns."""
        to = self.schedule.destination(self.axis.rank, action)
        return to.chunk if to is not None and to.rank == self.axis.rank else None

    def communicators(self) -> list[Communicator]:
        return [*self._links.values(), *filter(None, [self.ends])]

    def close(self) -> None:
        for comm in self.communicators():
            comm.close()
