"""Processes that start within milliseconds: forked from one that has imported kos and done nothing else.

A fresh Python computes for half a second until it has imported kos.  A `ForkServer` does so once; each process that
it starts is then a copy, with an environment, a session and streams of its own, and ends as any Python does, exit
handlers included.  No GPU has been touched before the fork, and MPI has not been loaded.

A client connects, sends what to run with its standard streams, and receives the process's id and later its exit code.
The process is killed if the client closes its connection earlier.
"""

import ast
import contextlib
import gc
import os
import runpy
import secrets
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
IMPORTED = (
    "numpy", "kos.comm.communicator", "kos.comm.host.mpi", "kos.comm.host.tcp", "kos.comm.gpu.backend", "kos.memory",
    "kos.train.config.flags", "kos.train.trainer", "kos.train.device.cpu", "tests.faults",
)  # fmt: skip
LARGEST = 1 << 17  # bytes of a message


def remove_session(mpirun: int) -> None:
    """Remove the files of a killed mpirun of Open MPI 5.  A later one with its process id would not start."""
    shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{mpirun}"), ignore_errors=True)


class Forked:
    """A process of a ForkServer, with the methods of a ``Popen``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(self._connection.recv(LARGEST))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code (less than 0: the signal that ended it), None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = int(self._connection.recv(LARGEST))
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Starts processes.  May be used by several threads.

    The server and the processes that it started end with the process that made the server.
    """

    def __init__(self) -> None:
        self.name = f"kos-forked-{os.getpid()}-{secrets.token_hex(4)}"  # of an abstract socket
        self._owner, theirs = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{self.name}")
        listener.listen(64)
        env = {**os.environ, "PYTHONPATH": PATHS, "OPENBLAS_NUM_THREADS": "1"}
        with theirs, listener:
            given = [theirs.fileno(), listener.fileno()]
            command = [sys.executable, "-m", "tests.forked", *map(str, given)]
            self._process = subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=given)

    def start(
        self, call: str, arguments: Sequence[Any], env: Mapping[str, str], output: Path, cwd: Path = ROOT
    ) -> Forked:
        """Run ``call``, "module:function", on those arguments (literals); stdout and stderr are added to a file."""
        request = repr([call, list(arguments), dict(env), str(cwd)]).encode()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(f"\0{self.name}")
        with open(os.devnull) as nothing, open(output, "ab") as log:
            socket.send_fds(connection, [request], [nothing.fileno(), log.fileno(), log.fileno()])
        return Forked(connection)


_only_server = cache(ForkServer)
_starting = threading.Lock()


def fork_server() -> ForkServer:
    """That of this process, the same for all threads."""
    with _starting:
        return _only_server()


def python() -> list[str]:
    """What stands for ``python`` in a command, for a program that need not start as a Python of its own."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("as_forked.py")), fork_server().name]


def as_program(path: Path, *arguments: str) -> str:
    """A file at ``path`` that stands for ``python ARGUMENTS…``, for what starts one program by its name."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*python(), *arguments])} "$@"\n')
    path.chmod(0o755)
    return str(path)


def serve(owner: socket.socket, listener: socket.socket) -> Callable[[], Any] | None:
    """Fork for each request; returns in the new process, with what it runs, or None when the owner is gone."""
    running = dict[int, tuple[int, socket.socket]]()  # by a descriptor of the process
    while True:
        clients = {connection: process for process, (_, connection) in running.items()}
        ready = select.select([owner, listener, *running, *clients], [], [])[0]
        if owner in ready:  # it has ended, or it was killed
            for pid, _ in running.values():
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:  # it has no session yet
                    os.kill(pid, signal.SIGKILL)
            return None
        for each in ready:
            if each in clients and clients[each] in running:
                os.kill(running[clients[each]][0], signal.SIGKILL)
                os.waitpid(running[clients[each]][0], 0)
            elif each in running:
                status = os.waitpid(running[each][0], 0)[1]
                with contextlib.suppress(OSError):
                    running[each][1].send(str(os.waitstatus_to_exitcode(status)).encode())
            else:
                continue
            process = clients.get(each, each)
            running.pop(process)[1].close()
            os.close(process)
        if listener not in ready:
            continue
        connection = listener.accept()[0]
        request, streams, _, _ = socket.recv_fds(connection, LARGEST, 3)
        if not request:
            continue
        if pid := os.fork():
            running[os.pidfd_open(pid)] = pid, connection
            with contextlib.suppress(OSError):
                connection.send(str(pid).encode())
            for stream in streams:
                os.close(stream)
            continue
        for process, (_, other) in running.items():
            os.close(process)
            other.close()
        for each in (owner, listener, connection):
            each.close()
        call, arguments, env, cwd = ast.literal_eval(request.decode())
        os.setsid()
        cores = sorted(os.sched_getaffinity(0))  # one of them: threads of BLAS spin where other programs compute
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        module, name = call.split(":")
        return lambda: getattr(import_module(module), name)(*arguments)


def run_program(code: str, name: str = "<string>", arguments: Sequence[str] = ()) -> None:
    """As ``python -c``, or as of a file of that name."""
    sys.argv = ["-c" if name == "<string>" else name, *arguments]
    module = sys.modules["__main__"] = ModuleType("__main__")
    if name != "<string>":
        module.__file__ = name
    exec(compile(code, name, "exec"), module.__dict__)


def run_command(*command: str) -> None:
    """As ``python COMMAND…``, of which it knows -c, -m and a file."""
    what, *arguments = command
    if what == "-c":
        run_program(arguments[0], arguments=arguments[1:])
    elif what == "-m":
        sys.argv = arguments
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # the server has imported it
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        run_program(Path(what).read_text(), what, arguments)


if __name__ == "__main__":
    for module in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # of an extra: a process that needs it raises
            import_module(module)
    gc.collect()
    gc.freeze()  # what is here stays; a process that looked through it would copy its pages
    if run := serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))):
        sys.exit(run())
