"""A backend of your own: messages by mpi4py, and every operation of kos on top of them.

docs/guides/writing-a-backend.md builds one that also compares calls, and names failures.

mpirun -n 2 python examples/own_backend.py
"""

import numpy as np

import kos
from kos.comm.contract import Backend, Probe
from kos.testing.conformance import run


class Message:
    def __init__(self, request, tag):
        self.request, self.tag = request, tag

    def done(self):
        return self.request.Test()


class Plain(Backend):
    name = "plain"

    @classmethod
    def probe(cls, rendezvous):
        return Probe(rendezvous.mpi_comm is not None, "messages of mpi4py need ranks of mpirun")

    def __init__(self, rendezvous, engine):
        super().__init__(rendezvous, engine)
        self.comm, self.receives = rendezvous.mpi_comm.Dup(), []

    def isend(self, array, peer, tag):
        return Message(self.comm.Isend(array.view(np.uint8), peer, tag), tag)

    def irecv(self, array, peer, tag):
        self.receives = [message for message in self.receives if not message.done()]
        self.receives.append(Message(self.comm.Irecv(array.view(np.uint8), peer, tag), tag))
        return self.receives[-1]

    def cancel(self, cancelled):
        for message in filter(cancelled, self.receives):
            message.request.Cancel()


kos.register_backend("plain", Plain)
with kos.init("plain") as comm:
    x = comm.all_reduce(np.arange(100, dtype=np.float16))
    broken = run(comm, only="float32")  # the promises of the conformance suite, as many as name float32
    print(f"rank {comm.rank}: {x[-1]} by {comm.backend_name}, promises broken: {broken}", flush=True)
