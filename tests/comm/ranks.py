"""Run one test function on every rank of a group, whatever the ranks are: threads, processes, or ranks of mpirun.

A failed assertion on one rank must not leave the other ranks waiting. ``run`` catches it, and the ranks exchange their
outcomes. Then every rank fails, with the messages of all ranks that failed.
"""

import contextlib
import functools
import inspect
import itertools
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import kos
from kos._core import native
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.errors import RankLost
from kos.testing import spawn
from kos.testing.conformance.failures import SHORT, Scenario, check
from kos.testing.conformance.values import ALL_DTYPES, SIZES, assert_bits, assert_same_on_all_ranks, inputs, poison

__all__ = ["ALL_DTYPES", "SIZES", "assert_bits", "assert_same_on_all_ranks", "inputs", "poison"]

TIMEOUT = 30.0  # seconds
HANG = 240.0  # seconds, less than pytest gives a test; each wait of a rank, and of a kernel, has a limit of its own


def until(found: Callable[[], Any], seconds: float = TIMEOUT) -> Any:
    """What ``found`` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (what := found()):
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.001)
    return what


@contextlib.contextmanager
def no_file_may_be_opened() -> Iterator[None]:
    """Meanwhile this process has as many files open as it may have."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.open("/dev/null", os.O_RDONLY))  # the lowest number that no file has
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, usual[1]))
    try:
        with mock.patch("resource.setrlimit"):  # as if this were the hard limit
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


SIZE = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE")
"""Under mpirun, the number of ranks."""
_JOBS = (("2", True), ("4", True), ("3", True), ("2", False))  # of `make test-all`: ranks, with the compiled core


def split_among_jobs(cases: Iterable[Any], parts: int) -> list[Any]:
    """The ``cases`` that this job of mpirun checks.

    With 4 ``parts``, each of ``_JOBS`` checks another quarter.  With 2, the first two jobs check one half each, and so
    do the last two.  Any other job checks all cases.  Without mpirun, there are none.
    """
    if SIZE is None:
        return []
    job = SIZE, native is not None
    return [*cases][_JOBS.index(job) % parts :: parts] if job in _JOBS else [*cases]


def host_of(rank: int) -> str:
    """The ``KOS_HOST`` of a rank; fixtures replace this function."""
    return ""


def host_names(hosts: Sequence[int]) -> list[str]:
    """The name of each rank's host: so many ranks are on a first host, on a second one, and so on."""
    return [f"host {host}" for host, count in enumerate(hosts) for _ in range(count)]


def on_hosts(monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int]) -> None:
    """Let so many ranks pretend to be on each host."""
    monkeypatch.setattr("tests.comm.ranks.host_of", host_names(hosts).__getitem__)


class MockRanks:
    """Ranks that are threads."""

    def __init__(self, size: int, hosts: Sequence[int] = ()) -> None:
        self.size, self._hosts = size, hosts

    def run(self, fn: Callable[[kos.Communicator], Any]) -> list[Any]:
        """What ``fn(comm)`` returned on each rank."""
        return spawn(fn, self.size, timeout=TIMEOUT, hosts=self._hosts)


class MPIRanks:
    """The ranks of the mpirun that runs this pytest."""

    def __init__(self, world: kos.Communicator) -> None:
        self._world = world
        self.size = world.size

    def run(self, fn: Callable[[kos.Communicator], Any]) -> list[Any]:
        """``fn(comm)`` of this rank in its place; what is compared across ranks goes through the group."""
        # Its own communicator: a failure leaves the world's fit for the next test.
        comm = self._start()
        comm.timeout = comm.rendezvous.timeout = TIMEOUT
        result, failure = None, b""
        try:
            result = fn(comm)
        except BaseException:
            failure = traceback.format_exc().encode()
            comm.abort()
        failures = self._world.rendezvous.allgather(failure)
        if any(failures):  # all of them: the lowest may only have waited for one that failed
            told = ((rank, text.decode()) for rank, text in enumerate(failures) if text)
            raise AssertionError("\n".join(f"rank {rank} of {self.size} failed:\n{text}" for rank, text in told))
        comm.close()
        results = [None] * self.size
        results[self._world.rank] = result
        return results

    def _start(self) -> kos.Communicator:
        if not (name := host_of(self._world.rank)):
            return self._world.duplicate()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KOS_HOST", name)
            return kos.init("mpi")


def on_threads(
    size: int, fn: Callable[[ThreadControlPlane], Any], timeout: float = 60.0, when_one_fails: Callable[[], Any] = list
) -> list[Any]:
    """What ``fn(rendezvous)`` returned on each rank, a thread; a failure of one ends the waits of the others.

    Each wait of a rank lasts ``timeout`` seconds at most.  A rank may take longer: it may compile kernels for the host.
    """
    group, results, failures = ThreadGroup(size), [None] * size, list[str]()

    def rank(index: int) -> None:
        try:
            results[index] = fn(ThreadControlPlane(group, index, timeout))
        except BaseException:
            failures.append(f"rank {index} of {size} failed:\n{traceback.format_exc()}")
            when_one_fails()
            group.fail(RankLost("another rank failed"))

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive() or failures, "a rank hangs"
    assert not failures, failures[0]
    return results


def on_each_rank(run: str | Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
    """Every rank runs the test that this decorates, by ``run(test, *arguments, **options)``.

    The test takes what ``run`` gives a rank, then a ``/``, then fixtures.  ``run`` may name a fixture, or a method of
    one: "ranks.run".
    """
    fixture, _, method = run.partition(".") if isinstance(run, str) else ("", "", "")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        parameters = [p for p in inspect.signature(test).parameters.values() if p.kind is not p.POSITIONAL_ONLY]
        if fixture:
            parameters.insert(0, inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD))
        signature = inspect.Signature(parameters)

        @functools.wraps(test)
        def on_all(*given: Any, **fixtures: Any) -> None:
            values = signature.bind(*given, **fixtures).arguments
            start: Any = run
            if fixture:
                start = values.pop(fixture)
                start = getattr(start, method) if method else start
            start(lambda *of_rank: test(*of_rank, **values), *arguments, **options)

        on_all.__signature__ = signature
        return on_all

    return decorate


def time_is_up(monkeypatch: pytest.MonkeyPatch, state: Callable[[], bool]) -> None:
    """The timeout of ``spawn`` passes when this state is reached, and not before; its ranks have none of their own."""
    asked = itertools.count()

    def monotonic() -> float:
        return 1e6 if next(asked) and until(state) else 0.0

    def patient(backend: str, rendezvous: ThreadControlPlane, timeout: float) -> kos.Communicator:
        rendezvous.timeout = TIMEOUT
        return kos.init(backend, rendezvous=rendezvous, timeout=TIMEOUT)

    monkeypatch.setattr("kos.testing.time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr("kos.testing.init", patient)
    monkeypatch.setattr("kos.testing.ERROR_SECONDS", TIMEOUT)


def check_scenario(run: Callable[[Any], Any], row: Scenario, size: int = 3, limit: float = SHORT) -> None:
    """Check a row of the table of failures on ranks that are threads: ``run(fn)`` runs ``fn(comm)`` on each."""
    meeting = threading.Barrier(size)

    def body(comm: Any) -> None:
        try:
            check(comm, row, limit, meet=lambda *_: meeting.wait(2 * TIMEOUT))
        except BaseException:
            meeting.abort()
            raise

    run(body)
