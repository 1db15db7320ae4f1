"""Ranks of torch.distributed for tests: forked from one process that has imported torch, which takes seconds.

``run("module:function", size, backend)`` calls the function on each rank of a process group and returns its results.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

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


def run(call: str, size: int = 2, backend: str = "kos", *args: Any, gpu: str = "auto") -> list[Any]:
    """What ``call``, "module:function", returned on each rank, as JSON; raises AssertionError if one failed.

    A rank that was killed has the result None.  ``gpu`` is the backend of kos for GPUs.
    """
    server = _server()
    assert server.stdin and server.stdout
    request = {"call": call, "size": size, "backend": backend, "args": args, "gpu": gpu}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    results = json.loads(server.stdout.readline())
    failures = [f"rank {rank}: {result['error']}" for rank, result in enumerate(results) if "error" in result]
    assert not failures, "\n".join(failures)
    return [result.get("value") for result in results]


@cache
def _server() -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env["PYTHONPATH"] = ":".join(paths)
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.interop.ranks"], cwd=ROOT, env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(server.kill)
    return server


def _rank(rank: int, folder: str, request: dict[str, Any]) -> None:
    """One rank: writes its result, and ends this process."""
    import torch.distributed as dist

    file = Path(folder, str(rank))
    try:
        options = import_module("kos.interop.torch").Options(request["gpu"]) if "kos" in request["backend"] else None
        dist.init_process_group(
            request["backend"], f"file://{folder}/store", rank=rank, world_size=request["size"],
            timeout=timedelta(seconds=GROUP_LIMIT), pg_options=options,
        )  # fmt: skip
        module, name = request["call"].split(":")
        value = getattr(import_module(module), name)(*request["args"])
        file.write_text(json.dumps({"value": value}))
        # Without gloo's: its destructor waits, with the GIL, for a thread that may be about to take it for a callback.
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
        deadline, left = time.monotonic() + LIMIT, set(processes)
        while left and time.monotonic() < deadline:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        results = []
        for rank, pid in enumerate(processes):
            file = Path(folder, str(rank))
            late = {"error": f"it was not done after {LIMIT:g} s"}
            results.append(json.loads(file.read_text()) if file.exists() else late if pid in left else {})
    return results


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin:
        answers.write(json.dumps(_serve(json.loads(line))) + "\n")
        answers.flush()
