"""The communicator of a rank of the emulated device, over the mock backend."""

from __future__ import annotations

import numpy as np

from kos.memory.array import Array
from tests.train.host_kernels.engine import capture_of_rank, not_captured, on_device, on_host, pending


class DeviceComm:
    """The communicator of a rank with a GPU: arrays of the emulated device are ndarrays to the one behind it.

    A collective that is asked for with ``async_op`` happens at once or, two times of three, when it is waited for: what
    is read too early, or never waited for, is wrong.  So is what is written while a message is under way.  The first
    message of a size between two ranks waits on the host for the other's, as NCCL's does.
    """

    device, backend_name, abort_flags = 0, "peer", ()

    def __init__(self, comm):
        self._comm = comm
        self._calls = 0
        self._connected = set()

    def _connect(self, other, array):
        if (other, array.nbytes.bit_length()) not in self._connected:
            self._connected.add((other, array.nbytes.bit_length()))
            not_captured("connecting")
            here, there = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
            self._comm.send_recv(here, there, other, other, tag=2)

    def allocate(self, shape, dtype):
        array = Array.empty(shape, dtype, self.device)
        array.fill_bytes(255)
        return array

    def split(self, color, key=0):
        not_captured("splitting")
        comm = self._comm.split(color, key)
        return None if comm is None else DeviceComm(comm)

    def shrink(self):
        not_captured("shrinking")
        return DeviceComm(self._comm.shrink())

    def synchronize(self, until=None):
        not_captured("waiting")
        assert until is None or until()

    def send(self, x, dst, async_op=False):
        self._connect(dst, x)
        return _started(Send(self._comm, x, dst), async_op)

    def recv(self, out, src, async_op=False):
        self._connect(src, out)
        return _started(Receive(self._comm, out, src), async_op)

    def send_recv(self, x, out, dst, src, async_op=False):
        return _started(Both(Send(self._comm, x, dst), Receive(self._comm, out, src)), async_op)

    def __getattr__(self, name):
        call = getattr(self._comm, name)
        if name not in ("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce", "reduce_scatter", "send_recv"):
            if callable(call):
                not_captured(name)
            return call

        def collective(*arguments, async_op=False, **options):
            there = [on_host(x) if isinstance(x, Array) else x for x in arguments]
            options = {key: on_host(x) if isinstance(x, Array) else x for key, x in options.items()}
            self._calls += 1
            work = Collective(lambda: call(*there, **options))
            return _started(work, async_op, self._calls % 3 == 0)

        return collective



def _started(work, async_op, at_once=True):
    """What is begun in a capture is waited for in it, and what is begun before it is not."""
    work.captured = capture_of_rank()
    pending().add(work)
    if at_once:
        work.start()
    return work if async_op else work.wait()



class Collective:
    def __init__(self, run):
        self._run = run

    def start(self):
        run, self._run = self._run, None
        if run:
            on_device(run)

    def finish(self):
        pass

    def wait(self):
        assert self.captured is capture_of_rank(), "a work that another graph, or none, has begun"
        if self in pending():
            self.start()
            on_device(self.finish)
            pending().discard(self)



class Message(Collective):
    """Between two ranks, beside other work: begun on one, it ends when the other has begun it too."""

    def __init__(self, comm, array, other):
        super().__init__(self._begin)
        self._comm, self._other, self._array = comm, other, array
        self._word, self._both = np.zeros(1, np.uint8), []

    def finish(self):
        while self._both:
            self._both.pop().wait()



class Send(Message):
    def _begin(self):
        self._sent = on_host(self._array).copy()
        self._both = [
            self._comm.send(self._sent, self._other, async_op=True),
            self._comm.recv(self._word, self._other, tag=1, async_op=True),
        ]

    def finish(self):
        super().finish()
        assert self._sent.tobytes() == on_host(self._array).tobytes(), "written while it was being sent"



class Receive(Message):
    def _begin(self):
        there = on_host(self._array)
        there.view(np.uint8).fill(255)
        self._came = np.empty_like(there)
        self._both = [
            self._comm.recv(self._came, self._other, async_op=True),
            self._comm.send(self._word, self._other, tag=1, async_op=True),
        ]

    def finish(self):
        super().finish()
        there = on_host(self._array)
        assert (there.view(np.uint8) == 255).all(), "written while it was being received"
        there[...] = self._came



class Both(Collective):
    def __init__(self, *messages):
        super().__init__(lambda: [each._begin() for each in messages])
        self._messages = messages

    def finish(self):
        for each in self._messages:
            each.finish()
