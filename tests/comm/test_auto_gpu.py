"""``auto`` on GPUs with a table that changes backends at every turn: the conformance suite, batches, graphs, failures.

mpirun -n 4 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_auto_gpu.py
"""

import itertools
import json
import os

import numpy as np
import pytest

from kos import ReduceOp, cuda
from kos.comm import tuning
from kos.files import cache_folder
from kos.memory.array import Array
from tests.comm.gpu_ranks import GPURanks
from tests.comm.test_conformance import *  # noqa: F403 -- the tests that GPUs run too
from tests.comm.test_nccl import (  # noqa: F401 -- collected here
    TIMEOUT,
    test_a_rank_that_does_not_come,
    test_deterministic_is_in_rank_order,
    test_graph_capture_and_replay,
    test_promise,
    test_several_communicators,
    test_uneven_shards_in_place_in_a_graph,
)

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]
BACKEND = "auto"

TURNS = ((64, "peer"), (1024, "nccl"), (16 << 10, "peer"), (256 << 10, "nccl"), (4 << 20, "peer"), (None, "nccl"))
OPERATIONS = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "gather", "scatter")


@pytest.fixture(scope="module")
def worlds(mpi_world, tmp_path_factory):
    for name in ("peer", "nccl"):
        if not mpi_world.probes[name].usable or mpi_world.size == 1:
            pytest.skip(f"needs two ranks or more, with a GPU each: {name}: {mpi_world.probes[name].reason}")
    gpu, link = tuning.machine(mpi_world.local_rank)
    routes = {tuning.key(name, False, False, True): TURNS for name in OPERATIONS}
    routes[tuning.key("send_recv", False, False, True)] = ((None, "peer"),)
    table = tuning.Table(gpu, link, mpi_world.size, "the test", tuning.DEFAULT, routes)
    kernels = cache_folder() / "kernels"  # which stay where they are
    kernels.mkdir(parents=True, exist_ok=True)
    before, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), str(tmp_path_factory.mktemp("cache"))
    path = tuning.user_path(gpu, mpi_world.size)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(table.to_json()))
    (cache_folder() / "kernels").symlink_to(kernels)
    worlds = []
    yield worlds
    worlds[-1].close()
    os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)


@pytest.fixture
def ranks(request, gpu_world, mpi_world):
    case = getattr(request.node, "callspec", None)
    if case and case.params.get("op") is ReduceOp.PROD and case.params["dtype"].kind == "c":
        pytest.skip("products of complex numbers are refused by name")
    return GPURanks(gpu_world, mpi_world)


def test_backends_alternate_on_one_stream(ranks, seed):
    """Each call's input is the last one's output, eager and in a graph: their order is the stream's."""
    assert ranks.comm.backend_name == "nccl+peer+mpi", ranks.comm.explain()

    def body(gpu):
        comm, rng = gpu.comm, np.random.default_rng(seed)
        stream = cuda.create_stream(comm.device)
        counts = rng.integers(1, 1 << 20, 40)
        x = Array.from_numpy(np.full(1 << 20, 1, np.int32), comm.device)
        cuda.synchronize(comm.device)
        turns = itertools.cycle(comm.backend.routes)

        def calls():
            for count in counts:
                comm.all_reduce(x[: int(count)], op=ReduceOp.MAX, stream=stream)
                comm.all_reduce(x[: int(count)], stream=stream)
                comm.reduce_scatter(x[: comm.size], x[comm.rank : comm.rank + 1], stream=stream)
                comm.all_gather(x[comm.rank : comm.rank + 1], x[: comm.size], stream=stream)

        backend = comm.backend
        backend.of = lambda o: next(turns)
        try:
            calls()
            comm.synchronize(TIMEOUT, stream=stream)
            with cuda.capture(stream, keep=[x]) as graph:
                calls()
            graph.replay(stream)
            comm.synchronize(TIMEOUT, stream=stream)
        finally:
            del backend.of
        expected = np.full(1 << 20, 1, np.int32)
        with np.errstate(over="ignore"):
            for _ in range(2):
                for count in counts:
                    expected[:count] *= comm.size
                    expected[: comm.size] *= comm.size
        assert (x.numpy() == expected).all()

    ranks.run(body)
