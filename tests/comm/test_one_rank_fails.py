"""One rank lacks memory for a call: the call fails on all ranks with the same error, without a timeout."""

import json

import numpy as np
import pytest

from kos.errors import InvalidArgument, OutOfMemory
from tests.comm.ranks import on_each_rank
from tests.comm.tcp_ranks import TCPRanks, run_processes

PROGRAM = """
import ctypes, json, os, resource
if {apart}:
    os.environ["KOS_HOST"] = os.environ["RANK"]
import kos, numpy as np
from kos import PremulSum
ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: memory that is freed goes back to the system at once
comm = kos.init(timeout=600)
many, rank = 1 << 20, comm.rank
x, small, wide, half = np.ones(many, "f"), np.ones(3, "f"), np.ones((3, many), "f"), np.ones(many, "e")
data, counts, scaled = bytes(4 * many), [many] * 3, PremulSum(2.0)

def batch(group):
    with group.batch():
        group.all_reduce(small)
        group.all_gather(x)

CALLS = {{
    "all_gather_bytes": lambda group: group.all_gather_bytes(data),
    "gather_bytes": lambda group: group.gather_bytes(data, 1),
    "broadcast_bytes": lambda group: group.broadcast_bytes(None if rank else data),
    "all_gather": lambda group: group.all_gather(x),
    "all_gather_v": lambda group: group.all_gather_v(x, counts),
    "all_gather_v without counts": lambda group: group.all_gather_v(x),
    "gather": lambda group: group.gather(x, 1),
    "gather_v": lambda group: group.gather_v(x, None, root=1),
    "all_to_all": lambda group: group.all_to_all(wide),
    "reduce_scatter": lambda group: group.reduce_scatter(wide),
    "reduce_scatter_v": lambda group: group.reduce_scatter_v(wide, counts),
    "a scaled sum": lambda group: group.all_reduce(half, scaled),
    "a ring of 16 bits": lambda group: group.all_reduce(half, algorithm="ring"),
    "a compressed sum": lambda group: group.all_reduce(wide, compress="int8"),
    "a compressed gather": lambda group: group.all_gather(wide, compress="int8"),
    "in flight": lambda group: group.all_reduce(half, algorithm="ring", async_op=True).wait(),
    "a batch": batch,
    "allocate": lambda group: group.allocate(16 * many, "f"),  # more than the C library keeps of what was freed
}}

def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

limits = resource.getrlimit(resource.RLIMIT_AS)
for name, call in CALLS.items():
    group, error = comm.duplicate(), None
    group.all_gather(small)
    comm.barrier()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used() + (5 << 19), limits[1]))
    try:
        result = call(group)
    except Exception as failed:
        error = failed
    resource.setrlimit(resource.RLIMIT_AS, limits)
    result = None
    print(json.dumps([name, type(error).__name__, getattr(error, "ranks", ()), "rank 1: " in f"{{error}}"]))
    comm.barrier()
    works = True
    try:
        group.all_reduce(small)
    except kos.errors.KosError:
        works = False
    assert works == (name == "allocate"), name
    error = None
    group.abort()
print(json.dumps(comm.failure))
"""


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "three hosts"])
def test_a_call_for_which_one_rank_lacks_memory_fails_on_all(apart):
    results = run_processes(PROGRAM.format(apart=apart), 3, KOS_HOST="")
    for code, output in results:
        *calls, failure = map(json.loads, output.splitlines())
        assert code == 0 and failure is None, output
        for name, kind, ranks, names_it in calls:
            assert (kind, ranks, names_it) == ("OutOfMemory", [1], True), (name, output)


@on_each_rank(TCPRanks(2).run)
def test_sizes_that_no_memory_has(comm, /):
    """All ranks raise the same error, and the communicator goes on."""
    with pytest.raises(InvalidArgument, match="shape: expected a number from 0 to "):
        comm.allocate(1 << 60, np.complex128)
    with pytest.raises(OutOfMemory, match=r"allocate of complex128\[288230376151711744\]: ") as caught:
        comm.allocate(1 << 58, np.complex128)
    assert len(caught.value.ranks) == 1 and comm.all_reduce(np.ones(1)) == comm.size
