"""Ranks that have few file descriptors left: which error all ranks raise, and what they can do afterwards."""

import pytest

from tests.comm.tcp_ranks import run_processes

MANY_GROUPS = """
import resource
hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1000)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
import kos, numpy as np
comm = kos.init(timeout=60)
groups = [comm.duplicate() for _ in range(16)]
assert groups[-1].all_reduce(np.ones(1)) == comm.size
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""


def test_the_soft_limit_of_open_files_rises_to_the_hard_one():
    """16 groups of 3 ranks take more than 64 descriptors."""
    assert run_processes(MANY_GROUPS, 3) == [(0, "True\n")] * 3


FEW_LEFT = """
import json, os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
import kos, numpy as np
comm = kos.init(timeout=20)
comm.duplicate().close()  # what a process opens once
for free in range(30):
    files = []
    if comm.rank == {lacking}:
        try:
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            for file in [files.pop() for _ in range(free)]:
                os.close(file)
    group = error = None
    try:
        group = comm.duplicate()
        group.all_reduce(np.ones(1))
    except kos.errors.KosError as failed:
        error = failed
    for file in files:
        os.close(file)
    if group is not None:
        group.close() if error is None else group.abort()
    if error is not None:
        error = type(error).__name__, error.ranks, "{text}" in f"{{error}}" or f"{{error}}"
    print(json.dumps(error))
    comm.barrier()
comm.duplicate().close()
print(comm.failure)
"""


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_without_file_descriptors_for_a_group_is_named_on_all(lacking):
    """No rank counts as lost, whichever descriptor is missing, and the next group can be made."""
    text = f"rank {lacking} cannot open its connections: Too many open files"
    results = run_processes(FEW_LEFT.format(lacking=lacking, text=text), 3)
    assert all(code == 0 and output == results[0][1] for code, output in results), results
    *outcomes, failure = results[0][1].split("\n")[:-1]
    failed = [each for each in outcomes if each != "null"]
    assert {*failed} == {f'["RendezvousError", [{lacking}], true]'} and failure == "None", results
    assert 1 < len(failed) < 30 and outcomes[-1] == "null"  # in the end there were enough


LEADER = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
import kos
comm = kos.init(timeout=60)
files = []
if comm.rank == 0:
    try:
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for _ in range({free}):
            os.close(files.pop())
comm.barrier()
try:
    comm = comm.shrink(timeout=3)
    print("shrunk to", comm.size, flush=True)
except kos.errors.RendezvousError as error:
    print(error.ranks, flush=True)
for file in files:
    os.close(file)
os._exit(0)
"""


@pytest.mark.parametrize("free", [0, 2], ids=["for callers", "for calls"])
def test_a_leader_without_file_descriptors_takes_no_rank_for_lost(free):
    """It does not go on alone."""
    (_, leader), *others = run_processes(LEADER.format(free=free), 3)
    assert leader == "(0,)\n" and all("shrunk to 1" not in output for _, output in others), (leader, others)
