"""All-reduce over peer memory between processes: on one GPU they take turns; a rank is killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kos import cuda
from kos.comm.env_rendezvous import EnvRendezvous
from kos.comm.launches import Launch
from kos.comm.peer import PeerEngine
from kos.comm.reduction import ReduceOp
from kos.comm.rendezvous import SingleRendezvous
from kos.cuda import streams
from kos.dtypes import dtype_of
from kos.errors import CollectiveTimeout, RankLost
from kos.memory.array import Array
from tests.comm.tcp_ranks import environment, free_port

ROOT = Path(__file__).resolve().parents[2]
FLOAT = dtype_of(np.dtype(np.float32))
COUNT = 5000

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.unavailable() is not None, reason=f"needs a GPU: {cuda.unavailable()}"),
]


def child(role: str, algorithm: str) -> None:
    """One rank, told who it is by its environment."""
    rendezvous = EnvRendezvous(30.0)
    rank, size = rendezvous.rank, rendezvous.size
    device = rank % len(cuda.visible_devices())
    cuda.set_device(device)
    engine = PeerEngine(rendezvous, device, timeout=20.0 if role == "live" else 3.0, staging=1 << 20)
    stream = cuda.create_stream(device)
    x = Array.from_numpy(np.full(COUNT, rank + 1, np.float32), device)
    y = Array.zeros(COUNT, np.float32, device)
    run = engine.bind_all_reduce(
        x.pointer, y.pointer, COUNT, FLOAT, ReduceOp.SUM, launch=Launch(algorithm, blocks=2)
    )
    cuda.synchronize(device)
    rendezvous.barrier()
    last = rank == size - 1
    if role != "live" and last:
        for _ in range(20):
            run(stream)
        if role == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)  # what was queued runs on; nothing more comes
    for _ in range(40):
        run(stream)
    streams.synchronize(stream, device)
    if role == "live":
        engine.check("all_reduce")
        np.testing.assert_array_equal(y.numpy(stream), np.full(COUNT, size * (size + 1) / 2))
        rendezvous.barrier()
        engine.close()
        return
    with pytest.raises((CollectiveTimeout, RankLost), match=f"all_reduce #5: rank {size - 1} "):
        engine.check("all_reduce #5")
    engine.close()
    alone = PeerEngine(SingleRendezvous(), device, staging=1 << 20)  # the GPU works on
    alone.bind_all_reduce(x.pointer, y.pointer, COUNT, FLOAT, ReduceOp.SUM)(stream)
    np.testing.assert_array_equal(y.numpy(stream), x.numpy(stream))
    alone.close()


def run_children(role: str, algorithm: str) -> list[int | None]:
    """Exit codes of two ranks."""
    port = free_port()
    code = f"from tests.comm.test_peer_processes import child; child({role!r}, {algorithm!r})"
    children = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment(rank, 2, port)})
        for rank in range(2)
    ]
    deadline = time.monotonic() + 60
    try:
        codes = [children[0].wait(60)]
        codes.append(children[1].wait(1 if role == "stopped" else deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        codes = [children[0].poll(), None]
    finally:
        for process in children:
            process.kill()
            process.wait()
    return codes


@pytest.mark.parametrize("algorithm", ["one_shot", "push"])
def test_processes(algorithm: str) -> None:
    assert run_children("live", algorithm) == [0, 0]


@pytest.mark.parametrize("algorithm", ["two_shot", "direct", "push"])
def test_killed_rank_is_named_and_the_gpu_works_on(algorithm: str) -> None:
    assert run_children("killed", algorithm) == [0, -signal.SIGKILL]


@pytest.mark.parametrize("algorithm", ["one_shot", "bulk"])
def test_stopped_rank_is_named(algorithm: str) -> None:
    assert run_children("stopped", algorithm) == [0, None]
