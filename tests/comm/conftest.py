"""Fixtures: groups of ranks on every backend that runs on a CPU."""

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos import _core, cuda
from tests.comm.ranks import MockRanks, MPIRanks, on_hosts, on_threads
from tests.comm.tcp_ranks import LAUNCHERS_VARIABLES, TCPRanks
from tests.launcher import MPIRUN
from tests.run import RANK_VARIABLES

_SEED = int(np.random.SeedSequence().generate_state(1)[0])


@pytest.fixture
def grace():
    """How long these modules wait beyond a test's own timeout, in seconds; by parameters a test changes some."""
    return {}


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch, grace):
    """Any thread may be held up for seconds: what waits for one waits for long."""
    for module, seconds in ({"control.group": 30.0, "control.grow": 30.0} | grace).items():
        monkeypatch.setattr(f"kos.comm.{module}.GRACE_SECONDS", seconds)
    monkeypatch.setattr("kos.comm.control.wire.HANDSHAKE_SECONDS", 30.0)


@pytest.fixture(scope="session")
def mpi_world():
    """The communicator of the mpirun that runs this pytest."""
    with kos.init("mpi") as world:
        yield world


# Under mpirun only the tests marked `mpi` run: collecting the others would take each rank longer than running these.
UNDER_MPIRUN = any(name in os.environ for name in RANK_VARIABLES)
# Where `make test` runs the same tests as processes, threads are left to `make test-all`.
SIZES_OF_MPI = (2, 4) if MPIRUN else ()


