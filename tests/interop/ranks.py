"""Ranks of torch.distributed for tests: forked from one process that has imported torch, which takes seconds.

``run("module:function", size, backend)`` calls the function on each rank of a process group and returns its results.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from kos import _core

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "torch._inductor.config",
    "kos.comm.gpu.backend", "kos.comm.host.tcp", "kos.interop.torch",
)  # fmt: skip
LATE = "still waiting for ranks [1]" if _core.unavailable else "ranks [1] did not arrive"
"""What the error of a collective says on rank 0 if rank 1 is late."""
LIMIT, GROUP_LIMIT = 250.0, 60.0  # seconds of a call, and of an operation


def run(
    call: str, size: int = 2, backend: str | None = "kos", *args: Any, gpu: str = "auto", limit: float = LIMIT
) -> list[Any]:
    """What ``call``, "module:function", returned on each rank, as JSON; raises AssertionError if one failed.

    A rank that was killed has the result None.  ``gpu`` is the backend of kos for GPUs.  If ``backend`` is None, ranks
    have no process group.  ``limit`` is for the call, in seconds.
    """
    server = _server()
    request = {"call": call, "size": size, "backend": backend, "args": args, "gpu": gpu, "limit": limit}
    server.write(json.dumps(request) + "\n")
    server.flush()
    results = json.loads(server.readline())
    failures = [f"rank {rank}: {result['error']}" for rank, result in enumerate(results) if "error" in result]
    assert not failures, "\n".join(failures)
    return [result.get("value") for result in results]


@cache
def _server() -> TextIO:
    """A connection to the server, which all workers of a run of pytest share: the first that needs it starts it."""
    name = f"\0kos-torch-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"  # of an abstract socket
    while True:
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(ConnectionRefusedError):
            connection.connect(name)
            return connection.makefile("rw")
        with socket.socket(socket.AF_UNIX) as listener, contextlib.suppress(OSError):  # another has bound the name
            listener.bind(name)
            listener.listen()
            _start(listener.fileno())


def _start(listener: int) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env["PYTHONPATH"] = ":".join(paths)
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.interop.ranks", str(listener)]
    subprocess.Popen(command, cwd=ROOT, env=env, stdout=2, pass_fds=[listener])  # ranks print to stderr


def _rank(rank: int, folder: str, request: dict[str, Any]) -> None:
    """One rank: writes its result, and ends this process."""
    import torch.distributed as dist

    file = Path(folder, str(rank))
    try:
        if backend := request["backend"]:
            options = import_module("kos.interop.torch").Options(request["gpu"]) if "kos" in backend else None
            dist.init_process_group(
                backend, f"file://{folder}/store", rank=rank, world_size=request["size"],
                timeout=timedelta(seconds=GROUP_LIMIT), pg_options=options,
            )  # fmt: skip
        module, name = request["call"].split(":")
        value = getattr(import_module(module), name)(*request["args"])
        file.write_text(json.dumps({"value": value}))
        # Groups of gloo are not destroyed: the destructor holds the GIL while it waits for a thread, which may need the
        # GIL to run a callback.
        if dist.is_initialized() and dist.get_backend() != "gloo":
            dist.destroy_process_group()
    except BaseException:
        file.write_text(json.dumps({"error": traceback.format_exc()}))
    sys.stderr.flush()
    os._exit(0)


def _serve(request: dict[str, Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(request["size"]):
            if not (pid := os.fork()):
                os.setsid()
                _rank(rank, folder, request)
            processes.append(pid)
        deadline, left = time.monotonic() + request["limit"], set(processes)
        while left and time.monotonic() < deadline:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.01)
        for pid in left:
            os.killpg(pid, signal.SIGKILL)  # what it has forked too
            os.waitpid(pid, 0)
        results = []
        for rank, pid in enumerate(processes):
            file = Path(folder, str(rank))
            late = {"error": f"it was not done after {request['limit']:g} s"}
            results.append(json.loads(file.read_text()) if file.exists() else late if pid in left else {})
    return results


def _answer(connection: TextIO) -> None:
    for line in connection:
        connection.write(json.dumps(_serve(json.loads(line))) + "\n")
        connection.flush()


def main(listener: socket.socket) -> None:
    """Fork a process for each connection, which ends when the connection is closed; return after the last has ended."""
    listener.settimeout(1.0)
    answering = set[int]()
    while True:
        try:
            connection = listener.accept()[0]
        except TimeoutError:
            answering -= {pid for pid in answering if os.waitpid(pid, os.WNOHANG)[0]}
            if not answering:
                return
            continue
        if pid := os.fork():
            answering.add(pid)
            connection.close()
        else:
            listener.close()
            _answer(connection.makefile("rw"))
            os._exit(0)


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    gc.freeze()
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # at once: another client could connect while torch ends
