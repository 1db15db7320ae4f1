"""Ranks of the compiled core: threads of the test, or processes, over one anonymous file."""

import json
import mmap
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kos import _core
from tests.core.group import CoreError, CoreGroup, segment_bytes
from tests.forked import Forked, fork_server

needs_core = pytest.mark.skipif(_core.native is None, reason=str(_core.unavailable))
LIMIT = 60.0  # seconds in which a process ends


class _Interrupted(Exception):
    pass


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """After ``seconds``, a signal handler raises an exception in this block."""

    def handler(*_: Any) -> None:
        raise _Interrupted

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with pytest.raises(_Interrupted):
            yield
    finally:
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def segment(size: int) -> Iterator[int]:
    """The descriptor of a file for the memory of so many ranks."""
    file = os.memfd_create("kos-core-test")
    os.ftruncate(file, segment_bytes(size))
    try:
        yield file
    finally:
        os.close(file)


def group(file: int, rank: int, size: int, **options: Any) -> CoreGroup:
    return CoreGroup(mmap.mmap(file, segment_bytes(size)), rank, size, **options)


@contextmanager
def groups(size: int, **options: Any) -> Iterator[list[CoreGroup]]:
    """The groups of all ranks, in this process."""
    with segment(size) as file:
        made = [group(file, rank, size, **options) for rank in range(size)]
        yield made
        for each in made:
            each.close()


def together(prepared: Sequence[Any], arrays: Sequence[Sequence[Any]]) -> None:
    """One call of all ranks, from one thread."""
    works = [call.start(*each) for call, each in zip(prepared, arrays, strict=True)]
    while works:
        works = [work for work in works if not work.done()]


def run_process(function: str, path: str, rank: int, size: int, output: str, arguments: list[Any]) -> None:
    """A process of ``on_processes``: writes what the function returned or raised as JSON."""
    file = os.open(path, os.O_RDWR)
    module, name = function.split(":")
    made = group(file, rank, size, spin=20e-6 if size <= len(os.sched_getaffinity(0)) else 0.0)
    try:
        result: Any = getattr(import_module(module), name)(made, *arguments)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    Path(output).write_text(json.dumps(result))
    made.close()


def on_processes(size: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What ``function(group, *arguments)`` returned, or its error as text; None of a rank that was killed."""
    name = f"tests.core.{function.__module__.rpartition('.')[2]}:{function.__name__}"
    ranks = list[Forked]()
    results = [folder / f"{rank}.json" for rank in range(size)]
    with segment(size) as file:
        path = f"/proc/{os.getpid()}/fd/{file}"
        for rank in range(size):
            call = [name, path, rank, size, str(results[rank]), list(arguments)]
            ranks.append(fork_server().start(f"{__name__}:run_process", call, os.environ, folder / f"{rank}.log"))
        try:
            for rank in ranks:
                rank.wait(LIMIT)
        finally:
            for rank in ranks:
                rank.kill()
    for rank in range(size):
        log = (folder / f"{rank}.log").read_text()
        assert not log, f"rank {rank}: {log}"
    return [json.loads(result.read_text()) if result.exists() else None for result in results]


def said_by_a_child(group: CoreGroup, calls: Sequence[Callable[[], Any]], beside: Callable[[], Any]) -> str:
    """The kinds of CoreError that ``calls`` raise in a forked child; the parent runs ``beside`` after its end."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        said = set()
        for call in calls:
            try:
                call()
            except CoreError as error:
                said.add(error.kind)
        os.write(writer, "\n".join(said).encode())
        group.close()
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    beside()
    with os.fdopen(reader) as pipe:
        return pipe.read()