def backends(*sizes: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """A fixture's parameters: so many ranks that are threads, or those of the mpirun that runs this pytest."""
    mock, more = ((), ()) if UNDER_MPIRUN else (sizes, more)
    threads = [pytest.param(size, marks=pytest.mark.slow) if size in SIZES_OF_MPI else size for size in mock]
    return {
        "params": [*threads, *more, pytest.param("mpi", marks=pytest.mark.mpi)],
        "ids": [*(f"mock-{size}" for size in mock), *more, "mpi"],
    }


@pytest.fixture(**backends(1, 2, 3, 4))
def ranks(request):
    """``ranks.run(fn)`` runs fn(comm) on every rank."""
    if request.param == "mpi":
        return MPIRanks(request.getfixturevalue("mpi_world"))
    return MockRanks(request.param)


TORCHS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def mpi_library(monkeypatch):
    """Stands for mpi4py's module, which has nothing but what a test gives it."""
    library = SimpleNamespace()
    monkeypatch.setattr("kos.comm.control.mpi_job.load_mpi", lambda: library)
    return library


@pytest.fixture
def no_launcher(monkeypatch):
    """As in a shell: no launcher, mpirun included, has told this process anything."""
    slurm = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
    for name in (*LAUNCHERS_VARIABLES, *slurm, "OMPI_COMM_WORLD_RANK", "PMI_RANK", *TORCHS_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def seed(request):
    """A fresh seed, the same on all ranks; printed when the test fails."""
    value = _SEED
    if request.node.get_closest_marker("mpi"):
        world = request.getfixturevalue("mpi_world")
        value = int(world.rendezvous.allgather(str(_SEED).encode())[0])
    print(f"seed {value}")
    return value


@pytest.fixture(**backends(2, 4, more=("tcp", "tcp apart")))
def several(request):
    """As ``ranks``, two or more; those that meet by sockets share memory or, ``apart``, none."""
    if request.param == "tcp apart":
        request.getfixturevalue("apart")
    if str(request.param).startswith("tcp"):
        return TCPRanks(3)
    return request.getfixturevalue("ranks_of_mpi") if request.param == "mpi" else MockRanks(request.param)


@pytest.fixture
def ranks_of_mpi(mpi_world):
    """The ranks of the mpirun that runs this pytest, two or more."""
    if mpi_world.size == 1:
        pytest.skip("needs mpirun with two ranks or more")
    return MPIRanks(mpi_world)


@pytest.fixture
def queued(fake):
    """As ``fake``, on GPUs that never run the all_reduces that are queued."""
    fake.all_reduce = lambda *arguments: None
    return fake


@pytest.fixture
def apart(monkeypatch):
    """Each rank pretends to be on a host of its own."""
    on_hosts(monkeypatch, [1] * 64)


@pytest.fixture
def messages(monkeypatch):
    """Ranks that are threads send messages in every collective; otherwise the last rank computes most of them."""
    monkeypatch.setattr("kos.comm.host.threads.ThreadTransport.computes", lambda self, o: False)


@pytest.fixture(params=["shared", "none"])
def memory(request):
    """The memory that ranks of this host share."""
    if request.param == "none":
        request.getfixturevalue("apart")
    elif _core.native is None:
        pytest.skip(str(_core.unavailable))
    return request.param


# Ranks with a GPU each.


@pytest.fixture
def fake(monkeypatch):
    """The stand-ins for GPUs and NCCL."""
    from tests.comm.fake_nccl import no_gpu  # which the ranks of mpirun need not import

    with no_gpu(monkeypatch) as fake:
        yield fake


@pytest.fixture
def peers(monkeypatch):
    """As ``fake``, for two ranks, with the kernels of ``peer`` as the compiler of the host has compiled them."""
    from tests.comm.fake_peer import no_gpus

    with no_gpus(monkeypatch, 2) as fake:
        yield fake


@pytest.fixture
def frequent_looks(monkeypatch):
    """The watchdog looks a hundred times a second."""
    monkeypatch.setattr("kos.comm.watchdog.TICK", 0.01)


@pytest.fixture
def no_looks(monkeypatch):
    """The watchdog, after whose looks Python marks a call of NCCL, looks at nothing."""
    monkeypatch.setattr("kos.comm.watchdog.TICK", 1000.0)


@pytest.fixture(params=["nccl", "peer"])
def gpu_run(request, monkeypatch):
    """Runs a function of a communicator on two ranks, with stand-ins for GPUs."""
    from tests.comm.fake_nccl import FakeRanks, no_gpu
    from tests.comm.fake_peer import ThreadRanks, no_gpus
    from tests.host_compiler import COMPILER

    if request.param == "peer" and COMPILER is None:
        pytest.skip("needs a C++ compiler")
    ranks = FakeRanks(2) if request.param == "nccl" else ThreadRanks(2)
    with no_gpu(monkeypatch) if request.param == "nccl" else no_gpus(monkeypatch, 2):
        yield lambda body: ranks.run(lambda gpu: body(gpu.comm))


@pytest.fixture(params=["nccl", "peer", "auto"])
def gpu_alone(request, monkeypatch):
    """Runs a function of a communicator of one rank and of the stand-in for the driver."""
    from kos.comm.gpu.backend import GPUBackend
    from kos.comm.gpu.nccl import NCCLBackend
    from kos.comm.gpu.peer.backend import PeerBackend
    from kos.comm.host.host_backend import HostBackend
    from kos.comm.host.threads import ThreadTransport
    from tests.comm.fake_nccl import WAIT, Comm, Group
    from tests.comm.fake_peer import no_gpus
    from tests.host_compiler import COMPILER

    kind, group = request.param, Group(1)
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")

    def rank(rendezvous, body, fake):
        host = HostBackend(rendezvous, ThreadTransport)
        routes = [NCCLBackend(rendezvous, host.engine, 0, Comm(group, 0))] if kind != "peer" else []
        routes += [PeerBackend(rendezvous, host.engine, 0)] if kind != "nccl" else []
        host = host if kind == "auto" else None
        with kos.Communicator(GPUBackend(rendezvous, routes, host), rendezvous, {}, WAIT, host=host) as comm:
            body(comm, fake.driver)

    with no_gpus(monkeypatch, 1) as fake:
        yield lambda body: on_threads(1, lambda rendezvous: rank(rendezvous, body, fake), WAIT, group.barrier.abort)


@pytest.fixture(scope="module", params=["nccl", "peer", "auto"])
def world(request, mpi_world):
    """The ranks of the mpirun that runs this pytest, on each backend for GPUs."""
    probe = mpi_world.probes["nccl" if request.param == "auto" else request.param]
    if mpi_world.size == 1 or not probe.usable:
        pytest.skip(f"needs two ranks or more with a GPU each: {probe.reason}")
    with kos.init(request.param, timeout=20.0) as world:
        cuda.set_device(world.device)
        yield world


@pytest.fixture(scope="module")
def worlds(request, mpi_world):
    """The communicators of the backend ``BACKEND`` of the test's module, of which the last one may be in use."""
    probe = mpi_world.probes[request.module.BACKEND]
    if not probe.usable:
        pytest.skip(f"needs a GPU for each rank: {probe.reason}")
    worlds = []
    yield worlds
    worlds[-1].close()


@pytest.fixture
def gpu_world(request, mpi_world, worlds):
    """The communicator of all ranks, shared by the tests until one of them breaks it."""
    fit = bool(worlds) and worlds[-1].failure is None
    if b"" in mpi_world.rendezvous.allgather(b"fit" if fit else b""):
        if worlds:
            worlds[-1].abort()
        worlds.append(kos.init(request.module.BACKEND, timeout=20.0))
        cuda.set_device(worlds[-1].device)
    return worlds[-1]
