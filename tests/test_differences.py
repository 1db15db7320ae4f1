"""What docs/differences.md says of torch.distributed (gloo) and of MPI, run on two ranks."""

import importlib.util
import sys

import pytest

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
