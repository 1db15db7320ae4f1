"""Cached calls on GPUs for ``benchmarks.instructions``, on the stand-ins of the tests: no GPU is needed.

The functions of the driver, of NCCL and of torch's streams that the core calls do nothing here.  torch's own function
reads its tensors; only their device is reported as a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import kos
from kos.comm import watchdog
from kos.comm.gpu import nccl_binding
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer import engine
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.cuda import driver
from kos.memory.array import Array

LIMIT = 600.0  # seconds
COUNT = 1024  # elements of float32
FUNCTIONS = """
#include <stdint.h>
typedef struct { void *data; int32_t device, index, nd; } tensor;
static int (*read_tensor)(void *, tensor *);
int nothing(void) { return 0; }
int get_context(uint64_t *context) { return *context = 7, 0; }
int is_capturing(uint64_t stream, int *captured) { return *captured = 0; }
int current_stream(int32_t device, int32_t index, uint64_t *stream) { return *stream = 0, 0; }
int read_as_on_gpu(void *x, tensor *t) { int error = read_tensor(x, t); return t->device = 2, error; }
void set_read(void *function) { read_tensor = (int (*)(void *, tensor *))function; }
"""
FORMS: dict[str, Callable[[Any, Any, Any], Callable[[], Any]]] = {
    "all_reduce": lambda comm, x, y: lambda: comm.all_reduce(x),
    "all_gather": lambda comm, x, y: lambda: comm.all_gather(x, y),
}
BACKENDS = ("nccl", "peer", "nccl+peer")
OPERATIONS = (
    *(f"{form}, {backend}" for backend in BACKENDS for form in FORMS),
    *(f"all_reduce, {backend}, default stream" for backend in BACKENDS),
    *(f"{form}, {backend}, torch" for backend in BACKENDS[:2] for form in ("all_reduce", "all_gather")),
)
"""On arrays of kos with a stream of their own, unless the name says otherwise."""


def is_available(name: str) -> bool:
    """Whether the call can be made: calls on tensors need torch with DLPack's C exchange API."""
    if not name.endswith("torch"):
        return True
    if find_spec("torch") is None:
        return False
    import torch

    return hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


class _Exchange(ctypes.Structure):
    """DLPack's C exchange API, with the functions that the core calls: ``read`` and ``current_stream``."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2), ("unused", ctypes.c_void_p * 4), ("read", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    )  # fmt: skip


@contextmanager
def _stand_ins(library: ctypes.CDLL) -> Iterator[None]:
    import pytest

    from tests.comm.fake_nccl import FakeNCCL
    from tests.comm.fake_peer import no_gpus
    from tests.comm.host_kernel import NoKernel

    def address(name: str) -> int:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0

    functions = {"cuCtxGetCurrent": "get_context", "cuStreamIsCapturing": "is_capturing"}
    with pytest.MonkeyPatch.context() as patch, no_gpus(patch, 2), ExitStack() as rest:
        patch.setattr(watchdog, "TICK", LIMIT)
        patch.setattr(engine, "load_kernel", NoKernel)
        patch.setattr(driver, "address", lambda name: address(functions.get(name, "nothing")))
        patch.setattr(nccl_binding, "address_of", lambda operation: address("nothing"))
        for name in ("all_reduce", "all_gather"):
            patch.setattr(FakeNCCL, name, lambda *arguments: None)
        if any(name.endswith("torch") and is_available(name) for name in OPERATIONS):
            from tests.interop.torch_on_host import tensors_of_a_gpu

            _replace_exchange_api(patch, library, address)
            rest.enter_context(tensors_of_a_gpu(patch))
        yield


def _replace_exchange_api(patch: Any, library: ctypes.CDLL, address: Callable[[str], int]) -> None:
    import torch

    pointer_of, capsule_of = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule_of.restype, capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    kind: Any = torch.Tensor
    exchange = _Exchange.from_address(pointer_of(kind.__dlpack_c_exchange_api__, b"dlpack_exchange_api"))
    library.set_read(ctypes.c_void_p(exchange.read))
    changed = _Exchange(exchange.version, exchange.unused, address("read_as_on_gpu"), address("current_stream"))
    capsule = capsule_of(ctypes.addressof(changed), b"dlpack_exchange_api", None)
    patch.setattr(kind, "__dlpack_c_exchange_api__", capsule)
    library.kept = changed  # the capsule points to it


def run_calls(library: ctypes.CDLL, count: Callable[[str, int, Any, Callable[[], Any]], None]) -> None:
    """Call ``count(name, bytes, communicator, call)`` for every operation, on rank 0 of two ranks that are threads."""
    from tests.comm.fake_nccl import Comm, Group
    from tests.comm.ranks import on_threads

    def rank(rendezvous: Any, name: str, group: Any) -> None:
        host: HostBackend | None = HostBackend(rendezvous, ThreadTransport)
        engine = host.engine
        made: dict[str, Callable[[], Any]] = {
            "nccl": lambda: NCCLBackend(rendezvous, engine, 0, Comm(group, rendezvous.rank)),
            "peer": lambda: PeerBackend(rendezvous, engine, 0),
        }
        names = name.split("+")
        host = host if names[1:] else None
        backend = GPUBackend(rendezvous, [made[each]() for each in names], host)
        with kos.Communicator(backend, rendezvous, {}, LIMIT, host=host) as comm:
            for operation in OPERATIONS if rendezvous.rank == 0 else ():
                form, _, rest = operation.partition(f", {name}")
                if form in FORMS and rest in ("", ", default stream", ", torch") and is_available(operation):
                    count(operation, 4 * COUNT, comm, FORMS[form](comm, *_arrays(rest)))
            rendezvous.barrier()

    with _stand_ins(library):
        for name in BACKENDS:
            group = Group(2)
            on_threads(2, partial(rank, name=name, group=group), LIMIT, group.barrier.abort)


def _arrays(kind: str) -> list[Any]:
    """An array, and one of twice its size for the result of all_gather."""
    from tests.fake_cuda import Stream

    sizes = COUNT, 2 * COUNT
    if kind == ", torch":
        import torch

        return [torch.zeros(n) for n in sizes]
    stream = None if kind else Stream(40)
    return [Array.empty(n, "float32", 0, stream=stream) for n in sizes]
