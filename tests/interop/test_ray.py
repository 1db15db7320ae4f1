"""kos as a backend of ``ray.util.collective``: the mapping of its calls on threads, the rest between real actors."""

import importlib.util
import subprocess
import sys
import threading
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.errors import InvalidArgument, RendezvousError
from kos.interop.ray import Collectives, register, rendezvous
from kos.testing import spawn
from tests.comm.tcp_ranks import TIMEOUT, free_port, run_threads
from tests.comm.test_jobs import environment
from tests.forked import PATHS

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
SECONDS = 280  # of a program with actors; it takes 30 on two idle cores
HEAD = """
import time
import numpy as np
import ray
from ray.util import collective
import kos.interop.ray
from kos.errors import RankLost

LIMIT = 200
kos.interop.ray.register()
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False,
         runtime_env={"worker_process_setup_hook": "kos.interop.ray.register"})
"""


class RayOp(Enum):
    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3


def options(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def library(name: str) -> Any:
    return np if name == "numpy" else pytest.importorskip(name)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_calls_of_ray_on_arrays_of(name):
    xp = library(name)

    def body(comm):
        group = Collectives()
        group.comm = comm
        n, r = comm.size, comm.rank
        x = xp.ones(4) * (r + 1)
        group.allreduce([x], options(reduceOp=RayOp.SUM))
        assert x.tolist() == [6.0] * 4
        group.allreduce([x], options(reduceOp=RayOp.PRODUCT))
        assert x.tolist() == [216.0] * 4
        x = xp.ones(4) * (r + 1)
        group.reduce([x], options(reduceOp=RayOp.MAX, root_rank=1))
        assert x.tolist() == [3.0 if r == 1 else r + 1.0] * 4
        group.broadcast([x], options(root_rank=2))
        assert x.tolist() == [3.0] * 4
        rows = [xp.zeros((2, 2)) for _ in range(n)]
        group.allgather([rows], [xp.ones((2, 2)) * r])
        assert [row.tolist() for row in rows] == [[[k, k], [k, k]] for k in range(n)]
        mine = xp.zeros((2, 2))
        group.reducescatter([mine], [[xp.ones((2, 2)) * (k + r) for k in range(n)]], options(reduceOp=RayOp.MIN))
        assert mine.tolist() == [[r, r], [r, r]]
        if r == 0:
            group.send([x], options(dst_rank=1))
        elif r == 1:
            y = xp.zeros(4)
            group.recv([y], options(src_rank=0))
            assert y.tolist() == x.tolist()
        group.barrier()
        with pytest.raises(InvalidArgument, match="expected one, because a process of kos uses one GPU, got 2"):
            group.allreduce([x, x], options(reduceOp=RayOp.SUM))

    spawn(body, 3)


class Ray(dict[bytes, bytes]):
    """A stand-in for Ray: its key-value store, and the collective backends that were registered."""

    def __init__(self) -> None:
        self.read = threading.Event()
        self.registered: dict[str, Any] = {}

    def _internal_kv_put(self, key: bytes, value: bytes, overwrite: bool = False) -> None:
        assert overwrite or key not in self
        self[key] = value

    def _internal_kv_get(self, key: bytes) -> bytes | None:
        value = self.get(key)
        if value is not None:
            self.read.set()
        return value

    def _internal_kv_del(self, key: bytes) -> None:
        del self[key]

    def register_collective_backend(self, name: str, group: Any) -> None:
        if name.upper() in self.registered:
            raise ValueError("already registered")
        self.registered[name.upper()] = group

    def modules(self) -> dict[str, Any]:
        """Ray's own modules, as far as kos uses them."""
        base = type("BaseGroup", (), {"__init__": lambda self, size, rank, name: None})
        return {
            "ray": self, "ray.util": self, "ray.experimental": SimpleNamespace(internal_kv=self),
            "ray.util.collective": self, "ray.util.collective.backend_registry": self,
            "ray.util.collective.collective": SimpleNamespace(get_address_and_port=lambda: ("127.0.0.1", free_port())),
            "ray.util.collective.collective_group": self,
            "ray.util.collective.collective_group.base_collective_group": SimpleNamespace(BaseGroup=base),
        }  # fmt: skip


@pytest.fixture
def store(monkeypatch):
    ray = Ray()
    for name, module in ray.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return ray


def test_ranks_meet_by_rays_store(store):
    """Rank 1 first finds the address of a group of before, whose rank 0 has died."""
    store[b"kos_group_a"] = b'{"address": "127.0.0.1:%d", "secret": "old"}' % free_port()

    def rank(group, rank):
        with kos.init(rendezvous=rendezvous(group, rank, 2, TIMEOUT), process_hooks=False) as comm:
            return comm.all_gather_bytes(f"{group}{rank}".encode())

    def late():
        assert store.read.wait(TIMEOUT)
        return rank("a", 0)

    assert run_threads(lambda: rank("a", 1), late) == [[b"a0", b"a1"]] * 2
    assert run_threads(lambda: rank("b", 0), lambda: rank("b", 1)) == [[b"b0", b"b1"]] * 2
    assert not store  # the addresses are gone once all ranks have met


def test_a_rank_that_does_not_come_is_named(store):
    with pytest.raises(RendezvousError, match="expected rank 0 of group 'a' within 0.1 s, got none: nothing was publ"):
        rendezvous("a", 1, 2, 0.1)
    with pytest.raises(RendezvousError, match=r"ranks \[1\] of 2 did not arrive within 0.1 s"):
        rendezvous("a", 0, 2, 0.1)
    with pytest.raises(RendezvousError, match="got none: nothing listens at 127.0.0.1:"):
        rendezvous("a", 1, 2, 0.1)


def test_a_later_registration_replaces_the_terms(store):
    """A hook that Ray finds by its name has registered kos with the defaults."""
    register("of a test")
    with pytest.raises(InvalidArgument, match="timeout: expected a positive number of seconds, got -1"):
        register("of a test", timeout=-1)
    made = [store.registered["OF A TEST"](1, 0, "a")]
    register("of a Test", "tcp", timeout=600)
    made.append(store.registered["OF A TEST"](1, 0, "b"))
    assert [(group.comm.backend_name, group.comm.timeout) for group in made] == [("tcp", 120.0), ("tcp", 600.0)]
    for group in made:
        group.destroy_group()
    register("of a test", "no-such")
    with pytest.raises(InvalidArgument, match="backend: expected auto or one of .*, got 'no-such'"):
        store.registered["OF A TEST"](1, 0, "c")
    store.registered["KNOWN"] = object()
    with pytest.raises(ValueError, match="already registered"):
        register("known")


def run_program(tmp_path: Path, text: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(HEAD + text)
    env = {**environment(), "PYTHONPATH": PATHS, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(path)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), f"{done.stdout}\n{done.stderr}"


@needs_ray
def test_actors_reduce_and_survive_the_death_of_one(tmp_path):
    run_program(
        tmp_path,
        """
@ray.remote(num_cpus=0)
class Worker:
    def reduce(self, value):
        x = np.full(3, value, np.float32)
        collective.allreduce(x)
        return x.tolist()

    def wait_for_the_dead(self):
        began = time.monotonic()
        try:
            collective.allreduce(np.ones(3))
        except RankLost as error:
            return time.monotonic() - began, str(error), error.ranks
        return "no error"

    def start_again(self, size, rank):
        collective.destroy_collective_group()
        collective.init_collective_group(size, rank, backend="kos")
        y = np.zeros((size, 2))
        collective.allgather(list(y), np.full(2, float(rank)))
        return y.tolist(), collective.get_rank(), collective.get_collective_group_size()

    def backend(self):
        return collective.collective.get_group_handle().comm.backend_name

workers = [Worker.remote() for _ in range(3)]
collective.create_collective_group(workers, 3, [0, 1, 2], backend="kos")
assert ray.get([w.reduce.remote(k + 1) for k, w in enumerate(workers)], timeout=LIMIT) == [[6.0] * 3] * 3
assert ray.get(workers[0].backend.remote()) == "tcp"
waiting = [w.wait_for_the_dead.remote() for w in workers[:2]]
assert not ray.wait(waiting, timeout=0.5)[0]                      # both wait for the third
ray.kill(workers[2])
for seconds, text, ranks in ray.get(waiting, timeout=LIMIT):
    assert seconds < 20 and ranks == (2,), (seconds, text, ranks)
again = ray.get([w.start_again.remote(2, k) for k, w in enumerate(workers[:2])], timeout=LIMIT)
assert again == [([[0.0, 0.0], [1.0, 1.0]], k, 2) for k in range(2)], again
print("ok")
""",
    )
