"""What only several ranks together find out: whether they fit, whether bytes move between them, and how fast."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kos.comm import Communicator
from kos.comm.rendezvous.base import Rendezvous
from kos.cuda import create_stream, driver, load_kernel, streams, visible_devices
from kos.cuda.driver import call, cu
from kos.doctor.checks import BAD, NO, OK, Check, ranks_in_words
from kos.errors import KosError, in_words
from kos.memory.array import Array
from kos.memory.symmetric import SymmetricMemory
from kos.testing import spawn

Facts = dict[str, Any]

_COUNT = 1_000_003
_GPU_BYTES, _HOST_BYTES = 64 << 20, 8 << 20
_REPEATS, _ROUNDS = 4, 1000
_FLAG_BYTES, _FLAGS = 32, 64 << 10
_LINK_DOES_NOT_WORK = (
    "what canAccessPeer promises does not work: containers of one pid and ipc namespace (--pid=host --ipc=host), "
    "no IOMMU/ACS between the GPUs; NCCL_P2P_DISABLE=1 lets nccl do without"
)


@dataclass(frozen=True)
class Matrix:
    """Measured between every two ranks: ``[i][j]`` is i reading from j, None where it was not measured."""

    what: str  # "GPU" or "host"
    labels: list[str]
    gigabytes_per_second: list[list[float | None]]
    latency_us: list[list[float | None]]  # one way


def roll_call(rank: int) -> Callable[[], str]:
    """Come to MPI_Init, which waits for all ranks without a limit; returns who of this host has, in words.

    Open MPI gives the job a folder on each host; under another MPI nobody is named.
    """
    folder, size, job = map(os.environ.get, ("PMIX_SERVER_TMPDIR", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"))
    if folder is None or size is None or not os.access(folder, os.W_OK):
        return lambda: "; MPI_Init waits for all ranks"
    Path(folder, f"kos-doctor-{job}-{rank}").touch()

    def words() -> str:
        came = sorted(int(path.name.rpartition("-")[2]) for path in Path(folder).glob(f"kos-doctor-{job}-*"))
        return f"; MPI_Init waits for {size} ranks, of which {ranks_in_words(came)} came on this host"

    return words


def start_mpi() -> None:
    """MPI_Init as mpi4py would call it, but without Python's lock: while it waits, ``give_up`` can say so."""
    with contextlib.suppress(ImportError, OSError):  # which the rendezvous says better
        spec = importlib.util.find_spec("mpi4py.MPI")
        if spec is not None and spec.origin is not None and "mpiabi" not in spec.origin:
            multiple = 3  # MPI_THREAD_MULTIPLE in Open MPI and MPICH
            ctypes.CDLL(spec.origin).MPI_Init_thread(None, None, multiple, ctypes.byref(ctypes.c_int()))


def compare(everybody: Sequence[Facts]) -> Iterator[Check]:
    """Whether the ranks fit together, from what each says of itself; the same on every rank."""

    def grouped(what: str) -> dict[Any, list[int]]:
        groups: dict[Any, list[int]] = defaultdict(list)
        for rank, facts in enumerate(everybody):
            groups[facts[what]].append(rank)
        return groups

    hosts = list(grouped("host_id").values())
    yield Check("hosts", OK, "; ".join(f"{everybody[ranks[0]]['host']}: {ranks_in_words(ranks)}" for ranks in hosts))
    for what, verdict in (("kos", BAD), ("numpy", NO), ("NCCL", NO), ("CUDA driver", NO)):
        if len(versions := grouped(what)) > 1:
            differ = "; ".join(f"{version or 'none'} on {ranks_in_words(ranks)}" for version, ranks in versions.items())
            yield Check(f"{what} of the ranks", verdict, f"they differ: {differ}", "one version on all hosts")
    for ranks in hosts:
        where = f"{ranks_in_words(ranks)} of {everybody[ranks[0]]['host']}"
        for kind in ("pid", "ipc"):
            if len({everybody[rank][f"{kind}_namespace"] for rank in ranks}) > 1:
                found = f"{where} are in different {kind} namespaces: no memory to share"
                yield Check(f"{kind} namespaces", NO, found, f"start the containers with --{kind}=host")
        gpus = {uuid for rank in ranks for uuid in everybody[rank]["gpus"]}
        without = [rank for rank in ranks if not everybody[rank]["gpus"]]
        if gpus and without:
            found = f"{ranks_in_words(without)} see{'s' * (len(without) == 1)} none"
            yield Check("GPUs of the ranks", NO, found, "look at CUDA_VISIBLE_DEVICES there")
        elif 0 < len(gpus) < len(ranks):
            found = f"{where} share {len(gpus)} GPU{'s' * (len(gpus) > 1)}: backend peer can, nccl cannot"
            yield Check("GPUs of the ranks", NO, found, "start a rank for each GPU")


def gpu_memory(rendezvous: Rendezvous, device: int, measure: bool) -> tuple[Check, Matrix | None]:
    """Map the memory of every GPU of the host on every other, move bytes both ways, and time that."""
    nbytes = _FLAGS + 2 * _GPU_BYTES if measure else _FLAGS
    try:
        with SymmetricMemory(rendezvous, nbytes, device) as memory:
            matrix = measure_gpus(rendezvous, memory) if measure else None
    except KosError as error:
        return Check("peer memory", NO, in_words(error), _LINK_DOES_NOT_WORK), None
    return Check("peer memory", OK, f"bytes moved both ways between {rendezvous.size} ranks' GPU memory"), matrix


