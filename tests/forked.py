"""Processes that start within milliseconds: forked from one that has imported kos and done nothing else.

A fresh Python computes for half a second until it has imported kos.  A `ForkServer` does so once; each process that
it starts is then a copy, with an environment, a session and an output of its own, and ends as any Python does, exit
handlers included.  No GPU has been touched before the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
IMPORTED = ("numpy", "kos.comm.communicator", "kos.comm.host.tcp", "kos.comm.gpu.auto", "kos.memory", "tests.faults")
LARGEST = 1 << 17  # bytes of a request


class Forked:
    """A process of a ForkServer, with the methods of a ``Popen``."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code (less than 0: the signal that ended it), None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Starts processes; ends with the process that made it.  May be used by several threads."""

    def __init__(self) -> None:
        self._lock, self._exits, self._pids = threading.Lock(), dict[int, int](), list[int]()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {
            **os.environ,
            "PYTHONPATH": PATHS,
            "OPENBLAS_NUM_THREADS": "1",
        }
        with theirs:
            command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=[theirs.fileno()])

    def start(
        self, call: str, arguments: Sequence[Any], env: Mapping[str, str], output: Path, cwd: Path = ROOT
    ) -> Forked:
        """Run ``call``, "module:function", on those arguments (of JSON); stdout and stderr are added to a file."""
        request = json.dumps([call, list(arguments), dict(env), str(output), str(cwd)]).encode()
        assert len(request) <= LARGEST
        with self._lock:
            self._socket.send(request)
            while not self._pids:
                self._receive()
            return Forked(self, self._pids.pop())

    def exit_code(self, pid: int) -> int | None:
        with self._lock:
            while select.select([self._socket], [], [], 0)[0]:
                self._receive()
            return self._exits.pop(pid, None)

    def _receive(self) -> None:
        message = self._socket.recv(LARGEST)
        assert message, f"the fork server is gone: {self._process.wait()}"
        pid, code = json.loads(message)
        if code is None:
            self._pids.append(pid)
        else:
            self._exits[pid] = code


@cache
def fork_server() -> ForkServer:
    """That of this process."""
    return ForkServer()


def serve(requests: socket.socket) -> Callable[[], Any] | None:
    """Fork for each request; returns in the new process, with what it runs, or None at the end."""
    children = set[int]()
    while True:
        ready = select.select([requests], [], [], 0.02 if children else None)[0]
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                requests.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
        if not ready:
            continue
        if not (request := requests.recv(LARGEST)):
            return None
        call, arguments, env, output, cwd = json.loads(request)
        if pid := os.fork():
            children.add(pid)
            requests.send(json.dumps([pid, None]).encode())
            continue
        requests.close()
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        module, name = call.split(":")
        return lambda: getattr(import_module(module), name)(*arguments)


def run_program(code: str, name: str = "<string>") -> None:
    """As ``python -c``, or as of a file of that name."""
    cores = sorted(os.sched_getaffinity(0))  # one of them: threads of BLAS spin where other programs compute
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    sys.argv = ["-c" if name == "<string>" else name]
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, name, "exec"), module.__dict__)


if __name__ == "__main__":
    for module in IMPORTED:
        import_module(module)
    if run := serve(socket.socket(fileno=int(sys.argv[1]))):
        sys.exit(run())
