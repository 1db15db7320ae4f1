"""Ranks with a GPU that pretend to be on several hosts: nccl between them, as between machines, over loopback.

python -m pytest -m gpu tests/comm/test_hosts_gpu.py

Each layout is a job of its own: NCCL reads the name of the host once in a process.
"""

import pytest

from kos import cuda
from tests.comm.test_jobs import needs_mpirun
from tests.comm.test_shared_failures import job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(cuda.visible_devices()) < 2, reason="needs two GPUs or more")]

START = """
from kos.memory.array import Array
os.environ.update(NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
os.environ["KOS_HOST"] = {names}[int(os.environ["OMPI_COMM_WORLD_RANK"])]
comm = kos.init("{backend}", timeout=60)
kos.cuda.set_device(comm.device)

def filled(count, value=0.0):
    return Array.from_numpy(np.full(count, value, np.float32), comm.device)
"""

SUMS = """
for count in (1, 1000, 1 << 20):
    for deterministic in (False, True):
        x = comm.all_reduce(filled(count, comm.rank + 1.0), deterministic=deterministic)
        assert (x.numpy() == comm.size * (comm.size + 1) / 2).all(), (count, deterministic)
assert comm.all_gather(filled(1, comm.rank)).numpy().ravel().tolist() == list(range(comm.size))
host = comm.split("host")
assert (host.all_reduce(filled(1000, comm.rank)).numpy() == sum(comm.node)).all()
print(comm.rank, comm.node, comm.local_rank, host.world_ranks, comm.probes["peer"].reason, flush=True)
devices = comm.rendezvous.allgather(str(comm.device).encode())
gpus = len(kos.cuda.visible_devices())
assert sorted(map(int, devices)) == sorted(rank % gpus for rank in range(comm.size)), devices
host.close()
comm.close()
"""

MISMATCH = """
comm.timeout = 8
try:
    comm.all_reduce(filled(4 if comm.rank else 4 << 20))  # far more than NCCL sends before it waits for its peer
    comm.synchronize()
except kos.errors.CollectiveMismatch as error:
    print("rank 0 called" in str(error), "count" in str(error), flush=True)
os._exit(0)
"""


def names_of(hosts: tuple[int, ...]) -> list[str]:
    return [f"host {host}" for host, count in enumerate(hosts) for _ in range(count)]


@needs_mpirun
@pytest.mark.parametrize("backend", ["nccl", "auto"])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 2), (3, 1), (1, 1, 1, 1)], ids=str)
def test_sums(tmp_path, hosts, backend):
    """Where ranks outnumber the GPUs, those of different hosts share one; NCCL refuses that to ranks of one host."""
    names, gpus = names_of(hosts), len(cuda.visible_devices())
    if max(hosts) > gpus:
        pytest.skip(f"needs {max(hosts)} GPUs, got {gpus}")
    lines = job(tmp_path, len(names), START.format(names=names, backend=backend) + SUMS)
    expected = []
    for rank, name in enumerate(names):
        node = [each for each, other in enumerate(names) if other == name]
        reason = f"the ranks are on several hosts: {len(node)} of {len(names)} here"
        expected.append(f"{rank} {node} {node.index(rank)} {node} {reason}")
    assert sorted(lines) == expected


@needs_mpirun
def test_a_mismatch_is_named_on_both_hosts(tmp_path):
    text = START.format(names=names_of((1, 1)), backend="nccl") + MISMATCH
    assert job(tmp_path, 2, text) == ["True True"] * 2
