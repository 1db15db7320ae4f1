"""PyTorch's own tests of torch.distributed, from its wheel, as a TestCase; BACKEND and WORLD_SIZE choose what runs.

The ranks are forked from a process that has imported torch: PyTorch's runner starts each rank of each test anew.  On
CPUs that is this process.  On GPUs it is a server of ``multiprocessing`` that only imports this file, since a process
that has used CUDA cannot share a GPU with processes that it forks.
Many tests run for some backends only, which the suite names.  With TORCH_SUITE_ON_KOS every group is one of kos, so
that the tests of gloo, MPI or NCCL run on kos: BACKEND=gloo, BACKEND=mpi or BACKEND=nccl.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import types
import unittest
from multiprocessing.context import ForkServerProcess
from typing import Any

os.environ.setdefault("BACKEND", "kos")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="torch-suite-"))
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # imports then count devices without CUDA
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")
if importlib.util.find_spec("expecttest") is None:  # of which PyTorch's TestCase is a subclass
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]

import torch
import torch.distributed.distributed_c10d as c10d
import torch.testing._internal.common_distributed as common

import kos.interop.torch  # noqa: F401 -- registers the backend

for feature in ("ddp", "subgroup"):  # before the tests are imported, whose decorators read it
    common.DistTestCases.backend_feature[feature].add("kos")

if os.environ.get("TORCH_SUITE_ON_KOS"):
    initialize, make_group = c10d.init_process_group, c10d._new_process_group_helper

    def initialize_on_kos(backend: Any = None, *args: Any, **keywords: Any) -> None:
        initialize("kos", *args, **keywords)

    def make_on_kos(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **keywords: Any) -> Any:
        return make_group(size, rank, ranks, "kos", *args, **keywords)

    c10d.init_process_group = torch.distributed.init_process_group = initialize_on_kos
    c10d._new_process_group_helper = make_on_kos

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


class ServedProcess(ForkServerProcess):
    """A process with the environment of its creator; the server's environment is older."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()


class TorchSuite(TestDistBackend, DistributedTest._DistTestBase):
    """Every test of ``distributed_test``."""

    def setUp(self) -> None:
        super().setUp()
        if torch.cuda.is_available():
            multiprocessing.set_forkserver_preload([__name__])
            self._start_processes(ServedProcess)
        else:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
