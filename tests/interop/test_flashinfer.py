"""The protocol that FlashInfer declares, checked by its structure: FlashInfer itself needs a GPU."""

from __future__ import annotations

import inspect
import socket
from typing import Any, Protocol, runtime_checkable

import pytest

from kos.errors import InvalidArgument
from kos.interop.flashinfer import CommBackend
from kos.testing import spawn
from tests.comm.ranks import on_each_rank


@runtime_checkable
class Declared(Protocol):
    """Names and arguments of ``flashinfer/comm/abstractions.py`` (flashinfer-ai/flashinfer, commit 50fe3661)."""

    def Get_rank(self) -> int: ...
    def Get_size(self) -> int: ...
    def allgather(self, data: Any) -> tuple[Any, ...]: ...
    def bcast(self, data: Any, root: int) -> Any: ...
    def barrier(self) -> None: ...
    def Split(self, color: int, key: int) -> Declared: ...


def test_it_has_the_methods_that_flashinfer_declares():
    names = [name for name in vars(Declared) if not name.startswith("_")]
    assert len(names) == 6
    for name in names:
        theirs, ours = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (Declared, CommBackend))
        assert ours == theirs, name


@on_each_rank(spawn, 3)
def test_what_flashinfer_exchanges(comm, /):
    backend = CommBackend(comm)
    assert isinstance(backend, Declared)
    r, n = backend.Get_rank(), backend.Get_size()
    for data in (1 << 40, True, None, b"\x00handle\xff" * 8, socket.gethostname(), (r, "/tmp/x", b"\n"), [r, 0.1]):
        assert backend.allgather(data)[r] == data
    assert backend.allgather((r, b"fd")) == tuple((k, b"fd") for k in range(n))
    assert backend.bcast(b"multicast" if r == 1 else object(), root=1) == b"multicast"
    group = backend.Split(r % 2, -r)
    assert group.allgather(r) == tuple(sorted((k for k in range(n) if k % 2 == r % 2), reverse=True))
    with pytest.raises(InvalidArgument, match="data: expected numbers, text, bytes.* got <object"):
        backend.allgather(object())
    backend.barrier()
