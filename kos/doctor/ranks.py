"""Checks across ranks: whether their software and hosts are compatible, and whether bytes move between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kos.comm import Communicator
from kos.comm.control.base import ControlPlane
from kos.cuda import visible_devices
from kos.doctor.checks import BAD, NO, OK, Check
from kos.errors import KosError, in_words, plural, ranks_in_words
from kos.memory.array import Array
from kos.memory.symmetric import ALIGNMENT, SymmetricMemory
from kos.testing import spawn

Facts = dict[str, Any]

_COUNT = 1_000_003
_LINK_DOES_NOT_WORK = (
    "peer access does not work though the driver reports it: start containers in one pid and ipc namespace "
    "(--pid=host --ipc=host), switch off IOMMU/ACS between the GPUs, or set NCCL_P2P_DISABLE=1 for nccl"
)


def compare(everybody: Sequence[Facts]) -> Iterator[Check]:
    """Compare the facts of all ranks; the result is the same on every rank."""

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
            found = f"{where} share {plural(len(gpus), 'GPU')}: peer can be used, nccl cannot"
            yield Check("GPUs of the ranks", NO, found, "start a rank for each GPU")


def gpu_memory(rendezvous: ControlPlane, device: int) -> Check:
    """Map the memory of every GPU of the host on every other, and move bytes both ways."""
    try:
        with SymmetricMemory(rendezvous, rendezvous.size * ALIGNMENT, device):
            pass
    except KosError as error:
        return Check("peer memory", NO, in_words(error), _LINK_DOES_NOT_WORK)
    return Check("peer memory", OK, f"bytes moved both ways between {rendezvous.size} ranks' GPU memory")


def gpus_of_this_process(timeout: float) -> Check:
    """``gpu_memory`` for a job of one rank that sees several GPUs: a thread for each."""
    try:
        found = spawn(lambda comm: gpu_memory(comm.rendezvous, comm.rank), len(visible_devices()), timeout)
    except KosError as error:
        return Check("peer memory", NO, in_words(error), _LINK_DOES_NOT_WORK)
    return next((each for each in found if each.verdict != OK), found[0])


def trial(comm: Communicator) -> Check:
    """An all-reduce of an odd size, on the host and, if available, on the GPUs; every element is checked."""
    pattern = (np.arange(_COUNT) % 1013).astype(np.float32)
    expected = comm.size * pattern + comm.size * (comm.size - 1) / 2
    mine = pattern + np.float32(comm.rank)
    places = ["host"] if comm.device is None else ["host", "GPUs"]
    for place in places:
        try:
            array: Any = Array.from_numpy(mine, comm.device or 0) if place == "GPUs" else mine.copy()
            result = comm.all_reduce(array)
            wrong = int(np.sum((result.numpy() if place == "GPUs" else result) != expected))
        except Exception as error:
            return Check("all_reduce", BAD, f"in memory of the {place}: {in_words(error)}")
        if wrong:
            return Check("all_reduce", BAD, f"in memory of the {place}: {wrong} of {_COUNT} elements are wrong")
    return Check("all_reduce", OK, f"exact on {plural(comm.size, 'rank')}, in memory of the {' and the '.join(places)}")