def gpus_of_this_process(timeout: float, measure: bool) -> tuple[Check, Matrix | None]:
    """``gpu_memory`` for a job of one rank that sees several GPUs: a thread for each."""
    try:
        found = spawn(lambda comm: gpu_memory(comm.rendezvous, comm.rank, measure), len(visible_devices()), timeout)
    except KosError as error:
        return Check("peer memory", NO, in_words(error), _LINK_DOES_NOT_WORK), None
    return next((each for each in found if each[0].verdict != OK), found[0])


def measure_gpus(rendezvous: Rendezvous, memory: SymmetricMemory) -> Matrix:
    """Copies by the copy engine, 64 MiB at a time, one pair at a time; latency by flags that two kernels raise."""
    rank, size, device = rendezvous.rank, rendezvous.size, memory.device
    facts = [json.loads(d) for d in rendezvous.allgather(json.dumps([visible_devices()[device].uuid, device]).encode())]
    ping = load_kernel(Path(__file__).with_name("ping.cu"), "ping", device)
    stream = create_stream(device)
    bandwidth, latency = np.full((2, size), np.nan)
    pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
    for index, (reader, other) in enumerate(pairs):
        rendezvous.barrier()
        with driver.on_device(device):
            if rank == reader:
                bandwidth[other] = _copy_speed(memory, other, stream)
            if facts[reader][0] == facts[other][0] or rank not in (reader, other):
                continue
            peer, flag = other if rank == reader else reader, index * _FLAG_BYTES
            mine, theirs = memory.pointer + flag, memory.pointers[peer] + flag
            result = np.zeros(3, np.uint64)
            ping(stream, 1, 1, mine, theirs, int(rank == reader), _ROUNDS, 2_000_000_000)
            streams.synchronize(stream, device)
            call(cu.cuMemcpyDtoH, result, mine, result.nbytes)
            if rank == reader and not result[2]:
                latency[other] = float(result[1]) / (_ROUNDS - 1) / 2 / 1e3
    labels = [f"rank {r} (GPU {ordinal})" for r, (_, ordinal) in enumerate(facts)]
    return Matrix("GPU", labels, _gather(rendezvous, bandwidth), _gather(rendezvous, latency))


def _copy_speed(memory: SymmetricMemory, other: int, stream: Any) -> float:
    """GB/s, a first copy left out."""
    target, source = memory.pointer + _FLAGS + _GPU_BYTES, memory.pointers[other] + _FLAGS

    def copy(times: int) -> None:
        for _ in range(times):
            call(cu.cuMemcpyDtoDAsync, target, source, _GPU_BYTES, streams.handle(stream))

    copy(1)
    return _REPEATS * _GPU_BYTES / streams.milliseconds(lambda: copy(_REPEATS), stream) / 1e6


def measure_host(comm: Communicator) -> Matrix:
    """Messages between host memory of every two ranks, there and back: 8 MiB for bandwidth, 8 bytes for latency."""
    bandwidth, latency = np.full((2, comm.size), np.nan)
    for pair in itertools.combinations(range(comm.size), 2):
        comm.rendezvous.barrier()
        if comm.rank in pair:
            other = sum(pair) - comm.rank
            latency[other] = _one_way(comm, other, 8, 200) * 1e6
            bandwidth[other] = _HOST_BYTES / _one_way(comm, other, _HOST_BYTES, _REPEATS) / 1e9
    labels = [f"rank {r}" for r in range(comm.size)]
    return Matrix("host", labels, _gather(comm.rendezvous, bandwidth), _gather(comm.rendezvous, latency))


def _one_way(comm: Communicator, other: int, nbytes: int, rounds: int) -> float:
    """Seconds that a message takes, the first round left out."""
    message, begin = np.zeros(nbytes, np.uint8), 0.0
    for turn in range(rounds + 1):
        if turn == 1:
            begin = time.perf_counter()
        for sends in (comm.rank < other, comm.rank > other):
            (comm.send if sends else comm.recv)(message, other)
    return (time.perf_counter() - begin) / rounds / 2


def _gather(rendezvous: Rendezvous, row: np.ndarray[Any, Any]) -> list[list[float | None]]:
    mine = [None if np.isnan(value) else round(float(value), 3) for value in row]
    return [json.loads(data) for data in rendezvous.allgather(json.dumps(mine).encode())]


def trial(comm: Communicator) -> Check:
    """An all-reduce of an odd size, on the host and, where the ranks have them, on the GPUs; every element checked."""
    pattern = (np.arange(_COUNT) % 1013).astype(np.float32)
    expected = comm.size * pattern + comm.size * (comm.size - 1) / 2
    mine = pattern + np.float32(comm.rank)
    places = ["host"] if comm.device is None else ["host", "GPUs"]
    for place in places:
        try:
            array = Array.from_numpy(mine, comm.device or 0) if place == "GPUs" else mine.copy()
            result = comm.all_reduce(array)
            wrong = int(np.sum((result.numpy() if place == "GPUs" else result) != expected))
        except Exception as error:
            return Check("all_reduce", BAD, f"in memory of the {place}: {in_words(error)}")
        if wrong:
            return Check("all_reduce", BAD, f"in memory of the {place}: {wrong} of {_COUNT} elements are wrong")
    ranks = f"{comm.size} rank{'s' * (comm.size > 1)}"
    return Check("all_reduce", OK, f"exact on {ranks}, in memory of the {' and the '.join(places)}")
