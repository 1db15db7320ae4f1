"""``Communicator.ended_words``, by which kernels learn that an operation of the communicator was ended early."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kos.comm.gpu import shared
from kos.testing import spawn
from tests.comm.fake_nccl import FakeRanks, no_gpu
from tests.comm.fake_peer import ThreadRanks, no_gpus
from tests.host_compiler import COMPILER


def read(words: list[int]) -> list[int]:
    return [ctypes.c_uint64.from_address(word).value for word in words]


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("backend", ["nccl", pytest.param("peer", marks=needs_compiler)])
def test_a_word_is_set_before_operations_are_ended(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "pinned_empty", lambda count, dtype, device: np.zeros(count, dtype))
    ranks: Any = FakeRanks(2) if backend == "nccl" else ThreadRanks(2)

    def body(gpu: Any) -> None:
        words = gpu.comm.ended_words
        assert words and not any(read(words))
        gpu.comm.abort()
        assert any(read(words))

    with no_gpu(monkeypatch) if backend == "nccl" else no_gpus(monkeypatch, 2):
        ranks.run(body)


def test_hosts_have_none() -> None:
    assert spawn(lambda comm: comm.ended_words, 2) == [[], []]
