"""PyTorch's own tests of torch.distributed, from its wheel, as a TestCase; BACKEND and WORLD_SIZE choose what runs.

PyTorch's runner starts a new process for each rank of each test, which takes seconds with a GPU.  Here the process of
a rank runs one test after another, and each test makes its own groups.  After a test with an unexpected exit code, all
ranks get new processes.  The ranks are forked from a process that has imported torch.  On CPUs that is this process.
On GPUs it is a server of ``multiprocessing`` that only imports this file, because CUDA does not survive a fork.
Many tests run for some backends only, which the suite names.  With TORCH_SUITE_ON_KOS every group is one of kos, so
that the tests of gloo, MPI or NCCL run on kos: BACKEND=gloo, BACKEND=mpi or BACKEND=nccl.
"""

import gc
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import types
import unittest
from multiprocessing.connection import Connection
from typing import Any, ClassVar

os.environ.setdefault("BACKEND", "kos")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="torch-suite-"))
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # imports then count devices without CUDA
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")
if importlib.util.find_spec("expecttest") is None:  # of which PyTorch's TestCase is a subclass
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

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

from torch.testing._internal.distributed.distributed_test import Barrier, DistributedTest, TestDistBackend  # noqa: E402

CLEAN = {0} | {skip.exit_code for skip in common.TEST_SKIPS.values()}
"""The exit codes of a test after which its process runs the next one."""


class KeptProcess:
    """A ``Process`` for PyTorch's runner: one rank of one test, run in a process that is kept for the next test."""

    kept: ClassVar[dict[str, tuple[Any, Connection]]] = {}

    def __init__(self, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._name, self._task = name, (args, kwargs)
        self._code: int | None = None

    def start(self) -> None:
        if self._name not in self.kept or not self.kept[self._name][0].is_alive():
            ours, theirs = multiprocessing.Pipe()
            if torch.cuda.is_available():
                multiprocessing.set_forkserver_preload([__name__])
                context: Any = multiprocessing.get_context("forkserver")
            else:
                context = multiprocessing.get_context("fork")
            process = context.Process(target=run_tests, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.kept[self._name] = process, ours
        self._process, self._connection = self.kept[self._name]
        self.pid = self._process.pid
        self._connection.send((dict(os.environ), *self._task))

    @property
    def exitcode(self) -> int | None:
        if self._code is None:
            try:
                if self._connection.poll():
                    self._code = self._connection.recv()
            except (EOFError, OSError):  # it has ended
                self._process.join(1)
                self._code = self._process.exitcode
        return self._code

    def terminate(self) -> None:
        """Kill the processes of all ranks if the exit code of this one is unexpected."""
        if self.exitcode not in CLEAN:
            for process, connection in self.kept.values():
                process.kill()
                connection.close()
            self.kept.clear()


def run_tests(tasks: Connection) -> None:
    """Run the tests received from ``tasks`` as PyTorch's runner does, and answer each with its exit code."""
    gc.freeze()  # so that the collections below do not traverse the objects of torch
    while True:
        try:
            environment, args, keywords = tasks.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environment)
        Barrier.barrier_id = 0
        try:
            TorchSuite._run(*args, **keywords)
        except SystemExit as end:
            code = end.code
        if code not in CLEAN:
            sys.exit(code)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.set_device(0)
        tasks.send(code)


class TorchSuite(TestDistBackend, DistributedTest._DistTestBase):
    """Every test of ``distributed_test``."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(KeptProcess)
