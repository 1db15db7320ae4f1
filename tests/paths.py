"""The functions of kos that a call enters: ``python -m tests.paths`` counts them, and ``test_paths.py`` bounds them.

Both ranks are in this process.  Rank 1 has begun each call before rank 0 makes it, so that rank 0 need not wait.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import kos
from kos import ReduceOp
from kos.comm.control.place import env_rendezvous
from tests.comm.tcp_ranks import TIMEOUT, environment, free_port, run_threads


class Path(NamedTuple):
    """The calls of Python functions of kos, and the files that have these functions.

    ``changes`` is how often a call is in another file than the call before it, and ``returns`` how often such a file
    was entered before.
    """

    calls: int
    files: int
    changes: int
    returns: int


HERE, BETWEEN = "in shared memory", "between hosts"
BOUNDS = {
    f"all_reduce of 1 KB {HERE}, first": Path(33, 8, 10, 3),
    f"all_reduce of 1 KB {HERE}, cached": Path(0, 0, 0, 0),
    f"all_reduce of 4 MB {HERE}, cached": Path(4, 4, 3, 0),
    f"send_bytes {HERE}": Path(0, 0, 0, 0),
    f"recv_bytes {HERE}": Path(0, 0, 0, 0),
    f"all_reduce of 1 KB {BETWEEN}, first": Path(87, 15, 38, 26),
    f"all_reduce of 1 KB {BETWEEN}, cached": Path(60, 11, 31, 22),
    f"send_bytes {BETWEEN}": Path(42, 7, 12, 6),
    f"recv_bytes {BETWEEN}": Path(46, 7, 21, 15),
}
"""The most that a path may have.

Between hosts, a path is shorter if the other rank answers late, since waits are not counted.
"""


def path_of(make: Callable[[], Any]) -> tuple[Path, list[str]]:
    """The path of ``make()`` without its waits, and its functions in order."""
    entered: list[tuple[str, str]] = []

    waits: list[Any] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if waits:
            if event == "return" and frame is waits[0]:
                waits.clear()
        elif event == "call" and frame.f_code.co_qualname == "Work._wait":
            waits.append(frame)  # how often it polls depends on the other rank
        elif event == "call" and "/kos/" in (file := frame.f_code.co_filename) and "/tests/" not in file:
            entered.append((file.rpartition("/kos/")[2], frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        make()
    finally:
        sys.setprofile(None)
    trail = [file for i, (file, _) in enumerate(entered) if i == 0 or entered[i - 1][0] != file]
    files = len(set(trail))
    path = Path(len(entered), files, max(len(trail) - 1, 0), len(trail) - files)
    return path, [f"{file} {name}" for file, name in entered]


@contextmanager
def two_ranks(hosts: int) -> Iterator[list[kos.Communicator]]:
    """The communicators of two ranks on one host, or on two pretended ones."""
    port = free_port()

    def make(rank: int) -> kos.Communicator:
        host = {"KOS_HOST": f"host {rank}" if hosts == 2 else ""}
        return kos.init("tcp", rendezvous=env_rendezvous(TIMEOUT, environment(rank, 2, port, **host)), timeout=TIMEOUT)

    made = run_threads(*[partial(make, rank) for rank in range(2)])
    try:
        for _ in range(2):
            run_threads(*[each.barrier for each in made])
        yield made
    finally:
        run_threads(*[each.abort for each in made])


Calls = Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]
"""A name, the call of rank 0, and that of rank 1, which is made first and returns a Work."""
_TIMES = 4


def _all_reduces(comms: list[kos.Communicator], place: str) -> Calls:
    one, other = comms
    # Of each dtype and operation, the first call is prepared.
    for dtype, op in product((np.float64, np.int32, np.float32, np.int64), (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PROD)):
        x, y = np.ones(256, dtype), np.ones(256, dtype)
        peer = partial(other.all_reduce, y, op, async_op=True)
        for name in ("first", "cached", "cached"):
            yield f"all_reduce of 1 KB {place}, {name}", partial(one.all_reduce, x, op), peer


def _large(comms: list[kos.Communicator], place: str) -> Calls:
    one, other = comms
    x, y = np.ones(1 << 20, np.float32), np.ones(1 << 20, np.float32)
    run_threads(*[partial(comm.all_reduce, each) for comm, each in zip(comms, (x, y), strict=True)])
    for _ in range(_TIMES):
        peer = partial(other.all_reduce, y, async_op=True)
        yield f"all_reduce of 4 MB {place}, cached", partial(one.all_reduce, x), peer


def _bytes(comms: list[kos.Communicator], place: str) -> Calls:
    one, other = comms
    for length in range(100, 100 + _TIMES):  # each is new
        data = bytes(length)
        yield f"send_bytes {place}", partial(one.send_bytes, data, 1), partial(other.recv_bytes, 0, async_op=True)
        yield f"recv_bytes {place}", partial(one.recv_bytes, 1), partial(other.send_bytes, data, 0, async_op=True)


def measure() -> dict[str, tuple[Path, list[str]]]:
    """The shortest path of each call, and its functions: an interrupted thread may make a call wait."""
    found: dict[str, tuple[Path, list[str]]] = {}

    def count(make: Callable[[], Any], peer: Callable[[], Any], name: str) -> None:
        begun = threading.Event()

        def follow() -> None:
            work = peer()
            begun.set()
            work.wait()

        other = threading.Thread(target=follow, daemon=True)
        other.start()
        assert begun.wait(TIMEOUT)
        path = path_of(make)
        other.join(TIMEOUT)
        found[name] = min(found.get(name, path), path)  # its calls are compared first

    for hosts, place in ((1, HERE), (2, BETWEEN)):
        with two_ranks(hosts) as comms:
            for calls in (_all_reduces, _large, _bytes) if hosts == 1 else (_all_reduces, _bytes):
                for name, make, peer in calls(comms, place):
                    count(make, peer, name)
    return found


def main() -> None:
    """Print the paths, with ``-v`` all functions in them."""
    for name, (path, functions) in measure().items():
        print(f"{name}: {path}")
        for each in functions if "-v" in sys.argv else ():
            print(f"    {each}")


if __name__ == "__main__":
    main()
