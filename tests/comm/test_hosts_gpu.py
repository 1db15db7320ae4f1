"""Ranks with a GPU that pretend to be on several hosts.  nccl connects them over loopback, as between machines.

In phases, ``peer`` works within the hosts.

python -m pytest -m gpu tests/comm/test_hosts_gpu.py

Each layout is a job of its own, because NCCL reads the name of the host once per process. Two GPUs are enough for two
hosts of two ranks: each GPU has one rank of each host. The tests check results, and measure no speed: ranks that share
a GPU take turns on it.
"""

import pytest

from kos import cuda
from tests.comm.ranks import host_names
from tests.comm.test_jobs import needs_mpirun
from tests.comm.test_shared_failures import ULFM, job

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
assert (host.all_reduce(filled(1000, comm.rank)).numpy() == sum(comm.local_ranks)).all()
print(comm.rank, comm.local_ranks, comm.local_rank, host.world_ranks, comm.probes["peer"].reason, flush=True)
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


@needs_mpirun
@pytest.mark.parametrize("backend", ["nccl", "auto"])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 2), (3, 1), (1, 1, 1, 1)], ids=str)
def test_sums(tmp_path, hosts, backend):
    """If there are more ranks than GPUs, ranks of different hosts share one.

    NCCL refuses that to ranks of one host.
    """
    names, gpus = host_names(hosts), len(cuda.visible_devices())
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
    text = START.format(names=host_names((1, 1)), backend="nccl") + MISMATCH
    assert job(tmp_path, 2, text) == ["True True"] * 2


# In phases.

PHASES = START + """
from dataclasses import replace
from kos.comm.gpu.hierarchical import CARRIED
from kos.comm.gpu.routes import PHASES
from kos.comm.tuning import key
backend = comm.backend
print(backend.routes[0].reason, flush=True)
routes = {{key(name, False, False, True): ((None, PHASES),) for name in CARRIED}}
backend.use(replace(backend.choices.table, routes=routes))
n, me, total = comm.size, comm.rank, comm.size * (comm.size + 1) / 2
"""

RESULTS = """
def gathered(x):
    return comm.all_gather_bytes(x.numpy().tobytes())

for count in (1, 5, 1000, 4096, 1 << 20, (1 << 22) + 3):
    for turn in range(3):
        x = filled(count, me + 1.0)
        assert (comm.all_reduce(x).numpy() == total).all(), count
        noise = Array.from_numpy(np.random.default_rng(me).standard_normal(count).astype(np.float32), comm.device)
        reduced = comm.all_reduce(noise)
        assert len(set(gathered(reduced))) == 1, "ranks have different bits"
        got = comm.all_gather(filled(count, float(me)))
        assert (got.numpy().reshape(n, -1) == np.arange(n)[:, None]).all(), count
        x = Array.from_numpy(np.repeat(np.arange(n, dtype=np.float32) + 1, count), comm.device)
        assert (comm.reduce_scatter(x).numpy() == n * (me + 1)).all(), count
        assert (comm.all_to_all(x).numpy().reshape(n, -1) == me + 1).all(), count
        for root in range(n):
            assert (comm.broadcast(filled(count, me), root=root).numpy() == root).all(), (count, root)

stream = kos.cuda.create_stream(comm.device)
x, y = filled(1 << 16), filled(1000)
for each in (x, y):
    comm.all_reduce(each, stream=stream)  # connects ranks, loads kernels
comm.synchronize()
with kos.cuda.capture(stream) as graph:
    for _ in range(5):
        comm.all_reduce(x, stream=stream)
        comm.all_reduce(y, stream=stream, deterministic=True)
for turn in range(3):
    for each in (x, y):
        each.copy_from(np.full(each.size, me + 1, np.float32))
    kos.cuda.driver.synchronize(comm.device)
    graph.replay(stream)
    comm.synchronize()
    kos.cuda.driver.synchronize(comm.device)
    assert (x.numpy() == total * n ** 4).all() and (y.numpy() == total * n ** 4).all(), turn
graph.close()

streams = [kos.cuda.create_stream(comm.device) for _ in range(2)]
for turn in range(20):
    xs = [filled(1 << 18, me + 1.0) for _ in range(4)]
    kos.cuda.driver.synchronize(comm.device)
    works = [comm.all_reduce(x, stream=streams[i % 2], async_op=i == 3, deterministic=i == 2)
             for i, x in enumerate(xs)]
    comm.synchronize()
    assert all((x.numpy() == total).all() for x in xs), turn
print("done", flush=True)
comm.close()
"""

COMPRESSED = START + """
from dataclasses import replace
import ml_dtypes
from kos.comm.compression import FORMATS
from kos.testing.conformance import results
from kos.testing.conformance.model import Step
from kos.testing.conformance.on_gpu import OnGPU
ranks = OnGPU(comm)
assert ranks.exact_group_size() == comm.local_size == 2
for form in FORMATS:
    for dtype in map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)):
        for name in ("all_reduce", "reduce_scatter"):
            step = Step(name, dtype=dtype, compress=form, values="hostile")
            results.correct(ranks, {seed}, step, (1, 65, 5011, 1 << 20))
            results.correct(ranks, {seed}, replace(step, op=kos.ReduceOp.AVG), (1000,))
        results.feedback_keeps_what_is_lost(ranks, {seed}, form, dtype)
print("done", flush=True)
comm.close()
"""

LATE = """
import time
comm.all_reduce(filled(1000))
comm.synchronize()
if me == n - 1:
    time.sleep(20)
else:
    try:
        comm.all_reduce(filled(1000), timeout=3)
        comm.synchronize()
    except kos.errors.CollectiveTimeout as error:
        print(error.ranks, flush=True)
os._exit(0)
"""

KILLED = """
comm.all_reduce(filled(1000))
comm.synchronize()
if me == n - 1:
    os.kill(os.getpid(), 9)
try:
    while True:
        comm.all_reduce(filled(1000))
        comm.synchronize()
except kos.errors.RankLost as error:
    print(error.ranks, flush=True)
os._exit(0)
"""


@needs_mpirun
def test_results_of_phases(tmp_path):
    lines = job(tmp_path, 4, PHASES.format(names=host_names((2, 2)), backend="auto") + RESULTS)
    assert sorted(lines) == ["2 hosts of 2 ranks"] * 4 + ["done"] * 4


@needs_mpirun
def test_compressed_between_hosts(tmp_path, seed):
    """Exact sums by peer within a host and compressed sums by NCCL between hosts have the bits of ranks on CPUs."""
    lines = job(tmp_path, 4, COMPRESSED.format(names=host_names((2, 2)), backend="auto", seed=seed))
    assert lines == ["done"] * 4


@needs_mpirun
def test_a_late_rank_is_named_on_both_hosts(tmp_path):
    lines = job(tmp_path, 4, PHASES.format(names=host_names((2, 2)), backend="auto") + LATE)
    assert sorted(lines) == ["(3,)"] * 3 + ["2 hosts of 2 ranks"] * 4


@needs_mpirun
def test_a_killed_rank_is_named_on_both_hosts(tmp_path):
    lines = job(tmp_path, 4, PHASES.format(names=host_names((2, 2)), backend="auto") + KILLED, *ULFM)
    assert sorted(lines) == ["(3,)"] * 3 + ["2 hosts of 2 ranks"] * 4
