"""What docs/differences.md says of kos, run on four ranks; of torch.distributed (gloo) and of MPI, on two."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.errors import BackendUnavailable, CollectiveMismatch, InvalidArgument
from kos.testing import spawn
from tests.comm.tcp_ranks import free_port
from tests.comm.test_jobs import environment
from tests.launcher import MPIRUN, needs_mpirun, run_program

TORCH = """
import datetime, os
import torch as T
import torch.distributed as dist

r = int(os.environ["RANK"])

def raises(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(call)

dist.init_process_group("gloo")
raises(ValueError, lambda: dist.init_process_group("gloo"))
assert dist.distributed_c10d._get_default_timeout("gloo") == datetime.timedelta(minutes=30)
x = T.full((2, 3), r + 1.0)
assert dist.all_reduce(x.clone()) is None and dist.all_reduce(x.clone(), async_op=True).wait() is True
y = x.clone()
dist.reduce(y, 0)
assert y[0, 0] == (3 if r == 0 else 2), "gloo leaves the input of other ranks"
out = T.zeros(4, 3)
dist.all_gather_into_tensor(out, x)
assert out[:, 0].tolist() == [1, 1, 2, 2]
raises(ValueError, lambda: dist.broadcast(x))  # no default root
rows = T.zeros(3, 2)
dist.all_to_all_single(rows, T.arange(6.0).reshape(3, 2), [1 + r] + [2 - r], [1 + r] + [2 - r])
assert rows.shape == (3, 2), "counts are rows"
dist.all_reduce(T.ones(2, 3).t())  # a copy is made
raises(ValueError, lambda: dist.send(T.ones(1), r))
part = T.zeros(2)
dist.scatter(part, [T.zeros(2), T.ones(2)] if r == 0 else None, src=0)
assert part.tolist() == [r, r]

peer = T.ones(2, dtype=T.int64) if r == 0 else T.zeros(2, dtype=T.float64)
dist.send(peer, 1) if r == 0 else dist.recv(peer, 0)
assert r == 0 or 0 < peer[0] < 1e-300, "the bytes of an int64"
peer = T.ones(2)
assert dist.send(peer, 1) is None if r == 0 else dist.recv(peer) == 0, "from any source"

found = []
for at in range(2):
    value = T.tensor([float("nan") if r == at else 1.0])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    found.append(bool(value.isnan()))
assert found == [True, False], "NaN of rank 0 alone"
both = T.tensor([r == 0, False])
dist.all_reduce(both)
assert both.tolist() == [True, False]
mixed = T.ones(1)
dist.all_reduce(mixed, dist.ReduceOp.SUM if r == 0 else dist.ReduceOp.MAX)  # no error

assert dist.get_rank(dist.new_group([1, 0])) == r, "sorted"
alone = dist.new_group([1])
assert (alone == dist.GroupMember.NON_GROUP_MEMBER) == (r == 0)
if r == 1:
    dist.broadcast(T.ones(1), 1, group=alone)  # ranks of the world
    assert "not part of group" in raises(ValueError, lambda: dist.broadcast(T.ones(1), 0, group=alone))
things = [None] * 2
dist.all_gather_object(things, {"rank": r})
assert things == [{"rank": 0}, {"rank": 1}]
dist.barrier()
print("done", flush=True)
os._exit(0)
"""

MPI = """
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
r = world.rank
out = np.zeros(2)
world.Reduce(np.ones(2), out, MPI.SUM, 0)
assert out[0] == (2 if r == 0 else 0)
world.Reduce(np.ones(2), out if r == 0 else None, MPI.SUM, 0)
try:
    world.Allreduce(MPI.IN_PLACE, np.ones((2, 4))[:, ::2])
    raise AssertionError("strides")
except (BufferError, ValueError):
    pass
if r == 0:
    world.Send(np.ones(2), 1)
    world.Send(np.ones(2, np.int64), 1)
else:
    longer, other = np.zeros(4), np.zeros(2)
    world.Recv(longer, MPI.ANY_SOURCE)
    world.Recv(other, 0)
    assert longer.tolist() == [1, 1, 0, 0] and 0 < other[0] < 1e-300
mine = np.zeros(1)
request = world.Irecv(mine, r)
world.Send(np.ones(1), r)
request.Wait()
assert mine == 1 and world.Get_attr(MPI.TAG_UB) > 1 << 20
found = []
for at in range(2):
    value = np.array([np.nan if r == at else 1.0])
    world.Allreduce(MPI.IN_PLACE, value, MPI.MAX)
    found.append(bool(np.isnan(value[0])))
assert found == [True, False], found
mixed = np.zeros(1)
world.Allreduce(np.ones(1), mixed, MPI.SUM if r == 0 else MPI.MAX)
assert mixed == (2 if r == 0 else 1), "different results, and no error"
assert (world.Split(0 if r else MPI.UNDEFINED) == MPI.COMM_NULL) == (r == 0)
assert world.allgather({"rank": r}) == [{"rank": 0}, {"rank": 1}]
print("done", flush=True)
"""


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize("program", ["torch", "mpi4py"])
def test_what_the_page_says_of_others(tmp_path, program):
    if program == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    script = tmp_path / "program.py"
    script.write_text(MPI)
    if program == "torch":
        ranks = "import os\nos.environ.setdefault('RANK', os.environ['OMPI_COMM_WORLD_RANK'])\n"
        script.write_text(ranks + TORCH)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_program(MPIRUN, "-n", "2", sys.executable, str(script), cwd=tmp_path, env=environment() | world)
    assert (done.returncode, done.stdout) == (0, "done\n" * 2), done.stderr


def arguments(comm: Any) -> None:
    x = np.full((2, 3), comm.rank, np.float32)
    assert comm.all_gather(x).shape == (4, 2, 3)
    assert comm.reduce(x, 1, kos.ReduceOp.SUM) is (x if comm.rank == 1 else None)
    assert comm.rank == 1 or (x == comm.rank).all()
    whole = np.zeros((4, 2))
    whole[comm.rank] = comm.rank
    comm.all_gather(whole[comm.rank], whole)
    assert whole[:, 0].tolist() == [0, 1, 2, 3]
    halves = comm.split(comm.rank // 2)
    assert halves.broadcast(np.array([comm.rank]), root=1) == (1 if comm.rank < 2 else 3)
    work = comm.all_reduce(whole, async_op=True)
    assert work.wait() is whole
    with pytest.raises(InvalidArgument, match="dst: expected another rank"):
        comm.send(x, dst=comm.rank)
    with pytest.raises(InvalidArgument, match="tag: expected a number from 0 to 1048575"):
        comm.send(x, (comm.rank + 1) % 4, tag=1 << 20)
    with pytest.raises(InvalidArgument, match="x: expected a C-contiguous array"):
        comm.all_reduce(np.ones((2, 4))[:, ::2])
    if comm.rank == 0:
        comm.send(np.ones(2, np.int64), dst=1)
    if comm.rank == 1:
        with pytest.raises(CollectiveMismatch, match="2 elements of float64 from rank 0, got 2 elements of int64"):
            comm.recv(np.ones(2, np.float64), src=0)


def numbers(comm: Any) -> None:
    for at in range(4):
        x = np.array([np.nan if comm.rank == at else 1.0])
        assert np.isnan(comm.all_reduce(x, kos.ReduceOp.MAX)[0])
    small = np.array([2048 if comm.rank == 0 else 1], np.float16)
    assert comm.all_reduce(small, deterministic=True) == 2052  # 2051 in float32, rounded once
    for x, op in ((np.array([1]), kos.ReduceOp.AVG), (np.array([True]), kos.ReduceOp.SUM)):
        with pytest.raises(InvalidArgument, match="op: expected one of "):
            comm.all_reduce(x, op)


def groups(comm: Any) -> None:
    part = comm.split(None if comm.rank == 0 else 0, key=-comm.rank)
    assert comm.timeout > 0 and (part is None) == (comm.rank == 0)
    part = comm.group([3, 1])
    assert (part is None) == (comm.rank not in (3, 1)) and (part is None or part.world_ranks == [3, 1])
    assert comm.all_gather_bytes(b"x" * comm.rank) == [b"", b"x", b"xx", b"xxx"]
    with pytest.raises(CollectiveMismatch, match="they differ in op"):
        comm.duplicate().all_reduce(np.ones(1), kos.ReduceOp.MAX if comm.rank == 2 else kos.ReduceOp.SUM)


REFUSED: dict[str, Callable[[Any], object]] = {
    "x: expected an array, got dict": lambda comm: comm.all_reduce({"loss": 1.0}),
    "dtype: expected one of": lambda comm: comm.all_reduce(np.array([{}])),
    "x: expected an array without a mask": lambda comm: comm.all_reduce(np.ma.masked_array([1.0], [True])),
    "data: expected bytes, got dict": lambda comm: comm.all_gather_bytes({"loss": 1.0}),
    "src: expected a rank from 0 to 3, got -1": lambda comm: comm.recv(np.ones(1), src=-1),
    "op: expected a ReduceOp or PremulSum": lambda comm: comm.all_reduce(np.ones(1), lambda a, b: a - b),
    "recv_counts: expected send_counts": lambda comm: comm.all_to_all_v(np.ones(4), [1] * 4, [2] * 4),
    "register: expected a backend for GPUs": lambda comm: comm.register(np.ones(1)),
}


def refused(comm: Any) -> None:
    for expected, call in REFUSED.items():
        with pytest.raises(InvalidArgument, match=f"^{expected}"):
            call(comm)
    with pytest.raises(BackendUnavailable, match="^nccl: "):
        kos.init("nccl", rendezvous=comm.split(comm.rank).rendezvous)


@pytest.mark.parametrize("section", [arguments, numbers, groups, refused])
def test_what_the_page_says_of_kos(section):
    spawn(section, 4)
