"""A rank is killed or stopped while the other one waits for a stream, and not for kos."""

import json
import sys

import pytest

from kos import cuda
from tests.comm.tcp_ranks import free_port, start

TIMEOUT = 6  # seconds that a rank waits for the others

pytestmark = pytest.mark.gpu

PROGRAM = """
import json, os, signal, sys, threading, time
sys.path += {path}
import numpy as np
import kos
from kos.cuda import streams
from kos.memory.array import Array
comm = kos.init({backend!r}, timeout={timeout})
kos.cuda.set_device(comm.device)
stream = kos.cuda.create_stream(comm.device)
x = Array.zeros({count}, np.float32, comm.device, stream=stream)
heard, event = [], threading.Event()
comm.on_failure(lambda error: (heard.append(error), event.set()))
for _ in range(3):
    comm.all_reduce(x)
graph = None
if {graph}:
    with kos.cuda.capture(stream, keep=[x]) as graph:
        comm.all_reduce(x)
    graph.replay(stream)
comm.synchronize(stream=stream)
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.{signal})
begun = time.monotonic()
for _ in range(30):
    if graph is not None:
        graph.replay(stream)
        continue
    try:
        comm.all_reduce(x)
    except kos.errors.KosError:
        break  # on a busy machine the watchdog finds it first
streams.synchronize(stream, comm.device)
took, error = time.monotonic() - begun, None
event.wait(2)
try:
    comm.all_reduce(x)
except kos.errors.KosError as raised:
    error = [type(raised).__name__, str(raised)]
print(json.dumps(dict(took=took, error=error, heard=[[type(each).__name__, str(each)] for each in heard])), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("count", [1 << 8, 1 << 22])
@pytest.mark.parametrize("backend", ["nccl", "peer", "auto"])
@pytest.mark.parametrize(
    ("how", "graph"),
    # NCCL's replayed kernels know no deadline: of a rank that is stopped nothing is seen.
    [("SIGKILL", False), ("SIGKILL", True), ("SIGSTOP", False)],
)
def test_a_stream_comes_back_and_the_next_use_names_the_rank(backend, how, graph, count):
    if len(cuda.visible_devices()) < 2:
        pytest.skip("needs two GPUs")
    program = PROGRAM.format(backend=backend, timeout=TIMEOUT, count=count, signal=how, graph=graph, path=sys.path)
    port = free_port()
    ranks = [start([sys.executable, "-c", program], rank, 2, port) for rank in range(2)]
    try:
        output, _ = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    print(output)
    seen = json.loads(output.splitlines()[-1])
    assert seen["took"] < TIMEOUT + 3, seen
    kind, text = seen["error"]
    if how == "SIGKILL":
        assert kind == "RankLost" and "rank 1 is gone" in text and seen["took"] < 3, seen
    else:
        assert kind == "CollectiveTimeout" and ("rank 1" in text or "ranks [1]" in text), seen
    assert len(seen["heard"]) == 1 and seen["heard"][0][0] == kind, seen
