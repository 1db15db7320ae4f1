"""What runs in the process of a rank: its place, its process group, its function, and the report of how it ended."""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import io
import os
import runpy
import signal
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from kos.environment import KOS_HOST
from kos.errors import KosError, RankLost, debugging
from kos.interop.torch import group as interop
from kos.interop.torch.launch import _in_library
from kos.testing.torch.group import CheckedGroup
from kos.testing.torch.monitor import Job, Monitor

_PDEATHSIG = 1  # of prctl(2)


def run_rank(job: Job, rank: int, channel: socket.socket, output: int, result: int) -> None:
    """Run a rank in this process, which was forked for it, and end the process.

    ``output`` and ``result`` are descriptors of files in memory, for what it prints and what its function returns.
    """
    supervisor = os.getppid()
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(descriptor, number)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )
    faulthandler.enable(2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_environment(job, rank)
    torch.set_num_threads(1)  # the threads of OpenMP are not in a forked process
    monitor = Monitor(job, rank, channel)
    try:
        _connect(job, rank, monitor)
        data, value = io.BytesIO(), _call(job.fn, rank)
        torch.save(value, data)
        with open(result, "wb", closefd=False) as file:
            file.write(data.getvalue())
        monitor.returned()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            monitor.returned()
        else:
            monitor.failed(described(error))
    monitor.over.wait()
    sys.stdout.flush()
    coverage = sys.modules.get("coverage")
    if (measured := coverage and coverage.Coverage.current()) and measured.config.parallel:
        measured.stop()
        measured.save()
    os._exit(0)


def _set_environment(job: Job, rank: int) -> None:
    """Set what torchrun would set.  MASTER_PORT is never used."""
    host, firsts = job.hosts[rank], [*dict.fromkeys(job.hosts)]
    local = [other for other in range(job.size) if job.hosts[other] == host]
    values = {
        "RANK": rank, "WORLD_SIZE": job.size, "LOCAL_RANK": local.index(rank), "LOCAL_WORLD_SIZE": len(local),
        "GROUP_RANK": firsts.index(host), "GROUP_WORLD_SIZE": len(firsts), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "lo",
        **({} if host is None else {KOS_HOST.name: host}),
    }  # fmt: skip
    os.environ |= {**{name: str(value) for name, value in values.items()}, **job.env}


def _connect(job: Job, rank: int, monitor: Monitor) -> None:
    """Make the default process group, or have the program's own ``init_process_group`` make one of kos."""
    CheckedGroup.monitor = monitor
    interop.ProcessGroupKos = CheckedGroup  # type: ignore[misc]
    names: dict[str, Any] = vars(c10d)
    place = vars(dist)["FileStore"](f"/proc/self/fd/{job.store}", job.size), rank, job.size  # which has no types
    if job.init:
        limit = timedelta(seconds=job.timeout)
        dist.init_process_group(job.backend, store=place[0], rank=rank, world_size=job.size, timeout=limit)
        return
    names["rendezvous"] = lambda url, *args, **keywords: iter([place])  # for whatever address
    make = names["_new_process_group_helper"]

    def make_of_kos(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **keywords: Any) -> Any:
        group, store = made = make(size, rank, ranks, job.backend, *args, **{**keywords, "backend_options": None})
        if store is not None and str(backend) in ("gloo", "nccl"):  # what get_backend() says
            names["_world"].pg_map[group] = c10d.Backend(str(backend)), store
        return made

    names["_new_process_group_helper"] = make_of_kos


def _call(fn: Any, rank: int) -> Any:
    if isinstance(fn, list):
        sys.argv = [str(each) for each in fn]
        sys.path.insert(0, str(Path(fn[0]).resolve().parent))
        return runpy.run_path(sys.argv[0], run_name="__main__") and None
    required = [each for each in inspect.signature(fn).parameters.values() if each.default is each.empty]
    return fn(rank) if required or "rank" in inspect.signature(fn).parameters else fn()


def described(error: BaseException) -> dict[str, Any]:
    """An error as JSON: its class, text, plain arguments, notes, cause, and the lines of its traceback.

    What kos raises on purpose ends at the line of the program, unless KOS_DEBUG is set.
    """
    codes = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [[code.co_filename, line, code.co_name, code.co_firstlineno] for code, line in codes]
    frames = [frame for frame in frames if frame[0] not in (__file__, runpy.__file__, "<frozen runpy>")]
    plain, cause = (int, float, str, type(None)), error.__cause__
    if isinstance(error, KosError | dist.DistBackendError) and not debugging():
        cause, last = None, max((k for k, frame in enumerate(frames) if not _in_library(frame[0])), default=0)
        frames = frames[: last + 1]
    return {
        "module": type(error).__module__, "class": type(error).__qualname__, "text": str(error), "frames": frames,
        "args": [each if isinstance(each, plain) else repr(each) for each in error.args],
        "state": {name: value for name, value in vars(error).items() if isinstance(value, plain)},
        "notes": list(getattr(error, "__notes__", ())),
        "cause": None if cause is None else described(cause),
        "lost": isinstance(error.__cause__, RankLost),
    }  # fmt: skip
