"""Tensors of the host that say they are a GPU's: torch without CUDA, and streams and events that are recorded.

With ``tests.comm.fake_nccl`` a process group of kos carries them as it carries tensors on a GPU, without one.
"""

import contextlib
import itertools
import pickle
import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kos
from kos.comm.control.bootstrap import store_rendezvous
from tests.comm.fake_nccl import WAIT, Group, communicator

DEVICE = torch.device("cuda", 0)
_OF_TORCH = torch.cuda
SIDE = 7000
"""The handle of the first stream that is made; 0 is the default stream."""


class CUDA:
    """A stand-in for ``torch.cuda``: the current stream, and every use of streams and events, in order.

    What it does not have is that of torch.

    ``log`` has ("record" or "wait", handle of a stream, number of an event), and ("use", handle) for each
    ``Tensor.record_stream``, and ("future", handle of the current stream) for each Future that was completed.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.events = 0  # that were made
        handles, numbers = itertools.count(SIDE), itertools.count()
        cuda = self

        class Stream:
            def __init__(self, device: Any = None, handle: int | None = None, stream_id: int | None = None) -> None:
                self.cuda_stream = next(handles) if handle is None else handle
                self.stream_id = -self.cuda_stream if stream_id is None else stream_id
                self.device, self.device_index, self.device_type = DEVICE, 0, 1
                cuda.streams[self.stream_id] = self

            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, self.cuda_stream

            def record_event(self, event: Any = None) -> Any:
                event = event or Event()
                event.record(self)
                return event

            def wait_event(self, event: Any) -> None:
                event.wait(self)

            def wait_stream(self, other: Any) -> None:
                self.wait_event(other.record_event())

        class EventBase:
            number: int

            def record(self, stream: Any = None) -> None:
                cuda.log.append(("record", (stream or cuda.current).cuda_stream, self.number))

            def wait(self, stream: Any = None) -> None:
                cuda.log.append(("wait", (stream or cuda.current).cuda_stream, self.number))

        class Event(EventBase):
            def __init__(self) -> None:
                self.number = next(numbers)
                cuda.events += 1

            def query(self) -> bool:
                return True

        class Future(torch._C.Future):
            def __init__(self, devices: Any = ()) -> None:
                super().__init__([torch.device("meta", 0)])  # for which torch extracts tensors as it does for CUDA

            def set_result(self, result: Any) -> None:
                cuda.log.append(("future", cuda.current.cuda_stream))
                super().set_result(result)

        self.Stream, self.Event, self.Future = Stream, Event, Future
        self.streams: dict[int, Any] = {}  # by stream_id
        self.device = 0  # the current one
        self.current: Any = Stream(handle=0, stream_id=0)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        former, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = former

    def current_stream(self, device: Any = None) -> Any:
        return self.current

    def current_device(self) -> int:
        return self.device

    def get_device_capability(self, device: Any) -> tuple[int, int]:
        return 9, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(_OF_TORCH, name)

    def set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.current, self.device = self.streams[stream_id], device_index


@contextlib.contextmanager
def tensors_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[CUDA]:
    """All tensors say that they are in the memory of GPU 0."""
    cuda = CUDA()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch.futures, "Future", cuda.Future)
    for name, function in (
        ("_cuda_getCurrentRawStream", lambda device: cuda.current.cuda_stream),
        ("_cuda_getCurrentStream", lambda device: (cuda.current.stream_id, device, 1)),
        ("_cuda_setStream", cuda.set_stream),
        ("_cuda_getDevice", lambda: cuda.device),
        ("Future", cuda.Future),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    of_tensors = {
        "is_cuda": True, "device": DEVICE, "get_device": lambda self: 0,
        "record_stream": lambda self, stream: cuda.log.append(("use", stream.cuda_stream)),
    }  # fmt: skip
    for name, value in of_tensors.items():
        monkeypatch.setattr(torch.Tensor, name, value)
    yield cuda


class _Messages:
    """Messages from one rank to another, over a communicator for host memory."""

    def __init__(self, comm: kos.Communicator, peer: int) -> None:
        self._comm, self._peer, self._works = comm, peer, list[Any]()

    def put(self, data: bytes) -> None:
        for part in (np.array([len(data)]), np.frombuffer(data, np.uint8)):
            self._works.append(self._comm.send(part, self._peer, async_op=True))

    def get(self, timeout: float) -> bytes:
        length = self._comm.recv(np.empty(1, np.int64), self._peer, timeout=timeout)
        return self._comm.recv(np.empty(int(length[0]), np.uint8), self._peer, timeout=timeout).tobytes()


class Processes:
    """What the ranks of a communicator of the stand-in for NCCL share, where they are processes."""

    def __init__(self, comm: kos.Communicator) -> None:
        self.size, self._comm = comm.size, comm
        self.barrier = SimpleNamespace(wait=lambda timeout: None, abort=lambda: None)
        mine = queue.Queue[bytes]()
        self.messages = {
            (i, j): mine if i == j else _Messages(comm, j if i == comm.rank else i)
            for i in range(comm.size) for j in range(comm.size) if comm.rank in (i, j)
        }  # fmt: skip

    def swap(self, rank: int, value: Any) -> list[Any]:
        return [pickle.loads(each) for each in self._comm.all_gather_bytes(pickle.dumps(value))]


def connect_gpu(group: Any, shared: Any = None) -> kos.Communicator:
    """Give a process group a communicator over the stand-in for NCCL, whose ranks share ``shared``."""

    def connect(backend: str, purpose: str, seconds: float | None, **keywords: Any) -> kos.Communicator:
        store = torch._C._distributed_c10d.PrefixStore(f"{purpose}/", group._store)
        rendezvous = store_rendezvous(store, group.rank(), group.size(), WAIT, group._ranks)
        return communicator(rendezvous, shared or Group(1), WAIT)

    group._connect = connect
    return group._connect_gpu(DEVICE)
