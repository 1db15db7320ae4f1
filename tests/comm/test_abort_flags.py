"""``Communicator.abort_flags``: flags in memory that tell kernels whether an operation was ended early."""

import ctypes

import pytest

from kos.testing import spawn
from tests.comm.fake_nccl import FakeRanks, no_gpu
from tests.comm.fake_peer import ThreadRanks, no_gpus
from tests.host_compiler import COMPILER


def read(flags: list[int]) -> list[int]:
    return [ctypes.c_uint64.from_address(flag).value for flag in flags]


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("backend", ["nccl", pytest.param("peer", marks=needs_compiler)])
def test_a_flag_is_set_before_operations_are_ended(backend, monkeypatch):
    ranks = FakeRanks(2) if backend == "nccl" else ThreadRanks(2)

    def body(gpu):
        flags = gpu.comm.abort_flags
        assert flags and not any(read(flags))
        gpu.comm.abort()
        assert any(read(flags))

    with no_gpu(monkeypatch) if backend == "nccl" else no_gpus(monkeypatch, 2):
        ranks.run(body)


def test_hosts_have_none():
    assert spawn(lambda comm: comm.abort_flags, 2) == [[], []]
